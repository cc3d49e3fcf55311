//! Matrices of a quantised weight: numbers, scales and zero points.

use safetensors::Dtype;

use crate::numbers::to_float32;
use crate::quantised::float8::e8m0;
use crate::{CheckpointError, Tensors, torch_dtype_name};

/// Dtypes of scales.
pub(crate) const SCALES: [Dtype; 4] = [Dtype::F32, Dtype::BF16, Dtype::F16, Dtype::F8_E8M0];
/// Bits of a word that small numbers are packed into.
const WORD_BITS: u32 = 32;

/// A matrix that is stored as one tensor.
#[derive(Debug)]
pub(crate) struct StoredMatrix {
    /// Name of the tensor.
    pub name: String,
    /// Dtype of the tensor.
    pub dtype: Dtype,
    /// Rows and columns.
    pub shape: [usize; 2],
    /// Whether the tensor is that of the transposed matrix.
    is_transposed: bool,
    /// How numbers are packed into int32 words; None for a tensor of the matrix's own shape.
    packing: Option<Packing>,
}

/// How unsigned numbers of a few bits are packed into int32 words, from the lowest bits on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packing {
    /// Bits per number: 4 or 8.
    pub bits: u32,
    /// The numbers of a word follow each other along this dimension.
    pub axis: Axis,
    /// Whether the numbers of a word alternate between its lower and its upper half, in AWQ's order.
    pub is_interleaved: bool,
    /// Whether each number is stored less one, as GPTQ stores zero points. GPTQModel subtracts from whole words, so that
    /// a 0 borrows from the next number. Adding to whole words undoes this.
    pub is_lowered: bool,
}

/// A dimension of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Axis {
    /// Down a column.
    Rows,
    /// Along a row.
    Columns,
}

impl StoredMatrix {
    /// A matrix of a given shape. The tensor of a single column, or of a single number, may have fewer dimensions.
    ///
    /// # Errors
    /// If the tensor is missing, or has another shape or none of the dtypes.
    pub fn new(
        tensors: &Tensors,
        name: String,
        shape: [usize; 2],
        dtypes: &[Dtype],
    ) -> Result<Self, CheckpointError> {
        let dtype = check(tensors, &name, &shape, dtypes)?;
        Ok(Self { name, dtype, shape, is_transposed: false, packing: None })
    }

    /// A matrix of a given shape whose numbers are packed.
    ///
    /// # Errors
    /// If the tensor is missing, or has another shape or dtype.
    pub fn packed(
        tensors: &Tensors,
        name: String,
        shape: [usize; 2],
        packing: Packing,
    ) -> Result<Self, CheckpointError> {
        let dtype = check(tensors, &name, &packing.words(shape), &[Dtype::I32])?;
        Ok(Self { name, dtype, shape, is_transposed: false, packing: Some(packing) })
    }

    /// The transposed matrix, which is stored as the same tensor.
    pub fn transposed(self) -> Self {
        let [rows, columns] = self.shape;
        Self { shape: [columns, rows], is_transposed: !self.is_transposed, ..self }
    }

    /// The numbers in row-major order.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(&self, tensors: &Tensors) -> Result<Vec<f32>, CheckpointError> {
        let bytes = tensors.stored_bytes(&self.name)?;
        let [rows, columns] = self.shape;
        let places = (0..rows * columns).map(|place| (place / columns, place % columns));
        if let Some(number) = self.packed_reader(&bytes) {
            return Ok(places.map(|(row, column)| number(row, column)).collect());
        }
        let stored = match self.dtype {
            Dtype::I8 => bytes.iter().map(|byte| f32::from(byte.cast_signed())).collect(),
            Dtype::F8_E8M0 => bytes.iter().map(|&byte| e8m0(byte)).collect(),
            float => to_float32(&bytes, float).unwrap_or_default(),
        };
        Ok(if self.is_transposed {
            places.map(|(row, column)| stored[column * rows + row]).collect()
        } else {
            stored
        })
    }

    /// Reads the number at a row and a column from the bytes of the tensor. None if they are not packed.
    pub fn packed_reader(&self, bytes: &[u8]) -> Option<impl Fn(usize, usize) -> f32 + Sync> {
        let Packing { bits, axis, is_interleaved, is_lowered } = self.packing?;
        let words = bytes.as_chunks::<4>().0;
        let stored = if self.is_transposed { [self.shape[1], self.shape[0]] } else { self.shape };
        let [_, width] = self.packing?.words(stored);
        let log2 = (WORD_BITS / bits).ilog2();
        let lanes = 1_usize << log2;
        // A one in every number of a word.
        let ones = u32::MAX / ((1 << bits) - 1);
        let added = if is_lowered { ones } else { 0 };
        Some(move |row: usize, column: usize| {
            let (row, column) = if self.is_transposed { (column, row) } else { (row, column) };
            let (word, lane) = match axis {
                Axis::Rows => ((row >> log2) * width + column, row % lanes),
                Axis::Columns => (row * width + (column >> log2), column % lanes),
            };
            let place = if is_interleaved { lane / 2 + lane % 2 * (lanes / 2) } else { lane };
            let word = u32::from_le_bytes(words[word]).wrapping_add(added);
            (word >> (bits * place as u32) & ((1 << bits) - 1)) as f32
        })
    }
}

impl Packing {
    /// Shape of the words of a matrix.
    fn words(self, [rows, columns]: [usize; 2]) -> [usize; 2] {
        let per_word = (WORD_BITS / self.bits) as usize;
        match self.axis {
            Axis::Rows => [rows.div_ceil(per_word), columns],
            Axis::Columns => [rows, columns.div_ceil(per_word)],
        }
    }
}

/// Rows and columns of the tensor `name`.
///
/// # Errors
/// If it has another number of dimensions, or no values.
pub(crate) fn matrix_shape(tensors: &Tensors, name: &str) -> Result<[usize; 2], CheckpointError> {
    let found = &tensors.required_metadata(name)?.shape;
    match found[..] {
        [rows, columns] if rows > 0 && columns > 0 => Ok([rows, columns]),
        _ => Err(tensors.error(name, format!("its shape is {found:?}; expected two dimensions"))),
    }
}

/// Checks shape and dtype of a tensor, and returns the dtype.
///
/// # Errors
/// If the tensor is missing, or has another shape or none of the dtypes.
pub(crate) fn check(
    tensors: &Tensors,
    name: &str,
    shape: &[usize],
    dtypes: &[Dtype],
) -> Result<Dtype, CheckpointError> {
    let found = tensors.required_metadata(name)?;
    if !dtypes.contains(&found.dtype) {
        let expected: Vec<String> = dtypes.iter().map(|&dtype| torch_dtype_name(dtype)).collect();
        let found = torch_dtype_name(found.dtype);
        return Err(tensors.error(name, format!("its dtype is {found}; expected {}", expected.join(" or "))));
    }
    if without_trailing_ones(&found.shape) != without_trailing_ones(shape) {
        let problem = format!("its shape is {:?}; weight and config want {shape:?}", found.shape);
        return Err(tensors.error(name, problem));
    }
    Ok(found.dtype)
}

fn without_trailing_ones(shape: &[usize]) -> &[usize] {
    &shape[..shape.iter().rposition(|&size| size != 1).map_or(0, |last| last + 1)]
}
