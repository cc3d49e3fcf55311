//! Checkpoints of Domino in the layouts of other tools.

use std::sync::Arc;

use deepspec_checkpoint::{
    CheckpointError, CheckpointFormat, Decoder, DflashConfig, DflashConfigKeys, Drafter, Engine,
    EngineSupport, ExternalClass, Family, Fields, GgufParts, KindSettings, Reader, Settings, TensorShapes,
    Tensors, json_map,
};
use deepspec_core::SlotTarget;
use serde_json::{Map, Value, json};

use super::model::{DominoSettings, PURE_DRAFTS_KEY};
use crate::block_common::formats::merge_outer_block_size;
use crate::block_common::{BlockSpec, IS_CAUSAL};
use crate::draft_model::DrafterSettings as _;

/// Class of SpecForge.
const SPECFORGE_CLASS: &str = "DominoDraftModel";
/// Class of ModelOpt and of the published files, which SGLang reads.
const DFLASH_CLASS: &str = "DFlashDraftModel";
/// Names of Domino in `projector_type` of `dflash_config`. The first is written.
pub const PROJECTORS: [&str; 2] = ["domino", "causal_v5"];
/// Prefix of the head's tensors in early files of SpecForge.
const OLD_PREFIX: &str = "logit_head.";
/// Renamed prefixes of such files: theirs and ours.
const OLD_NAMES: &[(&str, &str)] =
    &[("logit_head.prefix_gru.", "prefix_gru."), ("logit_head.embed_proj.", "embed_proj.")];
/// Key of the slots in `dflash_config`.
const SHIFT_LABEL: &str = "shift_label";
/// Key of the correction's rank, in `dflash_config` and at the top level.
const EMB_DIM: &str = "emb_dim";

/// Why vLLM and llama.cpp cannot run Domino.
const NO_HEAD: &str = "it has no correction head of Domino (prefix_gru, embed_proj); only SGLang has one";

/// Reads checkpoints of Domino in all layouts.
pub static READER: Reader = Reader {
    class: DominoSettings::CLASS,
    keys: &["block_size", "sample_from_anchor", "mask_token_id", "gru_hidden_dim", EMB_DIM, PURE_DRAFTS_KEY],
    reference: |fields, decoder| settings(DominoSettings::read(fields)?, fields, decoder, false),
    model_types: &[],
    speculators: |fields, decoder| settings(DominoSettings::read(fields)?, fields, decoder, false),
    classes: &[ExternalClass {
        name: SPECFORGE_CLASS,
        tools: "SpecForge",
        read: |fields, tensors, families| read_container(fields, tensors, families, SPECFORGE_CLASS),
        tensor_prefix: None,
    }],
};

/// A Domino in a checkpoint.
#[derive(Debug)]
struct DominoFile {
    settings: DominoSettings,
    /// Whether the head's tensors have [`OLD_PREFIX`].
    has_old_names: bool,
}

/// Checks the settings, and wraps them for the checkpoint.
fn settings(
    settings: DominoSettings,
    fields: &Fields,
    decoder: &Decoder,
    has_old_names: bool,
) -> Result<Settings, CheckpointError> {
    let checked = settings.check_sizes(decoder.vocab_size as i64);
    checked.map_err(|(key, problem)| fields.error(key, problem))?;
    Ok(Arc::new(DominoFile { settings, has_old_names }))
}

/// Reads the `dflash_config` layout of SpecForge, ModelOpt and the published files, whose config names `class`.
///
/// # Errors
/// If a key is missing or wrong.
pub fn read_container(
    fields: &Fields,
    tensors: &Tensors,
    families: &[Family],
    class: &str,
) -> Result<(CheckpointFormat, Drafter), CheckpointError> {
    let config = DflashConfig::read(fields, &[], families, false)?;
    let inner = &config.inner;
    if let Some(other) = inner.text("projector_type")?.filter(|found| !PROJECTORS.contains(found)) {
        return Err(
            inner.error("projector_type", format!("\"{other}\", but {class} has \"{}\"", PROJECTORS[0]))
        );
    }
    let mut keys = merge_outer_block_size(fields, inner)?;
    if let Some(outside) = fields.size::<u64>(EMB_DIM)? {
        let inside = keys.entry(EMB_DIM).or_insert(outside.into());
        if *inside != outside {
            return Err(fields.error(EMB_DIM, format!("{outside}, and in dflash_config {inside}")));
        }
    }
    if config.causal {
        keys.insert(IS_CAUSAL.into(), true.into());
    }
    // A config without `shift_label` has slots that fill in.
    let slots = config.slots.unwrap_or(SlotTarget::FillIn);
    let within = inner.with_map(&keys);
    let own = DominoSettings::read_with_slots(&within, slots)?;
    let own = DominoSettings { blocks: BlockSpec { slots, ..own.blocks }, ..own };
    let has_old_names = tensors.iter().any(|(name, _)| name.starts_with(OLD_PREFIX));
    // Only SpecForge wrote the old names, the old projector and configs without `shift_label`, under either class. SGLang reads none
    // of them.
    let projector = inner.text("projector_type")?;
    let is_complete = projector == Some("domino") && config.slots.is_some();
    let format = match class == SPECFORGE_CLASS || has_old_names || !is_complete {
        true => CheckpointFormat::Specforge,
        false => CheckpointFormat::Modelopt,
    };
    let settings = settings(own, &within, &config.decoder, has_old_names)?;
    Ok((format, config.into_drafter(fields, class, settings)?))
}

