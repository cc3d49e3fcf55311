//! What decides every byte of a file of tokenised samples.

use std::path::PathBuf;

use deepspec_core::atomic::FileError;
use deepspec_core::digest;
use deepspec_text::MIN_SUPERVISED_TOKENS;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::TargetSpec;

/// Raised when the file's layout or the way to its samples changes.
const FORMAT: u32 = 2;

/// Inputs, rules and program: with the same ones the same samples come out. Neither the layers that are tapped nor the drafter matter, so
/// recipes for one target share a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SamplesIdentity {
    format: u32,
    /// The program that tokenised.
    version: String,
    tokenizer: String,
    /// What the template writes and what of it is supervised.
    template: String,
    system_prompt: Option<String>,
    max_length: usize,
    min_supervised: usize,
    /// Rows of the target's embedding: conversations with ids behind them are rejected.
    vocab_size: usize,
    /// In their order.
    inputs: Vec<Input>,
}

/// A file of conversations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    sha256: String,
    /// The end of its name, which says whether it is compressed.
    extension: String,
}

impl SamplesIdentity {
    /// Reads `files` through.
    pub fn of(files: &[PathBuf], source: &TargetSpec) -> Result<Self, FileError> {
        let input = |path: &PathBuf| {
            let extension = path.extension().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
            Ok(Input { sha256: digest::file(path)?, extension })
        };
        Ok(Self {
            format: FORMAT,
            version: env!("CARGO_PKG_VERSION").into(),
            tokenizer: source.identity.tokenizer.clone(),
            template: source.identity.template.clone(),
            system_prompt: source.identity.system_prompt.clone(),
            max_length: source.identity.max_length,
            min_supervised: MIN_SUPERVISED_TOKENS,
            vocab_size: source.identity.vocab_size,
            inputs: files.par_iter().map(input).collect::<Result<_, FileError>>()?,
        })
    }

    /// The name of its file, without an extension.
    pub fn name(&self) -> String {
        // An identity is plain data, which always has a JSON form.
        let text = serde_json::to_vec(self).unwrap_or_default();
        format!("{:032x}", digest::fingerprint(&text))
    }
}
