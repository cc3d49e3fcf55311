//! Statistics of one sample.

use crate::cache::error::{CacheError, Part};
use crate::cache::layout::Encoding;
use crate::cache::reader::Sample;
use crate::cache::values;

/// Statistics of a sample for printing.
#[derive(Debug, Clone, PartialEq)]
pub struct Inspection {
    /// Id of the sample.
    pub id: String,
    /// Number of its shard.
    pub shard: usize,
    /// Number of tokens.
    pub length: usize,
    /// Number of supervised tokens.
    pub supervised: usize,
    /// Supervised tokens as half-open spans.
    pub spans: Vec<(u32, u32)>,
    /// The taps in storage order, then the final hidden states.
    pub tensors: Vec<TensorSummary>,
}

/// Statistics of one tap or of the final hidden states.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorSummary {
    /// The tensor.
    pub part: Part,
    /// Number of rows: tokens, or stored final states.
    pub rows: usize,
    /// Mean L2 norm of the rows; 0 without rows.
    pub mean_norm: f64,
    /// Largest magnitude. NaN and infinities are excluded here and from the norms.
    pub max_abs: f32,
    /// Number of NaN and infinite values.
    pub non_finite: usize,
}

/// Computes the statistics of a sample.
///
/// # Errors
/// Fails if the exponents cannot be decompressed.
pub fn inspect(sample: &Sample<'_>) -> Result<Inspection, CacheError> {
    let layout = sample.layout();
    let state_bytes = layout.hidden_size * Encoding::Bf16.value_bytes();
    let [tap_states, last_states] = sample.states()?;
    let taps = layout.taps.iter().enumerate().map(|(index, &tap)| {
        let states = tap_states.chunks_exact(state_bytes).skip(index).step_by(layout.taps.len());
        summarize_tensor(Part::Tap(tap), states)
    });
    let last = std::iter::once_with(|| summarize_tensor(Part::Last, last_states.chunks_exact(state_bytes)));
    Ok(Inspection {
        id: sample.id.to_string(),
        shard: sample.shard,
        length: sample.len(),
        supervised: sample.loss_mask().into_iter().filter(|&supervised| supervised).count(),
        spans: sample.spans.to_vec(),
        tensors: taps.chain(last).collect(),
    })
}

fn summarize_tensor<'s>(part: Part, states: impl Iterator<Item = &'s [u8]>) -> TensorSummary {
    let (mut rows, mut norms, mut max_abs, mut non_finite) = (0, 0.0, 0.0_f32, 0);
    for state in states {
        let mut squares = 0.0;
        for value in values::read_bf16(state) {
            if value.is_finite() {
                squares += f64::from(value) * f64::from(value);
                max_abs = max_abs.max(value.abs());
            } else {
                non_finite += 1;
            }
        }
        norms += f64::sqrt(squares);
        rows += 1;
    }
    let mean_norm = if rows == 0 { 0.0 } else { norms / rows as f64 };
    TensorSummary { part, rows, mean_norm, max_abs, non_finite }
}
