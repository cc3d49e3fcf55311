//! A language model in a GGUF, with the config.json, tokenizer and tensor names of transformers.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value as Json, json};

use crate::gguf::rope_layout::to_half_split;
use crate::gguf::rope_scaling::{Llama3Scaling, YARN_BETAS, yarn_attention_factor};
use crate::gguf::vocabulary::Vocabulary;
use crate::gguf::{GgufError, GgufFile, TensorInfo, names};

/// A supported architecture: its name in llama.cpp, and its values for config.json.
struct Architecture {
    name: &'static str,
    class: &'static str,
    model_type: &'static str,
    /// Whether the rows of each query and key head are stored as interleaved RoPE pairs, not as two
    /// halves.
    interleaved_rope: bool,
}

static ARCHITECTURES: [Architecture; 2] = [
    Architecture { name: "llama", class: "LlamaForCausalLM", model_type: "llama", interleaved_rope: true },
    Architecture { name: "qwen3", class: "Qwen3ForCausalLM", model_type: "qwen3", interleaved_rope: false },
];

/// Name of the tensor with divisors of the RoPE frequencies, one per frequency.
pub const ROPE_FACTORS: &str = "rope_freqs.weight";
/// The scaling settings that all Llama 3 models with such factors share.
const LLAMA3_SCALING: Llama3Scaling =
    Llama3Scaling { low_freq_factor: 1.0, high_freq_factor: 4.0, original: 8192.0 };
/// Maximum number of RoPE factors that are read. No model has heads wide enough for more.
const MAX_ROPE_FACTORS: usize = 4096;
/// Maximum difference of stored float32 factors from the computed ones, relative for `rope_freqs`.
const FACTOR_TOLERANCE: f64 = 1e-4;

/// A model in a GGUF.
pub struct Model {
    file: GgufFile,
    config: Map<String, Json>,
    /// The file's tensors by their names in transformers.
    tensors: BTreeMap<String, StoredTensor>,
}

struct StoredTensor {
    stored: String,
    /// Number of heads, if the rows are stored as interleaved RoPE pairs.
    paired_heads: Option<usize>,
}

impl Model {
    /// Opens the model in `path`.
    ///
    /// # Errors
    /// Fails as [`GgufFile::open`] does, if the architecture is not supported, or if settings or
    /// tensors would be lost.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let file = GgufFile::open(path)?;
        let key = "general.architecture";
        let name = file.required(key, file.text(key)?)?;
        let known = ARCHITECTURES.iter().find(|known| known.name == name);
        let architecture = known.ok_or_else(|| {
            let known = ARCHITECTURES.each_ref().map(|known| known.name).join(", ");
            file.error(format!("`{key}`: {name} is not an architecture that is read (known: {known})"))
        })?;
        let reader = ConfigReader { file: &file, architecture };
        let (config, heads) = reader.config()?;
        let layers = config["num_hidden_layers"].as_u64().unwrap_or(0);
        let tensors = reader.tensors(&heads, layers)?;
        Ok(Self { file, config, tensors })
    }

    /// The model's config.json, without the token ids.
    pub fn config(&self) -> &Map<String, Json> {
        &self.config
    }

    /// The model's tensors by their names in transformers.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        let stored = |named: &StoredTensor| &self.file.tensors()[&named.stored];
        self.tensors.iter().map(move |(name, named)| (name.as_str(), stored(named)))
    }

    /// The values of one of [`Model::tensors`] in the row order of transformers; see
    /// [`GgufFile::values`].
    ///
    /// # Errors
    /// Fails if the tensor is missing or the file cannot be read.
    pub fn values(&self, name: &str) -> Result<Vec<u8>, GgufError> {
        let missing = || self.file.error(format!("tensor `{name}` is missing"));
        let named = self.tensors.get(name).ok_or_else(missing)?;
        let values = self.file.values(&named.stored)?;
        Ok(match named.paired_heads {
            Some(heads) => to_half_split(&values, heads, self.file.tensors()[&named.stored].shape[0]),
            None => values,
        })
    }

    /// The model's tokenizer.
    pub(crate) fn vocabulary(&self) -> Result<Vocabulary, GgufError> {
        Vocabulary::read(&self.file)
    }
}

/// Numbers of query heads and of key/value heads.
struct Heads {
    query: u64,
    key_value: u64,
}

struct ConfigReader<'a> {
    file: &'a GgufFile,
    architecture: &'static Architecture,
}

