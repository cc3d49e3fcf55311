//! Groups sequences into batches for the target.

use std::ops::Range;

/// Limits of one forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForwardLimits {
    /// Maximum number of tokens; a longer sequence runs alone.
    pub tokens: usize,
    /// Maximum number of sequences.
    pub sequences: usize,
}

/// Splits consecutive sequences, given by their lengths, into batches within the limits. Returns
/// the index range of each batch.
///
/// Order is kept, and each split depends only on earlier sequences, so equal lengths give equal
/// batches. A build resumed at a shard therefore repeats the forwards of an uninterrupted one.
pub fn split_into_batches(
    lengths: impl IntoIterator<Item = usize>,
    budget: ForwardLimits,
) -> Vec<Range<usize>> {
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

/// Splits consecutive sequences, given by their lengths, into ranges of at most `tokens` tokens. A
/// longer sequence gets its own range.
pub fn split_by_tokens(lengths: impl IntoIterator<Item = usize>, tokens: usize) -> Vec<Range<usize>> {
    split_into_batches(lengths, ForwardLimits { tokens, sequences: usize::MAX })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_count_tokens_only() {
        assert_eq!(split_by_tokens([1, 1, 1, 1, 5, 9], 4), [0..4, 4..5, 5..6]);
    }

    #[test]
    fn runs_keep_order_and_budget() {
        let budget = ForwardLimits { tokens: 10, sequences: 3 };
        assert_eq!(split_into_batches([4, 6, 1, 25, 1, 1, 1, 1], budget), [0..2, 2..3, 3..4, 4..7, 7..8]);
        assert!(split_into_batches([], budget).is_empty());
    }
}
