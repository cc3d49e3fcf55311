//! Copies hidden states to the GPU while the GPU trains on earlier micro-batches.

use deepspec_drafters::TrainSample;
use deepspec_ops::{CudaEvent, CudaStream, empty_pinned};
use tch::{Device, Tensor};

/// Micro-batches whose hidden states are on the GPU: one that is being trained on, one that waits,
/// one in transfer, and two that the host has queued ahead.
pub const MICRO_BATCHES_ON_GPU: usize = 5;
/// Micro-batches that wait on the GPU for the trainer.
pub const MICRO_BATCHES_WAITING: usize = 1;
/// Page-locked memory, in micro-batches: two are copied at once, and a block takes up to twice its
/// content.
pub const PINNED_MICRO_BATCHES: usize = 4;

/// Copies hidden states from the host to a GPU on a separate CUDA stream.
pub struct HostToDeviceCopier {
    device: Device,
    stream: CudaStream,
}

impl HostToDeviceCopier {
    /// Returns None for the CPU, where no copy is needed.
    pub fn for_device(device: Device) -> Option<Self> {
        CudaStream::on_device(device).map(|stream| Self { device, stream })
    }

    /// Starts an asynchronous copy of the samples' states through page-locked memory. Users must
    /// wait for the returned event. Returns None if the states are not on the host.
    pub fn start_copy(&self, samples: &mut [TrainSample]) -> Option<CudaEvent> {
        if samples.iter().any(|sample| sample.last.device() != Device::Cpu) {
            return None;
        }
        let _on = self.stream.enter();
        let taps = self.concat_to_gpu(samples.iter().map(|sample| &sample.taps).collect())?;
        let last = self.concat_to_gpu(samples.iter().map(|sample| &sample.last).collect())?;
        let (mut tap_rows, mut last_rows) = (0, 0);
        for sample in samples {
            let [tokens, kept] = [&sample.taps, &sample.last].map(|states| states.size()[0]);
            sample.taps = taps.narrow(0, tap_rows, tokens);
            sample.last = last.narrow(0, last_rows, kept);
            (tap_rows, last_rows) = (tap_rows + tokens, last_rows + kept);
        }
        CudaEvent::record(self.device)
    }

    /// Concatenates the parts along dimension 0 and copies them in one transfer.
    fn concat_to_gpu(&self, parts: Vec<&Tensor>) -> Option<Tensor> {
        let first = parts.first()?;
        let rows = parts.iter().map(|part| part.size()[0]).sum();
        let together = empty_pinned(&[rows, first.size()[1]], first);
        let together = Tensor::cat_out(&together, &parts, 0);
        Some(together.to_device_(self.device, first.kind(), true, false))
    }
}

/// Makes later work on the samples' device wait for the samples' hidden states and for the tensors
/// `others`.
pub fn wait_for_states<'t>(
    ready: &CudaEvent,
    samples: &'t [TrainSample],
    others: impl Iterator<Item = &'t Tensor>,
) {
    ready.make_streams_wait(samples.iter().flat_map(|sample| [&sample.taps, &sample.last]).chain(others));
}
