//! Tensors of a checkpoint by name, from one safetensors file or several.

use std::cell::RefCell;
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

use deepspec_checkpoint::{
    Tensors, is_readable, quantised_dtype_message, quantised_folder_message, split_into_shards, write_index,
};
use deepspec_core::atomic;
use deepspec_ops::HOST;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use tch::{Device, Kind, Tensor};

use crate::ModelError;
use crate::config::read_json;

/// Number of values per write.
const VALUES_PER_WRITE: usize = 4 << 20;

/// A tensor `[rows, input]` per layer that holds several weights, one behind the other.
pub(crate) struct FusedTensor {
    /// Name within the layer.
    pub name: &'static str,
    /// The weights, in order.
    pub parts: Vec<Part>,
}

/// A weight within a [`FusedTensor`].
pub(crate) struct Part {
    /// Name within the layer.
    pub name: &'static str,
    /// Number of rows.
    pub rows: i64,
    /// Order in which the rows of every block of this many rows are read; None keeps the order.
    pub block_order: Option<Vec<i64>>,
}

/// Tensors of a checkpoint, read one by one on request.
pub struct Weights {
    tensors: Tensors,
    /// Class of the model that is loaded, for messages.
    expected: String,
    unread: RefCell<Vec<String>>,
    device: Device,
    /// Dtype to which floats are converted on reading; `None` keeps that of the file.
    kind: Option<Kind>,
    fused: Vec<FusedTensor>,
}

impl Weights {
    /// Opens `dir/model.safetensors`, or the shards named by `dir/model.safetensors.index.json`, or `dir/model.gguf`. Floats are converted to `kind` on reading.
    ///
    /// # Errors
    /// If `dir` has no weights, the weights are quantised, or a file is truncated or no safetensors file.
    pub fn open(
        dir: &Path,
        expected: impl Into<String>,
        device: Device,
        kind: Kind,
    ) -> Result<Self, ModelError> {
        if let Some(problem) =
            read_json(dir).ok().and_then(|(_, config)| quantised_folder_message(dir, &config))
        {
            return Err(ModelError::NotAModel { path: dir.to_path_buf(), problem });
        }
        Ok(Self::from_tensors(Tensors::open(dir)?, expected.into(), device, Some(kind)))
    }

    /// As [`Weights::open`], for a target. Quantised weights are computed in float32 when they are read, and then converted
    /// to `kind`.
    ///
    /// # Errors
    /// If `dir` has no weights, they are quantised in a way that is not read, or a file is truncated or no safetensors file.
    pub fn open_target(
        dir: &Path,
        expected: impl Into<String>,
        device: Device,
        kind: Kind,
    ) -> Result<Self, ModelError> {
        Ok(Self::from_tensors(Tensors::open_target(dir)?, expected.into(), device, Some(kind)))
    }

    /// Opens a target whose layers may be missing or of any format, to read other tensors. Floats keep their dtype, and
    /// quantised weights become float32.
    ///
    /// # Errors
    /// If no weights are there, a file is truncated or no safetensors file, or a quantised tensor outside the layers is
    /// damaged: its scales are missing, or do not fit.
    pub fn open_outer_tensors(
        dir: &Path,
        expected: impl Into<String>,
        device: Device,
    ) -> Result<Self, ModelError> {
        Ok(Self::from_tensors(Tensors::open_target_present(dir)?, expected.into(), device, None))
    }

    /// Opens one safetensors file of any name.
    ///
    /// # Errors
    /// If the file is truncated or no safetensors file.
    pub fn open_file(
        path: &Path,
        expected: impl Into<String>,
        device: Device,
        kind: Kind,
    ) -> Result<Self, ModelError> {
        Ok(Self::from_tensors(Tensors::open_file(path)?, expected.into(), device, Some(kind)))
    }

    fn from_tensors(tensors: Tensors, expected: String, device: Device, kind: Option<Kind>) -> Self {
        let unread = RefCell::new(tensors.iter().map(|(name, _)| name.to_string()).collect());
        Self { tensors, expected, unread, device, kind, fused: vec![] }
    }

    /// Lets [`Weights::get`] find the parts of fused tensors by name.
    pub(crate) fn split_fused(&mut self, fused: Vec<FusedTensor>) {
        self.fused = fused;
    }

