//! Checkpoints of DFlash 2 in the layouts of other tools.

use std::sync::Arc;

use deepspec_checkpoint::{
    CheckpointError, CheckpointFormat, Decoder, DflashConfig, DflashConfigKeys, Drafter, Engine,
    EngineLayout, EngineSupport, ExternalClass, Family, Fields, GgufParts, GgufValue, KindSettings, Reader,
    Shapes, Speculators, keys,
};
use deepspec_core::Slots;
use serde_json::{Map, Value, json};

use super::model::DFlash2Config;
use crate::block_common::formats::{GGUF_ARCHITECTURE, HEADS, block_size, mask_token};
use crate::draft_model::DrafterConfig;

/// How DFlash 2 is read.
pub static READER: Reader = Reader {
    class: DFlash2Config::CLASS,
    keys: &[
        "block_size",
        "sample_from_anchor",
        "mask_token_id",
        "conv_kernel_size",
        "conv_group_size",
        "selector_rank",
        "selector_top_k",
    ],
    reference: |fields, decoder| Ok(Arc::new(DFlash2Layout::read(fields, decoder)?)),
    model_types: &["dflash2"],
    speculators: |fields, decoder| Ok(Arc::new(DFlash2Layout::read(fields, decoder)?)),
    classes: &[ExternalClass {
        name: ZLAB_CLASS,
        tools: "z-lab",
        read: |fields, _, families| read_zlab(fields, families),
    }],
};

/// The class in z-lab's layout.
const ZLAB_CLASS: &str = "DFlash2DraftModel";

/// More ranks of a selector are a mistake.
const MAX_RANK: u64 = 1 << 20;

/// DFlash 2's own settings as checkpoints say them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DFlash2Layout {
    /// B, slots of a block.
    block_size: u64,
    /// Stands for the tokens to be predicted.
    mask_token_id: u64,
    /// Taps of a convolution.
    conv_kernel_size: u64,
    /// Channels that share a dynamic kernel.
    conv_group_size: u64,
    /// Rank of the selector.
    selector_rank: u64,
    /// Candidates of a slot.
    selector_top_k: u64,
}

/// z-lab's, whose keys stand within `dflash_config`.
fn read_zlab(fields: &Fields, families: &[Family]) -> Result<(CheckpointFormat, Drafter), CheckpointError> {
    let config = DflashConfig::read(fields, &HEADS, families)?;
    if config.slots == Some(Slots::AnchorPredicts) {
        return Err(fields.error("sample_from_anchor", "true; the slots of DFlash 2 fill in"));
    }
    // As with DFlash, the block size may stand outside.
    let mut keys = config.inner.map.clone();
    if let Some(outside) = fields.size::<u64>("block_size")? {
        let inside = keys.entry("block_size").or_insert(outside.into());
        if *inside != outside {
            return Err(fields.error("block_size", format!("{outside}, and in dflash_config {inside}")));
        }
    }
    let kind = Arc::new(DFlash2Layout::read(&config.inner.with(&keys), &config.decoder)?);
    Ok((CheckpointFormat::Zlab, config.drafter(fields, ZLAB_CLASS, kind)?))
}

impl DFlash2Layout {
    /// Reads the settings where all of them stand together.
    ///
    /// # Errors
    /// A key that is missing or wrong.
    fn read(fields: &Fields, decoder: &Decoder) -> Result<Self, CheckpointError> {
        if fields.flag("sample_from_anchor")?.unwrap_or(false) {
            return Err(fields.error("sample_from_anchor", "true; the slots of DFlash 2 fill in"));
        }
        let block_size = block_size(fields, Slots::FillIn)?;
        let within = |key: &str, most: u64| match fields.required_size(key)? {
            found if found <= most => Ok(found),
            found => Err(fields.error(key, format!("{found} is not between 1 and {most}"))),
        };
        let group = fields.required_size("conv_group_size")?;
        if !decoder.hidden_size.is_multiple_of(group) {
            let width = decoder.hidden_size;
            let problem = format!("{group} does not divide the hidden size {width}");
            return Err(fields.error("conv_group_size", problem));
        }
        Ok(Self {
            block_size,
            mask_token_id: mask_token(fields, decoder.vocab_size)?,
            conv_kernel_size: within("conv_kernel_size", block_size)?,
            conv_group_size: group,
            selector_rank: within("selector_rank", MAX_RANK)?,
            selector_top_k: within("selector_top_k", decoder.vocab_size)?,
        })
    }

    fn keys(&self) -> Map<String, Value> {
        keys([
            ("block_size", json!(self.block_size)),
            ("mask_token_id", json!(self.mask_token_id)),
            ("conv_kernel_size", json!(self.conv_kernel_size)),
            ("conv_group_size", json!(self.conv_group_size)),
            ("selector_rank", json!(self.selector_rank)),
            ("selector_top_k", json!(self.selector_top_k)),
        ])
    }
}

