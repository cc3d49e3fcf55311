//! Block verification (Sun et al. 2024, arXiv:2403.10444, algorithm 2).

use tch::{Kind, Tensor};

use super::{Verification, chosen_ratios, draw_next, draw_without_drafts};

/// Accepts a block as a whole: as many tokens on average as [`verify`](super::verify), or more. The output has the target's
/// distribution, too.
///
/// With s_0 = 1 and s_i = min(1, s_{i-1}·p_i(x_i)/q_i(x_i)), the accepted length is the largest i whose uniform is below h_i.
/// At the last token of a block h_i = s_i. Before it, h_i = m_i/(m_i + 1 − s_i), where m_i is the sum over the vocabulary of
/// max(s_i·p_{i+1} − q_{i+1}, 0). After a rejection the next token comes from normalise(max(s_i·p − q, 0)).
///
/// Arguments and the remaining rules are those of [`verify`](super::verify).
pub fn verify_block(
    target: &Tensor,
    draft: &Tensor,
    tokens: &Tensor,
    lens: &Tensor,
    accept_uniforms: &Tensor,
    next_uniforms: &Tensor,
) -> Verification {
    let longest = tokens.size()[1];
    if longest == 0 {
        return draw_without_drafts(target, lens, next_uniforms);
    }
    let survival = survival_probabilities(&chosen_ratios(target, draft, tokens)); // [S, Γ+1]
    let thresholds = acceptance_thresholds(target, draft, &survival, lens); // [S, Γ]
    let length = Tensor::arange_start(1, longest + 1, (Kind::Int64, target.device())).unsqueeze(0);
    let holds = accept_uniforms.lt_tensor(&thresholds).logical_and(&length.le_tensor(&lens.unsqueeze(1)));
    let (accepted, _) = (holds.to_kind(Kind::Int64) * length).max_dim(1, false); // [S]
    let scale = survival.gather(1, &accepted.unsqueeze(1), false).to_kind(Kind::Float); // [S, 1]
    let next = draw_next(target, draft, Some(&scale), &accepted, lens, next_uniforms);
    Verification { accepted, next }
}

/// s_0 … s_Γ, `[S, Γ+1]` float64, of the ratios p/q of the drafted tokens `[S, Γ]`.
fn survival_probabilities(ratios: &Tensor) -> Tensor {
    let mut survival = vec![ratios.select(1, 0).ones_like()];
    for ratio in ratios.unbind(1) {
        let before = &survival[survival.len() - 1];
        survival.push((before * ratio).clamp_max(1.0));
    }
    Tensor::stack(&survival, 1)
}

/// h_1 … h_Γ, `[S, Γ]` float64. Entries behind a block's length have no meaning.
fn acceptance_thresholds(target: &Tensor, draft: &Tensor, survival: &Tensor, lens: &Tensor) -> Tensor {
    let longest = draft.size()[1];
    let ends = survival.narrow(1, 1, longest); // s_1 … s_Γ
    // One position at a time: the residual of all positions would be as large as `draft`.
    let mass = |i: i64| {
        let scale = survival.select(1, i).to_kind(Kind::Float).unsqueeze(1);
        let residual = (scale * target.select(1, i) - draft.select(1, i)).clamp_min(0.0);
        residual.sum_dim_intlist(1, false, Kind::Double)
    };
    let mut masses: Vec<Tensor> = (1..longest).map(mass).collect();
    masses.push(survival.select(1, 0).zeros_like()); // No block goes on behind Γ.
    let masses = Tensor::stack(&masses, 1);
    // At s_i = 1 the quotient is 1, also where rounding leaves no mass.
    let inner = (&masses / (&masses + 1.0 - &ends)).where_self(&ends.lt(1.0), &ends);
    let length = Tensor::arange_start(1, longest + 1, (Kind::Int64, target.device())).unsqueeze(0);
    ends.where_self(&length.eq_tensor(&lens.unsqueeze(1)), &inner)
}

#[cfg(test)]
mod tests {
    use deepspec_testkit::noise;
    use tch::Device;

    use super::*;
    use crate::verify;

