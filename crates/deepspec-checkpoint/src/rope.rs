//! RoPE settings in the forms that the formats need.

use crate::gguf::{Llama3Scaling, YARN_BETAS, YarnScaling, yarn_attention_factor};
use serde_json::{Map, Value};

use crate::fields::Fields;
use crate::shapes::Heads;
use crate::{Checkpoint, CheckpointError};

const ORIGINAL_LENGTH_KEY: &str = "original_max_position_embeddings";
const LENGTH_KEY: &str = "max_position_embeddings";
/// Default `rope_theta` of transformers.
const DEFAULT_THETA: f64 = 10_000.0;

/// RoPE settings for llama.cpp.
pub struct LlamaCppRope {
    /// Base of the rotary frequencies, `rope_theta`.
    pub theta: f64,
    /// Divisors of the inverse frequencies, one per dimension pair (llama.cpp's `rope_freqs`). None
    /// without RoPE scaling.
    pub factors: Option<Vec<f64>>,
    /// Factor on cosines and sines (llama.cpp's `rope.scaling.attn_factor`), which is 1 except for YaRN.
    pub attention_factor: f64,
}

/// The `rope_parameters` that vLLM and SGLang read.
pub struct RopeParameters {
    /// Base of the rotary frequencies, `rope_theta`.
    pub theta: f64,
    /// Type of scaling, such as `llama3`; None without scaling.
    pub scaling: Option<String>,
    /// The value of `rope_parameters`, with `rope_type` and `rope_theta`.
    pub map: Map<String, Value>,
}

/// Reads the checkpoint's RoPE settings for vLLM and SGLang, which interpret `linear`, `llama3` and
/// plain `yarn` like transformers.
///
/// # Errors
/// Returns [`CheckpointError::Refused`] for another scaling type. Fails if settings of the scaling
/// are missing or invalid.
pub fn engine_rope_parameters(
    source: &Checkpoint,
    to: &'static str,
) -> Result<RopeParameters, CheckpointError> {
    let path = source.dir().join("config.json");
    let fields = Fields::new(&path, &source.drafter().decoder);
    let chosen = find_rope_settings(&fields)?;
    let theta = rope_theta(&fields, chosen.as_ref().map(|(chosen, _)| chosen));
    let Some((chosen, Some(kind))) = chosen else {
        let map = to_map([("rope_type", "default".into()), ("rope_theta", theta.into())]);
        return Ok(RopeParameters { theta, scaling: None, map });
    };
    match kind {
        "llama3" => {
            llama_cpp_rope(source, to)?;
        }
        "linear" => {
            positive_number(&chosen, "factor")?;
        }
        "yarn" => {
            yarn_factor(&fields, &chosen)?;
            // vLLM and SGLang interpret these keys differently from transformers, or ignore them.
            let differing = ["attention_factor", "mscale", "mscale_all_dim"];
            if let Some(key) = differing.into_iter().find(|&key| is_set(&chosen, key)) {
                let reason =
                    format!("rotary embeddings scaled by `yarn` with `{key}`, which engines read otherwise");
                return Err(source.refused_error(to, reason));
            }
        }
        other => {
            let reason = format!(
                "rotary embeddings scaled by `{other}` are not written; expected linear, llama3 or yarn"
            );
            return Err(source.refused_error(to, reason));
        }
    }
    let mut map = chosen.map.clone();
    map.remove("type");
    // transformers takes its defaults for a null or 0 here, and vLLM computes with it.
    for key in ["beta_fast", "beta_slow"] {
        if map.get(key).is_some_and(|value| value.is_null() || value.as_f64() == Some(0.0)) {
            map.remove(key);
        }
    }
    if map.get("truncate").is_some_and(Value::is_null) {
        map.remove("truncate");
    }
    if kind == "yarn" && map.get("factor").is_some_and(Value::is_null) {
        map.insert("factor".into(), yarn_factor(&fields, &chosen)?.into());
    }
    map.extend(to_map([("rope_type", kind.into()), ("rope_theta", theta.into())]));
    // transformers prefers the length at the top level of the config. For YaRN it defaults to
    // `max_position_embeddings`.
    let original = fields.map.get(ORIGINAL_LENGTH_KEY).or(chosen.map.get(ORIGINAL_LENGTH_KEY));
    let original = original.or(fields.map.get(LENGTH_KEY).filter(|_| kind == "yarn"));
    map.extend(original.map(|original| (ORIGINAL_LENGTH_KEY.into(), original.clone())));
    Ok(RopeParameters { theta, scaling: Some(kind.into()), map })
}

