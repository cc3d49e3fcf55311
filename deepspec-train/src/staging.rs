//! States on their way to the GPU that learns from them, while it learns from those before.

use deepspec_drafters::TrainSample;
use deepspec_ops::{CudaEvent, CudaStream, pinned};
use tch::{Device, Tensor};

/// Micro-batches whose states are on the GPU at once: one is learned from, one waits, one is on its way, and the host may be ahead of the GPU by two.
pub const STAGED: usize = 5;
/// Those that wait.
pub const WAITING: usize = 1;
/// As much page-locked memory as so many micro-batches' states take: two are copied at once, by blocks of up to twice what is in them.
pub const LOCKED: usize = 4;

/// Brings states from the host to a GPU on a stream of its own.
pub struct Staging {
    device: Device,
    stream: CudaStream,
}

impl Staging {
    /// None for the CPU, where states are read as they lie.
    pub fn to(device: Device) -> Option<Self> {
        CudaStream::of(device).map(|stream| Self { device, stream })
    }

    /// Sends the samples' states off, by way of host memory that the GPU copies from by itself; who uses them lets that wait first. None where they
    /// are no host's.
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

    /// The parts, one after the other, by one transfer.
    fn there(&self, parts: Vec<&Tensor>) -> Option<Tensor> {
        let first = parts.first()?;
        let rows = parts.iter().map(|part| part.size()[0]).sum();
        let together = pinned(&[rows, first.size()[1]], first);
        let together = Tensor::cat_out(&together, &parts, 0);
        Some(together.to_device_(self.device, first.kind(), true, false))
    }
}

/// Lets what is asked of the samples' device from now on wait for their states; `others` came with them.
pub fn hold<'t>(ready: &CudaEvent, samples: &'t [TrainSample], others: impl Iterator<Item = &'t Tensor>) {
    ready.hold(samples.iter().flat_map(|sample| [&sample.taps, &sample.last]).chain(others));
}
