//! CPU tensors that the caller fills in place, without a copy from a buffer.

use std::slice;

use tch::{Device, Kind, Tensor};

/// Builds a CPU tensor from bytes that the caller writes. Nothing else can access the memory before
/// [`Self::into_tensor`].
#[derive(Debug)]
pub struct CpuTensorBuilder {
    tensor: Tensor,
    bytes: usize,
}

impl CpuTensorBuilder {
    /// Allocates a tensor with uninitialised bytes.
    ///
    /// # Panics
    /// If a size is negative, or the allocation fails.
    pub fn new(shape: &[i64], kind: Kind) -> Self {
        let tensor = Tensor::empty(shape, (kind, Device::Cpu));
        let bytes = tensor.numel() * kind.elt_size_in_bytes();
        Self { tensor, bytes }
    }

    /// All bytes, in row-major order.
    pub fn bytes(&mut self) -> &mut [u8] {
        if self.bytes == 0 {
            return &mut [];
        }
        // SAFETY: a new tensor from `empty` is contiguous, so this many bytes follow `data_ptr` and live as long as
        // the tensor. The tensor is private and never cloned: no other reference to its memory exists. Every byte
        // value is valid, and memory from foreign code counts as initialised.
        unsafe { slice::from_raw_parts_mut(self.tensor.data_ptr().cast(), self.bytes) }
    }

    /// The filled tensor.
    pub fn into_tensor(self) -> Tensor {
        self.tensor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_what_was_written() {
        let mut filling = CpuTensorBuilder::new(&[2, 3], Kind::Float);
        for (number, value) in filling.bytes().chunks_exact_mut(4).enumerate() {
            value.copy_from_slice(&(number as f32).to_le_bytes());
        }
        let wanted = Tensor::arange(6, (Kind::Float, Device::Cpu)).reshape([2, 3]);
        assert_eq!(filling.into_tensor(), wanted);
    }

    #[test]
    fn may_be_empty() {
        assert!(CpuTensorBuilder::new(&[0, 8], Kind::BFloat16).bytes().is_empty());
    }
}
