//! The container of z-lab's DFlash: decoder at the top level, `dflash_config` beside it, no embedding and no head. SpecForge
//! and ModelOpt put DSpark into it, each in its own way; z-lab's DFlash 2 has all of its keys within.

use std::sync::Arc;

use deepspec_core::{Slots, Tap};
use serde_json::{Map, Value, json};

use super::common::{decoder, flat, taps};
use crate::drafter::{Drafter, Obstacle};
use crate::fields::Fields;
use crate::kinds::{Block, Container, DFlash2, Eagle3, block_size, confidence, markov, mask_token};
use crate::{Dialect, DialectError, Tensors};

/// Keys that are not the decoder's.
const OWN: [&str; 10] = [
    "num_target_layers",
    "block_size",
    "dflash_config",
    "emb_dim",
    "is_causal",
    "sample_from_anchor",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
];

/// Scales of z-lab's drafters, and what they are where nothing is scaled; a soft cap of 0 is none.
const SCALES: [(&str, f64); 4] = [
    ("input_embedding_scale", 1.0),
    ("output_multiplier", 1.0),
    ("attention_value_scale", 1.0),
    ("final_logit_softcapping", 0.0),
];

pub fn read(
    fields: &Fields,
    architecture: &str,
    tensors: &Tensors,
) -> Result<(Dialect, Drafter), DialectError> {
    let inner = fields.required_object("dflash_config")?;
    if architecture == "DFlash2DraftModel" {
        return Ok((Dialect::Zlab, read_dflash2(fields, &inner)?));
    }
    let projector = inner.text("projector_type")?;
    let default = match architecture {
        "DSparkDraftModel" => "dspark",
        "DominoDraftModel" => "domino",
        _ => "dflash",
    };
    // ModelOpt writes the heads' tensors without their heads' names, and flags that SpecForge does not know.
    let flat_heads = tensors.iter().any(|(name, _)| name.starts_with("markov_w1."));
    let is_modelopt = flat_heads || inner.map.contains_key("use_confidence_head");
    let mut decoder = decoder(fields, &OWN)?;
    let mut obstacles = std::mem::take(&mut decoder.obstacles);
    let dialect = match projector.unwrap_or(default) {
        "dflash" => Dialect::Zlab,
        "dspark" if is_modelopt => Dialect::Modelopt,
        "dspark" => Dialect::Specforge,
        other => {
            let reason = match other {
                "domino" => "Domino's correction head (prefix_gru, embed_proj) has no counterpart in the other dialects".into(),
                other => format!("the projector \"{other}\" has no counterpart in the other dialects"),
            };
            obstacles.insert(0, Obstacle { key: "dflash_config.projector_type".into(), reason });
            Dialect::Specforge
        }
    };
    obstacles.extend(switches(fields, "")?);
    obstacles.extend(switches(&inner, "dflash_config.")?);
    obstacles.extend(scales(fields, &inner));
    let markov = if dialect == Dialect::Zlab { None } else { markov(&inner)? };
    let slots = slots(fields, &inner)?.unwrap_or(match dialect {
        Dialect::Zlab => Slots::FillIn,
        _ => Slots::AnchorPredicts,
    });
    let confidence_with_markov = match dialect {
        Dialect::Modelopt => inner.flag("use_confidence_head")?.unwrap_or(false).then_some(true),
        Dialect::Zlab => None,
        _ => confidence(&inner, markov)?,
    };
    let block_size = match fields.map.contains_key("block_size") {
        true => block_size(fields, slots)?,
        false => block_size(&inner, slots)?,
    };
    let mask_token_id = mask_token(&inner, decoder.vocab_size)?;
    let kind = Arc::new(Block { block_size, mask_token_id, slots, markov, confidence_with_markov });
    decoder.obstacles = obstacles;
    let taps = taps(&inner, "target_layer_ids", -1)?;
    Ok((dialect, decoder.drafter(fields, architecture, taps, kind)?))
}

/// Scales that change what the same weights compute.
fn scales(fields: &Fields, inner: &Fields) -> Vec<Obstacle> {
    let scaled = |&(key, plain): &(&str, f64)| {
        let said = inner.map.get(key).or(fields.map.get(key)).and_then(Value::as_f64);
        let reason = "a scale that the other layouts cannot say".into();
        said.filter(|&said| said != plain).map(|_| Obstacle { key: format!("dflash_config.{key}"), reason })
    };
    SCALES.iter().filter_map(scaled).collect()
}

