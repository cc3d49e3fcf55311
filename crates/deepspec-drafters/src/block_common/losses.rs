//! Losses of a block drafter's supervised drafts, whose logits may have a low-rank bias.

use deepspec_models::nn::Weight;
use deepspec_ops::distill_loss::{
    LossHead, LossOutput, LossRecipe, LowRankBias, SupervisedRows, distill_loss,
};
use deepspec_ops::{GradSum, linear};
use tch::{Kind, Tensor};

use super::BlockBatch;

/// Bias of the supervised drafts' logits, `features · W2ᵀ`.
pub struct DraftBias<'a> {
    /// Features, `[R, r]`.
    pub features: &'a Tensor,
    /// Group number of each row, `[R]`; see [`LowRankBias::feature_group`].
    pub feature_group: Option<&'a [i64]>,
    /// W2, `[V, r]`.
    pub w2: &'a Weight,
}

/// Float32 logits with a bias: `base [.., V]` and `features [.., r] · W2ᵀ`.
pub fn add_bias(base: Tensor, features: &Tensor, w2: &Weight) -> Tensor {
    base + linear(features, w2, None).to_kind(Kind::Float)
}

impl BlockBatch {
    /// Selects the supervised drafts, `[A, γ, ..]` to `[R, ..]`.
    pub(crate) fn select_supervised(&self, all: &Tensor) -> Tensor {
        all.flatten(0, 1).index_select(0, &self.supervised_indices)
    }

    /// Inputs of the losses of the supervised drafts, from their hidden states `[R, d]`. `scale` is a factor of the gradients.
    pub(crate) fn loss_inputs<'a>(
        &'a self,
        hidden: &'a Tensor,
        bias: Option<LowRankBias<'a>>,
        scale: f64,
    ) -> SupervisedRows<'a> {
        SupervisedRows {
            hidden,
            bias,
            teacher: &self.teacher,
            sources: self.teacher_index(),
            labels: &self.labels,
            weights: &self.weights,
            slot_index: &self.supervised_indices,
            counts: &self.counts,
            gamma: self.gamma as i64,
            scale,
            agreement: false,
            argmax: None,
            extra: None,
        }
    }

    /// Losses of the supervised drafts, and their gradients with respect to `hidden [R, d]` and the features of `bias`. Adds to the
    /// gradient of W2 unless it is frozen. `scale` is a factor of the gradients. The caller must disable autograd.
    pub(crate) fn losses(
        &self,
        head: &LossHead,
        hidden: &Tensor,
        bias: Option<DraftBias>,
        recipe: &LossRecipe,
        scale: f64,
    ) -> LossOutput {
        let w2 = bias.as_ref().map(|bias| bias.w2.to_tensor());
        let w2_sum = w2.as_ref().and_then(GradSum::new);
        let bias = bias.zip(w2.as_ref()).map(|(DraftBias { features, feature_group, .. }, w2)| {
            let w2_gradient = w2_sum.as_ref().map(GradSum::sum);
            LowRankBias { features, feature_group, w2, w2_gradient }
        });
        let output = distill_loss(head, &self.loss_inputs(hidden, bias, scale), recipe);
        if let Some(sum) = w2_sum {
            sum.finish();
        }
        output
    }
}
