//! Reads GGUF files. No length in the header may exceed the file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::gguf::blocks::BlockType;
use crate::gguf::{ALIGNMENT_BYTES, GgufError, MAGIC};

/// Maximum number of dimensions of a tensor.
const MAX_DIMENSIONS: u32 = 4;
/// Maximum number of values of all lists together. A vocabulary with its token types, scores and
/// merges has a million or two.
const MAX_LIST_VALUES: usize = 1 << 23;
/// Maximum bytes of all strings together. A vocabulary with its merges has a few million.
const MAX_STRING_BYTES: usize = 1 << 28;
/// Maximum alignment of tensor data, in bytes.
const MAX_ALIGNMENT: i64 = 1 << 20;
/// Minimum bytes of a metadata entry: key length, type and value.
const MIN_ENTRY_BYTES: u64 = 8 + 4 + 1;
/// Minimum bytes of a tensor's description.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 4 + 8;

/// A metadata value of any stored width.
#[derive(Debug, Clone, PartialEq)]
pub enum Entry {
    /// An integer.
    Integer(i64),
    /// A float.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// A string.
    Text(String),
    /// A list of any of these types.
    List(Vec<Entry>),
}

impl Entry {
    fn text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    fn describe(&self) -> String {
        match self {
            Self::Integer(value) => value.to_string(),
            Self::Float(value) => value.to_string(),
            Self::Bool(value) => value.to_string(),
            Self::Text(_) => "a text".into(),
            Self::List(_) => "a list".into(),
        }
    }
}

/// Type, shape and location of a tensor.
#[derive(Debug, Clone)]
pub struct TensorInfo {
    /// Quantisation type.
    pub kind: &'static BlockType,
    /// Dimensions, slowest first.
    pub shape: Vec<usize>,
    start: u64,
    bytes: usize,
}

impl TensorInfo {
    /// Number of values.
    pub fn values(&self) -> usize {
        self.bytes / self.kind.bytes * self.kind.values
    }
}

/// An open GGUF file.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    file: File,
    entries: BTreeMap<String, Entry>,
    tensors: BTreeMap<String, TensorInfo>,
}

impl GgufFile {
    /// Reads the header of a file.
    ///
    /// # Errors
    /// Fails if the file cannot be read, is no GGUF of version 2 or 3, or is one part of a split
    /// model. Fails if the file is shorter than its header says.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let io =
            |error: std::io::Error| GgufError { path: path.into(), problem: format!("reading it: {error}") };
        let file = File::open(path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        let mut head = HeaderReader { path, input: BufReader::new(&file), read: 0, size, values: 0, text: 0 };
        let (entries, mut tensors) = head.read()?;
        let alignment = match entries.get("general.alignment") {
            None => ALIGNMENT_BYTES,
            Some(&Entry::Integer(alignment @ 1..=MAX_ALIGNMENT)) if alignment % 8 == 0 => alignment as u64,
            Some(_) => {
                return Err(
                    head.error(format!("`general.alignment` is no multiple of 8 up to {MAX_ALIGNMENT}"))
                );
            }
        };
        if entries.get("split.count").is_some_and(|count| *count != Entry::Integer(1)) {
            let problem = "one part of several; join them first (llama-gguf-split --merge FIRST_PART WHOLE)";
            return Err(head.error(problem));
        }
        let data = head.read.next_multiple_of(alignment);
        for (name, tensor) in &mut tensors {
            let bad = |problem: String| GgufError {
                path: path.into(),
                problem: format!("tensor `{name}`: {problem}"),
            };
            if tensor.start % alignment != 0 {
                return Err(bad(format!("its offset {} is no multiple of {alignment}", tensor.start)));
            }
            let start = data.checked_add(tensor.start);
            let end = start.and_then(|start| start.checked_add(tensor.bytes as u64));
            let Some(start) = start.filter(|_| end.is_some_and(|end| end <= size)) else {
                let (bytes, offset) = (tensor.bytes, tensor.start);
                let problem = format!(
                    "{bytes} bytes from {offset} on are more than the file's {size} hold; is it truncated?"
                );
                return Err(bad(problem));
            };
            tensor.start = start;
        }
        Ok(Self { path: path.into(), file, entries, tensors })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// An error about this file.
    pub fn error(&self, problem: impl Into<String>) -> GgufError {
        GgufError { path: self.path.clone(), problem: problem.into() }
    }

    /// Tensors by name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    /// Metadata by key.
    pub fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }

    /// A metadata value.
    pub fn entry(&self, key: &str) -> Option<&Entry> {
        self.entries.get(key)
    }

