//! Positions, attention calls and supervised rows of a micro-batch in the training-time test.
//!
//! Shapes: n token positions of a step, N token positions of step 0, R supervised positions of a step or of all steps.

use std::ops::Range;

use deepspec_core::recipe::LossNormalization;
use deepspec_ops::distill_loss::{TeacherIndex, unique_with_inverse};
use deepspec_ops::{Upload, UploadSlice, Uploaded, cat_to_device, range};
use tch::{Device, Kind, Tensor};

use super::model::{Eagle3Objective, Supervise};
use crate::TrainSample;

/// Maximum number of positions per attention call. It bounds the memory of attention for sequences of any length.
pub(super) const MAX_CALL_POSITIONS: usize = 256;

/// One attention call over positions of one sequence in a step.
pub(super) struct TttCall {
    /// Index of the call's first position among the step's n positions.
    pub first: i64,
    /// Number of positions of the call.
    pub rows: i64,
    /// Row of the sequence's first position among the keys of step 0.
    pub first_key: i64,
    /// Number of keys of step 0, up to the call's last position.
    pub keys: i64,
    /// Token positions within the sequence, `[rows]`. Position i sees the keys 0..=i of step 0.
    pub token_positions: UploadSlice,
}

/// One step of the training-time test, over the n positions that its loss or a later step needs. The lists are slices of one upload.
pub(super) struct TttStep {
    /// Indices of the step's positions among the positions of the step before, `[n]`. None if the step keeps all of them.
    pub kept: Option<UploadSlice>,
    /// Input token of each position, `[n]`.
    pub tokens: UploadSlice,
    /// Rotary position of each token position, `[n]`.
    pub positions: UploadSlice,
    /// Attention calls, which cover all positions in order.
    pub calls: Vec<TttCall>,
    /// Indices of the step's supervised positions among its n positions, `[R]`.
    pub supervised_indices: UploadSlice,
    /// Range of the step's supervised positions among the supervised positions of all steps.
    pub supervised_range: Range<i64>,
}

impl TttStep {
    /// Selects this step's rows of a tensor over the supervised positions of all steps.
    pub fn select_supervised(&self, all: &Tensor) -> Tensor {
        let Range { start, end } = self.supervised_range;
        all.narrow(0, start, end - start)
    }
}

/// Tensors of one training pass over a micro-batch.
pub struct Eagle3Batch {
    pub(super) taps: Tensor, // [N, m·d], the positions of step 0
    /// Steps that have positions. Later steps have fewer positions.
    pub(super) steps: Vec<TttStep>,
    /// Distinct target states that predict the labels of the supervised positions, `[S, d]`.
    pub(super) teacher: Tensor,
    /// Weights of the supervised positions, step after step, `[R]` float32: 1 over the sequence's length, or over the longest
    /// sequence's with `LossNormalization::MicroBatch`.
    pub(super) weights: Tensor,
    /// Index of each supervised position's target state in `teacher`, `[R]`.
    sources: Tensor,
    /// The supervised positions in the order of their target states.
    pub(super) ordered: TeacherOrder,
    /// The upload whose slices are the lists of `steps`.
    lists: Uploaded,
}

/// All steps' supervised positions in the order of their target states.
pub(super) struct TeacherOrder {
    /// Index of each position in the order of the steps, `[R]`.
    pub order: Tensor,
    /// Inverse permutation of `order`, `[R]`.
    pub inverse: Tensor,
    /// Weights times the decay of their step, `[R]` float32.
    pub decayed: Tensor,
    /// Index of each position's target state, on the host and on the device.
    sources: (Vec<i64>, Tensor),
}

impl TeacherOrder {
    /// Index from these positions to target states.
    pub fn teacher_index(&self) -> TeacherIndex<'_> {
        TeacherIndex { of_rows: &self.sources.0, there: &self.sources.1 }
    }
}

/// Whether position `i` is supervised at step `s`, where it predicts token i + 2 + s. The teacher's distribution comes from the
/// target's state of token i + 1 + s.
pub(super) fn is_supervised(supervise: Supervise, loss_mask: &[bool], i: usize, s: usize) -> bool {
    // `Shifted` leaves the last token out, because it predicts nothing.
    let (mask_index, limit) = match supervise {
        Supervise::Shifted => (i + s, loss_mask.len().saturating_sub(1)),
        Supervise::Labels => (i + s + 2, loss_mask.len()),
    };
    mask_index < limit && loss_mask[mask_index]
}

/// Positions of one sequence that step `s` of `steps` computes, because its loss or a later step needs them.
pub(super) fn needed_positions(supervise: Supervise, mask: &[bool], s: usize, steps: usize) -> Vec<usize> {
    let later = |i: usize| (s..steps).any(|r| is_supervised(supervise, mask, i, r));
    let mut positions: Vec<usize> = (0..mask.len()).filter(|&i| later(i)).collect();
    // Step 0 needs all positions before the last one: later positions attend to them.
    if let (0, Some(&last)) = (s, positions.last()) {
        positions = (0..=last).collect();
    }
    positions
}

impl Eagle3Batch {
    /// Indices of the supervised positions among the positions that step `s` computes, `[R]`: sequence after sequence, in order.
    pub fn supervised_indices(&self, s: usize) -> Tensor {
        self.step_list(self.steps[s].supervised_indices)
    }

    /// Tensor of one of a step's lists.
    pub(super) fn step_list(&self, slice: UploadSlice) -> Tensor {
        self.lists.slice(slice)
    }

