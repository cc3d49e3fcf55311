//! Weights of products.

use deepspec_ops::{
    PackedWeight, RmsNormParams, few_rows_gated_product, few_rows_product, packed_gated_product,
    packed_product, projection,
};
use tch::{Device, Tensor};

/// The weight `[output, input]` of a product.
pub enum Weight {
    /// As it is stored; it may learn.
    Stored(Tensor),
    /// Packed to decode with.
    Packed(PackedWeight),
}

impl Weight {
    /// The same to decode with: packed where there is such a form, for float32 on the CPU, and as it is stored elsewhere.
    ///
    /// A row's product with a packed weight has the same bits whatever rows it comes with.
    pub fn packed(self) -> Self {
        match self {
            Self::Stored(stored) => PackedWeight::new(&stored).map_or(Self::Stored(stored), Self::Packed),
            Self::Packed(_) => self,
        }
    }

    /// The same weight, not copied.
    pub fn share(&self) -> Self {
        match self {
            Self::Stored(stored) => Self::Stored(stored.shallow_clone()),
            Self::Packed(packed) => Self::Packed(packed.share()),
        }
    }

    /// As it is stored; a copy where it is packed.
    pub fn stored(&self) -> Tensor {
        match self {
            Self::Stored(stored) => stored.shallow_clone(),
            Self::Packed(packed) => packed.unpacked(),
        }
    }

    /// `x Wᵀ (+ b)` over the last dimension.
    pub fn product(&self, x: &Tensor, bias: Option<&Tensor>) -> Tensor {
        match self {
            Self::Stored(stored) => stored_product(x, stored, bias),
            Self::Packed(packed) => {
                let mut y = packed.product(x);
                if let Some(bias) = bias {
                    y += bias;
                }
                y
            }
        }
    }
}

/// A form of weights that layers are fused for.
pub(super) trait LinearKernel {
    /// The weight in this form, if it is in it.
    fn of(weight: &Weight) -> Option<&Self>;

    /// `norm(x) [W₁; W₂; …]ᵀ + residual` in one call, the outputs of all weights side by side.
    fn products(
        weights: &[&Self],
        x: &Tensor,
        gain: Option<RmsNormParams<'_>>,
        residual: Option<&Tensor>,
    ) -> Tensor;

    /// `silu(norm(x) Gᵀ) ⊙ (norm(x) Wᵀ)` in one call.
    fn gated_product(gate: &Self, up: &Self, x: &Tensor, gain: RmsNormParams<'_>) -> Tensor;
}

impl LinearKernel for PackedWeight {
    fn of(weight: &Weight) -> Option<&Self> {
        if let Weight::Packed(packed) = weight { Some(packed) } else { None }
    }

    fn products(
        weights: &[&Self],
        x: &Tensor,
        gain: Option<RmsNormParams<'_>>,
        residual: Option<&Tensor>,
    ) -> Tensor {
        packed_product(x, gain, weights, residual)
    }

    fn gated_product(gate: &Self, up: &Self, x: &Tensor, gain: RmsNormParams<'_>) -> Tensor {
        packed_gated_product(x, Some(gain), gate, up)
    }
}

/// As they are stored: on a GPU.
impl LinearKernel for Tensor {
    fn of(weight: &Weight) -> Option<&Self> {
        if let Weight::Stored(stored) = weight { Some(stored) } else { None }
    }

    fn products(
        weights: &[&Self],
        x: &Tensor,
        gain: Option<RmsNormParams<'_>>,
        residual: Option<&Tensor>,
    ) -> Tensor {
        few_rows_product(x, gain, weights, residual)
    }

    fn gated_product(gate: &Self, up: &Self, x: &Tensor, gain: RmsNormParams<'_>) -> Tensor {
        few_rows_gated_product(x, gain, gate, up)
    }
}

/// `x Wᵀ (+ b)` as libtorch has it, but where something learns and libtorch is slow. On the CPU a lone row takes another path than several, and
/// may differ from what it is among them in the last bit; it is taken twice where nothing learns.
fn stored_product(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
    if bias.is_none()
        && let Some(learning) = projection(x, weight)
    {
        return learning;
    }
    let (mut size, width) = (x.size(), weight.size()[1]);
    let is_alone = x.device() == Device::Cpu && x.numel() as i64 == width;
    if !is_alone || x.requires_grad() || weight.requires_grad() {
        return x.linear(weight, bias);
    }
    if let Some(last) = size.last_mut() {
        *last = weight.size()[0];
    }
    x.reshape([1, width]).expand([2, width], false).linear(weight, bias).narrow(0, 0, 1).reshape(size)
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    #[test]
    fn a_lone_row_has_the_bits_that_it_has_among_others() {
        for kind in [Kind::BFloat16, Kind::Float] {
            for [outputs, width] in [[2560, 2560], [1024, 1024], [192, 288]] {
                let values = |rows: i64, seed: u64| {
                    let numbers = deepspec_testkit::noise(seed, (rows * width) as usize);
                    Tensor::from_slice(&numbers).view([rows, width]).to_kind(kind)
                };
                let (x, weight) = (values(2, 1), Weight::Stored(values(outputs, 2)));
                let (both, alone) = (weight.product(&x, None), weight.product(&x.narrow(0, 0, 1), None));
                assert!(alone.equal(&both.narrow(0, 0, 1)), "{outputs} of {width}, {kind:?}");
            }
        }
    }

    #[test]
    fn packed_and_stored_weights_give_the_same() {
        let values = |shape: [i64; 2], seed: u64| {
            Tensor::from_slice(&deepspec_testkit::noise(seed, (shape[0] * shape[1]) as usize)).view(shape)
        };
        let (x, stored, bias) = (values([5, 64], 1), values([40, 64], 2), values([1, 40], 3).squeeze());
        let packed = Weight::Stored(stored.shallow_clone()).packed();
        assert!(matches!(packed, Weight::Packed(_)));
        let expected = Weight::Stored(stored.shallow_clone()).product(&x, Some(&bias));
        assert!(packed.share().product(&x, Some(&bias)).allclose(&expected, 1e-5, 1e-5, false));
        assert!(packed.stored().equal(&stored));
        // Where it learns it stays as it is.
        assert!(matches!(Weight::Stored(stored.set_requires_grad(true)).packed(), Weight::Stored(_)));
    }
}
