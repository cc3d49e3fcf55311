//! What is learned: a weighted sum of losses, each a function of three distances between p^d, p^t and the label.

use tch::{Kind, Tensor};

use super::recipe::{Dpace, Lk, LkForm, LossRecipe};
use super::rows::Measures;

/// Below this an overlap counts as this, so that its logarithm stays finite.
const LEAST_OVERLAP: f64 = 1e-8;

/// Weights of the losses. For a row with label x*, drafter p^d and target p^t:
///
/// - `ce`: −log p^d(x*);
/// - `l1`: ‖p^d − p^t‖₁;
/// - `soft_ce`: −Σ p^t log p^d;
/// - `kl`: Σ p^t log(p^t/p^d), the same gradient;
/// - `lk`: with the overlap α = Σ min(p^d, p^t), −log α, or λ·KL + (1 − λ)·(1 − α) with the constant λ = exp(−ηα)
///   (Samarin et al. 2026, arXiv 2602.23881);
/// - `dpace`: replaces the position weights of `ce` (arXiv 2605.18810), see [`LossAlphas::pace`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LossAlphas {
    /// Of the cross entropy with the label.
    pub ce: f64,
    /// Of ‖p^d − p^t‖₁.
    pub l1: f64,
    /// Of the cross entropy with p^t.
    pub soft_ce: f64,
    /// Of the divergence of p^t from p^d.
    pub kl: f64,
    /// Of an overlap loss.
    pub lk: Option<Lk>,
    /// Position weights of `ce` that follow the drafter's confidence.
    pub dpace: Option<Dpace>,
    /// Of the confidence head's binary cross entropy.
    pub confidence: f64,
}

/// Weight of each row's gradient by the logits, `[n, 1]` each; None where a loss is off.
pub(super) struct Slopes {
    /// Of p^d − onehot(x*).
    pub label: Option<Tensor>,
    /// Of p^d − p^t.
    pub soft: Option<Tensor>,
    /// Of ∂‖p^d − p^t‖₁.
    pub l1: Option<Tensor>,
}

impl Slopes {
    /// All of them times a number.
    pub fn scaled(self, factor: f64) -> Self {
        let scaled = |slope: Option<Tensor>| slope.map(|slope| slope * factor);
        Self { label: scaled(self.label), soft: scaled(self.soft), l1: scaled(self.l1) }
    }
}

impl LossAlphas {
    /// Those of a recipe; `confidence` is the weight of the confidence head's loss.
    pub fn new(loss: &LossRecipe, confidence: f64) -> Self {
        let LossRecipe { ce_alpha, l1_alpha, soft_ce_alpha, kl_alpha, lk, dpace, .. } = *loss;
        Self { ce: ce_alpha, l1: l1_alpha, soft_ce: soft_ce_alpha, kl: kl_alpha, lk, dpace, confidence }
    }

    /// Whether some loss needs −Σ p^t log p^d.
    pub(super) fn needs_soft(&self) -> bool {
        self.soft_ce != 0.0 || self.kl != 0.0 || self.lk.is_some_and(|lk| lk.form == LkForm::Hybrid)
    }

    /// Losses of rows, α-weighted and summed, and their slopes. `weights` and `pace` are `[n, 1]`: those of the positions, and
    /// those of the label's cross entropy. Also gives the row's overlap loss.
    pub(super) fn evaluate(
        &self,
        measures: &Measures,
        weights: &Tensor,
        pace: &Tensor,
    ) -> (Tensor, Option<Tensor>, Slopes) {
        let mut loss = &measures.ce * pace * self.ce + &measures.l1 * weights * self.l1;
        let mut slopes = Slopes {
            label: (self.ce != 0.0).then(|| pace * self.ce),
            soft: None,
            l1: (self.l1 != 0.0).then(|| weights * self.l1),
        };
        let add = |slope: &mut Option<Tensor>, more: Tensor| {
            *slope = Some(slope.take().map_or_else(|| more.shallow_clone(), |slope| slope + &more));
        };
        if let Some((soft_ce, kl)) = &measures.soft {
            loss += (soft_ce * self.soft_ce + kl * self.kl) * weights;
            if self.soft_ce + self.kl != 0.0 {
                add(&mut slopes.soft, weights * (self.soft_ce + self.kl));
            }
        }
        let lk = self.lk.and_then(|lk| measures.overlap.as_ref().map(|overlap| (lk, overlap)));
        let lk = lk.map(|(Lk { form, alpha, eta }, overlap)| {
            // ∂α = −½ ∂‖p^d − p^t‖₁, because both distributions sum to 1.
            let value = match (form, &measures.soft) {
                (LkForm::Hybrid, Some((_, kl))) => {
                    let blend = (overlap * -eta).exp();
                    let rest = 1.0 - &blend;
                    add(&mut slopes.soft, weights * &blend * alpha);
                    add(&mut slopes.l1, weights * &rest * (0.5 * alpha));
                    blend * kl + rest * (1.0 - overlap)
                }
                _ => {
                    let known = overlap.ge(LEAST_OVERLAP).to_kind(Kind::Float);
                    let overlap = overlap.clamp_min(LEAST_OVERLAP);
                    add(&mut slopes.l1, weights * (known / &overlap) * (0.5 * alpha));
                    -overlap.log()
                }
            };
            loss += &value * weights * alpha;
            value
        });
        (loss, lk, slopes)
    }

    /// Position weights of the label's cross entropy by D-PACE: with the drafter's confidence q_i = p^d(x*_i), smoothed to
    /// (1 − s)·q_i + s, the weight of position j is Σ_{m ≥ j} Π_{i ≤ m} of them, constant in the gradient.
    ///
    /// `ce [n, 1]` are the rows of `blocks` whole blocks of γ positions at `places [n]` (block · γ + position).
    pub(super) fn pace(dpace: Dpace, ce: &Tensor, places: &Tensor, blocks: i64, gamma: i64) -> Tensor {
        let confidence = ce.squeeze_dim(1).neg().exp() * (1.0 - dpace.smoothing) + dpace.smoothing;
        // Positions behind the supervised ones end the prefix.
        let survival = Tensor::zeros([blocks * gamma], (Kind::Float, ce.device()))
            .index_copy(0, places, &confidence)
            .view([blocks, gamma])
            .cumprod(1, Kind::Float);
        let value = survival.flip([1]).cumsum(1, Kind::Float).flip([1]);
        value.view([-1]).index_select(0, places).unsqueeze(1)
    }
}
