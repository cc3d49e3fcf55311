//! A drafter, independent of its checkpoint format.

use std::fmt;
use std::sync::Arc;

use deepspec_core::Tap;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::export::{Engine, EngineSupport};
use crate::families::Family;
use crate::kind::{DflashConfigKeys, GgufParts, Speculators};
use crate::shapes::ATTENTION_SINK_BIAS;
use crate::{CheckpointFormat, layouts};

/// Names and shapes of tensors.
pub type TensorShapes = Vec<(String, Vec<usize>)>;

/// A setting of a checkpoint that no other format can express, with the reason.
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
    /// Model family of the draft layers.
    pub family: Family,
    /// All known families.
    pub families: Vec<Family>,
    /// Config keys of the decoder. `num_hidden_layers` is the number of draft layers.
    pub decoder: Map<String, Value>,
    /// Hidden size d.
    pub hidden_size: u64,
    /// Vocabulary size V of the target.
    pub vocab_size: u64,
    /// Number of tokens that the drafter can draft, Vd; less than V if its vocabulary is reduced.
    pub draft_vocab_size: u64,
    /// Number of draft layers.
    pub layers: u64,
    /// Target layers whose hidden states the drafter reads.
    pub taps: Vec<Tap>,
    /// Number of the target's layers, if the config states it.
    pub num_target_layers: Option<u64>,
    /// The drafter kind, such as DSpark, with its settings.
    pub kind: Settings,
    /// Config keys that do not affect the computation, such as `num_anchors`.
    pub informative_keys: Map<String, Value>,
    /// Settings that prevent a conversion to any other format.
    pub incompatibilities: Vec<Incompatibility>,
}

impl Drafter {
    /// Whether the layers have attention sinks.
    pub fn has_attention_sinks(&self) -> bool {
        self.decoder.get(ATTENTION_SINK_BIAS) == Some(&Value::Bool(true))
    }

    /// Whether some layers have a sliding window.
    pub fn has_windows(&self) -> bool {
        layouts::has_windows(&self.decoder)
    }

    /// Tokens that a query sees in every layer, itself included; None if a layer has full attention.
    pub fn shared_window(&self) -> Option<u64> {
        layouts::shared_window(&self.decoder)
    }
}

/// Why a drafter whose layers have sliding windows is not written for SGLang.
pub const SGLANG_HAS_NO_USE_SWA: &str =
    "SGLang does not read use_swa, and its layers with a window have causal blocks unless is_causal is false";

/// The settings of a drafter kind.
pub type Settings = Arc<dyn KindSettings>;

/// The interface of a drafter kind for formats, engines and reports.
pub trait KindSettings: fmt::Debug + Send + Sync {
    /// Machine-readable name of the kind.
    fn name(&self) -> &'static str;

    /// Human-readable name of the kind.
    fn title(&self) -> &'static str;

    /// Number of drafted tokens per cycle.
    fn draft_len(&self) -> u64;

    /// Token that fills the positions to predict. None for kinds without a mask token, such as
    /// Eagle3.
    fn mask_token_id(&self) -> Option<u64> {
        None
    }

    /// Whether the tokens to predict fill the slots of a block. If not, a drafter with a mask token appends it to the tokens (P-EAGLE).
    fn has_slots(&self) -> bool {
        self.mask_token_id().is_some()
    }

    /// Whether vLLM must be told to draft all tokens in one pass.
    fn drafts_in_parallel(&self) -> bool {
        false
    }

    /// Whether a block position predicts the token at that position instead of the next one
    /// (z-lab's convention). The anchor's position then drafts nothing.
    fn predicts_own_position(&self) -> bool {
        false
    }

    /// vLLM's `method` for this drafter. SGLang writes it in capitals, llama.cpp after `draft-`.
    fn method(&self) -> &'static str;

