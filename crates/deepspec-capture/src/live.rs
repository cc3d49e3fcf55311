//! Hidden states that are computed while a drafter trains: by the target in this program, or by
//! servers.

use std::ops::Range;

use deepspec_models::TargetModel;

use crate::StatesError;
use crate::cache::PlannedSample;
use crate::online::{Online, SampleStates};
use crate::served::ServedTarget;

/// The program that computes the states of each step.
pub enum LiveStates {
    /// The target in this program.
    Local(Box<Online>),
    /// vLLM servers.
    Served(Box<ServedTarget>),
}

impl LiveStates {
    /// The resident target; `None` if servers run it.
    pub(crate) fn target(&self) -> Option<&TargetModel> {
        match self {
            Self::Local(online) => Some(online.capture().target()),
            Self::Served(_) => None,
        }
    }

    /// Sets the samples of an optimiser step.
    pub(crate) fn begin_step(&mut self, samples: Vec<PlannedSample>) {
        match self {
            Self::Local(online) => online.begin_step(samples),
            Self::Served(served) => {
                served.discard_pending();
                samples.into_iter().for_each(|sample| served.submit(sample));
            }
        }
    }

    /// Returns the states of the step's next sample; `None` after the last one.
    pub(crate) fn next_states(&mut self) -> Result<Option<SampleStates>, StatesError> {
        match self {
            Self::Local(online) => online.next_states(),
            Self::Served(served) => served.next_states(),
        }
    }

    /// Splits a step's samples into ranges that [`Self::run`] takes.
    pub(crate) fn batch_ranges(&self, samples: &[PlannedSample]) -> Vec<Range<usize>> {
        match self {
            Self::Local(online) => online.batch_ranges(samples),
            Self::Served(_) => std::iter::once(0..samples.len()).collect(),
        }
    }

    /// Returns the states of each of `samples`.
    pub(crate) fn run(&mut self, samples: &[PlannedSample]) -> Result<Vec<SampleStates>, StatesError> {
        match self {
            Self::Local(online) => online.run(samples),
            Self::Served(served) => {
                served.discard_pending();
                samples.iter().for_each(|sample| served.submit(sample.clone()));
                let states = samples.iter().filter_map(|_| served.next_states().transpose());
                states.collect()
            }
        }
    }
}