impl DominoFile {
    fn fills_in(&self) -> bool {
        self.settings.blocks.slots == SlotTarget::FillIn
    }
}

impl KindSettings for DominoFile {
    fn name(&self) -> &'static str {
        "domino"
    }

    fn title(&self) -> &'static str {
        "Domino"
    }

    fn draft_len(&self) -> u64 {
        self.settings.draft_len() as u64
    }

    fn mask_token_id(&self) -> Option<u64> {
        Some(self.settings.blocks.mask_token_id as u64)
    }

    fn predicts_own_position(&self) -> bool {
        self.fills_in()
    }

    fn method(&self) -> &'static str {
        "dflash"
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        let DominoSettings { blocks, gru } = self.settings;
        let (drafted, size, slots) = (blocks.draft_len(), blocks.block_size, blocks.slots);
        vec![
            ("drafts", format!("{drafted} tokens in blocks of {size}; {slots}")),
            ("mask token", blocks.mask_token_id.to_string()),
            (
                "correction",
                format!(
                    "of rank {}, by a GRU of {} values; not of the first draft",
                    gru.rank, gru.hidden_size
                ),
            ),
        ]
    }

    fn to_json(&self) -> Value {
        let DominoSettings { blocks, gru } = self.settings;
        let BlockSpec { block_size, mask_token_id, slots, .. } = blocks;
        json!({"domino": {
            "block_size": block_size, "mask_token_id": mask_token_id, "slots": slots,
            "gru_hidden_size": gru.hidden_size, "rank": gru.rank,
        }})
    }

    fn add_tensor_shapes(&self, drafter: &Drafter, shapes: &mut TensorShapes) {
        let [width, vocab, state, rank] = [
            drafter.hidden_size,
            drafter.vocab_size,
            self.settings.gru.hidden_size as u64,
            self.settings.gru.rank as u64,
        ]
        .map(|size| size as usize);
        let mut put = |name: &str, shape: Vec<usize>| shapes.push((name.into(), shape));
        put("hidden_norm.weight", vec![width]);
        put("prefix_gru.weight_ih_l0", vec![3 * state, width]);
        put("prefix_gru.weight_hh_l0", vec![3 * state, state]);
        put("embed_proj.0.weight", vec![rank, width + state]);
        put("embed_proj.2.weight", vec![vocab, rank]);
    }

    fn refusal(&self, _: &Drafter, to: CheckpointFormat) -> Option<String> {
        match to {
            CheckpointFormat::Reference | CheckpointFormat::Specforge | CheckpointFormat::Modelopt => None,
            CheckpointFormat::Speculators | CheckpointFormat::Zlab | CheckpointFormat::DeepseekV4 => {
                Some(format!("{to} has no Domino"))
            }
        }
    }

    fn reference_config(&self, _: &Drafter) -> (&'static str, Map<String, Value>) {
        let mut map = Map::new();
        self.settings.blocks.write(&mut map);
        map.extend(self.settings.head_keys());
        (READER.class, map)
    }

    fn renames(&self, format: CheckpointFormat) -> &'static [(&'static str, &'static str)] {
        match self.has_old_names && format == CheckpointFormat::Specforge {
            true => OLD_NAMES,
            false => &[],
        }
    }

    fn dflash_config(&self, to: CheckpointFormat) -> Option<DflashConfigKeys> {
        let DominoSettings { blocks, gru } = self.settings;
        let class = if to == CheckpointFormat::Specforge { SPECFORGE_CLASS } else { DFLASH_CLASS };
        let top = json_map([("block_size", json!(blocks.block_size)), (EMB_DIM, json!(gru.rank))]);
        let mut inner = json_map([
            ("mask_token_id", json!(blocks.mask_token_id)),
            ("projector_type", PROJECTORS[0].into()),
            (SHIFT_LABEL, json!(!self.fills_in())),
        ]);
        inner.extend(self.settings.head_keys());
        Some(DflashConfigKeys { class, top, inner })
    }

    fn engine_format(&self, engine: Engine, _: &Drafter) -> Result<CheckpointFormat, String> {
        match engine {
            Engine::Sglang => Ok(CheckpointFormat::Modelopt),
            Engine::Vllm | Engine::LlamaCpp => Err(format!("{engine} does not run it: {NO_HEAD}")),
        }
    }

    fn gguf_parts(&self, _: &Drafter) -> Result<GgufParts, String> {
        Err(NO_HEAD.into())
    }

    fn engine_support(&self, engine: Engine, format: CheckpointFormat) -> EngineSupport {
        match (engine, format) {
            (Engine::Vllm | Engine::LlamaCpp, _) => EngineSupport::not_loaded(NO_HEAD),
            (Engine::Sglang, CheckpointFormat::Modelopt) => EngineSupport::loads_untested(
                "--speculative-algorithm DFLASH, in bfloat16 on a GPU; it drafts one token less than a block has slots",
            ),
            (Engine::Sglang, _) => EngineSupport::not_loaded("the class is not registered"),
        }
    }
}
