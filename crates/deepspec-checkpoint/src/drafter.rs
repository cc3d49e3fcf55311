//! A drafter, independent of its checkpoint format.

use std::fmt;
use std::sync::Arc;

use deepspec_core::Tap;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::CheckpointFormat;
use crate::export::{Engine, EngineSupport};
use crate::families::Family;
use crate::kind::{DflashConfigKeys, GgufParts, Speculators};

/// Tensors by name, with their shapes.
pub type Shapes = Vec<(String, Vec<usize>)>;

/// A setting that only this checkpoint's own format can express.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Incompatibility {
    /// Config key or tensor.
    pub key: String,
    /// Why it prevents a conversion.
    pub reason: String,
}

/// A drafter as its checkpoint describes it.
#[derive(Debug, Clone)]
pub struct Drafter {
    /// Class name in the config.
    pub architecture: String,
    /// Model family of its layers.
    pub family: Family,
    /// All known families.
    pub families: Vec<Family>,
    /// The decoder's own config keys; `num_hidden_layers` is the number of draft layers.
    pub decoder: Map<String, Value>,
    /// Hidden size d.
    pub hidden_size: u64,
    /// Vocabulary size V of the target.
    pub vocab_size: u64,
    /// Number of tokens that it can draft, less than V if its vocabulary is pruned.
    pub draft_vocab_size: u64,
    /// Number of draft layers.
    pub layers: u64,
    /// Target layers whose hidden states it reads.
    pub taps: Vec<Tap>,
    /// Number of the target's layers, if the config states it.
    pub num_target_layers: Option<u64>,
    /// Its kind with that kind's settings.
    pub kind: Settings,
    /// Informative keys, such as `num_anchors`.
    pub informative_keys: Map<String, Value>,
    /// Settings that prevent a conversion to any other format.
    pub incompatibilities: Vec<Incompatibility>,
}

/// Settings that are specific to the drafter's kind.
pub type Settings = Arc<dyn KindSettings>;

/// The interface of a drafter kind for formats, engines and reports.
pub trait KindSettings: fmt::Debug + Send + Sync {
    /// Machine-readable name of the kind.
    fn name(&self) -> &'static str;

    /// Human-readable name of the kind.
    fn title(&self) -> &'static str;

    /// Number of drafted tokens per cycle.
    fn drafted(&self) -> u64;

    /// Mask token that fills the positions to predict, if the kind uses one.
    fn mask_token_id(&self) -> Option<u64> {
        None
    }

    /// Whether a block position predicts its own token. The anchor's position then drafts nothing.
    fn predicts_own_position(&self) -> bool {
        false
    }

    /// vLLM's name of the drafting method. SGLang writes it in capitals, llama.cpp after `draft-`.
    fn method(&self) -> &'static str;

    /// Human-readable description of the drafted tokens and the parts involved.
    fn lines(&self) -> Vec<(&'static str, String)>;

    /// Machine-readable settings.
    fn to_json(&self) -> Value;

    /// Whether other tools interpret layers of `family` the same way.
    fn has_layers_of(&self, family: Family) -> bool {
        family.pre_norm && family.qk_norm
    }

    /// Input width of a layer's attention, as a multiple of the hidden size.
    fn layer_inputs(&self) -> usize {
        1
    }

    /// Adds the kind's tensors to `shapes`, except `fc`, the final norm and the common layer
    /// tensors.
    fn tensors(&self, drafter: &Drafter, shapes: &mut Shapes);

    /// The reason why `to` cannot express this drafter, if any.
    fn refusal(&self, drafter: &Drafter, to: CheckpointFormat) -> Option<String>;

    /// Its class in the reference's format, without the family's prefix, and its config keys.
    fn reference(&self, drafter: &Drafter) -> (&'static str, Map<String, Value>);

    /// The kind in the format of the speculators package.
    fn speculators(&self) -> Speculators;

    /// Pairs of tensor name prefixes (that format, reference) for this kind only.
    fn renames(&self, _: CheckpointFormat) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    /// Its config in a format specific to this kind, if there is one; `flat` are the decoder's
    /// keys.
    fn own_config(
        &self,
        _: &Drafter,
        _: CheckpointFormat,
        _flat: &Map<String, Value>,
    ) -> Option<Map<String, Value>> {
        None
    }

    /// Its config for z-lab, SpecForge and ModelOpt. Called only for formats that
    /// [`KindSettings::refusal`] accepts.
    fn dflash_config(&self, _to: CheckpointFormat) -> Option<DflashConfigKeys> {
        None
    }

    /// The format in which vLLM or SGLang loads the drafter. In the reference's format, they take
    /// embedding and LM head from the target.
    ///
    /// # Errors
    /// Returns the reason if the engine cannot load it.
    fn engine_format(&self, engine: Engine, drafter: &Drafter) -> Result<CheckpointFormat, String>;

    /// Arguments that SGLang needs in addition to algorithm and drafter path, starting with a
    /// space.
    fn sglang_arguments(&self) -> String {
        String::new()
    }

    /// Its parts in llama.cpp's GGUF format.
    ///
    /// # Errors
    /// Returns the reason if llama.cpp cannot run it.
    fn gguf(&self, drafter: &Drafter) -> Result<GgufParts, String>;

    /// Whether and how vLLM or SGLang loads it in this format, or why not.
    fn support(&self, engine: Engine, format: CheckpointFormat) -> EngineSupport;
}

/// Config keys about training, which do not affect the computation.
pub const INFORMATIVE_KEYS: [&str; 2] = ["num_anchors", "step_loss_decay"];

impl Drafter {
    /// Layer ids as speculators and vLLM count them: 0 is the embedding's output.
    pub fn aux_layer_ids(&self) -> Vec<i64> {
        self.taps.iter().map(|tap| tap.layer_id() + 1).collect()
    }

    /// The reason why only the drafter's own format can express it, if any.
    pub(crate) fn reason_not_convertible(&self) -> Option<String> {
        if let Some(Incompatibility { key, reason }) = self.incompatibilities.first() {
            return Some(format!("`{key}`: {reason}"));
        }
        if !self.kind.has_layers_of(self.family) {
            let family = self.family;
            let known = self.families.iter().filter(|known| self.kind.has_layers_of(known));
            let known = known.map(|family| family.name).collect::<Vec<_>>().join(" and ");
            return Some(format!(
                "its layers are {family}'s; only {known} draft layers mean the same in all dialects"
            ));
        }
        if let (Some(layers), Some(tap)) =
            (self.num_target_layers, self.taps.iter().find(|&&tap| self.is_edge(tap)))
        {
            let last = layers.saturating_sub(2);
            return Some(format!(
                "layer id {} is outside of 0 to {last}: tools differ in what they hand out for the embedding and the \
                 last of {layers} layers (before or after the final norm)",
                tap.layer_id()
            ));
        }
        None
    }

    /// Whether tools define this layer's hidden state differently.
    fn is_edge(&self, tap: Tap) -> bool {
        tap == Tap::Embedding
            || self.num_target_layers.is_some_and(|layers| tap.layer_id() + 1 >= layers as i64)
    }
}
