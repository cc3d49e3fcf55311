//! Loss terms of rows, one per entry of [`TERMS`], with closed-form gradients.

use tch::{Kind, Tensor};

use super::recipe::{Dpace, Lk, LkForm, LossRecipe};
use crate::ffi::RowDistances;

/// Lower bound of the overlap, which keeps its logarithm finite.
const MIN_OVERLAP: f64 = 1e-8;

/// All terms, in the order of their columns.
pub const TERMS: [&dyn LossTerm; 6] =
    [&CrossEntropy, &L1, &SoftCrossEntropy, &KlDivergence, &OverlapLoss, &BlockVerificationTerm];

/// Measurements of some rows, `[n, 1]` float32 each.
pub struct RowStats {
    /// −log p^d(x*).
    pub ce: Tensor,
    /// ‖p^d − p^t‖₁.
    pub l1: Tensor,
    /// −Σ p^t log p^d and Σ p^t log(p^t/p^d), if a loss needs them.
    pub soft: Option<(Tensor, Tensor)>,
    /// Σ min(p^d, p^t), if a loss needs it or a kernel returns it.
    pub overlap: Option<Tensor>,
    /// 1 where drafter and target have the same argmax, if requested.
    pub agreement: Option<Tensor>,
    /// 1 where the drafter's argmax is the label, if a loss needs it.
    pub correct: Option<Tensor>,
    /// Loss of the row's block under block verification, if the recipe has one.
    pub block_verification: Option<Tensor>,
}

impl RowStats {
    /// Converts measurements of a kernel.
    pub(super) fn from_kernel(found: RowDistances, agreement: Option<Tensor>, needs: RequiredStats) -> Self {
        let RowDistances { ce, l1, overlap, soft } = found;
        let soft = soft.filter(|_| needs.soft);
        Self { ce, l1, soft, overlap: Some(overlap), agreement, correct: None, block_verification: None }
    }
}

/// A loss of a row with label x*, drafter p^d and target p^t.
pub trait LossTerm: Sync {
    /// Name of the term; its metric is `NAME_loss`.
    fn name(&self) -> &'static str;

    /// Weight of the term in a recipe.
    fn alpha(&self, recipe: &LossRecipe) -> f64;

    /// Measurements that the term needs.
    fn required_stats(&self, _recipe: &LossRecipe) -> RequiredStats {
        RequiredStats::default()
    }

    /// Whether a metric reports the term.
    fn is_reported(&self, recipe: &LossRecipe) -> bool {
        self.alpha(recipe) != 0.0
    }

    /// Whether position weights that follow the drafter apply to the term.
    fn is_adaptive(&self) -> bool {
        false
    }

    /// Value of each row, `[n, 1]`, and its gradient; None if not measured.
    fn evaluate(&self, distances: &RowStats, recipe: &LossRecipe) -> Option<(Tensor, TermGradient)>;
}

/// Measurements that only some losses need.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequiredStats {
    /// −Σ p^t log p^d and Σ p^t log(p^t/p^d).
    pub soft: bool,
    /// Σ min(p^d, p^t).
    pub overlap: bool,
    /// Whether drafter and target have the same argmax.
    pub agreement: bool,
    /// Whether the drafter's argmax is the label.
    pub correct: bool,
    /// Loss of the row's block under block verification.
    pub block_verification: bool,
}

/// The gradient of a term by the drafter's logits, as factors of three gradients that all terms share.
#[derive(Default)]
pub struct TermGradient {
    /// Factor of p^d − onehot(x*).
    label: Option<RowFactor>,
    /// Factor of p^d − p^t.
    soft: Option<RowFactor>,
    /// Factor of ∂‖p^d − p^t‖₁.
    l1: Option<RowFactor>,
}

/// Factor of a gradient for each row.
enum RowFactor {
    /// 1 in every row.
    One,
    /// A factor per row, `[n, 1]`.
    Rows(Tensor),
}

impl RowFactor {
    fn times(self, weights: &Tensor) -> Tensor {
        match self {
            Self::One => weights.shallow_clone(),
            Self::Rows(rows) => rows * weights,
        }
    }
}

/// −log p^d(x*).
struct CrossEntropy;

