//! Tensors whose bytes are written in place, without a copy from a buffer.

use std::slice;

use tch::{Device, Kind, Tensor};

/// A CPU tensor that is still being filled; nobody else sees its memory before it is done.
#[derive(Debug)]
pub struct UninitTensor {
    tensor: Tensor,
    bytes: usize,
}

impl UninitTensor {
    /// Takes memory for a tensor of this shape; what the bytes are is open.
    ///
    /// # Panics
    /// For a negative size, and as every tensor does where there is no memory.
    pub fn new(shape: &[i64], kind: Kind) -> Self {
        let tensor = Tensor::empty(shape, (kind, Device::Cpu));
        let bytes = tensor.numel() * kind.elt_size_in_bytes();
        Self { tensor, bytes }
    }

    /// All bytes, row-major.
    pub fn bytes(&mut self) -> &mut [u8] {
        if self.bytes == 0 {
            return &mut [];
        }
        // SAFETY: a tensor that `empty` has just made is contiguous, so its first element stands at `data_ptr` and so many bytes
        // follow, which live as long as it does. It is private and was never cloned: no other reference to its memory exists.
        // Bytes have no invalid values, and memory that foreign code hands out counts as written.
        unsafe { slice::from_raw_parts_mut(self.tensor.data_ptr().cast(), self.bytes) }
    }

    /// The tensor with what was written.
    pub fn done(self) -> Tensor {
        self.tensor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_what_was_written() {
        let mut filling = UninitTensor::new(&[2, 3], Kind::Float);
        for (number, value) in filling.bytes().chunks_exact_mut(4).enumerate() {
            value.copy_from_slice(&(number as f32).to_le_bytes());
        }
        let wanted = Tensor::arange(6, (Kind::Float, Device::Cpu)).reshape([2, 3]);
        assert_eq!(filling.done(), wanted);
    }

    #[test]
    fn may_be_empty() {
        assert!(UninitTensor::new(&[0, 8], Kind::BFloat16).bytes().is_empty());
    }
}
