//! The loss of the training-time test: soft cross entropy of every step against the target.

use deepspec_ops::distill_loss::{Column, LossOutput, LossRecipe, Supervised, distill_loss};
use tch::{Kind, Tensor};

use super::batch::{Eagle3Batch, Step};
use super::model::Eagle3;
use crate::LossDenominator;
use crate::draft_model::backward;

impl Eagle3 {
    /// Forward and backward of a batch of `sequences` samples, None where nothing in them is supervised: gradients are added to
    /// those of the parameters. Loss: Σ_s decay^s · Σ w·CE_s / normaliser, w being 1 over a sequence's length. Gives the sums
    /// that [`super::Eagle3Metrics`] names, float64.
    ///
    /// Autograd sees the layers only. The head is differentiated in closed form, over the rows of all steps at once, and one backward
    /// through Σ state · gradient carries it on.
    pub fn accumulate(
        &self,
        batch: Option<&Eagle3Batch>,
        normaliser: LossDenominator,
        sequences: usize,
    ) -> Tensor {
        let double = (Kind::Double, self.device());
        let count = Tensor::full([1], sequences as f64, double);
        let Some(batch) = batch else {
            let empty = Tensor::zeros([4 * self.config().ttt_length as i64 + 3], double);
            return Tensor::cat(&[empty, count], 0);
        };
        let states = self.states(batch);
        let normed = |(step, states): (&Step, &Tensor)| self.final_norm(&states.index_select(0, &step.rows));
        // What predicts the same token stands side by side, so that the target's logits are computed once for all steps.
        let rows = Tensor::cat(&batch.steps.iter().zip(&states).map(normed).collect::<Vec<_>>(), 0)
            .index_select(0, &batch.ordered.order); // [R, d]
        let output = tch::no_grad(|| self.head_losses(batch, &rows, 1.0 / normaliser.0));
        let by_step = |column: Column| output.column(column).index_select(0, &batch.ordered.inverse);
        let accept = (by_step(Column::L1) * -0.5 + 1.0).clamp(0.0, 1.0); // Σ min(p^d, p^t)
        let correct = by_step(Column::Agreement);
        let entropy = by_step(Column::SOFT_CE) * &batch.weights;
        let mut sums: Vec<Tensor> = vec![];
        let mut taus = [(); 2].map(|()| Tensor::zeros([], double));
        let mut survivors: Option<[Tensor; 2]> = None;
        for (step, states) in batch.steps.iter().zip(&states) {
            let (correct, accept) = (step.of(&correct), step.of(&accept));
            let all = |rows: &Tensor| rows.sum(Kind::Double);
            sums.extend([all(&step.of(&entropy)), all(&correct.ones_like()), all(&correct), all(&accept)]);
            let by_column = |rows: &Tensor| {
                Tensor::zeros([states.size()[0]], (Kind::Float, rows.device())).index_add(0, &step.rows, rows)
            };
            let here = [by_column(&correct), by_column(&accept)];
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
        let surrogate = (rows * &output.hidden).sum(Kind::Float);
        drop(states);
        backward(&surrogate);
        let none = Tensor::zeros([], double);
        sums.resize_with(4 * self.config().ttt_length, || none.shallow_clone());
        let columns = sums[1].shallow_clone(); // supervised at step 0: where a chain of drafts may begin
        sums.extend(taus.into_iter().chain([columns, count]));
        let sums: Vec<Tensor> = sums.iter().map(|sum| sum.to_kind(Kind::Double).reshape([1])).collect();
        Tensor::cat(&sums, 0)
    }

    /// Losses behind the normed states of all steps' supervised columns in their [order](super::batch::Ordered), `[R, d]`, without a graph.
    fn head_losses(&self, batch: &Eagle3Batch, rows: &Tensor, scale: f64) -> LossOutput {
        // No loss looks at a label, or at whole blocks.
        let nowhere = rows.new_zeros([rows.size()[0]], (Kind::Int64, rows.device()));
        let supervised = Supervised {
            hidden: rows,
            bias: None,
            teacher: &batch.teacher,
            sources: batch.ordered.sources(),
            labels: &nowhere,
            weights: &batch.ordered.decayed,
            slot_index: &nowhere,
            counts: &vec![1; rows.size()[0] as usize],
            gamma: 1,
            scale,
            agreement: true,
            extra: None,
        };
        let recipe = LossRecipe { soft_ce_alpha: 1.0, ..LossRecipe::NONE };
        distill_loss(&self.vocabulary().loss_head(), &supervised, &recipe)
    }
}
