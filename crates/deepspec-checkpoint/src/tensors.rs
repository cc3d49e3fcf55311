//! Tensors as bytes, from one or several safetensors files or from the GGUF of a language model.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::gguf::{GGUF_LINK, Model, TensorType};
use crate::numbers::to_float32;
use deepspec_core::atomic::FileError;
use safetensors::Dtype;
use safetensors::tensor::Metadata;

use crate::quantised::{DeepseekV4, QuantisedTensor, QuantisedWeights, Scope};
use crate::{CheckpointError, Fields, shards};

/// Maximum length of a safetensors header in bytes, the limit of the format.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Bytes copied at once.
const CHUNK_BYTES: usize = 16 << 20;

/// Dtype, shape and size of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorMetadata {
    /// Dtype.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<usize>,
    /// Size in bytes.
    pub bytes: usize,
}

/// The tensors of a folder; values are read on request.
pub struct Tensors {
    dir: PathBuf,
    store: TensorStorage,
    facts: BTreeMap<String, TensorMetadata>,
    /// Quantised weights by the names of the plain ones.
    quantised: BTreeMap<String, QuantisedTensor>,
    /// Metadata of the stored tensors that they are made of.
    parts: BTreeMap<String, TensorMetadata>,
    /// Why no quantised weight is shown.
    unread_scheme: Option<String>,
}

enum TensorStorage {
    /// safetensors files, and the file index and byte offset of each tensor.
    Shards { files: Vec<(PathBuf, File)>, locations: BTreeMap<String, (usize, u64)> },
    /// A language model, whose values may be quantised.
    Gguf(Model),
}

