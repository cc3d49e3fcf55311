//! Checkpoints of xPress in the layouts of other tools.

use std::sync::Arc;

use deepspec_checkpoint::{
    CheckpointError, CheckpointFormat, Decoder, DflashConfig, DflashConfigKeys, Drafter, Engine,
    EngineSupport, ExternalClass, Family, Fields, GgufParts, KindSettings, Reader, Settings, Speculators,
    TensorShapes, json_map,
};
use deepspec_core::SlotTarget;
use serde_json::{Map, Value, json};

use super::model::{
    BACKBONE, CANDIDATES, RefinerRecipe, SELECTOR, XPressBackbone, XPressSettings, read_backbone,
};
use crate::block_common::formats::merge_outer_block_size;
use crate::block_common::{BlockSpec, CONVOLUTION_KEYS, Convolution, IS_CAUSAL};
use crate::draft_model::DrafterSettings as _;

/// Reads checkpoints of xPress in all layouts.
pub static READER: Reader = Reader {
    class: XPressSettings::CLASS,
    keys: &[
        "block_size",
        "sample_from_anchor",
        "mask_token_id",
        "xpress_rank",
        "xpress_mlp_ratio",
        "xpress_num_passes",
        CANDIDATES,
        BACKBONE,
        SELECTOR,
        CONVOLUTION_KEYS[0],
        CONVOLUTION_KEYS[1],
    ],
    reference: |fields, decoder| validate(XPressSettings::read(fields)?, fields, decoder),
    model_types: &["xpress"],
    speculators: read_speculators,
    classes: &[
        ExternalClass {
            name: authors_class(XPressBackbone::DFlash),
            tools: "the authors of xPress",
            read: |fields, _, families| read_authors(fields, families, XPressBackbone::DFlash),
            tensor_prefix: None,
        },
        ExternalClass {
            name: authors_class(XPressBackbone::DFlash2),
            tools: "the authors of xPress, on the layers of DFlash 2",
            read: |fields, _, families| read_authors(fields, families, XPressBackbone::DFlash2),
            tensor_prefix: None,
        },
    ],
};

/// Class in the authors' layout, which adds the refiner to z-lab's config of a DFlash or DFlash 2. The reference's class of layers of Qwen3
/// has the first name, too; the authors' config has a `dflash_config`.
const fn authors_class(backbone: XPressBackbone) -> &'static str {
    match backbone {
        XPressBackbone::DFlash => "Qwen3XPressModel",
        XPressBackbone::DFlash2 => "Qwen3XPressDFlash2Model",
    }
}

/// The authors' key for the inner width of the refiner's MLP.
const MLP_WIDTH: &str = "xpress_mlp_hidden";
/// The authors' key for the slots that the refiner mixes.
const MIXED_SLOTS: &str = "xpress_block_size";
/// Keys of the authors beside `dflash_config`. The sizes of a selector mean nothing without one. The last two choose kernels of vLLM.
const AUTHORS_KEYS: [&str; 11] = [
    "xpress_rank",
    MLP_WIDTH,
    MIXED_SLOTS,
    "xpress_num_passes",
    CANDIDATES,
    BACKBONE,
    SELECTOR,
    "selector_rank",
    "selector_top_k",
    "xpress_fused_kernel",
    "xpress_compile_head",
];