    const VOCAB: usize = 3;
    const GAMMA: usize = 3;
    /// Uniforms for every block.
    const DRAWS: usize = 4000;

    /// Next-token distributions after every prefix of up to [`GAMMA`] tokens, at random.
    struct Law {
        probs: Vec<[f64; VOCAB]>,
    }

    impl Law {
        fn random(seed: u64, spread: f64) -> Self {
            let prefixes: usize = (0..=GAMMA).map(|length| VOCAB.pow(length as u32)).sum();
            let weights: Vec<f64> =
                noise(seed, prefixes * VOCAB).iter().map(|&x| (spread * f64::from(x)).exp()).collect();
            let normalise = |row: &[f64]| [0, 1, 2].map(|token| row[token] / row.iter().sum::<f64>());
            Self { probs: weights.chunks(VOCAB).map(normalise).collect() }
        }

        fn after(&self, prefix: &[usize]) -> [f64; VOCAB] {
            let shorter: usize = (0..prefix.len()).map(|length| VOCAB.pow(length as u32)).sum();
            self.probs[shorter + prefix.iter().fold(0, |index, token| index * VOCAB + token)]
        }

        /// Distributions along a block, `[positions, V]` float32.
        fn along(&self, block: &[usize], positions: usize) -> Tensor {
            let rows: Vec<f32> =
                (0..positions).flat_map(|k| self.after(&block[..k])).map(|p| p as f32).collect();
            Tensor::from_slice(&rows).view([positions as i64, VOCAB as i64])
        }
    }

    fn all_blocks() -> Vec<Vec<usize>> {
        let digit = |block: usize, k: usize| block / VOCAB.pow(k as u32) % VOCAB;
        (0..VOCAB.pow(GAMMA as u32)).map(|block| (0..GAMMA).map(|k| digit(block, k)).collect()).collect()
    }

    /// Expected accepted tokens of (block verification, verification token by token), by the formulas of the papers.
    fn expected_lengths(p: &Law, q: &Law) -> (f64, f64) {
        let mut expected = (0.0, 0.0);
        for block in all_blocks() {
            let (mut probability, mut survival, mut chain, mut sums) = (1.0, 1.0_f64, 1.0, (0.0, 0.0));
            for k in 0..GAMMA {
                let drafted = q.after(&block[..k])[block[k]];
                let ratio = p.after(&block[..k])[block[k]] / drafted;
                probability *= drafted;
                survival = (survival * ratio).min(1.0);
                chain *= ratio.min(1.0);
                sums = (sums.0 + survival, sums.1 + chain);
            }
            expected = (expected.0 + probability * sums.0, expected.1 + probability * sums.1);
        }
        expected
    }

    /// Mean accepted tokens of a rule, and its standard error.
    fn measured_length(
        rule: fn(&Tensor, &Tensor, &Tensor, &Tensor, &Tensor, &Tensor) -> Verification,
        p: &Law,
        q: &Law,
        seed: u64,
    ) -> (f64, f64) {
        let (mut mean, mut variance) = (0.0, 0.0);
        for (number, block) in all_blocks().iter().enumerate() {
            let rows = |one: Tensor| one.unsqueeze(0).repeat([DRAWS as i64, 1, 1]);
            let tokens: Vec<i64> = block.iter().map(|&token| token as i64).collect();
            let tokens = Tensor::from_slice(&tokens).unsqueeze(0).repeat([DRAWS as i64, 1]);
            let normal = Tensor::from_slice(&noise(seed * 100 + number as u64, DRAWS * (GAMMA + 1)));
            // The normal distribution function makes the noise uniform.
            let uniforms = (normal.to_kind(Kind::Double) * std::f64::consts::FRAC_1_SQRT_2).erf() * 0.5 + 0.5;
            let uniforms = uniforms.view([DRAWS as i64, GAMMA as i64 + 1]);
            let lens = Tensor::full([DRAWS as i64], GAMMA as i64, (Kind::Int64, Device::Cpu));
            let found = rule(
                &rows(p.along(block, GAMMA + 1)),
                &rows(q.along(block, GAMMA)),
                &tokens,
                &lens,
                &uniforms.narrow(1, 0, GAMMA as i64),
                &uniforms.select(1, GAMMA as i64),
            );
            let accepted = found.accepted.to_kind(Kind::Double);
            let probability: f64 = (0..GAMMA).map(|k| q.after(&block[..k])[block[k]]).product();
            mean += probability * accepted.mean(None).double_value(&[]);
            variance += probability.powi(2) * accepted.var(true).double_value(&[]) / DRAWS as f64;
        }
        (mean, variance.sqrt())
    }