impl Tensors {
    /// Opens `dir/model.safetensors`, or the shards in its index, or `dir/model.gguf`.
    ///
    /// # Errors
    /// Fails if there are no weights, or if a file is truncated or has another format.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        match shards::weight_paths(dir) {
            Err(_) if dir.join(GGUF_LINK).is_file() => {
                Ok(Self::from_gguf(dir, Model::open(&dir.join(GGUF_LINK))?))
            }
            paths => Self::from_files(dir, paths?),
        }
    }

    /// Opens the shards that are in `dir`, of which others may be missing: a target that runs
    /// elsewhere needs no layers.
    ///
    /// # Errors
    /// As [`Self::open`], and if no shard is there.
    pub fn open_present(dir: &Path) -> Result<Self, CheckpointError> {
        match shards::weight_paths(dir) {
            Ok(paths) if paths.iter().any(|path| path.is_file()) => {
                Self::from_files(dir, paths.into_iter().filter(|path| path.is_file()).collect())
            }
            _ => Self::open(dir),
        }
    }

    /// Opens the weights of a target, which may be quantised. Each quantised weight has the name of the plain one and is a
    /// float32 tensor, and the tensors that it is made of are not listed.
    ///
    /// # Errors
    /// As [`Self::open`], and if the weights are quantised in a way that is not read.
    pub fn open_target(dir: &Path) -> Result<Self, CheckpointError> {
        let tensors = Self::open(dir)?;
        match QuantisedWeights::read(dir, Scope::Whole)? {
            Some(weights) => tensors.dequantised(&weights, |_| true),
            None => Ok(tensors),
        }
    }

    /// As [`Self::open_target`], of the shards that are in `dir`. Layers stay as they are stored, in any format: a target that
    /// runs elsewhere needs none. A scheme that is not read is an error of the tensors that need it
    /// ([`Self::check_readable`]).
    ///
    /// # Errors
    /// As [`Self::open_present`], and if a quantised tensor outside the layers is damaged.
    pub fn open_target_present(dir: &Path) -> Result<Self, CheckpointError> {
        let tensors = Self::open_present(dir)?;
        match QuantisedWeights::read(dir, Scope::Outer) {
            Ok(Some(weights)) => tensors.dequantised(&weights, |name| !shards::is_layer_tensor(name)),
            Ok(None) => Ok(tensors),
            Err(error) => Ok(Self { unread_scheme: Some(error.to_string()), ..tensors }),
        }
    }

    /// Opens the drafter within a DeepSeek-V4: the tensors of its stages, embedding and LM head. Quantised weights are shown as
    /// [`Self::open_target`] shows them.
    ///
    /// # Errors
    /// As [`Self::open`], and if a quantised weight has no scales, or some that do not fit. Also if `config` states other blocks.
    pub fn open_drafter_of_deepseek_v4(dir: &Path, config: &Fields) -> Result<Self, CheckpointError> {
        let mut tensors = Self::open(dir)?;
        let scheme = DeepseekV4::read(config)?;
        let is_own = |name: &str| ["mtp.", "embed.", "head."].iter().any(|prefix| name.starts_with(prefix));
        tensors.facts.retain(|name, _| is_own(name));
        tensors.dequantised(&QuantisedWeights::DeepseekV4(scheme), |_| true)
    }

    /// Checks that a tensor can be read without the scheme of quantised weights, or that the scheme is read.
    ///
    /// # Errors
    /// If the tensor is missing or quantised, and the scheme is not read: the error of the scheme.
    pub fn check_readable(&self, name: &str) -> Result<(), CheckpointError> {
        let is_plain = || self.get(name).is_some_and(|facts| is_readable(name, facts.dtype));
        match &self.unread_scheme {
            Some(problem) if !is_plain() => Err(self.error(name, problem)),
            _ => Ok(()),
        }
    }

    /// Whether the tensor is the bias of a quantised weight, with zeros only. AutoGPTQ stores one for every module.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn is_zero_bias(&self, name: &str) -> Result<bool, CheckpointError> {
        let module = name.strip_suffix(".bias");
        if !module.is_some_and(|module| self.quantised.contains_key(&format!("{module}.weight"))) {
            return Ok(false);
        }
        let (bytes, facts) = (self.bytes(name)?, self.required_metadata(name)?);
        Ok(to_float32(&bytes, facts.dtype).is_some_and(|values| values.iter().all(|&value| value == 0.0)))
    }

    /// Shows quantised weights, of which one part is called such that `is_shown`, in place of the tensors that they are
    /// made of.
    fn dequantised(
        self,
        weights: &QuantisedWeights,
        is_shown: impl Fn(&str) -> bool,
    ) -> Result<Self, CheckpointError> {
        let (mut quantised, mut facts, mut parts) = (BTreeMap::new(), self.facts.clone(), BTreeMap::new());
        for name in self.facts.keys().filter(|name| is_shown(name)) {
            let Some((plain, tensor)) = weights.find(&self, name)? else { continue };
            parts.extend(tensor.parts().into_iter().filter_map(|part| facts.remove_entry(part)));
            if facts.insert(plain.clone(), tensor.metadata()).is_some() {
                let problem = format!("`{name}` is the same weight, quantised; remove one of them");
                return Err(self.error(&plain, problem));
            }
            quantised.insert(plain, tensor);
        }
        Ok(Self { facts, quantised, parts, ..self })
    }

    fn from_gguf(dir: &Path, model: Model) -> Self {
        let facts = model.tensors().map(|(name, stored)| {
            let dtype = match stored.kind.decoded_type() {
                TensorType::F32 => Dtype::F32,
                TensorType::F16 => Dtype::F16,
                TensorType::Bf16 => Dtype::BF16,
                TensorType::I64 => Dtype::I64,
            };
            let bytes = stored.values() * stored.kind.decoded_type().bytes();
            (name.to_string(), TensorMetadata { dtype, shape: stored.shape.clone(), bytes })
        });
        let facts = facts.collect();
        Self::new(dir, TensorStorage::Gguf(model), facts)
    }

    /// Opens one safetensors file of any name.
    ///
    /// # Errors
    /// Fails if the file is truncated or no safetensors file.
    pub fn open_file(path: &Path) -> Result<Self, CheckpointError> {
        Self::from_files(path, vec![path.to_path_buf()])
    }

    /// Opens these safetensors files of the folder `dir`.
    ///
    /// # Errors
    /// As [`Self::open`], and if a tensor is in two of them.
    pub(crate) fn from_files(dir: &Path, paths: Vec<PathBuf>) -> Result<Self, CheckpointError> {
        let (mut files, mut locations, mut facts) = (vec![], BTreeMap::new(), BTreeMap::new());
        for path in paths {
            let (file, data, header) = open_shard(&path)?;
            for (name, info) in header.tensors() {
                let (start, end) = info.data_offsets;
                if let Some((twin, _)) = locations.insert(name.clone(), (files.len(), data + start as u64)) {
                    let (first, _): &(PathBuf, File) = &files[twin];
                    let problem = format!("it is also in {}", first.display());
                    return Err(CheckpointError::Tensor { path, name, problem });
                }
                let shape = info.shape.clone();
                facts.insert(name, TensorMetadata { dtype: info.dtype, shape, bytes: end - start });
            }
            files.push((path, file));
        }
        let (facts, locations) = strip_wrapper_names(facts, locations);
        Ok(Self::new(dir, TensorStorage::Shards { files, locations }, facts))
    }

    fn new(dir: &Path, store: TensorStorage, facts: BTreeMap<String, TensorMetadata>) -> Self {
        let (quantised, parts, unread_scheme) = Default::default();
        Self { dir: dir.to_path_buf(), store, facts, quantised, parts, unread_scheme }
    }

    /// Reads all values and checks that none is NaN or infinite.
    ///
    /// # Errors
    /// Fails with [`CheckpointError::Tensor`] for the first tensor with such a value, or if a file
    /// cannot be read.
    pub fn check_finite(&self) -> Result<(), CheckpointError> {
        for (name, facts) in self.iter().filter(|(_, facts)| is_float(facts.dtype)) {
            if let Some(place) = first_non_finite(&self.bytes(name)?, facts.dtype) {
                let problem = format!(
                    "value {place} of {} is NaN or infinite; training diverged, or the file is damaged",
                    facts.shape.iter().product::<usize>()
                );
                return Err(self.error(name, problem));
            }
        }
        Ok(())
    }

    /// Checks that all tensors are floats, or integers of vocabulary maps.
    ///
    /// # Errors
    /// Fails with [`CheckpointError::Tensor`] for the first tensor of a quantised type.
    pub fn check_types(&self) -> Result<(), CheckpointError> {
        let is_wrong = |(name, facts): &(&str, &TensorMetadata)| !is_readable(name, facts.dtype);
        match self.iter().find(is_wrong) {
            None => Ok(()),
            Some((name, facts)) => Err(self.error(name, quantised_dtype_message(facts.dtype))),
        }
    }

    /// The opened folder or file.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Names and metadata, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &TensorMetadata)> {
        self.facts.iter().map(|(name, facts)| (name.as_str(), facts))
    }

    /// Metadata of a tensor; None if it is missing.
    pub fn get(&self, name: &str) -> Option<&TensorMetadata> {
        self.facts.get(name)
    }

    /// An error about a tensor.
    pub fn error(&self, name: &str, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::Tensor { path: self.dir.clone(), name: name.into(), problem: problem.into() }
    }

    /// Metadata of a required tensor.
    pub(crate) fn required_metadata(&self, name: &str) -> Result<&TensorMetadata, CheckpointError> {
        self.get(name).ok_or_else(|| self.error(name, "missing"))
    }

    /// All bytes of a tensor, little-endian and row-major, in the dtype of its metadata.
    ///
    /// # Errors
    /// Fails if the tensor is missing or its file cannot be read.
    pub fn bytes(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        match self.quantised.get(name) {
            Some(tensor) => tensor.values(self),
            None => self.stored_bytes(name),
        }
    }

    /// Metadata of a tensor as it is stored.
    fn stored_metadata(&self, name: &str) -> Result<&TensorMetadata, CheckpointError> {
        self.parts.get(name).map_or_else(|| self.required_metadata(name), Ok)
    }

    /// All bytes of a tensor as it is stored, also if it is part of a quantised weight.
    pub(crate) fn stored_bytes(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        if let TensorStorage::Gguf(model) = &self.store {
            return Ok(model.values(name)?);
        }
        let mut bytes = Vec::with_capacity(self.stored_metadata(name)?.bytes);
        self.copy_stored(name, None, &mut bytes)?;
        Ok(bytes)
    }

    /// Writes the bytes `part` of a tensor to `out`, or all of them, in chunks.
    pub(crate) fn copy_bytes(
        &self,
        name: &str,
        part: Option<Range<usize>>,
        out: &mut impl Write,
    ) -> Result<(), CheckpointError> {
        match self.quantised.get(name) {
            Some(tensor) => self.write_part(&tensor.values(self)?, part, out),
            None => self.copy_stored(name, part, out),
        }
    }

    fn copy_stored(
        &self,
        name: &str,
        part: Option<Range<usize>>,
        out: &mut impl Write,
    ) -> Result<(), CheckpointError> {
        let bytes = self.stored_metadata(name)?.bytes;
        let (path, file, first) = match &self.store {
            TensorStorage::Gguf(model) => return self.write_part(&model.values(name)?, part, out),
            TensorStorage::Shards { files, locations } => {
                let (file, first) = locations[name];
                (&files[file].0, &files[file].1, first)
            }
        };
        let Range { mut start, end } = part.unwrap_or(0..bytes);
        let mut buffer = vec![0; (end - start).min(CHUNK_BYTES)];
        while start < end {
            let chunk = &mut buffer[..(end - start).min(CHUNK_BYTES)];
            file.read_exact_at(chunk, first + start as u64).map_err(FileError::at("reading", path))?;
            out.write_all(chunk).map_err(FileError::at("copying", path))?;
            start += chunk.len();
        }
        Ok(())
    }

    fn write_part(
        &self,
        values: &[u8],
        part: Option<Range<usize>>,
        out: &mut impl Write,
    ) -> Result<(), CheckpointError> {
        let part = part.unwrap_or(0..values.len());
        Ok(out.write_all(&values[part]).map_err(FileError::at("copying", &self.dir))?)
    }
}

