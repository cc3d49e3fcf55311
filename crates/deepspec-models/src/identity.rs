//! Digests of targets, and the tokens that end their answers.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use deepspec_checkpoint::{Tensors, is_layer_tensor, no_weights_message};
use deepspec_core::atomic::{self, FileError};
use deepspec_core::digest::{self, Hasher};
use deepspec_core::env;
use serde_json::{Map, Value};

use crate::ModelError;
use crate::config::read_json;

/// Files up to this many bytes are hashed each time; digests of larger files are cached.
const MAX_UNCACHED_BYTES: u64 = 64 << 20;
/// Bytes per probe of a large file in versions before 0.2, and the number of probes.
const PROBE_BYTES: u64 = 64 << 10;
const PROBE_COUNT: u64 = 16;

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
        hasher.update_part(key.as_bytes()).update_part(value.to_string().as_bytes());
    }
    Ok(hasher.hex_digest())
}

/// A digest of all bytes of the weights, with the names of their files. Digests of large files are kept in the cache folder by path,
/// size and modification time.
///
/// # Errors
/// If the folder cannot be read or holds no weights.
pub fn weights_digest(dir: &Path) -> Result<String, ModelError> {
    digest_weight_files(dir, |path, len| {
        if len <= MAX_UNCACHED_BYTES {
            let mut bytes = len.to_le_bytes().to_vec();
            bytes.extend(fs::read(path).map_err(FileError::at("reading", path))?);
            return Ok(bytes);
        }
        Ok([&len.to_le_bytes()[..], cached_file_digest(path)?.as_bytes()].concat())
    })
}

/// A digest of the tensors outside the layers: embedding, final norm and LM head. It identifies a
/// target whose layers run elsewhere and may be missing here.
///
/// # Errors
/// If the folder has no weights, or they cannot be read.
pub fn outer_tensors_digest(dir: &Path) -> Result<String, ModelError> {
    let tensors = Tensors::open_present(dir)?;
    let mut hasher = Hasher::default();
    for (name, _) in tensors.iter().filter(|(name, _)| !is_layer_tensor(name)) {
        hasher.update_part(name.as_bytes()).update_part(&tensors.bytes(name)?);
    }
    Ok(hasher.hex_digest())
}

/// The digest of the weights in versions before 0.2, which hashed only parts (probes) of large files.
/// Hidden-state caches of these versions contain it.
///
/// # Errors
/// As [`weights_digest`].
pub fn probed_weights_digest(dir: &Path) -> Result<String, ModelError> {
    digest_weight_files(dir, |path, len| {
        let probe = || -> std::io::Result<Vec<u8>> {
            let (file, mut bytes) = (File::open(path)?, len.to_le_bytes().to_vec());
            let (size, probes) =
                if len <= MAX_UNCACHED_BYTES { (len, 1) } else { (PROBE_BYTES, PROBE_COUNT) };
            let mut buffer = vec![0; size as usize];
            for i in 0..probes {
                file.read_exact_at(&mut buffer, (len - size) * i / (probes - 1).max(1))?;
                bytes.extend_from_slice(&buffer);
            }
            Ok(bytes)
        };
        probe().map_err(FileError::at("reading", path))
    })
}

/// A digest over the weight files of a folder, sorted by name. `part` returns the bytes to hash for a file of
/// the given length.
fn digest_weight_files(
    dir: &Path,
    part: impl Fn(&Path, u64) -> Result<Vec<u8>, FileError>,
) -> Result<String, ModelError> {
    let all: Vec<PathBuf> = fs::read_dir(dir)
        .map_err(FileError::at("reading", dir))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .collect();
    let of = |kind: &str| -> Vec<&PathBuf> {
        all.iter().filter(|path| path.extension().is_some_and(|found| found == kind)).collect()
    };
    // Safetensors are read before a GGUF.
    let mut paths = of("safetensors");
    if paths.is_empty() {
        paths = of("gguf");
    }
    paths.sort();
    if paths.is_empty() {
        return Err(ModelError::NotAModel {
            path: dir.to_path_buf(),
            problem: format!("{}, and no GGUF", no_weights_message(dir)),
        });
    }
    let mut hasher = Hasher::default();
    for path in paths {
        let len = fs::metadata(path).map_err(FileError::at("reading", path))?.len();
        hasher
            .update_part(path.file_name().unwrap_or_default().as_encoded_bytes())
            .update_part(&part(path, len)?);
    }
    Ok(hasher.hex_digest())
}

/// The SHA-256 of a file, from the cache folder while path, size and modification time are unchanged.
fn cached_file_digest(path: &Path) -> Result<String, FileError> {
    let known = env::cache_dir().and_then(|cache| {
        let place = fs::canonicalize(path).ok()?;
        let metadata = fs::metadata(&place).ok()?;
        let changed = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?.as_nanos();
        let key = format!("{}\n{}\n{changed}", place.display(), metadata.len());
        Some(cache.join("digests").join(format!("{:032x}", digest::fingerprint(key.as_bytes()))))
    });
    let is_digest = |text: &String| text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if let Some(digest) = known.as_ref().and_then(|file| fs::read_to_string(file).ok()).filter(is_digest) {
        return Ok(digest);
    }
    let digest = digest::sha256_of_file(path)?;
    if let Some(file) = known {
        // Without a cache folder, the file is hashed again next time.
        let folder = file.parent().map_or(Ok(()), atomic::create_dir);
        let kept = folder.and_then(|()| atomic::replace(&file, |out| out.write_all(digest.as_bytes())));
        if let Err(error) = kept {
            tracing::debug!("the digest of {} is not remembered: {error}", path.display());
        }
    }
    Ok(digest)
}

/// The ids that end an answer in vLLM: all `eos_token_id` of generation_config.json, of config.json and of its text part, and the
/// tokenizer's `eos_token`.
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
    let (config_path, config) = read_json(dir)?;
    let text = config.get("text_config").and_then(Value::as_object);
    let mut ids: Vec<i64> = vec![];
    for (file, map) in
        [(&path, Some(&generation)), (&config_path, Some(&config)), (&config_path, text)].into_iter()
    {
        let found = map.and_then(|map| map.get("eos_token_id")).filter(|id| !id.is_null());
        let listed = match found {
            Some(Value::Array(list)) => list.as_slice(),
            Some(id) => std::slice::from_ref(id),
            None => &[],
        };
        for id in listed.iter().filter(|id| !id.is_null()) {
            ids.push(id.as_i64().ok_or_else(|| ModelError::NotAModel {
                path: file.clone(),
                problem: format!("`eos_token_id` must be a token id or a list of them, found {id}"),
            })?);
        }
    }
    ids.extend(tokenizer_eos);
    ids.retain(|id| *id >= 0);
    ids.sort_unstable();
    ids.dedup();
    if ids.is_empty() {
        return Err(ModelError::NotAModel {
            path: dir.to_path_buf(),
            problem: "no eos_token_id in generation_config.json, config.json or the tokenizer; answers would never end".into(),
        });
    }
    Ok(ids)
}