    /// The fused tensor that holds the weight `name`: its name, its shape, the first row of the part, and the part. None if
    /// the weight has its own tensor, or there is no fused one.
    fn find_fused(&self, name: &str, shape: &[i64]) -> Option<(String, [i64; 2], i64, &Part)> {
        if self.contains(name) {
            return None;
        }
        self.fused.iter().find_map(|fused| {
            let index = fused.parts.iter().position(|part| name.ends_with(part.name))?;
            let part = &fused.parts[index];
            let whole = format!("{}{}", name.strip_suffix(part.name)?, fused.name);
            let rows = |parts: &[Part]| parts.iter().map(|part| part.rows).sum::<i64>();
            let size = [rows(&fused.parts), *shape.get(1)?];
            self.contains(&whole).then(|| (whole, size, rows(&fused.parts[..index]), part))
        })
    }

    /// Number of values of all tensors.
    pub fn value_count(&self) -> usize {
        self.tensors.iter().map(|(_, facts)| facts.shape.iter().product::<usize>()).sum()
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.get(name).is_some()
    }

    /// Reads all values and checks that none is NaN or infinite.
    ///
    /// # Errors
    /// The first tensor with such a value.
    pub fn check_finite(&self) -> Result<(), ModelError> {
        Ok(self.tensors.check_finite()?)
    }

    /// Name of a similar tensor, for an error message: `name` with another prefix, or a quantised weight of the
    /// module.
    fn find_similar_name(&self, name: &str) -> Option<String> {
        let within = name.strip_prefix("model.").unwrap_or(name);
        let module = name.strip_suffix("weight").unwrap_or(name);
        let is_like = |other: &&str| {
            other.strip_suffix(within).is_some_and(|before| before.ends_with('.'))
                || (other.starts_with(module) && (other.ends_with("qweight") || other.ends_with("_blocks")))
        };
        self.tensors.iter().map(|(other, _)| other).find(is_like).map(str::to_owned)
    }

    /// Names of tensors that were not read.
    pub fn unread_names(&self) -> Vec<String> {
        self.unread.borrow().clone()
    }

    /// Whether the tensor is the bias of a quantised weight, with zeros only, so that a model without it computes the same.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn is_zero_bias(&self, name: &str) -> Result<bool, ModelError> {
        Ok(self.tensors.is_zero_bias(name)?)
    }

    /// Reads a tensor of the given shape.
    ///
    /// # Errors
    /// If it is missing, has another shape or dtype, or cannot be read.
    pub fn get(&self, name: &str, shape: &[i64]) -> Result<Tensor, ModelError> {
        let Some((whole, size, first, part)) = self.find_fused(name, shape) else {
            return Ok(self.to_own_kind(self.get_whole(name, shape)?));
        };
        let own = self.to_own_kind(self.get_stored(&whole, &size, first..first + part.rows)?);
        Ok(match &part.block_order {
            Some(order) => {
                let blocks = own.view([-1, order.len() as i64, size[1]]);
                blocks.index_select(1, &Tensor::from_slice(order).to_device(own.device())).view_as(&own)
            }
            None => own,
        })
    }

    /// As [`Weights::get`], in float32 whatever the dtype of the others.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub(crate) fn get_float32(&self, name: &str, shape: &[i64]) -> Result<Tensor, ModelError> {
        Ok(self.get_whole(name, shape)?.to_kind(Kind::Float))
    }

    /// Converts a tensor of the file to the dtype of this reader.
    fn to_own_kind(&self, tensor: Tensor) -> Tensor {
        match self.kind {
            Some(wanted) if !matches!(tensor.kind(), Kind::Int64 | Kind::Int) => tensor.to_kind(wanted),
            _ => tensor,
        }
    }

    /// Reads all rows of a tensor of the given shape, in the dtype of the file.
    fn get_whole(&self, name: &str, shape: &[i64]) -> Result<Tensor, ModelError> {
        self.get_stored(name, shape, 0..shape.first().copied().unwrap_or(1))
    }

    /// Reads the `rows` of a tensor of the given shape, along its first dimension, in the dtype of the file.
    fn get_stored(&self, name: &str, shape: &[i64], rows: Range<i64>) -> Result<Tensor, ModelError> {
        self.tensors.check_readable(name)?;
        let path = || self.tensors.dir().to_path_buf();
        let missing = || ModelError::MissingTensor {
            path: path(),
            name: name.into(),
            expected: self.expected.clone(),
            like: self.find_similar_name(name),
        };
        let facts = self.tensors.get(name).ok_or_else(missing)?;
        let found: Vec<i64> = facts.shape.iter().map(|&n| n as i64).collect();
        if found != shape {
            return Err(ModelError::Shape {
                path: path(),
                name: name.into(),
                found,
                expected: shape.to_vec(),
            });
        }
        let readable = dtype_to_kind(facts.dtype).filter(|_| is_readable(name, facts.dtype));
        let kind = readable.ok_or_else(|| ModelError::NotAModel {
            path: path(),
            problem: format!("tensor `{name}`: {}", quantised_dtype_message(facts.dtype)),
        })?;
        let bytes = self.tensors.bytes(name)?;
        self.unread.borrow_mut().retain(|unread| unread != name);
        let mut size = shape.to_vec();
        let mut bytes = &bytes[..];
        if let Some(count) = size.first_mut().filter(|count| **count != rows.end - rows.start) {
            let row = bytes.len() / *count as usize;
            bytes = &bytes[rows.start as usize * row..rows.end as usize * row];
            *count = rows.end - rows.start;
        }
        Ok(Tensor::from_data_size(bytes, &size, kind).to_device(self.device))
    }
}