impl LossTerm for CrossEntropy {
    fn name(&self) -> &'static str {
        "ce"
    }

    fn alpha(&self, recipe: &LossRecipe) -> f64 {
        recipe.ce_alpha
    }

    fn is_reported(&self, _: &LossRecipe) -> bool {
        true
    }

    fn is_adaptive(&self) -> bool {
        true
    }

    fn evaluate(&self, distances: &RowStats, _: &LossRecipe) -> Option<(Tensor, TermGradient)> {
        let gradient = TermGradient { label: Some(RowFactor::One), ..TermGradient::default() };
        Some((distances.ce.shallow_clone(), gradient))
    }
}

/// ‖p^d − p^t‖₁.
struct L1;

impl LossTerm for L1 {
    fn name(&self) -> &'static str {
        "l1"
    }

    fn alpha(&self, recipe: &LossRecipe) -> f64 {
        recipe.l1_alpha
    }

    fn is_reported(&self, _: &LossRecipe) -> bool {
        true
    }

    fn evaluate(&self, distances: &RowStats, _: &LossRecipe) -> Option<(Tensor, TermGradient)> {
        let gradient = TermGradient { l1: Some(RowFactor::One), ..TermGradient::default() };
        Some((distances.l1.shallow_clone(), gradient))
    }
}

/// −Σ p^t log p^d.
struct SoftCrossEntropy;

impl LossTerm for SoftCrossEntropy {
    fn name(&self) -> &'static str {
        "soft_ce"
    }

    fn alpha(&self, recipe: &LossRecipe) -> f64 {
        recipe.soft_ce_alpha
    }

    fn required_stats(&self, recipe: &LossRecipe) -> RequiredStats {
        RequiredStats { soft: recipe.soft_ce_alpha != 0.0, ..RequiredStats::default() }
    }

    fn evaluate(&self, distances: &RowStats, _: &LossRecipe) -> Option<(Tensor, TermGradient)> {
        let (soft_ce, _) = distances.soft.as_ref()?;
        Some((
            soft_ce.shallow_clone(),
            TermGradient { soft: Some(RowFactor::One), ..TermGradient::default() },
        ))
    }
}

/// Σ p^t log(p^t/p^d), with the gradient of [`SoftCrossEntropy`].
struct KlDivergence;

impl LossTerm for KlDivergence {
    fn name(&self) -> &'static str {
        "kl"
    }

    fn alpha(&self, recipe: &LossRecipe) -> f64 {
        recipe.kl_alpha
    }

    fn required_stats(&self, recipe: &LossRecipe) -> RequiredStats {
        RequiredStats { soft: recipe.kl_alpha != 0.0, ..RequiredStats::default() }
    }

    fn evaluate(&self, distances: &RowStats, _: &LossRecipe) -> Option<(Tensor, TermGradient)> {
        let (_, kl) = distances.soft.as_ref()?;
        Some((kl.shallow_clone(), TermGradient { soft: Some(RowFactor::One), ..TermGradient::default() }))
    }
}

/// LK loss of the overlap α = Σ min(p^d, p^t) (Samarin et al. 2026, arXiv 2602.23881). `LkForm::Hybrid` computes
/// λ·KL + (1 − λ)·(1 − α), with λ = exp(−ηα) constant in the gradient. The other form computes −log α.
struct OverlapLoss;

impl LossTerm for OverlapLoss {
    fn name(&self) -> &'static str {
        "lk"
    }

    fn alpha(&self, recipe: &LossRecipe) -> f64 {
        recipe.lk.map_or(0.0, |lk| lk.alpha)
    }

    fn is_reported(&self, recipe: &LossRecipe) -> bool {
        recipe.lk.is_some()
    }

    fn required_stats(&self, recipe: &LossRecipe) -> RequiredStats {
        let hybrid = recipe.lk.is_some_and(|lk| lk.form == LkForm::Hybrid);
        RequiredStats { soft: hybrid, overlap: recipe.lk.is_some(), ..RequiredStats::default() }
    }

    fn evaluate(&self, distances: &RowStats, recipe: &LossRecipe) -> Option<(Tensor, TermGradient)> {
        let (Lk { form, eta, .. }, overlap) = recipe.lk.zip(distances.overlap.as_ref())?;
        // ∂α = −½ ∂‖p^d − p^t‖₁, because both distributions sum to 1.
        Some(match (form, &distances.soft) {
            (LkForm::Hybrid, Some((_, kl))) => {
                let blend = (overlap * -eta).exp();
                let rest = 1.0 - &blend;
                let l1 = Some(RowFactor::Rows(&rest * 0.5));
                let value = &blend * kl + rest * (1.0 - overlap);
                (value, TermGradient { label: None, soft: Some(RowFactor::Rows(blend)), l1 })
            }
            _ => {
                let known = overlap.ge(MIN_OVERLAP).to_kind(Kind::Float);
                let overlap = overlap.clamp_min(MIN_OVERLAP);
                let l1 = Some(RowFactor::Rows(known / &overlap * 0.5));
                (-overlap.log(), TermGradient { label: None, soft: None, l1 })
            }
        })
    }
}