/// Reads the authors' layout for vLLM. The convolutions of DFlash 2 are in `dflash_config`.
fn read_authors(
    fields: &Fields,
    families: &[Family],
    backbone: XPressBackbone,
) -> Result<(CheckpointFormat, Drafter), CheckpointError> {
    let class = authors_class(backbone);
    let config = DflashConfig::read(fields, &AUTHORS_KEYS, families, false)?;
    if config.slots == Some(SlotTarget::AnchorPredicts) {
        return Err(fields.error("sample_from_anchor", "true; the slots of xPress fill in"));
    }
    let mut keys = merge_outer_block_size(fields, &config.inner)?;
    let own = AUTHORS_KEYS.iter().filter_map(|key| Some((key.to_string(), fields.map.get(*key)?.clone())));
    keys.extend(own);
    if let Some(found) = fields.text(BACKBONE)?.filter(|&found| found != backbone.name()) {
        let problem = format!("\"{found}\", but {class} has the layers of {}", backbone.name());
        return Err(fields.error(BACKBONE, problem));
    }
    keys.insert(BACKBONE.into(), backbone.name().into());
    if config.causal {
        keys.insert(IS_CAUSAL.into(), true.into());
    }
    let (rank, width): (i64, i64) = (fields.required_size("xpress_rank")?, fields.required_size(MLP_WIDTH)?);
    if width % rank != 0 {
        return Err(fields.error(MLP_WIDTH, format!("{width} is no multiple of the rank {rank}")));
    }
    keys.insert("xpress_mlp_ratio".into(), (width / rank).into());
    let merged = fields.with_map(&keys);
    let settings = XPressSettings::read(&merged)?;
    let size = settings.blocks.block_size as u64;
    if let Some(found) = fields.size(MIXED_SLOTS)?.filter(|&found: &u64| found != size) {
        return Err(fields.error(MIXED_SLOTS, format!("{found}, and the blocks have {size} slots")));
    }
    let settings = validate(settings, &merged, &config.decoder)?;
    Ok((CheckpointFormat::Zlab, config.into_drafter(fields, class, settings)?))
}

/// Key of speculators for the refiner's passes.
const PASSES: &str = "num_jacobi_passes";

fn validate(
    settings: XPressSettings,
    fields: &Fields,
    decoder: &Decoder,
) -> Result<Settings, CheckpointError> {
    let checked = settings.check_sizes(decoder.vocab_size as i64, decoder.hidden_size as i64);
    checked.map_err(|(key, problem)| fields.error(key, problem))?;
    Ok(Arc::new(settings))
}

fn read_speculators(fields: &Fields, decoder: &mut Decoder) -> Result<Settings, CheckpointError> {
    // The package has the same defaults.
    let RefinerRecipe { rank, mlp_ratio, num_passes } = RefinerRecipe::default();
    let settings = XPressSettings {
        blocks: BlockSpec::read(fields, SlotTarget::FillIn)?,
        rank: fields.size("xpress_rank")?.unwrap_or(rank),
        mlp_ratio: fields.size("xpress_mlp_ratio")?.unwrap_or(mlp_ratio),
        num_passes: fields.size(PASSES)?.unwrap_or(num_passes),
        convolution: read_backbone(fields, Convolution::read_or_default)?,
    };
    validate(settings, fields, decoder)
}

impl XPressSettings {
    /// Keys of the blocks, which all layouts share.
    fn block_keys(&self) -> Map<String, Value> {
        let BlockSpec { block_size, mask_token_id, .. } = self.blocks;
        json_map([
            ("block_size", json!(block_size)),
            ("mask_token_id", json!(mask_token_id)),
            ("sample_from_anchor", json!(false)),
        ])
    }
}

/// Why the engine does not load the drafter.
fn no_engine(engine: Engine) -> &'static str {
    match engine {
        Engine::Vllm => "vLLM 0.32 has no xPress; its pull request 54448, untested here, adds it",
        Engine::Sglang => "SGLang has no xPress",
        Engine::LlamaCpp => "llama.cpp has no xPress",
    }
}

