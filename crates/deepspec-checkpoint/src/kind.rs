//! What layouts and engines are told of a drafter by its kind.

use crate::gguf::Value as GgufValue;
use serde_json::{Map, Value};

use crate::CheckpointFormat;

/// What the speculators package says of a kind.
pub struct Speculators {
    /// Its model type.
    pub model_type: &'static str,
    /// Its class.
    pub class: &'static str,
    /// The key of its taps.
    pub taps: &'static str,
    /// Its own keys.
    pub keys: Map<String, Value>,
}

/// What the container of z-lab, SpecForge and ModelOpt says of a kind.
pub struct Container {
    /// Its class.
    pub class: &'static str,
    /// Its keys at the top.
    pub top: Map<String, Value>,
    /// Its keys within `dflash_config`.
    pub inner: Map<String, Value>,
}

/// Whether an engine loads a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// Whether it does.
    pub loads: bool,
    /// How, or why not.
    pub note: &'static str,
    /// Whether that was tried; else its sources say so.
    pub tried: bool,
}

impl Verdict {
    /// By trial with the version that [`crate::loaders`] names.
    pub const fn tried(loads: bool, note: &'static str) -> Self {
        Self { loads, note, tried: true }
    }

    /// By the engine's sources.
    pub const fn read(loads: bool, note: &'static str) -> Self {
        Self { loads, note, tried: false }
    }
}

/// An engine that loads checkpoint folders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
}

impl Engine {
    /// Its name.
    pub fn title(self) -> &'static str {
        match self {
            Self::Vllm => "vLLM",
            Self::Sglang => "SGLang",
        }
    }
}

/// The layout in which an engine loads a drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineLayout {
    /// That of a dialect.
    Format(CheckpointFormat),
    /// The one for blocks whose slots all draft, which vLLM, SGLang and llama.cpp's converter read alike.
    SampleFromAnchor,
}

/// What a GGUF of llama.cpp says of a drafter.
#[derive(Debug, Default)]
pub struct GgufParts {
    /// Its `general.architecture`.
    pub architecture: &'static str,
    /// Its own keys, behind the architecture.
    pub keys: Vec<(&'static str, GgufValue)>,
    /// Names of its own tensors here and there.
    pub names: Vec<(&'static str, &'static str)>,
    /// The same of each layer's, behind `layers.i.` and `blk.i.`.
    pub layer_names: Vec<(&'static str, &'static str)>,
    /// Tensors of zeros that it needs beside its own.
    pub zeros: Vec<(&'static str, Vec<usize>)>,
    /// Whether rows of queries and keys that turn together are beside each other there.
    pub in_pairs: bool,
}

/// A map of these keys.
pub fn keys<const N: usize>(pairs: [(&str, Value); N]) -> Map<String, Value> {
    pairs.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
}
