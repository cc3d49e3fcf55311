//! The config of z-lab's DFlash: the decoder at the top level next to `dflash_config`, without
//! embedding and LM head. SpecForge and ModelOpt store DSpark in it, with different keys, and Domino. z-lab's
//! DFlash 2 keeps all its keys in `dflash_config`.

use deepspec_core::{SlotTarget, Tap};
use serde_json::{Map, Value, json};

use super::block_options::{CAUSAL_KEYS, INNER_KEY, SINK_KEYS, read_causal};
use super::common::{Decoder, EMBEDDING_LAYER_ID, read_layer_ids};
use super::windows::{SWA_WINDOW_SIZE, USE_SWA, mark_windows, resolve_windows};
use crate::drafter::{Drafter, Incompatibility, Settings};
use crate::fields::Fields;
use crate::kind::DflashConfigKeys;
use crate::shapes::ATTENTION_SINK_BIAS;
use crate::{CheckpointError, CheckpointFormat, Family};

/// Top-level keys that drafters of every kind may have and that do not belong to the decoder.
const TOP_LEVEL_KEYS: [&str; 5] =
    ["num_target_layers", "block_size", "dflash_config", "emb_dim", "sample_from_anchor"];

/// Known keys of `dflash_config`, of all kinds and tools. Each is read here or does not affect the
/// computation.
const DFLASH_CONFIG_KEYS: [&str; 20] = [
    "block_size",
    "target_layer_ids",
    "mask_token_id",
    "projector_type",
    "sample_from_anchor",
    "shift_label",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "use_confidence_head",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "num_anchors",
    SWA_WINDOW_SIZE,
    "emb_dim",
    "gru_hidden_dim",
    "pure_draft_prefix_len",
];

/// Keys whose values must agree if both `dflash_config` and the top level have them.
const SHARED_KEYS: [&str; 6] =
    ["block_size", "target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type", "emb_dim"];

fn is_known(key: &str) -> bool {
    DFLASH_CONFIG_KEYS.contains(&key)
        || CAUSAL_KEYS.contains(&key)
        || SINK_KEYS.contains(&key)
        || NEUTRAL_SCALES.iter().any(|(scale, _)| *scale == key)
        || reason_to_refuse(key).is_some()
}

/// Keys that change the computation of the layers, each with the reason why a drafter that sets it
/// is refused. A switch is on unless it is false, 0, null or absent. `attention_mode` is on if it
/// is not full attention.
const ATTENTION_SWITCHES: [(&str, &str); 5] = [
    (USE_SWA, SWA_REASON),
    ("attention_mode", MODE_REASON),
    ("attention_sinks", SINKS_REASON),
    ("use_sinks", SINKS_REASON),
    ("sinks", SINKS_REASON),
];

const SWA_REASON: &str = "draft layers with a sliding window by this key are read for DSpark and DFlash only, and within dflash_config";
const MODE_REASON: &str = "only full attention within a block means the same elsewhere";
const CAUSAL_REASON: &str =
    "a key about causal attention that is not known; known are is_causal, causal and causal_head";
const SINKS_REASON: &str = "a key about attention sinks that is not known; known are attention_sink_bias and add_swa_attention_sink_bias";

/// Scale keys of z-lab's drafters, each with the value that has no effect.
const NEUTRAL_SCALES: [(&str, f64); 4] = [
    ("input_embedding_scale", 1.0),
    ("output_multiplier", 1.0),
    ("attention_value_scale", 1.0),
    ("final_logit_softcapping", 0.0),
];

/// The parts of the config that do not depend on the drafter's kind.
pub struct DflashConfig<'a> {
    /// `dflash_config`.
    pub inner: Fields<'a>,
    /// The draft layers. The incompatibilities include settings that other formats cannot express.
    pub decoder: Decoder,
    /// Which token a block position predicts, if a key states it.
    pub slots: Option<SlotTarget>,
    /// Whether blocks are causal.
    pub causal: bool,
}

