//! Memory that operators save for the backward pass.

use tch::{Device, Kind};

use crate::gated_mlp::Activation;

/// Tensors that [`rms_norm`](crate::rms_norm()) and [`gated_mlp`](crate::gated_mlp()) save for the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedTensors {
    /// Bytes per value of a norm, beside its output.
    pub norm: usize,
    /// Tensors `[N, I]` of an MLP: gate and up, and from libtorch's operators also the activation and the product.
    pub mlp: usize,
}

impl SavedTensors {
    /// For tensors of one dtype and device. The kernels for float32 on a CPU save less than libtorch's operators, which save the input
    /// of a norm and its normed form in float32. Only SiLU has a kernel for the MLP.
    pub fn of(kind: Kind, device: Device, activation: Activation) -> Self {
        let has_kernels = cfg!(feature = "kernels") && (kind, device) == (Kind::Float, Device::Cpu);
        Self {
            norm: if has_kernels { 4 } else { 8 },
            mlp: if has_kernels && activation == Activation::Silu { 2 } else { 4 },
        }
    }

    /// Number of scores and probabilities that [`BlockAttention`](crate::BlockAttention) saves per query head, for `slots` rows that see
    /// `keys` keys each. Kernels save none.
    pub fn block_scores(slots: usize, keys: usize) -> usize {
        if cfg!(feature = "kernels") { 0 } else { 2 * slots * keys }
    }
}