impl ConfigReader<'_> {
    fn full_key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture.name)
    }

    fn count(&self, name: &str) -> Result<Option<u64>, GgufError> {
        self.file.count(&self.full_key(name))
    }

    /// A required size.
    fn size(&self, name: &str) -> Result<u64, GgufError> {
        let key = self.full_key(name);
        match self.file.required(&key, self.file.count(&key)?)? {
            0 => Err(self.file.error(format!("`{key}`: 0; expected 1 or more"))),
            // Limits sizes so that their products fit into 64 bits.
            size if size > u64::from(u32::MAX) => {
                Err(self.file.error(format!("`{key}`: {size} is more than any model has")))
            }
            size => Ok(size),
        }
    }

    fn config(&self) -> Result<(Map<String, Json>, Heads), GgufError> {
        for absent in ["expert_count", "attention.sliding_window"] {
            if let Some(found) = self.count(absent)?.filter(|&found| found > 0) {
                let problem = format!("`{}`: {found}; such models are not read", self.full_key(absent));
                return Err(self.file.error(problem));
            }
        }
        let (width, layers, query) =
            (self.size("embedding_length")?, self.size("block_count")?, self.size("attention.head_count")?);
        if layers > self.file.tensors().len() as u64 {
            let problem = format!(
                "`{}`: {layers} layers in {} tensors",
                self.full_key("block_count"),
                self.file.tensors().len()
            );
            return Err(self.file.error(problem));
        }
        let key_value = match self.count("attention.head_count_kv")? {
            Some(_) => self.size("attention.head_count_kv")?,
            None => query,
        };
        let dim = match self.count("attention.key_length")? {
            Some(_) => self.size("attention.key_length")?,
            None => width / query,
        };
        for same in ["attention.value_length", "rope.dimension_count"] {
            if let Some(found) = self.count(same)?.filter(|&found| found != dim) {
                let problem = format!(
                    "`{}`: {found}, though heads are {dim} wide; such models are not read",
                    self.full_key(same)
                );
                return Err(self.file.error(problem));
            }
        }
        let eps = self.full_key("attention.layer_norm_rms_epsilon");
        let theta = self.file.float(&self.full_key("rope.freq_base"))?.unwrap_or(10_000.0);
        let embed = self.file.tensors().get("token_embd.weight");
        let vocab = embed.and_then(|embed| embed.shape.first());
        let vocab = vocab.ok_or_else(|| self.file.error("tensor `token_embd.weight` is missing"))?;
        let config = json!({
            "architectures": [self.architecture.class],
            "model_type": self.architecture.model_type,
            "hidden_size": width,
            "intermediate_size": self.size("feed_forward_length")?,
            "num_hidden_layers": layers,
            "num_attention_heads": query,
            "num_key_value_heads": key_value,
            "head_dim": dim,
            "hidden_act": "silu",
            "attention_bias": false,
            "vocab_size": vocab,
            "max_position_embeddings": self.size("context_length")?,
            "rms_norm_eps": self.file.required(&eps, self.file.float(&eps)?)?,
            "rope_theta": theta,
            "rope_scaling": self.rope_scaling(theta, dim)?,
            "tie_word_embeddings": !self.file.tensors().contains_key("output.weight"),
        });
        Ok((config.as_object().cloned().unwrap_or_default(), Heads { query, key_value }))
    }

    /// config.json's `rope_scaling`.
    fn rope_scaling(&self, theta: f64, dim: u64) -> Result<Json, GgufError> {
        let (kind, factor) = (self.full_key("rope.scaling.type"), self.full_key("rope.scaling.factor"));
        let older = self.full_key("rope.scale_linear");
        if let Some(found) = self.file.float(&older)?.filter(|&found| found != 1.0) {
            return Err(self.file.error(format!("`{older}`: {found}; expected rope.scaling in its place")));
        }
        let attention = self.full_key("rope.scaling.attn_factor");
        if let Some(found) = self.file.float(&attention)?.filter(|&found| found != 1.0) {
            return Err(self.file.error(format!("`{attention}`: {found} is not read; expected 1")));
        }
        let stretched = self.file.float(&factor)?.is_some_and(|factor| factor != 1.0);
        // A factor without a type is llama.cpp's linear scaling.
        let rope_type = self
            .file
            .text(&kind)?
            .or(stretched.then(|| "linear".into()))
            .filter(|rope_type| rope_type != "none");
        let factors = self.rope_factors()?;
        match (rope_type.as_deref(), factors) {
            (None, None) => Ok(Json::Null),
            (Some("linear"), None) => {
                let factor = self.file.required(&factor, self.file.float(&factor)?)?;
                Ok(json!({"rope_type": "linear", "factor": factor}))
            }
            (None, Some(factors)) => {
                let max_factor = factors.iter().copied().fold(1.0, f64::max);
                let planes = dim / 2;
                let like_llama3 = |(plane, found): (usize, &f64)| {
                    let frequency = theta.powf(-(plane as f64) / planes as f64);
                    (found / LLAMA3_SCALING.rope_factor(frequency, max_factor) - 1.0).abs() < FACTOR_TOLERANCE
                };
                if factors.len() as u64 != planes || !factors.iter().enumerate().all(like_llama3) {
                    let problem =
                        format!("tensor `{ROPE_FACTORS}`: factors that are not Llama 3's are not read");
                    return Err(self.file.error(problem));
                }
                Ok(json!({
                    "rope_type": "llama3", "factor": max_factor, "low_freq_factor": LLAMA3_SCALING.low_freq_factor,
                    "high_freq_factor": LLAMA3_SCALING.high_freq_factor, "original_max_position_embeddings": LLAMA3_SCALING.original,
                }))
            }
            (Some("yarn"), None) => self.yarn_settings(),
            (Some(both @ ("linear" | "yarn")), Some(_)) => {
                let problem =
                    format!("`{kind}` is {both} beside the tensor `{ROPE_FACTORS}`; expected one of them");
                Err(self.file.error(problem))
            }
            (Some(rope_type), _) => {
                let problem = format!("`{kind}`: {rope_type} is not read; expected none, linear or yarn");
                Err(self.file.error(problem))
            }
        }
    }

    /// config.json's settings of YaRN.
    fn yarn_settings(&self) -> Result<Json, GgufError> {
        let number = |name: &str| self.file.float(&self.full_key(&format!("rope.scaling.{name}")));
        let factor = self.file.required(&self.full_key("rope.scaling.factor"), number("factor")?)?;
        let original = match self.count("rope.scaling.original_context_length")? {
            Some(_) => self.size("rope.scaling.original_context_length")?,
            None => self.size("context_length")?,
        };
        // llama.cpp ignores these keys in files of these architectures, and transformers does not.
        let [(_, fast), (_, slow)] = YARN_BETAS;
        // llama.cpp itself saves -1 for a factor that is not set, and 1 for the attention's.
        let is_unset = number("yarn_ext_factor")?.is_some_and(|factor| factor < 0.0);
        let (extrapolation, attention) =
            if is_unset { (-1.0, 1.0) } else { (1.0, yarn_attention_factor(factor)) };
        for (key, expected) in [
            ("yarn_beta_fast", fast),
            ("yarn_beta_slow", slow),
            ("yarn_attn_factor", attention),
            ("yarn_ext_factor", extrapolation),
            ("yarn_log_multiplier", 0.0),
        ] {
            if let Some(found) = number(key)?.filter(|found| (found - expected).abs() > FACTOR_TOLERANCE) {
                let key = self.full_key(&format!("rope.scaling.{key}"));
                return Err(self.file.error(format!("`{key}`: {found} is not read; expected {expected}")));
            }
        }
        Ok(json!({"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}))
    }

    fn rope_factors(&self) -> Result<Option<Vec<f64>>, GgufError> {
        let Some(stored) = self.file.tensors().get(ROPE_FACTORS) else { return Ok(None) };
        if stored.kind.name != "F32" {
            let problem = format!("tensor `{ROPE_FACTORS}` is of type {}; expected F32", stored.kind.name);
            return Err(self.file.error(problem));
        }
        // There is one factor per two head dimensions. The limit bounds the memory that a damaged
        // file can request.
        if stored.shape.iter().product::<usize>() > MAX_ROPE_FACTORS {
            let problem =
                format!("tensor `{ROPE_FACTORS}` is of {:?} values; expected half a head's", stored.shape);
            return Err(self.file.error(problem));
        }
        let values = self.file.values(ROPE_FACTORS)?;
        let values = values.as_chunks::<4>().0.iter();
        Ok(Some(values.map(|&value| f64::from(f32::from_le_bytes(value))).collect()))
    }

    fn tensors(&self, heads: &Heads, layers: u64) -> Result<BTreeMap<String, StoredTensor>, GgufError> {
        let mut tensors = BTreeMap::new();
        for (stored, facts) in self.file.tensors() {
            if stored == ROPE_FACTORS {
                continue;
            }
            let name = names::to_transformers_name(stored, layers).ok_or_else(|| {
                let class = self.architecture.class;
                self.file.error(format!("tensor `{stored}` is none of a {class} as it is read; without it the model would be another"))
            })?;
            let paired = match stored.rsplit_once('.').map(|(layer, _)| layer) {
                Some(layer) if !self.architecture.interleaved_rope || !layer.starts_with("blk.") => None,
                Some(layer) if layer.ends_with(".attn_q") => Some(heads.query),
                Some(layer) if layer.ends_with(".attn_k") => Some(heads.key_value),
                _ => None,
            };
            if let Some(heads) = paired {
                let rows = facts.shape.first().copied().unwrap_or(0) as u64;
                if rows == 0 || !rows.is_multiple_of(2 * heads) {
                    let problem = format!("tensor `{stored}`: {rows} rows are no pairs of {heads} heads");
                    return Err(self.file.error(problem));
                }
            }
            let paired_heads = paired.map(|heads| heads as usize);
            tensors.insert(name, StoredTensor { stored: stored.clone(), paired_heads });
        }
        Ok(tensors)
    }
}