/// Name prefixes that wrappers add to a module: DataParallel, PEFT, and vLLM for drafters.
const WRAPPER_PREFIXES: [&str; 3] = ["module.", "base_model.model.", "draft_model."];
/// Name parts that torch.compile, FSDP and activation checkpointing insert before any module.
const INNER_WRAPPER_PARTS: [&str; 3] = ["_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."];

/// Metadata and location of tensors by name.
type TensorIndex = (BTreeMap<String, TensorMetadata>, BTreeMap<String, (usize, u64)>);

/// Removes the wrappers' parts from tensor names, unless two names would become equal.
fn strip_wrapper_names(
    facts: BTreeMap<String, TensorMetadata>,
    locations: BTreeMap<String, (usize, u64)>,
) -> TensorIndex {
    // Lightning and vLLM call a whole model `model`. Inside it a drafter has `fc`, and a target has
    // its own `model`.
    let is_within = |name: &str| facts.contains_key(&format!("model.{name}"));
    let holds_model = facts.keys().all(|name| name.starts_with("model."))
        && (is_within("fc.weight") || is_within("model.embed_tokens.weight"));
    let bare = |name: &str| {
        let mut rest = if holds_model { &name["model.".len()..] } else { name };
        while let Some(shorter) =
            WRAPPER_PREFIXES.iter().chain(&INNER_WRAPPER_PARTS).find_map(|wrapper| rest.strip_prefix(wrapper))
        {
            rest = shorter;
        }
        INNER_WRAPPER_PARTS
            .iter()
            .fold(rest.to_string(), |name, wrapper| name.replace(&format!(".{wrapper}"), "."))
    };
    let names: BTreeMap<String, String> = facts.keys().map(|name| (name.clone(), bare(name))).collect();
    let distinct: BTreeSet<&String> = names.values().collect();
    if distinct.len() < names.len() || names.iter().all(|(name, bare)| name == bare) {
        return (facts, locations);
    }
    let facts = facts.into_iter().map(|(name, facts)| (names[&name].clone(), facts)).collect();
    let locations = locations.into_iter().map(|(name, place)| (names[&name].clone(), place)).collect();
    (facts, locations)
}