/// Reads the checkpoint's RoPE settings for llama.cpp, as one divisor per pair of dimensions. Its own YaRN has
/// fixed betas in most architectures, and divisors express any.
///
/// # Errors
/// Returns [`CheckpointError::Refused`] for a scaling type other than `linear`, `llama3` and `yarn`. Fails if
/// settings of the scaling or of the heads are missing or invalid.
pub fn llama_cpp_rope(source: &Checkpoint, to: &'static str) -> Result<LlamaCppRope, CheckpointError> {
    let path = source.dir().join("config.json");
    let fields = Fields::new(&path, &source.drafter().decoder);
    let dim = Heads::of(&fields, source.drafter())?.dim;
    let chosen = find_rope_settings(&fields)?;
    let theta = rope_theta(&fields, chosen.as_ref().map(|(chosen, _)| chosen));
    let Some((chosen, Some(kind))) = chosen else {
        return Ok(LlamaCppRope { theta, factors: None, attention_factor: 1.0 });
    };
    let part_key = "partial_rotary_factor";
    let part = chosen.number(part_key)?.or(fields.number(part_key)?);
    if let Some(part) = part.filter(|&part| part != 1.0) {
        let reason = format!("scaled rotary embeddings of a part of each head ({part}) are not written");
        return Err(source.refused_error(to, reason));
    }
    let factor = || positive_number(&chosen, "factor");
    let mut attention_factor = 1.0;
    let factors = match kind {
        "linear" => vec![factor()?; dim as usize / 2],
        "llama3" => llama3_factors(&fields, &chosen, theta, dim)?,
        "yarn" => {
            attention_factor = read_attention_factor(&chosen, yarn_factor(&fields, &chosen)?)?;
            yarn_factors(&fields, &chosen, theta, dim)?
        }
        other => {
            let reason = format!(
                "rotary embeddings scaled by `{other}` are not written; expected linear, llama3 or yarn"
            );
            return Err(source.refused_error(to, reason));
        }
    };
    Ok(LlamaCppRope { theta, factors: Some(factors), attention_factor })
}

fn llama3_factors(
    fields: &Fields,
    chosen: &Fields,
    theta: f64,
    dim: u64,
) -> Result<Vec<f64>, CheckpointError> {
    let number = |key: &str| positive_number(chosen, key);
    let llama3 = Llama3Scaling {
        low_freq_factor: number("low_freq_factor")?,
        high_freq_factor: number("high_freq_factor")?,
        original: original_context_length(fields, chosen)?,
    };
    if llama3.low_freq_factor >= llama3.high_freq_factor {
        let problem =
            format!("{} is not above low_freq_factor {}", llama3.high_freq_factor, llama3.low_freq_factor);
        return Err(chosen.error("high_freq_factor", problem));
    }
    let most = number("factor")?;
    let planes = dim / 2;
    let factor = |plane: u64| llama3.rope_factor(theta.powf(-(plane as f64) / planes as f64), most);
    Ok((0..planes).map(factor).collect())
}

fn yarn_factors(fields: &Fields, chosen: &Fields, theta: f64, dim: u64) -> Result<Vec<f64>, CheckpointError> {
    if theta <= 1.0 {
        return Err(chosen.error("rope_theta", format!("{theta}: yarn needs a base above 1")));
    }
    let [beta_fast, beta_slow] = YARN_BETAS.map(|(key, default)| match non_zero(chosen, key)? {
        Some(_) => positive_number(chosen, key),
        None => Ok(default),
    });
    let yarn = YarnScaling {
        factor: yarn_factor(fields, chosen)?,
        beta_fast: beta_fast?,
        beta_slow: beta_slow?,
        original: original_context_length(fields, chosen)?,
        truncate: chosen.flag("truncate")?.unwrap_or(true),
    };
    Ok(yarn.rope_factors(theta, dim))
}

