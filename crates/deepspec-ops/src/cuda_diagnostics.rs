//! Warnings about GPUs that the machine has but libtorch cannot use. Without a warning, users would notice only that
//! the run is slow.

use std::process::Command;
use std::sync::{Once, mpsc};
use std::thread;
use std::time::Duration;

use deepspec_core::env;

use crate::error::DeviceError;

/// Timeout of `nvidia-smi`, which can hang if the driver is broken.
const NVIDIA_SMI_TIMEOUT: Duration = Duration::from_secs(20);

/// Why libtorch has no GPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoGpuReason {
    /// libtorch's CUDA library cannot be opened.
    #[error("{0}")]
    Library(String),
    /// The CUDA library is loaded, but finds no GPU.
    #[error("libtorch sees no GPU")]
    Devices,
}

impl NoGpuReason {
    fn remedy(&self) -> &'static str {
        match self {
            Self::Library(_) => {
                "install libtorch's CUDA libraries with DEEPSPEC_FULL_TORCH=1 scripts/setup.sh and build again"
            }
            Self::Devices => {
                "the driver may be too old for this libtorch's CUDA (the top of nvidia-smi shows the newest that it serves), or CUDA_VISIBLE_DEVICES names no GPU that is there"
            }
        }
    }
}

/// Lets `auto` use the CPU, because libtorch has no GPU. If `nvidia-smi` lists GPUs, it warns, or returns an
/// error to one of several processes.
///
/// # Errors
/// [`DeviceError::Unused`].
pub fn check_cpu_fallback(absence: &NoGpuReason, processes: usize) -> Result<(), DeviceError> {
    let launched =
        || env::distributed_env().is_ok_and(|ranks| ranks.is_some_and(|ranks| ranks.world_size > 1));
    warn_or_refuse(absence, env::hides_gpus(), processes > 1 || launched(), count_nvidia_smi_gpus)
}

fn warn_or_refuse(
    absence: &NoGpuReason,
    hidden: bool,
    is_one_of_many: bool,
    listed: impl FnOnce() -> usize,
) -> Result<(), DeviceError> {
    static SAID: Once = Once::new();
    let gpus = if hidden { 0 } else { listed() };
    if gpus == 0 {
        return Ok(());
    }
    let (are, remedy) = (if gpus == 1 { "a GPU" } else { "GPUs" }, absence.remedy());
    let said = format!("device auto: nvidia-smi lists {are} that cannot be used: {absence}; {remedy}");
    if is_one_of_many {
        return Err(DeviceError::Unused(said));
    }
    SAID.call_once(|| tracing::warn!("{said}; running on the CPU"));
    Ok(())
}

/// Number of GPUs that `nvidia-smi` lists; 0 if the program is missing or does not answer.
fn count_nvidia_smi_gpus() -> usize {
    let (tell, told) = mpsc::channel();
    // A reply after the timeout is dropped.
    thread::spawn(move || drop(tell.send(Command::new("nvidia-smi").arg("-L").output())));
    match told.recv_timeout(NVIDIA_SMI_TIMEOUT) {
        Ok(Ok(output)) => count_gpu_lines(&String::from_utf8_lossy(&output.stdout)),
        _ => 0,
    }
}

/// Number of GPUs in the output of `nvidia-smi -L`. Indented lines are MIG slices of a GPU.
fn count_gpu_lines(list: &str) -> usize {
    list.lines().filter(|line| line.starts_with("GPU ")).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_counted() {
        let list = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n  MIG 1g.10gb Device 0: (UUID: MIG-1)\nGPU 1: NVIDIA H100\n";
        assert_eq!(
            (
                count_gpu_lines(list),
                count_gpu_lines("NVIDIA-SMI has failed because it couldn't\n"),
                count_gpu_lines("")
            ),
            (2, 0, 0)
        );
    }

    #[test]
    fn only_a_process_among_several_is_refused() {
        let library = NoGpuReason::Library("libtorch_cuda.so: no such file".into());
        assert_eq!(warn_or_refuse(&library, false, true, || 0), Ok(()));
        assert_eq!(warn_or_refuse(&library, true, true, || unreachable!("they are hidden")), Ok(()));
        assert_eq!(warn_or_refuse(&library, false, false, || 1), Ok(()));
        let error = warn_or_refuse(&library, false, true, || 2).unwrap_err().to_string();
        for part in ["lists GPUs", "libtorch_cuda.so: no such file", "DEEPSPEC_FULL_TORCH=1", "--device cpu"]
        {
            assert!(error.contains(part), "{error}");
        }
        let error = warn_or_refuse(&NoGpuReason::Devices, false, true, || 1).unwrap_err().to_string();
        assert!(error.contains("lists a GPU ") && error.contains("driver may be too old"), "{error}");
    }
}
