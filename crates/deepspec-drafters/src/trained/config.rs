//! What all drafters' configs have in common: a decoder like the target's, and where the target is tapped.

use deepspec_core::cli::UsageError;
use deepspec_models::config::MAX_LAYERS;
use deepspec_models::{ModelConfig, ModelError, check_taps};
use serde_json::{Map, Value, json};

/// Checks the decoder and the taps; the error is a key and what is wrong with it.
pub fn check(
    model: &ModelConfig,
    target_layer_ids: &[i64],
    num_target_layers: usize,
) -> Result<(), (&'static str, String)> {
    let layers = model.layers.len();
    if !(1..=MAX_LAYERS).contains(&layers) {
        return Err(("num_hidden_layers", format!("{layers} is not between 1 and {MAX_LAYERS}")));
    }
    if target_layer_ids.is_empty() {
        return Err(("target_layer_ids", "at least one target layer is needed".into()));
    }
    check_taps(target_layer_ids, num_target_layers).map_err(|error| ("target_layer_ids", error.to_string()))
}

/// Whether `target` can be drafted for by a decoder made for a target of `num_target_layers` layers.
///
/// # Errors
/// [`ModelError::Mismatch`] naming what differs.
pub fn check_fits(
    model: &ModelConfig,
    num_target_layers: usize,
    target: &ModelConfig,
) -> Result<(), ModelError> {
    let pairs = [
        ("vocab_size", model.vocab_size, target.vocab_size),
        ("hidden_size", model.hidden_size, target.hidden_size),
        ("number of target layers", num_target_layers as i64, target.layers.len() as i64),
    ];
    let mut differences: Vec<String> = pairs
        .iter()
        .filter(|(_, drafter, target)| drafter != target)
        .map(|(what, drafter, target)| format!("{what} {target}, the drafter was trained for {drafter}"))
        .collect();
    if model.family != target.family {
        let (target, drafter) = (target.family, model.family);
        differences.push(format!("the architecture of {target}, the drafter was trained for {drafter}"));
    }
    if differences.is_empty() {
        return Ok(());
    }
    Err(ModelError::Mismatch(UsageError(format!(
        "the drafter does not belong to this target: the target has {}",
        differences.join("; ")
    ))))
}

/// The decoder's config.json with the keys of every drafter on top.
pub fn to_json(
    model: &ModelConfig,
    architecture: &str,
    target_layer_ids: &[i64],
    num_target_layers: usize,
) -> Map<String, Value> {
    let mut map = model.raw.clone();
    map.insert("architectures".into(), json!([architecture]));
    map.insert("num_target_layers".into(), json!(num_target_layers));
    map.insert("target_layer_ids".into(), json!(target_layer_ids));
    map.insert("tie_word_embeddings".into(), json!(false));
    map.insert("dtype".into(), json!("bfloat16"));
    map.remove("torch_dtype");
    map
}