/// Whether the tensor maps between the vocabularies of target and drafter, so that it is no weight.
fn is_vocab_map(name: &str) -> bool {
    matches!(name.rsplit('.').next(), Some("d2t" | "t2d"))
}

/// Whether a tensor of this name and dtype is supported: floats, and integers of vocabulary maps.
pub fn is_readable(name: &str, dtype: Dtype) -> bool {
    is_float(dtype) || (!is_quantised(dtype) && is_vocab_map(name))
}

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::BF16 | Dtype::F16)
}

/// Whether values of this type need scales. Vocabulary maps are integers and booleans.
fn is_quantised(dtype: Dtype) -> bool {
    !is_float(dtype) && !matches!(dtype, Dtype::I64 | Dtype::I32 | Dtype::BOOL)
}

/// Name of the dtype as PyTorch spells it. Dtypes that are not read keep the name of safetensors.
pub fn torch_dtype_name(dtype: Dtype) -> String {
    match dtype {
        Dtype::F64 => "float64".into(),
        Dtype::F32 => "float32".into(),
        Dtype::F16 => "float16".into(),
        Dtype::BF16 => "bfloat16".into(),
        Dtype::I64 => "int64".into(),
        Dtype::I32 => "int32".into(),
        Dtype::BOOL => "bool".into(),
        other => other.to_string(),
    }
}

