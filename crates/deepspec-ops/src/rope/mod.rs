//! Rotary position embedding (Su et al. 2021).

mod reference;
mod spec;
mod table;

use tch::Tensor;

use crate::ffi;
pub use spec::{RopeSpec, Scaling, Yarn};
pub use table::{Rope, Rotation};

/// Rotates heads `x [N, H, D]` by `cos` and `sin`, `[N, 1, D/2]` each. Value `i` and value `i + D/2` of a head are one pair.
///
/// A kernel runs on contiguous tensors of the CPU, forward and backward; libtorch's operators run elsewhere.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Tensor {
    ffi::rotate(x, cos, sin).unwrap_or_else(|| reference::rope(x, cos, sin))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_compute_what_the_reference_computes() {
        let values = |seed: u64, count: usize| Tensor::from_slice(&deepspec_testkit::noise(seed, count));
        let x = values(1, 5 * 3 * 64).view([5, 3, 64]);
        let cos_sin = values(2, 5 * 32).view([5, 1, 32]);
        let (cos, sin) = (cos_sin.cos(), cos_sin.sin());
        assert!(rope(&x, &cos, &sin).allclose(&reference::rope(&x, &cos, &sin), 1e-5, 1e-6, false));
    }
}
