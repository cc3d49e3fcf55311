//! NVFP4: float4 (e2m1) in blocks of 16, each with a scale in float8 (e4m3), and one scale in float32 of the whole weight.
//!
//! A byte holds two numbers, the first one in its lower half.

use rayon::prelude::*;
use safetensors::Dtype;

use crate::quantised::float8::E4M3;
use crate::quantised::matrix::{StoredMatrix, check, matrix_shape};
use crate::quantised::mxfp4::E2M1;
use crate::{CheckpointError, Tensors};

/// Numbers that share a scale.
pub(crate) const BLOCK: usize = 16;
/// Bytes of a block's numbers.
const BLOCK_BYTES: usize = BLOCK / 2;
/// Minimum number of blocks that a thread expands.
const BLOCKS_PER_TASK: usize = 1024;

/// A weight `[rows, columns]` in NVFP4 of compressed-tensors: numbers q, scales s of blocks and a scale g of the weight. Its values are
/// `q·(s / g)`.
#[derive(Debug)]
pub(crate) struct Nvfp4Tensor {
    /// Name of q.
    numbers: String,
    /// Name of s.
    scales: String,
    /// g.
    global_scale: StoredMatrix,
    /// Rows of the weight.
    rows: usize,
    /// Blocks of a row.
    blocks: usize,
    /// Other tensors of the module, which quantise its inputs.
    unused: Vec<String>,
}

impl Nvfp4Tensor {
    /// The weight of a module with q `[rows, columns/2]` in the tensor `numbers`, s `[rows, columns/16]` in `weight_scale` and g `[1]` in
    /// `weight_global_scale`.
    ///
    /// # Errors
    /// If a tensor is missing, or has another shape or dtype.
    pub fn of_module(
        tensors: &Tensors,
        numbers: &str,
        module: &str,
        unused: Vec<String>,
    ) -> Result<Self, CheckpointError> {
        let [rows, bytes] = matrix_shape(tensors, numbers)?;
        if bytes % BLOCK_BYTES != 0 {
            let problem =
                format!("its rows have {} columns, which blocks of {BLOCK} do not divide", bytes * 2);
            return Err(tensors.error(numbers, problem));
        }
        let (blocks, scales) = (bytes / BLOCK_BYTES, format!("{module}.weight_scale"));
        check(tensors, numbers, &[rows, bytes], &[Dtype::U8])?;
        check(tensors, &scales, &[rows, blocks], &[Dtype::F8_E4M3])?;
        let global_scale = format!("{module}.weight_global_scale");
        let global_scale = StoredMatrix::new(tensors, global_scale, [1, 1], &[Dtype::F32])?;
        Ok(Self { numbers: numbers.into(), scales, global_scale, rows, blocks, unused })
    }

    /// Names of the stored tensors.
    pub fn parts(&self) -> impl Iterator<Item = &str> {
        [&self.numbers, &self.scales, &self.global_scale.name]
            .into_iter()
            .chain(&self.unused)
            .map(String::as_str)
    }

    /// Shape of the weight.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.blocks * BLOCK]
    }

    /// As `QuantisedTensor::values`.
    ///
    /// # Errors
    /// If a file cannot be read, or g is not above 0.
    pub fn values(&self, tensors: &Tensors) -> Result<Vec<u8>, CheckpointError> {
        let (numbers, scales) = (tensors.stored_bytes(&self.numbers)?, tensors.stored_bytes(&self.scales)?);
        let global_scale = self.global_scale.read(tensors)?.first().copied().unwrap_or_default();
        if !(global_scale.is_finite() && global_scale > 0.0) {
            let problem = format!("its value is {global_scale}; expected a number above 0");
            return Err(tensors.error(&self.global_scale.name, problem));
        }
        let mut values = vec![0; self.shape().iter().product::<usize>() * size_of::<f32>()];
        let places = values.as_chunks_mut::<4>().0.par_chunks_mut(BLOCK);
        let blocks = places.zip(numbers.as_chunks::<BLOCK_BYTES>().0).zip(&scales);
        blocks.with_min_len(BLOCKS_PER_TASK).for_each(|((places, numbers), &scale)| {
            let scale = E4M3[usize::from(scale)] / global_scale;
            for (place, value) in places.iter_mut().enumerate() {
                let number = numbers[place / 2] >> (place % 2 * 4) & 15;
                *value = (E2M1[usize::from(number)] * scale).to_le_bytes();
            }
        });
        Ok(values)
    }
}
