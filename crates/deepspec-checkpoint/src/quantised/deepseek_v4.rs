//! Weights of the drafter within a DeepSeek-V4: float8 in blocks of 128 rows and columns, and MXFP4 for the experts. The scales of
//! `X.weight` are `X.scale`, and are powers of two (e8m0).

use safetensors::Dtype;

use crate::quantised::matrix::{StoredMatrix, matrix_shape};
use crate::quantised::module::WEIGHT;
use crate::quantised::mxfp4::{Mxfp4Tensor, NUMBERS};
use crate::quantised::tensor::{QuantisedMatrix, QuantisedTensor, ZeroPoints};
use crate::{CheckpointError, Fields, Tensors};

/// Rows and columns of float8 weights that share a scale.
const BLOCK: [usize; 2] = [128, 128];

/// The scheme; dtypes say which weights are quantised, and how.
#[derive(Debug)]
pub(crate) struct DeepseekV4;

impl DeepseekV4 {
    /// The scheme of a config.
    ///
    /// # Errors
    /// If its blocks are not of 128 rows and columns.
    pub fn read(config: &Fields) -> Result<Self, CheckpointError> {
        const KEY: &str = "weight_block_size";
        let Some(scheme) = config.object("quantization_config")? else { return Ok(Self) };
        match scheme.integers(KEY)? {
            Some(found) if found != BLOCK.map(|size| size as i64) => {
                Err(scheme.error(KEY, format!("{found:?} is not supported; expected {BLOCK:?}")))
            }
            _ => Ok(Self),
        }
    }

    /// The quantised weight whose numbers are the tensor `name`. None for every other tensor.
    ///
    /// # Errors
    /// If the scales are missing or do not fit.
    pub fn find(
        &self,
        tensors: &Tensors,
        name: &str,
    ) -> Result<Option<(String, QuantisedTensor)>, CheckpointError> {
        let Some(module) = name.strip_suffix(WEIGHT) else { return Ok(None) };
        let (dtype, scales) = (tensors.required_metadata(name)?.dtype, format!("{module}.scale"));
        if NUMBERS.contains(&dtype) {
            let weight = Mxfp4Tensor::matrix(tensors, name.into(), scales)?;
            return Ok(Some((name.into(), QuantisedTensor::Mxfp4(weight))));
        }
        if dtype != Dtype::F8_E4M3 {
            return Ok(None);
        }
        let shape = matrix_shape(tensors, name)?;
        let numbers = StoredMatrix::new(tensors, name.into(), shape, &[Dtype::F8_E4M3])?;
        let grid = [shape[0].div_ceil(BLOCK[0]), shape[1].div_ceil(BLOCK[1])];
        let scales = StoredMatrix::new(tensors, scales, grid, &[Dtype::F8_E8M0])?;
        let weight = QuantisedMatrix {
            numbers,
            block: BLOCK,
            scales,
            zero_points: ZeroPoints::Constant(0.0),
            group_index: None,
            unused: vec![],
        };
        Ok(Some((name.into(), QuantisedTensor::Matrix(weight))))
    }
}
