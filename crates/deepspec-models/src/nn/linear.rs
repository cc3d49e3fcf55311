//! Linear layers and norms with their weights.

use deepspec_ops::{RmsNormParams, Weight, linear, rms_norm};
use tch::Tensor;

use super::{Builder, Init};

/// `y = x Wᵀ (+ b)`.
pub struct Linear {
    weight: Weight,
    bias: Option<Tensor>,
}

impl Linear {
    /// `[.., input]` to `[.., output]`, without a bias.
    pub fn new(b: &Builder, name: &str, input: i64, output: i64) -> Self {
        Self {
            weight: b.linear_weight(&format!("{name}.weight"), &[output, input], Init::Normal),
            bias: None,
        }
    }

    /// A layer `[.., input]` to `[.., output]` without a bias, whose weight is initialised to
    /// zeros.
    pub fn zero_init(b: &Builder, name: &str, input: i64, output: i64) -> Self {
        Self { weight: b.linear_weight(&format!("{name}.weight"), &[output, input], Init::Zeros), bias: None }
    }

    /// `[.., input]` to `[.., output]`, with a bias.
    pub fn with_bias(b: &Builder, name: &str, input: i64, output: i64) -> Self {
        let bias = Some(b.get(&format!("{name}.bias"), &[output], Init::Zeros));
        Self { bias, ..Self::new(b, name, input, output) }
    }

    /// Applies the layer to the last dimension.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        linear(x, &self.weight, self.bias.as_ref())
    }

    /// The weight of a layer without a bias.
    pub fn weight(&self) -> &Weight {
        debug_assert!(self.bias.is_none(), "projections of decoder layers have no bias");
        &self.weight
    }
}

/// `x / rms(x) · w` over the last dimension.
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    /// A norm over `size` channels.
    pub fn new(b: &Builder, name: &str, size: i64, eps: f64) -> Self {
        Self { weight: b.get(&format!("{name}.weight"), &[size], Init::Ones), eps }
    }

    /// Weight and ε.
    pub(super) fn params(&self) -> RmsNormParams<'_> {
        RmsNormParams { weights: &self.weight, eps: self.eps }
    }

    /// Norms the last dimension.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        rms_norm(x, self.params())
    }
}
