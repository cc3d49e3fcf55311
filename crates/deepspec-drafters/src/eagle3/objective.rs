//! The loss of the training-time test: soft cross entropy of every step against the target.

use deepspec_core::recipe::LossNormalization;
use tch::{Kind, Tensor};

use super::batch::{Eagle3Batch, Step};
use super::model::Eagle3;
use super::recipe::Supervise;
use crate::Normaliser;

/// Rows whose distributions exist at once.
pub(super) const CHUNK: i64 = 128;

/// How an Eagle3 drafter is trained.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Eagle3Objective {
    /// Which predictions are trained.
    pub supervise: Supervise,
    /// The loss of step s weighs this to the power of s.
    pub step_loss_decay: f64,
    /// Whether a sequence is averaged over its own length, or over the longest one's of the micro-batch as the reference
    /// does.
    pub normalization: LossNormalization,
}

/// Per supervised row of a step, `[R]` float32 and detached, and the loss's gradient `[R, d]` for what the head reads.
struct Scores {
    cross_entropy: Tensor,
    /// Σ min(p^d, p^t).
    accept: Tensor,
    /// 1 where both prefer the same token.
    correct: Tensor,
    gradient: Tensor,
}

impl Eagle3 {
    /// Forward and backward of a batch of `sequences` samples, None where nothing in them is supervised: gradients are added to
    /// those of the parameters. Loss: Σ_s decay^s · Σ w·CE_s / normaliser, w being 1 over a sequence's length. Gives the sums
    /// that [`super::Eagle3Metrics`] names, float64.
    ///
    /// The head runs apart from the layers, a chunk of rows at a time, and hands its gradient to one backward through them.
    pub fn accumulate(
        &self,
        batch: Option<&Eagle3Batch>,
        objective: &Eagle3Objective,
        normaliser: Normaliser,
        sequences: usize,
    ) -> Tensor {
        let double = (Kind::Double, self.device());
        let count = Tensor::full([1], sequences as f64, double);
        let Some(batch) = batch else {
            let empty = Tensor::zeros([4 * self.config().ttt_length as i64 + 3], double);
            return Tensor::cat(&[empty, count], 0);
        };
        let mut surrogate = Tensor::zeros([], (Kind::Float, self.device()));
        let mut sums: Vec<Tensor> = vec![];
        let mut taus = [(); 2].map(|()| Tensor::zeros([], double));
        let mut survivors: Option<[Tensor; 2]> = None;
        let mut factor = 1.0 / normaliser.0;
        for (step, states) in batch.steps.iter().zip(self.states(batch)) {
            let normed = self.final_norm(&states.index_select(0, &step.rows)); // [R, d]
            let scores = self.score(&normed.detach(), step, factor);
            surrogate += (normed * scores.gradient).sum(Kind::Float);
            factor *= objective.step_loss_decay;

            let all = |rows: &Tensor| rows.sum(Kind::Double);
            let rows = &scores.correct.ones_like();
            sums.extend([
                all(&(&scores.cross_entropy * &step.weights)),
                all(rows),
                all(&scores.correct),
                all(&scores.accept),
            ]);
            let by_column = |rows: &Tensor| {
                Tensor::zeros([states.size()[0]], (Kind::Float, rows.device())).index_add(0, &step.rows, rows)
            };
            let here = [by_column(&scores.correct), by_column(&scores.accept)];
            let alive = match survivors.take() {
                None => here,
                Some(before) => {
                    let kept = before.map(|all| match &step.kept {
                        Some(kept) => all.index_select(0, kept),
                        None => all,
                    });
                    [&kept[0] * &here[0], &kept[1] * &here[1]]
                }
            };
            taus.iter_mut().zip(&alive).for_each(|(tau, alive)| *tau += all(alive));
            survivors = Some(alive);
        }
        surrogate.backward();
        let none = Tensor::zeros([], double);
        sums.resize_with(4 * self.config().ttt_length, || none.shallow_clone());
        let columns = sums[1].shallow_clone(); // supervised at step 0: where a chain of drafts may begin
        sums.extend(taus.into_iter().chain([columns, count]));
        let sums: Vec<Tensor> = sums.iter().map(|sum| sum.to_kind(Kind::Double).reshape([1])).collect();
        Tensor::cat(&sums, 0)
    }

    /// Scores the normed states of a step's supervised rows; the gradient is that of factor · Σ w·CE.
    fn score(&self, normed: &Tensor, step: &Step, factor: f64) -> Scores {
        let rows = normed.size()[0];
        let (mut entropies, mut accepts, mut corrects, mut gradients) = (vec![], vec![], vec![], vec![]);
        for start in (0..rows).step_by(CHUNK as usize) {
            let part = |tensor: &Tensor| tensor.narrow(0, start, CHUNK.min(rows - start));
            let leaf = part(normed).set_requires_grad(true);
            let target = tch::no_grad(|| self.logits(&part(&step.teacher)).softmax(-1, Kind::Float)); // [C, V]
            let log_draft = self.logits(&leaf).log_softmax(-1, Kind::Float);
            let cross_entropy = -(&target * &log_draft).sum_dim_intlist(-1, false, Kind::Float); // [C]
            ((&cross_entropy * part(&step.weights)).sum(Kind::Float) * factor).backward();
            let draft = log_draft.detach();
            corrects.push(draft.argmax(-1, false).eq_tensor(&target.argmax(-1, false)).to_kind(Kind::Float));
            accepts.push(target.minimum(&draft.exp()).sum_dim_intlist(-1, false, Kind::Float));
            entropies.push(cross_entropy.detach());
            gradients.push(leaf.grad());
        }
        // A step may have no supervised row left.
        let joined = |parts: Vec<Tensor>, empty: Tensor| {
            if parts.is_empty() { empty } else { Tensor::cat(&parts, 0) }
        };
        let none = || step.weights.zeros_like();
        Scores {
            cross_entropy: joined(entropies, none()),
            accept: joined(accepts, none()),
            correct: joined(corrects, none()),
            gradient: joined(gradients, normed.zeros_like()),
        }
    }
}
