//! Sharded weights of a checkpoint: file names, sharding, and the index.

use std::ops::Range;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError};
use serde_json::{Map, Value, json};

use crate::CheckpointError;
use crate::fields::read_object;

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";
/// Maximum bytes of values in a file, the default `max_shard_size` of transformers. Only a single
/// larger tensor makes a larger file.
pub const MAX_SHARD_BYTES: usize = 5_000_000_000;

/// A file to write, with the range of its tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// File name in the checkpoint's folder.
    pub name: String,
    /// Indices of the tensors in the file.
    pub tensors: Range<usize>,
}

/// Distributes tensors of `sizes` bytes, in order, over files of at most `max_bytes` bytes. One file is
/// `model.safetensors`; several files are numbered and need an index.
pub fn split_into_shards(sizes: &[usize], max_bytes: usize) -> Vec<Shard> {
    let (mut runs, mut bytes): (Vec<Range<usize>>, usize) = (vec![], 0);
    for (place, &size) in sizes.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if bytes.saturating_add(size) <= max_bytes => {
                run.end = place + 1;
                bytes += size;
            }
            _ => {
                runs.push(place..place + 1);
                bytes = size;
            }
        }
    }
    if runs.is_empty() {
        runs.push(0..0);
    }
    let files = runs.len();
    let name = |number: usize| match files {
        1 => SINGLE_FILE.into(),
        _ => format!("model-{:05}-of-{files:05}.safetensors", number + 1),
    };
    runs.into_iter().enumerate().map(|(number, tensors)| Shard { name: name(number), tensors }).collect()
}

/// Writes the index of `shards`, given the name and size of each tensor. Writes nothing for a
/// single file.
///
/// # Errors
/// Fails on any I/O error, with the path.
pub fn write_index(dir: &Path, shards: &[Shard], tensors: &[(&str, usize)]) -> Result<(), FileError> {
    write_index_beside(dir, shards, tensors, &[])
}

/// As [`write_index`], beside tensors in `other` files of the folder: name, file and size of each. With those, a single shard has an
/// index, too.
///
/// # Errors
/// As [`write_index`].
pub fn write_index_beside(
    dir: &Path,
    shards: &[Shard],
    tensors: &[(&str, usize)],
    other: &[(&str, String, usize)],
) -> Result<(), FileError> {
    if shards.len() < 2 && other.is_empty() {
        return Ok(());
    }
    let file_of = |shard: &Shard| {
        let names = tensors[shard.tensors.clone()].iter().map(|(name, _)| name.to_string());
        let file = json!(shard.name);
        names.map(move |name| (name, file.clone())).collect::<Vec<_>>()
    };
    let mut map: Map<String, Value> = shards.iter().flat_map(file_of).collect();
    map.extend(other.iter().map(|(name, file, _)| (name.to_string(), json!(file))));
    let bytes: usize = tensors.iter().map(|(_, size)| size).chain(other.iter().map(|(.., size)| size)).sum();
    atomic::write_json(&dir.join(INDEX_FILE), &json!({"metadata": {"total_size": bytes}, "weight_map": map}))
}

/// Whether a file of this name is part of a checkpoint's weights.
pub fn is_weights_file(name: &str) -> bool {
    let numbered = || {
        let (number, files) =
            name.strip_prefix("model-")?.strip_suffix(".safetensors")?.split_once("-of-")?;
        Some([number, files].iter().all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit())))
    };
    name == SINGLE_FILE || name == INDEX_FILE || numbered().unwrap_or(false)
}

/// An error message that names unsupported weights files and the remedy.
pub fn no_weights_message(dir: &Path) -> String {
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let names: Vec<String> = names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    let is_pickle = |name: &&String| [".bin", ".pt", ".pth"].iter().any(|end| name.ends_with(end));
    if let Some(pickle) = names.iter().filter(is_pickle).min() {
        return format!(
            "the weights are in {pickle}, a pickle file, which is not read because loading one runs code; write safetensors with \
             transformers: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR, safe_serialization=True); a drafter that \
             transformers does not know: safetensors.torch.save_file(torch.load(\"{pickle}\", weights_only=True), \"model.safetensors\")"
        );
    }
    if let Some(gguf) = names.iter().filter(|name| name.ends_with(".gguf")).min() {
        return format!(
            "the folder has no safetensors; name the GGUF file itself: {}",
            dir.join(gguf).display()
        );
    }
    if names.iter().any(|name| name == "adapter_model.safetensors") {
        return "the folder holds an adapter (LoRA), not a model; merge it into its base model first".into();
    }
    if let Some(other) = names.iter().filter(|name| name.ends_with(".safetensors")).min() {
        return format!(
            "the folder has neither {SINGLE_FILE} nor {INDEX_FILE}, but {other}; rename it if it holds the model"
        );
    }
    format!("the folder has neither {SINGLE_FILE} nor {INDEX_FILE}")
}

/// Whether a tensor belongs to a numbered layer, as `model.layers.3.mlp.up_proj.weight` does.
pub fn is_layer_tensor(name: &str) -> bool {
    name.split('.').any(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The weights files in `dir`: those in the index, or the single file.
pub(crate) fn weight_paths(dir: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let (single, index) = (dir.join(SINGLE_FILE), dir.join(INDEX_FILE));
    if !index.is_file() {
        if single.is_file() {
            return Ok(vec![single]);
        }
        return Err(CheckpointError::NotADrafter {
            path: dir.to_path_buf(),
            problem: no_weights_message(dir),
        });
    }
    let bad = |problem: &str| CheckpointError::Key {
        path: index.clone(),
        key: "weight_map".into(),
        problem: problem.into(),
    };
    let json = read_object(&index)?;
    let map = json.get("weight_map").and_then(Value::as_object);
    let map =
        map.filter(|map| !map.is_empty()).ok_or_else(|| bad("expected tensor names with their files"))?;
    let mut names = map
        .values()
        .map(|name| name.as_str().ok_or_else(|| bad("expected file names")))
        .collect::<Result<Vec<_>, _>>()?;
    names.sort_unstable();
    names.dedup();
    if let Some(outside) = names.iter().find(|name| name.contains('/')) {
        return Err(bad(&format!("shard `{outside}` lies outside the folder")));
    }
    Ok(names.into_iter().map(|name| dir.join(name)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_hold_whole_tensors_and_no_more_than_they_may() {
        let names = |sizes: &[usize]| -> Vec<(String, Range<usize>)> {
            split_into_shards(sizes, 10).into_iter().map(|shard| (shard.name, shard.tensors)).collect()
        };
        assert_eq!(names(&[4, 4, 2]), [("model.safetensors".to_string(), 0..3)]);
        let shards = names(&[4, 7, 3, 25, 1]);
        assert_eq!(
            shards.iter().map(|(_, tensors)| tensors.clone()).collect::<Vec<_>>(),
            [0..1, 1..3, 3..4, 4..5]
        );
        assert_eq!(shards[3].0, "model-00004-of-00004.safetensors");
        assert!(shards.iter().all(|(name, _)| is_weights_file(name)));
        assert!(!is_weights_file("model-1-of-x.safetensors") && !is_weights_file("train_state.safetensors"));
        assert_eq!(names(&[]), [("model.safetensors".to_string(), 0..0)]);
    }
}
