//! Copies hidden states to the GPU while the GPU trains on earlier micro-batches.

use deepspec_drafters::TrainSample;
use deepspec_ops::{CudaEvent, CudaStream, pinned};
use tch::{Device, Tensor};

/// Micro-batches whose hidden states are on the GPU: one in training, one waiting, one in transfer,
/// and two that the host has queued ahead.
pub const ON_GPU: usize = 5;
/// Micro-batches that wait on the GPU for the trainer.
pub const QUEUED: usize = 1;
/// Page-locked memory, in micro-batches: two are copied at once, and a block takes up to twice its
/// content.
pub const PINNED: usize = 4;

/// Copies hidden states from the host to a GPU on a separate CUDA stream.
pub struct Staging {
    device: Device,
    stream: CudaStream,
}

impl Staging {
    /// Returns None for the CPU, where no copy is needed.
    pub fn to(device: Device) -> Option<Self> {
        CudaStream::of(device).map(|stream| Self { device, stream })
    }

    /// Starts an asynchronous copy of the samples' states through page-locked memory. Users must
    /// wait for the returned event. Returns None if the states are not on the host.
    pub fn bring(&self, samples: &mut [TrainSample]) -> Option<CudaEvent> {
        if samples.iter().any(|sample| sample.last.device() != Device::Cpu) {
            return None;
        }
        let _on = self.stream.enter();
        let taps = self.there(samples.iter().map(|sample| &sample.taps).collect())?;
        let last = self.there(samples.iter().map(|sample| &sample.last).collect())?;
        let (mut tap_rows, mut last_rows) = (0, 0);
        for sample in samples {
            let [tokens, kept] = [&sample.taps, &sample.last].map(|states| states.size()[0]);
            sample.taps = taps.narrow(0, tap_rows, tokens);
            sample.last = last.narrow(0, last_rows, kept);
            (tap_rows, last_rows) = (tap_rows + tokens, last_rows + kept);
        }
        CudaEvent::here(self.device)
    }

    /// Concatenates the parts along dimension 0 and copies them in one transfer.
    fn there(&self, parts: Vec<&Tensor>) -> Option<Tensor> {
        let first = parts.first()?;
        let rows = parts.iter().map(|part| part.size()[0]).sum();
        let together = pinned(&[rows, first.size()[1]], first);
        let together = Tensor::cat_out(&together, &parts, 0);
        Some(together.to_device_(self.device, first.kind(), true, false))
    }
}

/// Makes later work on the samples' device wait for their states and for `others`.
pub fn hold<'t>(ready: &CudaEvent, samples: &'t [TrainSample], others: impl Iterator<Item = &'t Tensor>) {
    ready.hold(samples.iter().flat_map(|sample| [&sample.taps, &sample.last]).chain(others));
}
