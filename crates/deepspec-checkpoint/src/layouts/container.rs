//! The container of z-lab's DFlash: decoder at the top level, `dflash_config` beside it, no embedding and no head. SpecForge
//! and ModelOpt put DSpark into it, each in its own way; z-lab's DFlash 2 has all of its keys within.

use deepspec_core::{Slots, Tap};
use serde_json::{Map, Value, json};

use super::common::{Decoder, taps};
use crate::drafter::{Drafter, Incompatibility, Settings};
use crate::fields::Fields;
use crate::kind::Container;
use crate::{CheckpointError, CheckpointFormat, Family};

/// Keys beside the decoder's that containers of every kind may have.
const OWN: [&str; 6] =
    ["num_target_layers", "block_size", "dflash_config", "emb_dim", "is_causal", "sample_from_anchor"];

/// Where the container keeps a drafter's own settings.
const INNER: &str = "dflash_config";

/// Keys within it that are known: of all kinds and tools, read here, or without a meaning for the weights.
const WITHIN: [&str; 20] = [
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
    "swa_window_size",
    // Domino's, which is refused as a whole.
    "emb_dim",
    "gru_hidden_dim",
    "pure_draft_prefix_len",
];

/// Keys whose values must agree where both `dflash_config` and the top level of a config have them.
const CONSTANTS: [&str; 5] =
    ["block_size", "target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type"];

fn is_known(key: &str) -> bool {
    WITHIN.contains(&key) || SCALES.iter().any(|(scale, _)| *scale == key) || switch(key).is_some()
}

/// Switches of the layers that change what the same weights compute, and why each stops a drafter. They are on where they are neither
/// false, 0, null nor absent; `attention_mode` where it is another than full attention.
const SWITCHES: [(&str, &str); 9] = [
    ("use_swa", "draft layers with a sliding window: tools differ in who sees what within a block"),
    ("causal", CAUSAL),
    ("is_causal", CAUSAL),
    ("causal_head", CAUSAL),
    ("attention_mode", MODE),
    ("attention_sink_bias", SINKS),
    ("attention_sinks", SINKS),
    ("use_sinks", SINKS),
    ("sinks", SINKS),
];

const MODE: &str = "only full attention within a block means the same elsewhere";
const CAUSAL: &str = "slots that see only those before them; elsewhere a block sees all of itself";
const SINKS: &str = "attention sinks have no counterpart in the other dialects";

/// Scales of z-lab's drafters, and what they are where nothing is scaled; a soft cap of 0 is none.
const SCALES: [(&str, f64); 4] = [
    ("input_embedding_scale", 1.0),
    ("output_multiplier", 1.0),
    ("attention_value_scale", 1.0),
    ("final_logit_softcapping", 0.0),
];

/// What a config of the container says beside its kind's own settings.
pub struct ContainerConfig<'a> {
    /// `dflash_config`.
    pub inner: Fields<'a>,
    /// The draft layers; what their config says that other layouts cannot is among the obstacles.
    pub decoder: Decoder,
    /// What the slots predict, where a key says it.
    pub slots: Option<Slots>,
}

impl<'a> ContainerConfig<'a> {
    /// Reads it; `own` are keys at the top that are the kind's.
    ///
    /// # Errors
    /// If a key is missing or wrong.
    pub fn read(fields: &Fields<'a>, own: &[&str], families: &[Family]) -> Result<Self, CheckpointError> {
        let inner = fields.required_object(INNER)?;
        let mut decoder = Decoder::read(fields, &[&OWN, own].concat(), families)?;
        decoder.obstacles.extend(attention(fields.map));
        decoder.obstacles.extend(unknown(inner.map));
        decoder.obstacles.extend(scales(fields, &inner));
        let slots = slots(fields, &inner)?;
        Ok(Self { inner, decoder, slots })
    }

    /// The drafter of this class and kind.
    ///
    /// # Errors
    /// If its taps are missing or wrong.
    pub fn drafter(self, fields: &Fields, class: &str, kind: Settings) -> Result<Drafter, CheckpointError> {
        let taps = taps(&self.inner, "target_layer_ids", -1)?;
        self.decoder.drafter(fields, class, taps, kind)
    }
}

