//! Hidden states from a cache on disk.

use std::collections::VecDeque;

use deepspec_ops::CpuTensorBuilder;
use rayon::prelude::*;
use tch::{Kind, Tensor};

use crate::StatesError;
use crate::dataset::FinishedCache;
use crate::online::SampleStates;

/// Maximum number of samples read at once: one waits for the disk while others are checked and
/// decoded.
const MAX_READERS: usize = 4;

/// Number of samples that are read in parallel, one per thread.
pub fn reader_threads() -> usize {
    rayon::current_num_threads().min(MAX_READERS)
}

/// Reads a cache in training order.
pub struct CachedStates {
    stored: FinishedCache,
    /// Rows of the step that are not read yet.
    rows: VecDeque<usize>,
    /// States that are read but not returned yet.
    read: VecDeque<Result<SampleStates, StatesError>>,
}

impl CachedStates {
    pub(crate) fn new(stored: FinishedCache) -> Self {
        Self { stored, rows: VecDeque::new(), read: VecDeque::new() }
    }

    /// Sets the samples of an optimiser step.
    pub(crate) fn begin_step(&mut self, samples: &[usize]) {
        self.read.clear();
        self.rows = samples.iter().map(|&index| self.stored.cache_row(index)).collect();
    }

    /// Returns the states of the step's next sample; `None` after the last one.
    pub(crate) fn next_states(&mut self) -> Result<Option<SampleStates>, StatesError> {
        if self.read.is_empty() {
            let next: Vec<usize> = self.rows.drain(..reader_threads().min(self.rows.len())).collect();
            let stored = &self.stored;
            let read: Vec<_> = next.into_par_iter().map(|row| read_states(stored, row)).collect();
            self.read.extend(read);
        }
        self.read.pop_front().transpose()
    }
}

fn read_states(stored: &FinishedCache, row: usize) -> Result<SampleStates, StatesError> {
    let reader = &stored.reader;
    let last_positions = reader.last_positions(row)?;
    let layout = reader.layout();
    let hidden = layout.hidden_size as i64;
    let tokens = i64::from(reader.length(row).unwrap_or_default());
    let mut taps = CpuTensorBuilder::new(&[tokens, hidden * layout.taps.len() as i64], Kind::BFloat16);
    let mut last = CpuTensorBuilder::new(&[last_positions.len() as i64, hidden], Kind::BFloat16);
    reader.read_into(row, taps.bytes(), last.bytes())?;
    let mut taps = taps.into_tensor();
    if !stored.reads_taps {
        taps = Tensor::zeros([tokens, 0], (taps.kind(), taps.device()));
    }
    Ok(SampleStates { taps, last: last.into_tensor(), last_positions, unseen: None })
}
