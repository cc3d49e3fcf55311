//! Rotary settings, as far as layouts have to agree on them.

use serde_json::Value;

use crate::fields::Fields;
use crate::{Checkpoint, DialectError};

/// What transformers takes where nothing is said.
const THETA: f64 = 10_000.0;

/// The base of the checkpoint's rotary embeddings, read as transformers does: a `rope_scaling` that says something comes before
/// `rope_parameters`.
///
/// # Errors
/// [`DialectError::Refused`] for `to` if they are scaled, which is read differently everywhere; keys of another type.
pub fn unscaled(source: &Checkpoint, to: &'static str) -> Result<f64, DialectError> {
    let path = source.dir().join("config.json");
    let fields = Fields::new(&path, &source.drafter().decoder);
    let scaling = fields.object("rope_scaling")?.filter(|scaling| !scaling.map.is_empty());
    let chosen = match scaling {
        Some(scaling) => Some(scaling),
        None => fields.object("rope_parameters")?,
    };
    if let Some(chosen) = &chosen
        && let Some(kind) =
            chosen.text("rope_type")?.or(chosen.text("type")?).filter(|&kind| kind != "default")
    {
        return Err(source.refused(to, format!("rotary embeddings that are scaled ({kind}) are not written")));
    }
    let theta = |fields: &Fields| fields.map.get("rope_theta").and_then(Value::as_f64);
    Ok(chosen.as_ref().and_then(theta).or(theta(&fields)).unwrap_or(THETA))
}
