//! Choosing where tensors live.

use std::sync::{Once, OnceLock};

use tch::{Cuda, Device, Kind};

use crate::cuda_diagnostics::{self, NoGpuReason};
use crate::error::DeviceError;
use crate::ffi;

/// Rank of a process among the processes of its job on one machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalRank {
    /// This process, from 0.
    pub local_rank: usize,
    /// Processes of the whole job.
    pub processes: usize,
    /// Whether processes may share a GPU.
    pub shares: bool,
}

impl LocalRank {
    /// The only process of a job.
    pub const ALONE: Self = Self { local_rank: 0, processes: 1, shares: true };
}

/// Parses `auto`, `cpu`, `cuda` or `cuda:N`. `auto` is the first GPU that libtorch sees, or else the CPU. It
/// warns if the machine has GPUs that libtorch does not see.
///
/// # Errors
/// See [`DeviceError`]; [`DeviceError::Unused`] for `auto` under torchrun or srun, which start several processes.
pub fn parse_device(name: &str) -> Result<Device, DeviceError> {
    rank_device(name, LocalRank::ALONE)
}

/// The device of one process of a job. `auto` and `cuda` mean the only GPU that the process sees, or else the GPU whose index is the local
/// rank. If processes may share GPUs, the index is the local rank modulo the number of GPUs. `cuda:{local_rank+N}` means the GPU with index
/// `local_rank + N`.
///
/// # Errors
/// See [`DeviceError`].
pub fn rank_device(name: &str, local: LocalRank) -> Result<Device, DeviceError> {
    match name {
        "cpu" => Ok(Device::Cpu),
        "auto" => match cuda_device_count() {
            Ok(count) => own_gpu(count, local),
            Err(absence) => {
                cuda_diagnostics::check_cpu_fallback(&absence, local.processes).map(|()| Device::Cpu)
            }
        },
        "cuda" => own_gpu(require_cuda()?, local),
        _ => {
            let index = gpu_index(name, local.local_rank).ok_or_else(|| DeviceError::Unknown(name.into()))?;
            let count = require_cuda()?;
            if index < count {
                Ok(Device::Cuda(index))
            } else {
                Err(DeviceError::NoSuchIndex { index, count })
            }
        }
    }
}

fn own_gpu(count: usize, local: LocalRank) -> Result<Device, DeviceError> {
    let local_rank = local.local_rank;
    match count {
        1 => Ok(Device::Cuda(0)),
        count if local_rank < count => Ok(Device::Cuda(local_rank)),
        count if local.shares => Ok(Device::Cuda(local_rank % count)),
        count => Err(DeviceError::NoneLeft { local_rank, count }),
    }
}

/// The GPU index in a name such as `cuda:2` or `cuda:{local_rank+4}`, for the process at `local_rank`. None for
/// other names.
fn gpu_index(name: &str, local_rank: usize) -> Option<usize> {
    let index = name.strip_prefix("cuda:")?;
    let Some(place) = index.strip_prefix('{').and_then(|place| place.strip_suffix('}')) else {
        return index.parse().ok();
    };
    match place.split_once('+') {
        None => (place.trim() == "local_rank").then_some(local_rank),
        Some((variable, offset)) if variable.trim() == "local_rank" => {
            local_rank.checked_add(offset.trim().parse().ok()?)
        }
        Some(_) => None,
    }
}

/// Whether every process gets the same GPU from this device name.
pub fn names_one_gpu(name: &str) -> bool {
    matches!((gpu_index(name, 0), gpu_index(name, 1)), (Some(first), Some(second)) if first == second)
}

/// Number of GPUs that a machine's processes can divide among themselves on the device `name`. It is 0 for the
/// CPU and for one specific GPU.
pub fn shareable_gpu_count(name: &str) -> usize {
    if matches!(name, "auto" | "cuda") { cuda_device_count().unwrap_or(0) } else { 0 }
}

