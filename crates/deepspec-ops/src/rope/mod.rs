//! Rotary position embedding (Su et al. 2021).

mod reference;
mod spec;
mod table;

use tch::Tensor;

use crate::ffi;
pub use spec::{RopeSpec, Scaling, Yarn};
pub use table::{Rope, Rotation};

/// Rotates heads `x [N, H, D]` by `cos` and `sin`, `[N, 1, D/2]` each: value `i` and value `i + D/2` of a head are one pair.
///
/// A kernel runs on contiguous tensors of the CPU, forward and backward; libtorch's operators run elsewhere.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Tensor {
    ffi::rotate(x, cos, sin).unwrap_or_else(|| reference::rope(x, cos, sin))
}
