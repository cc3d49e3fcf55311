//! Defaults of requests, from the model's folder.

use std::path::Path;

use serde_json::{Map, Value};

use crate::ranges::{PENALTIES, check_range, check_top_p};

/// Values for fields that a request omits. Like vLLM, the server reads them from the model's
/// `generation_config.json`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Defaults {
    /// Divisor of the logits.
    pub temperature: f64,
    /// Probability mass of nucleus sampling.
    pub top_p: f64,
    /// Number of most probable tokens to sample from; 0 for all.
    pub top_k: i64,
    /// Minimum probability of a token, relative to the most probable token.
    pub min_p: f64,
    /// Limit of an answer in tokens.
    pub max_tokens: Option<usize>,
}

impl Default for Defaults {
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, max_tokens: None }
    }
}

impl Defaults {
    /// Reads `generation_config.json` of the model in `dir` and logs the values that are used.
    /// Invalid values and unsupported settings are ignored with a warning.
    pub fn read(dir: &Path) -> Self {
        let path = dir.join("generation_config.json");
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let config: Map<String, Value> = serde_json::from_str(&text).unwrap_or_default();
        let plain = Self::default();
        let number = |key: &str, plain: f64, check: &dyn Fn(f64) -> bool| match config.get(key) {
            None | Some(Value::Null) => plain,
            Some(value) => value.as_f64().filter(|&value| check(value)).unwrap_or_else(|| {
                tracing::warn!("{}: `{key}` {value} is no number in range and not applied", path.display());
                plain
            }),
        };
        let found = Self {
            temperature: number("temperature", plain.temperature, &|value| {
                check_range("", value, 0.0, 2.0).is_ok()
            }),
            top_p: number("top_p", plain.top_p, &|value| check_top_p(value).is_ok()),
            top_k: number("top_k", plain.top_k as f64, &|value| (-1.0..=1e9).contains(&value)) as i64,
            min_p: number("min_p", plain.min_p, &|value| check_range("", value, 0.0, 1.0).is_ok()),
            max_tokens: Some(number("max_new_tokens", 0.0, &|limit| limit >= 1.0) as usize)
                .filter(|&limit| limit > 0),
        };
        for (key, neutral) in PENALTIES {
            if let Some(value) = config.get(key).and_then(Value::as_f64).filter(|&value| value != neutral) {
                tracing::warn!("{}: `{key}` {value} is not supported and not applied", path.display());
            }
        }
        if found != plain {
            let Self { temperature, top_p, top_k, min_p, max_tokens } = found;
            let limit = max_tokens.map_or_else(String::new, |limit| format!(", max_tokens {limit}"));
            tracing::info!(
                "requests that say nothing have the model's defaults ({}): temperature {temperature}, top_p {top_p}, top_k {top_k}, min_p \
                 {min_p}{limit}",
                path.display()
            );
        }
        found
    }
}
