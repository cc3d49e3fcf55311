//! `step_N/` folders: a drafter that other tools can load, and the training state for resuming.

mod adapter;
mod pruning;

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use deepspec_capture::cache::Encoding;
use deepspec_checkpoint::D2T;
use deepspec_core::atomic::{self, FileError};
use deepspec_core::recipe::LossNormalization;
use deepspec_core::{VERSION, config, usage};
use deepspec_drafters::Recipe;
use deepspec_drafters::{TRAIN_STATE_FILE, TrainableDrafter, is_embed_or_head};
use deepspec_models::{MAX_SHARD_BYTES, Weights, save, save_checkpoint};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::optimizer::AdamW;
use crate::reporters::METRICS_FILE;
use crate::tensorboard;

/// Layout version of the training state, raised when the layout changes.
const STATE_FORMAT_VERSION: u32 = 2;
/// Symlink to the newest checkpoint.
const LATEST_LINK: &str = "step_latest";
/// Symlink to the checkpoint with the highest accepted length on the validation suite.
const BEST_LINK: &str = "step_best";
/// Record of the best checkpoint.
const BEST_FILE: &str = "best.json";

/// Path of the optimiser's tensors. They are in a separate folder, because inference engines read
/// every safetensors file next to config.json.
const STATE_TENSORS: &str = "train_state/optimizer.safetensors";
/// Path of the frozen weights that LoRA updates. The checkpoint's weights have the updates in them.
const LORA_BASE: &str = "train_state/lora_base.safetensors";
/// Path of the optimiser's tensors in earlier versions.
const EARLIER_STATE_TENSORS: &str = "train_state.safetensors";

/// Identity of the training data, stored in checkpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataId {
    /// Digest of the samples and of the target that their hidden states come from.
    pub digest: String,
    /// The cache encoding that rounds the hidden states.
    pub rounding: Option<Encoding>,
    /// Whether the samples were generated with thinking on; None if unknown.
    pub thinking: Option<bool>,
}

/// Training state of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainState {
    /// Layout version.
    pub format: u32,
    /// Completed optimiser steps.
    pub step: usize,
    /// Consumed samples: the position in the sample order.
    pub samples: usize,
    /// Digest of the samples and of the target, which proves that a resumed run has the same data.
    pub data: String,
    /// The cache encoding that rounded the hidden states; absent if none did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounding: Option<Encoding>,
    /// Whether the samples were generated with thinking on; absent if unknown. Read by
    /// `deepspec-eval run`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thinking: Option<bool>,
    /// Version of the program that wrote it; informative.
    #[serde(default)]
    pub tool_version: String,
    /// Number of processes; informative, because any number can resume.
    pub world_size: usize,
    /// Accepted length on the validation suite, if measured at this step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tau: Option<f64>,
}

impl TrainState {
    /// The state after `step` steps of `global_batch_size` samples.
    pub fn new(step: usize, global_batch_size: usize, data: &DataId, world_size: usize) -> Self {
        let DataId { digest, rounding, thinking } = data.clone();
        let samples = step * global_batch_size;
        let tool_version = VERSION.to_string();
        Self {
            format: STATE_FORMAT_VERSION,
            step,
            samples,
            data: digest,
            rounding,
            thinking,
            tool_version,
            world_size,
            tau: None,
        }
    }
}

/// The checkpoints of one experiment.
pub struct Checkpoints {
    dir: PathBuf,
    /// Lock file, which this process keeps locked while it writes checkpoints.
    lock_file: Option<fs::File>,
}

impl Checkpoints {
    /// The checkpoints in `dir`, which is created by the first save.
    pub fn new(dir: PathBuf) -> Self {
        Self { dir, lock_file: None }
    }

    /// The experiment's folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Locks the experiment for this process until `self` is dropped.
    ///
    /// # Errors
    /// A usage error if another process holds the lock.
    pub fn lock(&mut self) -> anyhow::Result<()> {
        atomic::create_dir(&self.dir)?;
        let path = self.dir.join(".lock");
        let file = fs::File::create(&path).map_err(FileError::at("opening", &path))?;
        if !atomic::try_lock(&file, &path)? {
            usage!("{}: another training run is writing here", self.dir.display());
        }
        self.lock_file = Some(file);
        Ok(())
    }

