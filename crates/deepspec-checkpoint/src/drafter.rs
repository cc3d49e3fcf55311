//! What a drafter is, whichever dialect says it.

use std::fmt;
use std::sync::Arc;

use deepspec_core::Tap;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::CheckpointFormat;
use crate::families::Family;
use crate::kind::{Container, Engine, EngineLayout, GgufParts, Speculators, Verdict};

/// Tensors by name, with their shapes.
pub type Shapes = Vec<(String, Vec<usize>)>;

/// Something that only this checkpoint's own dialect can say.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Incompatibility {
    /// The key, or the tensor, that says it.
    pub key: String,
    /// Why it stops a conversion.
    pub reason: String,
}

/// A drafter as its checkpoint describes it.
#[derive(Debug, Clone)]
pub struct Drafter {
    /// The class that the config names.
    pub architecture: String,
    /// Its layers' family.
    pub family: Family,
    /// The families that are known.
    pub families: Vec<Family>,
    /// The decoder's own config keys, `num_hidden_layers` being the draft layers.
    pub decoder: Map<String, Value>,
    /// d.
    pub hidden_size: u64,
    /// V, tokens of the target.
    pub vocab_size: u64,
    /// Tokens that it can draft, fewer than V where the vocabulary is pruned.
    pub draft_vocab_size: u64,
    /// Draft layers.
    pub layers: u64,
    /// Where it taps the target.
    pub taps: Vec<Tap>,
    /// Layers of the target, where the config tells.
    pub num_target_layers: Option<u64>,
    /// Its kind, and the settings that only this kind has.
    pub kind: Settings,
    /// Keys that only inform, such as `num_anchors`.
    pub notes: Map<String, Value>,
    /// What stops a conversion to any other dialect.
    pub obstacles: Vec<Incompatibility>,
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
        family.pre_norm && family.qk_norm
    }

    /// Width of what a layer's attention reads, in hidden sizes.
    fn layer_inputs(&self) -> usize {
        1
    }

    /// Adds the tensors that the kind has beside fusion, final norm and what all layers have.
    fn tensors(&self, drafter: &Drafter, shapes: &mut Shapes);

    /// Why this drafter cannot be said in `to`.
    fn refusal(&self, drafter: &Drafter, to: CheckpointFormat) -> Option<String>;

    /// Its class in the reference's layout, behind the family's prefix, and its keys there.
    fn reference(&self, drafter: &Drafter) -> (&'static str, Map<String, Value>);

    /// How the speculators package says it.
    fn speculators(&self) -> Speculators;

    /// What a dialect calls tensors of this kind alone: prefixes there and in the reference.
    fn renames(&self, _: CheckpointFormat) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    /// Its config where a dialect has a layout for this kind alone, `flat` being the decoder's keys.
    fn own_config(
        &self,
        _: &Drafter,
        _: CheckpointFormat,
        _flat: &Map<String, Value>,
    ) -> Option<Map<String, Value>> {
        None
    }

    /// How the container of z-lab, SpecForge and ModelOpt says it; only for dialects that [`KindSettings::refusal`] lets pass.
    fn container(&self, _to: CheckpointFormat) -> Option<Container> {
        None
    }

    /// In which layout vLLM and SGLang load it.
    ///
    /// # Errors
    /// Why they do not.
    fn engine_layout(&self, engine: Engine, drafter: &Drafter) -> Result<EngineLayout, String>;

    /// What SGLang has to be told beside its algorithm and the drafter's path, with a blank before it.
    fn sglang_arguments(&self) -> String {
        String::new()
    }

    /// How llama.cpp's GGUF says it.
    ///
    /// # Errors
    /// Why it cannot.
    fn gguf(&self, drafter: &Drafter) -> Result<GgufParts, String>;

    /// Whether vLLM loads it in this dialect, and how, or why not.
    fn vllm(&self, dialect: CheckpointFormat) -> Verdict;

    /// Whether SGLang loads it in this dialect, and how, or why not.
    fn sglang(&self, dialect: CheckpointFormat) -> Verdict;
}

/// Keys that inform about training and change nothing else.
pub const NOTES: [&str; 2] = ["num_anchors", "step_loss_decay"];

impl Drafter {
    /// The layer ids as speculators and vLLM count them: the embedding's output is 0.
    pub fn aux_layer_ids(&self) -> Vec<i64> {
        self.taps.iter().map(|tap| tap.layer_id() + 1).collect()
    }

    /// Why this drafter can be said in no layout but its own, if so.
    pub(crate) fn refusal_anywhere(&self) -> Option<String> {
        if let Some(Incompatibility { key, reason }) = self.obstacles.first() {
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

    /// Whether this layer's state is not the same for all tools.
    fn is_edge(&self, tap: Tap) -> bool {
        tap == Tap::Embedding
            || self.num_target_layers.is_some_and(|layers| tap.layer_id() + 1 >= layers as i64)
    }
}
