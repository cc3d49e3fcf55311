//! Inputs of the losses.

use tch::Tensor;

use super::bias::Bias;
use super::recipe::LossRecipe;
use super::sources::TeacherIndex;
use super::span::Span;
use super::terms::Needs;

/// The head that drafter and target share.
pub struct LossHead {
    /// `[V, d]`.
    pub weight: Tensor,
    /// c, where logits `x` become `c·tanh(x/c)`.
    pub softcap: Option<f64>,
}

impl LossHead {
    /// `c·tanh(x/c)`, or the logits themselves without a soft-cap.
    pub fn cap(&self, logits: Tensor) -> Tensor {
        match self.softcap {
            Some(cap) => (logits / cap).tanh() * cap,
            None => logits,
        }
    }
}

/// R supervised rows, in whole blocks of at most γ.
#[derive(Clone, Copy)]
pub struct Supervised<'a> {
    /// Final-normed states of the drafter, `[R, d]`.
    pub hidden: &'a Tensor,
    /// Markov bias of the logits; None without a Markov head.
    pub bias: Option<Bias<'a>>,
    /// Final-normed states of the target that predict the labels, `[S, d]`.
    pub teacher: &'a Tensor,
    /// Index of each row's target state.
    pub sources: TeacherIndex<'a>,
    /// Label tokens, `[R]`.
    pub labels: &'a Tensor,
    /// Position weights, `[R]` float32.
    pub weights: &'a Tensor,
    /// Slot of each row: block · γ + position, `[R]`.
    pub slot_index: &'a Tensor,
    /// Rows of each block.
    pub counts: &'a [usize],
    /// γ, drafted tokens of a block.
    pub gamma: i64,
    /// Factor on the gradients: one over the denominator of the loss.
    pub scale: f64,
    /// Whether to measure in which rows drafter and target prefer one token.
    pub agreement: bool,
    /// A further objective of the drafter.
    pub extra: Option<&'a dyn RowObjective>,
}

impl Supervised<'_> {
    pub(super) fn needs(&self, recipe: &LossRecipe) -> Needs {
        Needs { agreement: self.agreement, ..recipe.needs() }
    }
}

/// A drafter's own objective on its logits, beside the terms.
pub trait RowObjective {
    /// Its measurements of each row.
    fn columns(&self) -> i64;

    /// Loss and gradients of the rows of `span`, from the float32 logits of drafter and target, `[n, V]`.
    fn evaluate(&self, draft: &Tensor, target: &Tensor, span: &Span) -> AuxLossOutput;
}

/// Loss and gradients that a [`RowObjective`] computes for n rows, float32.
pub struct AuxLossOutput {
    /// Measurements, `[n, C]`.
    pub columns: Tensor,
    /// The loss with all weights except [`Supervised::scale`], `[n, 1]`.
    pub loss: Tensor,
    /// Tokens whose logits have a gradient, `[n, k]`, each once in a row.
    pub tokens: Tensor,
    /// Their gradients, with that factor, `[n, k]`.
    pub gradient: Tensor,
}