/// Number of usable CUDA devices.
fn cuda_device_count() -> Result<usize, NoGpuReason> {
    static COUNT: OnceLock<Result<usize, NoGpuReason>> = OnceLock::new();
    COUNT
        .get_or_init(|| {
            ffi::load_cuda().map_err(NoGpuReason::Library)?;
            match Cuda::device_count() {
                count if count > 0 && Cuda::is_available() => Ok(count as usize),
                _ => Err(NoGpuReason::Devices),
            }
        })
        .clone()
}

fn require_cuda() -> Result<usize, DeviceError> {
    cuda_device_count().map_err(|absence| DeviceError::NoCuda(absence.to_string()))
}

/// The device as `--device` spells it.
pub fn device_name(device: Device) -> String {
    match device {
        Device::Cuda(index) => format!("cuda:{index}"),
        other => format!("{other:?}").to_lowercase(),
    }
}

/// PyTorch's name of a dtype.
pub fn dtype_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Float => "float32",
        Kind::Half => "float16",
        Kind::BFloat16 => "bfloat16",
        Kind::Double => "float64",
        _ => "another kind",
    }
}

/// Default dtype of weights. It is float32 on the CPU and on GPUs before compute capability 8, which compute in bfloat16
/// slowly or not at all. It is bfloat16 on other devices.
pub fn default_dtype(device: Device) -> Kind {
    match device {
        Device::Cuda(index) if !ffi::has_bfloat16(index) => {
            static TOLD: Once = Once::new();
            TOLD.call_once(|| {
                tracing::warn!(
                    "GPU {index} is older than compute capability 8, without bfloat16: weights are float32"
                );
            });
            Kind::Float
        }
        Device::Cpu => Kind::Float,
        _ => Kind::BFloat16,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local(local_rank: usize, shares: bool) -> LocalRank {
        LocalRank { local_rank, processes: 8, shares }
    }

    #[test]
    fn names_are_checked() {
        assert_eq!(parse_device("cpu"), Ok(Device::Cpu));
        for name in ["gpu", "cuda:", "cuda:x", "cuda:{rank}", "cuda:{local_rank+}", "cuda:{local_rank*2}"] {
            assert_eq!(parse_device(name), Err(DeviceError::Unknown(name.into())));
        }
        assert_eq!(
            (rank_device("cpu", local(3, false)), shareable_gpu_count("cpu"), shareable_gpu_count("cuda:0")),
            (Ok(Device::Cpu), 0, 0)
        );
    }

    #[test]
    fn a_process_takes_the_gpu_of_its_place() {
        assert_eq!(own_gpu(8, local(3, false)), Ok(Device::Cuda(3)));
        // Slurm may show each task its own only.
        assert_eq!(own_gpu(1, local(3, false)), Ok(Device::Cuda(0)));
        let error = own_gpu(2, local(3, false)).unwrap_err();
        assert_eq!(error, DeviceError::NoneLeft { local_rank: 3, count: 2 });
        assert!(error.to_string().contains("train.backend=gloo"));
        assert_eq!(own_gpu(2, local(3, true)), Ok(Device::Cuda(1)));
    }

    #[test]
    fn a_place_may_count_from_the_local_rank() {
        let of = |name, local_rank| gpu_index(name, local_rank);
        assert_eq!([0, 3].map(|rank| of("cuda:{local_rank}", rank)), [Some(0), Some(3)]);
        assert_eq!([0, 3].map(|rank| of("cuda:{local_rank+4}", rank)), [Some(4), Some(7)]);
        assert_eq!(of("cuda:{ local_rank + 4 }", 1), Some(5));
        assert_eq!((of("cuda:6", 3), of("cuda:{local_rank+99999999999999999999}", 0)), (Some(6), None));
        let one = ["cuda:6", "cuda:{local_rank}", "cuda", "cpu", "cuda:{x}"].map(names_one_gpu);
        assert_eq!(one, [true, false, false, false, false]);
    }
}
