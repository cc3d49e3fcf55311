//! Where a training run gets the states of its samples: the one place that knows all sources.

use deepspec_core::recipe::Recipe;
use deepspec_models::TargetModel;
use tch::{Device, Kind};

use crate::dataset::{Dataset, Origin};
use crate::hybrid::Hybrid;
use crate::online::{Online, SampleStates};
use crate::samples::Samples;
use crate::stored::CachedStates;
use crate::{Capture, StatesError, TargetSpec};

/// A source of states, read step by step. Whoever reads cannot tell which one it is.
pub enum StateSource<'d> {
    /// A finished cache.
    Cache(CachedStates),
    /// The target, over samples of which nothing is kept.
    Online {
        /// The target.
        online: Box<Online>,
        /// All samples.
        samples: &'d Samples,
    },
    /// The target until there is a cache.
    Hybrid(Hybrid<'d>),
}

/// How the target runs, and what is taken from it at once.
#[derive(Debug, Clone, Copy)]
pub struct TargetRuntime {
    /// Where the target runs.
    pub device: Device,
    /// Kind that it computes in.
    pub kind: Kind,
    /// Samples of an optimiser step.
    pub per_step: usize,
}

impl<'d> StateSource<'d> {
    /// Opens the source of `dataset`, with the target where it is needed.
    ///
    /// # Errors
    /// A target that cannot be loaded; a folder where another cache is being built.
    pub fn open(
        dataset: &'d Dataset,
        source: &TargetSpec,
        recipe: &Recipe,
        runtime: TargetRuntime,
    ) -> Result<Self, StatesError> {
        let TargetRuntime { device, kind, per_step } = runtime;
        let online = || -> Result<Online, StatesError> {
            let capture = Capture::load(&source.dir, recipe, dataset.longest(), device, kind)?;
            Ok(Online::new(capture, source.identity.taps.clone(), source.final_states))
        };
        Ok(match &dataset.origin {
            Origin::Cache(stored) => Self::Cache(CachedStates::new(stored.clone())),
            Origin::Online(samples) => Self::Online { online: Box::new(online()?), samples },
            Origin::Hybrid(recording) => {
                Self::Hybrid(Hybrid::begin_first(recording, online()?, source, per_step)?)
            }
        })
    }

    /// The target, where one is resident.
    pub fn target(&self) -> Option<&TargetModel> {
        let online = match self {
            Self::Cache(_) => None,
            Self::Online { online, .. } => Some(&**online),
            Self::Hybrid(hybrid) => hybrid.online(),
        };
        online.map(|online| online.capture().target())
    }

    /// Announces the samples of optimiser step `step`, counted from 0, in the order in which they will be taken.
    ///
    /// # Errors
    /// Between two epochs: states that cannot be captured, a cache that cannot be written or read.
    pub fn begin(&mut self, step: usize, samples: &[usize]) -> Result<(), StatesError> {
        match self {
            Self::Cache(shelf) => shelf.begin(samples),
            Self::Online { online, samples: all } => {
                online.begin(samples.iter().map(|&index| all.planned(index)).collect());
            }
            Self::Hybrid(hybrid) => hybrid.begin(step, samples)?,
        }
        Ok(())
    }

    /// The states of the next announced sample.
    ///
    /// # Errors
    /// A damaged cache; a NaN or infinity in what the target computed, by sample id; a cache that cannot be written.
    ///
    /// # Panics
    /// If no sample is announced.
    pub fn take(&mut self) -> Result<SampleStates, StatesError> {
        let taken = match self {
            Self::Cache(shelf) => shelf.take()?,
            Self::Online { online, .. } => online.take()?,
            Self::Hybrid(hybrid) => hybrid.take()?,
        };
        Ok(taken.unwrap_or_else(|| panic!("more states were taken than announced")))
    }

    /// Ends a run of `steps` steps.
    ///
    /// # Errors
    /// A cache that cannot be completed.
    pub fn finish(&mut self, steps: usize) -> Result<(), StatesError> {
        match self {
            Self::Cache(_) | Self::Online { .. } => Ok(()),
            Self::Hybrid(hybrid) => hybrid.finish(steps),
        }
    }
}
