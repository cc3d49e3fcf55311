//! States that lie in a cache.

use std::collections::VecDeque;

use deepspec_native::Filling;
use tch::Kind;

use crate::StatesError;
use crate::dataset::Stored;
use crate::online::SampleStates;

/// A cache that is read in the order of training.
pub struct CachedStates {
    stored: Stored,
    /// Rows that are still to be taken.
    rows: VecDeque<usize>,
}

impl CachedStates {
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
        let reader = &self.stored.reader;
        let last_positions = reader.last_positions(row)?;
        let layout = reader.layout();
        let hidden = layout.hidden_size as i64;
        let tokens = i64::from(reader.length(row).unwrap_or_default());
        let mut taps = Filling::new(&[tokens, hidden * layout.taps.len() as i64], Kind::BFloat16);
        let mut last = Filling::new(&[last_positions.len() as i64, hidden], Kind::BFloat16);
        reader.read_into(row, taps.bytes(), last.bytes())?;
        Ok(Some(SampleStates { taps: taps.done(), last: last.done(), last_positions, unseen: None }))
    }
}
