//! Reads the linear attention of Qwen3-Next and Qwen3.5 from config.json.

use deepspec_cost::economics::Attention;
use deepspec_models::config::MAX_LAYERS;
use serde_json::Value;

/// Whether the text model has the linear attention of Qwen3-Next and Qwen3.5.
pub fn is_qwen_hybrid(json: &Value) -> bool {
    let kind = json.get("model_type").and_then(Value::as_str).unwrap_or_default();
    kind.starts_with("qwen3_5") || kind == "qwen3_next"
}

/// The recurrent state of linear attention layers, and the weights of their projections. None for a model without
/// such layers. Configs of Qwen3.5 may leave the sizes of linear layers to transformers' defaults.
///
/// # Errors
/// Names the key that is missing or not supported, with what was found.
pub fn linear_attention(json: &Value, hidden: f64) -> Result<Option<(Attention, f64)>, String> {
    if !is_qwen_hybrid(json) {
        return Ok(None);
    }
    for key in ["num_key_value_heads", "head_dim"] {
        if json.get(key).and_then(Value::as_f64).is_none() {
            return Err(format!("has no number `{key}`; expected one, as published configs have"));
        }
    }
    if json.get("attn_output_gate") == Some(&Value::Bool(false)) {
        return Err("`attn_output_gate` is false; expected attention with an output gate".into());
    }
    let size = |key: &str, default: f64| match json.get(key).filter(|value| !value.is_null()) {
        None => Ok(default),
        Some(found) => {
            let size = found.as_f64().filter(|size| *size >= 1.0);
            size.ok_or_else(|| format!("`{key}` is {found}; expected at least 1"))
        }
    };
    let (key_heads, heads) = (size("linear_num_key_heads", 16.0)?, size("linear_num_value_heads", 32.0)?);
    let (key_dim, value_dim) = (size("linear_key_head_dim", 128.0)?, size("linear_value_head_dim", 128.0)?);
    // Queries and keys, values, gate and output, decay and learning rate.
    let projections = hidden * (2.0 * key_heads * key_dim + 3.0 * heads * value_dim + 2.0 * heads);
    Ok(Some((Attention::Linear { heads, key_dim, value_dim, state_bytes: 4.0 }, projections)))
}

/// How a layer of a hybrid mixes tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mixer {
    /// By a recurrent state.
    Linear,
    /// By attention to all tokens.
    Full,
    /// By attention to the tokens of `sliding_window`.
    Sliding,
}

/// How each layer of a hybrid mixes tokens. Every fourth has full attention if the config does not say.
///
/// # Errors
/// Names the key that is missing or has an invalid value.
pub fn mixers(json: &Value, count: f64) -> Result<Vec<Mixer>, String> {
    if count > MAX_LAYERS as f64 {
        return Err(format!("`num_hidden_layers` is {count}; expected at most {MAX_LAYERS}"));
    }
    let layers = count as usize;
    let kinds = json.get("layer_types").filter(|kinds| !kinds.is_null());
    let Some(kinds) = kinds else {
        let interval = match json.get("full_attention_interval").filter(|value| !value.is_null()) {
            None => 4,
            Some(found) => found.as_u64().filter(|interval| *interval > 0).ok_or_else(|| {
                format!("`full_attention_interval` is {found}; expected a whole number from 1")
            })? as usize,
        };
        let mixer = |number: usize| if number.is_multiple_of(interval) { Mixer::Full } else { Mixer::Linear };
        return Ok((1..=layers).map(mixer).collect());
    };
    let Some(kinds) = kinds.as_array() else {
        return Err(format!("`layer_types` is {kinds}; expected a list"));
    };
    if kinds.len() != layers {
        return Err(format!("`layer_types` has {} entries for {layers} layers", kinds.len()));
    }
    let has_window = json.get("sliding_window").is_some_and(Value::is_number);
    let mixer = |kind: &Value| match kind.as_str() {
        Some("linear_attention") => Ok(Mixer::Linear),
        Some("full_attention") => Ok(Mixer::Full),
        Some("sliding_attention") if has_window => Ok(Mixer::Sliding),
        Some("sliding_attention") => {
            Err("`layer_types` has \"sliding_attention\", and there is no number `sliding_window`".into())
        }
        _ => Err(format!(
            "`layer_types` has {kind}; expected \"linear_attention\", \"full_attention\" or \
             \"sliding_attention\""
        )),
    };
    kinds.iter().map(mixer).collect()
}
