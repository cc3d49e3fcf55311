//! A tokenised sample without hidden states.

use deepspec_core::digest::Hasher;
use serde::{Deserialize, Serialize};

use crate::cache::error::CacheError;
use crate::cache::layout::loss_mask;
use deepspec_core::FinalStates;

/// A tokenised conversation whose hidden states are not captured yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedSample {
    /// Unique id, taken from the input row.
    pub id: String,
    /// Token ids, L of them.
    pub input_ids: Vec<i32>,
    /// Supervised tokens as half-open spans, ascending, not overlapping, within `0..L`.
    pub spans: Vec<(u32, u32)>,
}

impl PlannedSample {
    /// Number of tokens. [`crate::cache::Plan::new`] rejects counts beyond 32 bits.
    pub fn length(&self) -> u32 {
        u32::try_from(self.input_ids.len()).unwrap_or(u32::MAX)
    }

    /// Number of supervised tokens.
    pub fn supervised_count(&self) -> u32 {
        count_supervised(&self.spans)
    }

    /// One flag per token, `true` if it is supervised.
    pub fn loss_mask(&self) -> Vec<bool> {
        loss_mask(self.length(), &self.spans)
    }

    /// Positions whose final hidden state is stored, ascending.
    pub fn last_positions(&self, last: FinalStates) -> Vec<u32> {
        last.kept_positions(&self.loss_mask())
    }

    /// Checks the number of tokens and the spans. Spans must not be empty, out of order or outside
    /// the sample.
    ///
    /// # Errors
    /// Names the problem and the sample id.
    pub fn check(&self) -> Result<(), CacheError> {
        let length = self.input_ids.len();
        if length == 0 || i32::try_from(length).is_err() {
            return Err(CacheError::BadLength { sample: self.id.clone(), length });
        }
        match find_bad_span(self.length(), &self.spans) {
            None => Ok(()),
            Some((after, (start, end))) => {
                Err(CacheError::BadSpan { sample: self.id.clone(), start, end, after, length })
            }
        }
    }

    /// Adds the id, token ids and spans to a digest.
    pub(crate) fn add_to(&self, hasher: &mut Hasher) {
        let ids: Vec<u8> = self.input_ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let spans: Vec<u8> = self
            .spans
            .iter()
            .flat_map(|(start, end)| [start.to_le_bytes(), end.to_le_bytes()].concat())
            .collect();
        hasher.update_part(self.id.as_bytes()).update_part(&ids).update_part(&spans);
    }
}

/// The first span that is empty, out of order or beyond `length`, with the end of the previous
/// span.
pub(crate) fn find_bad_span(length: u32, spans: &[(u32, u32)]) -> Option<(u32, (u32, u32))> {
    let mut after = 0;
    for &(start, end) in spans {
        if start < after || end <= start || end > length {
            return Some((after, (start, end)));
        }
        after = end;
    }
    None
}

/// Position of the first token id outside the vocabulary.
pub(crate) fn find_outside_vocab(ids: &[i32], vocab_size: usize) -> Option<usize> {
    ids.iter().position(|&id| usize::try_from(id).map_or(true, |id| id >= vocab_size))
}

/// Number of tokens in spans that passed [`find_bad_span`].
pub(crate) fn count_supervised(spans: &[(u32, u32)]) -> u32 {
    spans.iter().map(|(start, end)| end - start).sum()
}
