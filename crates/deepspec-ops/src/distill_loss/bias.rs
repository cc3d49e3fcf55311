//! The Markov head's part of the logits, and its gradients.

use tch::Tensor;

use super::pieces::TokenRange;
use super::sources::distinct;
use super::span::Span;
use crate::ffi::{add_to_rows, multiply, sum_rows};

/// The Markov head's part of the logits, `features · W2ᵀ`.
#[derive(Clone, Copy)]
pub struct Bias<'a> {
    /// `[R, r]`.
    pub features: &'a Tensor,
    /// A number for each row, `[R]`: rows of one number have the same features, of whose gradients the sum alone is used. None where all may differ.
    pub alike: Option<&'a [i64]>,
    /// W2 `[V, r]`.
    pub w2: &'a Tensor,
    /// To which the gradient by W2 is added, `[V, r]`: float32, or W2's kind where that is float32 too. None where it does not learn.
    pub w2_gradient: Option<&'a Tensor>,
}

/// The same of a chunk, for some tokens at a time.
pub(super) struct ChunkBias<'a> {
    of: Bias<'a>,
    /// Of its n rows, or of those that differ: `[n, r]`.
    features: Tensor,
    /// The gradients by them.
    by_features: Tensor,
    shared: Option<Shared<'a>>,
}

/// Rows that have features in common.
struct Shared<'a> {
    /// Of those with the same ones, the last: where it is among all.
    last_rows: Tensor,
    /// For each row of the chunk, which of those it has.
    of_rows: Tensor,
    /// For as many rows, or more, and some tokens.
    buffer: &'a Tensor,
}

impl<'a> ChunkBias<'a> {
    /// Where there is a `buffer`, of at least as many rows as the chunk has and as many columns as there are tokens at a time, what rows have in
    /// common is multiplied once; else row by row. The gradients by the features go to their place in `by_features [R, r]`.
    pub fn new(of: Bias<'a>, chunk: &Span, by_features: &Tensor, buffer: Option<&'a Tensor>) -> Self {
        let shared = of.alike.zip(buffer).and_then(|(alike, buffer)| {
            let first = chunk.first_row as usize;
            let (numbers, of_rows) = distinct(&alike[first..first + chunk.rows as usize]);
            let mut last_rows = vec![0; numbers.len()];
            for (row, &of) in (chunk.first_row..).zip(&of_rows) {
                last_rows[of as usize] = row;
            }
            let are_shared = last_rows.len() < of_rows.len();
            let [last_rows, of_rows] = [last_rows, of_rows].map(|list| Tensor::from_slice(&list));
            are_shared.then_some(Shared { last_rows, of_rows, buffer })
        });
        let (features, by_features) = match &shared {
            Some(shared) => {
                let features = of.features.index_select(0, &shared.last_rows);
                let by_features = features.empty_like();
                (features, by_features)
            }
            None => (chunk.of(of.features), chunk.of(by_features)),
        };
        Self { of, features, by_features, shared }
    }

    /// Puts it in place of the `logits [n, C]` of some tokens, or adds it to them.
    pub fn write(&self, tokens: &TokenRange, logits: &mut Tensor, add: bool) {
        let w2 = tokens.of_weight(self.of.w2);
        match &self.shared {
            Some(shared) => {
                assert!(add, "what rows have in common is added to what they have of their own");
                let mut in_common = shared.piece(tokens);
                multiply(&self.features, &w2.tr(), &mut in_common, false);
                add_to_rows(logits, &shared.of_rows, &in_common);
            }
            None => multiply(&self.features, &w2.tr(), logits, add),
        }
    }

    /// Carries on gradients by the logits of some tokens, `[n, C]`: to the features, and to W2. All pieces come one after the other.
    pub fn backward(&mut self, tokens: &TokenRange, by_rows: &Tensor) {
        let gradients = match &self.shared {
            Some(shared) => {
                let mut sums = shared.piece(tokens);
                sum_rows(by_rows, &shared.of_rows, &mut sums);
                sums
            }
            None => by_rows.shallow_clone(),
        };
        multiply(&gradients, &tokens.of_weight(self.of.w2), &mut self.by_features, !tokens.is_first());
        if let Some(sum) = self.of.w2_gradient {
            multiply(&gradients.tr(), &self.features, &mut tokens.of_weight(sum), true);
        }
    }

    /// Brings the gradients by the features of `chunk` to their place in `by_features [R, r]`, where they are not made there.
    pub fn finish(self, chunk: &Span, by_features: &Tensor) {
        if let Some(Shared { last_rows, .. }) = self.shared {
            let _ = chunk.of(by_features).zero_();
            let _ = by_features.shallow_clone().index_copy_(0, &last_rows, &self.by_features);
        }
    }
}

impl Shared<'_> {
    /// The part of the buffer that such tokens take.
    fn piece(&self, tokens: &TokenRange) -> Tensor {
        self.buffer.narrow(0, 0, self.last_rows.size()[0]).narrow(1, 0, tokens.count())
    }
}
