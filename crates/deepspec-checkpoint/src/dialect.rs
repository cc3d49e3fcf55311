//! Dialects, and how each names the tensors.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::drafter::KindSettings;

/// A layout of checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckpointFormat {
    /// DeepSpec's and this project's own.
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
}

impl CheckpointFormat {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Reference, Self::Speculators, Self::Specforge, Self::Zlab, Self::Modelopt];

    /// Its name on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reference => "reference",
            Self::Speculators => "speculators",
            Self::Specforge => "specforge",
            Self::Zlab => "z-lab",
            Self::Modelopt => "modelopt",
        }
    }

    /// Whether its checkpoints hold the target's embedding and head.
    pub fn has_embed_and_head(self) -> bool {
        matches!(self, Self::Reference | Self::Speculators)
    }

    /// The reference's name of a tensor of such a drafter.
    pub(crate) fn canonical(self, kind: &dyn KindSettings, name: &str) -> String {
        let renamed =
            |(theirs, ours): &(&str, &str)| name.strip_prefix(theirs).map(|rest| format!("{ours}{rest}"));
        self.renames(kind).find_map(renamed).unwrap_or_else(|| name.into())
    }

    /// What this dialect calls a tensor of the reference.
    pub(crate) fn spelled(self, kind: &dyn KindSettings, name: &str) -> String {
        let renamed =
            |(theirs, ours): &(&str, &str)| name.strip_prefix(ours).map(|rest| format!("{theirs}{rest}"));
        self.renames(kind).find_map(renamed).unwrap_or_else(|| name.into())
    }

    /// Prefixes of this dialect and of the reference, those of the kind alone first.
    fn renames(self, kind: &dyn KindSettings) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
        kind.renames(self).iter().chain(self.own_renames())
    }

    fn own_renames(self) -> &'static [(&'static str, &'static str)] {
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
        let found = Self::ALL.into_iter().find(|dialect| dialect.name() == name);
        found.ok_or_else(|| {
            format!("`{name}` is no dialect; expected {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}