/// Loss of a block under block verification. Its gradient is no multiple of the three that the other terms share, so
/// [`block_verification_loss`](super::block_verification::block_verification_loss) computes it.
struct BlockVerificationTerm;

impl LossTerm for BlockVerificationTerm {
    fn name(&self) -> &'static str {
        "block_verification"
    }

    fn alpha(&self, recipe: &LossRecipe) -> f64 {
        recipe.block_verification.map_or(0.0, |bv| bv.alpha)
    }

    fn is_reported(&self, recipe: &LossRecipe) -> bool {
        recipe.block_verification.is_some()
    }

    fn required_stats(&self, recipe: &LossRecipe) -> RequiredStats {
        RequiredStats { block_verification: recipe.block_verification.is_some(), ..RequiredStats::default() }
    }

    fn evaluate(&self, distances: &RowStats, _: &LossRecipe) -> Option<(Tensor, TermGradient)> {
        Some((distances.block_verification.as_ref()?.shallow_clone(), TermGradient::default()))
    }
}

/// Factors of three gradients with respect to the logits, `[n, 1]` each. A factor is None if no loss needs its
/// gradient.
#[derive(Default)]
pub(super) struct GradCoeffs {
    /// Factor of p^d − onehot(x*).
    pub label: Option<Tensor>,
    /// Factor of p^d − p^t.
    pub soft: Option<Tensor>,
    /// Factor of ∂‖p^d − p^t‖₁.
    pub l1: Option<Tensor>,
}

impl GradCoeffs {
    /// Adds a term's factors, times row weights `weights [n, 1]`.
    fn add_term(&mut self, gradient: TermGradient, weights: &Tensor) {
        let TermGradient { label, soft, l1 } = gradient;
        for (sum, factor) in [(&mut self.label, label), (&mut self.soft, soft), (&mut self.l1, l1)] {
            if let Some(more) = factor.map(|factor| factor.times(weights)) {
                *sum = Some(sum.take().map_or_else(|| more.shallow_clone(), |sum| sum + &more));
            }
        }
    }

    /// The three factors as `[n, 3]`.
    pub fn to_tensor(&self, labels: &Tensor) -> Tensor {
        let none = labels.zeros_like().to_kind(Kind::Float).view([-1, 1]);
        let factors = [&self.label, &self.soft, &self.l1].map(|of| of.as_ref().unwrap_or(&none));
        Tensor::cat(&factors, 1)
    }

    /// Multiplies all factors by a number.
    pub fn scaled(self, factor: f64) -> Self {
        let scaled = |coefficient: Option<Tensor>| coefficient.map(|coefficient| coefficient * factor);
        Self { label: scaled(self.label), soft: scaled(self.soft), l1: scaled(self.l1) }
    }
}

/// Losses of some rows.
pub(super) struct WeightedLoss {
    /// Values of [`TERMS`], `[n, 1]`; None if not measured.
    pub terms: [Option<Tensor>; TERMS.len()],
    /// Sum of the terms, weighted by α and position.
    pub loss: Tensor,
    /// Factors of the gradient of `loss`.
    pub coeffs: GradCoeffs,
}

impl LossRecipe {
    /// Measurements in addition to cross entropy and ‖p^d − p^t‖₁, which are always computed.
    pub(super) fn required_stats(&self) -> RequiredStats {
        let own = RequiredStats { correct: self.until_first_error, ..RequiredStats::default() };
        TERMS.iter().map(|term| term.required_stats(self)).fold(own, |all, needs| RequiredStats {
            soft: all.soft || needs.soft,
            overlap: all.overlap || needs.overlap,
            agreement: all.agreement || needs.agreement,
            correct: all.correct || needs.correct,
            block_verification: all.block_verification || needs.block_verification,
        })
    }

