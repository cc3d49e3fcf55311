//! Drafters that a target's own checkpoint holds.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError};
use safetensors::Dtype;
use serde_json::{Map, Value};

use crate::convert::{Converted, cast_bytes, check_target_matches, other_tensors, renamed_tensors};
use crate::experts::{copy_by_expert, stack_experts, stack_shapes, stores_each_expert};
use crate::fields::read_object;
use crate::numbers::to_float32;
use crate::quantised::{BlockFormat, DeepseekV4};
use crate::shapes::{EMBED, HEAD};
use crate::shards::{MAX_SHARD_BYTES, is_weights_file, weight_paths};
use crate::write::{BESIDE_OTHERS, TensorSource, TensorToWrite, file_name, write_weights_beside};
use crate::{
    Checkpoint, CheckpointError, CheckpointFormat, Fields, Target, TensorMetadata, TensorShapes, Tensors,
    folder, quantised_folder_message,
};

/// Whose embedding and LM head a merged drafter has, in messages.
const MERGED: &str = "its target's checkpoint";

/// Plans a drafter checkpoint of the tensors whose names begin with `prefix` in the target's checkpoint. They are copied
/// byte for byte without the prefix, and the target's embedding and LM head with them. `shapes` are the drafter's
/// tensors, and `config` is its config.json. Each expert gets tensors of its own, also where two of the target's hold all.
///
/// # Errors
/// A tensor that is missing, has another shape, or that the drafter has no use for.
pub fn extract<'a>(
    target: &'a Target,
    prefix: &str,
    shapes: &TensorShapes,
    config: Map<String, Value>,
) -> Result<Converted<'a>, CheckpointError> {
    let source = target.tensors();
    let stored = || source.iter().filter_map(|(name, _)| name.strip_prefix(prefix));
    let shapes = match stores_each_expert(stored()) {
        Some(false) => stack_shapes(shapes.clone()),
        _ => shapes.clone(),
    };
    let known: HashMap<&str, &[usize]> = shapes.iter().map(|(name, shape)| (&**name, &**shape)).collect();
    if let Some(other) = stored().find(|name| !known.contains_key(name)) {
        return Err(source.error(&format!("{prefix}{other}"), "the drafter has no such tensor"));
    }
    let own = shapes.iter().map(|(name, shape)| (&**name, format!("{prefix}{name}"), Some(shape)));
    let ends = [(EMBED, target.embed()), (HEAD, target.head())].map(|(name, theirs)| (name, theirs, None));
    let mut tensors = vec![];
    for (name, theirs, expected) in own.chain(ends) {
        let found = target.metadata(&theirs)?;
        if let Some(expected) = expected.filter(|expected| **expected != found.shape) {
            let problem = format!("shape {:?}, the config wants {expected:?}", found.shape);
            return Err(source.error(&theirs, problem));
        }
        tensors.extend(copy_by_expert(source, &theirs, name)?);
    }
    Ok(Converted {
        config,
        tensors,
        dropped: vec![],
        copied_from_target: vec![EMBED.into(), HEAD.into()],
        max_shard_bytes: MAX_SHARD_BYTES,
    })
}

/// A target's checkpoint with a drafter in it, ready to write.
pub struct MergedTarget<'a> {
    /// Weights files of the target that stay as they are, and their tensors.
    kept: Vec<(PathBuf, Tensors)>,
    /// Tensors of the target's other weights files.
    changed: Tensors,
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
/// Experts have the form that they have below `prefix` in the target, or else in its layers.
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
    check_target_matches(source, source.drafter(), target, MERGED)?;
    let (mut drafter, _) = other_tensors(source, CheckpointFormat::Reference)?;
    let names = || target.tensors().iter().map(|(name, _)| name);
    let replaced = names().filter(|name| name.starts_with(prefix));
    if stores_each_expert(replaced).or_else(|| stores_each_expert(names())) != Some(true) {
        drafter = stack_experts(drafter, source.tensors())?;
    }
    drafter.iter_mut().for_each(|tensor| tensor.name.insert_str(0, prefix));
    let dir = target.dir();
    let config = read_object(&dir.join("config.json"))?;
    check_plain(dir, &config)?;
    MergedTarget::new(dir, drafter, prefix, with_keys(config, keys))
}

