//! Linear layers and norms with their weights.

use deepspec_ops::{RmsNormParams, Weight, linear, rms_norm};
use tch::{Kind, Tensor};

use super::{Builder, Init, NormWeight};

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

    /// Whether the layer has a bias.
    pub(super) fn has_bias(&self) -> bool {
        self.bias.is_some()
    }

    /// Applies the layer to the last dimension.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        linear(x, &self.weight, self.bias.as_ref())
    }

    /// The weight of a layer without a bias.
    pub fn weight(&self) -> &Weight {
        debug_assert!(self.bias.is_none(), "the layer has a bias");
        &self.weight
    }
}

/// `x / rms(x) · w` over the last dimension.
pub struct RmsNorm {
    /// The factor of each channel, or what is added to 1 in [`NormFactor::OnePlus`].
    weight: Tensor,
    eps: f64,
    factor: NormFactor,
}

/// How the factor of a norm follows from its weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NormFactor {
    /// The factor is the weight.
    Weight,
    /// The factor is the weight, which is float32 in a model of any dtype. The product is then rounded once.
    WeightInFloat32,
    /// The factor is one plus the weight, a parameter that may change. The product is rounded once, too.
    OnePlus,
}

impl RmsNorm {
    /// A norm over `size` channels.
    pub fn new(b: &Builder, name: &str, size: i64, eps: f64) -> Self {
        let weight = b.get(&format!("{name}.weight"), &[size], Init::Ones);
        Self { weight, eps, factor: NormFactor::Weight }
    }

    /// A norm over `size` channels whose stored weight w is used as `form` says.
    pub fn with_weight(b: &Builder, name: &str, size: i64, eps: f64, form: NormWeight) -> Self {
        match form {
            NormWeight::Plain => Self::new(b, name, size, eps),
            NormWeight::OnePlus => {
                let weight = b.get(&format!("{name}.weight"), &[size], Init::Zeros);
                let norm = Self { weight, eps, factor: NormFactor::OnePlus };
                // Weights of inference never change, so they are added up once.
                if b.is_for_inference() { norm.scaled(1.0) } else { norm }
            }
        }
    }

    /// The norm with its output multiplied by `factor`, for inference.
    pub fn scaled(self, factor: f64) -> Self {
        if factor == 1.0 && self.factor != NormFactor::OnePlus {
            return self;
        }
        Self { weight: self.float32_factor().detach() * factor, factor: NormFactor::WeightInFloat32, ..self }
    }

    fn float32_factor(&self) -> Tensor {
        let weight = self.weight.to_kind(Kind::Float);
        if self.factor == NormFactor::OnePlus { weight + 1.0 } else { weight }
    }

    /// Weight and ε of a norm whose factor is its weight; None for others.
    pub(super) fn params(&self) -> Option<RmsNormParams<'_>> {
        let params = RmsNormParams { weights: &self.weight, eps: self.eps };
        (self.factor != NormFactor::OnePlus).then_some(params)
    }

    /// Norms the last dimension. The result has the dtype of `x`.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let in_float32 = |weights: &Tensor| {
            let params = RmsNormParams { weights, eps: self.eps };
            rms_norm(&x.to_kind(Kind::Float), params).to_kind(x.kind())
        };
        match self.factor {
            NormFactor::Weight => rms_norm(x, RmsNormParams { weights: &self.weight, eps: self.eps }),
            NormFactor::WeightInFloat32 => in_float32(&self.weight),
            NormFactor::OnePlus => in_float32(&self.float32_factor()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The products of a bfloat16 model are computed in float32 and rounded once.
    #[test]
    fn float32_weights_are_not_rounded_to_the_models_dtype() {
        let values = |seed: u64| Tensor::from_slice(&deepspec_testkit::noise(seed, 64));
        let x = values(1).to_kind(Kind::BFloat16);
        let weight = values(2) + 1.0;
        let norm = RmsNorm { weight: weight.shallow_clone(), eps: 1e-6, factor: NormFactor::WeightInFloat32 };
        let wide = x.to_kind(Kind::Float);
        let rms = (wide.square().mean(Kind::Float) + 1e-6).sqrt();
        let expected = (&wide / rms * &weight).to_kind(Kind::BFloat16);
        let found = norm.forward(&x);
        assert_eq!(found.kind(), Kind::BFloat16);
        let off = (found.to_kind(Kind::Float) - expected.to_kind(Kind::Float)).abs();
        // Another order of sums may move a value over a border between two bfloat16 numbers.
        assert!(off.le_tensor(&(expected.to_kind(Kind::Float).abs() / 128.0)).all().int64_value(&[]) == 1);
        assert!(off.gt(0.0).sum(Kind::Int64).int64_value(&[]) <= 2);
        // The factor on logits is part of the same product.
        let scaled = RmsNorm { weight, eps: 1e-6, factor: NormFactor::WeightInFloat32 }.scaled(0.125);
        assert!(scaled.forward(&x).equal(&(found * 0.125)));
    }
}
