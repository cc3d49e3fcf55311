//! What planning a training pass goes by.

/// Bytes that autograd keeps of a value that is normed, whatever its kind: itself and its normed form in float32.
pub(super) const NORMED: usize = 8;

/// A sample of a micro-batch, as far as its cost depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleSize {
    /// T.
    pub tokens: usize,
    /// Blocks that start in it; 0 for drafters without anchors.
    pub anchors: usize,
}

/// Bytes that a training pass holds beside weights and gradients.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PassBytes {
    /// Kept from the forward for the backward.
    pub kept: usize,
    /// What attention works with on top, while no loss is computed.
    pub attention: usize,
    /// What the losses work with on top.
    pub objective: usize,
}

impl PassBytes {
    /// At the worst moment.
    pub fn peak(&self) -> usize {
        self.kept + self.attention.max(self.objective)
    }
}
