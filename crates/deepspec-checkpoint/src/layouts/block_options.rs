//! Options of draft blocks that tools store at the top level of a config or in `dflash_config`.

use serde_json::{Map, Value};

use crate::CheckpointError;
use crate::fields::Fields;
use crate::shapes::{ADD_SWA_ATTENTION_SINK_BIAS, ATTENTION_SINK_BIAS};

/// Keys by which tools mark causal blocks, at the top level or in `dflash_config`: SpecForge and vLLM, NeMo AutoModel and
/// ModelOpt, JetSpec.
pub const CAUSAL_KEYS: [&str; 3] = ["is_causal", "causal", "causal_head"];

/// Keys by which tools mark attention sinks, at the top level or in `dflash_config`: ModelOpt and vLLM, MiMo's config.
pub const SINK_KEYS: [&str; 2] = [ATTENTION_SINK_BIAS, ADD_SWA_ATTENTION_SINK_BIAS];

/// Key of the object that holds the settings of the drafter.
pub const INNER_KEY: &str = "dflash_config";

/// Whether the blocks of a drafter are causal, by any of [`CAUSAL_KEYS`] at the top level or in `dflash_config`. A config without
/// these keys has blocks whose slots see each other.
///
/// # Errors
/// Fails if a key is neither a flag nor null, or if two keys contradict each other.
pub fn read_causal(fields: &Fields) -> Result<bool, CheckpointError> {
    read_shared_flag(fields, &CAUSAL_KEYS)
}

/// Whether the draft layers have attention sinks. `dflash_config.attention_sink_bias` decides if it is present, as in vLLM, and
/// else any of [`SINK_KEYS`].
///
/// # Errors
/// Fails if a key is neither a flag nor null, or if two keys contradict each other.
pub fn read_attention_sinks(fields: &Fields) -> Result<bool, CheckpointError> {
    if let Some(Value::Object(_)) = fields.map.get(INNER_KEY) {
        let inner = fields.required_object(INNER_KEY)?;
        if inner.map.contains_key(ATTENTION_SINK_BIAS) {
            return Ok(inner.flag(ATTENTION_SINK_BIAS)?.unwrap_or(false));
        }
    }
    read_shared_flag(fields, &SINK_KEYS)
}

/// Why SGLang 0.5.23 would run whole blocks, or layers without sinks, for the config `map`. By its sources it reads causal blocks by
/// `is_causal` beside `layer_types`, and sinks by `dflash_config.attention_sink_bias`. None if it reads what the drafter has.
pub fn unread_by_sglang(map: &Map<String, Value>, has_sinks: bool) -> Option<&'static str> {
    let inner = map.get(INNER_KEY).and_then(Value::as_object);
    let outer_says = |key: &str| map.get(key) == Some(&Value::Bool(true));
    let inner_says = |key: &str| inner.is_some_and(|inner| inner.get(key) == Some(&Value::Bool(true)));
    let is_causal = CAUSAL_KEYS.into_iter().any(|key| outer_says(key) || inner_says(key));
    let has_layer_types = map.get("layer_types").is_some_and(Value::is_array);
    if is_causal && !(outer_says(CAUSAL_KEYS[0]) && has_layer_types) {
        return Some("it reads causal blocks by is_causal beside layer_types only; convert to sglang");
    }
    (has_sinks && !inner_says(ATTENTION_SINK_BIAS))
        .then_some("it reads attention sinks by dflash_config.attention_sink_bias only; convert to sglang")
}

/// The flag that any of `keys` sets, at the top level or in `dflash_config`; false without these keys.
fn read_shared_flag(fields: &Fields, keys: &[&'static str]) -> Result<bool, CheckpointError> {
    let inner = match fields.map.get(INNER_KEY) {
        Some(Value::Object(_)) => Some(fields.required_object(INNER_KEY)?),
        _ => None,
    };
    let mut found: Option<(&str, bool)> = None;
    for place in [Some(fields), inner.as_ref()].into_iter().flatten() {
        for &key in keys {
            let Some(value) = place.flag(key)? else { continue };
            match found {
                Some((other, before)) if before != value => {
                    return Err(place.error(key, format!("{value}, but {other} is {before}")));
                }
                _ => found = Some((key, value)),
            }
        }
    }
    Ok(found.is_some_and(|(_, value)| value))
}
