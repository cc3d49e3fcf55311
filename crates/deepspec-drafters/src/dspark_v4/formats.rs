//! Checkpoints of DSpark of DeepSeek-V4 in the layouts of other tools.

use std::sync::Arc;

use deepspec_checkpoint::{
    CheckpointError, CheckpointFormat, Decoder, Drafter, Engine, EngineSupport, ExternalClass, Fields,
    GgufParts, KindSettings, Reader, Settings, TensorShapes,
};
use serde_json::{Map, Value, json};

use super::settings::{DSparkV4Settings, MARKOV_RANK, STAGE_CONFIG};
use super::{gguf, released};
use crate::block_common::BlockSpec;
use crate::draft_model::DrafterSettings as _;

/// Reads checkpoints of DSpark of DeepSeek-V4.
pub static READER: Reader = Reader {
    class: DSparkV4Settings::CLASS,
    keys: &["block_size", "mask_token_id", MARKOV_RANK, STAGE_CONFIG],
    reference: read,
    model_types: &[],
    // Not called, since no model type names this kind.
    speculators: |fields, _| {
        Err(fields.error("speculators_model_type", "speculators has no layout for DSpark of DeepSeek-V4"))
    },
    classes: &[ExternalClass {
        name: released::CLASS,
        tools: "DeepSeek-V4 that holds its drafter",
        read: released::read,
        tensor_prefix: None,
    }],
};

/// Why vLLM and SGLang do not load the drafter as a folder of its own.
const NO_ENGINE: &str = "it loads DSpark of DeepSeek-V4 as a part of that target's own checkpoint, into which `checkpoint merge-mtp` writes it";

fn read(fields: &Fields, decoder: &Decoder) -> Result<Settings, CheckpointError> {
    let settings = DSparkV4Settings::read(fields)?;
    let checked = settings.check_sizes(decoder.vocab_size as i64);
    checked.map_err(|(key, problem)| fields.error(key, problem))?;
    Ok(Arc::new(settings))
}

impl KindSettings for DSparkV4Settings {
    fn name(&self) -> &'static str {
        "dspark_v4"
    }

    fn title(&self) -> &'static str {
        "DSpark of DeepSeek-V4"
    }

    fn draft_len(&self) -> u64 {
        self.blocks.draft_len() as u64
    }

    fn mask_token_id(&self) -> Option<u64> {
        Some(self.blocks.mask_token_id as u64)
    }

    fn method(&self) -> &'static str {
        "dspark"
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        let BlockSpec { block_size, slots, mask_token_id, .. } = self.blocks;
        let s = &self.stages;
        vec![
            ("drafts", format!("{} tokens in blocks of {block_size}; {slots}", self.blocks.draft_len())),
            ("mask token", mask_token_id.to_string()),
            (
                "stages",
                format!(
                    "{} heads of {}, window {}, {} of {} experts, {} residual streams",
                    s.num_attention_heads,
                    s.head_dim,
                    s.sliding_window,
                    s.num_experts_per_tok,
                    s.n_routed_experts,
                    s.hc_mult
                ),
            ),
            (
                "heads",
                format!(
                    "Markov head vanilla of rank {}, confidence head on the state before the norm and Markov embedding",
                    self.markov_rank
                ),
            ),
        ]
    }

    fn to_json(&self) -> Value {
        let BlockSpec { block_size, mask_token_id, slots, .. } = self.blocks;
        json!({"block": {
            "block_size": block_size, "mask_token_id": mask_token_id, "slots": slots,
            "markov": {"kind": "vanilla", "rank": self.markov_rank}, "stages": self.stages,
        }})
    }

    fn layers_text(&self, drafter: &Drafter) -> String {
        match drafter.layers {
            1 => "1 stage".into(),
            stages => format!("{stages} stages"),
        }
    }

    fn own_layer_shapes(&self, drafter: &Drafter) -> Option<TensorShapes> {
        let stages = (0..drafter.layers).flat_map(|layer| self.stage_shapes(drafter, layer));
        Some(stages.collect())
    }

    fn add_tensor_shapes(&self, drafter: &Drafter, shapes: &mut TensorShapes) {
        let [width, vocab, rank, streams] = [
            drafter.hidden_size as usize,
            drafter.vocab_size as usize,
            self.markov_rank as usize,
            self.stages.hc_mult as usize,
        ];
        let own = [
            ("hidden_norm.weight", vec![width]),
            ("hc_head_fn", vec![streams, streams * width]),
            ("hc_head_base", vec![streams]),
            ("hc_head_scale", vec![1]),
            ("markov_head.markov_w1.weight", vec![vocab, rank]),
            ("markov_head.markov_w2.weight", vec![vocab, rank]),
            ("confidence_head.proj.weight", vec![1, width + rank]),
        ];
        shapes.extend(own.map(|(name, shape)| (name.to_string(), shape)));
    }

    fn refusal(&self, _: &Drafter, to: CheckpointFormat) -> Option<String> {
        match to {
            CheckpointFormat::Reference | CheckpointFormat::DeepseekV4 => None,
            _ => Some(format!("{to} has no layout for latent attention, hyper-connections and experts")),
        }
    }

    fn reference_config(&self, _: &Drafter) -> (&'static str, Map<String, Value>) {
        let mut map = Map::new();
        self.write(&mut map);
        map.remove("num_anchors");
        (READER.class, map)
    }

    fn renames(&self, format: CheckpointFormat) -> &'static [(&'static str, &'static str)] {
        match format {
            CheckpointFormat::DeepseekV4 => released::RENAMES,
            _ => &[],
        }
    }

    fn is_read_by_other_tools(&self) -> bool {
        false
    }

    fn engine_format(&self, engine: Engine, _: &Drafter) -> Result<CheckpointFormat, String> {
        Err(format!("{engine} does not load it: {NO_ENGINE}"))
    }

    fn gguf_parts(&self, drafter: &Drafter) -> Result<GgufParts, String> {
        gguf::parts(self, drafter)
    }

    fn engine_support(&self, engine: Engine, format: CheckpointFormat) -> EngineSupport {
        match (engine, format) {
            (Engine::Sglang, CheckpointFormat::DeepseekV4) => {
                EngineSupport::loads_untested("--speculative-algorithm DSPARK, as a part of its target")
            }
            (Engine::Vllm, CheckpointFormat::DeepseekV4) => {
                EngineSupport::loads_untested("method dspark, as a part of its target")
            }
            _ => EngineSupport::not_loaded(NO_ENGINE),
        }
    }
}

