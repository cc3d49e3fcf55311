//! Rotary settings, as far as layouts have to agree on them.

use crate::gguf::Llama3;
use serde_json::{Map, Value};

use crate::fields::Fields;
use crate::shapes::Heads;
use crate::{Checkpoint, CheckpointError};

const ORIGINAL: &str = "original_max_position_embeddings";
/// What transformers takes where nothing is said.
const THETA: f64 = 10_000.0;

/// Rotary embeddings as an engine has to be told of them.
pub struct Rope {
    /// Their base.
    pub theta: f64,
    /// What a factor a plane stretches them by, if any.
    pub factors: Option<Vec<f32>>,
    /// The same as `rope_parameters` says it.
    pub parameters: Map<String, Value>,
}

/// [`with_factors`], of heads as wide as the config says.
///
/// # Errors
/// As there; the width of a head is missing or wrong.
pub fn stretched(source: &Checkpoint, to: &'static str) -> Result<Rope, CheckpointError> {
    let path = source.dir().join("config.json");
    let fields = Fields::new(&path, &source.drafter().decoder);
    with_factors(source, Heads::of(&fields, source.drafter())?.dim, to)
}

/// The checkpoint's rotary embeddings of heads of `dim` values, plain or scaled as Llama 3's are.
///
/// # Errors
/// As [`unscaled`], for any other scaling; settings of Llama 3's that are missing or impossible.
pub fn with_factors(source: &Checkpoint, dim: u64, to: &'static str) -> Result<Rope, CheckpointError> {
    let path = source.dir().join("config.json");
    let fields = Fields::new(&path, &source.drafter().decoder);
    let Some((chosen, "llama3")) = chosen(&fields)?.map(|(chosen, kind)| (chosen, kind.unwrap_or_default()))
    else {
        let theta = unscaled(source, to)?;
        let parameters = said([("rope_type", "default".into()), ("rope_theta", theta.into())]);
        return Ok(Rope { theta, factors: None, parameters });
    };
    let number = |key: &str| {
        let value = chosen.required(key, chosen.map.get(key).and_then(Value::as_f64))?;
        let positive = value > 0.0 && value.is_finite();
        positive.then_some(value).ok_or_else(|| chosen.error(key, format!("{value} is not above 0")))
    };
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
    let mut parameters = chosen.map.clone();
    parameters.remove("type");
    parameters.extend(said([("rope_type", "llama3".into()), ("rope_theta", theta.into())]));
    // What wins here has to be what is read there.
    parameters.extend(fields.map.get(ORIGINAL).map(|original| (ORIGINAL.into(), original.clone())));
    Ok(Rope { theta, factors: Some((0..planes).map(factor).collect()), parameters })
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
