//! MXFP4 of the OCP Microscaling Formats: float4 (e2m1) in blocks of 32, each with a scale that is a power of two (e8m0).
//!
//! A byte holds two numbers, the first one in its lower half. Every value is exact in bfloat16.
//!
//! gpt-oss stores the experts' weights, which are `[experts, in, out]` in the model, by rows of `out`:
//! `X_blocks [experts, out, in/32, 16]` and `X_scales [experts, out, in/32]`.

use rayon::prelude::*;
use safetensors::Dtype;

use crate::quantised::QuantisedTensor;
use crate::quantised::float8::e8m0;
use crate::quantised::matrix::{check, matrix_shape};
use crate::{CheckpointError, Tensors};

/// Numbers that share a scale.
pub(crate) const BLOCK: usize = 32;
/// Bytes of a block's numbers.
const BLOCK_BYTES: usize = BLOCK / 2;
/// Dtypes of bytes that hold two numbers each.
pub(crate) const NUMBERS: [Dtype; 2] = [Dtype::U8, Dtype::I8];
/// Dtypes of scales.
const SCALES: [Dtype; 2] = [Dtype::U8, Dtype::F8_E8M0];
/// The number of each half of a byte: sign, two bits of exponent and one of mantissa.
pub(crate) const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
/// Minimum number of blocks that a thread expands.
const BLOCKS_PER_TASK: usize = 1024;

/// The values of an MXFP4 tensor `[…, columns]` in float32, row-major. `numbers` are its bytes `[…, columns/2]`, and `scales`
/// those of its scales `[…, columns/32]`. None if there are not 16 bytes of numbers per scale.
pub fn mxfp4_to_float32(numbers: &[u8], scales: &[u8]) -> Option<Vec<f32>> {
    let (blocks, rest) = numbers.as_chunks::<BLOCK_BYTES>();
    let fits = rest.is_empty() && blocks.len() == scales.len();
    let values = || blocks.par_iter().zip(scales).with_min_len(BLOCKS_PER_TASK).flat_map_iter(decode);
    fits.then(|| values().collect())
}

/// The values of a block.
fn decode((numbers, &scale): (&[u8; BLOCK_BYTES], &u8)) -> [f32; BLOCK] {
    let scale = e8m0(scale);
    std::array::from_fn(|place| E2M1[usize::from(numbers[place / 2] >> (place % 2 * 4) & 15)] * scale)
}

/// Settings of `quant_method: mxfp4`: none, since the tensors say all.
#[derive(Debug)]
pub(crate) struct Mxfp4;

impl Mxfp4 {
    /// The quantised weight whose numbers are the tensor `name`, and the plain weight's name. None for every other tensor:
    /// plain weights, scales, biases.
    ///
    /// # Errors
    /// If the scales are missing, or a tensor has another shape or dtype.
    pub fn find(
        &self,
        tensors: &Tensors,
        name: &str,
    ) -> Result<Option<(String, QuantisedTensor)>, CheckpointError> {
        let Some(plain) = name.strip_suffix("_blocks") else { return Ok(None) };
        let scales = format!("{plain}_scales");
        let weight = Mxfp4Tensor::experts(tensors, name.into(), scales)?;
        Ok(Some((plain.into(), QuantisedTensor::Mxfp4(weight))))
    }
}

/// A weight in MXFP4.
#[derive(Debug)]
pub(crate) struct Mxfp4Tensor {
    /// Name of the numbers.
    numbers: String,
    /// Name of the scales.
    scales: String,
    /// Number of experts; None for a single matrix.
    experts: Option<usize>,
    /// Rows of a stored matrix.
    rows: usize,
    /// Blocks of a row.
    blocks: usize,
}

impl Mxfp4Tensor {
    /// The weight `[rows, columns]` with numbers `[rows, columns/2]` and scales `[rows, columns/32]`.
    ///
    /// # Errors
    /// If a tensor is missing, or has another shape or dtype.
    pub fn matrix(tensors: &Tensors, numbers: String, scales: String) -> Result<Self, CheckpointError> {
        let [rows, bytes] = matrix_shape(tensors, &numbers)?;
        if bytes % BLOCK_BYTES != 0 {
            let problem =
                format!("its rows have {} columns, which blocks of {BLOCK} do not divide", bytes * 2);
            return Err(tensors.error(&numbers, problem));
        }
        let blocks = bytes / BLOCK_BYTES;
        check(tensors, &numbers, &[rows, bytes], &NUMBERS)?;
        check(tensors, &scales, &[rows, blocks], &SCALES)?;
        Ok(Self { numbers, scales, experts: None, rows, blocks })
    }

