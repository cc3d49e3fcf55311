//! Which sequences run through the target together.

use std::ops::Range;

/// What one forward may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Tokens; a longer sequence runs alone.
    pub tokens: usize,
    /// Sequences.
    pub sequences: usize,
}

/// Cuts consecutive sequences, given by their lengths, into runs that keep the budget.
///
/// Order is kept and each cut looks only at what precedes it, so the same lengths always give the same runs: a build that
/// is resumed at a shard repeats the very forwards of one that was not stopped.
pub fn batches(lengths: impl IntoIterator<Item = usize>, budget: Budget) -> Vec<Range<usize>> {
    let (mut runs, mut tokens): (Vec<Range<usize>>, usize) = (Vec::new(), 0);
    for (index, length) in lengths.into_iter().enumerate() {
        match runs.last_mut() {
            Some(run) if tokens + length <= budget.tokens && run.len() < budget.sequences => {
                run.end = index + 1;
                tokens += length;
            }
            _ => {
                runs.push(index..index + 1);
                tokens = length;
            }
        }
    }
    runs
}

/// Cuts consecutive sequences, given by their lengths, into windows of at most so many tokens (a longer one is alone).
pub fn windows(lengths: impl IntoIterator<Item = usize>, tokens: usize) -> Vec<Range<usize>> {
    batches(lengths, Budget { tokens, sequences: usize::MAX })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_count_tokens_only() {
        assert_eq!(windows([1, 1, 1, 1, 5, 9], 4), [0..4, 4..5, 5..6]);
    }

    #[test]
    fn runs_keep_order_and_budget() {
        let budget = Budget { tokens: 10, sequences: 3 };
        assert_eq!(batches([4, 6, 1, 25, 1, 1, 1, 1], budget), [0..2, 2..3, 3..4, 4..7, 7..8]);
        assert!(batches([], budget).is_empty());
    }
}
