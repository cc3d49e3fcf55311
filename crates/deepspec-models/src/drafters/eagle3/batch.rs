//! From samples to the tensors of one training-time test. Sequences lie end to end, without padding; a column is computed as
//! long as it or a later step of it is supervised, and no longer.

use deepspec_core::recipe::{LossNormalization, Supervise};
use tch::{Device, Kind, Tensor};

use super::objective::Eagle3Objective;
use crate::drafters::block::TrainSample;

/// Columns whose attention is one call: what such a call holds at once is bounded whatever the sequence's length.
pub(super) const PIECE: usize = 256;

/// Some columns of a step, all of one sequence.
pub(super) struct Piece {
    /// The first among the step's n, and how many.
    pub first: i64,
    pub rows: i64,
    /// The first column of step 0 that they see, and how many up to the last of them.
    pub first_key: i64,
    pub keys: i64,
    /// Their own places among these, `[rows]`.
    pub columns: Tensor,
}

/// One step: n columns that are still needed.
pub(super) struct Step {
    /// Which columns of the step before these are, `[n]`; None for all.
    pub kept: Option<Tensor>,
    /// The token each column reads, `[n]`.
    pub tokens: Tensor,
    /// Rotary position of each column, `[n]`.
    pub positions: Tensor,
    /// All columns, in order.
    pub pieces: Vec<Piece>,
    /// Supervised columns among the n, `[R]`.
    pub rows: Tensor,
    /// Target states that predict what they are to predict, `[R, d]`.
    pub teacher: Tensor,
    /// Their loss weights, 1 over the sequence's length, `[R]` float32.
    pub weights: Tensor,
}

/// The tensors of one pass over some sequences.
pub struct Eagle3Batch {
    pub(super) taps: Tensor, // [N, m·d], the columns of step 0
    /// The steps that have columns; the later ones have fewer.
    pub(super) steps: Vec<Step>,
}

/// Whether column `i` is supervised at step `s`: it then predicts token i + 2 + s from the target's state of token i + 1 + s.
pub(super) fn supervised(supervise: Supervise, loss_mask: &[bool], i: usize, s: usize) -> bool {
    // The last token predicts nothing.
    let (decides, known) = match supervise {
        Supervise::Shifted => (i + s, loss_mask.len().saturating_sub(1)),
        Supervise::Labels => (i + s + 2, loss_mask.len()),
    };
    decides < known && loss_mask[decides]
}

/// The columns of one sequence that step `s` of `steps` still needs.
pub(super) fn needed(supervise: Supervise, loss_mask: &[bool], s: usize, steps: usize) -> Vec<usize> {
    let later = |i: usize| (s..steps).any(|r| supervised(supervise, loss_mask, i, r));
    let mut columns: Vec<usize> = (0..loss_mask.len()).filter(|&i| later(i)).collect();
    // At first, all before the last one too: they are attended to.
    if let (0, Some(&last)) = (s, columns.last()) {
        columns = (0..=last).collect();
    }
    columns
}

impl Eagle3Batch {
    /// Supervised rows of step `s` among the columns that it computes, `[R]`: sequence after sequence, in order.
    pub fn supervised(&self, s: usize) -> &Tensor {
        &self.steps[s].rows
    }

    /// The target's states that predict what these rows are to predict, `[R, d]`.
    pub fn teacher(&self, s: usize) -> &Tensor {
        &self.steps[s].teacher
    }

    /// Lays out the samples. None if nothing in them is supervised.
    ///
    /// # Panics
    /// If the state that predicts a supervised label is not among a sample's `last_positions`; a cache that keeps supervised
    /// rows has them all.
    pub fn new(
        samples: &[TrainSample],
        objective: &Eagle3Objective,
        steps: usize,
        device: Device,
        kind: Kind,
    ) -> Option<Self> {
        let supervise = objective.supervise;
        let longest = samples.iter().map(|sample| sample.input_ids.len()).max()?;
        let used: Vec<&TrainSample> =
            samples.iter().filter(|s| !needed(supervise, &s.loss_mask, 0, steps).is_empty()).collect();
        let weight = |sample: &TrainSample| match objective.normalization {
            LossNormalization::Global => 1.0 / sample.input_ids.len() as f32,
            LossNormalization::MicroBatch => 1.0 / longest as f32,
        };
        if used.is_empty() {
            return None;
        }
        let first_columns = |sample: &TrainSample| needed(supervise, &sample.loss_mask, 0, steps).len();
        let taps = |sample: &&TrainSample| {
            sample.taps.narrow(0, 0, first_columns(sample) as i64).to_device(device).to_kind(kind)
        };
        let taps: Vec<Tensor> = used.iter().map(taps).collect();
        let ints = |values: &[i64]| Tensor::from_slice(values).to_device(device);
        let step = |s: usize| {
            let (mut kept, mut tokens, mut positions, mut pieces) = (vec![], vec![], vec![], vec![]);
            let (mut rows, mut teacher, mut weights, mut before) = (vec![], vec![], vec![], 0);
            let mut first_key = 0;
            for sample in &used {
                let own = needed(supervise, &sample.loss_mask, s, steps);
                let earlier = needed(supervise, &sample.loss_mask, s.saturating_sub(1), steps);
                for (number, part) in own.chunks(PIECE).enumerate() {
                    let columns: Vec<i64> = part.iter().map(|&i| i as i64).collect();
                    pieces.push(Piece {
                        first: (tokens.len() + number * PIECE) as i64,
                        rows: columns.len() as i64,
                        first_key,
                        keys: columns[columns.len() - 1] + 1,
                        columns: ints(&columns),
                    });
                }
                first_key += first_columns(sample) as i64;
                let mut predicting = vec![];
                for &i in &own {
                    // The columns of a step are among those of the step before.
                    kept.extend(earlier.binary_search(&i).ok().map(|place| (before + place) as i64));
                    if supervised(supervise, &sample.loss_mask, i, s) {
                        rows.push(tokens.len() as i64);
                        predicting.push(sample.last_row(i + 1 + s));
                        weights.push(weight(sample));
                    }
                    tokens.push(sample.input_ids[i + 1 + s]);
                    positions.push((i + s) as i64);
                }
                before += earlier.len();
                let predicting = Tensor::from_slice(&predicting).to_device(sample.last.device());
                teacher.push(sample.last.index_select(0, &predicting).to_device(device).to_kind(kind));
            }
            (!tokens.is_empty()).then(|| Step {
                kept: (kept.len() < before).then(|| ints(&kept)),
                tokens: ints(&tokens),
                positions: ints(&positions),
                pieces,
                rows: ints(&rows),
                teacher: Tensor::cat(&teacher, 0),
                weights: Tensor::from_slice(&weights).to_device(device),
            })
        };
        Some(Self { taps: Tensor::cat(&taps, 0), steps: (0..steps).map_while(step).collect() })
    }
}
