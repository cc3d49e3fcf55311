//! States that lie in a cache.

use std::collections::VecDeque;

use tch::{Kind, Tensor};

use crate::StatesError;
use crate::dataset::Stored;
use crate::online::SampleStates;

/// A cache that is read in the order of training.
pub struct Shelf {
    stored: Stored,
    /// Rows that are still to be taken.
    rows: VecDeque<usize>,
}

impl Shelf {
    pub(crate) fn new(stored: Stored) -> Self {
        Self { stored, rows: VecDeque::new() }
    }

    /// Announces the samples of an optimiser step.
    pub(crate) fn begin(&mut self, samples: &[usize]) {
        self.rows = samples.iter().map(|&index| self.stored.row(index)).collect();
    }

    /// The states of the next announced sample; `None` when all were taken.
    pub(crate) fn take(&mut self) -> Result<Option<SampleStates>, StatesError> {
        let Some(row) = self.rows.pop_front() else { return Ok(None) };
        let sample = self.stored.reader.sample(row)?;
        let last_positions = sample.last_positions();
        let hidden = sample.layout().hidden_size as i64;
        let width = hidden * sample.layout().taps.len() as i64;
        let [taps, last] = sample.states()?;
        Ok(Some(SampleStates {
            taps: Tensor::from_data_size(&taps, &[sample.len() as i64, width], Kind::BFloat16),
            last: Tensor::from_data_size(&last, &[last_positions.len() as i64, hidden], Kind::BFloat16),
            last_positions,
        }))
    }
}
