//! Rotary settings, as far as layouts have to agree on them.

use crate::gguf::Llama3;
use serde_json::{Map, Value};

use crate::fields::Fields;
use crate::shapes::Heads;
use crate::{Checkpoint, CheckpointError};

const ORIGINAL: &str = "original_max_position_embeddings";
/// What transformers takes where nothing is said.
const THETA: f64 = 10_000.0;

/// Rotary embeddings as llama.cpp is told of them.
pub struct Rope {
    /// Their base.
    pub theta: f64,
    /// One factor per pair of dimensions, where they are scaled.
    pub factors: Option<Vec<f32>>,
}

/// The `rope_parameters` that vLLM and SGLang read.
pub struct RopeParameters {
    /// The base.
    pub theta: f64,
    /// The kind of scaling, such as `llama3`; none where the embeddings are plain.
    pub scaling: Option<String>,
    /// The value of `rope_parameters`, with `rope_type` and `rope_theta`.
    pub map: Map<String, Value>,
}

/// The checkpoint's rotary embeddings for vLLM and SGLang, which read `linear`, `llama3` and plain `yarn` as transformers does.
///
/// # Errors
/// [`CheckpointError::Refused`] for another kind of scaling; settings of Llama 3's scaling that are missing or impossible.
pub fn parameters(source: &Checkpoint, to: &'static str) -> Result<RopeParameters, CheckpointError> {
    let path = source.dir().join("config.json");
    let fields = Fields::new(&path, &source.drafter().decoder);
    let chosen = chosen(&fields)?;
    let theta = theta(&fields, chosen.as_ref().map(|(chosen, _)| chosen));
    let Some((chosen, Some(kind))) = chosen else {
        let map = said([("rope_type", "default".into()), ("rope_theta", theta.into())]);
        return Ok(RopeParameters { theta, scaling: None, map });
    };
    match kind {
        "llama3" => {
            with_factors(source, to)?;
        }
        "linear" => {
            positive(&chosen, "factor")?;
        }
        "yarn" => {
            positive(&chosen, "factor")?;
            // vLLM and SGLang read these otherwise than transformers, or not at all.
            let differing = ["attention_factor", "mscale", "mscale_all_dim"];
            if let Some(key) =
                differing.into_iter().find(|&key| chosen.map.get(key).is_some_and(|value| !value.is_null()))
            {
                let reason =
                    format!("rotary embeddings scaled by `yarn` with `{key}`, which engines read otherwise");
                return Err(source.refused(to, reason));
            }
        }
        other => {
            let reason = format!(
                "rotary embeddings scaled by `{other}` are not written; expected linear, llama3 or yarn"
            );
            return Err(source.refused(to, reason));
        }
    }
    let mut map = chosen.map.clone();
    map.remove("type");
    map.extend(said([("rope_type", kind.into()), ("rope_theta", theta.into())]));
    // transformers lets the length at the top of the config win, and takes the trained length where none is given.
    let original = fields.map.get(ORIGINAL).or(chosen.map.get(ORIGINAL));
    let original = original.or(fields.map.get("max_position_embeddings").filter(|_| kind == "yarn"));
    map.extend(original.map(|original| (ORIGINAL.into(), original.clone())));
    Ok(RopeParameters { theta, scaling: Some(kind.into()), map })
}

/// The checkpoint's rotary embeddings with a factor per pair of dimensions, plain or scaled as Llama 3's are.
///
/// # Errors
/// [`CheckpointError::Refused`] for `to` for another scaling; settings of Llama 3's scaling or of the heads that are missing or
/// impossible.
pub fn with_factors(source: &Checkpoint, to: &'static str) -> Result<Rope, CheckpointError> {
    let path = source.dir().join("config.json");
    let fields = Fields::new(&path, &source.drafter().decoder);
    let dim = Heads::of(&fields, source.drafter())?.dim;
    let Some((chosen, "llama3")) = chosen(&fields)?.map(|(chosen, kind)| (chosen, kind.unwrap_or_default()))
    else {
        return Ok(Rope { theta: unscaled(source, to)?, factors: None });
    };
    let number = |key: &str| positive(&chosen, key);
    let llama3 = Llama3 {
        slow: number("low_freq_factor")?,
        fast: number("high_freq_factor")?,
        original: original(&fields, &chosen)?,
    };
    if llama3.slow >= llama3.fast {
        let problem = format!("{} is not above low_freq_factor {}", llama3.fast, llama3.slow);
        return Err(chosen.error("high_freq_factor", problem));
    }
    let most = number("factor")?;
    let theta = theta(&fields, Some(&chosen));
    let planes = dim / 2;
    let factor = |plane: u64| llama3.factor(theta.powf(-(plane as f64) / planes as f64), most) as f32;
    Ok(Rope { theta, factors: Some((0..planes).map(factor).collect()) })
}

/// A number above 0.
fn positive(fields: &Fields, key: &str) -> Result<f64, CheckpointError> {
    let value = fields.required(key, fields.number(key)?)?;
    let positive = value > 0.0 && value.is_finite();
    positive.then_some(value).ok_or_else(|| fields.error(key, format!("{value} is not above 0")))
}

fn said<const N: usize>(entries: [(&str, Value); N]) -> Map<String, Value> {
    entries.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
}

/// Positions that the rotation was trained for before it was stretched; transformers lets the config's own key win.
fn original(fields: &Fields, chosen: &Fields) -> Result<f64, CheckpointError> {
    let number = |fields: &Fields| fields.map.get(ORIGINAL).and_then(Value::as_f64);
    let value = chosen.required(ORIGINAL, number(fields).or(number(chosen)))?;
    let positive = value > 0.0 && value.is_finite();
    positive.then_some(value).ok_or_else(|| chosen.error(ORIGINAL, format!("{value} is not above 0")))
}

/// The base of the checkpoint's rotary embeddings, read as transformers does: a `rope_scaling` that says something comes before
/// `rope_parameters`.
///
/// # Errors
/// [`CheckpointError::Refused`] for `to` if they are scaled, which is read differently everywhere; keys of another type.
fn unscaled(source: &Checkpoint, to: &'static str) -> Result<f64, CheckpointError> {
    let path = source.dir().join("config.json");
    let fields = Fields::new(&path, &source.drafter().decoder);
    let chosen = chosen(&fields)?;
    if let Some((_, Some(kind))) = &chosen {
        return Err(source.refused(to, format!("rotary embeddings that are scaled ({kind}) are not written")));
    }
    Ok(theta(&fields, chosen.as_ref().map(|(chosen, _)| chosen)))
}

/// What says how they are scaled, and the kind of scaling if there is one.
fn chosen<'a>(fields: &Fields<'a>) -> Result<Option<(Fields<'a>, Option<&'a str>)>, CheckpointError> {
    let scaling = fields.object("rope_scaling")?.filter(|scaling| !scaling.map.is_empty());
    let chosen = match scaling {
        Some(scaling) => Some(scaling),
        None => fields.object("rope_parameters")?,
    };
    let Some(chosen) = chosen else { return Ok(None) };
    let kind = chosen.text("rope_type")?.or(chosen.text("type")?).filter(|&kind| kind != "default");
    Ok(Some((chosen, kind)))
}

fn theta(fields: &Fields, chosen: Option<&Fields>) -> f64 {
    let theta = |fields: &Fields| fields.map.get("rope_theta").and_then(Value::as_f64);
    chosen.and_then(theta).or(theta(fields)).unwrap_or(THETA)
}
