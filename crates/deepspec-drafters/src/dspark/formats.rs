//! Checkpoints of DSpark and DFlash in the layouts of other tools.

use std::sync::Arc;

use deepspec_checkpoint::{
    CAUSAL_KEYS, CheckpointError, CheckpointFormat, Decoder, DflashConfig, DflashConfigKeys, Drafter, Engine,
    EngineSupport, ExternalClass, Family, Fields, GgufParts, GgufValue, Incompatibility, KindSettings,
    Reader, SGLANG_HAS_NO_USE_SWA, Settings, Speculators, TensorShapes, Tensors, json_map,
};
use deepspec_core::SlotTarget;
use serde_json::{Map, Value, json};

use super::model::{ConfidenceSettings, DSparkSettings, MarkovKind};
use crate::block_common::formats::{GGUF_ARCHITECTURE, HEAD_KEYS, SGLANG_REFUSAL, merge_outer_block_size};
use crate::block_common::{BlockSpec, IS_CAUSAL};
use crate::domino;
use crate::draft_model::DrafterSettings as _;

/// Why checkpoints that have heads, and slots of the convention `fill_in`, are not written for engines.
const UNTESTED_HEADS: &str = "heads beside slots that fill in are not written: no engine was tried with them";

/// Why checkpoints with a window in some layers only are not written for other tools.
const MIXED_WINDOWS: &str = "`layer_types`: only some draft layers have a sliding window, and tools differ in who sees what within \
     their blocks";

/// Reads checkpoints of DSpark and DFlash in all layouts.
pub static READER: Reader = Reader {
    class: DSparkSettings::CLASS,
    keys: &[
        "block_size",
        "sample_from_anchor",
        "mask_token_id",
        HEAD_KEYS[0],
        HEAD_KEYS[1],
        HEAD_KEYS[2],
        HEAD_KEYS[3],
        CAUSAL_KEYS[0],
        CAUSAL_KEYS[1],
        CAUSAL_KEYS[2],
    ],
    reference: |fields, decoder| validate(DSparkSettings::read(fields)?, fields, decoder),
    model_types: &["dspark", "dflash"],
    speculators: read_speculators,
    classes: &[
        ExternalClass {
            name: "DSparkDraftModel",
            tools: "SpecForge",
            read: |fields, tensors, families| {
                read_dflash_container(fields, tensors, families, "DSparkDraftModel", "dspark")
            },
            tensor_prefix: None,
        },
        ExternalClass {
            name: "DFlashDraftModel",
            tools: "z-lab, SpecForge, ModelOpt",
            read: |fields, tensors, families| {
                read_dflash_container(fields, tensors, families, "DFlashDraftModel", "dflash")
            },
            tensor_prefix: None,
        },
    ],
};

fn validate(
    settings: DSparkSettings,
    fields: &Fields,
    decoder: &Decoder,
) -> Result<Settings, CheckpointError> {
    let vocab_size = decoder.vocab_size as i64;
    settings.check_sizes(vocab_size).map_err(|(key, problem)| fields.error(key, problem))?;
    Ok(Arc::new(settings))
}

fn read_speculators(fields: &Fields, decoder: &mut Decoder) -> Result<Settings, CheckpointError> {
    let has_heads = fields.text("speculators_model_type")? == Some("dspark");
    let (markov, confidence) = if has_heads { DSparkSettings::read_heads(fields)? } else { (None, None) };
    // Checkpoints without `sample_from_anchor` are older than this key, and have the slot convention `fill_in`.
    let blocks = BlockSpec::read(fields, SlotTarget::FillIn)?;
    validate(DSparkSettings { blocks, markov, confidence }, fields, decoder)
}

