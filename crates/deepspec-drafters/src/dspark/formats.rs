//! Checkpoints of DSpark and DFlash in the layouts of other tools.

use std::sync::Arc;

use deepspec_checkpoint::{
    CheckpointError, CheckpointFormat, Decoder, DflashConfig, DflashConfigKeys, Drafter, Engine,
    EngineLayout, EngineSupport, ExternalClass, Family, Fields, GgufParts, GgufValue, Incompatibility,
    KindSettings, Reader, Settings, Shapes, Speculators, Tensors, keys,
};
use deepspec_core::Slots;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::model::{BlockConfig, MarkovKind};
use crate::block_common::formats::{GGUF_ARCHITECTURE, HEADS, block_size, mask_token};
use crate::draft_model::DrafterConfig;

/// How block drafters are read.
pub static READER: Reader = Reader {
    class: BlockConfig::CLASS,
    keys: &["block_size", "sample_from_anchor", "mask_token_id", HEADS[0], HEADS[1], HEADS[2], HEADS[3]],
    reference: read,
    model_types: &["dspark", "dflash"],
    speculators,
    classes: &[
        ExternalClass {
            name: "DSparkDraftModel",
            tools: "SpecForge",
            read: |fields, tensors, families| {
                contained(fields, tensors, families, "DSparkDraftModel", "dspark")
            },
        },
        ExternalClass {
            name: "DFlashDraftModel",
            tools: "z-lab, SpecForge, ModelOpt",
            read: |fields, tensors, families| {
                contained(fields, tensors, families, "DFlashDraftModel", "dflash")
            },
        },
        ExternalClass {
            name: "DominoDraftModel",
            tools: "SpecForge",
            read: |fields, tensors, families| {
                contained(fields, tensors, families, "DominoDraftModel", "domino")
            },
        },
    ],
};

/// The Markov head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct Markov {
    /// Its form.
    kind: MarkovKind,
    /// r, width of its embeddings.
    rank: u64,
}

/// A block drafter's own settings as checkpoints say them: DSpark with heads, DFlash without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct BlockLayout {
    /// B, slots of a block.
    pub block_size: u64,
    /// Stands for the tokens to be predicted.
    pub mask_token_id: u64,
    /// Tokens that its slots predict.
    pub slots: Slots,
    /// Markov head, if any.
    markov: Option<Markov>,
    /// Whether the confidence head reads the Markov embedding; None without that head.
    confidence_with_markov: Option<bool>,
}

fn read(fields: &Fields, decoder: &Decoder) -> Result<Settings, CheckpointError> {
    let slots = match fields.flag("sample_from_anchor")? {
        Some(false) => Slots::FillIn,
        _ => Slots::AnchorPredicts,
    };
    let markov = markov(fields)?;
    Ok(Arc::new(BlockLayout {
        block_size: block_size(fields, slots)?,
        mask_token_id: mask_token(fields, decoder.vocab_size)?,
        slots,
        markov,
        confidence_with_markov: confidence(fields, markov)?,
    }))
}

fn speculators(fields: &Fields, decoder: &mut Decoder) -> Result<Settings, CheckpointError> {
    let has_heads = fields.text("speculators_model_type")? == Some("dspark");
    let markov = if has_heads { markov(fields)? } else { None };
    let confidence_with_markov = if has_heads { confidence(fields, markov)? } else { None };
    // Checkpoints without the key are older than it and have z-lab's slots.
    let from_anchor = fields.flag("sample_from_anchor")?.unwrap_or(false);
    let slots = if from_anchor { Slots::AnchorPredicts } else { Slots::FillIn };
    Ok(Arc::new(BlockLayout {
        block_size: block_size(fields, slots)?,
        mask_token_id: mask_token(fields, decoder.vocab_size)?,
        slots,
        markov,
        confidence_with_markov,
    }))
}