    fn read_typed<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl Fn(&Entry) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(entry) = self.entries.get(key) else { return Ok(None) };
        let wrong = || self.error(format!("`{key}`: {}; expected {expected}", entry.describe()));
        read(entry).ok_or_else(wrong).map(Some)
    }

    /// A non-negative integer; None if the key is missing.
    ///
    /// # Errors
    /// Fails if the value has another type.
    pub fn count(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.read_typed(key, "an integer of 0 or more", |entry| match entry {
            Entry::Integer(value) => u64::try_from(*value).ok(),
            _ => None,
        })
    }

    /// A float; None if the key is missing.
    ///
    /// # Errors
    /// Fails if the value has another type or is not finite.
    pub fn float(&self, key: &str) -> Result<Option<f64>, GgufError> {
        self.read_typed(key, "a finite float", |entry| match entry {
            Entry::Float(value) if value.is_finite() => Some(*value),
            _ => None,
        })
    }

    /// A boolean; None if the key is missing.
    ///
    /// # Errors
    /// Fails if the value has another type.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.read_typed(key, "true or false", |entry| match entry {
            Entry::Bool(value) => Some(*value),
            _ => None,
        })
    }

    /// A string; None if the key is missing.
    ///
    /// # Errors
    /// Fails if the value has another type.
    pub fn text(&self, key: &str) -> Result<Option<String>, GgufError> {
        self.read_typed(key, "a text", |entry| match entry {
            Entry::Text(text) => Some(text.clone()),
            _ => None,
        })
    }

    /// A list of strings; None if the key is missing.
    ///
    /// # Errors
    /// Fails if the value has another type.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<&str>>, GgufError> {
        let Some(entry) = self.entries.get(key) else { return Ok(None) };
        let wrong = || self.error(format!("`{key}`: expected a list of texts"));
        let Entry::List(list) = entry else { return Err(wrong()) };
        list.iter().map(Entry::text).collect::<Option<_>>().ok_or_else(wrong).map(Some)
    }

    /// A list of integers; None if the key is missing.
    ///
    /// # Errors
    /// Fails if the value has another type.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<i64>>, GgufError> {
        self.read_typed(key, "a list of integers", |entry| match entry {
            Entry::List(list) => list
                .iter()
                .map(|entry| if let Entry::Integer(value) = entry { Some(*value) } else { None })
                .collect(),
            _ => None,
        })
    }

    /// Unwraps the value of a required key.
    ///
    /// # Errors
    /// Fails if the key is missing.
    pub fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, GgufError> {
        value.ok_or_else(|| self.error(format!("`{key}` is missing")))
    }

    /// Values of a tensor, row-major and little-endian. Float types are returned as stored;
    /// quantised types are dequantised to float32.
    ///
    /// # Errors
    /// Fails if the tensor is missing or the file cannot be read.
    pub fn values(&self, name: &str) -> Result<Vec<u8>, GgufError> {
        let missing = || self.error(format!("tensor `{name}` is missing"));
        let tensor = self.tensors.get(name).ok_or_else(missing)?;
        let mut stored = vec![0; tensor.bytes];
        let read = self.file.read_exact_at(&mut stored, tensor.start);
        read.map_err(|error| self.error(format!("reading tensor `{name}`: {error}")))?;
        Ok(tensor.kind.dequantise(stored))
    }
}

/// Reads the header of a file.
struct HeaderReader<'a> {
    path: &'a Path,
    input: BufReader<&'a File>,
    read: u64,
    size: u64,
    /// Number of list values so far.
    values: usize,
    /// Bytes of strings so far.
    text: usize,
}

type Header = (BTreeMap<String, Entry>, BTreeMap<String, TensorInfo>);