impl DSparkV4Settings {
    /// Names and shapes of a stage's tensors, by the names of the reference.
    fn stage_shapes(&self, drafter: &Drafter, layer: u64) -> TensorShapes {
        let s = &self.stages;
        let width = drafter.hidden_size as usize;
        let [heads, dim, q_rank, o_rank, groups, experts, inner, streams] = [
            s.num_attention_heads,
            s.head_dim,
            s.q_lora_rank,
            s.o_lora_rank,
            s.o_groups,
            s.n_routed_experts,
            s.moe_intermediate_size,
            s.hc_mult,
        ]
        .map(|size| size as usize);
        let mut shapes = vec![
            ("attn.wq_a.weight".to_string(), vec![q_rank, width]),
            ("attn.q_norm.weight".into(), vec![q_rank]),
            ("attn.wq_b.weight".into(), vec![heads * dim, q_rank]),
            ("attn.wkv.weight".into(), vec![dim, width]),
            ("attn.kv_norm.weight".into(), vec![dim]),
            ("attn.wo_a.weight".into(), vec![groups * o_rank, heads * dim / groups]),
            ("attn.wo_b.weight".into(), vec![width, groups * o_rank]),
            ("attn.attn_sink".into(), vec![heads]),
            ("attn_norm.weight".into(), vec![width]),
            ("ffn_norm.weight".into(), vec![width]),
            ("ffn.gate.weight".into(), vec![experts, width]),
            ("ffn.gate.bias".into(), vec![experts]),
        ];
        for part in ["attn", "ffn"] {
            let outputs = streams * (streams + 2);
            shapes.push((format!("hc_{part}_fn"), vec![outputs, streams * width]));
            shapes.push((format!("hc_{part}_base"), vec![outputs]));
            shapes.push((format!("hc_{part}_scale"), vec![3]));
        }
        let routed = (0..experts).map(|expert| format!("experts.{expert}"));
        for expert in routed.chain(["shared_experts".to_string()]) {
            let parts = [("w1", [inner, width]), ("w3", [inner, width]), ("w2", [width, inner])];
            shapes.extend(parts.map(|(part, shape)| (format!("ffn.{expert}.{part}.weight"), shape.to_vec())));
        }
        shapes.into_iter().map(|(name, shape)| (format!("layers.{layer}.{name}"), shape)).collect()
    }
}