/// A drafter in the container that z-lab's DFlash came in. SpecForge and ModelOpt put DSpark into it, each in its own way, which the
/// config's `projector_type` tells; where it has none, it is `projector`.
fn contained(
    fields: &Fields,
    tensors: &Tensors,
    families: &[Family],
    class: &str,
    projector: &str,
) -> Result<(CheckpointFormat, Drafter), CheckpointError> {
    let mut config = DflashConfig::read(fields, &HEADS, families)?;
    let inner = &config.inner;
    // ModelOpt writes the heads' tensors without their heads' names, and flags that SpecForge does not know.
    let flat_heads = tensors.iter().any(|(name, _)| name.starts_with("markov_w1."));
    let is_modelopt = flat_heads || inner.map.contains_key("use_confidence_head");
    let dialect = match inner.text("projector_type")?.unwrap_or(projector) {
        "dflash" => CheckpointFormat::Zlab,
        "dspark" if is_modelopt => CheckpointFormat::Modelopt,
        "dspark" => CheckpointFormat::Specforge,
        other => {
            let reason = match other {
                "domino" => "Domino's correction head (prefix_gru, embed_proj) has no counterpart in the other dialects".into(),
                other => format!("the projector \"{other}\" has no counterpart in the other dialects"),
            };
            let obstacle = Incompatibility { key: "dflash_config.projector_type".into(), reason };
            config.decoder.incompatibilities.insert(0, obstacle);
            CheckpointFormat::Specforge
        }
    };
    let slots = config.slots.unwrap_or(match dialect {
        CheckpointFormat::Zlab => Slots::FillIn,
        _ => Slots::AnchorPredicts,
    });
    let markov = if dialect == CheckpointFormat::Zlab { None } else { markov(inner)? };
    let confidence_with_markov = match dialect {
        CheckpointFormat::Modelopt => inner.flag("use_confidence_head")?.unwrap_or(false).then_some(true),
        CheckpointFormat::Zlab => None,
        _ => confidence(inner, markov)?,
    };
    let block_size = match fields.map.contains_key("block_size") {
        true => block_size(fields, slots)?,
        false => block_size(inner, slots)?,
    };
    let mask_token_id = mask_token(inner, config.decoder.vocab_size)?;
    let kind = BlockLayout { block_size, mask_token_id, slots, markov, confidence_with_markov };
    Ok((dialect, config.drafter(fields, class, Arc::new(kind))?))
}

impl BlockLayout {
    /// Tokens that it drafts.
    fn drafted(&self) -> u64 {
        self.block_size.saturating_sub(self.slots.first() as u64)
    }

    fn fills_in(&self) -> bool {
        self.slots == Slots::FillIn
    }

    fn has_heads(&self) -> bool {
        self.markov.is_some() || self.confidence_with_markov.is_some()
    }

    /// Rank and name of the Markov head, and its name where there is none.
    fn markov_keys(&self) -> (Value, Value) {
        let rank = self.markov.map_or(0, |markov| markov.rank);
        (rank.into(), self.markov.map_or("vanilla", |markov| markov.kind.name()).into())
    }
}

