//! Families of decoders, as far as those need who read checkpoints without computing with them. Which there are, the models know.

use std::fmt;

use serde::{Serialize, Serializer};
use serde_json::Value;

/// A family of decoders: language models, and the layers of drafters that are built like theirs.
#[derive(Debug)]
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
    /// What transformers puts in the place of keys that are missing in its configs.
    pub defaults: fn() -> Vec<(&'static str, Value)>,
}

/// A family that its own file announces.
pub type Family = &'static DecoderFamily;

impl PartialEq for DecoderFamily {
    fn eq(&self, other: &Self) -> bool {
        self.prefix == other.prefix
    }
}

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
