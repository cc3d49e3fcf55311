//! Writes GGUF files.

use std::io::{self, Write};

use crate::gguf::{ALIGNMENT_BYTES, MAGIC};

const VERSION: u32 = 3;

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// An unsigned 32-bit integer.
    U32(u32),
    /// A 32-bit float.
    F32(f32),
    /// A boolean.
    Bool(bool),
    /// A string.
    Text(String),
    /// A list of integers.
    Integers(Vec<i32>),
    /// A list of strings.
    Texts(Vec<String>),
}

impl Value {
    /// Type id in the file format.
    fn type_id(&self) -> u32 {
        match self {
            Self::U32(_) => 4,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::Text(_) => 8,
            Self::Integers(_) | Self::Texts(_) => 9,
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::U32(value) => out.extend(value.to_le_bytes()),
            Self::F32(value) => out.extend(value.to_le_bytes()),
            Self::Bool(value) => out.push(u8::from(*value)),
            Self::Text(value) => write_text(out, value),
            Self::Integers(values) => {
                write_list_header(out, 5, values.len());
                values.iter().for_each(|value| out.extend(value.to_le_bytes()));
            }
            Self::Texts(values) => {
                write_list_header(out, 8, values.len());
                values.iter().for_each(|value| write_text(out, value));
            }
        }
    }
}

/// Writes the type and length of a list.
fn write_list_header(out: &mut Vec<u8>, kind: u32, length: usize) {
    out.extend(kind.to_le_bytes());
    out.extend((length as u64).to_le_bytes());
}

fn write_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Type of a tensor's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorType {
    /// float32.
    F32,
    /// float16.
    F16,
    /// bfloat16.
    Bf16,
    /// int64, for token ids.
    I64,
}

impl TensorType {
    /// Type id in the file format.
    fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::I64 => 27,
            Self::Bf16 => 30,
        }
    }

    /// Bytes per value.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::I64 => 8,
        }
    }

    /// Value of `general.file_type` for a file whose matrices have this type.
    pub fn file_type(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Bf16 => 32,
            // llama.cpp's value for "not told".
            Self::I64 => 1024,
        }
    }
}

/// A tensor to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Name.
    pub name: String,
    /// Type.
    pub kind: TensorType,
    /// Dimensions, slowest first, as in safetensors and PyTorch.
    pub shape: Vec<usize>,
}

impl Tensor {
    /// Bytes of the data.
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.kind.bytes()
    }
}

/// The content of a GGUF file to write.
#[derive(Default)]
pub struct Writer {
    entries: Vec<(String, Value)>,
    tensors: Vec<Tensor>,
}

impl Writer {
    /// Adds a metadata entry.
    pub fn put(&mut self, key: &str, value: Value) {
        self.entries.push((key.into(), value));
    }

    /// Adds metadata entries.
    pub fn extend(&mut self, entries: impl IntoIterator<Item = (String, Value)>) {
        self.entries.extend(entries);
    }

    /// Adds a tensor; its data are requested when the file is written.
    pub fn tensor(&mut self, tensor: Tensor) {
        self.tensors.push(tensor);
    }

    /// Writes the file. `data` returns the bytes of the tensor with a given index, little-endian
    /// and row-major.
    ///
    /// # Errors
    /// Fails if writing fails, if `data` fails, or if it returns a wrong number of bytes.
    pub fn write(
        &self,
        out: &mut impl Write,
        mut data: impl FnMut(usize, &Tensor) -> io::Result<Vec<u8>>,
    ) -> io::Result<()> {
        let mut head = MAGIC.to_vec();
        head.extend(VERSION.to_le_bytes());
        head.extend((self.tensors.len() as u64).to_le_bytes());
        head.extend((self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            write_text(&mut head, key);
            head.extend(value.type_id().to_le_bytes());
            value.write(&mut head);
        }
        let mut offset: u64 = 0;
        for tensor in &self.tensors {
            write_text(&mut head, &tensor.name);
            head.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|&size| head.extend((size as u64).to_le_bytes()));
            head.extend(tensor.kind.id().to_le_bytes());
            head.extend(offset.to_le_bytes());
            offset += (tensor.bytes() as u64).next_multiple_of(ALIGNMENT_BYTES);
        }
        let length = head.len() as u64;
        head.resize(length.next_multiple_of(ALIGNMENT_BYTES) as usize, 0);
        out.write_all(&head)?;
        for (number, tensor) in self.tensors.iter().enumerate() {
            let mut bytes = data(number, tensor)?;
            if bytes.len() != tensor.bytes() {
                let told = format!(
                    "{} has {} bytes of data instead of {}",
                    tensor.name,
                    bytes.len(),
                    tensor.bytes()
                );
                return Err(io::Error::new(io::ErrorKind::InvalidData, told));
            }
            bytes.resize(bytes.len().next_multiple_of(ALIGNMENT_BYTES as usize), 0);
            out.write_all(&bytes)?;
        }
        Ok(())
    }
}
