//! Rotary settings, as far as layouts have to agree on them.

use serde_json::Value;

use crate::DialectError;
use crate::fields::Fields;

/// What transformers takes where nothing is said.
const THETA: f64 = 10_000.0;

/// Rotary settings of draft layers.
pub enum Rope {
    /// Without scaling, of this base.
    Plain(f64),
    /// Scaled in the way of this name.
    Scaled(String),
}

/// Reads them as transformers does: a `rope_scaling` that says something comes before `rope_parameters`.
///
/// # Errors
/// Keys of another type.
pub fn rope(fields: &Fields) -> Result<Rope, DialectError> {
    let scaling = fields.object("rope_scaling")?.filter(|scaling| !scaling.map.is_empty());
    let chosen = match scaling {
        Some(scaling) => Some(scaling),
        None => fields.object("rope_parameters")?,
    };
    let kind = match &chosen {
        Some(chosen) => chosen.text("rope_type")?.or(chosen.text("type")?),
        None => None,
    };
    if let Some(kind) = kind.filter(|&kind| kind != "default") {
        return Ok(Rope::Scaled(kind.into()));
    }
    let theta = |fields: &Fields| fields.map.get("rope_theta").and_then(Value::as_f64);
    Ok(Rope::Plain(chosen.as_ref().and_then(theta).or(theta(fields)).unwrap_or(THETA)))
}
