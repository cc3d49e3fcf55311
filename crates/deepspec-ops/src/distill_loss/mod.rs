//! Distillation losses over the vocabulary, with closed-form gradients. Full `[R, V]` tensors never exist, and
//! autograd records nothing.
//!
//! [`LossRecipe`] weights the terms, `rows` computes losses and logit gradients, and [`distill_loss`] processes all
//! rows in chunks. The tests compare with the formulas under autograd.

mod bias;
mod block_verification;
mod chunks;
mod inputs;
mod recipe;
mod reference;
mod rows;
mod sources;
mod span;
mod terms;
mod vocab_chunks;

pub use bias::LowRankBias;
pub use chunks::{LossColumn, LossOutput, buffer_bytes, distill_loss};
pub use inputs::{AuxLoss, AuxLossOutput, LossHead, SupervisedRows};
pub use recipe::{BlockVerification, Dpace, Lk, LkForm, LossRecipe};
pub use sources::TeacherIndex;
pub use sources::unique_with_inverse;
pub use span::BlockSpan;
pub use terms::TERMS;
