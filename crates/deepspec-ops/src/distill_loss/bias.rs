//! The low-rank bias of the logits and its gradients.

use tch::Tensor;

use super::sources::unique_with_inverse;
use super::span::BlockSpan;
use super::vocab_chunks::VocabChunk;
use crate::ffi;
use crate::linear::matmul_into;

/// A low-rank bias of the logits, `features · W2ᵀ`: that of DSpark's Markov head, or of Domino's correction head.
#[derive(Clone, Copy)]
pub struct LowRankBias<'a> {
    /// Features, `[R, r]`.
    pub features: &'a Tensor,
    /// Group number of each row, `[R]`: rows of one group have equal features, and only the sum of their gradients is
    /// used. None if all rows may differ.
    pub feature_group: Option<&'a [i64]>,
    /// W2, `[V, r]`.
    pub w2: &'a Tensor,
    /// Float32 accumulator of W2's gradient, `[V, r]`. None if W2 is frozen.
    pub w2_gradient: Option<&'a Tensor>,
}

/// The bias of one chunk, computed for one vocabulary range at a time.
pub(super) struct ChunkBias<'a> {
    of: LowRankBias<'a>,
    /// Features of the chunk's n rows, or of its distinct rows: `[n, r]`.
    features: Tensor,
    /// Gradients of `features`.
    by_features: Tensor,
    shared: Option<SharedFeatures<'a>>,
}

/// Rows that share features.
struct SharedFeatures<'a> {
    /// Index among all rows of each group's last row.
    last_rows: Tensor,
    /// Group of each row of the chunk.
    of_rows: Tensor,
    /// Buffer for the groups' bias over one vocabulary range.
    buffer: &'a Tensor,
}

impl<'a> ChunkBias<'a> {
    /// `buffer` has at least the chunk's rows and the columns of one vocabulary range. With a buffer and feature groups,
    /// each distinct feature row is multiplied once; otherwise every row is multiplied. Feature gradients go to
    /// `by_features [R, r]`.
    pub fn new(
        of: LowRankBias<'a>,
        chunk: &BlockSpan,
        by_features: &Tensor,
        buffer: Option<&'a Tensor>,
    ) -> Self {
        let shared = of.feature_group.zip(buffer).and_then(|(feature_group, buffer)| {
            let first = chunk.first_row as usize;
            let (numbers, of_rows) = unique_with_inverse(&feature_group[first..first + chunk.rows as usize]);
            let mut last_rows = vec![0; numbers.len()];
            for (row, &of) in (chunk.first_row..).zip(&of_rows) {
                last_rows[of as usize] = row;
            }
            let are_shared = last_rows.len() < of_rows.len();
            let [last_rows, of_rows] = [last_rows, of_rows].map(|list| Tensor::from_slice(&list));
            are_shared.then_some(SharedFeatures { last_rows, of_rows, buffer })
        });
        let (features, by_features) = match &shared {
            Some(shared) => {
                let features = of.features.index_select(0, &shared.last_rows);
                let by_features = features.empty_like();
                (features, by_features)
            }
            None => (chunk.slice_rows(of.features), chunk.slice_rows(by_features)),
        };
        Self { of, features, by_features, shared }
    }

    /// Writes the bias of a vocabulary range to `logits [n, C]`, or adds it to them.
    pub fn write_logits(&self, tokens: &VocabChunk, logits: &mut Tensor, add: bool) {
        let w2 = tokens.slice_weight(self.of.w2);
        match &self.shared {
            Some(shared) => {
                assert!(add, "what rows have in common is added to what they have of their own");
                let mut shared_bias = shared.buffer_slice(tokens);
                matmul_into(&self.features, &w2.tr(), &mut shared_bias, false);
                if !ffi::add_to_rows(logits, &shared.of_rows, &shared_bias) {
                    let _ = logits.g_add_(&shared_bias.index_select(0, &shared.of_rows));
                }
            }
            None => matmul_into(&self.features, &w2.tr(), logits, add),
        }
    }

    /// Adds the gradients of features and W2, given logit gradients `by_rows [n, C]` of a vocabulary range. Ranges
    /// come in vocabulary order.
    pub fn backward(&mut self, tokens: &VocabChunk, by_rows: &Tensor) {
        let gradients = match &self.shared {
            Some(shared) => {
                let mut sums = shared.buffer_slice(tokens);
                if !ffi::sum_rows(by_rows, &shared.of_rows, &mut sums) {
                    let _ = sums.zero_().index_add_(0, &shared.of_rows, by_rows);
                }
                sums
            }
            None => by_rows.shallow_clone(),
        };
        matmul_into(&gradients, &tokens.slice_weight(self.of.w2), &mut self.by_features, !tokens.is_first());
        if let Some(sum) = self.of.w2_gradient {
            matmul_into(&gradients.tr(), &self.features, &mut tokens.slice_weight(sum), true);
        }
    }

    /// Writes gradients of shared features to `by_features [R, r]`.
    pub fn write_shared_gradients(self, chunk: &BlockSpan, by_features: &Tensor) {
        if let Some(SharedFeatures { last_rows, .. }) = self.shared {
            let _ = chunk.slice_rows(by_features).zero_();
            let _ = by_features.shallow_clone().index_copy_(0, &last_rows, &self.by_features);
        }
    }
}

impl SharedFeatures<'_> {
    /// The buffer's view for a vocabulary range.
    fn buffer_slice(&self, tokens: &VocabChunk) -> Tensor {
        self.buffer.narrow(0, 0, self.last_rows.size()[0]).narrow(1, 0, tokens.count())
    }
}
