//! Drafters that a target's own checkpoint holds.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError};
use serde_json::{Map, Value};

use crate::convert::{Converted, check_target_matches, other_tensors};
use crate::fields::read_object;
use crate::shapes::{EMBED, HEAD};
use crate::shards::{MAX_SHARD_BYTES, is_weights_file};
use crate::write::{TensorSource, TensorToWrite, write_weights};
use crate::{
    Checkpoint, CheckpointError, CheckpointFormat, Target, TensorMetadata, TensorShapes, Tensors, folder,
    quantised_folder_message,
};

/// Plans a drafter checkpoint of the tensors whose names begin with `prefix` in the target's checkpoint. They are copied
/// byte for byte without the prefix, and the target's embedding and LM head with them. `shapes` are the drafter's
/// tensors, and `config` is its config.json.
///
/// # Errors
/// A tensor that is missing, has another shape, or that the drafter has no use for.
pub fn extract<'a>(
    target: &'a Target,
    prefix: &str,
    shapes: &TensorShapes,
    config: Map<String, Value>,
) -> Result<Converted<'a>, CheckpointError> {
    let (source, known): (_, HashMap<&str, &[usize]>) =
        (target.tensors(), shapes.iter().map(|(name, shape)| (&**name, &**shape)).collect());
    let mut stored = source.iter().filter_map(|(name, _)| name.strip_prefix(prefix));
    if let Some(other) = stored.find(|name| !known.contains_key(name)) {
        return Err(source.error(&format!("{prefix}{other}"), "the drafter has no such tensor"));
    }
    let own = shapes.iter().map(|(name, shape)| (name.clone(), format!("{prefix}{name}"), Some(shape)));
    let ends =
        [(EMBED, target.embed()), (HEAD, target.head())].map(|(name, theirs)| (name.into(), theirs, None));
    let copy = |(name, theirs, expected): (String, String, Option<&Vec<usize>>)| {
        let found = target.metadata(&theirs)?;
        if let Some(expected) = expected.filter(|expected| **expected != found.shape) {
            let problem = format!("shape {:?}, the config wants {expected:?}", found.shape);
            return Err(source.error(&theirs, problem));
        }
        let (dtype, shape) = (found.dtype, found.shape.clone());
        Ok(TensorToWrite { name, dtype, shape, source: TensorSource::Copy(source, theirs) })
    };
    Ok(Converted {
        config,
        tensors: own.chain(ends).map(copy).collect::<Result<_, CheckpointError>>()?,
        dropped: vec![],
        copied_from_target: vec![EMBED.into(), HEAD.into()],
        max_shard_bytes: MAX_SHARD_BYTES,
    })
}

/// A target's checkpoint with a drafter in it, ready to write.
pub struct MergedTarget<'a> {
    target: Tensors,
    drafter: Vec<TensorToWrite<'a>>,
    prefix: &'a str,
    /// The target's config.json with the drafter's keys, if the target lacks one.
    config: Option<Map<String, Value>>,
    /// Files of the target's folder other than its weights.
    files: Vec<PathBuf>,
}

/// Plans a copy of the target's checkpoint whose tensors below `prefix` are those of the drafter `source`. All other tensors
/// are copied byte for byte. Engines look for the drafter by `keys` of the target's config. The copy gets those that the target lacks.
///
/// # Errors
/// If the drafter does not fit the target: its sizes, embedding or LM head differ. Also if the target is quantised, because
/// engines would read the drafter's tensors as quantised ones.
pub fn merge<'a>(
    source: &'a Checkpoint,
    target: &Target,
    prefix: &'a str,
    keys: Map<String, Value>,
) -> Result<MergedTarget<'a>, CheckpointError> {
    check_target_matches(source, source.drafter(), target, "its target's checkpoint")?;
    let (mut drafter, _) = other_tensors(source, CheckpointFormat::Reference)?;
    drafter.iter_mut().for_each(|tensor| tensor.name.insert_str(0, prefix));
    let dir = target.dir();
    let config = read_object(&dir.join("config.json"))?;
    if quantised_folder_message(dir, &config).is_some() {
        let problem = "the target's weights are quantised, and engines would expect such ones of the drafter, too; \
                       merge it into the same model in bfloat16";
        return Err(CheckpointError::NotADrafter { path: dir.to_path_buf(), problem: problem.into() });
    }
    let entries = fs::read_dir(dir).map_err(FileError::at("reading", dir))?;
    let paths = entries.flatten().map(|entry| entry.path());
    let is_other = |path: &PathBuf| {
        let name = file_name(path);
        path.is_file() && !is_weights_file(&name) && !name.ends_with(".safetensors")
    };
    let files = paths.filter(is_other).collect();
    Ok(MergedTarget { target: Tensors::open(dir)?, drafter, prefix, config: with_keys(config, keys), files })
}

/// The config with these keys in its decoder's part, or None if it has them all.
fn with_keys(mut config: Map<String, Value>, keys: Map<String, Value>) -> Option<Map<String, Value>> {
    let decoder = match config.get_mut("text_config") {
        Some(Value::Object(decoder)) => decoder,
        _ => &mut config,
    };
    let missing: Vec<_> =
        keys.into_iter().filter(|(key, _)| decoder.get(key).is_none_or(Value::is_null)).collect();
    let any = !missing.is_empty();
    decoder.extend(missing);
    any.then_some(config)
}

impl MergedTarget<'_> {
    /// Writes the folder atomically. `overwrite` replaces an existing folder that contains only such a checkpoint.
    ///
    /// # Errors
    /// If the folder exists and may not be replaced, or on any I/O error.
    pub fn write(self, dir: &Path, overwrite: bool) -> Result<(), CheckpointError> {
        let Self { target, drafter, prefix, config, files } = self;
        let kept = target.iter().filter(|(name, _)| !name.starts_with(prefix));
        let copy = |(name, facts): (&str, &TensorMetadata)| TensorToWrite {
            name: name.into(),
            dtype: facts.dtype,
            shape: facts.shape.clone(),
            source: TensorSource::Copy(&target, name.into()),
        };
        let mut tensors: Vec<TensorToWrite> = kept.map(copy).collect();
        tensors.extend(drafter);
        let is_own = |name: &str| is_weights_file(name) || files.iter().any(|file| file_name(file) == name);
        folder::write_folder_atomically(dir, overwrite, is_own, |partial| {
            for file in &files {
                fs::copy(file, partial.join(file_name(file))).map_err(FileError::at("copying", file))?;
            }
            if let Some(config) = config {
                atomic::write_json(&partial.join("config.json"), &config)?;
            }
            write_weights(partial, &mut tensors, MAX_SHARD_BYTES)
        })
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}
