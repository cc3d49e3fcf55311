//! Checkpoint formats and their tensor names.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::drafter::KindSettings;

/// A checkpoint format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckpointFormat {
    /// The format of DeepSpec and of this project.
    Reference,
    /// vllm-project/speculators.
    Speculators,
    /// sgl-project/SpecForge.
    Specforge,
    /// z-lab/dflash.
    #[serde(rename = "z-lab")]
    Zlab,
    /// NVIDIA Model-Optimizer.
    Modelopt,
    /// A DeepSeek-V4 that holds its drafter, as DeepSeek releases it. It is written by merging, and not by conversion.
    DeepseekV4,
}

impl CheckpointFormat {
    /// All formats that conversion writes.
    pub const ALL: [Self; 5] =
        [Self::Reference, Self::Speculators, Self::Specforge, Self::Zlab, Self::Modelopt];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reference => "reference",
            Self::Speculators => "speculators",
            Self::Specforge => "specforge",
            Self::Zlab => "z-lab",
            Self::Modelopt => "modelopt",
            Self::DeepseekV4 => "deepseek-v4",
        }
    }

    /// Whether checkpoints of the format contain the target's embedding and LM head.
    pub fn has_embed_and_head(self) -> bool {
        matches!(self, Self::Reference | Self::Speculators | Self::DeepseekV4)
    }

    /// Whether two tensors of a layer hold all its experts. Otherwise each expert has tensors of its own.
    pub(crate) fn stacks_experts(self) -> bool {
        self == Self::Speculators
    }

    /// Converts a tensor name of this format to the reference's.
    pub(crate) fn to_reference_name(self, kind: &dyn KindSettings, name: &str) -> String {
        let renamed =
            |(theirs, ours): &(&str, &str)| name.strip_prefix(theirs).map(|rest| format!("{ours}{rest}"));
        self.renames(kind).find_map(renamed).unwrap_or_else(|| name.into())
    }

    /// Converts a tensor name of the reference's format to this format's.
    pub(crate) fn to_format_name(self, kind: &dyn KindSettings, name: &str) -> String {
        let renamed =
            |(theirs, ours): &(&str, &str)| name.strip_prefix(ours).map(|rest| format!("{theirs}{rest}"));
        self.renames(kind).find_map(renamed).unwrap_or_else(|| name.into())
    }

    /// Renamed tensor name prefixes, as (prefix in this format, prefix in the reference's). The
    /// kind's own pairs come first.
    fn renames(self, kind: &dyn KindSettings) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
        kind.renames(self).iter().chain(self.format_renames())
    }

    fn format_renames(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Modelopt => &[
                ("markov_w1.", "markov_head.markov_w1."),
                ("markov_w2.", "markov_head.markov_w2."),
                ("gate_proj.", "markov_head.gate_proj."),
                ("joint_proj.", "markov_head.joint_proj."),
                ("confidence_proj.", "confidence_head.proj."),
            ],
            _ => &[],
        }
    }
}

impl fmt::Display for CheckpointFormat {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for CheckpointFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|format| format.name() == name);
        found.ok_or_else(|| {
            format!("`{name}` is no format; expected {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}
