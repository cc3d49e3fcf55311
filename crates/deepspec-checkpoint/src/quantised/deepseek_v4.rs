//! Weights of the drafter within a DeepSeek-V4: float8 in blocks of 128 rows and columns, and MXFP4 for the experts. The scales of
//! `X.weight` are `X.scale`, and are powers of two (e8m0).

use safetensors::Dtype;

use crate::quantised::matrix::{StoredMatrix, matrix_shape};
use crate::quantised::module::WEIGHT;
use crate::quantised::mxfp4::{Mxfp4Tensor, NUMBERS};
use crate::quantised::tensor::{QuantisedMatrix, QuantisedTensor, ZeroPoints};
use crate::{CheckpointError, Fields, Tensors};

/// Rows and columns of float8 weights that share a scale.
pub(crate) const BLOCK: [usize; 2] = [128, 128];
/// Key of the blocks' sizes.
const BLOCK_KEY: &str = "weight_block_size";
/// Key of the scheme.
const SCHEME: &str = "quantization_config";

/// The scheme; dtypes say which weights are quantised, and how.
#[derive(Debug)]
pub(crate) struct DeepseekV4;

impl DeepseekV4 {
    /// The scheme of a config.
    ///
    /// # Errors
    /// If its blocks are not of 128 rows and columns.
    pub fn read(config: &Fields) -> Result<Self, CheckpointError> {
        let Some(scheme) = config.object(SCHEME)? else { return Ok(Self) };
        match scheme.integers(BLOCK_KEY)? {
            Some(found) if found != BLOCK.map(|size| size as i64) => {
                Err(scheme.error(BLOCK_KEY, format!("{found:?} is not supported; expected {BLOCK:?}")))
            }
            _ => Ok(Self),
        }
    }

    /// Whether engines expect quantised weights of the drafter within a target with this config. They read float8 with such scales, and
    /// MXFP4 for the experts.
    ///
    /// # Errors
    /// If they expect other ones.
    pub fn is_expected(config: &Fields) -> Result<bool, CheckpointError> {
        let Some(scheme) = config.object(SCHEME)? else { return Ok(false) };
        let method = "quant_method";
        scheme.required(method, scheme.text(method)?)?;
        for (key, expected) in
            [(method, "fp8"), ("fmt", "e4m3"), ("scale_fmt", "ue8m0"), ("moe_quant_algo", "MXFP4")]
        {
            scheme.require_text_if_present(key, expected)?;
        }
        Self::read(config)?;
        scheme.required(BLOCK_KEY, scheme.integers(BLOCK_KEY)?)?;
        config.require_text_if_present("expert_dtype", "fp4")?;
        for key in ["modules_to_not_convert", "ignored_layers"] {
            if scheme.texts(key)?.is_some_and(|names| !names.is_empty()) {
                let problem = "expected none: a drafter is written with all matrices quantised";
                return Err(scheme.error(key, problem));
            }
        }
        Ok(true)
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