impl KindSettings for DFlash2Layout {
    fn name(&self) -> &'static str {
        "dflash2"
    }

    fn title(&self) -> &'static str {
        "DFlash 2"
    }

    fn drafted(&self) -> u64 {
        self.block_size - 1
    }

    fn mask_token_id(&self) -> Option<u64> {
        Some(self.mask_token_id)
    }

    fn predicts_own_position(&self) -> bool {
        true
    }

    fn method(&self) -> &'static str {
        "dflash"
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        let Self { conv_kernel_size, conv_group_size, selector_rank, selector_top_k, .. } = self;
        let (drafted, size, slots) = (self.drafted(), self.block_size, Slots::FillIn);
        vec![
            ("drafts", format!("{drafted} tokens in blocks of {size}; {slots}")),
            ("mask token", self.mask_token_id.to_string()),
            ("convolution", format!("{conv_kernel_size} taps, groups of {conv_group_size} channels")),
            ("selector", format!("of rank {selector_rank} over {selector_top_k} candidates a slot")),
        ]
    }

    fn to_json(&self) -> Value {
        json!({"dflash2": self.keys()})
    }

    fn tensors(&self, drafter: &Drafter, shapes: &mut Shapes) {
        let [width, vocab] = [drafter.hidden_size, drafter.vocab_size].map(|size| size as usize);
        let [taps, group, rank] =
            [self.conv_kernel_size, self.conv_group_size, self.selector_rank].map(|size| size as usize);
        let mut put = |name: String, shape: Vec<usize>| shapes.push((name, shape));
        put("hidden_norm.weight".into(), vec![width]);
        for (layer, half) in (0..drafter.layers).flat_map(|layer| [(layer, "attention"), (layer, "mlp")]) {
            let conv = format!("layers.{layer}.{half}_conv");
            put(format!("{conv}.base_kernel"), vec![2, taps, width]);
            put(format!("{conv}.kernel_projection.weight"), vec![2 * taps * (width / group), width]);
        }
        put("candidate_selector.predecessor_codebook".into(), vec![vocab, rank]);
        put("candidate_selector.successor_codebook".into(), vec![vocab, rank]);
        put("candidate_selector.hidden_projection.weight".into(), vec![rank, width]);
    }

    fn refusal(&self, _: &Drafter, to: CheckpointFormat) -> Option<String> {
        match to {
            CheckpointFormat::Reference | CheckpointFormat::Speculators | CheckpointFormat::Zlab => None,
            CheckpointFormat::Specforge | CheckpointFormat::Modelopt => {
                Some("this dialect has no DFlash 2".into())
            }
        }
    }

    fn reference(&self, _: &Drafter) -> (&'static str, Map<String, Value>) {
        let mut map = self.keys();
        map.insert("sample_from_anchor".into(), false.into());
        (READER.class, map)
    }

    fn speculators(&self) -> Speculators {
        let mut keys = self.keys();
        keys.insert("sample_from_anchor".into(), false.into());
        Speculators { model_type: "dflash2", class: ZLAB_CLASS, taps: "aux_hidden_state_layer_ids", keys }
    }

    fn dflash_config(&self, _: CheckpointFormat) -> Option<DflashConfigKeys> {
        Some(DflashConfigKeys { class: ZLAB_CLASS, top: Map::new(), inner: self.keys() })
    }

    fn engine_layout(&self, _: Engine, _: &Drafter) -> Result<EngineLayout, String> {
        Ok(EngineLayout::Format(CheckpointFormat::Zlab))
    }

    fn gguf(&self, drafter: &Drafter) -> Result<GgufParts, String> {
        let (width, candidates) = (drafter.hidden_size, self.selector_top_k);
        if width < candidates * (candidates + 1) {
            return Err(format!(
                "llama.cpp lays k (k + 1) scores of a selector into a hidden state, and {candidates} candidates are too many for \
                 {width} values"
            ));
        }
        let sizes = [
            ("block_size", self.block_size),
            ("conv_kernel_size", self.conv_kernel_size),
            ("conv_group_size", self.conv_group_size),
            ("selector_rank", self.selector_rank),
            ("selector_top_k", self.selector_top_k),
        ];
        let sizes = sizes.into_iter().map(|(key, size)| (key, GgufValue::U32(size as u32)));
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

    fn vllm(&self, dialect: CheckpointFormat) -> EngineSupport {
        match dialect {
            CheckpointFormat::Zlab => EngineSupport::tried(true, "method dflash"),
            CheckpointFormat::Speculators => EngineSupport::read(true, "method dflash, with PR 53797"),
            _ => EngineSupport::read(false, "the class is not registered; convert to vllm"),
        }
    }

    fn sglang(&self, dialect: CheckpointFormat) -> EngineSupport {
        match dialect {
            CheckpointFormat::Zlab => {
                EngineSupport::read(true, "--speculative-algorithm DFLASH, with PR 35371")
            }
            CheckpointFormat::Speculators => EngineSupport::read(
                false,
                "speculators_model_type was refused when read (issues 30982, 34734); convert to sglang",
            ),
            _ => EngineSupport::read(false, "the class is not registered; convert to sglang"),
        }
    }
}
