//! Tensors of a checkpoint by name, from one safetensors file or several.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::ModelError;

/// Longest header that is believed; the format's own limit.
const MAX_HEADER: u64 = 100_000_000;

struct Shard {
    path: PathBuf,
    file: File,
    data_start: u64,
}

/// The tensors of a checkpoint, read one at a time when asked for.
pub struct Weights {
    dir: PathBuf,
    /// What is being loaded, for messages.
    expected: &'static str,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, (usize, TensorInfo)>,
    unread: RefCell<Vec<String>>,
    device: Device,
    kind: Kind,
}

impl Weights {
    /// Opens `dir/model.safetensors`, or the shards named by `dir/model.safetensors.index.json`. Floats are converted to `kind` on reading.
    ///
    /// # Errors
    /// If no weights are there, or a file is truncated or no safetensors file.
    pub fn open(dir: &Path, expected: &'static str, device: Device, kind: Kind) -> Result<Self, ModelError> {
        Self::from_shards(dir, shard_paths(dir)?, expected, device, kind)
    }

    /// Opens one safetensors file of any name.
    ///
    /// # Errors
    /// If the file is truncated or no safetensors file.
    pub fn open_file(
        path: &Path,
        expected: &'static str,
        device: Device,
        kind: Kind,
    ) -> Result<Self, ModelError> {
        Self::from_shards(path, vec![path.to_path_buf()], expected, device, kind)
    }

    fn from_shards(
        dir: &Path,
        paths: Vec<PathBuf>,
        expected: &'static str,
        device: Device,
        kind: Kind,
    ) -> Result<Self, ModelError> {
        let (mut shards, mut tensors) = (vec![], BTreeMap::new());
        for path in paths {
            let (shard, header) = open_shard(&path)?;
            for (name, info) in header.tensors() {
                tensors.insert(name, (shards.len(), info.clone()));
            }
            shards.push(shard);
        }
        let unread = RefCell::new(tensors.keys().cloned().collect());
        Ok(Self { dir: dir.to_path_buf(), expected, shards, tensors, unread, device, kind })
    }

