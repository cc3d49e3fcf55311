//! A quantised weight, and its values in float32.

use rayon::prelude::*;
use safetensors::Dtype;

use crate::quantised::float8::E4M3;
use crate::quantised::matrix::StoredMatrix;
use crate::quantised::mxfp4::Mxfp4Tensor;
use crate::quantised::nvfp4::Nvfp4Tensor;
use crate::{CheckpointError, TensorMetadata, Tensors};

/// Minimum number of rows that a thread expands.
const ROWS_PER_TASK: usize = 32;

/// A weight that is stored as small numbers with scales.
#[derive(Debug)]
pub(crate) enum QuantisedTensor {
    /// A matrix of integers or float8.
    Matrix(QuantisedMatrix),
    /// A matrix of float4, or the matrices of all experts.
    Mxfp4(Mxfp4Tensor),
    /// A matrix of float4 in smaller blocks, with a scale of the whole matrix.
    Nvfp4(Nvfp4Tensor),
}

impl QuantisedTensor {
    /// Names of the stored tensors.
    pub fn parts(&self) -> Vec<&str> {
        match self {
            Self::Matrix(matrix) => matrix.parts().collect(),
            Self::Mxfp4(tensor) => tensor.parts().to_vec(),
            Self::Nvfp4(tensor) => tensor.parts().collect(),
        }
    }

    /// Metadata of the weight in float32.
    pub fn metadata(&self) -> TensorMetadata {
        let shape = match self {
            Self::Matrix(matrix) => matrix.numbers.shape.to_vec(),
            Self::Mxfp4(tensor) => tensor.shape(),
            Self::Nvfp4(tensor) => tensor.shape().to_vec(),
        };
        let bytes = shape.iter().product::<usize>() * size_of::<f32>();
        TensorMetadata { dtype: Dtype::F32, shape, bytes }
    }

    /// The values, little-endian and row-major in float32, computed in float32.
    ///
    /// # Errors
    /// If a file cannot be read, a column belongs to no block, or the scale of a matrix is not above 0.
    pub fn values(&self, tensors: &Tensors) -> Result<Vec<u8>, CheckpointError> {
        match self {
            Self::Matrix(matrix) => matrix.values(tensors),
            Self::Mxfp4(tensor) => tensor.values(tensors),
            Self::Nvfp4(tensor) => tensor.values(tensors),
        }
    }
}

/// A weight `[rows, columns]` that is stored as numbers q with scales s and zero points z: its values are `(q - z)·s`. A
/// block of rows and columns shares a scale and a zero point.
#[derive(Debug)]
pub(crate) struct QuantisedMatrix {
    /// q, in the shape of the weight.
    pub numbers: StoredMatrix,
    /// Rows and columns of a block. Blocks at the ends may be smaller.
    pub block: [usize; 2],
    /// s, a row per block of rows and a column per block of columns.
    pub scales: StoredMatrix,
    /// z.
    pub zero_points: ZeroPoints,
    /// The block of each column; None if they are in order.
    pub group_index: Option<GroupIndex>,
    /// Other tensors of the module. They quantise its inputs or repeat its shape.
    pub unused: Vec<String>,
}

/// Zero points of a weight.
#[derive(Debug)]
pub(crate) enum ZeroPoints {
    /// One for all.
    Constant(f32),
    /// One for each scale.
    Stored(StoredMatrix),
}

/// The block of each column of a weight, for columns that were quantised in activation order.
#[derive(Debug)]
pub(crate) struct GroupIndex {
    /// The blocks, `[columns]` in int32.
    matrix: StoredMatrix,
    /// Whether -1 for every column means that they are in order, as in older versions of compressed-tensors.
    may_be_unset: bool,
}

impl GroupIndex {
    /// The tensor `name` with the blocks of that many columns.
    ///
    /// # Errors
    /// If the tensor is missing, or has another shape or dtype.
    pub fn new(tensors: &Tensors, name: String, columns: usize) -> Result<Self, CheckpointError> {
        let matrix = StoredMatrix::new(tensors, name, [columns, 1], &[Dtype::I32])?;
        Ok(Self { matrix, may_be_unset: false })
    }

