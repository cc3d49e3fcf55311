//! Positions and supervised rows of a micro-batch of a drafter that is trained in steps over the target's final states.
//!
//! In step j, position t reads token t + 1 + j and predicts token t + 2 + j.
//!
//! Shapes: N positions of all sequences, K steps, R supervised rows of all steps, S target states that predict labels.

use deepspec_ops::distill_loss::TeacherIndex;
use deepspec_ops::{Upload, UploadSlice, Uploaded, cat_to_device, range};
use tch::{Device, Kind, Tensor};

use crate::{Predictions, TrainSample};

/// Tensors of one training pass over a micro-batch.
pub struct StepBatch {
    /// Indices of the samples with supervised labels, one per sequence.
    pub used: Vec<usize>,
    /// The target's final states of the positions, `[N, d]`.
    pub states: Tensor,
    /// Number of positions of each sequence; the sum is N.
    pub lengths: Vec<i64>,
    /// Tokens that each step reads, K slices `[N]`.
    tokens: Vec<UploadSlice>,
    /// Position of each row within its sequence, `[N]`.
    positions: UploadSlice,
    /// Target states that predict the labels, `[S, d]`.
    pub teacher: Tensor,
    /// Index of each supervised row's target state in `teacher`, on the host and on the device. It ascends.
    sources: (Vec<i64>, Tensor),
    /// Supervised rows among the K·N rows of all steps, `[R]`.
    pub rows: Tensor,
    /// Step of each supervised row, R entries.
    steps_of_rows: Vec<usize>,
    /// Label of each supervised row, `[R]`.
    pub labels: Tensor,
    /// Weight of each supervised row's step, `[R]` float32.
    pub weights: Tensor,
    /// The upload whose slices are the lists above.
    lists: Uploaded,
}

/// Number of positions that all `steps` steps share: the last step reads a token and predicts another. 0 for a shorter sequence.
pub fn valid_positions(tokens: usize, steps: usize) -> usize {
    tokens.saturating_sub(steps + 1)
}

/// Number of positions that the steps compute: up to the last one that has a supervised label in any step.
pub fn needed_positions(loss_mask: &[bool], steps: usize) -> usize {
    // Step j at position t predicts token t + 2 + j.
    let is_needed = |&t: &usize| loss_mask[t + 2..t + 2 + steps].contains(&true);
    (0..valid_positions(loss_mask.len(), steps)).rev().find(is_needed).map_or(0, |last| last + 1)
}

/// Number of supervised labels of step `step`.
pub fn supervised_count(loss_mask: &[bool], step: usize, steps: usize) -> usize {
    let labels = loss_mask.iter().skip(step + 2).take(valid_positions(loss_mask.len(), steps));
    labels.filter(|&&is_supervised| is_supervised).count()
}

/// Positions of the states that predict labels, each with its pairs (step, position), of one sequence.
fn labelled_rows(
    loss_mask: &[bool],
    steps: usize,
) -> impl Iterator<Item = (usize, Vec<(usize, usize)>)> + '_ {
    let valid = valid_positions(loss_mask.len(), steps);
    let pairs_of = move |label: usize| {
        let pair = |step: usize| Some((step, label.checked_sub(step + 2)?)).filter(|&(_, t)| t < valid);
        (0..steps).filter_map(pair).collect::<Vec<_>>()
    };
    let labels = (1..loss_mask.len()).filter(|&label| loss_mask[label]);
    labels.map(move |label| (label - 1, pairs_of(label))).filter(|(_, pairs)| !pairs.is_empty())
}

impl StepBatch {
    /// A batch on `device` of steps with these weights. None if no label is supervised. The samples' hidden states may be on another
    /// device, the same for all samples.
    ///
    /// # Panics
    /// If a sample lacks the final state of a position.
    pub fn new(samples: &[TrainSample], step_weights: &[f64], device: Device, kind: Kind) -> Option<Self> {
        let _range = range(c"upload");
        let steps = step_weights.len();
        let counts: Vec<usize> =
            samples.iter().map(|sample| needed_positions(&sample.loss_mask, steps)).collect();
        let indices: Vec<usize> = (0..samples.len()).filter(|&index| counts[index] > 0).collect();
        let used: Vec<(&TrainSample, usize)> =
            indices.iter().map(|&index| (&samples[index], counts[index])).collect();
        let source_device = used.first()?.0.last.device();
        let count: usize = used.iter().map(|(_, positions)| positions).sum();
        let mut lists = Upload::default();
        let tokens_of = |step: usize| {
            used.iter()
                .flat_map(move |(sample, count)| &sample.input_ids[step + 1..step + 1 + count])
                .copied()
        };
        let tokens = (0..steps).map(|step| lists.push(tokens_of(step))).collect();
        let positions = lists.push(used.iter().flat_map(|(_, count)| 0..*count as i64));
        let (mut rows, mut steps_of_rows, mut labels) = (vec![], vec![], vec![]);
        let (mut sources, mut states, mut teachers) = (vec![], vec![], vec![]);
        let (mut first, mut teacher) = (0, 0);
        for (sample, positions) in &used {
            states.push(lists.push((0..*positions).map(|t| sample.final_state_row_index(t))));
            let mut own = vec![];
            for (predicting, pairs) in labelled_rows(&sample.loss_mask, steps) {
                own.push(sample.final_state_row_index(predicting));
                for (step, position) in pairs {
                    rows.push((step * count + first + position) as i64);
                    steps_of_rows.push(step);
                    labels.push(sample.input_ids[predicting + 1]);
                    sources.push(teacher);
                }
                teacher += 1;
            }
            teachers.push(lists.push(own));
            first += positions;
        }
        let weights: Vec<f32> = steps_of_rows.iter().map(|&step| step_weights[step] as f32).collect();
        let weights = lists.push_floats(&weights);
        let [rows, labels] = [rows, labels].map(|list| lists.push(list));
        let sources_there = lists.push(sources.iter().copied());
        let on_device = lists.send(device);
        let on_source = if source_device == device { None } else { Some(lists.send(source_device)) };
        let on_source = on_source.as_ref().unwrap_or(&on_device);
        let select = |slices: &[UploadSlice]| {
            let parts = used.iter().zip(slices);
            let parts: Vec<Tensor> = parts
                .map(|((sample, _), rows)| sample.last.index_select(0, &on_source.slice(*rows)))
                .collect();
            cat_to_device(&parts, source_device, device, kind)
        };
        Some(Self {
            used: indices,
            states: select(&states),
            lengths: used.iter().map(|(_, positions)| *positions as i64).collect(),
            tokens,
            positions,
            teacher: select(&teachers),
            sources: (sources, on_device.slice(sources_there)),
            rows: on_device.slice(rows),
            steps_of_rows,
            labels: on_device.slice(labels),
            weights: on_device.slice_floats(weights),
            lists: on_device,
        })
    }