    /// Target states that predict the labels of the step's supervised positions, `[R, d]`.
    pub fn teacher_states(&self, s: usize) -> Tensor {
        self.teacher.index_select(0, &self.steps[s].select_supervised(&self.sources))
    }

    /// A batch on `device`. None if no token is supervised. The samples' hidden states may be on another device, the same for all samples.
    ///
    /// # Panics
    /// If a sample lacks the final state that predicts a supervised label.
    pub fn new(
        samples: &[TrainSample],
        objective: &Eagle3Objective,
        steps: usize,
        device: Device,
        kind: Kind,
    ) -> Option<Self> {
        let _range = range(c"upload");
        let supervise = objective.supervise;
        let longest = samples.iter().map(|sample| sample.input_ids.len()).max()?;
        let positions_of =
            |sample: &TrainSample, s: usize| needed_positions(supervise, &sample.loss_mask, s, steps);
        let used: Vec<&TrainSample> =
            samples.iter().filter(|sample| !positions_of(sample, 0).is_empty()).collect();
        let weight = |sample: &TrainSample| match objective.normalization {
            LossNormalization::Global => 1.0 / sample.input_ids.len() as f32,
            LossNormalization::MicroBatch => 1.0 / longest as f32,
        };
        let source_device = used.first()?.last.device();
        let mut indices = Upload::default();
        let (mut weights, mut decayed): (Vec<f32>, Vec<f32>) = (vec![], vec![]);
        // Sample number and row of `TrainSample::last` of each supervised position's teacher.
        let mut states: Vec<(usize, i64)> = vec![];
        let mut plan = |s: usize| {
            let (mut kept, mut tokens, mut positions, mut calls) = (vec![], vec![], vec![], vec![]);
            let (mut supervised, mut previous_first, mut first_key) = (vec![], 0, 0);
            let first = weights.len();
            let decay = objective.step_loss_decay.powi(s as i32);
            for (number, sample) in used.iter().enumerate() {
                let token_positions = positions_of(sample, s);
                let previous = positions_of(sample, s.saturating_sub(1));
                for (call, part) in token_positions.chunks(MAX_CALL_POSITIONS).enumerate() {
                    calls.push(TttCall {
                        first: (tokens.len() + call * MAX_CALL_POSITIONS) as i64,
                        rows: part.len() as i64,
                        first_key,
                        keys: part[part.len() - 1] as i64 + 1,
                        token_positions: indices.push(part.iter().map(|&i| i as i64)),
                    });
                }
                first_key += positions_of(sample, 0).len() as i64;
                for &i in &token_positions {
                    // The positions of a step are among those of the step before.
                    kept.extend(previous.binary_search(&i).ok().map(|place| (previous_first + place) as i64));
                    if is_supervised(supervise, &sample.loss_mask, i, s) {
                        supervised.push(tokens.len() as i64);
                        states.push((number, sample.final_state_row_index(i + 1 + s)));
                        weights.push(weight(sample));
                        decayed.push((f64::from(weight(sample)) * decay) as f32);
                    }
                    tokens.push(sample.input_ids[i + 1 + s]);
                    positions.push((i + s) as i64);
                }
                previous_first += previous.len();
            }
            (!tokens.is_empty()).then(|| TttStep {
                kept: (kept.len() < previous_first).then(|| indices.push(kept)),
                tokens: indices.push(tokens),
                positions: indices.push(positions),
                calls,
                supervised_range: first as i64..(first + supervised.len()) as i64,
                supervised_indices: indices.push(supervised),
            })
        };
        let steps: Vec<TttStep> = (0..steps).map_while(&mut plan).collect();

        let (distinct, sources) = unique_with_inverse(&states);
        let teacher_rows: Vec<UploadSlice> = (0..used.len())
            .map(|sample| indices.push(distinct.iter().filter(|(of, _)| *of == sample).map(|(_, row)| *row)))
            .collect();
        let mut order: Vec<usize> = (0..states.len()).collect();
        order.sort_by_key(|&row| states[row]);
        let mut inverse = vec![0; order.len()];
        order.iter().enumerate().for_each(|(place, &row)| inverse[row] = place as i64);
        let ordered: Vec<i64> = order.iter().map(|&row| sources[row]).collect();
        let decayed: Vec<f32> = order.iter().map(|&row| decayed[row]).collect();
        let sources = indices.push(sources);
        let ordered_sources = indices.push(ordered.iter().copied());
        let (order, inverse) = (indices.push(order.iter().map(|&row| row as i64)), indices.push(inverse));
        let [weights, decayed] = [weights, decayed].map(|list| indices.push_floats(&list));
        let on_device = indices.send(device);
        let on_source = if source_device == device { None } else { Some(indices.send(source_device)) };
        let on_source = on_source.as_ref().unwrap_or(&on_device);
        let taps = used.iter().map(|sample| sample.taps.narrow(0, 0, positions_of(sample, 0).len() as i64));
        let taps: Vec<Tensor> = taps.collect();
        let teacher = used.iter().zip(&teacher_rows);
        let teacher: Vec<Tensor> =
            teacher.map(|(sample, rows)| sample.last.index_select(0, &on_source.slice(*rows))).collect();
        Some(Self {
            taps: cat_to_device(&taps, source_device, device, kind),
            steps,
            teacher: cat_to_device(&teacher, source_device, device, kind),
            weights: on_device.slice_floats(weights),
            sources: on_device.slice(sources),
            ordered: TeacherOrder {
                order: on_device.slice(order),
                inverse: on_device.slice(inverse),
                decayed: on_device.slice_floats(decayed),
                sources: (ordered, on_device.slice(ordered_sources)),
            },
            lists: on_device,
        })
    }
}