    /// The checkpoint to resume from: the target of `step_latest`, or else the complete checkpoint
    /// with the most steps. The link may be missing, because copying files can lose links.
    ///
    /// # Errors
    /// Fails if the folder cannot be read, or if it has checkpoints but no complete one.
    /// Training must not overwrite incomplete checkpoints.
    pub fn find_latest(&self) -> anyhow::Result<Option<PathBuf>> {
        let link = self.dir.join(LATEST_LINK);
        let pointed = fs::read_link(&link).ok().map(|target| self.dir.join(target));
        if let Some(path) = pointed.as_ref().filter(|path| is_complete(path)) {
            return Ok(Some(path.clone()));
        }
        let steps = self.saved_steps()?;
        let newest = steps
            .iter()
            .rev()
            .map(|step| self.dir.join(format!("step_{step}")))
            .find(|path| is_complete(path));
        let what = match (&pointed, link.symlink_metadata()) {
            (Some(path), _) => format!("points at {}, which is no whole checkpoint", path.display()),
            (None, Ok(_)) => "is no link".into(),
            (None, Err(_)) => "is missing".into(),
        };
        if let Some(path) = newest {
            tracing::warn!("{} {what}; the newest whole checkpoint is {}", link.display(), path.display());
            return Ok(Some(path));
        }
        // A copy that followed links has a folder in place of the link, and possibly no other
        // checkpoint.
        if pointed.is_none() && is_complete(&link) {
            return Ok(Some(link));
        }
        if steps.is_empty() && link.symlink_metadata().is_err() {
            return Ok(None);
        }
        bail!(
            "{} {what}, and none of the checkpoints in {} is whole (config.json, weights, {TRAIN_STATE_FILE} and its tensors); restore one, or start \
             anew with --overwrite",
            link.display(),
            self.dir.display()
        )
    }

    /// The steps of the folders `step_N`, ascending.
    pub(self) fn saved_steps(&self) -> anyhow::Result<Vec<usize>> {
        if !self.dir.is_dir() {
            return Ok(vec![]);
        }
        let entries = fs::read_dir(&self.dir).map_err(FileError::at("reading", &self.dir))?;
        let mut steps = vec![];
        for entry in entries {
            let name = entry.map_err(FileError::at("reading", &self.dir))?.file_name();
            steps.extend(name.to_str().and_then(|name| name.strip_prefix("step_")?.parse::<usize>().ok()));
        }
        steps.sort_unstable();
        Ok(steps)
    }

    /// Removes all checkpoints and logs of the experiment, and nothing else.
    ///
    /// # Errors
    /// Fails if something cannot be removed.
    pub fn clear(&self) -> anyhow::Result<()> {
        for name in [LATEST_LINK, BEST_LINK, BEST_FILE] {
            let path = self.dir.join(name);
            if let Ok(found) = path.symlink_metadata() {
                let removed = if found.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
                removed.map_err(FileError::at("removing", &path))?;
            }
        }
        let Ok(entries) = fs::read_dir(&self.dir) else { return Ok(()) };
        for entry in entries {
            let path = entry.map_err(FileError::at("reading", &self.dir))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let step = name.strip_prefix("step_").map(|rest| rest.trim_end_matches(".partial"));
            if name == METRICS_FILE || name.starts_with(tensorboard::EVENT_FILE_PREFIX) {
                fs::remove_file(&path).map_err(FileError::at("removing", &path))?;
            } else if step.is_some_and(|step| step.parse::<usize>().is_ok()) && path.is_dir() {
                fs::remove_dir_all(&path).map_err(FileError::at("removing", &path))?;
            }
        }
        Ok(())
    }

    /// Writes `step_N/` and the optimiser's `tensors` under a temporary name, then renames the
    /// folder. Moves `step_latest` and removes checkpoints beyond the recipe's limit.
    ///
    /// # Errors
    /// Any I/O failure, with the path.
    pub fn save(
        &self,
        drafter: &dyn TrainableDrafter,
        tensors: &[(String, Tensor)],
        recipe: &Recipe,
        state: &TrainState,
    ) -> anyhow::Result<PathBuf> {
        let path = self.dir.join(format!("step_{}", state.step));
        let partial = atomic::partial_path(&path);
        if partial.exists() {
            fs::remove_dir_all(&partial).map_err(FileError::at("removing", &partial))?;
        }
        atomic::create_dir(&partial)?;
        atomic::write_json(&partial.join("config.json"), &drafter.config_json())?;
        save_checkpoint(&partial, &drafter.checkpoint(), Kind::BFloat16, MAX_SHARD_BYTES)?;
        let file = partial.join(STATE_TENSORS);
        file.parent().map_or(Ok(()), atomic::create_dir)?;
        save(&file, tensors, Kind::Float)?;
        let base = drafter.lora_base();
        if !base.is_empty() {
            save(&partial.join(LORA_BASE), &base, Kind::BFloat16)?;
            adapter::write(&partial, drafter, &recipe.train)?;
        }
        let yaml = config::to_yaml(recipe).map_err(anyhow::Error::msg)?;
        atomic::replace(&partial.join("config.yaml"), |file| {
            std::io::Write::write_all(file, yaml.as_bytes())
        })?;
        atomic::write_json(&partial.join(TRAIN_STATE_FILE), state)?;
        fs::File::open(&partial)
            .and_then(|dir| dir.sync_all())
            .map_err(FileError::at("syncing", &partial))?;
        // An existing folder is incomplete, or the run would have resumed from it.
        if path.exists() {
            fs::remove_dir_all(&path).map_err(FileError::at("removing", &path))?;
        }
        fs::rename(&partial, &path).map_err(FileError::at("writing", &path))?;
        self.set_link(LATEST_LINK, state.step)?;
        self.prune(recipe.logging.keep_checkpoints)?;
        Ok(path)
    }
}