/// z-lab's DFlash 2, whose keys stand within `dflash_config`.
fn read_dflash2(fields: &Fields, inner: &Fields) -> Result<Drafter, DialectError> {
    let mut decoder = decoder(fields, &OWN)?;
    decoder.obstacles.extend(switches(fields, "")?);
    decoder.obstacles.extend(switches(inner, "dflash_config.")?);
    decoder.obstacles.extend(scales(fields, inner));
    if slots(fields, inner)? == Some(Slots::AnchorPredicts) {
        return Err(fields.error("sample_from_anchor", "true; the slots of DFlash 2 fill in"));
    }
    // As with DFlash, the block size may stand outside.
    let mut keys = inner.map.clone();
    if let Some(outside) = fields.size("block_size")? {
        let inside = keys.entry("block_size").or_insert(outside.into());
        if *inside != outside {
            return Err(fields.error("block_size", format!("{outside}, and in dflash_config {inside}")));
        }
    }
    let kind = Arc::new(DFlash2::read(&inner.with(&keys), &decoder)?);
    let taps = taps(inner, "target_layer_ids", -1)?;
    decoder.drafter(fields, "DFlash2DraftModel", taps, kind)
}

/// What the slots predict, where a key says it: ModelOpt's own, or that of newer engines.
fn slots(fields: &Fields, inner: &Fields) -> Result<Option<Slots>, DialectError> {
    let flag = "sample_from_anchor";
    let said = [inner.flag("shift_label")?, inner.flag(flag)?, fields.flag(flag)?];
    let mut said = said.into_iter().flatten();
    let Some(from_anchor) = said.next() else { return Ok(None) };
    if said.any(|other| other != from_anchor) {
        let problem = "it contradicts the same key, or shift_label, in dflash_config";
        return Err(fields.error(flag, problem));
    }
    Ok(Some(if from_anchor { Slots::AnchorPredicts } else { Slots::FillIn }))
}

/// Switches of the layers that change what the same weights compute. Tools write them at the top level or `within` an object.
fn switches(inner: &Fields, within: &str) -> Result<Vec<Obstacle>, DialectError> {
    let mut found = vec![];
    let mut stops = |key: &str, reason: &str| {
        found.push(Obstacle { key: format!("{within}{key}"), reason: reason.into() });
    };
    if inner.flag("use_swa")?.unwrap_or(false) {
        stops("use_swa", "draft layers with a sliding window: tools differ in who sees what within a block");
    }
    for key in ["causal", "is_causal"] {
        if inner.flag(key)?.unwrap_or(false) {
            stops(key, "slots that see only those before them; elsewhere a block sees all of itself");
        }
    }
    if inner.flag("attention_sink_bias")?.unwrap_or(false) {
        stops("attention_sink_bias", "attention sinks have no counterpart in the other dialects");
    }
    if inner.text("attention_mode")?.is_some_and(|mode| !matches!(mode, "full" | "bidirectional")) {
        stops("attention_mode", "only full attention within a block means the same elsewhere");
    }
    Ok(found)
}

/// SpecForge's Eagle3, which can be told but not converted.
pub fn read_eagle3(fields: &Fields) -> Result<Drafter, DialectError> {
    let mut decoder = decoder(fields, &["eagle_config", "draft_vocab_size", "target_hidden_size"])?;
    let inner = fields.object("eagle_config")?;
    let key = "eagle_aux_hidden_state_layer_ids";
    let found = match &inner {
        // Counted from the embedding.
        Some(inner) if inner.map.contains_key(key) => taps(inner, key, 0)?,
        _ => vec![],
    };
    let obstacle = Obstacle {
        key: "architectures".into(),
        reason: "SpecForge's Eagle3 is not converted here; `speculators convert` reads it, and what that writes is".into(),
    };
    decoder.obstacles = vec![obstacle];
    // The config does not tell how far it drafts.
    let kind = Arc::new(Eagle3 { steps: fields.size("ttt_length")?.unwrap_or(7) });
    let draft_vocab_size = fields.size("draft_vocab_size")?.unwrap_or(decoder.vocab_size);
    let drafter = decoder.drafter(fields, "LlamaForCausalLMEagle3", found, kind)?;
    Ok(Drafter { draft_vocab_size, ..drafter })
}

pub fn config(drafter: &Drafter, dialect: Dialect) -> Map<String, Value> {
    let mut map = flat(drafter);
    let Some(Container { class, top, mut inner }) = drafter.kind.container(dialect) else { return map };
    inner.insert("target_layer_ids".into(), Tap::layer_ids(&drafter.taps).into());
    map.insert("architectures".into(), json!([class]));
    map.extend(top);
    map.insert("dflash_config".into(), inner.into());
    map
}
