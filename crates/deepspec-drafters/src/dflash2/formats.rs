//! Checkpoints of DFlash 2 in the layouts of other tools.

use std::sync::Arc;

use deepspec_checkpoint::{
    CheckpointError, CheckpointFormat, Decoder, DflashConfig, DflashConfigKeys, Drafter, Engine,
    EngineSupport, ExternalClass, Family, Fields, GgufParts, GgufValue, KindSettings, Reader, Settings,
    Speculators, TensorShapes, json_map,
};
use deepspec_core::SlotTarget;
use serde_json::{Map, Value, json};

use super::model::DFlash2Settings;
use crate::block_common::formats::{GGUF_ARCHITECTURE, HEAD_KEYS, SGLANG_REFUSAL, merge_outer_block_size};
use crate::block_common::{BlockSpec, CONVOLUTION_KEYS, IS_CAUSAL};
use crate::draft_model::DrafterSettings as _;

/// Reads checkpoints of DFlash 2 in all layouts.
pub static READER: Reader = Reader {
    class: DFlash2Settings::CLASS,
    keys: &[
        "block_size",
        "sample_from_anchor",
        "mask_token_id",
        CONVOLUTION_KEYS[0],
        CONVOLUTION_KEYS[1],
        "selector_rank",
        "selector_top_k",
    ],
    reference: read_settings,
    model_types: &["dflash2"],
    speculators: |fields, decoder| read_settings(fields, decoder),
    classes: &[ExternalClass {
        name: ZLAB_CLASS,
        tools: "z-lab",
        read: |fields, _, families| read_zlab(fields, families),
        tensor_prefix: None,
    }],
};

/// Class name in z-lab's layout.
const ZLAB_CLASS: &str = "DFlash2DraftModel";

/// Reads z-lab's layout, whose keys are inside `dflash_config`.
fn read_zlab(fields: &Fields, families: &[Family]) -> Result<(CheckpointFormat, Drafter), CheckpointError> {
    let config = DflashConfig::read(fields, &HEAD_KEYS, families, false)?;
    if config.slots == Some(SlotTarget::AnchorPredicts) {
        return Err(fields.error("sample_from_anchor", "true; the slots of DFlash 2 fill in"));
    }
    // As with DFlash, `block_size` may be at the top level.
    let mut keys = merge_outer_block_size(fields, &config.inner)?;
    if config.causal {
        keys.insert(IS_CAUSAL.into(), true.into());
    }
    let settings = read_settings(&config.inner.with_map(&keys), &config.decoder)?;
    Ok((CheckpointFormat::Zlab, config.into_drafter(fields, ZLAB_CLASS, settings)?))
}

/// Reads settings from one object that has all keys.
fn read_settings(fields: &Fields, decoder: &Decoder) -> Result<Settings, CheckpointError> {
    let settings = DFlash2Settings::read(fields)?;
    let checked = settings.check_sizes(decoder.vocab_size as i64, decoder.hidden_size as i64);
    checked.map_err(|(key, problem)| fields.error(key, problem))?;
    Ok(Arc::new(settings))
}

impl DFlash2Settings {
    /// Keys for config.json except `sample_from_anchor`.
    fn config_keys(&self) -> Map<String, Value> {
        let BlockSpec { block_size, mask_token_id, .. } = self.blocks;
        let mut keys = json_map([("block_size", json!(block_size)), ("mask_token_id", json!(mask_token_id))]);
        keys.extend(self.named_sizes().map(|(key, size)| (key.into(), size.into())));
        keys
    }
}

