//! What makes two targets the same, and the tokens that end their answers.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use deepspec_core::atomic::{self, FileError};
use deepspec_core::digest::Hasher;
use serde_json::{Map, Value};

use crate::ModelError;
use crate::config::read_json;

/// Files up to this many bytes are read whole.
const WHOLE: u64 = 64 << 20;
/// Bytes read at each probe of a larger file.
const PROBE: u64 = 64 << 10;
/// Probes per larger file, the first at its start and the last at its end.
const PROBES: u64 = 16;

/// A digest of the target's architecture: config.json without the keys that do not change its states.
///
/// # Errors
/// If config.json is missing or no JSON.
pub fn config_digest(dir: &Path) -> Result<String, ModelError> {
    let (_, mut config) = read_json(dir)?;
    let immaterial = ["transformers_version", "torch_dtype", "dtype", "use_cache", "_name_or_path"];
    for key in immaterial {
        config.remove(key);
    }
    if let Some(Value::Object(text)) = config.get_mut("text_config") {
        text.retain(|key, _| !immaterial.contains(&key.as_str()));
    }
    let sorted: std::collections::BTreeMap<String, Value> = config.into_iter().collect();
    let mut hasher = Hasher::default();
    for (key, value) in sorted {
        hasher.part(key.as_bytes()).part(value.to_string().as_bytes());
    }
    Ok(hasher.hex())
}

/// A digest of the weights that is quick for any size: per file its name, length, and all of its bytes, or, past
/// 64 MiB, its two ends and probes spread evenly between them. Fine-tunes of one model differ in it; of a large file a single
/// changed byte need not.
///
/// # Errors
/// If the folder cannot be read or holds no weights.
pub fn weights_digest(dir: &Path) -> Result<String, ModelError> {
    let all: Vec<_> = fs::read_dir(dir)
        .map_err(FileError::at("reading", dir))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .collect();
    let of = |kind: &str| -> Vec<_> {
        all.iter().filter(|path| path.extension().is_some_and(|found| found == kind)).collect()
    };
    // A GGUF beside safetensors is not what is read.
    let mut paths = of("safetensors");
    if paths.is_empty() {
        paths = of("gguf");
    }
    paths.sort();
    if paths.is_empty() {
        return Err(ModelError::NotAModel {
            path: dir.to_path_buf(),
            problem: "the folder has no safetensors files and no GGUF".into(),
        });
    }
    let mut hasher = Hasher::default();
    for path in paths {
        let probe = || -> std::io::Result<Vec<u8>> {
            let file = File::open(path)?;
            let len = file.metadata()?.len();
            let mut bytes = len.to_le_bytes().to_vec();
            let (size, probes) = if len <= WHOLE { (len, 1) } else { (PROBE, PROBES) };
            let mut buffer = vec![0; size as usize];
            for i in 0..probes {
                file.read_exact_at(&mut buffer, (len - size) * i / (probes - 1).max(1))?;
                bytes.extend_from_slice(&buffer);
            }
            Ok(bytes)
        };
        let bytes = probe().map_err(FileError::at("reading", path))?;
        hasher.part(path.file_name().unwrap_or_default().as_encoded_bytes()).part(&bytes);
    }
    Ok(hasher.hex())
}

/// The ids that end an answer: `eos_token_id` of generation_config.json, else of config.json or of its text part, else the
/// tokenizer's.
///
/// # Errors
/// If a file is broken or nothing names a stop token.
pub fn stop_ids(dir: &Path, tokenizer_eos: Option<i64>) -> Result<Vec<i64>, ModelError> {
    let path = dir.join("generation_config.json");
    let generation: Map<String, Value> = if path.is_file() {
        serde_json::from_str(&atomic::read_text(&path)?).map_err(|error| ModelError::NotAModel {
            path: path.clone(),
            problem: format!("not a JSON object: {error}"),
        })?
    } else {
        Map::new()
    };
    let (_, config) = read_json(dir)?;
    let text = config.get("text_config").and_then(Value::as_object);
    let maps = [Some(&generation), Some(&config), text];
    let named = maps.into_iter().flatten().find_map(|map| match map.get("eos_token_id") {
        Some(Value::Array(ids)) => {
            Some(ids.iter().filter_map(Value::as_i64).collect::<Vec<_>>()).filter(|ids| !ids.is_empty())
        }
        Some(id) => id.as_i64().map(|id| vec![id]),
        None => None,
    });
    named.or_else(|| tokenizer_eos.map(|id| vec![id])).ok_or_else(|| ModelError::NotAModel {
        path: dir.to_path_buf(),
        problem:
            "no eos_token_id in generation_config.json, config.json or the tokenizer; answers would never end"
                .into(),
    })
}