    /// Values of all tensors together, read or not.
    pub fn values(&self) -> usize {
        self.tensors.values().map(|(_, info)| info.shape.iter().product::<usize>()).sum()
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Names that were never asked for.
    pub fn unread(&self) -> Vec<String> {
        self.unread.borrow().clone()
    }

    /// Reads a tensor of the given shape.
    ///
    /// # Errors
    /// If it is missing, has another shape or dtype, or cannot be read.
    pub fn get(&self, name: &str, shape: &[i64]) -> Result<Tensor, ModelError> {
        let missing = || ModelError::MissingTensor {
            path: self.dir.clone(),
            name: name.into(),
            expected: self.expected,
        };
        let (shard, info) = self.tensors.get(name).ok_or_else(missing)?;
        let found: Vec<i64> = info.shape.iter().map(|&n| n as i64).collect();
        if found != shape {
            return Err(ModelError::Shape {
                path: self.dir.clone(),
                name: name.into(),
                found,
                expected: shape.to_vec(),
            });
        }
        let shard = &self.shards[*shard];
        let kind = kind_of(info.dtype).ok_or_else(|| ModelError::NotAModel {
            path: shard.path.clone(),
            problem: format!("tensor `{name}` has dtype {:?}; expected a float or integer type", info.dtype),
        })?;
        let (start, end) = info.data_offsets;
        let mut bytes = vec![0; end - start];
        shard
            .file
            .read_exact_at(&mut bytes, shard.data_start + start as u64)
            .map_err(FileError::at("reading", &shard.path))?;
        self.unread.borrow_mut().retain(|unread| unread != name);
        let tensor = Tensor::from_data_size(&bytes, shape, kind).to_device(self.device);
        Ok(if kind == Kind::Int64 || kind == Kind::Int { tensor } else { tensor.to_kind(self.kind) })
    }
}

fn shard_paths(dir: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let (single, index) = (dir.join("model.safetensors"), dir.join("model.safetensors.index.json"));
    if !index.is_file() {
        if single.is_file() {
            return Ok(vec![single]);
        }
        let problem = "the folder has neither model.safetensors nor model.safetensors.index.json".into();
        return Err(ModelError::NotAModel { path: dir.to_path_buf(), problem });
    }
    let bad = |problem: &str| ModelError::NotAModel { path: index.clone(), problem: problem.into() };
    let json: Value = serde_json::from_str(&atomic::read_text(&index)?)
        .map_err(|error| bad(&format!("not valid JSON: {error}")))?;
    let map = json["weight_map"].as_object().ok_or_else(|| bad("expected a `weight_map` object"))?;
    let mut names: Vec<&str> = map.values().filter_map(Value::as_str).collect();
    names.sort_unstable();
    names.dedup();
    if let Some(outside) = names.iter().find(|name| name.contains('/')) {
        return Err(bad(&format!("shard `{outside}` lies outside the folder")));
    }
    Ok(names.into_iter().map(|name| dir.join(name)).collect())
}

fn open_shard(path: &Path) -> Result<(Shard, Metadata), ModelError> {
    let file = File::open(path).map_err(FileError::at("reading", path))?;
    let bad = |problem: String| ModelError::NotAModel { path: path.to_path_buf(), problem };
    let size = file.metadata().map_err(FileError::at("reading", path))?.len();
    let mut start = [0; 8];
    file.read_exact_at(&mut start, 0)
        .map_err(|_| bad(format!("{size} bytes are too few for a safetensors file")))?;
    let header_len = u64::from_le_bytes(start);
    if header_len > MAX_HEADER || header_len + 8 > size {
        return Err(bad(format!(
            "the header claims {header_len} bytes of a file of {size}; the file is truncated or no safetensors"
        )));
    }
    let mut buffer = vec![0; header_len as usize];
    file.read_exact_at(&mut buffer, 8).map_err(FileError::at("reading", path))?;
    let header: Metadata =
        serde_json::from_slice(&buffer).map_err(|error| bad(format!("bad safetensors header: {error}")))?;
    let data_start = 8 + header_len;
    let end = header.tensors().values().map(|info| info.data_offsets.1 as u64).max().unwrap_or(0);
    if data_start + end != size {
        return Err(bad(format!(
            "the header describes {} bytes, the file has {size}; it is truncated or damaged",
            data_start + end
        )));
    }
    Ok((Shard { path: path.to_path_buf(), file, data_start }, header))
}

fn kind_of(dtype: Dtype) -> Option<Kind> {
    Some(match dtype {
        Dtype::F64 => Kind::Double,
        Dtype::F32 => Kind::Float,
        Dtype::BF16 => Kind::BFloat16,
        Dtype::F16 => Kind::Half,
        Dtype::I64 => Kind::Int64,
        Dtype::I32 => Kind::Int,
        _ => return None,
    })
}

/// Writes tensors as one safetensors file, atomically, in the given kind and sorted by name. One tensor at a time is copied: beside a
/// model's training state there is no room for another.
///
/// # Errors
/// Any I/O failure, with the path.
pub fn save(path: &Path, tensors: &[(String, Tensor)], kind: Kind) -> Result<(), ModelError> {
    let dtype = if kind == Kind::BFloat16 { Dtype::BF16 } else { Dtype::F32 };
    let mut sorted: Vec<&(String, Tensor)> = tensors.iter().collect();
    sorted.sort_by(|a, b| a.0.cmp(&b.0));
    let mut end = 0;
    let info = |(name, tensor): &&(String, Tensor)| {
        let (start, shape) = (end, tensor.size().iter().map(|&n| n as usize).collect());
        end += tensor.numel() * kind.elt_size_in_bytes();
        (name.clone(), TensorInfo { dtype, shape, data_offsets: (start, end) })
    };
    let problem = |problem: String| ModelError::NotAModel { path: path.to_path_buf(), problem };
    let header =
        Metadata::new(None, sorted.iter().map(info).collect()).map_err(|e| problem(e.to_string()))?;
    let mut header = serde_json::to_vec(&header).map_err(|error| problem(error.to_string()))?;
    // The values that follow are aligned.
    header.resize(header.len().next_multiple_of(size_of::<u64>()), b' ');
    Ok(atomic::replace(path, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        sorted.iter().try_for_each(|(_, tensor)| file.write_all(&bytes(tensor, kind)))
    })?)
}

fn bytes(tensor: &Tensor, kind: Kind) -> Vec<u8> {
    let tensor = tensor.detach().to_device(Device::Cpu).to_kind(kind).contiguous();
    let mut data = vec![0; tensor.numel() * kind.elt_size_in_bytes()];
    tensor.copy_data_u8(&mut data, tensor.numel());
    data
}
