//! Runs the target over samples and keeps what a drafter learns from.

use std::path::Path;

use deepspec_core::recipe::Recipe;
use deepspec_engine::{ModelInput, Target};
use deepspec_models::{TargetModel, TargetOptions};
use deepspec_ops::{CudaEvent, CudaStream, Upload};
use tch::{Device, Kind, Tensor};

use crate::cache::{FinalStates, PlannedSample};
use crate::{Budget, StatesError};

/// Tokens of one forward on the CPU: past this a forward gets no faster, only larger.
const CPU_TOKENS: usize = 2048;
/// The same on a GPU.
const GPU_TOKENS: usize = 8192;
/// Keys and values hold this many forwards' tokens at most, were all sequences as long as the longest.
const HISTORIES: usize = 4;
/// Sequences of one forward at most.
const SEQUENCES: usize = 64;

/// The frozen target, run over whole samples.
pub struct Capture {
    target: TargetModel,
    budget: Budget,
    /// On which states leave a GPU while it runs the next samples.
    leaving: Option<CudaStream>,
}

/// The states of a batch of samples, row after row in their order, in bfloat16 on the target's device.
pub struct Captured {
    /// The tapped layers of every token: `[N, m·d]`.
    pub taps: Tensor,
    /// The kept final-normed states: `[K, d]`.
    pub last: Tensor,
}

impl Capture {
    /// Loads the target in `dir` with the taps of `recipe` and room for sequences of up to `longest` tokens.
    ///
    /// # Errors
    /// If the folder is no target that we can run.
    pub fn load(
        dir: &Path,
        recipe: &Recipe,
        longest: usize,
        device: Device,
        kind: Kind,
    ) -> Result<Self, StatesError> {
        let budget = Budget::new(longest, device);
        let options =
            TargetOptions { device, kind, slots: budget.sequences, taps: recipe.target.layer_ids.clone() };
        let target = TargetModel::load(dir, &options)?;
        Ok(Self { target, budget, leaving: CudaStream::of(device) })
    }

    /// The model that runs.
    pub fn target(&self) -> &TargetModel {
        &self.target
    }

    /// What one [`Self::run`] may hold.
    pub fn budget(&self) -> Budget {
        self.budget
    }

    /// Sends states to the host, which need not wait for them.
    pub fn download(&self, captured: Captured) -> HostCopy {
        let (Captured { taps, last }, device) = (captured, self.target.device());
        let states = [taps, last];
        let Some((stream, done)) = self.leaving.zip(CudaEvent::here(device)) else {
            return HostCopy { states, there: None };
        };
        let _on = stream.enter();
        done.hold(&states);
        let states = states.map(|states| states.to_device_(Device::Cpu, states.kind(), true, false));
        HostCopy { states, there: CudaEvent::here(device) }
    }

    /// The states of `batch`, which keeps the [`Self::budget`]: rounded to bfloat16, whatever the target computes in.
    pub fn run(&mut self, batch: &[PlannedSample], last: FinalStates) -> Captured {
        let _no_grad = tch::no_grad_guard();
        let device = self.target.device();
        let chunks: Vec<(usize, usize)> =
            batch.iter().enumerate().map(|(slot, sample)| (slot, sample.input_ids.len())).collect();
        let mut upload = Upload::default();
        let ids = batch.iter().flat_map(|sample| sample.input_ids.iter().map(|&id| i64::from(id)));
        let (tokens, kept) = (upload.push(ids), upload.push(kept_rows(batch, last)));
        let sent = upload.send(device);
        let (tokens, kept) = (sent.of(tokens), sent.of(kept));
        let forwarded = self.target.forward(&ModelInput { chunks: &chunks, tokens });
        for &(slot, _) in &chunks {
            self.target.truncate(slot, 0);
        }
        Captured {
            taps: forwarded.taps.to_kind(Kind::BFloat16),
            last: forwarded.hidden.index_select(0, &kept).to_kind(Kind::BFloat16),
        }
    }
}

impl Drop for Capture {
    /// Its memory is another stream's than that on which it ran.
    fn drop(&mut self) {
        if let Some(done) = CudaEvent::here(self.target.device()) {
            done.wait();
        }
    }
}

/// States on their way to the host.
pub struct HostCopy {
    states: [Tensor; 2],
    /// When they are there; None where they always were.
    there: Option<CudaEvent>,
}

impl HostCopy {
    /// Whether the host has to wait for them.
    pub fn is_under_way(&self) -> bool {
        self.there.is_some()
    }

    /// The little-endian bytes of taps and last states, row-major, once they are there.
    pub fn bytes(self) -> [Vec<u8>; 2] {
        if let Some(there) = self.there {
            there.wait();
        }
        self.states.each_ref().map(bytes)
    }
}

impl Budget {
    /// What a capture of sequences of up to `longest` tokens runs at once on `device`.
    pub fn new(longest: usize, device: Device) -> Self {
        let tokens = if device == Device::Cpu { CPU_TOKENS } else { GPU_TOKENS };
        let sequences = (HISTORIES * tokens / longest.next_power_of_two()).clamp(1, SEQUENCES);
        Self { tokens, sequences }
    }
}

/// Rows of the batch whose last state is kept.
fn kept_rows(batch: &[PlannedSample], last: FinalStates) -> Vec<i64> {
    let (mut rows, mut first) = (Vec::new(), 0);
    for sample in batch {
        rows.extend(sample.last_positions(last).into_iter().map(|position| first + i64::from(position)));
        first += i64::from(sample.length());
    }
    rows
}

/// The little-endian bytes of a bfloat16 tensor, row-major.
pub(crate) fn bytes(states: &Tensor) -> Vec<u8> {
    let values = states.numel();
    let mut bytes = vec![0; values * 2];
    // The processors that libtorch runs on are little-endian.
    states.to_device(Device::Cpu).contiguous().copy_data_u8(&mut bytes, values);
    bytes
}