/// Whether a folder has all files that resuming needs.
fn is_complete(path: &Path) -> bool {
    let any = |names: &[&str]| names.iter().any(|name| path.join(name).is_file());
    let is_object = |name: &str| {
        let text = fs::read_to_string(path.join(name)).unwrap_or_default();
        serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&text)
            .is_ok_and(|map| !map.is_empty())
    };
    is_object(TRAIN_STATE_FILE)
        && is_object("config.json")
        && any(&["model.safetensors", "model.safetensors.index.json"])
        && any(&[STATE_TENSORS, EARLIER_STATE_TENSORS])
        && (any(&[LORA_BASE]) || !path.join(adapter::FOLDER).exists())
}

/// Loads a checkpoint's master weights and moments, for one of `processes` processes.
///
/// # Errors
/// Fails if the checkpoint is damaged. Usage errors name the difference if it comes from another
/// recipe or other data.
pub fn restore(
    path: &Path,
    recipe: &Recipe,
    data: &DataId,
    processes: usize,
    drafter: &dyn TrainableDrafter,
    optimizer: &mut AdamW,
) -> anyhow::Result<TrainState> {
    let file = path.join(TRAIN_STATE_FILE);
    let state: TrainState = serde_json::from_str(&atomic::read_text(&file)?)
        .with_context(|| format!("{}: not a training state", file.display()))?;
    if state.format != STATE_FORMAT_VERSION {
        bail!(
            "{}: format {} is unknown; this version reads {STATE_FORMAT_VERSION}; start anew with --overwrite",
            file.display(),
            state.format
        );
    }
    let saved = deepspec_drafters::load_saved_recipe(&path.join("config.yaml"))?;
    let differences =
        config::differences(&without_resumable_keys(saved), &without_resumable_keys(json!(recipe)));
    if !differences.is_empty() {
        usage!(
            "{} was trained by another recipe: {}; undo the change, start anew with --overwrite, or choose another name (and go on from these weights with --set train.init_from={})",
            path.display(),
            differences.join(", "),
            path.display()
        );
    }
    if state.rounding != data.rounding {
        let said = |rounding: Option<Encoding>| {
            match rounding {
            Some(encoding) => format!("states of encoding {encoding}, which rounds them"),
            None => "states that no encoding has rounded, as far as is recorded (bf16, bf16z, or straight from the target)".into(),
        }
        };
        usage!(
            "{} was trained on {}, the recipe names {} now; name the cache that it was trained on, choose another name, or start anew with --overwrite",
            path.display(),
            said(state.rounding),
            said(data.rounding)
        );
    }
    if state.data != data.digest {
        usage!(
            "{} was trained on other samples, or on another target's states, than the recipe names now; choose another name, or start anew with --overwrite",
            path.display()
        );
    }
    if recipe.train.loss_normalization == LossNormalization::MicroBatch && state.world_size != processes {
        usage!(
            "{} was trained by {} processes, and now there are {processes}: with train.loss_normalization micro_batch the loss depends on \
             that; run it with --processes {}, or choose another name",
            path.display(),
            state.world_size,
            state.world_size
        );
    }
    // Reads the header and checks the length, so that an incomplete copy is found early.
    let weights = Weights::open(path, "drafter", Device::Cpu, Kind::Float)?;
    let files = [STATE_TENSORS, EARLIER_STATE_TENSORS].map(|name| path.join(name));
    let file = files.iter().find(|file| file.is_file()).unwrap_or(&files[0]);
    let tensors = Weights::open_file(file, "training state", Device::Cpu, Kind::Float)?;
    optimizer.restore(state.step as i64, |name, shape| tensors.get(name, shape))?;
    let base = drafter.lora_base();
    let _guard = tch::no_grad_guard();
    if base.is_empty() {
        for (name, mut weight) in untrained_weights(drafter) {
            weight.copy_(&weights.get(&name, &weight.size())?);
        }
    } else {
        let tensors = Weights::open_file(&path.join(LORA_BASE), "frozen weights", Device::Cpu, Kind::Float)?;
        for (name, mut weight) in base {
            weight.copy_(&tensors.get(&name, &weight.size())?);
        }
    }
    Ok(state)
}