    /// The weights `[experts, columns, rows]` of gpt-oss, whose matrices are stored as `[rows, columns]`.
    ///
    /// # Errors
    /// If a tensor is missing, or has another shape or dtype.
    fn experts(tensors: &Tensors, numbers: String, scales: String) -> Result<Self, CheckpointError> {
        let shape = &tensors.required_metadata(&numbers)?.shape;
        let &[experts, rows, blocks, BLOCK_BYTES] = &shape[..] else {
            let problem = format!(
                "its shape is {shape:?}; expected [experts, outputs, inputs / {BLOCK}, {BLOCK_BYTES}]"
            );
            return Err(tensors.error(&numbers, problem));
        };
        if experts * rows * blocks == 0 {
            return Err(tensors.error(&numbers, format!("its shape is {shape:?}; expected no zeros")));
        }
        check(tensors, &numbers, shape, &[Dtype::U8])?;
        check(tensors, &scales, &[experts, rows, blocks], &SCALES)?;
        Ok(Self { numbers, scales, experts: Some(experts), rows, blocks })
    }

    /// Names of the stored tensors.
    pub fn parts(&self) -> [&str; 2] {
        [&self.numbers, &self.scales]
    }

    /// Shape of the weight.
    pub fn shape(&self) -> Vec<usize> {
        let columns = self.blocks * BLOCK;
        match self.experts {
            Some(experts) => vec![experts, columns, self.rows],
            None => vec![self.rows, columns],
        }
    }

    /// As [`QuantisedTensor::values`].
    pub fn values(&self, tensors: &Tensors) -> Result<Vec<u8>, CheckpointError> {
        let (numbers, scales) = (tensors.stored_bytes(&self.numbers)?, tensors.stored_bytes(&self.scales)?);
        let numbers = numbers.as_chunks::<BLOCK_BYTES>().0;
        let mut values = vec![0; self.shape().iter().product::<usize>() * size_of::<f32>()];
        let places = values.as_chunks_mut::<4>().0;
        if self.experts.is_none() {
            let blocks = places.par_chunks_mut(BLOCK).zip(numbers).zip(&scales);
            blocks.with_min_len(BLOCKS_PER_TASK).for_each(|((places, numbers), scale)| {
                for (place, value) in places.iter_mut().zip(decode((numbers, scale))) {
                    *place = value.to_le_bytes();
                }
            });
            return Ok(values);
        }
        // A task transposes a column of blocks, which is a band of rows of the weight.
        let bands = places.par_chunks_mut(BLOCK * self.rows);
        bands.enumerate().for_each(|(band, places)| {
            let (expert, block) = (band / self.blocks, band % self.blocks);
            for row in 0..self.rows {
                let stored = (expert * self.rows + row) * self.blocks + block;
                for (column, value) in decode((&numbers[stored], &scales[stored])).into_iter().enumerate() {
                    places[column * self.rows + row] = value.to_le_bytes();
                }
            }
        });
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lower_half_of_a_byte_is_first() {
        let mut numbers = [0; 2 * BLOCK_BYTES];
        numbers[0] = 0x72;
        numbers[BLOCK_BYTES + 15] = 0x9f;
        let values = mxfp4_to_float32(&numbers, &[127, 125]).unwrap();
        assert_eq!((values[0], values[1], values[62], values[63]), (1.0, 6.0, -1.5, -0.125));
        assert_eq!(values.iter().filter(|value| **value != 0.0).count(), 4);
        assert_eq!(mxfp4_to_float32(&numbers, &[127]), None);
        assert_eq!(mxfp4_to_float32(&numbers[1..], &[127, 127]), None);
        // Powers of two that are subnormal in float32, and no number.
        let smallest = mxfp4_to_float32(&[0x11; BLOCK_BYTES], &[0]).unwrap();
        assert_eq!(smallest[31], 2.0_f32.powi(-128));
        assert!(mxfp4_to_float32(&[0x11; BLOCK_BYTES], &[255]).unwrap()[0].is_nan());
    }
}