fn dtype_to_kind(dtype: Dtype) -> Option<Kind> {
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

/// Writes tensors as one safetensors file, atomically, floats in the given dtype, and sorted by name. One tensor at a time is copied to the host.
///
/// # Errors
/// Any I/O failure, with the path.
pub fn save(path: &Path, tensors: &[(String, Tensor)], kind: Kind) -> Result<(), ModelError> {
    write_safetensors(path, &sorted_by_name(tensors), kind)
}

/// Writes the weights of a checkpoint into the empty folder `dir`: as `model.safetensors`, or as shards with an index above `most`
/// bytes.
///
/// # Errors
/// Any I/O failure, with the path.
pub fn save_checkpoint(
    dir: &Path,
    tensors: &[(String, Tensor)],
    kind: Kind,
    most: usize,
) -> Result<(), ModelError> {
    let sorted = sorted_by_name(tensors);
    let sizes: Vec<usize> = sorted.iter().map(|(_, tensor)| tensor_bytes(tensor, kind)).collect();
    let shards = split_into_shards(&sizes, most);
    for shard in &shards {
        write_safetensors(&dir.join(&shard.name), &sorted[shard.tensors.clone()], kind)?;
    }
    let names: Vec<(&str, usize)> =
        sorted.iter().zip(sizes).map(|((name, _), size)| (name.as_str(), size)).collect();
    Ok(write_index(dir, &shards, &names)?)
}

fn sorted_by_name(tensors: &[(String, Tensor)]) -> Vec<&(String, Tensor)> {
    let mut sorted: Vec<&(String, Tensor)> = tensors.iter().collect();
    sorted.sort_by(|a, b| a.0.cmp(&b.0));
    sorted
}

fn tensor_bytes(tensor: &Tensor, kind: Kind) -> usize {
    tensor.numel() * stored_kind(tensor, kind).elt_size_in_bytes()
}

/// Dtype of a tensor in a file whose floats are `kind`: integers stay as they are.
fn stored_kind(tensor: &Tensor, kind: Kind) -> Kind {
    if tensor.kind() == Kind::Int64 { Kind::Int64 } else { kind }
}

fn write_safetensors(path: &Path, tensors: &[&(String, Tensor)], kind: Kind) -> Result<(), ModelError> {
    let mut end = 0;
    let info = |(name, tensor): &&(String, Tensor)| {
        let dtype = match stored_kind(tensor, kind) {
            Kind::Int64 => Dtype::I64,
            Kind::BFloat16 => Dtype::BF16,
            _ => Dtype::F32,
        };
        let (start, shape) = (end, tensor.size().iter().map(|&n| n as usize).collect());
        end += tensor_bytes(tensor, kind);
        (name.clone(), TensorInfo { dtype, shape, data_offsets: (start, end) })
    };
    let problem = |problem: String| ModelError::NotAModel { path: path.to_path_buf(), problem };
    let header =
        Metadata::new(None, tensors.iter().map(info).collect()).map_err(|e| problem(e.to_string()))?;
    let mut header = serde_json::to_vec(&header).map_err(|error| problem(error.to_string()))?;
    // The header ends at a multiple of 8 bytes, which aligns the values.
    header.resize(header.len().next_multiple_of(size_of::<u64>()), b' ');
    Ok(atomic::replace(path, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        tensors.iter().try_for_each(|(_, tensor)| write_values(file, tensor, kind))
    })?)
}

/// Writes values piece by piece, without a copy of a whole embedding.
fn write_values(file: &mut impl Write, tensor: &Tensor, kind: Kind) -> io::Result<()> {
    let flat = tensor.detach().contiguous().view(-1);
    (0..flat.numel()).step_by(VALUES_PER_WRITE).try_for_each(|first| {
        let length = VALUES_PER_WRITE.min(flat.numel() - first);
        let piece =
            flat.narrow(0, first as i64, length as i64).to_device(HOST).to_kind(stored_kind(tensor, kind));
        let mut data = vec![0; tensor_bytes(&piece, kind)];
        piece.copy_data_u8(&mut data, length);
        file.write_all(&data)
    })
}
