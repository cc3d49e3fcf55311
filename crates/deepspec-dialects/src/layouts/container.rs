//! The container of z-lab's DFlash: decoder at the top level, `dflash_config` beside it, no embedding and no head. SpecForge
//! and ModelOpt put DSpark into it, each in its own way; z-lab's DFlash 2 has all of its keys within.

use deepspec_core::{Slots, Tap};
use serde_json::{Map, Value, json};

use super::common::{Decoder, taps};
use crate::drafter::{Drafter, Obstacle, Settings};
use crate::fields::Fields;
use crate::kind::Container;
use crate::{Dialect, DialectError, Family};

/// Keys beside the decoder's that containers of every kind may have.
const OWN: [&str; 6] =
    ["num_target_layers", "block_size", "dflash_config", "emb_dim", "is_causal", "sample_from_anchor"];

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
    pub fn read(fields: &Fields<'a>, own: &[&str], families: &[Family]) -> Result<Self, DialectError> {
        let inner = fields.required_object("dflash_config")?;
        let mut decoder = Decoder::read(fields, &[&OWN, own].concat(), families)?;
        decoder.obstacles.extend(switches(fields, "")?);
        decoder.obstacles.extend(switches(&inner, "dflash_config.")?);
        decoder.obstacles.extend(scales(fields, &inner));
        let slots = slots(fields, &inner)?;
        Ok(Self { inner, decoder, slots })
    }

    /// The drafter of this class and kind.
    ///
    /// # Errors
    /// If its taps are missing or wrong.
    pub fn drafter(self, fields: &Fields, class: &str, kind: Settings) -> Result<Drafter, DialectError> {
        let taps = taps(&self.inner, "target_layer_ids", -1)?;
        self.decoder.drafter(fields, class, taps, kind)
    }
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

pub fn config(drafter: &Drafter, dialect: Dialect, mut map: Map<String, Value>) -> Map<String, Value> {
    let Some(Container { class, top, mut inner }) = drafter.kind.container(dialect) else { return map };
    inner.insert("target_layer_ids".into(), Tap::layer_ids(&drafter.taps).into());
    map.insert("architectures".into(), json!([class]));
    map.extend(top);
    map.insert("dflash_config".into(), inner.into());
    map
}