impl<'a> DflashConfig<'a> {
    /// Reads the config. `own` lists the top-level keys of the drafter kind. `has_windows` says whether its layers may have the windows
    /// that `dflash_config` marks.
    ///
    /// # Errors
    /// Fails if a key is missing or wrong.
    pub fn read(
        fields: &Fields<'a>,
        own: &[&str],
        families: &[Family],
        has_windows: bool,
    ) -> Result<Self, CheckpointError> {
        let inner = fields.required_object(INNER_KEY)?;
        let resolved = if has_windows { resolve_windows(fields)? } else { None };
        let plain = resolved.as_ref().map(|map| fields.with_map(map));
        let foreign = [TOP_LEVEL_KEYS.as_slice(), &CAUSAL_KEYS, own].concat();
        let mut decoder = Decoder::read(plain.as_ref().unwrap_or(fields), &foreign, families)?;
        if resolved.is_some() {
            decoder.accept_windows();
        }
        if !has_windows && inner.map.get(USE_SWA).is_some_and(is_switched_on) {
            let key = format!("{INNER_KEY}.{USE_SWA}");
            decoder.incompatibilities.push(Incompatibility { key, reason: SWA_REASON.into() });
        }
        decoder.incompatibilities.extend(attention_incompatibilities(fields.map, true));
        decoder.incompatibilities.extend(unknown_key_incompatibilities(inner.map));
        decoder.incompatibilities.extend(scale_incompatibilities(fields, &inner));
        let slots = read_slots(fields, &inner)?;
        Ok(Self { inner, decoder, slots, causal: read_causal(fields)? })
    }

    /// The drafter of this class and kind.
    ///
    /// # Errors
    /// Fails if the captured layer ids are missing or wrong.
    pub fn into_drafter(
        self,
        fields: &Fields,
        class: &str,
        kind: Settings,
    ) -> Result<Drafter, CheckpointError> {
        let taps = read_layer_ids(&self.inner, "target_layer_ids", EMBEDDING_LAYER_ID)?;
        self.decoder.into_drafter(fields, class, taps, kind)
    }
}

/// Lists the scale factors that are not neutral. Other layouts cannot store them.
fn scale_incompatibilities(fields: &Fields, inner: &Fields) -> Vec<Incompatibility> {
    let scaled = |&(key, plain): &(&str, f64)| {
        let said = inner.map.get(key).or(fields.map.get(key)).and_then(Value::as_f64);
        let reason = "a scale that the other layouts cannot say".into();
        said.filter(|&said| said != plain)
            .map(|_| Incompatibility { key: format!("dflash_config.{key}"), reason })
    };
    NEUTRAL_SCALES.iter().filter_map(scaled).collect()
}

/// Reads which token a block position predicts, from ModelOpt's key or the key of newer engines;
/// None if neither is present.
fn read_slots(fields: &Fields, inner: &Fields) -> Result<Option<SlotTarget>, CheckpointError> {
    let flag = "sample_from_anchor";
    let said = [inner.flag("shift_label")?, inner.flag(flag)?, fields.flag(flag)?];
    let mut said = said.into_iter().flatten();
    let Some(from_anchor) = said.next() else { return Ok(None) };
    if said.any(|other| other != from_anchor) {
        let problem = "it contradicts the same key, or shift_label, in dflash_config";
        return Err(fields.error(flag, problem));
    }
    Ok(Some(if from_anchor { SlotTarget::AnchorPredicts } else { SlotTarget::FillIn }))
}

/// Lists the switches that are on, at the top level or in `dflash_config`, because tools write them
/// in either place. `has_block_options` says whether the kind's blocks may be causal and its layers may have attention sinks, and windows
/// by `dflash_config.use_swa`.
pub(super) fn attention_incompatibilities(
    map: &Map<String, Value>,
    has_block_options: bool,
) -> Vec<Incompatibility> {
    let inner = map.get(INNER_KEY).and_then(Value::as_object);
    let places = [(Some(map), String::new()), (inner, format!("{INNER_KEY}."))];
    let mut found = vec![];
    for (map, within) in &places {
        for (key, value) in map.iter().flat_map(|map| map.iter()) {
            let reason = match key.as_str() {
                USE_SWA if has_block_options && !within.is_empty() => None,
                key if CAUSAL_KEYS.contains(&key) => {
                    (!has_block_options).then_some("drafters of this kind have no causal blocks")
                }
                key if SINK_KEYS.contains(&key) => {
                    (!has_block_options).then_some("drafters of this kind or layout have no attention sinks")
                }
                key => reason_to_refuse(key),
            };
            if let Some(reason) = reason.filter(|_| is_switched_on(value)) {
                found.push(Incompatibility { key: format!("{within}{key}"), reason: reason.into() });
            }
        }
    }
    found
}