/// Scales that change what the same weights compute.
fn scales(fields: &Fields, inner: &Fields) -> Vec<Incompatibility> {
    let scaled = |&(key, plain): &(&str, f64)| {
        let said = inner.map.get(key).or(fields.map.get(key)).and_then(Value::as_f64);
        let reason = "a scale that the other layouts cannot say".into();
        said.filter(|&said| said != plain)
            .map(|_| Incompatibility { key: format!("dflash_config.{key}"), reason })
    };
    SCALES.iter().filter_map(scaled).collect()
}

/// What the slots predict, where a key says it: ModelOpt's own, or that of newer engines.
fn slots(fields: &Fields, inner: &Fields) -> Result<Option<Slots>, CheckpointError> {
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

/// The switches that are on, at the top level of a config or in its `dflash_config`: tools write them in either place.
pub(super) fn attention(map: &Map<String, Value>) -> Vec<Incompatibility> {
    let inner = map.get(INNER).and_then(Value::as_object);
    let places = [(Some(map), String::new()), (inner, format!("{INNER}."))];
    let mut found = vec![];
    for (map, within) in &places {
        for (key, value) in map.iter().flat_map(|map| map.iter()) {
            if let Some(reason) = switch(key).filter(|_| is_on(value)) {
                found.push(Incompatibility { key: format!("{within}{key}"), reason: reason.into() });
            }
        }
    }
    found
}

/// Why a key of this name stops a drafter where it is on: one that is known, or spelled much like those that are.
fn switch(key: &str) -> Option<&'static str> {
    let known = SWITCHES.iter().find(|(known, _)| *known == key).map(|&(_, reason)| reason);
    let mut words = key.split('_');
    known.or_else(|| match key {
        "s_aux" => Some(SINKS),
        "attention_type" | "attn_mode" | "attn_type" | "mask_type" => Some(MODE),
        _ => words.find_map(|word| match word {
            "causal" => Some(CAUSAL),
            "sink" | "sinks" => Some(SINKS),
            _ => None,
        }),
    })
}

fn is_on(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(mode) => !matches!(mode.as_str(), "full" | "bidirectional" | "full_attention"),
        _ => true,
    }
}

/// A key that `dflash_config` and the top level of a config have with other values.
fn contradiction(map: &Map<String, Value>) -> Option<(String, String)> {
    let inner = match map.get(INNER)? {
        Value::Null => return None,
        Value::Object(inner) => inner,
        other => return Some((INNER.into(), format!("expected an object, found {other}"))),
    };
    let differs = |(key, value): &(&String, &Value)| {
        map.get(key.as_str()).is_some_and(|outer| !outer.is_null() && !value.is_null() && outer != *value)
    };
    let (key, value) = inner.iter().filter(|(key, _)| CONSTANTS.contains(&key.as_str())).find(differs)?;
    let outer = &map[key];
    Some((format!("{INNER}.{key}"), format!("it is {value}, and `{key}` beside `{INNER}` is {outer}")))
}

/// An attention that is not the block drafters', as a config of any layout says it, or a key of `dflash_config` that is not known: the key, and
/// why the drafter is not run.
pub fn foreign_attention(map: &Map<String, Value>) -> Option<(String, String)> {
    let attention = attention(map).into_iter().next();
    let attention = attention
        .map(|Incompatibility { key, reason }| (key, format!("an attention that is not run here: {reason}")));
    let unknown = || map.get(INNER).and_then(Value::as_object).and_then(|inner| unknown(inner).next());
    attention
        .or_else(|| unknown().map(|Incompatibility { key, reason }| (key, reason)))
        .or_else(|| contradiction(map))
}

/// Keys of `dflash_config` that are not known, each of which may change what the weights compute.
fn unknown(inner: &Map<String, Value>) -> impl Iterator<Item = Incompatibility> {
    let unknown = inner.iter().filter(|(key, value)| !value.is_null() && !is_known(key));
    unknown.map(|(key, value)| Incompatibility {
        key: format!("{INNER}.{key}"),
        reason: format!("the key is not known (its value is {value}), so what it changes cannot be told"),
    })
}

pub fn config(
    drafter: &Drafter,
    dialect: CheckpointFormat,
    mut map: Map<String, Value>,
) -> Map<String, Value> {
    let Some(Container { class, top, mut inner }) = drafter.kind.container(dialect) else { return map };
    inner.insert("target_layer_ids".into(), Tap::layer_ids(&drafter.taps).into());
    map.insert("architectures".into(), json!([class]));
    map.extend(top);
    map.insert(INNER.into(), inner.into());
    map
}
