//! Convolutions along the slots of a block, before and after each half of a layer.

use deepspec_models::nn::{Builder, Init, Linear};
use tch::Tensor;

use super::recipe::Convolution;

/// The two convolutions around one half of a layer. At first they give back what they read.
///
/// Slot t becomes `Σ_{o<K} (base[o] + δ_t[o, group]) ⊙ x_{t−o}`, with zeros before the block. The δ of both sides are one projection of
/// the half's normed input.
pub struct Convolutions {
    base: Tensor,       // [2, K, d]
    projection: Linear, // d -> 2·K·d/c
    shape: Convolution,
    /// B.
    block_size: i64,
}

/// What is added to the coefficients of rows of whole blocks, `[2, K, N, B, d/c, 1]`.
struct Deltas(Tensor);

impl Convolutions {
    /// Those called `name` for blocks of B slots.
    pub fn new(b: &Builder, name: &str, width: i64, shape: Convolution, block_size: usize) -> Self {
        let Convolution { kernel_size, group_size } = shape;
        let deltas = 2 * kernel_size * width / group_size;
        Self {
            base: b.get(&format!("{name}.base_kernel"), &[2, kernel_size, width], Init::Identity),
            projection: Linear::starting_at_zero(b, &format!("{name}.kernel_projection"), width, deltas),
            shape,
            block_size: block_size as i64,
        }
    }

    /// What stands around `run`, over rows of whole blocks `[N·B, d]`.
    pub fn around(&self, normed: &Tensor, run: &mut dyn FnMut(&Tensor) -> Tensor) -> Tensor {
        let Convolution { kernel_size, group_size } = self.shape;
        let groups = normed.size()[1] / group_size;
        let deltas = self.projection.forward(normed).view([-1, self.block_size, 2, kernel_size, groups, 1]);
        let deltas = Deltas(deltas.permute([2, 3, 0, 1, 4, 5]));
        let read = self.convolve(0, &deltas, normed);
        self.convolve(1, &deltas, &run(&read))
    }

    /// One side's convolution of rows of whole blocks `[N·B, d]`.
    fn convolve(&self, side: i64, Deltas(deltas): &Deltas, x: &Tensor) -> Tensor {
        let (size, groups) = (self.block_size, deltas.size()[4]);
        let x = x.view([-1, size, groups, self.shape.group_size]);
        let tap = |o: i64| {
            // x_{t−o}, zeros where that is before the block.
            let read = if o == 0 {
                x.shallow_clone()
            } else {
                let kept = size - o;
                x.narrow(1, 0, kept).constant_pad_nd([0, 0, 0, 0, size - kept, 0])
            };
            let base = self.base.get(side).get(o).view([groups, self.shape.group_size]);
            &read * base + &read * deltas.get(side).get(o)
        };
        let first = tap(0);
        let y = (1..self.shape.kernel_size).fold(first, |sum, o| sum + tap(o));
        y.view([-1, groups * self.shape.group_size])
    }
}
