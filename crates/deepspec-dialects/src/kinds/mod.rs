//! Kinds of drafters, as checkpoints say them in any layout: a file each, and a line in [`KINDS`].

mod block;
mod dflash2;
mod eagle3;

use std::fmt;
use std::sync::Arc;

use deepspec_gguf::Value as GgufValue;
use serde_json::{Map, Value};

pub use block::{Block, block_size, confidence, markov, mask_token};
pub use dflash2::DFlash2;
pub use eagle3::Eagle3;

use crate::drafter::Drafter;
use crate::families::QWEN3;
use crate::fields::Fields;
use crate::layouts::Decoder;
use crate::shapes::Shapes;
use crate::{Dialect, DialectError, Family};

/// All kinds, in the order in which messages name them.
pub static KINDS: [&Reader; 3] = [&block::READER, &eagle3::READER, &dflash2::READER];

/// How a kind's settings are read.
pub struct Reader {
    /// Its classes in the reference's layout, behind a family's prefix.
    pub class: &'static str,
    /// Its settings in that layout.
    pub reference: fn(&Fields, &Decoder) -> Result<Settings, DialectError>,
    /// Its model types in the speculators package.
    pub model_types: &'static [&'static str],
    /// Its settings there. What no other layout can say is added to the decoder's obstacles.
    pub speculators: fn(&Fields, &mut Decoder) -> Result<Settings, DialectError>,
}

/// The settings of a drafter that its kind has and others have not.
pub type Settings = Arc<dyn KindSettings>;

/// What layouts, engines and people are told of a kind.
pub trait KindSettings: fmt::Debug + Send + Sync {
    /// Names the kind to programs.
    fn name(&self) -> &'static str;

    /// Names the kind to people.
    fn title(&self) -> &'static str;

    /// Drafted tokens per cycle.
    fn drafted(&self) -> u64;

    /// What stands for tokens that are to be predicted, where something does.
    fn mask_token_id(&self) -> Option<u64> {
        None
    }

    /// Whether slots of a block say what stands in them, the anchor's own drafting nothing.
    fn fills_in(&self) -> bool {
        false
    }

    /// What vLLM calls its way of drafting; SGLang writes it in capitals, llama.cpp behind `draft-`.
    fn method(&self) -> &'static str;

    /// What is drafted and by which parts, for people.
    fn lines(&self) -> Vec<(&'static str, String)>;

    /// The settings, for programs.
    fn to_json(&self) -> Value;

    /// Whether such layers mean the same in other tools as here.
    fn has_layers_of(&self, family: Family) -> bool {
        family == &QWEN3
    }

    /// Width of what a layer's attention reads, in hidden sizes.
    fn layer_inputs(&self) -> usize {
        1
    }

    /// Adds the tensors that the kind has beside fusion, final norm and what all layers have.
    fn tensors(&self, drafter: &Drafter, shapes: &mut Shapes);

    /// Why this drafter cannot be said in `to`.
    fn refusal(&self, drafter: &Drafter, to: Dialect) -> Option<String>;

    /// Its class in the reference's layout, behind the family's prefix, and its keys there.
    fn reference(&self, drafter: &Drafter) -> (&'static str, Map<String, Value>);

    /// How the speculators package says it.
    fn speculators(&self) -> Speculators;

    /// How the container of z-lab, SpecForge and ModelOpt says it; only for dialects that [`KindSettings::refusal`] lets pass.
    fn container(&self, _to: Dialect) -> Option<Container> {
        None
    }

    /// In which layout vLLM and SGLang load it.
    ///
    /// # Errors
    /// Why they do not.
    fn engine_layout(&self, engine: Engine) -> Result<EngineLayout, String>;

    /// How llama.cpp's GGUF says it.
    ///
    /// # Errors
    /// Why it cannot.
    fn gguf(&self, drafter: &Drafter) -> Result<GgufParts, String>;

    /// Whether vLLM loads it in this dialect, and how, or why not.
    fn vllm(&self, dialect: Dialect) -> Verdict;

    /// Whether SGLang loads it in this dialect, and how, or why not.
    fn sglang(&self, dialect: Dialect) -> Verdict;
}

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
    const fn tried(loads: bool, note: &'static str) -> Self {
        Self { loads, note, tried: true }
    }

    /// By the engine's sources.
    const fn read(loads: bool, note: &'static str) -> Self {
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
    Dialect(Dialect),
    /// The one for blocks whose slots all draft, which vLLM, SGLang and llama.cpp's converter read alike.
    Anchored,
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

impl GgufParts {
    /// Those of a drafter behind anchors, which has nothing of its own yet.
    fn behind_anchors() -> Self {
        Self { architecture: "dflash", ..Self::default() }
    }
}

/// A map of these keys.
fn keys<const N: usize>(pairs: [(&str, Value); N]) -> Map<String, Value> {
    pairs.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
}
