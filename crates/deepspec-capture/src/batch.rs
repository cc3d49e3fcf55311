//! Groups sequences into batches for the target.

use std::ops::Range;

/// Limits of one forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Most tokens; a longer sequence runs alone.
    pub tokens: usize,
    /// Most sequences.
    pub sequences: usize,
}

/// Cuts consecutive sequences, given by their lengths, into batches within the budget.
///
/// Order is kept and each cut depends only on earlier sequences, so equal lengths give equal
/// batches. A build resumed at a shard therefore repeats the forwards of an uninterrupted one.
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

/// Cuts consecutive sequences, given by their lengths, into windows of at most `tokens` tokens. A
/// longer sequence runs alone.
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
