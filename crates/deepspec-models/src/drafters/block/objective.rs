//! The loss of DSpark and DFlash: weighted CE, L1 and confidence BCE over supervised slots.

use tch::{Kind, Reduction, Tensor};

use super::batch::BlockBatch;
use super::model::Block;

/// Added to every denominator.
const DENOMINATOR_EPS: f64 = 1e-6;

/// Weights of the three losses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossAlphas {
    /// Cross entropy with the label.
    pub ce: f64,
    /// ‖p^d − p^t‖₁.
    pub l1: f64,
    /// Binary cross entropy of the confidence head.
    pub confidence: f64,
}

/// The denominator of one optimiser step: Σ of the loss weights of all its blocks, known before any forward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Normaliser(pub f64);

/// A micro-batch's contribution: the loss to differentiate, and sums that add over micro-batches and ranks.
pub struct LossSums {
    /// α-weighted numerators over the normaliser, a scalar with a graph.
    pub loss: Tensor,
    /// Statistics by [`LossSums::names`], `[K]` float64, detached.
    pub sums: Tensor,
}

impl LossSums {
    /// What each entry of `sums` is; the last 2γ are Σ accept rate and count per position.
    pub fn names(block_size: usize) -> Vec<String> {
        let fixed = [
            "weight",
            "ce",
            "l1",
            "confidence",
            "tau",
            "blocks",
            "slots",
            "confidence_abs_error",
            "confidence_bias",
            "prefix_bias",
        ];
        let per_position = ["accept", "count"]
            .into_iter()
            .flat_map(|name| (0..block_size).map(move |k| format!("{name}@{k}")));
        fixed.into_iter().map(str::to_string).chain(per_position).collect()
    }
}

impl Block {
    /// Forward and losses of a batch.
    ///
    /// With weights w over the supervised slots: CE = Σ w·(−log p^d(x*)), L1 = Σ w·‖p^d − p^t‖₁, BCE of the confidence against
    /// c* = clamp(1 − ½‖p^d − p^t‖₁, 0, 1), each over the normaliser + 1e-6. p^t and c* are constants.
    pub fn objective(&self, batch: &BlockBatch, alphas: LossAlphas, normaliser: Normaliser) -> LossSums {
        let gamma = self.config().block_size as i64;
        let hidden = self.hidden(batch); // [A, γ, d]
        let supervised = |tensor: &Tensor| tensor.flatten(0, 1).index_select(0, &batch.rows);
        let features = self.markov_features(&hidden, &batch.previous);
        let (e, features) =
            features.map_or((None, None), |(e, f)| (Some(supervised(&e)), Some(supervised(&f))));
        let rows = supervised(&hidden); // [R, d]

        let log_draft = self.corrected_logits(&rows, features.as_ref()).log_softmax(-1, Kind::Float); // [R, V]
        let target = tch::no_grad(|| self.base_logits(&batch.teacher).softmax(-1, Kind::Float));
        let weighted = |values: &Tensor| (values * &batch.weights).sum(Kind::Float);
        let ce = weighted(&-log_draft.gather(1, &batch.labels.unsqueeze(1), false).squeeze_dim(1));
        let needs_l1 = alphas.l1 != 0.0;
        let distance =
            |log_draft: &Tensor| (log_draft.exp() - &target).abs().sum_dim_intlist(-1, false, Kind::Float); // [R]
        let l1_rows = if needs_l1 { distance(&log_draft) } else { tch::no_grad(|| distance(&log_draft)) };
        let l1 = weighted(&l1_rows);
        let accept: Tensor = (l1_rows.detach() * -0.5 + 1.0).clamp(0.0, 1.0);

        let mut total = &ce * alphas.ce;
        if needs_l1 {
            total += &l1 * alphas.l1;
        }
        let confidence_logits = self.confidence_logits(&rows, e.as_ref());
        let bce = confidence_logits.as_ref().map(|logits| {
            weighted(&logits.binary_cross_entropy_with_logits(
                &accept,
                None::<&Tensor>,
                None::<&Tensor>,
                Reduction::None,
            ))
        });
        if let Some(bce) = &bce {
            total += bce * alphas.confidence;
        }
        let loss = total / (normaliser.0 + DENOMINATOR_EPS);

        let sums = tch::no_grad(|| {
            let by_block = |rows: &Tensor| {
                let all = Tensor::zeros([batch.blocks as i64 * gamma], (Kind::Float, rows.device()));
                all.index_add(0, &batch.rows, rows).view([-1, gamma])
            };
            let survival = by_block(&accept).cumprod(1, Kind::Float); // Π accept rate · eval_mask
            let tau = survival.sum(Kind::Double) + batch.blocks as f64;
            let zero = ce.zeros_like();
            let (abs_error, bias, prefix_bias) =
                confidence_logits.as_ref().map_or((zero.copy(), zero.copy(), zero.copy()), |logits| {
                    let confidence = logits.sigmoid();
                    let error = &confidence - &accept;
                    let prefix = (by_block(&confidence).cumprod(1, Kind::Float) - &survival)
                        * by_block(&batch.weights);
                    (weighted(&error.abs()), weighted(&error), prefix.sum(Kind::Float))
                });
            let scalars = [
                batch.weights.sum(Kind::Float),
                ce.detach(),
                l1.detach(),
                bce.as_ref().map_or(zero, Tensor::detach),
                tau,
                Tensor::from(batch.blocks as f64).to_device(ce.device()),
                Tensor::from(batch.rows.size()[0] as f64).to_device(ce.device()),
                abs_error,
                bias,
                prefix_bias,
            ];
            let scalars: Vec<Tensor> = scalars.iter().map(|s| s.to_kind(Kind::Double).reshape([1])).collect();
            let per_position = |rows: &Tensor| {
                Tensor::zeros([gamma], (Kind::Double, rows.device())).index_add(
                    0,
                    &batch.slots,
                    &rows.to_kind(Kind::Double),
                )
            };
            let positions = [per_position(&accept), per_position(&accept.ones_like())];
            Tensor::cat(&scalars.into_iter().chain(positions).collect::<Vec<_>>(), 0)
        });
        LossSums { loss, sums }
    }
}
