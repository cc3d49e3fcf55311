//! Writes safetensors files from tensors of several sources.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use deepspec_core::VERSION;
use deepspec_core::atomic::FileError;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::json;

use crate::shards::{split_into_shards, write_index_beside};
use crate::{CheckpointError, Tensors};

/// Beginning of the names of weights files beside those of another checkpoint. llama.cpp's converter reads names with `model` only.
pub const BESIDE_OTHERS: &str = "model-mtp";

/// Source of the bytes of a tensor to write.
pub enum TensorSource<'a> {
    /// The tensor of this name in another checkpoint.
    Copy(&'a Tensors, String),
    /// These bytes of the tensor of this name in another checkpoint.
    Part(&'a Tensors, String, Range<usize>),
    /// The bytes themselves.
    Bytes(Vec<u8>),
    /// Bytes that are computed while the file is written, and their number.
    Computed(usize, Box<dyn Fn() -> Result<Vec<u8>, CheckpointError> + 'a>),
    /// Several sources, one behind the other.
    Joined(Vec<TensorSource<'a>>),
}

impl TensorSource<'_> {
    fn byte_len(&self) -> Result<usize, CheckpointError> {
        match self {
            Self::Copy(tensors, name) => Ok(tensors.required_metadata(name)?.bytes),
            Self::Part(_, _, bytes) => Ok(bytes.len()),
            Self::Bytes(bytes) => Ok(bytes.len()),
            Self::Computed(bytes, _) => Ok(*bytes),
            Self::Joined(sources) => sources.iter().map(Self::byte_len).sum(),
        }
    }

    /// Writes the bytes to `out`, the file `path`.
    fn write(&self, out: &mut impl Write, path: &Path) -> Result<(), CheckpointError> {
        let mut put = |bytes: &[u8]| out.write_all(bytes).map_err(FileError::at("writing", path));
        match self {
            Self::Copy(tensors, name) => tensors.copy_bytes(name, None, out),
            Self::Part(tensors, name, bytes) => tensors.copy_bytes(name, Some(bytes.clone()), out),
            Self::Bytes(bytes) => Ok(put(bytes)?),
            Self::Computed(_, bytes) => Ok(put(&bytes()?)?),
            Self::Joined(sources) => sources.iter().try_for_each(|source| source.write(out, path)),
        }
    }
}

/// A tensor to write.
pub struct TensorToWrite<'a> {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub source: TensorSource<'a>,
}

/// Writes the weights of a checkpoint into the new folder `dir` and syncs the files, which have at
/// most `max_bytes` bytes. Tensors are ordered by dtype, widest first, then by name, like in the
/// safetensors packages.
pub fn write_weights(
    dir: &Path,
    tensors: &mut [TensorToWrite],
    max_bytes: usize,
) -> Result<(), CheckpointError> {
    write_weights_beside(dir, tensors, max_bytes, &[])
}

/// As [`write_weights`], beside `other` weights files of the folder. The index lists their tensors, too, and the new files are called
/// [`BESIDE_OTHERS`] and not `model`.
pub fn write_weights_beside(
    dir: &Path,
    tensors: &mut [TensorToWrite],
    max_bytes: usize,
    other: &[(PathBuf, Tensors)],
) -> Result<(), CheckpointError> {
    tensors.sort_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));
    let sizes = tensors.iter().map(|tensor| tensor.source.byte_len()).collect::<Result<Vec<_>, _>>()?;
    let mut shards = split_into_shards(&sizes, max_bytes);
    if !other.is_empty() {
        shards.iter_mut().for_each(|shard| shard.name = shard.name.replacen("model", BESIDE_OTHERS, 1));
    }
    for shard in &shards {
        write_file(&dir.join(&shard.name), &tensors[shard.tensors.clone()])?;
    }
    let names: Vec<(&str, usize)> =
        tensors.iter().zip(sizes).map(|(tensor, size)| (tensor.name.as_str(), size)).collect();
    let other = other.iter().flat_map(|(path, tensors)| {
        let file = file_name(path);
        tensors.iter().map(move |(name, facts)| (name, file.clone(), facts.bytes))
    });
    let other: Vec<_> = other.collect();
    Ok(write_index_beside(dir, &shards, &names, &other)?)
}

/// The name of a file without its folder.
pub fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

fn write_file(path: &Path, tensors: &[TensorToWrite]) -> Result<(), CheckpointError> {
    let (mut infos, mut end) = (vec![], 0);
    for tensor in tensors.iter() {
        let start = end;
        end += tensor.source.byte_len()?;
        let info =
            TensorInfo { dtype: tensor.dtype, shape: tensor.shape.clone(), data_offsets: (start, end) };
        infos.push((tensor.name.clone(), info));
    }
    let bad = |problem: String| CheckpointError::NotADrafter { path: path.to_path_buf(), problem };
    let header = Metadata::new(None, infos).map_err(|error| bad(error.to_string()))?;
    let mut header = serde_json::to_value(&header).map_err(|error| bad(error.to_string()))?;
    // Readers of PyTorch checkpoints require the `format` key.
    header["__metadata__"] = json!({"format": "pt", "tool": format!("deepspec {VERSION}")});
    let mut header = header.to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');

    let mut out = BufWriter::new(File::create(path).map_err(FileError::at("writing", path))?);
    let mut put = |bytes: &[u8]| out.write_all(bytes).map_err(FileError::at("writing", path));
    put(&(header.len() as u64).to_le_bytes())?;
    put(&header)?;
    for tensor in tensors.iter() {
        tensor.source.write(&mut out, path)?;
    }
    let finish = || -> io::Result<()> {
        out.flush()?;
        out.get_ref().sync_all()
    };
    let mut finish = finish;
    Ok(finish().map_err(FileError::at("writing", path))?)
}