impl KindSettings for DFlash2Settings {
    fn name(&self) -> &'static str {
        "dflash2"
    }

    fn title(&self) -> &'static str {
        "DFlash 2"
    }

    fn draft_len(&self) -> u64 {
        self.blocks.draft_len() as u64
    }

    fn mask_token_id(&self) -> Option<u64> {
        Some(self.blocks.mask_token_id as u64)
    }

    fn predicts_own_position(&self) -> bool {
        true
    }

    fn method(&self) -> &'static str {
        "dflash"
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        let Self { blocks, convolution, selector_rank, selector_top_k } = self;
        let (drafted, size, slots) = (blocks.draft_len(), blocks.block_size, blocks.slots);
        vec![
            ("drafts", format!("{drafted} tokens in blocks of {size}; {slots}")),
            ("mask token", blocks.mask_token_id.to_string()),
            ("convolution", convolution.describe()),
            ("selector", format!("of rank {selector_rank} over {selector_top_k} candidates a slot")),
        ]
    }

    fn to_json(&self) -> Value {
        json!({"dflash2": self.config_keys()})
    }

    fn add_tensor_shapes(&self, drafter: &Drafter, shapes: &mut TensorShapes) {
        let [width, vocab] = [drafter.hidden_size, drafter.vocab_size].map(|size| size as usize);
        let rank = self.selector_rank as usize;
        shapes.push(("hidden_norm.weight".into(), vec![width]));
        self.convolution.add_tensor_shapes(drafter, shapes);
        let selector = [
            ("predecessor_codebook", [vocab, rank]),
            ("successor_codebook", [vocab, rank]),
            ("hidden_projection.weight", [rank, width]),
        ];
        shapes.extend(selector.map(|(name, shape)| (format!("candidate_selector.{name}"), shape.to_vec())));
    }

    fn refusal(&self, _: &Drafter, to: CheckpointFormat) -> Option<String> {
        match to {
            CheckpointFormat::Reference | CheckpointFormat::Speculators | CheckpointFormat::Zlab => None,
            CheckpointFormat::Specforge | CheckpointFormat::Modelopt | CheckpointFormat::DeepseekV4 => {
                Some("DeepSpec cannot write DFlash 2 in this format".into())
            }
        }
    }

    fn reference_config(&self, _: &Drafter) -> (&'static str, Map<String, Value>) {
        let mut map = self.config_keys();
        map.insert("sample_from_anchor".into(), false.into());
        (READER.class, map)
    }

    fn speculators_config(&self) -> Option<Speculators> {
        let mut keys = self.config_keys();
        keys.insert("sample_from_anchor".into(), false.into());
        Some(Speculators {
            model_type: "dflash2",
            class: ZLAB_CLASS,
            taps: Some("aux_hidden_state_layer_ids"),
            keys,
        })
    }

    fn dflash_config(&self, _: CheckpointFormat) -> Option<DflashConfigKeys> {
        Some(DflashConfigKeys { class: ZLAB_CLASS, top: Map::new(), inner: self.config_keys() })
    }

    fn engine_format(&self, _: Engine, _: &Drafter) -> Result<CheckpointFormat, String> {
        Ok(CheckpointFormat::Zlab)
    }

    fn gguf_parts(&self, drafter: &Drafter) -> Result<GgufParts, String> {
        let (width, candidates) = (drafter.hidden_size as i64, self.selector_top_k);
        if width < candidates * (candidates + 1) {
            return Err(format!(
                "llama.cpp lays k (k + 1) scores of a selector into a hidden state, and {candidates} candidates are too many for \
                 {width} values"
            ));
        }
        let sizes = [("block_size", self.blocks.block_size as i64)].into_iter().chain(self.named_sizes());
        let sizes = sizes.map(|(key, size)| (key, GgufValue::U32(size as u32)));
        Ok(GgufParts {
            keys: sizes.chain([("sample_from_anchor", GgufValue::Bool(false))]).collect(),
            names: vec![
                ("candidate_selector.predecessor_codebook", "selector_predecessor.weight"),
                ("candidate_selector.successor_codebook", "selector_successor.weight"),
                ("candidate_selector.hidden_projection.weight", "selector_hidden.weight"),
            ],
            layer_names: vec![
                ("attention_conv.base_kernel", "attn_conv_base"),
                ("attention_conv.kernel_projection.weight", "attn_conv_proj.weight"),
                ("mlp_conv.base_kernel", "ffn_conv_base"),
                ("mlp_conv.kernel_projection.weight", "ffn_conv_proj.weight"),
            ],
            architecture: GGUF_ARCHITECTURE,
            ..GgufParts::default()
        })
    }

    fn engine_support(&self, engine: Engine, format: CheckpointFormat) -> EngineSupport {
        use CheckpointFormat::{DeepseekV4, Modelopt, Reference, Specforge, Speculators, Zlab};
        use EngineSupport as S;
        match engine {
            Engine::Sglang => match format {
                Zlab => S::loads_untested("--speculative-algorithm DFLASH, with PR 35371"),
                Speculators => S::not_loaded(SGLANG_REFUSAL),
                Reference | Specforge | Modelopt | DeepseekV4 => S::not_loaded("the class is not registered"),
            },
            Engine::Vllm | Engine::LlamaCpp => match format {
                Zlab => S::loads_as_tested("method dflash"),
                Speculators => S::loads_untested("method dflash, with PR 53797"),
                Reference | Specforge | Modelopt | DeepseekV4 => S::not_loaded("the class is not registered"),
            },
        }
    }
}
