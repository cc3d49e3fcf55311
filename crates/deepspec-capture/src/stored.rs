//! States that lie in a cache.

use std::collections::VecDeque;

use deepspec_ops::UninitTensor;
use rayon::prelude::*;
use tch::Kind;

use crate::StatesError;
use crate::dataset::Stored;
use crate::online::SampleStates;

/// Samples that are read at once at most: one waits for its disk while another is checked and decoded.
const MOST_READERS: usize = 4;

/// Samples that are read at once, by a thread each.
pub fn readers() -> usize {
    rayon::current_num_threads().min(MOST_READERS)
}

/// A cache that is read in the order of training.
pub struct CachedStates {
    stored: Stored,
    /// Rows that are still to be read.
    rows: VecDeque<usize>,
    /// What was read of those before, and is to be taken.
    read: VecDeque<Result<SampleStates, StatesError>>,
}

impl CachedStates {
    pub(crate) fn new(stored: Stored) -> Self {
        Self { stored, rows: VecDeque::new(), read: VecDeque::new() }
    }

    /// Announces the samples of an optimiser step.
    pub(crate) fn begin(&mut self, samples: &[usize]) {
        self.read.clear();
        self.rows = samples.iter().map(|&index| self.stored.row(index)).collect();
    }

    /// The states of the next announced sample; `None` when all were taken.
    pub(crate) fn take(&mut self) -> Result<Option<SampleStates>, StatesError> {
        if self.read.is_empty() {
            let next: Vec<usize> = self.rows.drain(..readers().min(self.rows.len())).collect();
            let stored = &self.stored;
            let read: Vec<_> = next.into_par_iter().map(|row| read(stored, row)).collect();
            self.read.extend(read);
        }
        self.read.pop_front().transpose()
    }
}

fn read(stored: &Stored, row: usize) -> Result<SampleStates, StatesError> {
    let reader = &stored.reader;
    let last_positions = reader.last_positions(row)?;
    let layout = reader.layout();
    let hidden = layout.hidden_size as i64;
    let tokens = i64::from(reader.length(row).unwrap_or_default());
    let mut taps = UninitTensor::new(&[tokens, hidden * layout.taps.len() as i64], Kind::BFloat16);
    let mut last = UninitTensor::new(&[last_positions.len() as i64, hidden], Kind::BFloat16);
    reader.read_into(row, taps.bytes(), last.bytes())?;
    Ok(SampleStates { taps: taps.done(), last: last.done(), last_positions, unseen: None })
}