/// Reads the `dflash_config` layout of z-lab's DFlash, which SpecForge and ModelOpt also use for DSpark, with different keys. `projector`
/// is the default of the config's `projector_type`.
fn read_dflash_container(
    fields: &Fields,
    tensors: &Tensors,
    families: &[Family],
    class: &str,
    projector: &str,
) -> Result<(CheckpointFormat, Drafter), CheckpointError> {
    let mut config = DflashConfig::read(fields, &HEAD_KEYS, families, true)?;
    let inner = &config.inner;
    let projector = inner.text("projector_type")?.unwrap_or(projector);
    // Domino's published files have the class of DFlash.
    if class == "DFlashDraftModel" && domino::PROJECTORS.contains(&projector) {
        return domino::read_container(fields, tensors, families, class);
    }
    // ModelOpt names the heads' tensors without a prefix, and has a flag that SpecForge lacks.
    let flat_heads = tensors.iter().any(|(name, _)| name.starts_with("markov_w1."));
    let is_modelopt = flat_heads || inner.map.contains_key("use_confidence_head");
    let format = match projector {
        "dflash" => CheckpointFormat::Zlab,
        "dspark" if is_modelopt => CheckpointFormat::Modelopt,
        "dspark" => CheckpointFormat::Specforge,
        other => {
            let reason = format!("the projector \"{other}\" has no counterpart in the other formats");
            let incompatibility = Incompatibility { key: "dflash_config.projector_type".into(), reason };
            config.decoder.incompatibilities.insert(0, incompatibility);
            CheckpointFormat::Specforge
        }
    };
    let slots = config.slots.unwrap_or(match format {
        CheckpointFormat::Zlab => SlotTarget::FillIn,
        _ => SlotTarget::AnchorPredicts,
    });
    let (markov, confidence) = match format {
        CheckpointFormat::Zlab => (None, None),
        CheckpointFormat::Modelopt => {
            let has_confidence = inner.flag("use_confidence_head")?.unwrap_or(false);
            let (markov, _) = DSparkSettings::read_heads(inner)?;
            (markov, has_confidence.then_some(ConfidenceSettings { with_markov: markov.is_some() }))
        }
        _ => DSparkSettings::read_heads(inner)?,
    };
    let keys = merge_outer_block_size(fields, inner)?;
    let within = inner.with_map(&keys);
    let blocks = BlockSpec { slots, causal: config.causal, ..BlockSpec::read(&within, slots)? };
    let settings = validate(DSparkSettings { blocks, markov, confidence }, &within, &config.decoder)?;
    Ok((format, config.into_drafter(fields, class, settings)?))
}

impl DSparkSettings {
    fn fills_in(&self) -> bool {
        self.blocks.slots == SlotTarget::FillIn
    }

    fn has_heads(&self) -> bool {
        self.markov.is_some() || self.confidence.is_some()
    }

    /// Whether the Markov head is vanilla or absent, as vLLM and llama.cpp require.
    fn is_vanilla(&self) -> bool {
        self.markov.is_none_or(|markov| markov.kind == MarkovKind::Vanilla)
    }

    /// All keys of the heads, with defaults for absent heads, for tools that require every key.
    fn all_head_keys(&self) -> Map<String, Value> {
        let mut map =
            json_map([("markov_head_type", json!("vanilla")), ("confidence_head_with_markov", json!(false))]);
        let mut own = Map::new();
        self.write_heads(&mut own);
        map.extend(own);
        map
    }
}

