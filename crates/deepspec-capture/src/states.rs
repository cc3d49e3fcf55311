//! Selects the source of hidden states for a training run. Only this module knows all sources.

use deepspec_drafters::Recipe;
use deepspec_models::TargetModel;
use tch::{Device, Kind};

use crate::dataset::{Dataset, Origin};
use crate::hybrid::Hybrid;
use crate::live::LiveStates;
use crate::online::{Online, SampleStates};
use crate::samples::Samples;
use crate::served::{ServedLimits, ServedTarget};
use crate::stored::CachedStates;
use crate::{Capture, StatesError, TargetSpec};

/// A source of hidden states, read step by step. All sources have one interface.
pub enum StateSource<'d> {
    /// A finished cache.
    Cache(CachedStates),
    /// The target or its servers, without storing the states.
    Online {
        /// The program that computes the states.
        online: Box<LiveStates>,
        /// All samples.
        samples: &'d Samples,
    },
    /// The target in the first epoch, then the cache that it has filled.
    Hybrid(Hybrid<'d>),
}

/// Device, dtype and step size of a target that runs during training.
#[derive(Debug, Clone, Copy)]
pub struct TargetRuntime {
    /// Device of the target.
    pub device: Device,
    /// Dtype of the target.
    pub dtype: Kind,
    /// Samples per optimiser step.
    pub per_step: usize,
}

impl<'d> StateSource<'d> {
    /// Opens the source of `dataset`, and loads the target if it is needed.
    ///
    /// # Errors
    /// Fails if the target cannot be loaded, or if another cache is being built in the folder.
    pub fn open(
        dataset: &'d Dataset,
        source: &TargetSpec,
        recipe: &Recipe,
        runtime: TargetRuntime,
    ) -> Result<Self, StatesError> {
        let TargetRuntime { device, dtype, per_step } = runtime;
        let online = || -> Result<LiveStates, StatesError> {
            if let Some(servers) = &recipe.data.states.servers {
                let longest = dataset.longest();
                let served =
                    ServedTarget::connect(source, servers, longest, device, ServedLimits::default())?;
                return Ok(LiveStates::Served(Box::new(served)));
            }
            let capture = Capture::load(&source.dir, recipe, dataset.longest(), device, dtype)?;
            let online = Online::new(capture, source.identity.taps.clone(), source.final_states);
            Ok(LiveStates::Local(Box::new(online)))
        };
        Ok(match &dataset.origin {
            Origin::Cache(stored) => Self::Cache(CachedStates::new(stored.clone())),
            Origin::Online(samples) => Self::Online { online: Box::new(online()?), samples },
            Origin::Hybrid(recording) => {
                Self::Hybrid(Hybrid::start_first_epoch(recording, online()?, source, per_step)?)
            }
        })
    }

    /// The target, if it is resident.
    pub fn target(&self) -> Option<&TargetModel> {
        let online = match self {
            Self::Cache(_) => None,
            Self::Online { online, .. } => Some(&**online),
            Self::Hybrid(hybrid) => hybrid.live(),
        };
        online.and_then(LiveStates::target)
    }

    /// Sets the samples of optimiser step `step`, counted from 0, in the order in which
    /// [`Self::next_states`] returns them.
    ///
    /// # Errors
    /// Fails at the end of the first epoch if states cannot be captured, or if a cache cannot be
    /// written or read.
    pub fn begin_step(&mut self, step: usize, samples: &[usize]) -> Result<(), StatesError> {
        match self {
            Self::Cache(cached) => cached.begin_step(samples),
            Self::Online { online, samples: all } => {
                online.begin_step(samples.iter().map(|&index| all.planned_sample(index)).collect());
            }
            Self::Hybrid(hybrid) => hybrid.begin_step(step, samples)?,
        }
        Ok(())
    }

    /// Returns the states of the step's next sample.
    ///
    /// # Errors
    /// Fails on a damaged cache, on NaN or infinity from the target (with the sample id), and on a
    /// cache that cannot be written.
    ///
    /// # Panics
    /// If all samples of the step were taken already.
    pub fn next_states(&mut self) -> Result<SampleStates, StatesError> {
        let taken = match self {
            Self::Cache(cached) => cached.next_states()?,
            Self::Online { online, .. } => online.next_states()?,
            Self::Hybrid(hybrid) => hybrid.next_states()?,
        };
        Ok(taken.unwrap_or_else(|| panic!("more states were taken than announced")))
    }

    /// Ends a run of `steps` steps.
    ///
    /// # Errors
    /// Fails if a cache cannot be completed.
    pub fn finish(&mut self, steps: usize) -> Result<(), StatesError> {
        match self {
            Self::Cache(_) | Self::Online { .. } => Ok(()),
            Self::Hybrid(hybrid) => hybrid.finish(steps),
        }
    }
}