    /// Number of steps, K.
    pub fn steps(&self) -> usize {
        self.tokens.len()
    }

    /// Number of positions, N.
    pub fn positions(&self) -> i64 {
        self.lengths.iter().sum()
    }

    /// Tokens that step `step` reads, `[N]`.
    pub fn step_tokens(&self, step: usize) -> Tensor {
        self.lists.slice(self.tokens[step])
    }

    /// Position of each row within its sequence, `[N]`.
    pub fn row_positions(&self) -> Tensor {
        self.lists.slice(self.positions)
    }

    /// Index from supervised rows to target states.
    pub fn teacher_index(&self) -> TeacherIndex<'_> {
        TeacherIndex { of_rows: &self.sources.0, there: &self.sources.1 }
    }

    /// Predictions of the supervised rows. `outputs` has the rows `[N, ..]` of each of the K steps, and `logits` computes the logits of
    /// some of them.
    pub fn predictions<'a>(
        &self,
        outputs: &[Tensor],
        logits: impl Fn(&Tensor) -> Tensor + 'a,
    ) -> Predictions<'a> {
        let (mut counts, order, teacher) = self.rows_by_step();
        counts.retain(|&count| count > 0);
        let rows = Tensor::cat(outputs, 0).index_select(0, &self.rows).index_select(0, &order);
        let logits = move |start, len| logits(&rows.narrow(0, start, len));
        Predictions { counts, teacher, logits: Box::new(logits), confidence: None }
    }

    /// Supervised rows in the order of their steps: the number of each step, indices among the R rows, and their target states, `[R, d]`.
    fn rows_by_step(&self) -> (Vec<i64>, Tensor, Tensor) {
        let of_step = |step: usize| {
            let rows = self.steps_of_rows.iter().enumerate();
            rows.filter_map(move |(row, &own)| (own == step).then_some(row as i64)).collect::<Vec<_>>()
        };
        let by_step: Vec<Vec<i64>> = (0..self.steps()).map(of_step).collect();
        let counts = by_step.iter().map(|rows| rows.len() as i64).collect();
        let order = Tensor::from_slice(&by_step.concat()).to_device(self.rows.device());
        let sources = self.sources.1.index_select(0, &order);
        (counts, order, self.teacher.index_select(0, &sources))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All steps have equally many positions, and a label is predicted by each step that reaches it.
    #[test]
    fn every_step_predicts_one_token_further() {
        let mask = |supervised: &[usize]| (0..10).map(|at| supervised.contains(&at)).collect::<Vec<_>>();
        let rows = |supervised: &[usize]| labelled_rows(&mask(supervised), 3).collect::<Vec<_>>();
        assert_eq!(rows(&[5]), [(4, vec![(0, 3), (1, 2), (2, 1)])]);
        // Step 0 at position 0 predicts token 2, and the last of 6 positions predicts tokens 7 to 9.
        assert_eq!(rows(&[0, 1, 2]), [(1, vec![(0, 0)])]);
        assert_eq!(rows(&[9]), [(8, vec![(2, 5)])]);
        assert_eq!((needed_positions(&mask(&[9]), 3), needed_positions(&mask(&[5]), 3)), (6, 4));
        assert_eq!((needed_positions(&mask(&[1]), 3), needed_positions(&[true; 4], 3)), (0, 0));
        let everything = mask(&(0..10).collect::<Vec<_>>());
        assert_eq!([0, 1, 2].map(|step| supervised_count(&everything, step, 3)), [6; 3]);
        assert_eq!([0, 1, 2].map(|step| supervised_count(&mask(&[2, 9]), step, 3)), [1, 0, 1]);
    }
}
