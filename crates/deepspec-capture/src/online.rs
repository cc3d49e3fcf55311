//! Hidden states that the target computes on demand.

use std::collections::VecDeque;
use std::ops::Range;

use crate::cache::{CacheError, FinalStates, Part, PlannedSample};
use deepspec_core::Tap;
use tch::{Device, Kind, Tensor};

use crate::{Capture, Captured, StatesError, split_into_batches};

/// The hidden states of one sample in bfloat16, the dtype that every cache decodes to. L tokens, K
/// final states.
#[derive(Debug)]
pub struct SampleStates {
    /// The captured layers: `[L, m·d]`.
    pub taps: Tensor,
    /// Final hidden states after the norm: `[K, d]`.
    pub last: Tensor,
    /// The positions of `last`, ascending.
    pub last_positions: Vec<u32>,
    /// A bool tensor on the target's device: whether all states are finite. It is read later, so
    /// that the host does not wait. None if the states were checked already.
    pub unseen: Option<Tensor>,
}

/// The target in device memory, which computes the states of each step.
pub struct Online {
    capture: Capture,
    taps: Vec<Tap>,
    last: FinalStates,
    /// Remaining forwards of the current step.
    runs: VecDeque<Vec<PlannedSample>>,
    /// States of the last forward that were not returned yet.
    ready: VecDeque<SampleStates>,
}

impl Online {
    pub(crate) fn new(capture: Capture, taps: Vec<Tap>, last: FinalStates) -> Self {
        Self { capture, taps, last, runs: VecDeque::new(), ready: VecDeque::new() }
    }

    /// The running target.
    pub(crate) fn capture(&self) -> &Capture {
        &self.capture
    }

    /// Sets the samples of an optimiser step. The batches depend only on these samples, so a step
    /// gets equal bits whatever came before it.
    pub(crate) fn begin_step(&mut self, samples: Vec<PlannedSample>) {
        let runs = self.batch_ranges(&samples);
        self.runs = runs.into_iter().map(|run| samples[run].to_vec()).collect();
        self.ready.clear();
    }

    /// Splits a step's samples into ranges. The target runs each range in one forward.
    pub(crate) fn batch_ranges(&self, samples: &[PlannedSample]) -> Vec<Range<usize>> {
        split_into_batches(samples.iter().map(|sample| sample.input_ids.len()), self.capture.forward_limits())
    }

    /// Returns the states of the step's next sample; `None` after the last one.
    pub(crate) fn next_states(&mut self) -> Result<Option<SampleStates>, StatesError> {
        if self.ready.is_empty()
            && let Some(run) = self.runs.pop_front()
        {
            self.ready = self.run(&run)?.into();
        }
        Ok(self.ready.pop_front())
    }

    /// Runs one forward over `samples` and returns the states of each sample.
    pub(crate) fn run(&mut self, samples: &[PlannedSample]) -> Result<Vec<SampleStates>, StatesError> {
        let captured = self.capture.run(samples, self.last);
        let mut states = split_by_sample(&captured, samples, self.last);
        if captured.taps.device() != Device::Cpu {
            for states in &mut states {
                let finite = |tensor: &Tensor| tensor.isfinite().all();
                states.unseen = Some(finite(&states.taps).logical_and(&finite(&states.last)));
            }
            return Ok(states);
        }
        // Checks the whole batch at once, and single samples only if a value is not finite.
        if !(is_finite(&captured.taps) && is_finite(&captured.last)) {
            for (sample, states) in samples.iter().zip(&states) {
                self.check_finite(&sample.id, states)?;
            }
        }
        Ok(states)
    }

    fn check_finite(&self, id: &str, states: &SampleStates) -> Result<(), StatesError> {
        for (tensor, taps) in [(&states.taps, true), (&states.last, false)] {
            let Some((row, column, value)) = first_non_finite(tensor) else { continue };
            let width = tensor.size()[1] as usize / self.taps.len().max(1);
            let part = if taps { Part::Tap(self.taps[column / width]) } else { Part::Last };
            return Err(CacheError::NotFinite { sample: id.to_string(), row, part, value }.into());
        }
        Ok(())
    }
}

/// Splits the states of a batch by sample, as views.
fn split_by_sample(captured: &Captured, samples: &[PlannedSample], last: FinalStates) -> Vec<SampleStates> {
    let (mut row, mut last_row) = (0, 0);
    let mut split = Vec::with_capacity(samples.len());
    for sample in samples {
        let last_positions = sample.last_positions(last);
        let (rows, last_rows) = (i64::from(sample.length()), last_positions.len() as i64);
        split.push(SampleStates {
            taps: captured.taps.narrow(0, row, rows),
            last: captured.last.narrow(0, last_row, last_rows),
            last_positions,
            unseen: None,
        });
        (row, last_row) = (row + rows, last_row + last_rows);
    }
    split
}

fn is_finite(states: &Tensor) -> bool {
    states.isfinite().all().int64_value(&[]) != 0
}

/// Row, column and value of the first NaN or infinity of a matrix.
fn first_non_finite(states: &Tensor) -> Option<(usize, usize, f32)> {
    if states.numel() == 0 || is_finite(states) {
        return None;
    }
    let flat = states.flatten(0, 1);
    let index = flat.isfinite().logical_not().to_kind(Kind::Int).argmax(0, false).int64_value(&[]);
    let (width, value) = (states.size()[1], flat.double_value(&[index]));
    Some(((index / width) as usize, (index % width) as usize, value as f32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_value_that_is_not_finite_is_found() {
        let states = Tensor::zeros([3, 4], (Kind::BFloat16, tch::Device::Cpu));
        assert_eq!(first_non_finite(&states), None);
        let _ = states.get(2).get(1).fill_(f64::INFINITY);
        assert_eq!(first_non_finite(&states), Some((2, 1, f32::INFINITY)));
        let _ = states.get(1).get(3).fill_(f64::NAN);
        assert!(matches!(first_non_finite(&states), Some((1, 3, value)) if value.is_nan()));
        assert_eq!(first_non_finite(&states.narrow(0, 0, 0)), None);
    }
}
