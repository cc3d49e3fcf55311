//! Memory that operators save for the backward pass.

use tch::{Device, Kind};

/// What [`rms_norm`](crate::rms_norm()) and [`gated_mlp`](crate::gated_mlp()) save for the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedTensors {
    /// Bytes per value of a norm, beside its output.
    pub norm: usize,
    /// Tensors `[N, I]` of an MLP: gate and up, and from libtorch's operators also the activation and the product.
    pub mlp: usize,
}

impl SavedTensors {
    /// For tensors of one dtype and device. The kernels for float32 on a CPU save less than libtorch's operators, which save the input
    /// of a norm and its normed form in float32.
    pub fn of(kind: Kind, device: Device) -> Self {
        let has_kernels = cfg!(feature = "kernels") && (kind, device) == (Kind::Float, Device::Cpu);
        if has_kernels { Self { norm: 4, mlp: 2 } } else { Self { norm: 8, mlp: 4 } }
    }
}
