//! A checkpoint folder for a GGUF model: newly written JSON files and a link to the weights.

use std::collections::hash_map::RandomState;
use std::fs;
use std::hash::{BuildHasher, Hasher as _};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use deepspec_core::atomic;
use deepspec_core::digest::Hasher;
use serde_json::{Value as Json, json};

use crate::gguf::{GgufError, Model};

/// File name of the link to the GGUF, in the unpacked folder.
pub const GGUF_LINK: &str = "model.gguf";
/// Version of the unpacked files. It is part of the folder's name, so that a new version unpacks
/// again.
const UNPACK_VERSION: &[u8] = b"2";

/// Unpacks the GGUF file `path` into a model folder under `cache`, or returns the existing one. A
/// changed file gets a new folder. The folder has config.json, generation_config.json,
/// tokenizer.json, tokenizer_config.json and [`GGUF_LINK`].
///
/// # Errors
/// Fails if the file is no supported model, or if the folder cannot be written.
pub fn unpack(path: &Path, cache: &Path) -> Result<PathBuf, GgufError> {
    let io = |error: std::io::Error| GgufError { path: path.into(), problem: format!("reading it: {error}") };
    let place = fs::canonicalize(path).map_err(io)?;
    let facts = fs::metadata(&place).map_err(io)?;
    let changed = facts.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let mut hasher = Hasher::default();
    hasher.update_part(UNPACK_VERSION).update_part(place.as_os_str().as_encoded_bytes());
    hasher.update_part(&facts.len().to_le_bytes()).update_part(format!("{changed:?}").as_bytes());
    let name = place.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let digest = hasher.hex_digest();
    let dir = cache.join("gguf").join(format!("{name}-{}", &digest[..16]));
    if dir.join(GGUF_LINK).exists() {
        return Ok(dir);
    }
    let model = Model::open(path)?;
    // The rename is atomic, because other processes may create the same folder.
    let unwritable =
        |error: std::io::Error| GgufError { path: dir.clone(), problem: format!("creating it: {error}") };
    let parent = cache.join("gguf");
    fs::create_dir_all(&parent).map_err(unwritable)?;
    let unique = RandomState::new().build_hasher().finish();
    let partial = parent.join(format!(".{name}-{unique:016x}"));
    let written = write_folder(&model, &place, &partial).and_then(|()| match fs::rename(&partial, &dir) {
        Err(_) if dir.join(GGUF_LINK).exists() => Ok(()),
        renamed => renamed.map_err(unwritable),
    });
    let _ = fs::remove_dir_all(&partial);
    written.map(|()| dir)
}

fn write_folder(model: &Model, place: &Path, dir: &Path) -> Result<(), GgufError> {
    let vocabulary = model.vocabulary()?;
    let mut config = model.config().clone();
    let embedded = config["vocab_size"].as_u64().unwrap_or(0);
    if vocabulary.size as u64 > embedded {
        let problem = format!("{} tokens, but an embedding of {embedded}", vocabulary.size);
        return Err(GgufError { path: place.into(), problem });
    }
    config.insert("eos_token_id".into(), json!(vocabulary.ends));
    config.extend(vocabulary.special.iter().map(|(name, id)| (name.to_string(), json!(id))));
    let generation = json!({"eos_token_id": vocabulary.ends});
    let unwritable = |problem: String| GgufError { path: dir.into(), problem };
    fs::create_dir_all(dir).map_err(|error| unwritable(format!("creating it: {error}")))?;
    for (name, json) in [
        ("config.json", &Json::Object(config)),
        ("generation_config.json", &generation),
        ("tokenizer.json", &vocabulary.tokenizer),
        ("tokenizer_config.json", &vocabulary.config),
    ] {
        atomic::write_json(&dir.join(name), json).map_err(|error| unwritable(error.to_string()))?;
    }
    let unlinked = |error| unwritable(format!("linking {GGUF_LINK} to {}: {error}", place.display()));
    symlink(place, dir.join(GGUF_LINK)).map_err(unlinked)
}
