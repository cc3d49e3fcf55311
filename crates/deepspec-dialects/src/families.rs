//! Families of decoders, as far as their names go: for those who read checkpoints without computing with them, and for the models.

use std::fmt;

use serde::{Serialize, Serializer};

/// A family of decoders: language models, and the layers of drafters that are built like theirs.
#[derive(Debug, PartialEq, Eq)]
pub struct DecoderFamily {
    /// Names it to people.
    pub name: &'static str,
    /// Begins the classes of drafters with such layers, as in `Qwen3DSparkModel`.
    pub prefix: &'static str,
    /// What `model_type` of its configs says.
    pub model_types: &'static [&'static str],
    /// Whether its layers have norms before attention and MLP, and none behind them.
    pub pre_norm: bool,
    /// Whether queries and keys are RMS-normed per head.
    pub qk_norm: bool,
}

/// One of [`FAMILIES`].
pub type Family = &'static DecoderFamily;

/// Qwen3, dense.
pub static QWEN3: DecoderFamily =
    DecoderFamily { name: "Qwen3", prefix: "Qwen3", model_types: &["qwen3"], pre_norm: true, qk_norm: true };

/// Gemma 4, dense; its text part.
pub static GEMMA4: DecoderFamily = DecoderFamily {
    name: "Gemma 4",
    prefix: "Gemma4",
    model_types: &["gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"],
    pre_norm: false,
    qk_norm: true,
};

/// Llama 2 and 3, and what is built like them.
pub static LLAMA: DecoderFamily =
    DecoderFamily { name: "Llama", prefix: "Llama", model_types: &["llama"], pre_norm: true, qk_norm: false };

/// All of them.
pub static FAMILIES: [Family; 3] = [&QWEN3, &GEMMA4, &LLAMA];

impl fmt::Display for DecoderFamily {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl Serialize for DecoderFamily {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.prefix.to_lowercase())
    }
}
