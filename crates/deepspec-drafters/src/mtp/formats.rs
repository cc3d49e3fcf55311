//! Checkpoints of MTP-1 in the layouts of other tools.

use std::sync::Arc;

use deepspec_checkpoint::{
    CheckpointError, CheckpointFormat, Decoder, Drafter, Engine, EngineSupport, Family, Fields, GgufParts,
    KindSettings, Reader, Settings, Speculators, TensorShapes, json_map, read_speculative_tokens,
};
use serde_json::{Map, Value, json};

use super::model::MtpSettings;
use crate::draft_model::DrafterSettings;

/// Reads checkpoints of MTP-1 in all layouts.
pub static READER: Reader = Reader {
    class: MtpSettings::CLASS,
    keys: &["num_speculative_steps", LAYERS_KEY],
    reference: |fields, _| Ok(Arc::new(MtpSettings::read(fields)?)),
    model_types: &["mtp"],
    speculators: read_speculators,
    classes: &[],
};

/// Key of the number of layers that predict, in configs of models with such layers.
const LAYERS_KEY: &str = "num_nextn_predict_layers";

/// Why no engine loads the drafter.
const NO_ENGINE: &str = "engines load MTP layers from the target's own checkpoint, of Qwen3.5 and Qwen3.5-MoE (checkpoint \
     merge-mtp writes it there) and of other architectures, and none with dense Qwen3 or Llama layers";

fn read_speculators(fields: &Fields, decoder: &mut Decoder) -> Result<Settings, CheckpointError> {
    let layers = fields.size::<u64>(LAYERS_KEY)?.unwrap_or(1);
    if layers != 1 {
        return Err(fields.error(LAYERS_KEY, format!("{layers}, but MTP-1 has 1 layer")));
    }
    // The decoder is described by the config of the target, whose layers it counts.
    decoder.set_layers(1);
    let num_speculative_steps = read_speculative_tokens(fields)? as usize;
    Ok(Arc::new(MtpSettings { num_speculative_steps, ..MtpSettings::default() }))
}

impl KindSettings for MtpSettings {
    fn name(&self) -> &'static str {
        "mtp"
    }

    fn title(&self) -> &'static str {
        "MTP-1"
    }

    fn draft_len(&self) -> u64 {
        self.num_speculative_steps as u64
    }

    fn method(&self) -> &'static str {
        "mtp"
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        vec![("drafts", format!("{} tokens, one after the other", self.num_speculative_steps))]
    }

    fn to_json(&self) -> Value {
        json!({"mtp": {"steps": self.num_speculative_steps}})
    }

    fn reads_layers(&self) -> bool {
        Self::READS_LAYERS
    }

    fn has_layers_of(&self, family: Family) -> bool {
        family.pre_norm && family.qk_norm
    }

    fn fc_inputs(&self, drafter: &Drafter) -> usize {
        <Self as DrafterSettings>::fc_inputs(drafter.taps.len())
    }

    fn add_tensor_shapes(&self, drafter: &Drafter, shapes: &mut TensorShapes) {
        let norm = |name: &str| (format!("{name}.weight"), vec![drafter.hidden_size as usize]);
        shapes.extend(["pre_fc_norm_embedding", "pre_fc_norm_hidden"].map(norm));
    }

    fn refusal(&self, _: &Drafter, to: CheckpointFormat) -> Option<String> {
        match to {
            CheckpointFormat::Reference | CheckpointFormat::Speculators => None,
            CheckpointFormat::Specforge
            | CheckpointFormat::Zlab
            | CheckpointFormat::Modelopt
            | CheckpointFormat::DeepseekV4 => {
                Some(format!("{to} has no layout for MTP-1 apart from its target"))
            }
        }
    }

    fn reference_config(&self, _: &Drafter) -> (&'static str, Map<String, Value>) {
        let steps = ("num_speculative_steps", json!(self.num_speculative_steps));
        (READER.class, json_map([steps]))
    }

    fn speculators_config(&self) -> Option<Speculators> {
        Some(Speculators {
            model_type: "mtp",
            class: "MTPDraftModel",
            taps: None,
            keys: json_map([(LAYERS_KEY, json!(1))]),
        })
    }

    fn renames(&self, format: CheckpointFormat) -> &'static [(&'static str, &'static str)] {
        match format {
            CheckpointFormat::Speculators => &[
                ("mtp_layers.0.input_proj.", "fc."),
                ("mtp_layers.0.token_layernorm.", "pre_fc_norm_embedding."),
                ("mtp_layers.0.hidden_layernorm.", "pre_fc_norm_hidden."),
                ("mtp_layers.0.final_layernorm.", "norm."),
                ("mtp_layers.0.", "layers.0."),
            ],
            _ => &[],
        }
    }

    fn engine_format(&self, engine: Engine, _: &Drafter) -> Result<CheckpointFormat, String> {
        Err(format!("{engine} does not load it: {NO_ENGINE}"))
    }

    fn gguf_parts(&self, _: &Drafter) -> Result<GgufParts, String> {
        Err(NO_ENGINE.into())
    }

    fn is_loaded_within_target(&self, family: Family) -> bool {
        // Layers of Qwen3.5 and Qwen3.5-MoE, in SGLang by its sources.
        family.may_have_output_gate()
    }

    fn engine_support(&self, _: Engine, _: CheckpointFormat) -> EngineSupport {
        EngineSupport::not_loaded(NO_ENGINE)
    }
}
