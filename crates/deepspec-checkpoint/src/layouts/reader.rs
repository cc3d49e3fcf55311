//! Readers of the settings of each drafter kind.

use super::block_options::CAUSAL_KEYS;
use super::common::Decoder;
use crate::drafter::{Drafter, Settings};
use crate::fields::Fields;
use crate::{CheckpointError, CheckpointFormat, Family, Tensors};

/// Reads the settings of one drafter kind in each format.
pub struct Reader {
    /// Class name in the reference implementation's checkpoints, without the family prefix:
    /// `Eagle3Model`.
    pub class: &'static str,
    /// Config keys of the kind in these checkpoints.
    pub keys: &'static [&'static str],
    /// Reads the settings from these checkpoints.
    pub reference: fn(&Fields, &Decoder) -> Result<Settings, CheckpointError>,
    /// Model types of the kind in the speculators package; empty if it does not know the kind.
    pub model_types: &'static [&'static str],
    /// Reads the settings of the speculators format, and adds settings that no other format can
    /// express to the decoder's incompatibilities.
    pub speculators: fn(&Fields, &mut Decoder) -> Result<Settings, CheckpointError>,
    /// Class names of the kind in the formats of other tools.
    pub classes: &'static [ExternalClass],
}

impl Reader {
    /// Whether drafters of this kind may have causal blocks, attention sinks, and windows by `use_swa`.
    pub fn has_block_options(&self) -> bool {
        CAUSAL_KEYS.iter().all(|key| self.keys.contains(key))
    }
}

/// Reads a drafter with layers of one of these families, and detects its format.
type ReadExternalClass =
    fn(&Fields, &Tensors, &[Family]) -> Result<(CheckpointFormat, Drafter), CheckpointError>;

/// A drafter class in the formats of z-lab, SpecForge or ModelOpt.
pub struct ExternalClass {
    /// Class name.
    pub name: &'static str,
    /// The tools that write it.
    pub tools: &'static str,
    /// Reads a drafter whose config names this class.
    pub read: ReadExternalClass,
    /// Prefix of tensor names that only this class has. Then a config that names the class of a language model is read too.
    pub tensor_prefix: Option<&'static str>,
}

/// The known drafter kinds and model families.
#[derive(Clone, Copy)]
pub struct KnownDrafters<'a> {
    /// Drafter kinds.
    pub kinds: &'a [&'a Reader],
    /// Model families of the draft layers.
    pub families: &'a [Family],
}
