//! The target's checkpoint, mainly its embedding and LM head, which drafter checkpoints may copy.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::fields::{Fields, read_object};
use crate::{CheckpointError, Drafter, TensorMetadata, Tensors};

/// Roles of special tokens and the config keys of their ids.
const SPECIAL_TOKENS: [(&str, &str); 3] =
    [("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")];

/// A target's folder.
pub struct Target {
    name: String,
    dir: PathBuf,
    config: PathBuf,
    architectures: Vec<String>,
    hidden_size: u64,
    vocab_size: u64,
    layers: u64,
    is_tied: bool,
    tensors: Tensors,
    special_ids: Vec<(&'static str, u32)>,
    embed: &'static str,
    head: &'static str,
}

impl Target {
    /// Opens the model in `dir`; `name` is its name in checkpoints, a hub id if possible.
    ///
    /// # Errors
    /// Fails if the folder is no language model, or if a key is missing or wrong.
    pub fn open(dir: &Path, name: &str) -> Result<Self, CheckpointError> {
        let path = dir.join("config.json");
        let map: Map<String, Value> = read_object(&path)?;
        let outer = Fields::new(&path, &map);
        let architectures = outer.texts("architectures")?.unwrap_or_default();
        let architectures = architectures.into_iter().map(Into::into).collect();
        let text = outer.object("text_config")?;
        let is_tied = match &text {
            Some(text) => text.flag("tie_word_embeddings")?.or(outer.flag("tie_word_embeddings")?),
            None => outer.flag("tie_word_embeddings")?,
        };
        let special_ids = SPECIAL_TOKENS
            .iter()
            .filter_map(|&(name, key)| {
                let said = text
                    .as_ref()
                    .and_then(|text| text.map.get(key))
                    .filter(|id| !id.is_null())
                    .or(map.get(key))?;
                // Takes the first of several end tokens.
                let id = said.as_array().map_or(Some(said), |ids| ids.first())?.as_u64()?;
                Some((name, u32::try_from(id).ok()?))
            })
            .collect();
        let text = text.unwrap_or(outer);
        let tensors = Tensors::open_target_present(dir)?;
        let known = [
            ("model.embed_tokens.weight", "lm_head.weight"),
            ("model.language_model.embed_tokens.weight", "lm_head.weight"),
            ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"),
            // Saved without the causal LM class around the model.
            ("embed_tokens.weight", "lm_head.weight"),
            // DeepSeek-V4.
            ("embed.weight", "head.weight"),
        ];
        let (usual, _) = known[0];
        let found = known.into_iter().find(|(embed, _)| tensors.get(embed).is_some());
        if found.is_none() {
            tensors.check_readable(usual)?;
        }
        let (embed, head) =
            found.ok_or_else(|| tensors.error(usual, "missing; is this a language model with a head?"))?;
        Ok(Self {
            name: name.into(),
            dir: dir.to_path_buf(),
            architectures,
            hidden_size: text.required_size("hidden_size")?,
            vocab_size: text.required_size("vocab_size")?,
            layers: text.required_size("num_hidden_layers")?,
            is_tied: is_tied.unwrap_or(false),
            tensors,
            special_ids,
            embed,
            head,
            config: path.clone(),
        })
    }

    /// Name of the target in checkpoints.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Class names in the target's config.
    pub fn architectures(&self) -> &[String] {
        &self.architectures
    }

    /// Number of decoder layers.
    pub fn layers(&self) -> u64 {
        self.layers
    }

    /// Folder of the target.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Ids of the target's special tokens, by role.
    pub(crate) fn special_ids(&self) -> &[(&'static str, u32)] {
        &self.special_ids
    }

    /// Vocabulary size.
    pub(crate) fn vocab_size(&self) -> u64 {
        self.vocab_size
    }

    /// Tensors of the target.
    pub(crate) fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// Metadata of a tensor.
    ///
    /// # Errors
    /// If it is missing, or quantised in a way that is not read.
    pub(crate) fn metadata(&self, name: &str) -> Result<&TensorMetadata, CheckpointError> {
        self.tensors.check_readable(name)?;
        self.tensors.get(name).ok_or_else(|| self.tensors.error(name, "missing in the target"))
    }

    /// Name of the target's embedding tensor.
    pub(crate) fn embed(&self) -> String {
        self.embed.into()
    }

    /// Name of the target's LM head tensor. It is the embedding's name if both are tied.
    pub(crate) fn head(&self) -> String {
        if self.is_tied { self.embed() } else { self.head.into() }
    }

    /// Checks that the drafter's sizes match this target.
    ///
    /// # Errors
    /// Fails with the key that differs.
    pub(crate) fn check_fits(&self, drafter: &Drafter) -> Result<(), CheckpointError> {
        let pairs = [
            ("vocab_size", self.vocab_size, Some(drafter.vocab_size)),
            ("hidden_size", self.hidden_size, Some(drafter.hidden_size)),
            ("num_hidden_layers", self.layers, drafter.num_target_layers),
        ];
        for (key, here, there) in pairs {
            if let Some(there) = there.filter(|&there| there != here) {
                let problem = format!("{here}, but the drafter was made for a target of {there}");
                return Err(CheckpointError::Key { path: self.config.clone(), key: key.into(), problem });
            }
        }
        Ok(())
    }
}
