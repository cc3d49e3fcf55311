//! Writes safetensors files from tensors of several sources.

use std::fs::File;
use std::io::{self, BufWriter, Write};
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
    /// The bytes themselves.
    Bytes(Vec<u8>),
    /// Bytes that are computed while the file is written, and their number.
    Computed(usize, Box<dyn Fn() -> Result<Vec<u8>, CheckpointError> + 'a>),
}

/// A tensor to write.
pub struct TensorToWrite<'a> {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub source: TensorSource<'a>,
}

impl TensorToWrite<'_> {
    fn byte_len(&self) -> Result<usize, CheckpointError> {
        match &self.source {
            TensorSource::Copy(tensors, name) => Ok(tensors.required_metadata(name)?.bytes),
            TensorSource::Bytes(bytes) => Ok(bytes.len()),
            TensorSource::Computed(bytes, _) => Ok(*bytes),
        }
    }
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
    let sizes = tensors.iter().map(TensorToWrite::byte_len).collect::<Result<Vec<_>, _>>()?;
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
        end += tensor.byte_len()?;
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
        match &tensor.source {
            TensorSource::Copy(tensors, name) => tensors.copy_bytes(name, &mut out)?,
            TensorSource::Bytes(bytes) => out.write_all(bytes).map_err(FileError::at("writing", path))?,
            TensorSource::Computed(_, bytes) => {
                out.write_all(&bytes()?).map_err(FileError::at("writing", path))?;
            }
        }
    }
    let finish = || -> io::Result<()> {
        out.flush()?;
        out.get_ref().sync_all()
    };
    let mut finish = finish;
    Ok(finish().map_err(FileError::at("writing", path))?)
}
