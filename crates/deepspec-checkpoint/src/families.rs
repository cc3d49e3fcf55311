//! Properties of model families that are needed to read checkpoints. The models crate lists the
//! families.

use std::fmt;

use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::experts::EXPERTS_KEY;
use crate::shapes::OUTPUT_GATE_KEY;

/// A family of decoder architectures, for language models and for draft layers.
#[derive(Debug)]
pub struct DecoderFamily {
    /// Human-readable name.
    pub name: &'static str,
    /// Family prefix of drafter class names: `Qwen3` in `Qwen3DSparkModel`.
    pub prefix: &'static str,
    /// Values of `model_type` in its configs.
    pub model_types: &'static [&'static str],
    /// Whether its layers have norms before attention and MLP and none after them.
    pub pre_norm: bool,
    /// Whether queries and keys are RMS-normed per head.
    pub qk_norm: bool,
    /// Config keys with the default values that transformers uses if they are missing.
    pub defaults: fn() -> Vec<(&'static str, Value)>,
}

impl DecoderFamily {
    /// Whether layers of the family may have a gate on attention's output: its defaults then name the key.
    pub fn may_have_output_gate(&self) -> bool {
        self.has_default(OUTPUT_GATE_KEY)
    }

    /// Whether layers of the family have experts: its defaults then name their number.
    pub fn has_experts(&self) -> bool {
        self.has_default(EXPERTS_KEY)
    }

    fn has_default(&self, key: &str) -> bool {
        (self.defaults)().iter().any(|(known, _)| *known == key)
    }
}

/// A reference to a statically defined family.
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
