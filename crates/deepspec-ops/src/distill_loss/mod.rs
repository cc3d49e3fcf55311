//! Distillation losses over the vocabulary, in closed form: the full `[R, V]` tensors never exist at once, and autograd never
//! sees them.
//!
//! [`LossRecipe`] weighs the terms, `rows` turns logits into losses and gradients by the logits, and [`distill_loss`] walks over
//! all rows in chunks. The tests compare it with the formulas under autograd.

mod bias;
mod chunks;
mod inputs;
mod recipe;
mod reference;
mod rows;
mod sources;
mod span;
mod terms;
mod vocab_chunks;

pub use bias::Bias;
pub use chunks::{Column, LossOutput, buffer_bytes, distill_loss};
pub use inputs::{AuxLossOutput, LossHead, RowObjective, Supervised};
pub use recipe::{Dpace, Lk, LkForm, LossRecipe};
pub use sources::TeacherIndex;
pub use sources::distinct;
pub use span::Span;
pub use terms::TERMS;
