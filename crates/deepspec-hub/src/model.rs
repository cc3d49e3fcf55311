//! Finds and downloads the files that loading a model needs.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use deepspec_checkpoint::is_layer_tensor;
use deepspec_core::atomic;
use deepspec_core::cli::Verbosity;
use deepspec_core::env;
use serde_json::Value;

use crate::{Hub, HubError, Repo, RepoType};

const CONFIG_FILE: &str = "config.json";
pub(crate) const SINGLE_WEIGHTS_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Which files of a model are downloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelFiles {
    /// All files that loading it needs.
    Whole,
    /// Configuration and tokenizer, and the tensors outside the layers: embedding, final norm and LM
    /// head. They come by byte ranges where the server allows, else with their shards.
    WithoutLayers,
    /// Configuration and tokenizer.
    Config,
}

impl Hub {
    /// The snapshot folder of a model: its configuration, tokenizer, chat template and safetensors
    /// weights.
    ///
    /// # Errors
    /// Fails as [`Hub::fetch`] does, or if the repository has no model of that form.
    pub fn model(&self, repo: &Repo) -> Result<PathBuf, HubError> {
        self.model_files(repo, ModelFiles::Whole)
    }

    /// The snapshot folder of a model, with at least the `wanted` files.
    ///
    /// # Errors
    /// As [`Hub::model`].
    pub fn model_files(&self, repo: &Repo, wanted: ModelFiles) -> Result<PathBuf, HubError> {
        let listing = self.listing(repo)?;
        let has = |file: &str| listing.files.iter().any(|known| known == file);
        let missing = |problem: &str| match &listing.local {
            Some(reason) => self.not_cached_error(&format!("{repo} ({problem})"), reason),
            None => HubError::NoModel {
                repo: repo.clone(),
                problem: problem.into(),
                files: listing.files.clone(),
            },
        };
        if !has(CONFIG_FILE) {
            return Err(missing("it has no config.json"));
        }
        // Downloads small files first: errors in them show before gigabytes have arrived.
        let small: Vec<&String> =
            listing.known_files().iter().filter(|file| is_small_model_file(file)).collect();
        for file in &small {
            self.fetch(repo, file)?;
        }
        if wanted == ModelFiles::Config {
            return Ok(self.snapshot_dir(repo, &listing.commit));
        }
        let without_layers = wanted == ModelFiles::WithoutLayers;
        let snapshot = self.snapshot_dir(repo, &listing.commit);
        if without_layers
            && !has_weights(&snapshot, wanted)
            && let Some(dir) = self.outer_tensors_dir(repo, &listing.commit).filter(|dir| dir.exists())
        {
            return Ok(dir);
        }
        let weights = if has(INDEX_FILE) {
            let index = self.fetch(repo, INDEX_FILE)?;
            let shards = read_shard_names(&index, wanted)
                .ok_or_else(|| missing("its safetensors index names no files"))?;
            let absent: Vec<String> = shards.iter().filter(|file| !has(file)).cloned().collect();
            if !absent.is_empty() {
                let total = shards.len();
                return Err(HubError::Incomplete { repo: repo.clone(), missing: absent, total });
            }
            shards
        } else if has(SINGLE_WEIGHTS_FILE) {
            vec![SINGLE_WEIGHTS_FILE.to_string()]
        } else {
            return Err(missing("it has no model.safetensors and no index of several"));
        };
        if without_layers
            && listing.local.is_none()
            && let Some(dir) = self.fetch_outer_tensors(repo, &listing, &weights, &small)?
        {
            return Ok(dir);
        }
        for file in &weights {
            self.fetch(repo, file)?;
        }
        Ok(snapshot)
    }
}

/// The folder of a model. A local folder is used as it is, and a local GGUF file is unpacked into
/// the cache. A hub id (`owner/name` or `owner/name@revision`) is downloaded.
///
/// # Errors
/// Fails as [`Hub::model`] does, or if `model` is none of these. Also fails if a local path is
/// given a revision, or a file is not a supported GGUF.
pub fn model_dir(model: &str, revision: Option<&str>, verbosity: Verbosity) -> Result<PathBuf, HubError> {
    model_files(model, revision, ModelFiles::Whole, verbosity)
}

