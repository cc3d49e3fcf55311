//! Descriptions of a drafter kind for checkpoint formats and engines.

use crate::gguf::Value as GgufValue;
use serde_json::{Map, Value};

/// Names and config keys of a drafter kind in the format of the speculators package.
pub struct Speculators {
    /// Model type.
    pub model_type: &'static str,
    /// Class.
    pub class: &'static str,
    /// Config key of the captured layer ids. None for a drafter that is a layer of its target (MTP): it
    /// captures no layers, has the target's vocabulary, and its decoder is described by the target's
    /// config, with the target's number of layers.
    pub taps: Option<&'static str>,
    /// Config keys of the kind.
    pub keys: Map<String, Value>,
}

/// Class and config keys of a drafter kind in the config of z-lab, SpecForge and ModelOpt.
pub struct DflashConfigKeys {
    /// Class.
    pub class: &'static str,
    /// Top-level keys.
    pub top: Map<String, Value>,
    /// Keys of `dflash_config`.
    pub inner: Map<String, Value>,
}

/// Metadata key of the base of the rotary frequencies, without the architecture prefix.
pub const ROPE_BASE_KEY: &str = "rope.freq_base";

/// Names and metadata of a drafter in llama.cpp's GGUF format.
#[derive(Debug, Default)]
pub struct GgufParts {
    /// `general.architecture`.
    pub architecture: &'static str,
    /// Metadata keys of the kind, without the architecture prefix. They precede those that the decoder's config gives. With
    /// [`ROPE_BASE_KEY`], the kind has rotary embeddings of its own, which are not scaled.
    pub keys: Vec<(&'static str, GgufValue)>,
    /// Names of the kind's tensors in the reference and in llama.cpp.
    pub names: Vec<(&'static str, &'static str)>,
    /// Names of the kind's layer tensors, without the prefixes `layers.i.` and `blk.i.`. One tensor holds all experts: `ffn.experts.w1`
    /// names `ffn.experts.0.w1` and those of the other experts.
    pub layer_names: Vec<(&'static str, &'static str)>,
    /// Additional tensors of zeros that llama.cpp requires.
    pub zeros: Vec<(&'static str, Vec<usize>)>,
    /// Whether llama.cpp stores the rows of a RoPE pair of queries and keys next to each other.
    pub interleaved_rope: bool,
}

impl GgufParts {
    /// Whether the kind has rotary embeddings of its own.
    pub(crate) fn has_own_rope(&self) -> bool {
        self.keys.iter().any(|(key, _)| *key == ROPE_BASE_KEY)
    }
}

/// Builds a JSON map of these keys and values.
pub fn json_map<const N: usize>(pairs: [(&str, Value); N]) -> Map<String, Value> {
    pairs.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
}
