//! From samples to the tensors of one training-time test. Sequences lie end to end, without padding; a column is computed as
//! long as it or a later step of it is supervised, and no longer.

use deepspec_core::recipe::LossNormalization;
use deepspec_ops::distill_loss::{TeacherIndex, distinct};
use deepspec_ops::range;
use deepspec_ops::{Upload, UploadSlice, Uploaded};
use tch::{Device, Kind, Tensor};

use super::recipe::{Eagle3Objective, Supervise};
use crate::TrainSample;
use crate::draft_model::joined;

/// Columns whose attention is one call: what such a call holds at once is bounded whatever the sequence's length.
pub(super) const PIECE: usize = 256;

/// Some columns of a step, all of one sequence; C says where its list is, or holds it.
pub(super) struct TttCall<C = Tensor> {
    /// The first among the step's n, and how many.
    pub first: i64,
    pub rows: i64,
    /// The first column of step 0 that they see, and how many up to the last of them.
    pub first_key: i64,
    pub keys: i64,
    /// Their own places among these, `[rows]`.
    pub columns: C,
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
    pub pieces: Vec<TttCall>,
    /// Supervised columns among the n, `[R]`.
    pub rows: Tensor,
    /// The first of all steps' supervised columns that is its own, and how many.
    pub supervised: (i64, i64),
}

impl Step {
    /// Its part of what all steps' supervised columns have.
    pub fn of(&self, all: &Tensor) -> Tensor {
        all.narrow(0, self.supervised.0, self.supervised.1)
    }
}

/// A [`Step`] whose lists and states are still to travel.
struct StepPlan {
    kept: Option<UploadSlice>,
    tokens: UploadSlice,
    positions: UploadSlice,
    pieces: Vec<TttCall<UploadSlice>>,
    rows: UploadSlice,
    supervised: (i64, i64),
}

impl StepPlan {
    fn on_device(self, lists: &Uploaded) -> Step {
        let piece = |TttCall { first, rows, first_key, keys, columns }: TttCall<UploadSlice>| {
            let columns = lists.of(columns);
            TttCall { first, rows, first_key, keys, columns }
        };
        Step {
            kept: self.kept.map(|kept| lists.of(kept)),
            tokens: lists.of(self.tokens),
            positions: lists.of(self.positions),
            pieces: self.pieces.into_iter().map(piece).collect(),
            rows: lists.of(self.rows),
            supervised: self.supervised,
        }
    }
}

/// The tensors of one pass over some sequences.
pub struct Eagle3Batch {
    pub(super) taps: Tensor, // [N, m·d], the columns of step 0
    /// The steps that have columns; the later ones have fewer.
    pub(super) steps: Vec<Step>,
    /// Target states that predict what the supervised columns are to predict, each once, `[S, d]`.
    pub(super) teacher: Tensor,
    /// Weights of the supervised columns, step after step: 1 over the sequence's length, `[R]` float32.
    pub(super) weights: Tensor,
    /// Which of the target's states each of them has, `[R]`.
    sources: Tensor,
    /// These columns in the order of what they predict.
    pub(super) ordered: Ordered,
}

/// All steps' supervised columns in the order of the target's states that predict what they are to predict.
pub(super) struct Ordered {
    /// The place of each in the order step after step, `[R]`.
    pub order: Tensor,
    /// The inverse permutation, `[R]`.
    pub inverse: Tensor,
    /// Weights times the decay of their step, `[R]` float32.
    pub decayed: Tensor,
    /// Which of the target's states each has, on the host and on the device.
    sources: (Vec<i64>, Tensor),
}