impl HeaderReader<'_> {
    fn error(&self, problem: impl Into<String>) -> GgufError {
        GgufError { path: self.path.into(), problem: problem.into() }
    }

    /// Parses the header; tensor offsets are relative to the end of the header.
    fn read(&mut self) -> Result<Header, GgufError> {
        if self.size < MAGIC.len() as u64 || &self.read_array::<4>("magic")? != MAGIC {
            return Err(self.error("not a GGUF file: it does not begin with `GGUF`"));
        }
        let version = self.u32("version")?;
        if !matches!(version, 2 | 3) {
            return Err(self.error(match version.swap_bytes() {
                2 | 3 => "a big-endian GGUF; convert it to little-endian".into(),
                _ => format!("GGUF version {version}; expected 2 or 3"),
            }));
        }
        let tensors = self.read_count("number of tensors", MIN_TENSOR_BYTES)?;
        let count = self.read_count("number of metadata entries", MIN_ENTRY_BYTES)?;
        let mut entries = BTreeMap::new();
        for _ in 0..count {
            let key = self.text("a key")?;
            let kind = self.u32(&key)?;
            let value = self.value(&key, kind, true)?;
            if entries.insert(key.clone(), value).is_some() {
                return Err(self.error(format!("`{key}` is there twice")));
            }
        }
        let mut found = BTreeMap::new();
        for _ in 0..tensors {
            let name = self.text("a tensor's name")?;
            let tensor = self.tensor(&name)?;
            if found.insert(name.clone(), tensor).is_some() {
                return Err(self.error(format!("tensor `{name}` is there twice")));
            }
        }
        Ok((entries, found))
    }

    fn tensor(&mut self, name: &str) -> Result<TensorInfo, GgufError> {
        let dimensions = self.u32(name)?;
        if dimensions > MAX_DIMENSIONS {
            return Err(self.error(format!(
                "tensor `{name}` has {dimensions} dimensions; at most {MAX_DIMENSIONS} are read"
            )));
        }
        let mut shape = vec![];
        for _ in 0..dimensions {
            shape.push(self.u64(name)?);
        }
        let id = self.u32(name)?;
        let start = self.u64(name)?;
        let Some(kind) = BlockType::from_id(id) else {
            let known: Vec<&str> = BlockType::all().map(|kind| kind.name).collect();
            let kind = BlockType::unsupported_name(id).map_or_else(|| id.to_string(), str::to_string);
            let problem = format!(
                "tensor `{name}` is of type {kind}, which is not read; give a file quantised to one of {}",
                known.join(", ")
            );
            return Err(self.error(problem));
        };
        if shape.contains(&0) {
            return Err(self.error(format!("tensor `{name}` has a dimension of 0")));
        }
        let row = *shape.first().unwrap_or(&1);
        if row % kind.values as u64 != 0 {
            return Err(self.error(format!(
                "tensor `{name}`: rows of {row} values are no whole blocks of {}",
                kind.name
            )));
        }
        let values = shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size));
        let bytes = values.and_then(|values| (values / kind.values as u64).checked_mul(kind.bytes as u64));
        let Some(bytes) = bytes.filter(|&bytes| bytes <= self.size) else {
            return Err(self.error(format!("tensor `{name}` of {shape:?} values is larger than the file")));
        };
        shape.reverse();
        let shape = shape.into_iter().map(|size| size as usize).collect();
        Ok(TensorInfo { kind, shape, start, bytes: bytes as usize })
    }

    fn value(&mut self, key: &str, kind: u32, may_be_list: bool) -> Result<Entry, GgufError> {
        Ok(match kind {
            0 => Entry::Integer(self.read_array::<1>(key)?[0].into()),
            1 => Entry::Integer(i8::from_le_bytes(self.read_array(key)?).into()),
            2 => Entry::Integer(u16::from_le_bytes(self.read_array(key)?).into()),
            3 => Entry::Integer(i16::from_le_bytes(self.read_array(key)?).into()),
            4 => Entry::Integer(self.u32(key)?.into()),
            5 => Entry::Integer(i32::from_le_bytes(self.read_array(key)?).into()),
            // Parses the float's shortest decimal form, which restores 1e-5 from 9.99999974738e-6.
            6 => Entry::Float(
                f32::from_le_bytes(self.read_array(key)?).to_string().parse().unwrap_or(f64::NAN),
            ),
            7 => match self.read_array::<1>(key)?[0] {
                0 => Entry::Bool(false),
                1 => Entry::Bool(true),
                other => return Err(self.error(format!("`{key}`: {other} is neither true nor false"))),
            },
            8 => Entry::Text(self.text(key)?),
            9 if may_be_list => {
                let kind = self.u32(key)?;
                let shortest = match kind {
                    0 | 1 | 7 => 1,
                    2 | 3 => 2,
                    4..=6 => 4,
                    _ => 8,
                };
                let length = self.read_count(key, shortest)?;
                self.values += length;
                if self.values > MAX_LIST_VALUES {
                    return Err(
                        self.error(format!("`{key}`: lists of more than {MAX_LIST_VALUES} values together"))
                    );
                }
                let values = (0..length).map(|_| self.value(key, kind, false));
                Entry::List(values.collect::<Result<_, _>>()?)
            }
            9 => return Err(self.error(format!("`{key}` is a list of lists; expected values"))),
            10 => match i64::try_from(self.u64(key)?) {
                Ok(value) => Entry::Integer(value),
                Err(_) => return Err(self.error(format!("`{key}` is larger than {}", i64::MAX))),
            },
            11 => Entry::Integer(i64::from_le_bytes(self.read_array(key)?)),
            12 => Entry::Float(f64::from_le_bytes(self.read_array(key)?)),
            other => return Err(self.error(format!("`{key}` is of type {other}, which GGUF does not have"))),
        })
    }

    fn read_array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, what)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8], what: &str) -> Result<(), GgufError> {
        if let Err(error) = self.input.read_exact(bytes) {
            return Err(self.error(format!("it ends or fails within its head, at {what}: {error}")));
        }
        self.read += bytes.len() as u64;
        Ok(())
    }

    fn u32(&mut self, what: &str) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.read_array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.read_array(what)?))
    }

    /// Reads a count of items that take at least `each` bytes.
    fn read_count(&mut self, what: &str, each: u64) -> Result<usize, GgufError> {
        let length = self.u64(what)?;
        let most = self.size.saturating_sub(self.read) / each;
        if length > most {
            return Err(self.error(format!(
                "{what}: {length} cannot be, the file has room for {most}; is it truncated?"
            )));
        }
        Ok(length as usize)
    }

    fn text(&mut self, what: &str) -> Result<String, GgufError> {
        let length = self.read_count(what, 1)?;
        self.text = self.text.saturating_add(length);
        if self.text > MAX_STRING_BYTES {
            return Err(self.error(format!("{what}: texts of more than {MAX_STRING_BYTES} bytes together")));
        }
        let mut bytes = vec![0; length];
        self.fill(&mut bytes, what)?;
        String::from_utf8(bytes).map_err(|_| self.error(format!("{what}: a text that is not UTF-8")))
    }
}