    /// An index whose columns are in order if all are -1.
    pub fn or_unset(self) -> Self {
        Self { may_be_unset: true, ..self }
    }
}

impl QuantisedMatrix {
    /// Names of the stored tensors.
    fn parts(&self) -> impl Iterator<Item = &str> {
        let zero_points = match &self.zero_points {
            ZeroPoints::Stored(matrix) => Some(matrix),
            ZeroPoints::Constant(_) => None,
        };
        let index = self.group_index.as_ref().map(|index| &index.matrix);
        let matrices = [&self.numbers, &self.scales].into_iter().chain(zero_points).chain(index);
        matrices.map(|matrix| &matrix.name).chain(&self.unused).map(String::as_str)
    }

    /// As [`QuantisedTensor::values`].
    fn values(&self, tensors: &Tensors) -> Result<Vec<u8>, CheckpointError> {
        let scales = self.scales.read(tensors)?;
        let zero_points = match &self.zero_points {
            ZeroPoints::Constant(zero_point) => vec![*zero_point; scales.len()],
            ZeroPoints::Stored(matrix) => matrix.read(tensors)?,
        };
        let blocks = Blocks { scales, zero_points, of_column: self.blocks_of_columns(tensors)? };
        let bytes = tensors.stored_bytes(&self.numbers.name)?;
        let columns = self.numbers.shape[1];
        if let Some(number) = self.numbers.packed_reader(&bytes) {
            return Ok(self.expand(&blocks, number));
        }
        let byte = |row: usize, column: usize| bytes[row * columns + column];
        Ok(match self.numbers.dtype {
            Dtype::I8 => self.expand(&blocks, |row, column| f32::from(byte(row, column).cast_signed())),
            _ => self.expand(&blocks, |row, column| E4M3[usize::from(byte(row, column))]),
        })
    }

    /// The block of each column.
    fn blocks_of_columns(&self, tensors: &Tensors) -> Result<Vec<usize>, CheckpointError> {
        let (columns, blocks) = (self.numbers.shape[1], self.scales.shape[1]);
        let in_order = || (0..columns).map(|column| column / self.block[1]).collect();
        let Some(GroupIndex { matrix: index, may_be_unset }) = &self.group_index else {
            return Ok(in_order());
        };
        let bytes = tensors.stored_bytes(&index.name)?;
        let words = bytes.as_chunks::<4>().0.iter().map(|&word| i32::from_le_bytes(word));
        if *may_be_unset && words.clone().all(|block| block == -1) {
            return Ok(in_order());
        }
        let read = |block: i32| usize::try_from(block).ok().filter(|block| *block < blocks).ok_or(block);
        words.map(read).collect::<Result<_, i32>>().map_err(|block| {
            tensors.error(&index.name, format!("it has the group {block}; the weight has {blocks} groups"))
        })
    }

    fn expand(&self, blocks: &Blocks, number: impl Fn(usize, usize) -> f32 + Sync) -> Vec<u8> {
        let width = self.scales.shape[1];
        let [rows, columns] = self.numbers.shape;
        let mut values = vec![0; rows * columns * size_of::<f32>()];
        let rows = values.par_chunks_mut((columns * size_of::<f32>()).max(1));
        rows.with_min_len(ROWS_PER_TASK).enumerate().for_each(|(row, values)| {
            let first = row / self.block[0] * width;
            let scales = &blocks.scales[first..first + width];
            let zero_points = &blocks.zero_points[first..first + width];
            let places = values.as_chunks_mut::<4>().0.iter_mut().zip(&blocks.of_column);
            for (column, (value, &block)) in places.enumerate() {
                *value = ((number(row, column) - zero_points[block]) * scales[block]).to_le_bytes();
            }
        });
        values
    }
}

/// Scales and zero points of blocks, row by row, and the block within its row of each column.
struct Blocks {
    scales: Vec<f32>,
    zero_points: Vec<f32>,
    of_column: Vec<usize>,
}
