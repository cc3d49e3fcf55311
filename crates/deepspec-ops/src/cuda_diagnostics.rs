//! GPUs that the machine has and libtorch does not use: nobody should find that out from the clock.

use std::process::Command;
use std::sync::{Once, mpsc};
use std::thread;
use std::time::Duration;

use deepspec_core::env;

use crate::error::DeviceError;

/// How long the driver's own program may take to answer; a broken driver can hang.
const PATIENCE: Duration = Duration::from_secs(20);

/// Why libtorch has no GPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Absence {
    /// Its CUDA part cannot be opened.
    #[error("{0}")]
    Library(String),
    /// That is there, and finds none.
    #[error("libtorch sees no GPU")]
    Devices,
}

impl Absence {
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

/// The CPU is taken because there is no GPU. That is said where the machine has some, and refused to one of several processes.
///
/// # Errors
/// [`DeviceError::Unused`].
pub fn fall_back(absence: &Absence, processes: usize) -> Result<(), DeviceError> {
    let launched = || env::ranks().is_ok_and(|ranks| ranks.is_some_and(|ranks| ranks.world_size > 1));
    judge(absence, env::hides_gpus(), processes > 1 || launched(), listed)
}

fn judge(
    absence: &Absence,
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

/// GPUs that `nvidia-smi` lists; 0 where there is no such program or it does not answer.
fn listed() -> usize {
    let (tell, told) = mpsc::channel();
    // Nobody hears it where it comes too late.
    thread::spawn(move || drop(tell.send(Command::new("nvidia-smi").arg("-L").output())));
    match told.recv_timeout(PATIENCE) {
        Ok(Ok(output)) => count(&String::from_utf8_lossy(&output.stdout)),
        _ => 0,
    }
}

/// Whole GPUs in a list; their parts are indented.
fn count(list: &str) -> usize {
    list.lines().filter(|line| line.starts_with("GPU ")).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_counted() {
        let list = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n  MIG 1g.10gb Device 0: (UUID: MIG-1)\nGPU 1: NVIDIA H100\n";
        assert_eq!((count(list), count("NVIDIA-SMI has failed because it couldn't\n"), count("")), (2, 0, 0));
    }

    #[test]
    fn only_a_process_among_several_is_refused() {
        let library = Absence::Library("libtorch_cuda.so: no such file".into());
        assert_eq!(judge(&library, false, true, || 0), Ok(()));
        assert_eq!(judge(&library, true, true, || unreachable!("they are hidden")), Ok(()));
        assert_eq!(judge(&library, false, false, || 1), Ok(()));
        let error = judge(&library, false, true, || 2).unwrap_err().to_string();
        for part in ["lists GPUs", "libtorch_cuda.so: no such file", "DEEPSPEC_FULL_TORCH=1", "--device cpu"]
        {
            assert!(error.contains(part), "{error}");
        }
        let error = judge(&Absence::Devices, false, true, || 1).unwrap_err().to_string();
        assert!(error.contains("lists a GPU ") && error.contains("driver may be too old"), "{error}");
    }
}