impl KindSettings for DSparkSettings {
    fn name(&self) -> &'static str {
        if self.has_heads() { "dspark" } else { "dflash" }
    }

    fn title(&self) -> &'static str {
        if self.has_heads() { "DSpark" } else { "DFlash" }
    }

    fn draft_len(&self) -> u64 {
        self.blocks.draft_len() as u64
    }

    fn mask_token_id(&self) -> Option<u64> {
        Some(self.blocks.mask_token_id as u64)
    }

    fn predicts_own_position(&self) -> bool {
        self.fills_in()
    }

    /// vLLM's `method` for this drafter. It depends on the slots, not on the heads.
    fn method(&self) -> &'static str {
        if self.fills_in() { "dflash" } else { "dspark" }
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        let markov = self.markov.map_or_else(
            || "no Markov head".into(),
            |markov| format!("Markov head {} of rank {}", markov.kind.name(), markov.rank),
        );
        let confidence = match self.confidence {
            None => "no confidence head",
            Some(ConfidenceSettings { with_markov: true }) => "confidence head on state and Markov embedding",
            Some(ConfidenceSettings { with_markov: false }) => "confidence head on the state",
        };
        let BlockSpec { block_size, slots, mask_token_id, causal, .. } = self.blocks;
        let blocks = if causal { "causal blocks" } else { "blocks" };
        vec![
            ("drafts", format!("{} tokens in {blocks} of {block_size}; {slots}", self.blocks.draft_len())),
            ("mask token", mask_token_id.to_string()),
            ("heads", format!("{markov}, {confidence}")),
        ]
    }

    fn to_json(&self) -> Value {
        let BlockSpec { block_size, slots, mask_token_id, causal, .. } = self.blocks;
        let markov = self.markov.map(|head| json!({"kind": head.kind, "rank": head.rank}));
        let with_markov = self.confidence.map(|head| head.with_markov);
        json!({"block": {
            "block_size": block_size, "mask_token_id": mask_token_id, "slots": slots, "causal": causal,
            "markov": markov,
            "confidence_with_markov": with_markov,
        }})
    }

    fn add_tensor_shapes(&self, drafter: &Drafter, shapes: &mut TensorShapes) {
        let mut put = |name: &str, shape: Vec<usize>| shapes.push((name.into(), shape));
        let width = drafter.hidden_size as usize;
        put("hidden_norm.weight", vec![width]);
        let (vocab, drafts) = (drafter.vocab_size as usize, drafter.draft_vocab_size as usize);
        if let Some(markov) = self.markov {
            let rank = markov.rank as usize;
            put("markov_head.markov_w1.weight", vec![vocab, rank]);
            put("markov_head.markov_w2.weight", vec![drafts, rank]);
            let extra = match markov.kind {
                MarkovKind::Vanilla => None,
                MarkovKind::Gated => Some(("gate_proj", rank, width + rank)),
                MarkovKind::Rnn => Some(("joint_proj", 3 * rank, 2 * rank + width)),
            };
            if let Some((name, out, read)) = extra {
                put(&format!("markov_head.{name}.weight"), vec![out, read]);
                put(&format!("markov_head.{name}.bias"), vec![out]);
            }
        }
        if let Some(ConfidenceSettings { with_markov }) = self.confidence {
            let rank = self.markov.filter(|_| with_markov).map_or(0, |markov| markov.rank as usize);
            put("confidence_head.proj.weight", vec![1, width + rank]);
            put("confidence_head.proj.bias", vec![1]);
        }
    }

    fn refusal(&self, drafter: &Drafter, to: CheckpointFormat) -> Option<String> {
        let needs = match to {
            // Both formats can store either convention of the slots.
            CheckpointFormat::Reference | CheckpointFormat::Speculators => self.blocks.slots,
            CheckpointFormat::Zlab => SlotTarget::FillIn,
            CheckpointFormat::Specforge | CheckpointFormat::Modelopt | CheckpointFormat::DeepseekV4 => {
                SlotTarget::AnchorPredicts
            }
        };
        if self.blocks.slots != needs {
            return Some(format!(
                "the weights are not interchangeable, only the container is: in this checkpoint {}, in {to} {needs}; it has to be \
                 trained anew",
                self.blocks.slots
            ));
        }
        let has_mixed_windows = drafter.has_windows() && drafter.shared_window().is_none();
        match to {
            CheckpointFormat::Speculators if drafter.has_windows() => {
                Some("speculators has no key for a sliding window of all layers".into())
            }
            CheckpointFormat::Zlab | CheckpointFormat::Specforge | CheckpointFormat::Modelopt
                if has_mixed_windows =>
            {
                Some(MIXED_WINDOWS.into())
            }
            CheckpointFormat::Zlab if self.has_heads() => Some("z-lab's DFlash has no heads".into()),
            CheckpointFormat::Speculators if drafter.has_attention_sinks() => {
                Some("speculators has no attention sinks".into())
            }
            CheckpointFormat::Speculators if self.blocks.causal => {
                Some("speculators has no key for causal blocks".into())
            }
            CheckpointFormat::Speculators if self.fills_in() && self.has_heads() => {
                Some("heads beside z-lab's slots: no tool serves this".into())
            }
            CheckpointFormat::Modelopt if self.markov.is_none() => {
                Some("ModelOpt's DSpark needs a Markov head, and its plain DFlash has z-lab's slots".into())
            }
            CheckpointFormat::Modelopt
                if self.confidence == Some(ConfidenceSettings { with_markov: false }) =>
            {
                Some("ModelOpt's confidence head always reads the Markov embedding, this one does not".into())
            }
            _ => None,
        }
    }

    fn reference_config(&self, _: &Drafter) -> (&'static str, Map<String, Value>) {
        let mut map = Map::new();
        self.blocks.write(&mut map);
        self.write_heads(&mut map);
        (READER.class, map)
    }

    fn speculators_config(&self) -> Option<Speculators> {
        // `model_type` dflash implies `fill_in`, and dspark implies `anchor_predicts`. A drafter without heads whose slots all draft is
        // therefore written as dspark.
        let is_dflash = !self.has_heads() && self.fills_in();
        let mut keys = Map::new();
        self.blocks.write(&mut keys);
        keys.insert("sample_from_anchor".into(), json!(!self.fills_in()));
        if !is_dflash {
            keys.extend(self.all_head_keys());
        }
        let (model_type, class) =
            if is_dflash { ("dflash", "DFlashSpeculator") } else { ("dspark", "DSparkSpeculator") };
        Some(Speculators { model_type, class, taps: Some("aux_hidden_state_layer_ids"), keys })
    }

    fn dflash_config(&self, to: CheckpointFormat) -> Option<DflashConfigKeys> {
        let mut top = json_map([("block_size", json!(self.blocks.block_size))]);
        let mut inner = json_map([("mask_token_id", json!(self.blocks.mask_token_id))]);
        if self.blocks.causal {
            top.insert(IS_CAUSAL.into(), true.into());
            inner.extend(["causal", "causal_head"].map(|key| (key.into(), true.into())));
        }
        let mut put = |key: &str, value: Value| inner.insert(key.into(), value);
        let class = match to {
            CheckpointFormat::Specforge => {
                put("projector_type", "dspark".into());
                let heads = self.all_head_keys();
                // vLLM reads these keys at the top level.
                top.extend(heads.clone());
                inner.extend(heads);
                "DSparkDraftModel"
            }
            CheckpointFormat::Modelopt => {
                put("projector_type", "dspark".into());
                put("shift_label", true.into());
                put("causal", self.blocks.causal.into());
                put("use_confidence_head", self.confidence.is_some().into());
                let heads = self.all_head_keys().into_iter();
                inner.extend(heads.filter(|(key, _)| key.starts_with("markov")));
                "DFlashDraftModel"
            }
            _ => "DFlashDraftModel",
        };
        Some(DflashConfigKeys { class, top, inner })
    }

    fn engine_format(&self, engine: Engine, drafter: &Drafter) -> Result<CheckpointFormat, String> {
        if drafter.has_windows() && engine == Engine::Sglang {
            return Err(SGLANG_HAS_NO_USE_SWA.into());
        }
        if drafter.has_windows() && drafter.shared_window().is_none() {
            return Err(MIXED_WINDOWS.into());
        }
        if self.fills_in() {
            return if self.has_heads() { Err(UNTESTED_HEADS.into()) } else { Ok(CheckpointFormat::Zlab) };
        }
        match self.markov {
            Some(markov) if markov.kind != MarkovKind::Vanilla => Err(format!(
                "this layout is for the vanilla Markov head, and not for one that is {}; SGLang reads that in the reference's layout",
                markov.kind.name()
            )),
            _ => Ok(CheckpointFormat::Reference),
        }
    }

    fn gguf_parts(&self, drafter: &Drafter) -> Result<GgufParts, String> {
        if drafter.has_windows() {
            return Err("sliding windows are not written to GGUF files".into());
        }
        let flag = |key, value| (key, GgufValue::Bool(value));
        let mut parts = GgufParts {
            keys: vec![
                ("block_size", GgufValue::U32(self.blocks.block_size as u32)),
                flag("sample_from_anchor", !self.fills_in()),
            ],
            layer_names: vec![("self_attn.attention_sink_bias", "attn_sinks.weight")],
            architecture: GGUF_ARCHITECTURE,
            ..GgufParts::default()
        };
        if self.blocks.causal {
            // Without this key, slots see their whole block.
            parts.keys.push(flag("attention.causal", true));
        }
        if self.fills_in() {
            return if self.has_heads() { Err(UNTESTED_HEADS.into()) } else { Ok(parts) };
        }
        parts.keys.push(flag("has_confidence_head", self.confidence.is_some()));
        match self.markov.map(|markov| markov.kind) {
            Some(MarkovKind::Vanilla) => {
                parts.names.push(("markov_head.markov_w1.weight", "markov_w1.weight"));
                parts.names.push(("markov_head.markov_w2.weight", "markov_w2.weight"));
            }
            // llama.cpp lets the first slot draft only if there is a Markov head, so a head of zeros is written.
            None => {
                let shape = vec![drafter.vocab_size as usize, 1];
                parts.zeros.extend([("markov_w1.weight", shape.clone()), ("markov_w2.weight", shape)]);
            }
            Some(kind) => {
                let kind = kind.name();
                return Err(format!("llama.cpp knows the vanilla Markov head, and not one that is {kind}"));
            }
        }
        match self.confidence {
            Some(ConfidenceSettings { with_markov: false }) => {
                return Err(
                    "llama.cpp's confidence head reads the Markov embedding too, this one does not".into()
                );
            }
            Some(ConfidenceSettings { with_markov: true }) => parts.names.extend([
                ("confidence_head.proj.weight", "conf_proj.weight"),
                ("confidence_head.proj.bias", "conf_proj.bias"),
            ]),
            None => {}
        }
        Ok(parts)
    }

    fn engine_support(&self, engine: Engine, format: CheckpointFormat) -> EngineSupport {
        use CheckpointFormat::{DeepseekV4, Modelopt, Reference, Specforge, Speculators, Zlab};
        use EngineSupport as S;
        let has_markov = self.markov.is_some();
        if engine == Engine::Sglang {
            return match format {
                Speculators => S::not_loaded(SGLANG_REFUSAL),
                Reference if self.fills_in() && self.has_heads() => S::not_loaded(
                    "every slot drafts there, and no layout has heads beside slots that fill in",
                ),
                Reference if self.fills_in() => S::not_loaded("every slot drafts there"),
                Modelopt | DeepseekV4 => S::not_loaded("it knows the heads by the reference's names"),
                Zlab if self.fills_in() => S::loads_untested("--speculative-algorithm DFLASH"),
                Zlab => S::not_loaded("slots of its DFLASH fill in"),
                Reference | Specforge if has_markov => S::loads_untested("--speculative-algorithm DSPARK"),
                Reference | Specforge => S::not_loaded("DSPARK needs markov_rank > 0"),
            };
        }
        // The first condition that holds decides.
        if format == Zlab {
            return if self.fills_in() {
                S::loads_as_tested("method dflash")
            } else {
                S::not_loaded(
                    "every slot drafts, which z-lab's layout says within `dflash_config`, where vLLM refuses it",
                )
            };
        }
        if format == Speculators && self.fills_in() && !self.has_heads() {
            return S::loads_untested("method dflash");
        }
        if !self.is_vanilla() {
            return S::not_loaded("its DSpark knows the vanilla Markov head only");
        }
        if format == Modelopt {
            return S::not_loaded("it knows the heads by the reference's names");
        }
        if !has_markov {
            let reason = "it stops without a Markov head";
            let was_tried = format == Reference && !self.fills_in();
            return if was_tried { S::not_loaded_as_tested(reason) } else { S::not_loaded(reason) };
        }
        if matches!(format, Reference | Speculators) && !self.fills_in() {
            return S::loads_as_tested("method dspark");
        }
        S::loads_untested("method dspark")
    }
}