    /// Losses of rows. `weights [n, 1]` are position weights; `adaptive [n, 1]` follow the drafter.
    pub(super) fn evaluate(&self, distances: &RowStats, weights: &Tensor, adaptive: &Tensor) -> WeightedLoss {
        let (mut loss, mut coeffs) = (distances.ce.zeros_like(), GradCoeffs::default());
        let terms = TERMS.map(|term| {
            let (value, gradient) = term.evaluate(distances, self)?;
            let alpha = term.alpha(self);
            if alpha != 0.0 {
                let weights = if term.is_adaptive() { adaptive } else { weights } * alpha;
                loss += &value * &weights;
                coeffs.add_term(gradient, &weights);
            }
            Some(value)
        });
        WeightedLoss { terms, loss, coeffs }
    }

    /// Weights of the cross entropy that depend on the drafter's probabilities, `[n, 1]`, constant in the gradient.
    /// None if the recipe uses fixed weights that decay by position. The rows form `blocks` whole blocks of γ
    /// positions; `slots` returns block · γ + position, `[n]`.
    pub(super) fn adaptive_ce_weights(
        &self,
        stats: &RowStats,
        weights: &Tensor,
        slots: impl FnOnce() -> Tensor,
        blocks: i64,
        gamma: i64,
    ) -> Option<Tensor> {
        if let Some(correct) = stats.correct.as_ref().filter(|_| self.until_first_error) {
            return Some(weights * Self::mask_until_first_error(correct, &slots(), blocks, gamma));
        }
        let dpace = self.dpace?;
        Some(Self::dpace_weights(dpace, &stats.ce, &slots(), blocks, gamma))
    }

    /// 1 in rows up to and including their block's first row that is not `correct`, else 0: `[n, 1]`.
    fn mask_until_first_error(correct: &Tensor, slots: &Tensor, blocks: i64, gamma: i64) -> Tensor {
        let prefix = Tensor::ones([blocks * gamma], (Kind::Float, correct.device()))
            .index_copy(0, slots, &correct.squeeze_dim(1))
            .view([blocks, gamma])
            .cumprod(1, Kind::Float);
        let first = prefix.narrow(1, 0, 1).ones_like();
        let before = Tensor::cat(&[first, prefix.narrow(1, 0, gamma - 1)], 1);
        before.view([-1]).index_select(0, slots).unsqueeze(1)
    }

    /// D-PACE weights of the cross entropy, constant in the gradient. Confidences are c_i = (1 − s)·q_i + s with q_i
    /// = p^d(x*_i). Position j has weight Σ_{m ≥ j} Π_{i ≤ m} c_i.
    ///
    /// `ce [n, 1]` holds rows of `blocks` whole blocks of γ positions; `slot_index [n]` is block · γ + position.
    fn dpace_weights(dpace: Dpace, ce: &Tensor, slot_index: &Tensor, blocks: i64, gamma: i64) -> Tensor {
        let confidence = ce.squeeze_dim(1).neg().exp() * (1.0 - dpace.smoothing) + dpace.smoothing;
        // Unsupervised slots end the prefix.
        let survival = Tensor::zeros([blocks * gamma], (Kind::Float, ce.device()))
            .index_copy(0, slot_index, &confidence)
            .view([blocks, gamma])
            .cumprod(1, Kind::Float);
        let value = survival.flip([1]).cumsum(1, Kind::Float).flip([1]);
        value.view([-1]).index_select(0, slot_index).unsqueeze(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_count_up_to_the_first_error_of_their_block() {
        // Three blocks of four slots; the second has two supervised slots, the third has one.
        let slots = [0_i64, 1, 2, 3, 4, 5, 8];
        let correct = [1.0_f32, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0];
        let correct = Tensor::from_slice(&correct).unsqueeze(1);
        let counted = LossRecipe::mask_until_first_error(&correct, &Tensor::from_slice(&slots), 3, 4);
        assert_eq!(Vec::<f32>::try_from(counted.view([-1])).unwrap(), [1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]);
    }
}
