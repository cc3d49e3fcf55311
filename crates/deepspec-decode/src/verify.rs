//! Exact rejection sampling of drafted blocks (Leviathan et al. 2023; Chen et al. 2023).

use tch::{Kind, Tensor};

use crate::sampling::draw;

/// Draft probabilities are clamped below at this before the division.
const DRAFT_PROB_FLOOR: f64 = 1e-8;
/// A residual with less mass than this is replaced by the target distribution.
const RESIDUAL_FLOOR: f64 = 1e-8;

/// The outcome of verifying S blocks.
pub struct Verdict {
    /// Accepted draft tokens per block, before any stop token is considered: `[S]` int64.
    pub accepted: Tensor,
    /// The token after the accepted ones, from the residual or, where all were accepted, from the target: `[S]` int64.
    pub next: Tensor,
}

/// Accepts token x_k with probability min(1, p_k(x_k)/q_k(x_k)), left to right, and draws the next token from
/// normalise(max(p − q, 0)) at the first rejection or from p behind a fully accepted block.
///
/// `target [S, Γ+1, V]` and `draft [S, Γ, V]` are float32 distributions, `tokens [S, Γ]` the drafted tokens, `lens [S]` int64
/// the block lengths γ' ≤ Γ, `accept_uniforms [S, Γ]` and `next_uniforms [S]` float64 in [0, 1).
pub fn verify(
    target: &Tensor,
    draft: &Tensor,
    tokens: &Tensor,
    lens: &Tensor,
    accept_uniforms: &Tensor,
    next_uniforms: &Tensor,
) -> Verdict {
    let (sequences, longest, vocab) = (target.size()[0], tokens.size()[1], target.size()[2]);
    if longest == 0 {
        return Verdict { accepted: lens.zeros_like(), next: draw(&target.select(1, 0), next_uniforms) };
    }
    let chosen =
        |probs: &Tensor| probs.narrow(1, 0, longest).gather(2, &tokens.unsqueeze(2), false).squeeze_dim(2); // [S, Γ]
    let ratio = chosen(target).to_kind(Kind::Double)
        / chosen(draft).to_kind(Kind::Double).clamp_min(DRAFT_PROB_FLOOR);
    let offset = Tensor::arange(longest, (Kind::Int64, target.device())).unsqueeze(0);
    let drafted = offset.lt_tensor(&lens.unsqueeze(1));
    let survives = accept_uniforms.lt_tensor(&ratio).logical_and(&drafted);
    let accepted =
        survives.to_kind(Kind::Int64).cumprod(1, Kind::Int64).sum_dim_intlist(1, false, Kind::Int64); // [S]

    let at = |probs: &Tensor, index: Tensor| {
        probs.gather(1, &index.view([-1, 1, 1]).expand([sequences, 1, vocab], false), false).squeeze_dim(1) // [S, V]
    };
    let p = at(target, accepted.shallow_clone());
    let residual = (&p - at(draft, accepted.clamp_max(longest - 1))).clamp_min(0.0);
    let rejected = accepted.lt_tensor(lens).unsqueeze(1);
    let usable = residual.sum_dim_intlist(1, true, Kind::Float).gt(RESIDUAL_FLOOR).logical_and(&rejected);
    let next = draw(&residual.where_self(&usable, &p), next_uniforms);
    Verdict { accepted, next }
}
