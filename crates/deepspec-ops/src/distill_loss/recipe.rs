//! Loss settings of a block drafter.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Default of `decay_gamma`.
const DECAY_GAMMA: f64 = 4.0;

/// Weights of the block losses; one that is left out is 0.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LossRecipe {
    /// Weight of the cross entropy with the label.
    #[serde(default)]
    pub ce_alpha: f64,
    /// Weight of ‖p^d − p^t‖₁.
    #[serde(default)]
    pub l1_alpha: f64,
    /// Weight of the cross entropy with p^t.
    #[serde(default)]
    pub soft_ce_alpha: f64,
    /// Weight of the Kullback-Leibler divergence of p^d from p^t: the gradient of `soft_ce_alpha`, another value.
    #[serde(default)]
    pub kl_alpha: f64,
    /// A loss of the overlap of p^d and p^t; absent means none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lk: Option<Lk>,
    /// A loss of the tokens that block verification accepts; absent means none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_verification: Option<BlockVerification>,
    /// Position weights of the cross entropy with the label that follow the drafter's confidence; absent means those of
    /// `decay_gamma`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dpace: Option<Dpace>,
    /// Whether the cross entropy counts only up to and including the first slot whose likeliest token is not the label (Spec-AUF,
    /// arXiv 2607.01893).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[schemars(extend("default" = false))]
    pub until_first_error: bool,
    /// Position k of a block weighs exp(−k / this).
    #[serde(default = "default_decay_gamma")]
    pub decay_gamma: f64,
}

/// How the overlap α = Σ min(p^d, p^t), the target's accept rate, is learned (LK losses, arXiv 2602.23881).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LkForm {
    /// −log α.
    LogAcceptance,
    /// λ·KL + (1 − λ)·(1 − α) with the constant λ = exp(−η·α) of the row: divergence first, overlap as it grows.
    Hybrid,
}

/// An overlap loss.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Lk {
    /// Its form.
    #[serde(rename = "type")]
    pub form: LkForm,
    /// Its weight.
    #[serde(default = "default_lk_alpha")]
    pub alpha: f64,
    /// η of the hybrid form; the paper's best is 3.
    #[serde(default = "default_lk_eta")]
    pub eta: f64,
}

/// A loss of the tokens that block verification accepts (BV, arXiv 2609.34832). A block with scores s_k loses
/// −1/β · log mean_k e^{β s_k} and weighs as the sum of its position weights. Its positions end before the first one without
/// a label.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BlockVerification {
    /// Its weight.
    #[serde(default = "default_block_verification_alpha")]
    pub alpha: f64,
    /// β at the end of training, which grows linearly from 0. Larger values weigh positions that are accepted already.
    #[serde(default = "default_block_verification_beta")]
    pub beta: f64,
}

/// Dynamic position weights (D-PACE, arXiv 2605.18810), constant in the gradient. Position j has weight Σ_{m ≥ j}
/// Π_{i ≤ m} ((1 − s)·q_i + s), where q_i is the drafter's probability of label i. The denominator stays that of
/// `decay_gamma`, which is known before any forward.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Dpace {
    /// s, in (0, 1]; the paper's value is 0.5.
    #[serde(default = "default_dpace_smoothing")]
    pub smoothing: f64,
}

impl LossRecipe {
    /// All weights are 0, with the default `decay_gamma`.
    pub const NONE: Self = Self {
        ce_alpha: 0.0,
        l1_alpha: 0.0,
        soft_ce_alpha: 0.0,
        kl_alpha: 0.0,
        lk: None,
        block_verification: None,
        dpace: None,
        until_first_error: false,
        decay_gamma: DECAY_GAMMA,
    };

    /// The losses at `progress` of training, from 0 to 1.
    pub fn at(&self, progress: f64) -> Self {
        let block_verification =
            self.block_verification.map(|bv| BlockVerification { beta: bv.beta * progress, ..bv });
        Self { block_verification, ..*self }
    }

    /// Checks that weights are finite and not negative, and that at least one is positive.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        if self.decay_gamma.is_nan() || self.decay_gamma <= 0.0 {
            return Err(("loss.decay_gamma", "must be positive".into()));
        }
        let (lk_alpha, lk_eta) = self.lk.map_or((0.0, 0.0), |lk| (lk.alpha, lk.eta));
        let (bv_alpha, bv_beta) = self.block_verification.map_or((0.0, 0.0), |bv| (bv.alpha, bv.beta));
        let from_zero = [
            ("loss.ce_alpha", self.ce_alpha),
            ("loss.l1_alpha", self.l1_alpha),
            ("loss.soft_ce_alpha", self.soft_ce_alpha),
            ("loss.kl_alpha", self.kl_alpha),
            ("loss.lk.alpha", lk_alpha),
            ("loss.lk.eta", lk_eta),
            ("loss.block_verification.alpha", bv_alpha),
            ("loss.block_verification.beta", bv_beta),
        ];
        if let Some((key, found)) = from_zero.iter().find(|(_, value)| !value.is_finite() || *value < 0.0) {
            return Err((key, format!("{found} is no number from 0")));
        }
        if [self.ce_alpha, self.l1_alpha, self.soft_ce_alpha, self.kl_alpha, lk_alpha, bv_alpha]
            .iter()
            .all(|&a| a == 0.0)
        {
            return Err((
                "loss",
                "all weights are 0; give at least one of ce_alpha, l1_alpha, soft_ce_alpha, kl_alpha, \
                 lk and block_verification"
                    .into(),
            ));
        }
        if self.until_first_error && self.dpace.is_some() {
            return Err((
                "loss.until_first_error",
                "`dpace` weighs positions too; leave one of both out".into(),
            ));
        }
        if self.until_first_error && self.ce_alpha == 0.0 {
            let problem = "it weighs the cross entropy with the label, but ce_alpha is 0";
            return Err(("loss.until_first_error", problem.into()));
        }
        match self.dpace {
            Some(Dpace { smoothing }) if !(smoothing > 0.0 && smoothing <= 1.0) => {
                Err(("loss.dpace.smoothing", format!("{smoothing} is not in (0, 1]")))
            }
            Some(_) if self.ce_alpha == 0.0 => {
                Err(("loss.dpace", "it weighs the cross entropy with the label, but ce_alpha is 0".into()))
            }
            _ => Ok(()),
        }
    }
}

fn default_decay_gamma() -> f64 {
    DECAY_GAMMA
}

fn default_lk_alpha() -> f64 {
    1.0
}

fn default_lk_eta() -> f64 {
    3.0
}

fn default_block_verification_alpha() -> f64 {
    1.0
}

fn default_block_verification_beta() -> f64 {
    1.0
}

fn default_dpace_smoothing() -> f64 {
    0.5
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beta_grows_with_training() {
        let block_verification = Some(BlockVerification { alpha: 0.9, beta: 2.0 });
        let recipe = LossRecipe { ce_alpha: 0.1, block_verification, ..LossRecipe::NONE };
        for (progress, beta) in [(0.0, 0.0), (0.5, 1.0), (1.0, 2.0)] {
            let found = recipe.at(progress);
            assert_eq!(found.block_verification, Some(BlockVerification { alpha: 0.9, beta }));
            assert_eq!(LossRecipe { block_verification, ..found }, recipe);
        }
    }
}