/// The folder of a model, as [`model_dir`] finds it. Of a hub id, only the `wanted` files are
/// downloaded.
///
/// # Errors
/// As [`model_dir`].
pub fn model_files(
    model: &str,
    revision: Option<&str>,
    wanted: ModelFiles,
    verbosity: Verbosity,
) -> Result<PathBuf, HubError> {
    let place = env::expand_home(model);
    if place.is_dir() || place.is_file() {
        return match revision {
            Some(revision) => {
                Err(HubError::RevisionOfFolder { path: model.into(), revision: revision.into() })
            }
            None if place.is_file() => {
                let cache = env::cache_dir().ok_or(HubError::NowhereToUnpack)?;
                Ok(deepspec_checkpoint::gguf::unpack(&place, &cache)?)
            }
            None => Ok(place),
        };
    }
    let repo = Repo::parse(RepoType::Model, model, revision)?;
    Hub::from_env(verbosity)?.model_files(&repo, wanted).map_err(|error| error.with_path_hint(model))
}

/// Whether a file is a configuration, tokenizer or chat template that loading needs.
fn is_small_model_file(file: &str) -> bool {
    let known = [
        CONFIG_FILE,
        "generation_config.json",
        "quantize_config.json",
        "quant_config.json",
        "hf_quant_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.json",
        "chat_template.jinja",
        "preprocessor_config.json",
        "video_preprocessor_config.json",
        "processor_config.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "spiece.model",
    ];
    let is_tokenizer = file.starts_with("tokenizer") && (file.ends_with(".json") || file.ends_with(".model"));
    known.contains(&file)
        || (is_tokenizer && !file.contains('/'))
        || (file.starts_with("additional_chat_templates/") && file.ends_with(".jinja"))
}

/// Whether a snapshot has the wanted weights.
fn has_weights(snapshot: &Path, wanted: ModelFiles) -> bool {
    match read_shard_names(&snapshot.join(INDEX_FILE), wanted) {
        Some(shards) => shards.iter().all(|shard| snapshot.join(shard).exists()),
        None => snapshot.join(SINGLE_WEIGHTS_FILE).exists(),
    }
}

/// The shards of a safetensors index that hold wanted tensors, without duplicates, sorted.
fn read_shard_names(index: &Path, wanted: ModelFiles) -> Option<Vec<String>> {
    let index: Value = serde_json::from_str(&atomic::read_text(index).ok()?).ok()?;
    let tensors = index.get("weight_map")?.as_object()?.iter();
    let tensors = tensors.filter(|(name, _)| wanted == ModelFiles::Whole || !is_layer_tensor(name));
    let names: Option<BTreeSet<String>> = tensors.map(|(_, file)| file.as_str().map(Into::into)).collect();
    names.filter(|names| !names.is_empty()).map(|names| names.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_state_a_quantisation_are_downloaded() {
        for file in ["quantize_config.json", "quant_config.json", "hf_quant_config.json"] {
            assert!(is_small_model_file(file), "{file}");
        }
        assert!(!is_small_model_file("training_args.json"));
    }

    #[test]
    fn shards_of_layers_alone_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let index = dir.path().join(INDEX_FILE);
        let map = serde_json::json!({"weight_map": {
            "model.embed_tokens.weight": "a", "model.layers.0.mlp.up_proj.weight": "a",
            "model.layers.1.mlp.up_proj.weight": "b", "model.norm.weight": "c", "lm_head.weight": "c",
        }});
        std::fs::write(&index, map.to_string()).unwrap();
        assert_eq!(read_shard_names(&index, ModelFiles::Whole).unwrap(), ["a", "b", "c"]);
        assert_eq!(read_shard_names(&index, ModelFiles::WithoutLayers).unwrap(), ["a", "c"]);
    }
}