/// YaRN's factor. As in transformers, a null stands for the ratio of the longest context to the one before
/// scaling.
fn yarn_factor(fields: &Fields, chosen: &Fields) -> Result<f64, CheckpointError> {
    if chosen.map.get("factor").is_some_and(Value::is_null) {
        return Ok(positive_number(fields, LENGTH_KEY)? / original_context_length(fields, chosen)?);
    }
    positive_number(chosen, "factor")
}

/// YaRN's factor on cosines and sines, by the precedence of keys in transformers.
fn read_attention_factor(chosen: &Fields, factor: f64) -> Result<f64, CheckpointError> {
    if is_set(chosen, "attention_factor") {
        return positive_number(chosen, "attention_factor");
    }
    let scale = |mscale: f64| 1.0 + mscale * (yarn_attention_factor(factor) - 1.0);
    Ok(match (non_zero(chosen, "mscale")?, non_zero(chosen, "mscale_all_dim")?) {
        (Some(mscale), Some(all)) => scale(mscale) / scale(all),
        _ => yarn_attention_factor(factor),
    })
}

/// A number, if it is there and not 0. transformers counts 0 as absent for some keys.
fn non_zero(fields: &Fields, key: &str) -> Result<Option<f64>, CheckpointError> {
    Ok(fields.number(key)?.filter(|&value| value != 0.0))
}

/// Whether a key is there and not null.
fn is_set(fields: &Fields, key: &str) -> bool {
    fields.map.get(key).is_some_and(|value| !value.is_null())
}

/// Reads a required number above 0.
fn positive_number(fields: &Fields, key: &str) -> Result<f64, CheckpointError> {
    let value = fields.required(key, fields.number(key)?)?;
    let positive = value > 0.0 && value.is_finite();
    positive.then_some(value).ok_or_else(|| fields.error(key, format!("{value} is not above 0")))
}

fn to_map<const N: usize>(entries: [(&str, Value); N]) -> Map<String, Value> {
    entries.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
}

/// Reads the context length before scaling. Like transformers, it prefers the top-level key of the
/// config, and takes the trained length if there is none.
fn original_context_length(fields: &Fields, chosen: &Fields) -> Result<f64, CheckpointError> {
    if !is_set(fields, ORIGINAL_LENGTH_KEY) && !is_set(chosen, ORIGINAL_LENGTH_KEY) {
        return positive_number(fields, LENGTH_KEY);
    }
    let number = |fields: &Fields| fields.map.get(ORIGINAL_LENGTH_KEY).and_then(Value::as_f64);
    let value = chosen.required(ORIGINAL_LENGTH_KEY, number(fields).or(number(chosen)))?;
    let positive = value > 0.0 && value.is_finite();
    positive
        .then_some(value)
        .ok_or_else(|| chosen.error(ORIGINAL_LENGTH_KEY, format!("{value} is not above 0")))
}

/// Finds the object with the RoPE settings, and the scaling type if there is one. Like in transformers, a
/// non-empty `rope_scaling` precedes `rope_parameters`.
fn find_rope_settings<'a>(
    fields: &Fields<'a>,
) -> Result<Option<(Fields<'a>, Option<&'a str>)>, CheckpointError> {
    let scaling = fields.object("rope_scaling")?.filter(|scaling| !scaling.map.is_empty());
    let chosen = match scaling {
        Some(scaling) => Some(scaling),
        None => fields.object("rope_parameters")?,
    };
    let Some(chosen) = chosen else { return Ok(None) };
    let kind = chosen.text("rope_type")?.or(chosen.text("type")?).filter(|&kind| kind != "default");
    Ok(Some((chosen, kind)))
}

fn rope_theta(fields: &Fields, chosen: Option<&Fields>) -> f64 {
    let theta = |fields: &Fields| fields.map.get("rope_theta").and_then(Value::as_f64);
    chosen.and_then(theta).or(theta(fields)).unwrap_or(DEFAULT_THETA)
}