/// Why a key of this name refuses a drafter if it is on. It matches known keys and similar
/// spellings.
fn reason_to_refuse(key: &str) -> Option<&'static str> {
    let known = ATTENTION_SWITCHES.iter().find(|(known, _)| *known == key).map(|&(_, reason)| reason);
    let mut words = key.split('_');
    known.or_else(|| match key {
        "s_aux" => Some(SINKS_REASON),
        "attention_type" | "attn_mode" | "attn_type" | "mask_type" => Some(MODE_REASON),
        _ => words.find_map(|word| match word {
            "causal" => Some(CAUSAL_REASON),
            "sink" | "sinks" => Some(SINKS_REASON),
            _ => None,
        }),
    })
}

fn is_switched_on(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(mode) => !matches!(mode.as_str(), "full" | "bidirectional" | "full_attention"),
        _ => true,
    }
}

/// Finds a key that `dflash_config` and the top level set to different values.
fn find_contradiction(map: &Map<String, Value>) -> Option<Incompatibility> {
    let inner = match map.get(INNER_KEY)? {
        Value::Null => return None,
        Value::Object(inner) => inner,
        other => {
            let reason = format!("expected an object, found {other}");
            return Some(Incompatibility { key: INNER_KEY.into(), reason });
        }
    };
    let differs = |(key, value): &(&String, &Value)| {
        map.get(key.as_str()).is_some_and(|outer| !outer.is_null() && !value.is_null() && outer != *value)
    };
    let (key, value) = inner.iter().filter(|(key, _)| SHARED_KEYS.contains(&key.as_str())).find(differs)?;
    let outer = &map[key];
    Some(Incompatibility {
        key: format!("{INNER_KEY}.{key}"),
        reason: format!("it is {value}, and `{key}` beside `{INNER_KEY}` is {outer}"),
    })
}

/// Finds the first setting of a config that DeepSpec cannot run: attention other than the block
/// drafters', an unknown key of `dflash_config`, or a key with contradicting values. None if
/// DeepSpec supports all of them. `has_block_options` says whether the drafter's kind may have causal blocks, attention sinks and
/// `dflash_config.use_swa`.
pub fn find_unsupported_setting(
    map: &Map<String, Value>,
    has_block_options: bool,
) -> Option<Incompatibility> {
    let attention = attention_incompatibilities(map, has_block_options).into_iter().next();
    let attention = attention.map(|Incompatibility { key, reason }| Incompatibility {
        key,
        reason: format!("an attention that is not run here: {reason}"),
    });
    let unknown = || {
        map.get(INNER_KEY)
            .and_then(Value::as_object)
            .and_then(|inner| unknown_key_incompatibilities(inner).next())
    };
    attention.or_else(unknown).or_else(|| find_contradiction(map))
}

/// Lists the unknown keys of `dflash_config`, each of which may change the computation.
fn unknown_key_incompatibilities(inner: &Map<String, Value>) -> impl Iterator<Item = Incompatibility> {
    let unknown = inner.iter().filter(|(key, value)| !value.is_null() && !is_known(key));
    unknown.map(|(key, value)| Incompatibility {
        key: format!("{INNER_KEY}.{key}"),
        reason: format!("the key is not known (its value is {value}), so what it changes cannot be told"),
    })
}

pub fn config(
    drafter: &Drafter,
    format: CheckpointFormat,
    mut map: Map<String, Value>,
) -> Map<String, Value> {
    let Some(DflashConfigKeys { class, top, mut inner }) = drafter.kind.dflash_config(format) else {
        return map;
    };
    inner.insert("target_layer_ids".into(), Tap::layer_ids(&drafter.taps).into());
    if drafter.has_attention_sinks() {
        inner.insert(ATTENTION_SINK_BIAS.into(), true.into());
    }
    map.insert("architectures".into(), json!([class]));
    map.extend(top);
    map.insert(INNER_KEY.into(), inner.into());
    if let Some(window) = drafter.shared_window() {
        mark_windows(&mut map, window);
    }
    map
}
