//! The Markov head's part of the logits, and its gradients.

use deepspec_native::{multiply, sum_rows};
use tch::Tensor;

use super::chunks::Span;

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

/// The same of a chunk: by row, or by source where rows of one source share it.
pub(super) struct ChunkBias<'a> {
    of: Bias<'a>,
    /// Of its n rows or sources, `[n, r]`.
    features: Tensor,
    /// Logits, then the gradients by them, `[n, V]`.
    values: Tensor,
    /// By source, each source's first row among all, and each row's source among the chunk's.
    shared: Option<(Tensor, &'a Tensor)>,
}

impl<'a> ChunkBias<'a> {
    /// The logits, in a `buffer`; where they are to be by source, each source's first row among all and each row's source among the chunk's are given.
    pub fn new(of: Bias<'a>, chunk: &Span, buffer: &Tensor, shared: Option<(Tensor, &'a Tensor)>) -> Self {
        let features = match &shared {
            Some((first_rows, _)) => of.features.index_select(0, first_rows),
            None => chunk.of(of.features),
        };
        let mut values = buffer.narrow(0, 0, features.size()[0]);
        multiply(&features, &of.w2.tr(), &mut values, false);
        Self { of, features, values, shared }
    }

    /// Those of a tile's rows, where they are by row.
    pub fn of_tile(&self, tile: &Span) -> Option<Tensor> {
        self.is_by_row().then(|| tile.of(&self.values))
    }

    /// Those of all sources, where they are by source.
    pub fn of_sources(&self) -> Option<&Tensor> {
        (!self.is_by_row()).then_some(&self.values)
    }

    /// The gradients by its logits, in their place, once all tiles have theirs; by source they are made here, the sums of those by `base`.
    pub fn gradients(&self, base: &Tensor) -> &Tensor {
        if let Some((_, of_rows)) = &self.shared {
            sum_rows(base, of_rows, &mut self.values.shallow_clone());
        }
        &self.values
    }

    /// Whether its gradients are its rows' own.
    pub fn is_by_row(&self) -> bool {
        self.shared.is_none()
    }

    /// Carries its [gradients](ChunkBias::gradients) on: to the features of `chunk` in `by_features [R, r]`, and to W2.
    pub fn backward(&self, chunk: &Span, by_features: &Tensor) {
        let (mut of_chunk, gradients) = (chunk.of(by_features), &self.values);
        match &self.shared {
            Some((first_rows, _)) => {
                let mut sums = self.features.empty_like();
                multiply(gradients, self.of.w2, &mut sums, false);
                let _ = of_chunk.zero_();
                let _ = by_features.shallow_clone().index_copy_(0, first_rows, &sums);
            }
            None => multiply(gradients, self.of.w2, &mut of_chunk, false),
        }
        if let Some(sum) = self.of.w2_gradient {
            multiply(&gradients.tr(), &self.features, &mut sum.shallow_clone(), true);
        }
    }
}
