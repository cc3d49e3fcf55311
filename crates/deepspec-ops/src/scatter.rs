//! Sums over rows by index.

use tch::{Device, Tensor};

/// Adds each of `rows [N, ..]` to the row of `sum [M, ..]` that `index [N]` names, in a fixed order of the additions.
pub fn add_rows(sum: &Tensor, index: &Tensor, rows: &Tensor) {
    let mut sum = sum.shallow_clone();
    // Each operator has a fixed order on its own kind of device, and not on the other.
    let _ = match sum.device() {
        Device::Cpu => sum.index_add_(0, index, rows),
        _ => sum.index_put_(&[Some(index)], rows, true),
    };
}
