//! The step by libtorch's operators.

use super::{AdamWSettings, AdamWTensors};
use tch::{Kind, Tensor};

/// Updates one tensor as [`super::adamw`] describes, and sets its gradient to zero.
pub(super) fn adamw(tensors: &mut AdamWTensors<'_>, divisor: &Tensor, settings: AdamWSettings) {
    let AdamWSettings { lr, beta1, beta2, weight_decay, eps, step } = settings;
    let AdamWTensors { weights, gradient, exp_avg, exp_avg_sq } = tensors;
    tch::no_grad(|| {
        // g ← g / divisor; m ← β₁ m + (1 − β₁) g; v ← β₂ v + (1 − β₂) g²
        let _ = gradient.g_div_(divisor);
        let _ = exp_avg.lerp_(gradient, 1.0 - beta1);
        let _ = exp_avg_sq.g_mul_scalar_(beta2).addcmul_(gradient, &(&**gradient * (1.0 - beta2)));
        // w ← (1 − lr·λ) w − lr m̂ / (√v̂ + ε)
        let root = exp_avg_sq.sqrt() / (1.0 - beta2.powf(step)).sqrt() + eps;
        let change = &**exp_avg / root * (lr / (1.0 - beta1.powf(step)));
        let _ = weights.g_mul_scalar_(1.0 - lr * weight_decay);
        let _ = weights.g_sub_(&change.to_kind(Kind::Float));
        let _ = gradient.zero_();
    });
}
