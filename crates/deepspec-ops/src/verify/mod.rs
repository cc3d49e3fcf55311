//! Exact rejection sampling of draft blocks (Leviathan et al. 2023; Chen et al. 2023).

mod block;

pub use block::verify_block;
use tch::{Kind, Tensor};

use crate::sample::sample;

/// Below this sum of the residual, the next token is drawn from the target distribution instead.
const RESIDUAL_FLOOR: f64 = 1e-8;

/// The result of verifying S blocks.
pub struct Verification {
    /// Accepted draft tokens of each block, before stop tokens are considered: `[S]` int64.
    pub accepted: Tensor,
    /// The token after the accepted tokens, `[S]` int64. The function that returns it describes how it is drawn.
    pub next: Tensor,
}

/// Accepts token x_k with probability min(1, p_k(x_k)/q_k(x_k)), from left to right. At the first rejection the next token
/// comes from normalise(max(p − q, 0)). It comes from p after a fully accepted block, and where that residual is at most
/// 1e-8.
///
/// `target [S, Γ+1, V]` and `draft [S, Γ, V]` are float32 distributions. `tokens [S, Γ]` are the draft tokens. `lens [S]`
/// int64 are the block lengths γ' ≤ Γ. `accept_uniforms [S, Γ]` and `next_uniforms [S]` are float64 in [0, 1). Every device
/// computes this with libtorch's operators.
pub fn verify(
    target: &Tensor,
    draft: &Tensor,
    tokens: &Tensor,
    lens: &Tensor,
    accept_uniforms: &Tensor,
    next_uniforms: &Tensor,
) -> Verification {
    if tokens.size()[1] == 0 {
        return draw_without_drafts(target, lens, next_uniforms);
    }
    let holds = accept_uniforms.lt_tensor(&chosen_ratios(target, draft, tokens));
    let accepted = accepted_prefix_len(&holds, lens); // [S]
    let next = draw_next(target, draft, None, &accepted, lens, next_uniforms);
    Verification { accepted, next }
}

/// The result for blocks without drafted tokens.
fn draw_without_drafts(target: &Tensor, lens: &Tensor, uniforms: &Tensor) -> Verification {
    Verification { accepted: lens.zeros_like(), next: sample(&target.select(1, 0), uniforms) }
}

/// p(x)/q(x) of the drafted tokens, `[S, Γ]` float64.
fn chosen_ratios(target: &Tensor, draft: &Tensor, tokens: &Tensor) -> Tensor {
    let longest = tokens.size()[1];
    let chosen =
        |probs: &Tensor| probs.narrow(1, 0, longest).gather(2, &tokens.unsqueeze(2), false).squeeze_dim(2); // [S, Γ]
    // A sampled token has q > 0; the clamp avoids 0 / 0.
    chosen(target).to_kind(Kind::Double) / chosen(draft).to_kind(Kind::Double).clamp_min(f64::MIN_POSITIVE)
}

/// Draws the token after `accepted [S]` tokens: from normalise(max(scale·p − q, 0)) after a rejection, else from p. `scale [S, 1]`
/// is float32, None for 1.
fn draw_next(
    target: &Tensor,
    draft: &Tensor,
    scale: Option<&Tensor>,
    accepted: &Tensor,
    lens: &Tensor,
    uniforms: &Tensor,
) -> Tensor {
    let blocks = Tensor::arange(target.size()[0], (Kind::Int64, target.device()));
    let at = |probs: &Tensor, places: &Tensor| probs.index(&[Some(&blocks), Some(places)]); // [S, V]
    let p = at(target, accepted);
    let scaled = scale.map_or_else(|| p.shallow_clone(), |scale| &p * scale);
    let residual = (scaled - at(draft, &accepted.clamp_max(draft.size()[1] - 1))).clamp_min(0.0);
    let rejected = accepted.lt_tensor(lens).unsqueeze(1);
    let usable = residual.sum_dim_intlist(1, true, Kind::Float).gt(RESIDUAL_FLOOR).logical_and(&rejected);
    sample(&residual.where_self(&usable, &p), uniforms)
}

/// Greedy verification: accepts the longest prefix of `tokens [S, Γ]` that matches the target's argmax, `target [S, Γ+1]` int64.
pub fn verify_greedy(target: &Tensor, tokens: &Tensor, lens: &Tensor) -> Verification {
    if tokens.size()[1] == 0 {
        return Verification { accepted: lens.zeros_like(), next: target.select(1, 0) };
    }
    let accepted = accepted_prefix_len(&target.narrow(1, 0, tokens.size()[1]).eq_tensor(tokens), lens);
    let next = target.gather(1, &accepted.unsqueeze(1), false).squeeze_dim(1);
    Verification { accepted, next }
}