/// Checks that the target in `dir` is not quantised.
fn check_plain(dir: &Path, config: &Map<String, Value>) -> Result<(), CheckpointError> {
    if quantised_folder_message(dir, config).is_none() {
        return Ok(());
    }
    let problem = "the target's weights are quantised, and engines would expect such ones of the drafter, too; \
                   merge it into the same model in bfloat16";
    Err(CheckpointError::NotADrafter { path: dir.to_path_buf(), problem: problem.into() })
}

/// How a DeepSeek-V4 stores a tensor of its drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredAs {
    /// float32.
    Float32,
    /// bfloat16.
    Bfloat16,
    /// float8 (e4m3) with a scale per 128 rows and columns. Where the target is not quantised, bfloat16.
    Float8,
    /// float4 (e2m1) with a scale per 32 columns. Where the target is not quantised, bfloat16.
    Float4,
}

/// Plans a copy of a DeepSeek-V4's checkpoint whose tensors below `prefix` are those of the drafter `source`, under the names of the
/// release. All other tensors are copied byte for byte. `config` is the new config.json. `stored_as` says how the release stores a
/// tensor, by its name there.
///
/// # Errors
/// As [`merge`], and if engines expect weights in a scheme that is not the release's. Also if a matrix has no whole blocks.
pub fn merge_into_deepseek_v4<'a>(
    source: &'a Checkpoint,
    target: &Target,
    prefix: &'a str,
    config: Map<String, Value>,
    stored_as: impl Fn(&str) -> StoredAs,
) -> Result<MergedTarget<'a>, CheckpointError> {
    check_target_matches(source, source.drafter(), target, MERGED)?;
    let dir = target.dir();
    let is_quantised = DeepseekV4::is_expected(&Fields::new(&dir.join("config.json"), &config))?;
    if !is_quantised {
        check_plain(dir, &config)?;
    }
    let mut drafter = vec![];
    for (stored, name, facts) in renamed_tensors(source, CheckpointFormat::DeepseekV4) {
        let tensor = StoredTensor { tensors: source.tensors(), stored, facts };
        match stored_as(&name) {
            StoredAs::Float32 => drafter.push(tensor.in_dtype(name, Dtype::F32)),
            StoredAs::Float8 if is_quantised => drafter.extend(tensor.in_blocks(name, BlockFormat::Float8)?),
            StoredAs::Float4 if is_quantised => drafter.extend(tensor.in_blocks(name, BlockFormat::Float4)?),
            _ => drafter.push(tensor.in_dtype(name, Dtype::BF16)),
        }
    }
    MergedTarget::new(dir, drafter, prefix, Some(config))
}

/// A drafter's tensor, which is written in another form.
#[derive(Clone, Copy)]
struct StoredTensor<'a> {
    tensors: &'a Tensors,
    stored: &'a str,
    facts: &'a TensorMetadata,
}

impl<'a> StoredTensor<'a> {
    /// The tensor in `dtype`.
    fn in_dtype(self, name: String, dtype: Dtype) -> TensorToWrite<'a> {
        let Self { tensors, stored, facts } = self;
        let shape = facts.shape.clone();
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let source = match facts.dtype == dtype {
            true => TensorSource::Copy(tensors, stored.into()),
            false => TensorSource::Computed(bytes, Box::new(move || cast_bytes(tensors, stored, dtype))),
        };
        TensorToWrite { name, dtype, shape, source }
    }

    /// The numbers of the matrix under its `name`, and their scales.
    fn in_blocks(self, name: String, format: BlockFormat) -> Result<[TensorToWrite<'a>; 2], CheckpointError> {
        let ([height, width], packed) = (format.block(), format.numbers_per_byte());
        let &[rows, columns] = &self.facts.shape[..] else {
            let problem = format!("its shape is {:?}; expected two dimensions", self.facts.shape);
            return Err(self.tensors.error(self.stored, problem));
        };
        if packed > 1 && columns % width != 0 {
            let problem = format!("its rows have {columns} columns, which blocks of {width} do not divide");
            return Err(self.tensors.error(self.stored, problem));
        }
        let values = move || -> Result<Vec<f32>, CheckpointError> {
            let bytes = cast_bytes(self.tensors, self.stored, Dtype::F32)?;
            Ok(to_float32(&bytes, Dtype::F32).unwrap_or_default())
        };
        let scales = format!("{}.scale", name.strip_suffix(".weight").unwrap_or(&name));
        let tensor = |name, dtype, shape: [usize; 2], bytes| TensorToWrite {
            name,
            dtype,
            shape: shape.to_vec(),
            source: TensorSource::Computed(shape.iter().product(), bytes),
        };
        let grid = [rows.div_ceil(height), columns.div_ceil(width)];
        Ok([
            tensor(
                name,
                format.dtype(),
                [rows, columns / packed],
                Box::new(move || Ok(format.numbers(&values()?, columns))),
            ),
            tensor(scales, Dtype::F8_E8M0, grid, Box::new(move || Ok(format.scales(&values()?, columns)))),
        ])
    }
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

