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
    /// How numbers are packed into int32 words; None for a tensor of the matrix's own shape.
    pub packing: Option<Packing>,
}

/// How unsigned numbers of a few bits are packed into int32 words, from the lowest bits on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packing {
    /// Bits per number: 4 or 8.
    pub bits: u32,
    /// The numbers of a word follow each other along this dimension.
    pub axis: Axis,
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
        let dtype = check(tensors, &name, shape, dtypes)?;
        Ok(Self { name, dtype, shape, packing: None })
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
        let dtype = check(tensors, &name, packing.words(shape), &[Dtype::I32])?;
        Ok(Self { name, dtype, shape, packing: Some(packing) })
    }

    /// The numbers in row-major order.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(&self, tensors: &Tensors) -> Result<Vec<f32>, CheckpointError> {
        let bytes = tensors.stored_bytes(&self.name)?;
        if let Some(packing) = self.packing {
            let (number, [rows, columns]) = (packing.reader(self.shape, &bytes), self.shape);
            return Ok((0..rows * columns).map(|place| number(place / columns, place % columns)).collect());
        }
        Ok(match self.dtype {
            Dtype::I8 => bytes.iter().map(|byte| f32::from(byte.cast_signed())).collect(),
            Dtype::F8_E8M0 => bytes.iter().map(|&byte| e8m0(byte)).collect(),
            float => to_float32(&bytes, float).unwrap_or_default(),
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

    /// Reads the number at a row and a column from the bytes of a matrix of the given shape.
    pub fn reader(self, shape: [usize; 2], bytes: &[u8]) -> impl Fn(usize, usize) -> f32 + Sync {
        let words = bytes.as_chunks::<4>().0;
        let [_, width] = self.words(shape);
        let log2 = (WORD_BITS / self.bits).ilog2();
        let (row_log2, column_log2) = if self.axis == Axis::Rows { (log2, 0) } else { (0, log2) };
        let lane = (1 << log2) - 1;
        move |row, column| {
            let word = u32::from_le_bytes(words[(row >> row_log2) * width + (column >> column_log2)]);
            let place = if row_log2 > 0 { row } else { column } & lane;
            (word >> (self.bits * place as u32) & ((1 << self.bits) - 1)) as f32
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
fn check(
    tensors: &Tensors,
    name: &str,
    shape: [usize; 2],
    dtypes: &[Dtype],
) -> Result<Dtype, CheckpointError> {
    let found = tensors.required_metadata(name)?;
    if !dtypes.contains(&found.dtype) {
        let expected: Vec<String> = dtypes.iter().map(|&dtype| torch_dtype_name(dtype)).collect();
        let found = torch_dtype_name(found.dtype);
        return Err(tensors.error(name, format!("its dtype is {found}; expected {}", expected.join(" or "))));
    }
    if without_trailing_ones(&found.shape) != without_trailing_ones(&shape) {
        let problem = format!("its shape is {:?}; weight and config want {shape:?}", found.shape);
        return Err(tensors.error(name, problem));
    }
    Ok(found.dtype)
}

fn without_trailing_ones(shape: &[usize]) -> &[usize] {
    &shape[..shape.iter().rposition(|&size| size != 1).map_or(0, |last| last + 1)]
}
