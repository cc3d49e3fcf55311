//! The result of a step, copied to the host.

use crate::Cycle;

/// Values that the host reads back after a step.
pub struct VerifyOutcome {
    /// Whether all logits of a slot were finite: first the decoding slots, then the prompts.
    pub finite: Vec<bool>,
    accepted: Vec<usize>,
    next: Vec<i64>,
    tokens: Vec<i64>,
    confidence: Vec<f32>,
    /// First generated token of each prompt.
    pub first: Vec<i64>,
    longest: usize,
    /// See [`crate::Proposer::ends_at_stop_tokens`].
    ends_at_stop_tokens: bool,
}

impl VerifyOutcome {
    /// Splits the values that a step copies to the host in one transfer. The values are a flag per
    /// row of logits; `accepted`, `next`, drafted tokens and confidences of the decoding slots; and
    /// the prompts' first tokens.
    pub fn new(values: &[f64], prefilling: usize, lens: &[usize], ends_at_stop_tokens: bool) -> Self {
        let (decoding, longest) = (lens.len(), lens.iter().copied().max().unwrap_or(0));
        let rows = lens.iter().map(|len| len + 1).chain(std::iter::repeat_n(1, prefilling));
        let (mut flags, values) = values.split_at(rows.clone().sum());
        let mut all_set = |rows: usize| {
            let (own, rest) = flags.split_at(rows);
            flags = rest;
            own.iter().all(|&flag| flag == 1.0)
        };
        let finite = rows.map(&mut all_set).collect();
        let (head, first) = values.split_at(values.len() - prefilling);
        let ids = |part: &[f64]| part.iter().map(|&v| v as i64).collect();
        let (accepted, rest) = head.split_at(decoding);
        let (next, rest) = rest.split_at(decoding);
        let (tokens, confidence) = rest.split_at(decoding * longest);
        Self {
            finite,
            accepted: accepted.iter().map(|&n| n as usize).collect(),
            next: ids(next),
            tokens: ids(tokens),
            confidence: confidence.iter().map(|&c| c as f32).collect(),
            first: ids(first),
            longest,
            ends_at_stop_tokens,
        }
    }

    /// The counts of block `i` and the tokens to commit. An accepted stop token ends the block and
    /// the proposal, without a bonus token. A rejected stop token only ends the usable part.
    pub fn cycle_and_tokens(&self, i: usize, proposed: usize, stop_ids: &[i64]) -> (Cycle, Vec<i64>) {
        let start = i * self.longest;
        let drafts = &self.tokens[start..start + proposed];
        let first_stop = drafts.iter().position(|token| stop_ids.contains(token)).map(|at| at + 1);
        let until_stop = first_stop.unwrap_or(proposed);
        let stop = first_stop.filter(|&length| length <= self.accepted[i]);
        let ends_at = if self.ends_at_stop_tokens { first_stop } else { stop };
        let proposed = ends_at.unwrap_or(proposed);
        let confidence = match self.confidence.is_empty() {
            true => vec![],
            false => self.confidence[start..start + proposed].to_vec(),
        };
        let mut tokens = drafts[..stop.unwrap_or(self.accepted[i])].to_vec();
        let accepted = tokens.len() as u32;
        if stop.is_none() {
            tokens.push(self.next[i]);
        }
        let [proposed, until_stop, committed] =
            [proposed, until_stop, tokens.len()].map(|count| count as u32);
        (Cycle { proposed, until_stop, accepted, committed, confidence }, tokens)
    }
}

/// Indices that expand ragged blocks `[Σ(1+γ')]` to `[S, Γ+1]`. A shorter block repeats its last
/// row, and the repeats are never used. None if all blocks have length Γ.
pub fn padding_indices(lens: &[usize], longest: usize) -> Option<Vec<usize>> {
    if lens.iter().all(|&len| len == longest) {
        return None;
    }
    let mut start = 0;
    let mut indices = Vec::with_capacity(lens.len() * (longest + 1));
    for &len in lens {
        indices.extend((0..=longest).map(|k| start + k.min(len)));
        start += len + 1;
    }
    Some(indices)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_told_of_what_stands_behind_a_stop_token() {
        const STOP: i64 = 9;
        // Three blocks of three tokens. The middle token of the last two is the stop token. Block 1
        // accepts all tokens; block 2 rejects the stop token and the token after it.
        let accepted = [1.0, 3.0, 1.0];
        let tokens = [1.0, 2.0, 3.0, 4.0, 9.0, 5.0, 6.0, 9.0, 5.0];
        let read = [[1.0; 12].as_slice(), &accepted, &[7.0, 8.0, 7.0], &tokens, &[0.5; 9]].concat();
        let outcome = VerifyOutcome::new(&read, 0, &[3, 3, 3], false);
        assert_eq!(outcome.finite, [true; 3]);
        let (cycle, tokens) = outcome.cycle_and_tokens(0, 3, &[STOP]);
        assert_eq!((cycle.proposed, cycle.accepted, cycle.committed, tokens), (3, 1, 2, vec![1, 7]));
        assert_eq!((cycle.until_stop, &cycle.confidence), (3, &vec![0.5; 3]));
        let (cycle, tokens) = outcome.cycle_and_tokens(1, 3, &[STOP]);
        assert_eq!((cycle.proposed, cycle.accepted, cycle.committed, tokens), (2, 2, 2, vec![4, STOP]));
        assert_eq!(cycle.confidence, [0.5; 2], "no drafter learns what comes after it");
        assert_eq!(cycle.until_stop, 2);
        let (cycle, tokens) = outcome.cycle_and_tokens(2, 3, &[STOP]);
        assert_eq!((cycle.proposed, cycle.accepted, cycle.committed, tokens), (3, 1, 2, vec![6, 7]));
        assert_eq!(
            (cycle.until_stop, cycle.confidence.len()),
            (2, 3),
            "all were verified, two can be of use"
        );
        assert_eq!(cycle.confidence_until_stop(), [0.5; 2]);
    }
    #[test]
    fn a_block_that_ends_at_stop_tokens_is_no_longer_for_a_rejected_one() {
        const STOP: i64 = 9;
        let read = [[1.0; 4].as_slice(), &[1.0], &[7.0], &[1.0, 9.0, 3.0]].concat();
        let proposed =
            |ends: bool| VerifyOutcome::new(&read, 0, &[3], ends).cycle_and_tokens(0, 3, &[STOP]).0.proposed;
        assert_eq!((proposed(true), proposed(false)), (2, 3));
    }

    #[test]
    fn a_row_that_is_not_finite_is_its_own_sequences() {
        // Blocks of one and two tokens, and two prompts.
        let flags = [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0];
        let read = [flags.as_slice(), &[0.0; 2], &[5.0; 2], &[1.0; 4], &[2.0, 3.0]].concat();
        let outcome = VerifyOutcome::new(&read, 2, &[1, 2], false);
        assert_eq!((outcome.finite, outcome.first), (vec![true, false, true, false], vec![2, 3]));
    }
}