impl<'a> MergedTarget<'a> {
    /// The target in `dir` with the tensors `drafter` below `prefix`. `config` is the new config.json, if it changes.
    fn new(
        dir: &Path,
        drafter: Vec<TensorToWrite<'a>>,
        prefix: &'a str,
        config: Option<Map<String, Value>>,
    ) -> Result<Self, CheckpointError> {
        let paths = weight_paths(dir)?;
        let is_single = paths.len() == 1;
        let (mut kept, mut changed) = (vec![], vec![]);
        for path in paths {
            let tensors = Tensors::open_file(&path)?;
            let has_drafter = tensors.iter().any(|(name, _)| name.starts_with(prefix));
            match is_single || has_drafter || file_name(&path).starts_with(BESIDE_OTHERS) {
                true => changed.push(path),
                false => kept.push((path, tensors)),
            }
        }
        let changed = Tensors::from_files(dir, changed)?;
        let entries = fs::read_dir(dir).map_err(FileError::at("reading", dir))?;
        let paths = entries.flatten().map(|entry| entry.path());
        let is_other = |path: &PathBuf| {
            let name = file_name(path);
            path.is_file() && !is_weights_file(&name) && !name.ends_with(".safetensors")
        };
        Ok(Self { kept, changed, drafter, prefix, config, files: paths.filter(is_other).collect() })
    }

    /// Writes the folder atomically. `overwrite` replaces an existing folder that contains only such a checkpoint.
    ///
    /// # Errors
    /// If the folder exists and may not be replaced, or on any I/O error.
    pub fn write(self, dir: &Path, overwrite: bool) -> Result<(), CheckpointError> {
        let Self { kept, changed, drafter, prefix, config, files } = self;
        let others = changed.iter().filter(|(name, _)| !name.starts_with(prefix));
        let copy = |(name, facts): (&str, &TensorMetadata)| TensorToWrite {
            name: name.into(),
            dtype: facts.dtype,
            shape: facts.shape.clone(),
            source: TensorSource::Copy(&changed, name.into()),
        };
        let mut tensors: Vec<TensorToWrite> = others.map(copy).collect();
        tensors.extend(drafter);
        let copied = || kept.iter().map(|(file, _)| file).chain(&files);
        let is_own = |name: &str| {
            is_weights_file(name)
                || name.starts_with(BESIDE_OTHERS)
                || copied().any(|file| file_name(file) == name)
        };
        folder::write_folder_atomically(dir, overwrite, is_own, |partial| {
            for file in &files {
                fs::copy(file, partial.join(file_name(file))).map_err(FileError::at("copying", file))?;
            }
            for (file, _) in &kept {
                link_or_copy(file, &partial.join(file_name(file)))?;
            }
            if let Some(config) = config {
                atomic::write_json(&partial.join("config.json"), &config)?;
            }
            write_weights_beside(partial, &mut tensors, MAX_SHARD_BYTES, &kept)
        })
    }
}

/// Makes `to` a further name of the file `from`, or a copy of it where the file system allows no such name.
fn link_or_copy(from: &Path, to: &Path) -> Result<(), FileError> {
    // Models in a hub's cache are links to their files.
    let file = fs::canonicalize(from).map_err(FileError::at("reading", from))?;
    if fs::hard_link(&file, to).is_err() {
        fs::copy(&file, to).map_err(FileError::at("copying", from))?;
    }
    Ok(())
}
