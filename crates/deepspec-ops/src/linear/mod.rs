//! Linear layers, `x Wᵀ (+ b)`.

mod reference;

use tch::{Device, Kind, Tensor};

use crate::ffi;
pub use crate::ffi::PackedWeight;

/// The weight `[output, input]` of a linear layer.
pub enum Weight {
    /// A tensor, which may have a gradient.
    Stored(Tensor),
    /// Packed for inference.
    Packed(PackedWeight),
}

impl Weight {
    /// Packs the weight for inference if it is float32 on the CPU. Other weights stay as they are.
    ///
    /// With a packed weight, a row's result has the same bits in every batch.
    pub fn pack(self) -> Self {
        match self {
            Self::Stored(stored) => PackedWeight::new(&stored).map_or(Self::Stored(stored), Self::Packed),
            Self::Packed(_) => self,
        }
    }

    /// A second handle on this weight, not a copy.
    pub fn share(&self) -> Self {
        match self {
            Self::Stored(stored) => Self::Stored(stored.shallow_clone()),
            Self::Packed(packed) => Self::Packed(packed.share()),
        }
    }

    /// The weight as a tensor; a copy where it is packed.
    pub fn to_tensor(&self) -> Tensor {
        match self {
            Self::Stored(stored) => stored.shallow_clone(),
            Self::Packed(packed) => packed.unpacked(),
        }
    }
}

/// `x Wᵀ (+ b)` over the last dimension: `[.., input]` to `[.., output]`.
///
/// In training on the CPU, a kernel computes products without a bias. Elsewhere libtorch does.
pub fn linear(x: &Tensor, weight: &Weight, bias: Option<&Tensor>) -> Tensor {
    match weight {
        Weight::Stored(stored) => stored_linear(x, stored, bias),
        Weight::Packed(packed) => {
            let mut y = packed.product(x);
            if let Some(bias) = bias {
                y += bias;
            }
            y
        }
    }
}

/// `x Wᵀ` as [`linear`], in float32 whatever the dtypes of `x` and the weight are: `[.., input]` to `[.., output]` float32.
pub fn linear_in_float32(x: &Tensor, weight: &Weight) -> Tensor {
    let x = x.to_kind(Kind::Float);
    match weight {
        Weight::Stored(stored) => linear(&x, &Weight::Stored(stored.to_kind(Kind::Float)), None),
        Weight::Packed(_) => linear(&x, weight, None), // float32 already
    }
}

/// On the CPU libtorch computes a single row on another path than several rows, and the last bit may differ. Without gradients
/// a single row is therefore computed twice.
fn stored_linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
    if bias.is_none()
        && let Some(y) = ffi::projection(x, weight)
    {
        return y;
    }
    let (mut size, width) = (x.size(), weight.size()[1]);
    let is_alone = x.device() == Device::Cpu && x.numel() as i64 == width;
    if !is_alone || x.requires_grad() || weight.requires_grad() {
        return reference::linear(x, weight, bias);
    }
    if let Some(last) = size.last_mut() {
        *last = weight.size()[0];
    }
    let both = x.reshape([1, width]).expand([2, width], false);
    reference::linear(&both, weight, bias).narrow(0, 0, 1).reshape(size)
}

/// Writes `a @ b` to `out`, or adds it if `add` is set. Records no gradients. `out` may be float32 while `a` and `b` are
/// bfloat16. It must not share memory with them.
pub(crate) fn matmul_into(a: &Tensor, b: &Tensor, out: &mut Tensor, add: bool) {
    if !ffi::matmul_into(a, b, out, add) {
        reference::matmul_into(a, b, out, add);
    }
}

#[cfg(test)]
mod tests {
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
                let (both, alone) = (linear(&x, &weight, None), linear(&x.narrow(0, 0, 1), &weight, None));
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
        let packed = Weight::Stored(stored.shallow_clone()).pack();
        assert_eq!(matches!(packed, Weight::Packed(_)), cfg!(feature = "kernels"));
        let expected = linear(&x, &Weight::Stored(stored.shallow_clone()), Some(&bias));
        assert!(linear(&x, &packed.share(), Some(&bias)).allclose(&expected, 1e-5, 1e-5, false));
        assert!(packed.to_tensor().equal(&stored));
        // Where it learns it stays as it is.
        assert!(matches!(Weight::Stored(stored.set_requires_grad(true)).pack(), Weight::Stored(_)));
    }
}
