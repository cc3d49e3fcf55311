//! How the settings of a kind are read, and which kinds there are.

use super::common::Decoder;
use crate::drafter::{Drafter, Settings};
use crate::fields::Fields;
use crate::{CheckpointError, CheckpointFormat, Family, Tensors};

/// How a kind's settings are read in each layout that has them.
pub struct Reader {
    /// Its classes in the reference's layout, behind a family's prefix.
    pub class: &'static str,
    /// Its keys in that layout.
    pub keys: &'static [&'static str],
    /// Its settings in that layout.
    pub reference: fn(&Fields, &Decoder) -> Result<Settings, CheckpointError>,
    /// Its model types in the speculators package.
    pub model_types: &'static [&'static str],
    /// Its settings there. What no other layout can say is added to the decoder's obstacles.
    pub speculators: fn(&Fields, &mut Decoder) -> Result<Settings, CheckpointError>,
    /// Its classes in the layouts of other tools.
    pub classes: &'static [ExternalClass],
}

/// Reads a drafter with layers of one of these families, and tells its dialect.
type ReadForeign = fn(&Fields, &Tensors, &[Family]) -> Result<(CheckpointFormat, Drafter), CheckpointError>;

/// A class of drafters in the layouts of z-lab, SpecForge or ModelOpt.
pub struct ExternalClass {
    /// Its name.
    pub name: &'static str,
    /// The tools that write it.
    pub tools: &'static str,
    /// Reads a drafter whose config is of this class.
    pub read: ReadForeign,
}

/// Which drafters are known.
#[derive(Clone, Copy)]
pub struct Known<'a> {
    /// Their kinds.
    pub kinds: &'a [&'a Reader],
    /// The families of their layers.
    pub families: &'a [Family],
}
