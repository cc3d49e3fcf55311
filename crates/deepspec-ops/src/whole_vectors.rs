//! Element-wise functions whose results do not depend on a value's place in its tensor.

use tch::Tensor;

/// Rows are padded to a multiple of this many values, which whole vectors of a processor divide.
const UNIT: i64 = 64;

/// Applies an element-wise function to rows `[.., H]`, which are padded to whole vectors for it; returns `[.., H]`.
///
/// On a CPU libtorch computes values that fill no vector in another way, and their last bit may differ. The bits of a row would then
/// depend on its place in the batch.
pub fn in_whole_vectors(x: &Tensor, function: impl Fn(&Tensor) -> Tensor) -> Tensor {
    let width = *x.size().last().unwrap_or(&0);
    let missing = (-width).rem_euclid(UNIT);
    function(&x.constant_pad_nd([0, missing])).narrow(-1, 0, width)
}
