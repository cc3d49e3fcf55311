//! Float8 weights with a scale per block, row or tensor, as DeepSeek-V3 and Qwen3-FP8 have them.

use safetensors::Dtype;

use crate::quantised::matrix::{SCALES, StoredMatrix, matrix_shape};
use crate::quantised::module::{WEIGHT, present, read_block};
use crate::quantised::tensor::{QuantisedMatrix, QuantisedTensor, ZeroPoints};
use crate::{CheckpointError, Fields, Tensors};

/// Endings of the scales by which the weights are multiplied. `_inv` is the inverse of the factor of the quantisation.
const SCALE_NAMES: [&str; 2] = [".weight_scale_inv", ".weight_scale"];
/// Endings of the scales of a module's inputs.
const INPUT_SCALE_NAMES: [&str; 2] = [".input_scale", ".activation_scale"];

/// Settings of `quant_method: fp8`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fp8 {
    /// Rows and columns that share a scale; None for a scale per tensor or per row.
    block: Option<[usize; 2]>,
}

impl Fp8 {
    /// Reads `quantization_config`.
    ///
    /// # Errors
    /// If a key is malformed or is not supported.
    pub fn read(fields: &Fields) -> Result<Self, CheckpointError> {
        fields.require_text_if_present("fmt", "e4m3")?;
        Ok(Self { block: read_block(fields, "weight_block_size")? })
    }

    /// The quantised weight whose numbers are the tensor `name`. None for every other tensor: plain weights, scales, biases.
    ///
    /// # Errors
    /// If the scales are missing or do not fit.
    pub fn find(
        &self,
        tensors: &Tensors,
        name: &str,
    ) -> Result<Option<(String, QuantisedTensor)>, CheckpointError> {
        let facts = tensors.required_metadata(name)?;
        let Some(module) = name.strip_suffix(WEIGHT).filter(|_| facts.dtype == Dtype::F8_E4M3) else {
            return Ok(None);
        };
        let [rows, columns] = matrix_shape(tensors, name)?;
        let numbers = StoredMatrix::new(tensors, name.into(), [rows, columns], &[Dtype::F8_E4M3])?;
        let scale = SCALE_NAMES.map(|ending| format!("{module}{ending}"));
        let scale = scale.iter().find(|name| tensors.get(name).is_some()).unwrap_or(&scale[0]).clone();
        let per_row = tensors.get(&scale).is_some_and(|found| found.shape.iter().product::<usize>() != 1);
        let block = self.block.unwrap_or([if per_row { 1 } else { rows }, columns]);
        let grid = [rows.div_ceil(block[0]), columns.div_ceil(block[1])];
        let scales = StoredMatrix::new(tensors, scale, grid, &SCALES)?;
        let unused = present(tensors, module, &INPUT_SCALE_NAMES);
        let zero_points = ZeroPoints::Constant(0.0);
        let weight = QuantisedMatrix { numbers, block, scales, zero_points, group_index: None, unused };
        Ok(Some((name.into(), QuantisedTensor::Matrix(weight))))
    }
}
