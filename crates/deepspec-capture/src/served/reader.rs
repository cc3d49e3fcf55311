//! Turns files of states into the states of samples.

use std::sync::{Mutex, PoisonError};

use deepspec_core::{FinalStates, Tap};
use deepspec_models::TargetHead;
use tch::{Device, Kind, Tensor};

use super::check::{StatesFile, compare_log_prob};
use super::layer_ids;
use crate::cache::PlannedSample;
use crate::{SampleStates, StatesError, TargetSpec};

/// A token that an engine sampled, which checks the states in front of it.
pub struct SampledToken {
    /// Position whose state predicts the token.
    pub position: usize,
    /// The token.
    pub id: i64,
    /// Its log-probability, by the engine.
    pub log_prob: f64,
}

/// Reads the states of samples in the layout of a recipe, and applies the target's final norm.
pub struct StatesReader {
    /// Locked, because a tensor may not be shared between threads.
    head: Mutex<TargetHead>,
    device: Device,
    layer_ids: Vec<u32>,
    /// Index of each tap among the layer ids.
    tap_slots: Vec<i64>,
    hidden_size: usize,
    final_states: FinalStates,
}

impl StatesReader {
    /// The reader for a recipe; `device` applies the norm and the LM head.
    ///
    /// # Errors
    /// If the target's norm and head cannot be read.
    pub fn open(spec: &TargetSpec, device: Device) -> Result<Self, StatesError> {
        let head = TargetHead::load(&spec.dir, &spec.config, device)?;
        let layer_ids = layer_ids(&spec.identity.taps, spec.config.layers.len());
        let slot = |tap: &Tap| layer_ids.iter().position(|&id| i64::from(id) == tap.layer_id() + 1);
        Ok(Self {
            head: Mutex::new(head),
            device,
            tap_slots: spec.identity.taps.iter().filter_map(slot).map(|slot| slot as i64).collect(),
            layer_ids,
            hidden_size: spec.identity.hidden_size,
            final_states: spec.final_states,
        })
    }

    /// Layer ids of the slots.
    pub fn layer_ids(&self) -> &[u32] {
        &self.layer_ids
    }

    /// The states of a sample in a file with its tokens. `sampled` are tokens whose log-probability
    /// must follow from the states.
    ///
    /// Where the file lacks the state of the last token, zeros stand for it, and the drafter does not
    /// read it.
    ///
    /// # Errors
    /// The problem, if the states are not those of the recipe's target and layers.
    pub fn read(
        &self,
        sample: &PlannedSample,
        file: &StatesFile<'_>,
        sampled: &[SampledToken],
    ) -> Result<SampleStates, String> {
        let _no_grad = tch::no_grad_guard();
        let states = file.states(&self.layer_ids, self.hidden_size)?;
        let kind = states.kind();
        let (length, found) = (sample.input_ids.len() as i64, states.size()[0]);
        let outputs = states.select(1, self.layer_ids.len() as i64 - 1);
        self.check_log_probs(&outputs, sampled, kind)?;
        let states = match length - found {
            missing if missing > 0 => {
                let shape = [missing, states.size()[1], states.size()[2]];
                Tensor::cat(&[&states, &Tensor::zeros(shape, (kind, Device::Cpu))], 0)
            }
            _ => states.narrow(0, 0, length),
        };
        let last_positions = sample.last_positions(self.final_states);
        let positions: Vec<i64> = last_positions.iter().map(|&position| i64::from(position)).collect();
        let outputs = states.select(1, self.layer_ids.len() as i64 - 1);
        let outputs = outputs.index_select(0, &Tensor::from_slice(&positions)).to_device(self.device);
        let last = self.head.lock().unwrap_or_else(PoisonError::into_inner).normalize(&outputs);
        let taps = states.index_select(1, &Tensor::from_slice(&self.tap_slots)).flatten(1, 2);
        Ok(SampleStates {
            taps: taps.to_kind(Kind::BFloat16),
            last: last.to_device(Device::Cpu).to_kind(Kind::BFloat16),
            last_positions,
            unseen: None,
        })
    }

    /// Compares the engine's log-probabilities with those that follow from the last layer's outputs
    /// `[N, d]`.
    fn check_log_probs(&self, outputs: &Tensor, sampled: &[SampledToken], kind: Kind) -> Result<(), String> {
        let positions: Vec<i64> = sampled.iter().map(|token| token.position as i64).collect();
        let outputs = outputs.index_select(0, &Tensor::from_slice(&positions)).to_device(self.device);
        let head = self.head.lock().unwrap_or_else(PoisonError::into_inner);
        let normed = head.normalize(&outputs);
        for (row, token) in sampled.iter().enumerate() {
            let computed = head.log_prob(&normed.select(0, row as i64), token.id, kind);
            compare_log_prob(computed.map_err(|error| error.to_string())?, token.log_prob, kind)?;
        }
        Ok(())
    }
}
