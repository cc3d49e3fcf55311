//! Loss of a block that block verification accepts, with its gradient.

use tch::Tensor;

/// Below this β the loss is computed as its limit at β = 0, because 1/β would amplify rounding.
const MIN_BETA: f64 = 1e-3;

/// Whole blocks of supervised rows.
pub(super) struct BlockRows<'a> {
    /// Label of each row, `[n]`.
    pub labels: &'a Tensor,
    /// Position weight of each row, `[n]`.
    pub weights: &'a Tensor,
    /// Slot of each row, block · γ + position, `[n]`.
    pub slots: &'a Tensor,
    /// Number of blocks.
    pub blocks: i64,
    /// γ, slots of a block.
    pub gamma: i64,
}

impl BlockRows<'_> {
    /// Values of the rows `[n]` in their slots, zeros elsewhere: `[blocks, γ]`.
    fn to_grid(&self, of_rows: &Tensor) -> Tensor {
        let grid = Tensor::zeros([self.blocks * self.gamma], (of_rows.kind(), of_rows.device()));
        grid.index_copy(0, self.slots, of_rows).view([self.blocks, self.gamma])
    }

    /// Values of the slots `[blocks, γ]` that have rows: `[n, 1]`.
    fn to_rows(&self, grid: &Tensor) -> Tensor {
        grid.reshape([-1]).index_select(0, self.slots).unsqueeze(1)
    }
}

/// Loss of some blocks, and its gradient.
pub(super) struct BlockVerificationLoss {
    /// Loss of each row's block, `[n, 1]`.
    pub value: Tensor,
    /// Gradient of Σ weight · loss by the drafter's logits, `[n, V]`.
    pub gradient: Tensor,
}

/// Computes the loss of block verification (BV, arXiv 2609.34832), given float32 logits of drafter and target `[n, V]`.
///
/// Let x be the labels, p the drafter's probabilities and q the target's, r_k = Σ_{i ≤ k} log q_i(x_i)/p_i(x_i), and
/// a_k = min(0, r_1, .., r_k). Position k scores s_k = log Σ_v min(e^{a_{k−1}} p_k(v), e^{r_{k−1}} q_k(v)). The loss
/// of a block is −1/β · log mean_k e^{β s_k}, and −mean_k s_k at β = 0. A slot without a label ends its block.
pub(super) fn block_verification_loss(
    draft: &Tensor,
    target: &Tensor,
    rows: &BlockRows,
    beta: f64,
) -> BlockVerificationLoss {
    // The caller disables autograd, which differentiates this small graph.
    tch::with_grad(|| {
        let logits = draft.detach().set_requires_grad(true);
        let loss = block_losses(&logits, target, rows, beta); // [blocks]
        // Sums over the slots of a block add in a fixed order, also on a GPU.
        let weights = rows.to_grid(&rows.weights.to_kind(logits.kind())).sum_dim_intlist(1, false, None);
        let total = (&loss * weights).sum(None);
        let gradient = Tensor::run_backward(&[total], &[&logits], false, false).remove(0);
        let block_of_row = rows.slots.divide_scalar_mode(rows.gamma, "floor");
        let value = loss.detach().index_select(0, &block_of_row);
        BlockVerificationLoss { value: value.unsqueeze(1), gradient }
    })
}