/// Weights of a checkpoint that are not trained, without the target's embedding and head. They are parts that the recipe freezes, and
/// factors of layers, which `train.init_from` may bring. The optimiser's state has none of them.
pub fn untrained_weights(drafter: &dyn TrainableDrafter) -> Vec<(String, Tensor)> {
    let learns: HashSet<&str> = drafter.parameters().iter().map(|(name, _)| name.as_str()).collect();
    let mut weights = drafter.checkpoint();
    weights.retain(|(name, weight)| {
        !learns.contains(name.as_str()) && !is_embed_or_head(name) && weight.is_floating_point()
    });
    weights
}

/// Keys of a drafter's config.json by which versions of this program may build it differently for one recipe.
const ARCHITECTURE_KEYS: [&str; 8] = [
    "architectures",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
];

/// Checks that a checkpoint's drafter has the layers of `drafter`, which another version may have built.
///
/// # Errors
/// A usage error that names the keys of config.json that differ.
pub fn check_architecture(path: &Path, drafter: &dyn TrainableDrafter) -> anyhow::Result<()> {
    let file = path.join("config.json");
    let saved: Value = serde_json::from_str(&atomic::read_text(&file)?)
        .with_context(|| format!("{}: no JSON", file.display()))?;
    let own = drafter.config_json();
    let same = |there: &Value, here: &Value| match (there.as_f64(), here.as_f64()) {
        (Some(there), Some(here)) => there == here,
        _ => there == here,
    };
    let own = Value::Object(own);
    let value = |config: &'_ Value, key: &str| -> Option<Value> {
        // Sizes of assistants are one level deeper.
        Some(config.get(key).or_else(|| config.get("text_config")?.get(key))?.clone())
    };
    let pairs =
        ARCHITECTURE_KEYS.iter().filter_map(|&key| Some((key, value(&saved, key)?, value(&own, key)?)));
    let differing: Vec<String> = pairs
        .filter(|(_, there, here)| !same(there, here))
        .map(|(key, there, here)| format!("{key} {there} there, {here} here"))
        .collect();
    if !differing.is_empty() {
        usage!(
            "{} holds another drafter than this version builds for the recipe: {}; choose another name, or start anew with --overwrite",
            path.display(),
            differing.join(", ")
        );
    }
    Ok(())
}

/// Checks that a checkpoint's reduced vocabulary is that of `drafter`, whose file may have changed since.
///
/// # Errors
/// A usage error if the vocabularies differ, and other errors if the checkpoint is damaged.
pub fn check_draft_vocab(path: &Path, drafter: &dyn TrainableDrafter) -> anyhow::Result<()> {
    let tensors = drafter.checkpoint();
    let Some((name, own)) = tensors.iter().find(|(name, _)| name == D2T) else { return Ok(()) };
    let weights = Weights::open(path, "drafter", Device::Cpu, Kind::Float)?;
    if !weights.contains(name) {
        return Ok(()); // the recipes differ, which `restore` says
    }
    let there = weights.get(name, &own.size());
    if !there.is_ok_and(|there| there.equal(&own.to_device(Device::Cpu))) {
        usage!(
            "{} was trained with another draft_vocab; name the file that it was trained with, choose another name, or start anew with --overwrite",
            path.display()
        );
    }
    Ok(())
}

/// The recipe keys that must not change on resume. Paths, logging, evaluation, sharding,
/// recomputation and the backend may change. The split of a batch into forwards may change if the
/// result does not depend on it. The digest of the data set represents samples and target.
fn without_resumable_keys(recipe: Value) -> Value {
    let mut value = without_data_locations(recipe);
    if let Some(map) = value.as_object_mut() {
        let sections = map.get_mut("drafter").and_then(Value::as_object_mut);
        // The vocabulary itself is compared, by `check_draft_vocab`.
        for draft_vocab in sections
            .into_iter()
            .flat_map(|kinds| kinds.values_mut())
            .filter_map(|own| own.get_mut("draft_vocab"))
        {
            *draft_vocab = json!("a file");
        }
        map.remove("logging");
        map.remove("eval");
        if let Some(train) = map.get_mut("train").and_then(Value::as_object_mut) {
            for key in ["sharding_strategy", "backend", "timeout_s", "recompute"] {
                train.remove(key);
            }
            if train["loss_normalization"] == json!(LossNormalization::Global) {
                train.remove("local_batch_size");
                train.remove("max_tokens_per_batch");
            }
        }
    }
    value
}

/// A recipe without the locations of data and target; the digest of the data set represents them.
pub fn without_data_locations(mut value: Value) -> Value {
    if let Some(map) = value.as_object_mut() {
        for (part, keys) in
            [("data", &["states", "input", "target_device"][..]), ("target", &["model", "revision"])]
        {
            if let Some(part) = map.get_mut(part).and_then(Value::as_object_mut) {
                keys.iter().for_each(|key| drop(part.remove(*key)));
            }
        }
    }
    value
}
