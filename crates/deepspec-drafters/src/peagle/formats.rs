//! Checkpoints of P-EAGLE in the layouts of other tools.

use std::sync::Arc;

use deepspec_checkpoint::{
    CheckpointError, CheckpointFormat, Decoder, Drafter, Engine, EngineSupport, Family, Fields, GgufParts,
    KindSettings, Reader, Settings, Speculators, TensorShapes, json_map, read_draft_vocab_size,
    read_speculative_tokens,
};
use deepspec_core::Tap;
use serde_json::{Map, Value, json};

use super::model::PEagleSettings;
use crate::draft_model::DrafterSettings as _;
use crate::token_common::{
    Eagle3Norms, TAPS_KEY, add_fusion_norm_shapes, captured_layers, default_taps, write_vocab_and_norms,
};

/// Reads checkpoints of P-EAGLE in all layouts.
pub static READER: Reader = Reader {
    class: PEagleSettings::CLASS,
    keys: KEYS,
    reference: |fields, _| Ok(Arc::new(PEagleSettings::read(fields)?)),
    model_types: &["peagle"],
    speculators: read_speculators,
    classes: &[],
};

/// Keys of config.json that P-EAGLE has beside those of the decoder.
const KEYS: &[&str] = &[
    "num_depths",
    MASK_KEY,
    "draft_vocab_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
];

/// Key of the token whose embedding masked rows have, in all layouts.
const MASK_KEY: &str = "mask_token_id";

/// Why vLLM does not load a drafter with a norm per captured layer.
const NO_FC_NORM: &str = "it drops fc_norm from the config of a P-EAGLE, and would leave these norms out";

fn read_speculators(fields: &Fields, decoder: &mut Decoder) -> Result<Settings, CheckpointError> {
    // A pass never reads the drafter's own states, so that norm_output changes nothing.
    let norms = Eagle3Norms { output: false, ..Eagle3Norms::read(fields)? };
    Ok(Arc::new(PEagleSettings {
        num_depths: read_speculative_tokens(fields)? as usize,
        mask_token_id: fields.required(MASK_KEY, fields.count(MASK_KEY)?)? as i64,
        draft_vocab_size: read_draft_vocab_size(fields, decoder.vocab_size)?.map(|size| size as i64),
        norms,
    }))
}

/// Why an engine does not load the drafter; for vLLM, one with `fc_norm`.
fn reason_not_loaded(engine: Engine) -> &'static str {
    match engine {
        Engine::Vllm => NO_FC_NORM,
        Engine::Sglang => "it has no P-EAGLE, its Eagle3 drafts one token after the other",
        Engine::LlamaCpp => "llama.cpp has no P-EAGLE, its Eagle3 drafts one token after the other",
    }
}

impl KindSettings for PEagleSettings {
    fn name(&self) -> &'static str {
        "peagle"
    }

    fn title(&self) -> &'static str {
        "P-EAGLE"
    }

    fn draft_len(&self) -> u64 {
        self.num_depths as u64
    }

    fn mask_token_id(&self) -> Option<u64> {
        Some(self.mask_token_id as u64)
    }

    fn has_slots(&self) -> bool {
        false
    }

    fn method(&self) -> &'static str {
        "eagle3"
    }

    fn drafts_in_parallel(&self) -> bool {
        true
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        let mut lines = vec![
            ("drafts", format!("{} tokens in one pass", self.num_depths)),
            ("mask token", self.mask_token_id.to_string()),
        ];
        if !self.norms.is_original() {
            lines.push(("norms", self.norms.set_keys()));
        }
        lines
    }

    fn to_json(&self) -> Value {
        json!({"peagle": {"depths": self.num_depths, "mask_token_id": self.mask_token_id, "norms": self.norms}})
    }

    fn has_layers_of(&self, family: Family) -> bool {
        family.pre_norm && !family.may_have_output_gate()
    }

    /// The first layer also reads embeddings.
    fn layer_inputs(&self, layer: u64) -> usize {
        if layer == 0 { 2 } else { 1 }
    }

    fn default_taps(&self, layers: u64) -> Vec<Tap> {
        default_taps(layers)
    }

    fn fc_inputs(&self, drafter: &Drafter) -> usize {
        captured_layers(drafter)
    }

    fn may_reduce_vocab(&self) -> bool {
        true
    }

    fn owns_embed_and_head(&self) -> bool {
        Self::MAY_OWN_EMBED_AND_HEAD
    }

    fn add_tensor_shapes(&self, drafter: &Drafter, shapes: &mut TensorShapes) {
        let width = drafter.hidden_size as usize;
        shapes.push(("layers.0.hidden_norm.weight".into(), vec![width]));
        shapes.push(("mask_hidden".into(), vec![1, 1, captured_layers(drafter) * width]));
        add_fusion_norm_shapes(self.norms, drafter, shapes);
    }

    fn refusal(&self, _: &Drafter, to: CheckpointFormat) -> Option<String> {
        match to {
            CheckpointFormat::Reference | CheckpointFormat::Speculators => None,
            CheckpointFormat::Specforge => Some(
                "SpecForge's files need not say mask token and captured layers, so they are not written"
                    .into(),
            ),
            CheckpointFormat::Zlab | CheckpointFormat::Modelopt | CheckpointFormat::DeepseekV4 => {
                Some(format!("{to} has no P-EAGLE"))
            }
        }
    }

    fn reference_config(&self, _: &Drafter) -> (&'static str, Map<String, Value>) {
        let keys = [("num_depths", json!(self.num_depths)), (MASK_KEY, json!(self.mask_token_id))];
        let mut map = json_map(keys);
        write_vocab_and_norms(&mut map, self.draft_vocab_size, self.norms);
        (READER.class, map)
    }

    fn speculators_config(&self) -> Option<Speculators> {
        let mut keys = json_map(self.norms.flags().map(|(key, is_set)| (key, json!(is_set))));
        keys.insert(MASK_KEY.into(), json!(self.mask_token_id));
        Some(Speculators { model_type: "peagle", class: "PEagleSpeculator", taps: Some(TAPS_KEY), keys })
    }

    fn engine_format(&self, engine: Engine, _: &Drafter) -> Result<CheckpointFormat, String> {
        match engine {
            Engine::Vllm if !self.norms.fc => Ok(CheckpointFormat::Speculators),
            engine => Err(format!("{engine} does not load it: {}", reason_not_loaded(engine))),
        }
    }

    fn gguf_parts(&self, _: &Drafter) -> Result<GgufParts, String> {
        Err(reason_not_loaded(Engine::LlamaCpp).into())
    }

    fn engine_support(&self, engine: Engine, format: CheckpointFormat) -> EngineSupport {
        match (engine, format) {
            (Engine::Vllm, _) if self.norms.fc => EngineSupport::not_loaded(NO_FC_NORM),
            (Engine::Vllm, CheckpointFormat::Speculators) => {
                EngineSupport::loads_as_tested("method eagle3 with parallel_drafting")
            }
            (Engine::Vllm, _) => EngineSupport::not_loaded("the class is not registered"),
            _ => EngineSupport::not_loaded(reason_not_loaded(engine)),
        }
    }
}
