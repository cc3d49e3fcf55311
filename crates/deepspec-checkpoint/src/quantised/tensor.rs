//! A quantised weight, and its values in float32.

use rayon::prelude::*;
use safetensors::Dtype;

use crate::quantised::float8::E4M3;
use crate::quantised::matrix::StoredMatrix;
use crate::{CheckpointError, TensorMetadata, Tensors};

/// Minimum number of rows that a thread expands.
const ROWS_PER_TASK: usize = 32;

/// A weight `[rows, columns]` that is stored as numbers q with scales s: its values are `q·s`. A block of rows and
/// columns shares a scale.
#[derive(Debug)]
pub(crate) struct QuantisedTensor {
    /// q, in the shape of the weight.
    pub numbers: StoredMatrix,
    /// Rows and columns of a block. Blocks at the ends may be smaller.
    pub block: [usize; 2],
    /// s, a row per block of rows and a column per block of columns.
    pub scales: StoredMatrix,
    /// Other tensors of the module, which quantise its inputs and do not change its weight.
    pub unused: Vec<String>,
}

impl QuantisedTensor {
    /// Names of the stored tensors.
    pub fn parts(&self) -> impl Iterator<Item = &str> {
        let matrices = [&self.numbers, &self.scales].into_iter().map(|matrix| matrix.name.as_str());
        matrices.chain(self.unused.iter().map(String::as_str))
    }

    /// Metadata of the weight in float32.
    pub fn metadata(&self) -> TensorMetadata {
        let shape = self.numbers.shape.to_vec();
        let bytes = shape.iter().product::<usize>() * size_of::<f32>();
        TensorMetadata { dtype: Dtype::F32, shape, bytes }
    }

    /// The values, little-endian and row-major in float32, computed in float32.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn values(&self, tensors: &Tensors) -> Result<Vec<u8>, CheckpointError> {
        let scales = self.scales.read(tensors)?;
        let bytes = tensors.stored_bytes(&self.numbers.name)?;
        let columns = self.numbers.shape[1];
        Ok(self.expand(&scales, |row, column| E4M3[usize::from(bytes[row * columns + column])]))
    }

    /// The values of numbers and scales.
    fn expand(&self, scales: &[f32], number: impl Fn(usize, usize) -> f32 + Sync) -> Vec<u8> {
        let (blocks, columns) = (self.scales.shape[1], self.numbers.shape[1]);
        let block_of: Vec<usize> = (0..columns).map(|column| column / self.block[1]).collect();
        let mut values = vec![0; self.metadata().bytes];
        let rows = values.par_chunks_mut((columns * size_of::<f32>()).max(1));
        rows.with_min_len(ROWS_PER_TASK).enumerate().for_each(|(row, values)| {
            let scales = &scales[row / self.block[0] * blocks..][..blocks];
            for (column, value) in values.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                *value = (number(row, column) * scales[block_of[column]]).to_le_bytes();
            }
        });
        values
    }
}