impl Ordered {
    /// Which of the target's states they have.
    pub fn sources(&self) -> TeacherIndex<'_> {
        TeacherIndex { of_rows: &self.sources.0, there: &self.sources.1 }
    }
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
    pub fn teacher(&self, s: usize) -> Tensor {
        self.teacher.index_select(0, &self.steps[s].of(&self.sources))
    }

    /// Lays out the samples. None if nothing in them is supervised. All samples' states lie on one device, which may be another
    /// than `device`.
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
        let _range = range(c"upload");
        let supervise = objective.supervise;
        let longest = samples.iter().map(|sample| sample.input_ids.len()).max()?;
        let used: Vec<&TrainSample> =
            samples.iter().filter(|s| !needed(supervise, &s.loss_mask, 0, steps).is_empty()).collect();
        let weight = |sample: &TrainSample| match objective.normalization {
            LossNormalization::Global => 1.0 / sample.input_ids.len() as f32,
            LossNormalization::MicroBatch => 1.0 / longest as f32,
        };
        let from = used.first()?.last.device();
        let first_columns = |sample: &TrainSample| needed(supervise, &sample.loss_mask, 0, steps).len();
        let mut indices = Upload::default();
        let (mut weights, mut decayed): (Vec<f32>, Vec<f32>) = (vec![], vec![]);
        // Of each supervised column: the sample, and the row of its last states.
        let mut states: Vec<(usize, i64)> = vec![];
        let mut plan = |s: usize| {
            let (mut kept, mut tokens, mut positions, mut pieces) = (vec![], vec![], vec![], vec![]);
            let (mut rows, mut before, mut first_key) = (vec![], 0, 0);
            let first = weights.len();
            let decay = objective.step_loss_decay.powi(s as i32);
            for (number, sample) in used.iter().enumerate() {
                let own = needed(supervise, &sample.loss_mask, s, steps);
                let earlier = needed(supervise, &sample.loss_mask, s.saturating_sub(1), steps);
                for (piece, part) in own.chunks(PIECE).enumerate() {
                    pieces.push(TttCall {
                        first: (tokens.len() + piece * PIECE) as i64,
                        rows: part.len() as i64,
                        first_key,
                        keys: part[part.len() - 1] as i64 + 1,
                        columns: indices.push(part.iter().map(|&i| i as i64)),
                    });
                }
                first_key += first_columns(sample) as i64;
                for &i in &own {
                    // The columns of a step are among those of the step before.
                    kept.extend(earlier.binary_search(&i).ok().map(|place| (before + place) as i64));
                    if supervised(supervise, &sample.loss_mask, i, s) {
                        rows.push(tokens.len() as i64);
                        states.push((number, sample.last_row(i + 1 + s)));
                        weights.push(weight(sample));
                        decayed.push((f64::from(weight(sample)) * decay) as f32);
                    }
                    tokens.push(sample.input_ids[i + 1 + s]);
                    positions.push((i + s) as i64);
                }
                before += earlier.len();
            }
            (!tokens.is_empty()).then(|| StepPlan {
                kept: (kept.len() < before).then(|| indices.push(kept)),
                tokens: indices.push(tokens),
                positions: indices.push(positions),
                pieces,
                supervised: (first as i64, rows.len() as i64),
                rows: indices.push(rows),
            })
        };
        let plans: Vec<StepPlan> = (0..steps).map_while(&mut plan).collect();

        let (distinct, sources) = distinct(&states);
        let of_samples: Vec<UploadSlice> = (0..used.len())
            .map(|sample| indices.push(distinct.iter().filter(|(of, _)| *of == sample).map(|(_, row)| *row)))
            .collect();
        let mut order: Vec<usize> = (0..states.len()).collect();
        order.sort_by_key(|&row| states[row]);
        let mut inverse = vec![0; order.len()];
        order.iter().enumerate().for_each(|(place, &row)| inverse[row] = place as i64);
        let ordered: Vec<i64> = order.iter().map(|&row| sources[row]).collect();
        let decayed: Vec<f32> = order.iter().map(|&row| decayed[row]).collect();
        let sources = indices.push(sources);
        let there_ordered = indices.push(ordered.iter().copied());
        let (order, inverse) = (indices.push(order.iter().map(|&row| row as i64)), indices.push(inverse));
        let [weights, decayed] = [weights, decayed].map(|list| indices.push_floats(&list));
        let here = indices.send(device);
        let there = if from == device { None } else { Some(indices.send(from)) };
        let there = there.as_ref().unwrap_or(&here);
        let taps = used.iter().map(|sample| sample.taps.narrow(0, 0, first_columns(sample) as i64));
        let taps: Vec<Tensor> = taps.collect();
        let teacher = used.iter().zip(&of_samples);
        let teacher: Vec<Tensor> =
            teacher.map(|(sample, rows)| sample.last.index_select(0, &there.of(*rows))).collect();
        Some(Self {
            taps: joined(&taps, from, device, kind),
            steps: plans.into_iter().map(|plan| plan.on_device(&here)).collect(),
            teacher: joined(&teacher, from, device, kind),
            weights: here.floats(weights),
            sources: here.of(sources),
            ordered: Ordered {
                order: here.of(order),
                inverse: here.of(inverse),
                decayed: here.floats(decayed),
                sources: (ordered, here.of(there_ordered)),
            },
        })
    }
}
