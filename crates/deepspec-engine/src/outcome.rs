//! The result of a step, copied to the host.

use deepspec_ops::{AcceptedPath, DraftTree};

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
    /// Accepted paths of the trees; empty if blocks were verified.
    pub paths: Vec<AcceptedPath>,
}

/// Result of verifying one tree.
pub struct TreeVerdict {
    /// The cycle's counts.
    pub cycle: Cycle,
    /// Tokens to commit.
    pub tokens: Vec<i64>,
    /// Rows of the tree's chunk that stay, the anchor's first, as runs (first row, number of rows).
    pub kept: Vec<(i64, i64)>,
}

impl VerifyOutcome {
    /// Splits the values that a step copies to the host in one transfer. The values are a flag per
    /// row of logits; `accepted`, `next`, drafted tokens and confidences of the decoding slots; and
    /// the prompts' first tokens.
    pub fn new(values: &[f64], prefilling: usize, lens: &[usize], ends_at_stop_tokens: bool) -> Self {
        let (decoding, longest) = (lens.len(), lens.iter().copied().max().unwrap_or(0));
        let (finite, values) = split_flags(values, prefilling, lens.iter().copied());
        let (head, first) = values.split_at(values.len() - prefilling);
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
            paths: vec![],
        }
    }

    /// Splits the values that a step with trees copies to the host. They are a flag per row of logits, the target's token behind every row
    /// of the trees, and the prompts' first tokens.
    pub fn of_trees(values: &[f64], prefilling: usize, trees: &[DraftTree]) -> Self {
        let (finite, values) = split_flags(values, prefilling, trees.iter().map(DraftTree::len));
        let (mut drawn, first) = values.split_at(values.len() - prefilling);
        let mut accept = |tree: &DraftTree| {
            let (own, rest) = drawn.split_at(1 + tree.len());
            drawn = rest;
            tree.accept(&ids(own))
        };
        Self {
            finite,
            accepted: vec![],
            next: vec![],
            tokens: vec![],
            confidence: vec![],
            first: ids(first),
            longest: 0,
            ends_at_stop_tokens: false,
            paths: trees.iter().map(&mut accept).collect(),
        }
    }

    /// The counts of tree `i`, the tokens to commit, and the rows to keep. An accepted stop token ends the path, and the tree at its
    /// depth, without a bonus token.
    pub fn tree_verdict(&self, i: usize, tree: &DraftTree, stop_ids: &[i64]) -> TreeVerdict {
        let AcceptedPath { rows, next } = &self.paths[i];
        let token = |row: &usize| tree.tokens()[row - 1];
        let stop = rows.iter().position(|row| stop_ids.contains(&token(row))).map(|at| at + 1);
        let accepted = &rows[..stop.unwrap_or(rows.len())];
        let mut tokens: Vec<i64> = accepted.iter().map(token).collect();
        if stop.is_none() {
            tokens.push(*next);
        }
        let depth = stop.unwrap_or_else(|| tree.max_depth());
        let until_stop = depth_until_stop(tree, stop_ids).min(depth);
        let nodes = tree.depths().iter().filter(|&&of| of <= depth).count();
        let mut kept = vec![(0, 1)];
        for &row in accepted {
            match kept.last_mut() {
                Some((first, count)) if *first + *count == row as i64 => *count += 1,
                _ => kept.push((row as i64, 1)),
            }
        }
        let [proposed, nodes, until_stop, accepted, committed] =
            [depth, nodes, until_stop, accepted.len(), tokens.len()].map(|count| count as u32);
        let cycle = Cycle { proposed, nodes, until_stop, accepted, committed, confidence: vec![] };
        TreeVerdict { cycle, tokens, kept }
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
        (Cycle { proposed, nodes: 0, until_stop, accepted, committed, confidence }, tokens)
    }
}

fn ids(values: &[f64]) -> Vec<i64> {
    values.iter().map(|&value| value as i64).collect()
}

/// Takes a flag per row of logits from the front of `values`: those of chunks of 1 + `lens` rows, and one per prompt. Returns whether all
/// flags of a chunk are set, and the other values.
fn split_flags(
    values: &[f64],
    prefilling: usize,
    lens: impl Iterator<Item = usize> + Clone,
) -> (Vec<bool>, &[f64]) {
    let rows = lens.map(|len| len + 1).chain(std::iter::repeat_n(1, prefilling));
    let (mut flags, values) = values.split_at(rows.clone().sum());
    let mut all_set = |rows: usize| {
        let (own, rest) = flags.split_at(rows);
        flags = rest;
        own.iter().all(|&flag| flag == 1.0)
    };
    (rows.map(&mut all_set).collect(), values)
}

/// Depth of the deepest node without a stop token above it.
fn depth_until_stop(tree: &DraftTree, stop_ids: &[i64]) -> usize {
    let mut ended = vec![false; 1 + tree.len()];
    let mut deepest = 0;
    for (node, (&token, &parent)) in tree.tokens().iter().zip(tree.parents()).enumerate() {
        if !ended[parent] {
            deepest = deepest.max(tree.depths()[node]);
        }
        ended[node + 1] = ended[parent] || stop_ids.contains(&token);
    }
    deepest
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

    #[test]
    fn a_trees_counts_are_those_of_its_depths() {
        const STOP: i64 = 9;
        // The anchor has the children 4 and 5. Behind 4 come 6 and the stop token, behind them 7 and 8.
        let mut tree = DraftTree::default();
        for (parent, token) in [(0, 4), (0, 5), (1, 6), (1, STOP), (3, 7), (4, 8)] {
            tree.add(parent, token);
        }
        let verdict = |drawn: [f64; 7]| {
            let read = [[1.0; 8].as_slice(), &drawn, &[3.0]].concat();
            let outcome = VerifyOutcome::of_trees(&read, 1, std::slice::from_ref(&tree));
            assert_eq!((&outcome.finite, &outcome.first), (&vec![true; 2], &vec![3]));
            let TreeVerdict { cycle, tokens, kept } = outcome.tree_verdict(0, &tree, &[STOP]);
            let Cycle { proposed, nodes, until_stop, accepted, committed, .. } = cycle;
            ([proposed, nodes, until_stop, accepted, committed], tokens, kept)
        };
        assert_eq!(
            verdict([4.0, 6.0, 0.0, 7.0, 0.0, 2.0, 0.0]),
            ([3, 6, 3, 3, 4], vec![4, 6, 7, 2], vec![(0, 2), (3, 1), (5, 1)])
        );
        assert_eq!(
            verdict([5.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
            ([3, 6, 3, 1, 2], vec![5, 1], vec![(0, 1), (2, 1)])
        );
        assert_eq!(verdict([0.0; 7]), ([3, 6, 3, 0, 1], vec![0], vec![(0, 1)]));
        // An accepted stop token ends answer and tree.
        assert_eq!(
            verdict([4.0, 9.0, 0.0, 0.0, 8.0, 0.0, 0.0]),
            ([2, 4, 2, 2, 2], vec![4, STOP], vec![(0, 2), (4, 1)])
        );
        assert_eq!(depth_until_stop(&tree, &[6, STOP]), 2);
    }
}