/// Number of leading tokens for which `holds` is true, within the block lengths: `[S]` int64 of `holds [S, Γ]` and `lens [S]`.
fn accepted_prefix_len(holds: &Tensor, lens: &Tensor) -> Tensor {
    let offset = Tensor::arange(holds.size()[1], (Kind::Int64, holds.device())).unsqueeze(0);
    let survives = holds.logical_and(&offset.lt_tensor(&lens.unsqueeze(1)));
    survives.to_kind(Kind::Int64).cumprod(1, Kind::Int64).sum_dim_intlist(1, false, Kind::Int64)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    type Verify = fn(&Tensor, &Tensor, &Tensor, &Tensor, &Tensor, &Tensor) -> Verification;
    const RULES: [Verify; 2] = [verify, verify_block];

    #[test]
    fn a_blocks_verdict_is_the_same_alone_and_cut_from_longer_drafts() {
        let (sequences, longest, vocab) = (40, 4, 7);
        let values = |shape: [i64; 3], step: f64| {
            let angles = Tensor::arange(shape.iter().product::<i64>(), (Kind::Float, Device::Cpu)) * step;
            angles.sin().view(shape).softmax(-1, Kind::Float)
        };
        let (p, drafted) = (values([sequences, longest + 1, vocab], 0.7), values([sequences, 6, vocab], 1.9));
        let q = drafted.narrow(1, 0, longest);
        let uniforms = (Tensor::arange(sequences * longest, (Kind::Double, Device::Cpu)) * 0.618_034).frac();
        let uniforms = uniforms.view([sequences, longest]);
        let tokens = Tensor::arange(sequences * longest, (Kind::Int64, Device::Cpu)).remainder(vocab);
        let tokens = tokens.view([sequences, longest]);
        let lens = Tensor::arange(sequences, (Kind::Int64, Device::Cpu)).remainder(longest + 1);
        for verify in RULES {
            let found = verify(&p, &q, &tokens, &lens, &uniforms, &uniforms.select(1, 0));
            for block in 0..sequences {
                let of = |tensor: &Tensor| tensor.narrow(0, block, 1).contiguous();
                let next = of(&uniforms.select(1, 0));
                let alone = verify(&of(&p), &of(&q), &of(&tokens), &of(&lens), &of(&uniforms), &next);
                assert_eq!(alone.accepted, of(&found.accepted), "block {block}");
                assert_eq!(alone.next, of(&found.next), "block {block}");
            }
            let counts = found.accepted.bincount::<Tensor>(None, longest + 1);
            assert!(counts.ge(1).all().int64_value(&[]) != 0, "accepted so often: {counts}");
        }
    }

    #[test]
    fn greedy_verification_equals_verification_of_one_hot_distributions() {
        let (sequences, longest, vocab) = (60, 5, 7);
        let cpu = (Kind::Int64, Device::Cpu);
        let target = Tensor::arange(sequences * (longest + 1), cpu).square().remainder(vocab);
        let target = target.view([sequences, longest + 1]);
        // Sequence s differs from the target at token s mod (Γ + 1), or nowhere if that is Γ.
        // Blocks of every length occur.
        let sequence = Tensor::arange(sequences, cpu);
        let differs = Tensor::arange(longest, cpu).eq_tensor(&sequence.remainder(longest + 1).unsqueeze(1));
        let tokens = (target.narrow(1, 0, longest) + differs.to_kind(Kind::Int64)).remainder(vocab);
        let lens = sequence.floor_divide_scalar(longest + 1).remainder(longest + 1);
        let [p, q] = [&target, &tokens].map(|of| of.one_hot(vocab).to_kind(Kind::Float));
        for q in [q.shallow_clone(), &q * 0.79 + 0.03] {
            let uniforms = Tensor::full([sequences, longest], 0.999, (Kind::Double, Device::Cpu));
            let found = verify_greedy(&target, &tokens, &lens);
            for verify in RULES {
                let expected = verify(&p, &q, &tokens, &lens, &uniforms, &uniforms.select(1, 0));
                assert_eq!(found.accepted, expected.accepted);
                assert_eq!(found.next, expected.next);
            }
            let counts = found.accepted.bincount::<Tensor>(None, longest + 1);
            assert!(counts.min().int64_value(&[]) > 0, "accepted so often: {counts}");
        }
        let undrafted = verify_greedy(&target.narrow(1, 0, 1), &tokens.narrow(1, 0, 0), &lens.zeros_like());
        assert_eq!(undrafted.accepted, lens.zeros_like());
        assert_eq!(undrafted.next, target.select(1, 0));
    }
}