/// Loss of each block, `[blocks]`.
fn block_losses(draft: &Tensor, target: &Tensor, rows: &BlockRows, beta: f64) -> Tensor {
    let kind = draft.kind();
    // 1. Log probabilities of all tokens and of the labels.
    let (log_p, log_q) = (draft.log_softmax(-1, kind), target.to_kind(kind).log_softmax(-1, kind)); // [n, V]
    let of_labels = |log: &Tensor| log.gather(1, &rows.labels.unsqueeze(1), false).squeeze_dim(1);
    // 2. r and a before each position.
    let ratio = rows.to_grid(&(of_labels(&log_q) - of_labels(&log_p))); // [blocks, γ]
    let zero = Tensor::zeros([rows.blocks], (kind, draft.device()));
    let (mut sums, mut minima) = (vec![zero.shallow_clone()], vec![zero]);
    for position in 0..rows.gamma - 1 {
        let sum = &sums[position as usize] + ratio.select(1, position);
        minima.push(minima[position as usize].minimum(&sum));
        sums.push(sum);
    }
    let [sum, least] = [sums, minima].map(|columns| rows.to_rows(&Tensor::stack(&columns, 1))); // [n, 1]
    // 3. Scores, and their mean over the slots before the first one without a label.
    let score = rows.to_grid(&(least + log_p).minimum(&(sum + log_q)).logsumexp([-1], false));
    let counted = rows.to_grid(&rows.weights.ones_like().to_kind(kind)).cumprod(1, kind);
    let count = counted.sum_dim_intlist(1, false, kind).clamp_min(1.0);
    if beta < MIN_BETA {
        return -(score * counted).sum_dim_intlist(1, false, kind) / count;
    }
    let exponents = (score * beta).masked_fill(&counted.eq(0.0), f64::NEG_INFINITY);
    let blocks_without = counted.narrow(1, 0, 1).squeeze_dim(1).eq(0.0);
    // A block whose first slot has no label has no loss; its exponents would be −∞ alone.
    let exponents = exponents.masked_fill(&blocks_without.unsqueeze(1), 0.0);
    let loss = (exponents.logsumexp([1], false) - count.log()) / -beta;
    loss.masked_fill(&blocks_without, 0.0)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    /// Loss of one block, position by position in float64.
    fn by_hand(p: &[Vec<f64>], q: &[Vec<f64>], labels: &[usize], beta: f64) -> f64 {
        let (mut ratio, mut least, mut scores) = (1.0_f64, 1.0_f64, vec![]);
        for ((p, q), &label) in p.iter().zip(q).zip(labels) {
            let score: f64 = p.iter().zip(q).map(|(p, q)| (least * p).min(ratio * q)).sum();
            scores.push(score.ln());
            ratio *= q[label] / p[label];
            least = least.min(ratio);
        }
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        if beta == 0.0 {
            return -mean(&scores);
        }
        -mean(&scores.iter().map(|score| (beta * score).exp()).collect::<Vec<_>>()).ln() / beta
    }

    #[test]
    fn losses_are_those_of_the_formula_up_to_the_first_slot_without_a_label() {
        let (gamma, vocab) = (3, 5);
        let values = |step: f64| {
            let angles = Tensor::arange(6 * vocab, (Kind::Double, Device::Cpu)) * step;
            angles.sin().view([6, vocab]) * 2.0
        };
        let (draft, target) = (values(0.7), values(1.9));
        // Block 0 has all labels, block 1 misses position 1, block 2 misses position 0.
        let slots = Tensor::from_slice(&[0_i64, 1, 2, 3, 5, 7]);
        let labels = [4_usize, 0, 2, 1, 3, 3];
        let rows = BlockRows {
            labels: &Tensor::from_slice(&labels.map(|label| label as i64)),
            weights: &Tensor::ones([6], (Kind::Double, Device::Cpu)),
            slots: &slots,
            blocks: 3,
            gamma,
        };
        let probabilities = |logits: &Tensor| -> Vec<Vec<f64>> {
            Vec::<Vec<f64>>::try_from(logits.softmax(-1, Kind::Double)).unwrap()
        };
        let (p, q) = (probabilities(&draft), probabilities(&target));
        for beta in [0.0, 0.5, 1.0] {
            let found = tch::no_grad(|| block_verification_loss(&draft, &target, &rows, beta));
            let found = Vec::<f64>::try_from(found.value.view([-1])).unwrap();
            let whole = by_hand(&p[..3], &q[..3], &labels[..3], beta);
            let cut = by_hand(&p[3..4], &q[3..4], &labels[3..4], beta);
            for (found, expected) in found.iter().zip([whole, whole, whole, cut, cut, 0.0]) {
                assert!((found - expected).abs() < 1e-12, "β = {beta}: {found} and not {expected}");
            }
        }
    }
}
