//! Converts the tokenizer in GGUF metadata to tokenizer.json and tokenizer_config.json.

use std::collections::HashSet;

use serde_json::{Map, Value as Json, json};

use crate::gguf::pre_tokenizer::PreTokenizer;
use crate::gguf::tokenizer::{CONTROL, NORMAL, UNUSED, USER_DEFINED};
use crate::gguf::{GgufError, GgufFile};

/// Special tokens of transformers, their id keys in config.json, and their names in llama.cpp.
const SPECIAL_TOKENS: [(&str, &str, &str); 4] = [
    ("bos_token", "bos_token_id", "bos"),
    ("eos_token", "eos_token_id", "eos"),
    ("unk_token", "unk_token_id", "unknown"),
    ("pad_token", "pad_token_id", "padding"),
];
/// Names in the metadata of the tokens that end an answer.
const END_TOKEN_NAMES: [&str; 3] = ["eos", "eot", "eom"];
/// Tokens at which llama.cpp always ends answers, if they are special (`llama-vocab.cpp`).
const END_TOKEN_TEXTS: [&str; 9] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|eot|>",
];
const TEMPLATE_KEY: &str = "tokenizer.chat_template";

/// The tokenizer's two files and the ids of its special tokens.
pub(crate) struct Vocabulary {
    pub tokenizer: Json,
    pub config: Json,
    /// Size of the vocabulary, including padding.
    pub size: usize,
    /// Ids that end an answer.
    pub ends: Vec<u64>,
    /// Ids of the other special tokens, by their keys in config.json.
    pub special: Vec<(&'static str, u64)>,
}

impl Vocabulary {
    /// Reads the metadata of `file`.
    pub fn read(file: &GgufFile) -> Result<Self, GgufError> {
        let model = file.text("tokenizer.ggml.model")?;
        if model.as_deref() != Some("gpt2") {
            let found = model.as_deref().unwrap_or("missing");
            let problem = format!("`tokenizer.ggml.model`: {found}; byte-level BPE (gpt2) is what is read");
            return Err(file.error(problem));
        }
        let pre_tokenizer = read_pre_tokenizer(file)?;
        let tokens = file.texts("tokenizer.ggml.tokens")?;
        let tokens = file.required("tokenizer.ggml.tokens", tokens)?;
        let kinds = file.integers("tokenizer.ggml.token_type")?;
        let kinds = kinds.unwrap_or_else(|| vec![NORMAL.into(); tokens.len()]);
        if kinds.len() != tokens.len() {
            let problem = format!("`tokenizer.ggml.token_type`: {} for {} tokens", kinds.len(), tokens.len());
            return Err(file.error(problem));
        }
        let (mut vocabulary, mut added, mut seen) = (Map::new(), vec![], HashSet::new());
        for (id, (token, kind)) in tokens.iter().zip(&kinds).enumerate() {
            if *kind == i64::from(UNUSED) {
                continue;
            }
            if !seen.insert(*token) {
                return Err(
                    file.error(format!("`tokenizer.ggml.tokens`: {token:?} is there twice, again at {id}"))
                );
            }
            let (special, by_user) = (*kind == i64::from(CONTROL), *kind == i64::from(USER_DEFINED));
            vocabulary.insert(token.to_string(), json!(id));
            if (special || by_user) && !token.is_empty() {
                added.push(json!({
                    "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": special,
                }));
            }
        }
        let merges = file.texts("tokenizer.ggml.merges")?;
        let merges = file.required("tokenizer.ggml.merges", merges)?;
        let pair = |merge: &&str| {
            let (left, right) = merge.split_once(' ').unwrap_or((merge, ""));
            let known = [left, right, &format!("{left}{right}")].iter().all(|part| seen.contains(part));
            let problem = || format!("`tokenizer.ggml.merges`: {merge:?} merges no two tokens to a third");
            if known { Ok(json!([left, right])) } else { Err(file.error(problem())) }
        };
        let merges: Vec<Json> = merges.iter().map(pair).collect::<Result<_, _>>()?;
        let tokenizer = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": pre_tokenizer.normalizer_json(),
            "pre_tokenizer": pre_tokenizer.to_json(),
            "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": pre_tokenizer.ignores_merges(), "vocab": vocabulary, "merges": merges,
            },
        });
        let id = |what: &str| {
            let key = format!("tokenizer.ggml.{what}_token_id");
            match file.count(&key)? {
                Some(id) if id >= tokens.len() as u64 => {
                    Err(file.error(format!("`{key}`: {id} of a vocabulary of {}", tokens.len())))
                }
                id => Ok(id),
            }
        };
        let mut config = Map::new();
        config.insert("tokenizer_class".into(), json!("PreTrainedTokenizerFast"));
        config.insert("clean_up_tokenization_spaces".into(), json!(false));
        let mut special = vec![];
        for (name, key, what) in SPECIAL_TOKENS {
            if let Some(id) = id(what)? {
                config.insert(name.into(), json!(tokens[id as usize]));
                special.extend((what != "eos").then_some((key, id)));
            }
        }
        config.insert("chat_template".into(), read_chat_templates(file)?);
        let mut ends = vec![];
        for what in END_TOKEN_NAMES {
            let end = id(what)?.filter(|id| !ends.contains(id));
            ends.extend(end);
        }
        let by_text = tokens
            .iter()
            .zip(&kinds)
            .enumerate()
            .filter(|(_, (token, kind))| **kind == i64::from(CONTROL) && END_TOKEN_TEXTS.contains(token));
        for (id, _) in by_text {
            let end = Some(id as u64).filter(|id| !ends.contains(id));
            ends.extend(end);
        }
        Ok(Self { tokenizer, config: Json::Object(config), size: tokens.len(), ends, special })
    }
}

fn read_pre_tokenizer(file: &GgufFile) -> Result<&'static PreTokenizer, GgufError> {
    let key = "tokenizer.ggml.pre";
    let name = file.text(key)?;
    let known = || PreTokenizer::known_names().join(", ");
    let name = name.ok_or_else(|| {
        file.error(format!("`{key}` is missing, so how texts are split is unknown; convert the model again with a newer llama.cpp"))
    })?;
    PreTokenizer::from_llama_cpp_name(&name).ok_or_else(|| {
        file.error(format!("`{key}`: {name} is not a split of texts that is read (known: {})", known()))
    })
}

/// The chat template, or a list of all templates if there are several.
fn read_chat_templates(file: &GgufFile) -> Result<Json, GgufError> {
    let template = file.text(TEMPLATE_KEY)?;
    let names = file.texts(&format!("{TEMPLATE_KEY}s"))?.unwrap_or_default();
    let mut named = vec![];
    for name in names.into_iter().filter(|&name| name != "default") {
        let text = file.text(&format!("{TEMPLATE_KEY}.{name}"))?;
        named.extend(text.map(|text| json!({"name": name, "template": text})));
    }
    if named.is_empty() {
        return Ok(json!(template));
    }
    named.extend(template.map(|text| json!({"name": "default", "template": text})));
    Ok(Json::Array(named))
}
