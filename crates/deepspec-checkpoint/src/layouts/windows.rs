//! Sliding windows that `dflash_config` marks, as ModelOpt and the authors of Nemotron and MiMo do.
//!
//! The keys mean the same as in vLLM 0.32 (`_resolve_layer_attention` of `qwen3_dflash.py`).

use serde_json::{Map, Value};

use super::block_options::{CAUSAL_KEYS, INNER_KEY, read_causal};
use super::common::read_layer_count;
use crate::CheckpointError;
use crate::fields::Fields;
use crate::kind::json_map;

/// Key of `dflash_config`: whether all draft layers have a window.
pub const USE_SWA: &str = "use_swa";
/// Key of `dflash_config`: tokens that a query in a layer with a window sees, itself included.
pub const SWA_WINDOW_SIZE: &str = "swa_window_size";

const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";

/// The config with `use_swa` and `swa_window_size` of `dflash_config` replaced by the keys of transformers: `use_sliding_window`,
/// `sliding_window` and `layer_types`. None if `dflash_config` marks no windows.
///
/// `use_swa` gives all layers a window, unless `layer_types` marks some layers; then only these have one. The window is
/// `swa_window_size`, or else `sliding_window`.
///
/// # Errors
/// Fails if keys contradict each other, if the window is missing, or if tools differ in who sees what within a block.
pub fn resolve_windows(fields: &Fields) -> Result<Option<Map<String, Value>>, CheckpointError> {
    let Some(Value::Object(_)) = fields.map.get(INNER_KEY) else { return Ok(None) };
    let inner = fields.required_object(INNER_KEY)?;
    let (use_swa, inner_size) = (inner.flag(USE_SWA)?, inner.size::<u64>(SWA_WINDOW_SIZE)?);
    if use_swa.is_none() && inner_size.is_none() {
        return Ok(None);
    }
    let use_sliding_window = fields.flag("use_sliding_window")?;
    let outer_size = fields.size::<u64>("sliding_window")?;
    let marked = marked_layers(fields, use_sliding_window == Some(true) && outer_size.is_some())?;
    let are_some_marked = marked.contains(&true);
    if !are_some_marked && use_swa != Some(true) {
        return Ok(None);
    }
    if fields.text("model_type")? != Some("qwen3") {
        let problem =
            "the windows that dflash_config marks are read for layers of Qwen3 only; expected \"qwen3\"";
        return Err(fields.error("model_type", problem));
    }
    let says_causal = |place: &Fields| {
        CAUSAL_KEYS.iter().any(|key| place.map.get(*key).is_some_and(|value| !value.is_null()))
    };
    if are_some_marked && !says_causal(fields) && !says_causal(&inner) {
        let problem = "it marks windows, so vLLM takes the blocks for causal ones, and other tools do not; \
                       add `is_causal` with true or false";
        return Err(fields.error("layer_types", problem));
    }
    let window = match (inner_size, outer_size) {
        (Some(size), Some(outer)) if size != outer && use_sliding_window != Some(false) => {
            return Err(inner.error(
                SWA_WINDOW_SIZE,
                format!("{size}, but sliding_window is {outer}; expected equal sizes"),
            ));
        }
        (Some(size), _) => size,
        (None, Some(outer)) if use_sliding_window == Some(true) => outer,
        (None, _) => return Err(inner.error(SWA_WINDOW_SIZE, "missing, though layers have a window")),
    };
    let block_size = inner.size::<u64>("block_size")?.or(fields.size("block_size")?);
    if let Some(block_size) = block_size.filter(|&size| window < size)
        && !read_causal(fields)?
    {
        let problem = format!(
            "{window} is less than the block size {block_size}; tools differ in who sees what within such a block"
        );
        return Err(inner.error(SWA_WINDOW_SIZE, problem));
    }
    let name = |is_marked| if is_marked || !are_some_marked { SLIDING } else { FULL };
    let types: Vec<&str> = marked.into_iter().map(name).collect();
    let mut own = inner.map.clone();
    [USE_SWA, SWA_WINDOW_SIZE].iter().for_each(|key| drop(own.remove(*key)));
    let mut map = fields.map.clone();
    map.extend(json_map([
        ("use_sliding_window", true.into()),
        ("sliding_window", window.into()),
        ("layer_types", types.into()),
        (INNER_KEY, own.into()),
    ]));
    Ok(Some(map))
}

/// Whether `layer_types` marks each layer. Without this key, transformers marks the layers from `max_window_layers` on if
/// `has_default` says that the config has a window.
fn marked_layers(fields: &Fields, has_default: bool) -> Result<Vec<bool>, CheckpointError> {
    let layers = read_layer_count(fields)?;
    let Some(types) = fields.texts("layer_types")? else {
        let first = if has_default { fields.count("max_window_layers")?.unwrap_or(28) } else { layers };
        return Ok((0..layers).map(|layer| layer >= first).collect());
    };
    if types.len() as u64 != layers {
        return Err(fields.error(
            "layer_types",
            format!("{} types for {layers} layers; expected one of each layer", types.len()),
        ));
    }
    if let Some(other) = types.iter().find(|kind| ![SLIDING, FULL].contains(*kind)) {
        let problem = format!("\"{other}\" is unknown; expected \"{SLIDING}\" or \"{FULL}\"");
        return Err(fields.error("layer_types", problem));
    }
    Ok(types.into_iter().map(|kind| kind == SLIDING).collect())
}

/// Whether the keys of transformers give some layers a window.
pub fn has_windows(map: &Map<String, Value>) -> bool {
    map.get("use_sliding_window") == Some(&Value::Bool(true))
        && map.get("sliding_window").is_some_and(Value::is_u64)
        && layer_types(map).is_some_and(|mut types| types.any(|kind| kind == SLIDING))
}

/// The window that the keys of transformers give all layers; None if a layer has full attention.
pub fn shared_window(map: &Map<String, Value>) -> Option<u64> {
    let do_all_slide = layer_types(map).is_some_and(|mut types| types.all(|kind| kind == SLIDING));
    map.get("sliding_window").filter(|_| has_windows(map) && do_all_slide).and_then(Value::as_u64)
}

fn layer_types(map: &Map<String, Value>) -> Option<impl Iterator<Item = &str>> {
    Some(map.get("layer_types")?.as_array()?.iter().filter_map(Value::as_str))
}

/// Marks the window of all layers in `dflash_config`, as ModelOpt does. `layer_types` stays full attention: vLLM would take marked
/// layers for causal ones.
pub fn mark_windows(map: &mut Map<String, Value>, window: u64) {
    map.remove("use_sliding_window");
    if let Some(types) = map.get_mut("layer_types").and_then(Value::as_array_mut) {
        types.fill(FULL.into());
    }
    if let Some(inner) = map.get_mut(INNER_KEY).and_then(Value::as_object_mut) {
        inner.insert(USE_SWA.into(), true.into());
        inner.insert(SWA_WINDOW_SIZE.into(), window.into());
    }
}
