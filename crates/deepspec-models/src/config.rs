//! `config.json` of a Hugging Face model, in both spellings of the RoPE settings.

use std::path::{Path, PathBuf};

use deepspec_core::atomic;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::ModelError;
use crate::nn::Heads;

/// The architecture of a decoder, as its config.json gives it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelConfig {
    /// d, the width of the residual stream.
    pub hidden_size: i64,
    /// Width inside the MLP.
    pub intermediate_size: i64,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// H, query heads.
    pub num_attention_heads: i64,
    /// G, key/value heads.
    pub num_key_value_heads: i64,
    /// D, width of a head; H·D need not equal d.
    pub head_dim: i64,
    /// V, rows of the embedding.
    pub vocab_size: i64,
    /// ε of all RMS norms.
    pub rms_norm_eps: f64,
    /// Base of the rotary angles.
    pub rope_theta: f64,
    /// Longest sequence the model was made for.
    pub max_position_embeddings: usize,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// Standard deviation of fresh weights.
    pub initializer_range: f64,
    /// The whole config.json, for fields that only some readers need.
    #[serde(skip)]
    pub raw: Map<String, Value>,
}

/// Typed access to the keys of a JSON config, with errors that name file and key.
pub struct Fields<'a> {
    /// The file, for errors.
    pub path: &'a Path,
    /// Its top-level object.
    pub map: &'a Map<String, Value>,
}

impl Fields<'_> {
    /// An error about `key`.
    pub fn error(&self, key: &str, problem: impl Into<String>) -> ModelError {
        ModelError::Config { path: self.path.to_path_buf(), key: key.into(), problem: problem.into() }
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => read(value)
                .map(Some)
                .ok_or_else(|| self.error(key, format!("expected {expected}, found {value}"))),
        }
    }

    /// A positive integer, if the key is there.
    pub fn size(&self, key: &str) -> Result<Option<i64>, ModelError> {
        self.typed(key, "a positive integer", |value| value.as_i64().filter(|&n| n > 0 && n < 1 << 31))
    }

    /// A number, if the key is there.
    pub fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// A boolean, if the key is there.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// A string, if the key is there.
    pub fn text(&self, key: &str) -> Result<Option<String>, ModelError> {
        self.typed(key, "a string", |value| value.as_str().map(str::to_string))
    }

    /// A list of integers, if the key is there.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<i64>>, ModelError> {
        self.typed(key, "a list of integers", |value| value.as_array()?.iter().map(Value::as_i64).collect())
    }

    /// The value of a key that must be there.
    pub fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, ModelError> {
        value.ok_or_else(|| self.error(key, "missing"))
    }
}

/// Reads `dir/config.json` as a JSON object.
///
/// # Errors
/// If `dir` is no folder, or the file is missing or no JSON object.
pub fn read_json(dir: &Path) -> Result<(PathBuf, Map<String, Value>), ModelError> {
    let path = dir.join("config.json");
    if !path.is_file() {
        let problem = if dir.is_dir() {
            "the folder has no config.json; a model folder holds config.json and safetensors"
        } else {
            "no such folder; models are read from local folders"
        };
        return Err(ModelError::NotAModel { path: dir.to_path_buf(), problem: problem.into() });
    }
    match serde_json::from_str(&atomic::read_text(&path)?) {
        Ok(Value::Object(map)) => Ok((path, map)),
        Ok(_) => Err(ModelError::NotAModel { path, problem: "expected a JSON object".into() }),
        Err(error) => Err(ModelError::NotAModel { path, problem: format!("not valid JSON: {error}") }),
    }
}

impl ModelConfig {
    /// Numbers of heads and their width.
    pub fn heads(&self) -> Heads {
        Heads { query: self.num_attention_heads, key_value: self.num_key_value_heads, dim: self.head_dim }
    }

    /// Reads `dir/config.json` of a Qwen3 model, or of a drafter built like one.
    ///
    /// # Errors
    /// If a key is missing or has a wrong type, or names a feature that is not supported.
    pub fn load(dir: &Path) -> Result<Self, ModelError> {
        let (path, raw) = read_json(dir)?;
        let fields = Fields { path: &path, map: &raw };
        let model_type = fields.text("model_type")?;
        if model_type.as_deref() != Some("qwen3") {
            return Err(
                fields.error("model_type", format!("{model_type:?} is not supported; expected \"qwen3\""))
            );
        }
        let hidden_act = fields.text("hidden_act")?;
        if hidden_act.as_deref().is_some_and(|act| act != "silu") {
            return Err(
                fields.error("hidden_act", format!("{hidden_act:?} is not supported; expected \"silu\""))
            );
        }
        if fields.flag("attention_bias")?.unwrap_or(false) {
            return Err(fields.error("attention_bias", "biases in attention are not supported"));
        }
        if fields.flag("use_sliding_window")?.unwrap_or(false) {
            return Err(fields.error("use_sliding_window", "sliding windows are not supported"));
        }
        let size = |key: &str| fields.size(key).and_then(|value| fields.required(key, value));
        let (hidden_size, num_attention_heads) = (size("hidden_size")?, size("num_attention_heads")?);
        let num_key_value_heads = fields.size("num_key_value_heads")?.unwrap_or(num_attention_heads);
        if num_attention_heads % num_key_value_heads != 0 {
            let problem =
                format!("{num_key_value_heads} does not divide the {num_attention_heads} attention heads");
            return Err(fields.error("num_key_value_heads", problem));
        }
        let head_dim = fields.size("head_dim")?.unwrap_or(hidden_size / num_attention_heads);
        if head_dim % 2 != 0 {
            return Err(fields.error("head_dim", format!("{head_dim} is odd; rotary embedding needs pairs")));
        }
        let config = Self {
            hidden_size,
            intermediate_size: size("intermediate_size")?,
            num_hidden_layers: size("num_hidden_layers")? as usize,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            vocab_size: size("vocab_size")?,
            rms_norm_eps: fields.number("rms_norm_eps")?.unwrap_or(1e-6),
            rope_theta: rope_theta(&fields)?,
            max_position_embeddings: fields.size("max_position_embeddings")?.unwrap_or(4096) as usize,
            tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(false),
            initializer_range: fields.number("initializer_range")?.unwrap_or(0.02),
            raw: Map::new(),
        };
        Ok(Self { raw, ..config })
    }
}

/// `rope_parameters.rope_theta` (newer spelling) or `rope_theta` at top level.
fn rope_theta(fields: &Fields) -> Result<f64, ModelError> {
    let default = 10_000.0;
    if let Some(Value::Object(map)) = fields.map.get("rope_parameters") {
        let inner = Fields { path: fields.path, map };
        return match inner.text("rope_type")?.as_deref() {
            None | Some("default") => Ok(inner.number("rope_theta")?.unwrap_or(default)),
            Some(other) => Err(fields.error(
                "rope_parameters.rope_type",
                format!("\"{other}\" is not supported; expected \"default\""),
            )),
        };
    }
    if fields.map.get("rope_scaling").is_some_and(|scaling| !scaling.is_null()) {
        return Err(fields.error("rope_scaling", "RoPE scaling is not supported"));
    }
    Ok(fields.number("rope_theta")?.unwrap_or(default))
}