/// Error message with the remedy for a tensor of a quantised type.
pub fn quantised_dtype_message(dtype: Dtype) -> String {
    format!(
        "its dtype {} is one of quantised weights, which are read in targets with a `quantization_config` only; use the checkpoint in bfloat16, float16 or float32",
        torch_dtype_name(dtype)
    )
}

/// Index of the first NaN or infinity among little-endian floats, which has all exponent bits set.
fn first_non_finite(bytes: &[u8], dtype: Dtype) -> Option<usize> {
    match dtype {
        Dtype::BF16 => {
            bytes.as_chunks::<2>().0.iter().position(|&word| u16::from_le_bytes(word) & 0x7f80 == 0x7f80)
        }
        Dtype::F16 => {
            bytes.as_chunks::<2>().0.iter().position(|&word| u16::from_le_bytes(word) & 0x7c00 == 0x7c00)
        }
        Dtype::F32 => bytes.as_chunks::<4>().0.iter().position(|&word| !f32::from_le_bytes(word).is_finite()),
        Dtype::F64 => bytes.as_chunks::<8>().0.iter().position(|&word| !f64::from_le_bytes(word).is_finite()),
        _ => None,
    }
}

/// Opens a safetensors file. Returns the file, the offset of its data, and its header.
fn open_shard(path: &Path) -> Result<(File, u64, Metadata), CheckpointError> {
    let bad = |problem: String| CheckpointError::NotADrafter { path: path.to_path_buf(), problem };
    let file = File::open(path).map_err(FileError::at("reading", path))?;
    let size = file.metadata().map_err(FileError::at("reading", path))?.len();
    let mut start = [0; 8];
    file.read_exact_at(&mut start, 0)
        .map_err(|_| bad(format!("{size} bytes are too few for a safetensors file")))?;
    let header_len = u64::from_le_bytes(start);
    if header_len > MAX_HEADER_BYTES.min(size.saturating_sub(8)) {
        return Err(bad(format!(
            "the header claims {header_len} bytes of a file of {size}; the file is truncated or no safetensors"
        )));
    }
    let mut buffer = vec![0; header_len as usize];
    file.read_exact_at(&mut buffer, 8).map_err(FileError::at("reading", path))?;
    let header: Metadata =
        serde_json::from_slice(&buffer).map_err(|error| bad(format!("bad safetensors header: {error}")))?;
    let data = 8 + header_len;
    let end = header.tensors().values().map(|info| info.data_offsets.1 as u64).max().unwrap_or(0);
    if end != size - data {
        return Err(bad(format!(
            "the header describes {end} bytes of values, the file has {}; it is truncated or damaged",
            size - data
        )));
    }
    Ok((file, data, header))
}