    /// Human-readable lines, as (label, text): the drafted tokens and the parts of the drafter.
    fn lines(&self) -> Vec<(&'static str, String)>;

    /// Machine-readable settings.
    fn to_json(&self) -> Value;

    /// Whether other tools read the drafter apart from its target, so that layers and captured states must mean the same there.
    fn is_read_by_other_tools(&self) -> bool {
        true
    }

    /// Whether other tools compute draft layers of `family` in the same way.
    fn has_layers_of(&self, family: Family) -> bool {
        family.pre_norm && family.qk_norm && !family.may_have_output_gate()
    }

    /// Input width of the attention of layer `layer`, as a multiple of the hidden size.
    fn layer_inputs(&self, _layer: u64) -> usize {
        1
    }

    /// Whether the drafter reads outputs of the target's layers. If not, it reads the target's final
    /// states only.
    fn reads_layers(&self) -> bool {
        true
    }

    /// Captured layers of a target with `layers` layers, for a config that does not say which. Empty for kinds without default
    /// layers, and for targets with too few layers.
    fn default_taps(&self, _layers: u64) -> Vec<Tap> {
        vec![]
    }

    /// Whether a config need not say which layers are captured.
    fn has_default_taps(&self) -> bool {
        !self.default_taps(u64::from(u16::MAX)).is_empty()
    }

    /// Whether the drafter may have a reduced vocabulary.
    fn may_reduce_vocab(&self) -> bool {
        false
    }

    /// Whether drafters of speculators train an embedding and an LM head of their own, which its loaders read.
    fn owns_embed_and_head(&self) -> bool {
        false
    }

    /// Input width of `fc`, as a multiple of the hidden size.
    fn fc_inputs(&self, drafter: &Drafter) -> usize {
        drafter.taps.len()
    }

    /// Number and name of the drafter's layers for reports, such as `2 Qwen3 layers`.
    fn layers_text(&self, drafter: &Drafter) -> String {
        match (drafter.layers, drafter.family) {
            (1, family) => format!("1 {family} layer"),
            (layers, family) => format!("{layers} {family} layers"),
        }
    }

    /// Names and shapes of the layers' tensors, for a kind whose layers are not those of a model family.
    fn own_layer_shapes(&self, _drafter: &Drafter) -> Option<TensorShapes> {
        None
    }

    /// Adds the names and shapes of the tensors that only this kind has to `shapes`. The caller
    /// adds `fc`, the final norm and the tensors that all kinds have in a layer.
    fn add_tensor_shapes(&self, drafter: &Drafter, shapes: &mut TensorShapes);

    /// The reason why the format `to` cannot express this drafter; None if it can.
    fn refusal(&self, drafter: &Drafter, to: CheckpointFormat) -> Option<String>;

    /// The kind's class name in the reference's format, without the family's prefix, and its config
    /// keys.
    fn reference_config(&self, drafter: &Drafter) -> (&'static str, Map<String, Value>);

    /// Class and config keys of the kind in the format of the speculators package; None if it has no
    /// such format.
    fn speculators_config(&self) -> Option<Speculators> {
        None
    }

    /// Tensor name prefixes that this kind renames, as (prefix in the given format, prefix in the
    /// reference's format).
    fn renames(&self, _: CheckpointFormat) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    /// The complete config, if the kind has its own layout in `format`; None if the code that all
    /// kinds share writes the config. `flat` holds the decoder's keys.
    fn config_override(
        &self,
        _: &Drafter,
        _: CheckpointFormat,
        _flat: &Map<String, Value>,
    ) -> Option<Map<String, Value>> {
        None
    }

    /// The kind's keys in the config of z-lab, SpecForge and ModelOpt. Called only for formats that
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

    /// Architecture, metadata keys and tensor names of the kind in llama.cpp's GGUF format.
    ///
    /// # Errors
    /// Returns the reason if llama.cpp cannot run it.
    fn gguf_parts(&self, drafter: &Drafter) -> Result<GgufParts, String>;

    /// Whether engines load a drafter with layers of `family` within a target that runs here. `checkpoint merge-mtp` writes it there.
    fn is_loaded_within_target(&self, _family: Family) -> bool {
        false
    }

    /// Whether vLLM or SGLang loads the drafter in this format, and how, or why not.
    fn engine_support(&self, engine: Engine, format: CheckpointFormat) -> EngineSupport;
}

/// Config keys about training, which do not affect the computation.
pub const INFORMATIVE_KEYS: [&str; 3] = ["num_anchors", "step_loss_decay", "step_weight_beta"];

impl Drafter {
    /// Whether the drafter can draft only some of the target's tokens.
    pub fn has_reduced_vocab(&self) -> bool {
        self.draft_vocab_size != self.vocab_size
    }

    /// Captured layer ids as speculators and vLLM count them: 0 is the embedding's output.
    pub fn aux_layer_ids(&self) -> Vec<i64> {
        self.taps.iter().map(|tap| tap.layer_id() + 1).collect()
    }

    /// The reason why the drafter cannot be converted to any other format; None if it can.
    pub(crate) fn reason_not_convertible(&self) -> Option<String> {
        if let Some(Incompatibility { key, reason }) = self.incompatibilities.first() {
            return Some(format!("`{key}`: {reason}"));
        }
        if !self.kind.is_read_by_other_tools() {
            return None;
        }
        if !self.kind.has_layers_of(self.family) {
            let family = self.family;
            let known = self.families.iter().filter(|known| self.kind.has_layers_of(known));
            let known = known.map(|family| family.name).collect::<Vec<_>>().join(", ");
            return Some(format!(
                "its layers are {family}'s; only {known} draft layers mean the same in all formats"
            ));
        }
        self.ambiguous_layer_reason()
    }

    /// Names a captured layer about whose hidden state tools disagree; None if there is none.
    pub(crate) fn ambiguous_layer_reason(&self) -> Option<String> {
        let (layers, tap) =
            (self.num_target_layers?, self.taps.iter().find(|&&tap| self.is_ambiguous_layer(tap))?);
        let last = layers.saturating_sub(2);
        Some(format!(
            "layer id {} is outside of 0 to {last}: tools differ in what they hand out for the embedding and the last of {layers} \
             layers (before or after the final norm)",
            tap.layer_id()
        ))
    }

    /// Whether tools disagree about this layer's hidden state. They do for the embedding and for
    /// the last layer.
    fn is_ambiguous_layer(&self, tap: Tap) -> bool {
        tap == Tap::Embedding
            || self.num_target_layers.is_some_and(|layers| tap.layer_id() + 1 >= layers as i64)
    }
}
