//! Bytes that operators keep for the backward pass.

use tch::{Device, Kind};

use crate::gated_mlp::Activation;

/// Bytes that libtorch's norm keeps per value: the value in float32 and its normed form.
pub const NORMED: usize = 2 * size_of::<f32>();
/// Bytes of the code that oneDNN compiles for a bfloat16 product of one shape on a CPU: three kernels of 0.4 MB. libtorch keeps
/// the code of every shape it has met.
const PRODUCT_CODE: usize = 3 * (400 << 10);

/// Bytes that autograd keeps of operators on values of one dtype. Kernels for float32 on the CPU keep less than libtorch does.
#[derive(Debug, Clone, Copy)]
pub struct AutogradMemory {
    has_kernels: bool,
}

impl AutogradMemory {
    /// Memory of operators on values of `bytes` bytes on `device`.
    pub fn of(bytes: usize, device: Device) -> Self {
        Self { has_kernels: bytes == size_of::<f32>() && device == Device::Cpu }
    }

    /// Bytes per value that a norm keeps.
    pub fn normed(self) -> usize {
        if self.has_kernels { NORMED / 2 } else { NORMED }
    }

    /// Tensors of the MLP's inner width that a gated MLP keeps: gate and up, and without a kernel their activation and product.
    pub fn mlp(self, activation: Activation) -> usize {
        if self.has_gated_kernel(activation) { 2 } else { 4 }
    }

    /// Gradients of the MLP's inner width that exist at a time.
    pub fn mlp_gradients(self, activation: Activation) -> usize {
        if self.has_gated_kernel(activation) { 2 } else { 3 }
    }

    fn has_gated_kernel(self, activation: Activation) -> bool {
        self.has_kernels && activation == Activation::Silu
    }
}

/// Bytes of the code that libtorch keeps for matrix products of so many shapes.
pub fn code_bytes(shapes: usize, kind: Kind, device: Device) -> usize {
    if device == Device::Cpu && kind == Kind::BFloat16 { shapes * PRODUCT_CODE } else { 0 }
}
