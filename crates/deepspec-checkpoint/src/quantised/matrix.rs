//! Matrices of a quantised weight: numbers and scales.

use safetensors::Dtype;

use crate::numbers::to_float32;
use crate::quantised::float8::e8m0;
use crate::{CheckpointError, Tensors, torch_dtype_name};

/// Dtypes of scales.
pub(crate) const SCALES: [Dtype; 4] = [Dtype::F32, Dtype::BF16, Dtype::F16, Dtype::F8_E8M0];

/// A matrix that is stored as one tensor.
#[derive(Debug)]
pub(crate) struct StoredMatrix {
    /// Name of the tensor.
    pub name: String,
    /// Dtype of the tensor.
    dtype: Dtype,
    /// Rows and columns.
    pub shape: [usize; 2],
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
        let found = tensors.required_metadata(&name)?;
        if !dtypes.contains(&found.dtype) {
            let expected: Vec<String> = dtypes.iter().map(|&dtype| torch_dtype_name(dtype)).collect();
            let found = torch_dtype_name(found.dtype);
            return Err(
                tensors.error(&name, format!("its dtype is {found}; expected {}", expected.join(" or ")))
            );
        }
        if without_trailing_ones(&found.shape) != without_trailing_ones(&shape) {
            let problem = format!("its shape is {:?}; weight and config want {shape:?}", found.shape);
            return Err(tensors.error(&name, problem));
        }
        Ok(Self { name, dtype: found.dtype, shape })
    }

    /// The numbers in row-major order.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(&self, tensors: &Tensors) -> Result<Vec<f32>, CheckpointError> {
        let bytes = tensors.stored_bytes(&self.name)?;
        Ok(to_float32(&bytes, self.dtype).unwrap_or_else(|| bytes.iter().map(|&byte| e8m0(byte)).collect()))
    }
}

fn without_trailing_ones(shape: &[usize]) -> &[usize] {
    &shape[..shape.iter().rposition(|&size| size != 1).map_or(0, |last| last + 1)]
}
