//! Runs the target over samples and returns the hidden states that drafters train on.

use std::path::Path;

use deepspec_drafters::Recipe;
use deepspec_engine::{ModelInput, Target};
use deepspec_models::{TargetModel, TargetOptions};
use deepspec_ops::{CudaEvent, CudaStream, Upload};
use tch::{Device, Kind, Tensor};

use crate::cache::{FinalStates, PlannedSample};
use crate::{ForwardLimits, StatesError};

/// Maximum number of tokens of one forward on the CPU; larger forwards are not faster.
const MAX_CPU_TOKENS: usize = 2048;
/// Maximum number of tokens of one forward on a GPU.
const MAX_GPU_TOKENS: usize = 8192;
/// Capacity of the KV cache, in forwards with the maximum number of tokens.
const KV_CACHE_FORWARDS: usize = 4;
/// Maximum number of sequences of one forward.
const MAX_SEQUENCES: usize = 64;

/// The frozen target, which runs a forward over whole samples.
pub struct Capture {
    target: TargetModel,
    budget: ForwardLimits,
    /// CUDA stream for copies to the host, which run parallel to the target's next forward.
    leaving: Option<CudaStream>,
}

/// The hidden states of a batch of samples, concatenated in order, in bfloat16 on the target's
/// device.
pub struct Captured {
    /// The captured layers of every token: `[N, m·d]`.
    pub taps: Tensor,
    /// The final hidden states after the norm, of the selected positions: `[K, d]`.
    pub last: Tensor,
}

impl Capture {
    /// Loads the target in `dir` with the taps of `recipe` and a KV cache for sequences of up to
    /// `longest` tokens.
    ///
    /// # Errors
    /// Fails if the folder is not a supported target.
    pub fn load(
        dir: &Path,
        recipe: &Recipe,
        longest: usize,
        device: Device,
        dtype: Kind,
    ) -> Result<Self, StatesError> {
        let budget = ForwardLimits::new(longest, device);
        let options = TargetOptions {
            device,
            kind: dtype,
            slots: budget.sequences,
            taps: recipe.target.layer_ids.clone(),
        };
        let target = TargetModel::load(dir, &options)?;
        Ok(Self { target, budget, leaving: CudaStream::on_device(device) })
    }

    /// The target model.
    pub fn target(&self) -> &TargetModel {
        &self.target
    }

    /// Limits of one [`Self::run`].
    pub fn forward_limits(&self) -> ForwardLimits {
        self.budget
    }

    /// Starts an asynchronous copy of the states to the host. Without a copy stream it returns the states
    /// unchanged.
    pub fn download(&self, captured: Captured) -> HostCopy {
        let (Captured { taps, last }, device) = (captured, self.target.device());
        let states = [taps, last];
        let Some((stream, done)) = self.leaving.zip(CudaEvent::record(device)) else {
            return HostCopy { states, there: None };
        };
        let _on = stream.enter();
        done.make_streams_wait(&states);
        let states = states.map(|states| states.to_device_(Device::Cpu, states.kind(), true, false));
        HostCopy { states, there: CudaEvent::record(device) }
    }

    /// Computes the states of `batch`, which must be within [`Self::forward_limits`]. They are rounded to
    /// bfloat16, whatever the target's dtype.
    pub fn run(&mut self, batch: &[PlannedSample], last: FinalStates) -> Captured {
        let _no_grad = tch::no_grad_guard();
        let device = self.target.device();
        let chunks: Vec<(usize, usize)> =
            batch.iter().enumerate().map(|(slot, sample)| (slot, sample.input_ids.len())).collect();
        let mut upload = Upload::default();
        let ids = batch.iter().flat_map(|sample| sample.input_ids.iter().map(|&id| i64::from(id)));
        let (tokens, kept) = (upload.push(ids), upload.push(final_state_row_indices(batch, last)));
        let sent = upload.send(device);
        let (tokens, kept) = (sent.slice(tokens), sent.slice(kept));
        let forwarded = self.target.forward(&ModelInput { chunks: &chunks, tokens });
        for &(slot, _) in &chunks {
            self.target.truncate(slot, 0);
        }
        Captured {
            taps: forwarded.captured_states.to_kind(Kind::BFloat16),
            last: forwarded.hidden.index_select(0, &kept).to_kind(Kind::BFloat16),
        }
    }
}

impl Drop for Capture {
    /// The target's memory belongs to another CUDA stream than the one it runs on, so its work must
    /// finish before the memory is freed.
    fn drop(&mut self) {
        if let Some(done) = CudaEvent::record(self.target.device()) {
            done.synchronize();
        }
    }
}

/// States that are being copied to the host.
pub struct HostCopy {
    states: [Tensor; 2],
    /// Event after the copy; None if the states were on the host already.
    there: Option<CudaEvent>,
}

impl HostCopy {
    /// Whether the copy may still be running.
    pub fn is_in_flight(&self) -> bool {
        self.there.is_some()
    }

    /// Waits for the copy and returns the little-endian bytes of taps and final states, row-major.
    pub fn bytes(self) -> [Vec<u8>; 2] {
        if let Some(there) = self.there {
            there.synchronize();
        }
        self.states.each_ref().map(bytes)
    }
}

impl ForwardLimits {
    /// Limits of one forward for sequences of up to `longest` tokens on `device`.
    pub fn new(longest: usize, device: Device) -> Self {
        let tokens = if device == Device::Cpu { MAX_CPU_TOKENS } else { MAX_GPU_TOKENS };
        let sequences = (KV_CACHE_FORWARDS * tokens / longest.next_power_of_two()).clamp(1, MAX_SEQUENCES);
        Self { tokens, sequences }
    }
}

/// Row indices in the batch of the tokens whose final hidden state is stored.
fn final_state_row_indices(batch: &[PlannedSample], last: FinalStates) -> Vec<i64> {
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
    // All CPUs that libtorch supports are little-endian.
    states.to_device(Device::Cpu).contiguous().copy_data_u8(&mut bytes, values);
    bytes
}
