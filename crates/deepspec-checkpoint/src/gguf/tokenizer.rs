//! Converts a byte-level BPE tokenizer.json to GGUF metadata.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use serde_json::Value as Json;

use crate::gguf::pre_tokenizer::PreTokenizer;
use crate::gguf::{GgufError, Value};

/// Token types of GGUF.
pub(crate) const NORMAL: i32 = 1;
pub(crate) const CONTROL: i32 = 3;
pub(crate) const USER_DEFINED: i32 = 4;
pub(crate) const UNUSED: i32 = 5;

/// A byte-level BPE tokenizer.
pub struct Tokenizer {
    pre_tokenizer: Option<&'static PreTokenizer>,
    tokens: Vec<String>,
    kinds: Vec<i32>,
    merges: Vec<String>,
}

impl Tokenizer {
    /// Reads the tokenizer.json in `dir` of a model with a vocabulary of `vocab_size` tokens.
    ///
    /// # Errors
    /// Fails if the file cannot be read, is no byte-level BPE tokenizer, or has an id past the
    /// vocabulary.
    pub fn read(dir: &Path, vocab_size: usize) -> Result<Self, GgufError> {
        let path = dir.join("tokenizer.json");
        let bad = |problem: String| GgufError { path: path.clone(), problem };
        let text = fs::read_to_string(&path).map_err(|error| bad(format!("reading it: {error}")))?;
        let json: Json =
            serde_json::from_str(&text).map_err(|error| bad(format!("not valid JSON: {error}")))?;
        let model = &json["model"];
        if model["type"].as_str().unwrap_or("BPE") != "BPE" {
            return Err(bad(format!(
                "a tokenizer of type {}; a GGUF is written of byte-level BPE only",
                model["type"]
            )));
        }
        let (Some(vocab), Some(merges)) = (model["vocab"].as_object(), model["merges"].as_array()) else {
            return Err(bad("`model` has no vocab and merges".into()));
        };
        if ![&json["pre_tokenizer"], &json["decoder"]]
            .iter()
            .any(|step| step.to_string().contains("\"ByteLevel\""))
        {
            return Err(bad("it has no byte-level step; a GGUF is written of byte-level BPE only".into()));
        }
        let mut tokens: Vec<String> = (0..vocab_size).map(|id| format!("[PAD{id}]")).collect();
        let mut kinds = vec![UNUSED; vocab_size];
        let mut set = |id: &Json, token: &str, kind: i32| {
            let place = id.as_u64().and_then(|id| usize::try_from(id).ok()).filter(|&id| id < vocab_size);
            let place =
                place.ok_or_else(|| bad(format!("{token:?} has id {id} of a vocabulary of {vocab_size}")))?;
            (tokens[place], kinds[place]) = (token.to_string(), kind);
            Ok(())
        };
        for (token, id) in vocab {
            set(id, token, NORMAL)?;
        }
        for token in json["added_tokens"].as_array().into_iter().flatten() {
            let content =
                token["content"].as_str().ok_or_else(|| bad("an added token has no content".into()))?;
            let control = token["special"].as_bool().unwrap_or(false) || is_template_marker(content);
            set(&token["id"], content, if control { CONTROL } else { USER_DEFINED })?;
        }
        let mut seen = HashSet::new();
        if let Some(twice) = tokens.iter().find(|token| !seen.insert(token.as_str())) {
            return Err(bad(format!("{twice:?} stands for two ids, which llama.cpp does not take")));
        }
        let merge = |merge: &Json| match merge {
            Json::String(pair) => Some(pair.clone()),
            Json::Array(pair) => Some(format!("{} {}", pair.first()?.as_str()?, pair.get(1)?.as_str()?)),
            _ => None,
        };
        let merges = merges.iter().map(merge).collect::<Option<_>>();
        let merges = merges.ok_or_else(|| bad("a merge is no pair of tokens".into()))?;
        Ok(Self { pre_tokenizer: PreTokenizer::from_json(&json["pre_tokenizer"]), tokens, kinds, merges })
    }

    /// Whether llama.cpp has a name for this tokenizer's pre-tokenizer. A GGUF of a drafter does
    /// not need it, because a drafter receives tokens.
    pub fn has_known_pre_tokenizer(&self) -> bool {
        self.pre_tokenizer.is_some()
    }

    /// The text of the ordinary token `id`; None if it is an added or unused token.
    pub fn normal_token(&self, id: usize) -> Option<&str> {
        (*self.kinds.get(id)? == NORMAL).then(|| self.tokens[id].as_str())
    }

    /// Converts the tokenizer to GGUF metadata entries.
    pub fn into_entries(self) -> Vec<(String, Value)> {
        let entries = [
            ("model", Value::Text("gpt2".into())),
            ("pre", Value::Text(self.pre_tokenizer.map_or("default", PreTokenizer::name).into())),
            ("tokens", Value::Texts(self.tokens)),
            ("token_type", Value::Integers(self.kinds)),
            ("merges", Value::Texts(self.merges)),
        ];
        entries.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect()
    }
}

/// Whether an added token looks like a template marker such as `<|im_start|>`, even if it is not
/// declared special.
fn is_template_marker(token: &str) -> bool {
    token.starts_with("<|") && token.ends_with("|>")
}
