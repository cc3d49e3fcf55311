//! Inputs of the distillation losses.

use tch::Tensor;

use super::bias::LowRankBias;
use super::recipe::LossRecipe;
use super::sources::TeacherIndex;
use super::span::BlockSpan;
use super::terms::RequiredStats;

/// The LM head that drafter and target share.
pub struct LossHead {
    /// Weight, `[V, d]`.
    pub weight: Tensor,
    /// c of the soft-cap `c·tanh(x/c)` on logits x.
    pub softcap: Option<f64>,
}

impl LossHead {
    /// Soft-capped logits, or unchanged logits without a soft-cap.
    pub fn apply_softcap(&self, logits: Tensor) -> Tensor {
        match self.softcap {
            Some(cap) => (logits / cap).tanh() * cap,
            None => logits,
        }
    }
}

/// R supervised rows, in whole blocks of at most γ rows.
#[derive(Clone, Copy)]
pub struct SupervisedRows<'a> {
    /// Hidden states of the drafter after the final norm, `[R, d]`.
    pub hidden: &'a Tensor,
    /// Bias of the logits; None for the logits of the LM head alone.
    pub bias: Option<LowRankBias<'a>>,
    /// Hidden states of the target after the final norm that predict the labels, `[S, d]`.
    pub teacher: &'a Tensor,
    /// Index of each row's target state.
    pub sources: TeacherIndex<'a>,
    /// Label tokens, `[R]`.
    pub labels: &'a Tensor,
    /// Position weights, `[R]` float32.
    pub weights: &'a Tensor,
    /// Slot of each row: block · γ + position, `[R]`.
    pub slot_index: &'a Tensor,
    /// Number of rows of each block.
    pub counts: &'a [usize],
    /// γ, draft tokens of a block.
    pub gamma: i64,
    /// Factor on the gradients: 1 / denominator of the loss.
    pub scale: f64,
    /// Whether to measure where drafter and target have the same argmax.
    pub agreement: bool,
    /// Receives the drafter's argmax of each row, `[R]` int64; None if nothing reads it.
    pub argmax: Option<&'a Tensor>,
    /// An additional objective of the drafter.
    pub extra: Option<&'a dyn AuxLoss>,
}

impl SupervisedRows<'_> {
    pub(super) fn required_stats(&self, recipe: &LossRecipe) -> RequiredStats {
        RequiredStats { agreement: self.agreement, ..recipe.required_stats() }
    }
}

/// A loss on the drafter's logits that only one kind of drafter has, in addition to [`TERMS`](super::TERMS).
pub trait AuxLoss {
    /// Number of measurements of each row.
    fn column_count(&self) -> i64;

    /// Loss and gradients of the rows of `span`, given float32 logits of drafter and target, `[n, V]`.
    fn evaluate(&self, draft: &Tensor, target: &Tensor, span: &BlockSpan) -> AuxLossOutput;
}

/// Loss and gradients of an [`AuxLoss`] for n rows, float32.
pub struct AuxLossOutput {
    /// Measurements, `[n, C]`.
    pub columns: Tensor,
    /// Weighted loss without [`SupervisedRows::scale`], `[n, 1]`.
    pub loss: Tensor,
    /// Tokens whose logits have a gradient, `[n, k]`, distinct in each row.
    pub tokens: Tensor,
    /// Gradients of these logits, with [`SupervisedRows::scale`], `[n, k]`.
    pub gradient: Tensor,
}
