//! Memory that operators save for the backward pass.

use tch::{Device, Kind};

use crate::gated_mlp::Activation;

/// Tensors that [`rms_norm`](crate::rms_norm()) and [`gated_mlp`](crate::gated_mlp()) save for the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedTensorSizes {
    /// Bytes that a norm saves per value, in addition to its output.
    pub norm_bytes_per_value: usize,
    /// Tensors `[N, I]` of an MLP: gate and up, and from libtorch's operators also the activation and the product.
    pub mlp_tensors: usize,
}

impl SavedTensorSizes {
    /// Sizes for tensors of dtype `kind` on `device`. The float32 CPU kernels save less than libtorch's
    /// operators, which save a norm's input and its normed values in float32. The MLP has a kernel for SiLU
    /// only.
    pub fn new(kind: Kind, device: Device, activation: Activation) -> Self {
        let has_kernels = cfg!(feature = "kernels") && (kind, device) == (Kind::Float, Device::Cpu);
        Self {
            norm_bytes_per_value: if has_kernels { 4 } else { 8 },
            mlp_tensors: if has_kernels && activation == Activation::Silu { 2 } else { 4 },
        }
    }

    /// Number of scores and probabilities that [`BlockAttention`](crate::BlockAttention) saves per query head, for `slots` rows that see
    /// `keys` keys each. Kernels save none.
    pub fn block_score_count(slots: usize, keys: usize) -> usize {
        if cfg!(feature = "kernels") { 0 } else { 2 * slots * keys }
    }
}
