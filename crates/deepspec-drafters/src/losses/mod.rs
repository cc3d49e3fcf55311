//! Losses over the vocabulary, in closed form: the full `[R, V]` tensors never exist at once, and autograd never sees them.
//!
//! [`LossAlphas`] says what is learned, `rows` turns some rows of logits into distances and gradients by the logits, and
//! [`accumulate`] walks over all rows in chunks. The same formulas with autograd stand in the tests.

mod bias;
mod chunks;
mod inputs;
mod pieces;
mod recipe;
mod rows;
mod sources;
mod span;
mod terms;
mod tile;

pub use bias::Bias;
pub use chunks::{Column, LossOutput, accumulate, buffer_bytes, tile_rows};
pub use inputs::{AuxLossOutput, RowObjective, Supervised};
pub use recipe::{Dpace, Lk, LkForm, LossRecipe};
pub use sources::TeacherIndex;
pub(crate) use sources::distinct;
pub use span::Span;
pub use terms::{LossAlphas, TERMS};

use deepspec_ops::range;
use tch::Tensor;

/// Carries gradients on from what the losses left to the parameters.
pub(crate) fn backward(surrogate: &Tensor) {
    let _range = range(c"backward");
    surrogate.backward();
}

/// The gradient of a parameter, to be added to in place; zeros where it has none yet.
pub fn gradient(parameter: &Tensor) -> Tensor {
    if !parameter.grad().defined() {
        // A gradient can only be made by a backward: that of the first row makes all of it, and it is cleared.
        tch::with_grad(|| parameter.narrow(0, 0, 1).sum(None).backward());
        let _ = parameter.grad().zero_();
    }
    parameter.grad()
}
