//! Identity of a file of tokenised samples: all inputs that determine its bytes.

use std::path::PathBuf;

use deepspec_core::atomic::FileError;
use deepspec_core::digest;
use deepspec_text::MIN_SUPERVISED_TOKENS;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::TargetSpec;

/// Version of the file's layout and of the tokenisation; a change gives the file another name.
const SAMPLES_FORMAT_VERSION: u32 = 2;

/// Inputs, rules and program version, which determine the samples. Captured layers and the drafter
/// do not matter, so recipes for one target share a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SamplesIdentity {
    format: u32,
    /// Version of the program.
    version: String,
    tokenizer: String,
    /// Digest of the chat template and its supervision rules.
    template: String,
    system_prompt: Option<String>,
    max_length: usize,
    min_supervised: usize,
    /// Rows of the target's embedding: conversations with larger token ids are rejected.
    vocab_size: usize,
    /// The input files, in order.
    inputs: Vec<InputFile>,
}

/// Identity of a file of conversations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct InputFile {
    sha256: String,
    /// File extension, which shows the compression.
    extension: String,
}

impl SamplesIdentity {
    /// Digests the content of `files`.
    pub fn from_files(files: &[PathBuf], source: &TargetSpec) -> Result<Self, FileError> {
        let input = |path: &PathBuf| {
            let extension = path.extension().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
            Ok(InputFile { sha256: digest::sha256_of_file(path)?, extension })
        };
        Ok(Self {
            format: SAMPLES_FORMAT_VERSION,
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

    /// Name of the samples' file, without an extension.
    pub fn file_stem(&self) -> String {
        // An identity is plain data, which always serializes.
        let text = serde_json::to_vec(self).unwrap_or_default();
        format!("{:032x}", digest::fingerprint(&text))
    }
}