    #[test]
    fn a_block_is_accepted_as_far_as_the_papers_say_and_never_less_than_by_tokens() {
        let mut gained = 0.0;
        for (seed, spread) in (1..=8).zip([0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]) {
            let (p, q) = (Law::random(seed, spread), Law::random(seed + 100, spread));
            let (block, token) = expected_lengths(&p, &q);
            assert!(block >= token - 1e-12, "law {seed}: {block} by blocks, {token} by tokens");
            gained += block - token;
            let found = [
                (measured_length(verify_block, &p, &q, seed), block),
                (measured_length(verify, &p, &q, seed), token),
            ];
            for ((mean, error), expected) in found {
                assert!(
                    (mean - expected).abs() < 4.0 * error,
                    "law {seed}: {mean} ± {error} instead of {expected}"
                );
            }
        }
        assert!(gained > 0.2, "the laws do not tell the rules apart: {gained}");
    }

    /// Frequencies of the tokens after the first accepted token, over uniforms at equal distances.
    fn frequencies_after_one(p: &Law, q: &Law, block: &[usize]) -> Option<Vec<f64>> {
        let rows = |one: Tensor| one.unsqueeze(0).repeat([DRAWS as i64, 1, 1]);
        let tokens: Vec<i64> = block.iter().map(|&token| token as i64).collect();
        let double = (Kind::Double, Device::Cpu);
        // The first token is accepted if it can be, and no later one.
        let accept = Tensor::from_slice(&[0.0, 2.0, 2.0]).unsqueeze(0).repeat([DRAWS as i64, 1]);
        let found = verify_block(
            &rows(p.along(block, GAMMA + 1)),
            &rows(q.along(block, GAMMA)),
            &Tensor::from_slice(&tokens).unsqueeze(0).repeat([DRAWS as i64, 1]),
            &Tensor::full([DRAWS as i64], GAMMA as i64, (Kind::Int64, Device::Cpu)),
            &accept,
            &((Tensor::arange(DRAWS as i64, double) + 0.5) / DRAWS as f64),
        );
        let counts = found.next.bincount::<Tensor>(None, VOCAB as i64).to_kind(Kind::Double) / DRAWS as f64;
        (found.accepted.min().int64_value(&[]) == 1).then(|| Vec::try_from(counts).unwrap())
    }

    #[test]
    fn the_token_after_a_rejection_comes_from_the_scaled_residual() {
        let (mut compared, mut unscaled_error) = (0, 0.0_f64);
        for seed in 1..=8 {
            let (p, q) = (Law::random(seed, 1.0), Law::random(seed + 100, 1.0));
            for block in all_blocks() {
                let Some(found) = frequencies_after_one(&p, &q, &block) else { continue };
                let survival = (p.after(&[])[block[0]] / q.after(&[])[block[0]]).min(1.0);
                let (target, draft) = (p.after(&block[..1]), q.after(&block[..1]));
                let residual = |scale: f64| {
                    let weights = [0, 1, 2].map(|token| (scale * target[token] - draft[token]).max(0.0));
                    weights.map(|weight| weight / weights.iter().sum::<f64>())
                };
                let error = |expected: [f64; VOCAB]| {
                    found
                        .iter()
                        .zip(expected)
                        .map(|(found, expected)| (found - expected).abs())
                        .fold(0.0, f64::max)
                };
                assert!(
                    error(residual(survival)) < 2.0 / DRAWS as f64,
                    "law {seed}, block {block:?}: {found:?}"
                );
                unscaled_error = unscaled_error.max(error(residual(1.0)));
                compared += 1;
            }
        }
        assert!(compared > 50 && unscaled_error > 0.1, "{compared} blocks, {unscaled_error}");
    }
}
