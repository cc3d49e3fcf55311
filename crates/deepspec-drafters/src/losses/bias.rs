//! The Markov head's part of the logits, and its gradients.

use deepspec_native::{add_to_rows, multiply, sum_rows};
use tch::Tensor;

use super::chunks::{Columns, Span};

/// The Markov head's part of the logits, `features · W2ᵀ`.
#[derive(Clone, Copy)]
pub struct Bias<'a> {
    /// `[R, r]`.
    pub features: &'a Tensor,
    /// Whether rows of one source have the same features, of whose gradients the sum alone is used.
    pub by_source: bool,
    /// W2 `[V, r]`.
    pub w2: &'a Tensor,
    /// To which the gradient by W2 is added, `[V, r]`: float32, or W2's kind where that is float32 too. None where it does not learn.
    pub w2_gradient: Option<&'a Tensor>,
}

/// The same of a chunk, whose columns are worked at some at a time.
pub(super) struct ChunkBias<'a> {
    of: Bias<'a>,
    /// Of its n rows or sources, `[n, r]`.
    features: Tensor,
    /// The gradients by them.
    by_features: Tensor,
    shared: Option<Shared<'a>>,
}

/// What rows of one source share.
pub(super) struct Shared<'a> {
    /// Each source's first row among all.
    pub first_rows: Tensor,
    /// Each row's source among the chunk's.
    pub of_rows: &'a Tensor,
    /// For some columns of as many sources, or more.
    pub buffer: &'a Tensor,
}

impl<'a> ChunkBias<'a> {
    /// By row, or where it is `shared`, by source. The gradients by its features go to their place in `by_features [R, r]`.
    pub fn new(of: Bias<'a>, chunk: &Span, by_features: &Tensor, shared: Option<Shared<'a>>) -> Self {
        let (features, by_features) = match &shared {
            Some(shared) => {
                let features = of.features.index_select(0, &shared.first_rows);
                let by_features = features.empty_like();
                (features, by_features)
            }
            None => (chunk.of(of.features), chunk.of(by_features)),
        };
        Self { of, features, by_features, shared }
    }

    /// Puts some columns of it, by row, in place of `logits [n, C]`, or adds them there.
    pub fn write(&self, columns: &Columns, logits: &mut Tensor, add: bool) {
        let w2 = columns.rows_of(self.of.w2);
        match &self.shared {
            Some(shared) => {
                assert!(add, "what is by source is added to what is by row");
                let mut of_sources = shared.columns(columns, &self.features);
                multiply(&self.features, &w2.tr(), &mut of_sources, false);
                add_to_rows(logits, shared.of_rows, &of_sources);
            }
            None => multiply(&self.features, &w2.tr(), logits, add),
        }
    }

    /// Carries on gradients by some columns, `[n, C]`: to the features, and to W2. All columns come one after the other.
    pub fn backward(&mut self, columns: &Columns, by_rows: &Tensor) {
        let gradients = match &self.shared {
            Some(shared) => {
                let mut sums = shared.columns(columns, &self.features);
                sum_rows(by_rows, shared.of_rows, &mut sums);
                sums
            }
            None => by_rows.shallow_clone(),
        };
        multiply(&gradients, &columns.rows_of(self.of.w2), &mut self.by_features, !columns.are_first());
        if let Some(sum) = self.of.w2_gradient {
            multiply(&gradients.tr(), &self.features, &mut columns.rows_of(sum), true);
        }
    }

    /// Brings the gradients by the features of `chunk` to their place in `by_features [R, r]`.
    pub fn finish(self, chunk: &Span, by_features: &Tensor) {
        if let Some(Shared { first_rows, .. }) = self.shared {
            let _ = chunk.of(by_features).zero_();
            let _ = by_features.shallow_clone().index_copy_(0, &first_rows, &self.by_features);
        }
    }
}

impl Shared<'_> {
    /// So many columns of the buffer, for each of the features.
    fn columns(&self, columns: &Columns, features: &Tensor) -> Tensor {
        self.buffer.narrow(0, 0, features.size()[0]).narrow(1, 0, columns.count())
    }
}