impl KindSettings for XPressSettings {
    fn name(&self) -> &'static str {
        "xpress"
    }

    fn title(&self) -> &'static str {
        "xPress"
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
        let Self { blocks, rank, mlp_ratio, num_passes, convolution } = self;
        let (drafted, size, slots) = (blocks.draft_len(), blocks.block_size, blocks.slots);
        let inner = rank * mlp_ratio;
        let mut lines = vec![
            ("drafts", format!("{drafted} tokens in blocks of {size}; {slots}")),
            ("mask token", blocks.mask_token_id.to_string()),
            ("refiner", format!("of rank {rank}, MLP of width {inner}, {num_passes} passes")),
        ];
        lines.extend(convolution.map(|convolution| ("convolution", convolution.describe())));
        lines
    }

    fn to_json(&self) -> Value {
        let mut keys = self.block_keys();
        keys.extend(self.size_keys());
        json!({"xpress": keys})
    }

    fn add_tensor_shapes(&self, drafter: &Drafter, shapes: &mut TensorShapes) {
        let [width, vocab] = [drafter.hidden_size, drafter.vocab_size].map(|size| size as usize);
        let [rank, ratio] = [self.rank, self.mlp_ratio].map(|size| size as usize);
        let (size, inner) = (self.blocks.block_size, rank * ratio);
        shapes.push(("hidden_norm.weight".into(), vec![width]));
        if let Some(convolution) = &self.convolution {
            convolution.add_tensor_shapes(drafter, shapes);
        }
        shapes.push(("xpress_head.mix.L".into(), vec![rank, size, size]));
        let matrices = [
            ("w1", [vocab, rank]),
            ("w2", [vocab, rank]),
            ("down_h", [rank, width]),
            ("down_g", [rank, width]),
            ("in_proj", [rank, 3 * rank]),
            ("mlp.gate_proj", [inner, rank]),
            ("mlp.up_proj", [inner, rank]),
            ("mlp.down_proj", [rank, inner]),
        ];
        shapes.extend(matrices.map(|(name, shape)| (format!("xpress_head.{name}.weight"), shape.to_vec())));
    }

    fn refusal(&self, _: &Drafter, to: CheckpointFormat) -> Option<String> {
        match to {
            CheckpointFormat::Reference | CheckpointFormat::Speculators | CheckpointFormat::Zlab => None,
            CheckpointFormat::Specforge | CheckpointFormat::Modelopt | CheckpointFormat::DeepseekV4 => {
                Some(format!("{to} has no layout for xPress"))
            }
        }
    }

    fn reference_config(&self, _: &Drafter) -> (&'static str, Map<String, Value>) {
        let mut map = self.block_keys();
        map.insert(CANDIDATES.into(), json!(0));
        map.extend(self.size_keys());
        (READER.class, map)
    }

    fn speculators_config(&self) -> Option<Speculators> {
        let mut keys = self.block_keys();
        keys.extend(json_map([
            ("xpress_rank", json!(self.rank)),
            ("xpress_mlp_ratio", json!(self.mlp_ratio)),
            (PASSES, json!(self.num_passes)),
        ]));
        keys.extend(self.backbone_keys());
        Some(Speculators {
            model_type: "xpress",
            class: "XPressSpeculator",
            taps: Some("aux_hidden_state_layer_ids"),
            keys,
        })
    }

    fn dflash_config(&self, _: CheckpointFormat) -> Option<DflashConfigKeys> {
        let BlockSpec { block_size, mask_token_id, .. } = self.blocks;
        let top = json_map([
            ("block_size", json!(block_size)),
            ("sample_from_anchor", json!(false)),
            ("xpress_rank", json!(self.rank)),
            (MLP_WIDTH, json!(self.rank * self.mlp_ratio)),
            (MIXED_SLOTS, json!(block_size)),
            ("xpress_num_passes", json!(self.num_passes)),
        ]);
        let mut inner = json_map([("mask_token_id", json!(mask_token_id))]);
        let sizes = self.convolution.iter().flat_map(Convolution::named_sizes);
        inner.extend(sizes.map(|(key, size)| (key.into(), size.into())));
        Some(DflashConfigKeys { class: authors_class(self.backbone()), top, inner })
    }

    fn renames(&self, format: CheckpointFormat) -> &'static [(&'static str, &'static str)] {
        match format {
            CheckpointFormat::Speculators => &[
                ("refiner_head.token_embed.", "xpress_head.w1."),
                ("refiner_head.readout.", "xpress_head.w2."),
                ("refiner_head.mix_l", "xpress_head.mix.L"),
                ("refiner_head.mlp_gate.", "xpress_head.mlp.gate_proj."),
                ("refiner_head.mlp_up.", "xpress_head.mlp.up_proj."),
                ("refiner_head.mlp_down.", "xpress_head.mlp.down_proj."),
                ("refiner_head.", "xpress_head."),
            ],
            _ => &[],
        }
    }

    fn engine_format(&self, engine: Engine, _: &Drafter) -> Result<CheckpointFormat, String> {
        Err(no_engine(engine).into())
    }

    fn gguf_parts(&self, _: &Drafter) -> Result<GgufParts, String> {
        Err(no_engine(Engine::LlamaCpp).into())
    }

    fn engine_support(&self, engine: Engine, _: CheckpointFormat) -> EngineSupport {
        EngineSupport::not_loaded(no_engine(engine))
    }
}