impl KindSettings for BlockLayout {
    fn name(&self) -> &'static str {
        if self.has_heads() { "dspark" } else { "dflash" }
    }

    fn title(&self) -> &'static str {
        if self.has_heads() { "DSpark" } else { "DFlash" }
    }

    fn drafted(&self) -> u64 {
        Self::drafted(self)
    }

    fn mask_token_id(&self) -> Option<u64> {
        Some(self.mask_token_id)
    }

    fn predicts_own_position(&self) -> bool {
        Self::fills_in(self)
    }

    fn method(&self) -> &'static str {
        if self.fills_in() { "dflash" } else { "dspark" }
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        let markov = self.markov.map_or_else(
            || "no Markov head".into(),
            |markov| format!("Markov head {} of rank {}", markov.kind.name(), markov.rank),
        );
        let confidence = match self.confidence_with_markov {
            None => "no confidence head",
            Some(true) => "confidence head on state and Markov embedding",
            Some(false) => "confidence head on the state",
        };
        vec![
            ("drafts", format!("{} tokens in blocks of {}; {}", self.drafted(), self.block_size, self.slots)),
            ("mask token", self.mask_token_id.to_string()),
            ("heads", format!("{markov}, {confidence}")),
        ]
    }

    fn to_json(&self) -> Value {
        json!({"block": self})
    }

    fn tensors(&self, drafter: &Drafter, shapes: &mut Shapes) {
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
        if let Some(with_markov) = self.confidence_with_markov {
            let rank = self.markov.filter(|_| with_markov).map_or(0, |markov| markov.rank as usize);
            put("confidence_head.proj.weight", vec![1, width + rank]);
            put("confidence_head.proj.bias", vec![1]);
        }
    }

    fn refusal(&self, _: &Drafter, to: CheckpointFormat) -> Option<String> {
        let needs = match to {
            // Each of the two model types of speculators has its own convention.
            CheckpointFormat::Reference | CheckpointFormat::Speculators => self.slots,
            CheckpointFormat::Zlab => Slots::FillIn,
            CheckpointFormat::Specforge | CheckpointFormat::Modelopt => Slots::AnchorPredicts,
        };
        if self.slots != needs {
            return Some(format!(
                "the weights are not interchangeable, only the container is: in this checkpoint {}, in {to} {needs}; it has to be \
                 trained anew",
                self.slots
            ));
        }
        match to {
            CheckpointFormat::Zlab if self.has_heads() => Some("z-lab's DFlash has no heads".into()),
            CheckpointFormat::Speculators if self.fills_in() && self.has_heads() => {
                Some("heads beside z-lab's slots: no tool serves this".into())
            }
            CheckpointFormat::Modelopt if self.markov.is_none() => {
                Some("ModelOpt's DSpark needs a Markov head, and its plain DFlash has z-lab's slots".into())
            }
            CheckpointFormat::Modelopt if self.confidence_with_markov == Some(false) => {
                Some("ModelOpt's confidence head always reads the Markov embedding, this one does not".into())
            }
            _ => None,
        }
    }

    fn reference(&self, _: &Drafter) -> (&'static str, Map<String, Value>) {
        let mut map =
            keys([("block_size", json!(self.block_size)), ("mask_token_id", json!(self.mask_token_id))]);
        let mut put = |key: &str, value: Value| map.insert(key.into(), value);
        if self.fills_in() {
            put("sample_from_anchor", false.into());
        }
        let (rank, kind) = self.markov_keys();
        put("markov_rank", rank);
        if self.markov.is_some() {
            put("markov_head_type", kind);
        }
        put("enable_confidence_head", self.confidence_with_markov.is_some().into());
        if let Some(with_markov) = self.confidence_with_markov {
            put("confidence_head_with_markov", with_markov.into());
        }
        (READER.class, map)
    }

    fn speculators(&self) -> Speculators {
        // A DFlash with our slots goes as a DSpark without heads: that type's default is our convention, so that even a reader
        // that overlooks `sample_from_anchor` is right.
        let is_dflash = !self.has_heads() && self.fills_in();
        let mut keys = keys([
            ("block_size", json!(self.block_size)),
            ("mask_token_id", json!(self.mask_token_id)),
            ("sample_from_anchor", json!(!self.fills_in())),
        ]);
        if !is_dflash {
            let (rank, kind) = self.markov_keys();
            keys.insert("markov_rank".into(), rank);
            keys.insert("markov_head_type".into(), kind);
            keys.insert("enable_confidence_head".into(), self.confidence_with_markov.is_some().into());
            let with_markov = self.confidence_with_markov.unwrap_or(false);
            keys.insert("confidence_head_with_markov".into(), with_markov.into());
        }
        let (model_type, class) =
            if is_dflash { ("dflash", "DFlashSpeculator") } else { ("dspark", "DSparkSpeculator") };
        Speculators { model_type, class, taps: "aux_hidden_state_layer_ids", keys }
    }

    fn dflash_config(&self, to: CheckpointFormat) -> Option<DflashConfigKeys> {
        let mut top = keys([("block_size", json!(self.block_size))]);
        let mut inner = keys([("mask_token_id", json!(self.mask_token_id))]);
        let mut put = |key: &str, value: Value| inner.insert(key.into(), value);
        let (rank, kind) = self.markov_keys();
        let class = match to {
            CheckpointFormat::Specforge => {
                put("projector_type", "dspark".into());
                let heads = keys([
                    ("markov_rank", rank),
                    ("markov_head_type", kind),
                    ("enable_confidence_head", self.confidence_with_markov.is_some().into()),
                    ("confidence_head_with_markov", self.confidence_with_markov.unwrap_or(false).into()),
                ]);
                // vLLM looks for them at the top.
                top.extend(heads.clone());
                inner.extend(heads);
                "DSparkDraftModel"
            }
            CheckpointFormat::Modelopt => {
                put("projector_type", "dspark".into());
                put("shift_label", true.into());
                put("causal", false.into());
                put("markov_rank", rank);
                put("markov_head_type", kind);
                put("use_confidence_head", self.confidence_with_markov.is_some().into());
                "DFlashDraftModel"
            }
            _ => "DFlashDraftModel",
        };
        Some(DflashConfigKeys { class, top, inner })
    }

    fn engine_layout(&self, _: Engine, _: &Drafter) -> Result<EngineLayout, String> {
        match (self.fills_in(), self.markov.map(|markov| markov.kind)) {
            (true, _) if self.has_heads() => {
                Err("heads beside slots that fill in are not written: no engine was tried with them".into())
            }
            (true, _) => Ok(EngineLayout::Format(CheckpointFormat::Zlab)),
            (false, None | Some(MarkovKind::Vanilla)) => Ok(EngineLayout::SampleFromAnchor),
            (false, Some(kind)) => Err(format!(
                "this layout is for the vanilla Markov head, and not for one that is {}; SGLang reads that in the reference's layout",
                kind.name()
            )),
        }
    }

    fn gguf(&self, drafter: &Drafter) -> Result<GgufParts, String> {
        let mut parts = GgufParts {
            keys: vec![("block_size", GgufValue::U32(self.block_size as u32))],
            architecture: GGUF_ARCHITECTURE,
            ..GgufParts::default()
        };
        match (self.fills_in(), self.has_heads()) {
            (true, false) => {
                parts.keys.push(("sample_from_anchor", GgufValue::Bool(false)));
                return Ok(parts);
            }
            (true, true) => {
                return Err(
                    "heads beside slots that fill in are not written: no engine was tried with them".into()
                );
            }
            (false, _) => {}
        }
        parts.keys.push(("sample_from_anchor", GgufValue::Bool(true)));
        parts.keys.push(("has_confidence_head", GgufValue::Bool(self.confidence_with_markov.is_some())));
        match self.markov.map(|markov| markov.kind) {
            Some(MarkovKind::Vanilla) => {
                parts.names.push(("markov_head.markov_w1.weight", "markov_w1.weight"));
                parts.names.push(("markov_head.markov_w2.weight", "markov_w2.weight"));
            }
            // By this head llama.cpp knows that the first slot drafts.
            None => {
                let shape = vec![drafter.vocab_size as usize, 1];
                parts.zeros.extend([("markov_w1.weight", shape.clone()), ("markov_w2.weight", shape)]);
            }
            Some(kind) => {
                return Err(format!(
                    "llama.cpp knows the vanilla Markov head, and not one that is {}",
                    kind.name()
                ));
            }
        }
        match self.confidence_with_markov {
            Some(true) => {
                parts.names.push(("confidence_head.proj.weight", "conf_proj.weight"));
                parts.names.push(("confidence_head.proj.bias", "conf_proj.bias"));
            }
            Some(false) => {
                return Err(
                    "llama.cpp's confidence head reads the Markov embedding too, this one does not".into()
                );
            }
            None => {}
        }
        Ok(parts)
    }

    fn vllm(&self, dialect: CheckpointFormat) -> EngineSupport {
        let kind = self.markov.map(|markov| markov.kind);
        let without_head = EngineSupport::read(
            false,
            "it stops without a Markov head; convert to vllm, which adds one of zeros",
        );
        match dialect {
            CheckpointFormat::Zlab if self.fills_in() => EngineSupport::tried(true, "method dflash"),
            CheckpointFormat::Zlab => EngineSupport::read(
                false,
                "every slot drafts, which z-lab's layout says within `dflash_config`, where vLLM refuses it; convert to vllm",
            ),
            CheckpointFormat::Speculators if self.fills_in() && !self.has_heads() => {
                EngineSupport::read(true, "method dflash")
            }
            _ if !matches!(kind, None | Some(MarkovKind::Vanilla)) => {
                EngineSupport::read(false, "its DSpark knows the vanilla Markov head only")
            }
            CheckpointFormat::Modelopt => {
                EngineSupport::read(false, "it knows the heads by the reference's names; convert to vllm")
            }
            CheckpointFormat::Reference if kind.is_none() && !self.fills_in() => {
                EngineSupport { tried: true, ..without_head }
            }
            _ if kind.is_none() => without_head,
            CheckpointFormat::Reference | CheckpointFormat::Speculators if !self.fills_in() => {
                EngineSupport::tried(true, "method dspark")
            }
            _ => EngineSupport::read(true, "method dspark"),
        }
    }

    fn sglang(&self, dialect: CheckpointFormat) -> EngineSupport {
        match dialect {
            CheckpointFormat::Speculators => EngineSupport::read(
                false,
                "speculators_model_type was refused when read (issues 30982, 34734); convert to sglang",
            ),
            CheckpointFormat::Reference if self.fills_in() && self.has_heads() => EngineSupport::read(
                false,
                "every slot drafts there, and no layout has heads beside slots that fill in",
            ),
            CheckpointFormat::Reference if self.fills_in() => {
                EngineSupport::read(false, "every slot drafts there; convert to sglang")
            }
            CheckpointFormat::Modelopt => {
                EngineSupport::read(false, "it knows the heads by the reference's names; convert to sglang")
            }
            CheckpointFormat::Zlab if self.fills_in() => {
                EngineSupport::read(true, "--speculative-algorithm DFLASH")
            }
            CheckpointFormat::Zlab => {
                EngineSupport::read(false, "slots of its DFLASH fill in; convert to sglang")
            }
            _ if self.markov.is_some() => EngineSupport::read(true, "--speculative-algorithm DSPARK"),
            _ => EngineSupport::read(
                false,
                "DSPARK needs markov_rank > 0; convert to sglang, which adds a head of zeros",
            ),
        }
    }
}

/// The Markov head of `markov_rank` and `markov_head_type`.
fn markov(fields: &Fields) -> Result<Option<Markov>, CheckpointError> {
    let rank = fields.count("markov_rank")?.unwrap_or(0);
    let name = fields.text("markov_head_type")?.unwrap_or("vanilla");
    if rank == 0 {
        return Ok(None);
    }
    let kind = MarkovKind::parse(name).map_err(|problem| fields.error("markov_head_type", problem))?;
    Ok(Some(Markov { kind, rank }))
}

/// The confidence head of `enable_confidence_head` and `confidence_head_with_markov`.
fn confidence(fields: &Fields, markov: Option<Markov>) -> Result<Option<bool>, CheckpointError> {
    let with_markov = fields.flag("confidence_head_with_markov")?.unwrap_or(false);
    if !fields.flag("enable_confidence_head")?.unwrap_or(false) {
        return Ok(None);
    }
    if with_markov && markov.is_none() {
        let problem = "the confidence head wants the Markov embedding, but there is no Markov head";
        return Err(fields.error("confidence_head_with_markov", problem));
    }
    Ok(Some(with_markov))
}
