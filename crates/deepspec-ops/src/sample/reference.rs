//! Sampling by libtorch's operators.

use tch::{Kind, Tensor};

/// See [`super::temperature_softmax`].
pub(super) fn temperature_softmax(logits: &Tensor, temperatures: &Tensor) -> Tensor {
    (logits / temperatures).softmax(-1, Kind::Float)
}

/// See [`super::sample`].
pub(super) fn sample(weights: &Tensor, uniforms: &Tensor) -> Tensor {
    let cdf = weights.cumsum(-1, Kind::Double);
    let vocab = cdf.size()[1];
    let threshold = cdf.narrow(1, vocab - 1, 1) * uniforms.unsqueeze(1);
    cdf.le_tensor(&threshold).sum_dim_intlist(-1, false, Kind::Int64).clamp_max(vocab - 1)
}
