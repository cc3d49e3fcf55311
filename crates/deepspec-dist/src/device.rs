//! Choosing where tensors live.

use std::sync::OnceLock;

use tch::{Cuda, Device, Kind};

use crate::ffi;

/// Why a device cannot be used.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum DeviceError {
    /// Not a device name.
    #[error("`{0}` is no device; use auto, cpu, cuda or cuda:N")]
    Unknown(String),
    /// CUDA was asked for and is not there.
    #[error("no CUDA device: {0}; use --device cpu")]
    NoCuda(String),
    /// The index is too high.
    #[error("cuda:{index} does not exist; this machine has {count} CUDA devices")]
    NoSuchIndex {
        /// Requested index.
        index: usize,
        /// Devices present.
        count: usize,
    },
}

/// Parses `auto`, `cpu`, `cuda` or `cuda:N`. `auto` is the first GPU where libtorch sees one, else the CPU.
///
/// # Errors
/// See [`DeviceError`].
pub fn device(name: &str) -> Result<Device, DeviceError> {
    match name {
        "cpu" => Ok(Device::Cpu),
        "auto" => Ok(if cuda().is_ok() { Device::Cuda(0) } else { Device::Cpu }),
        "cuda" => cuda().map(|_| Device::Cuda(0)),
        _ => {
            let index = name.strip_prefix("cuda:").and_then(|index| index.parse().ok());
            let index = index.ok_or_else(|| DeviceError::Unknown(name.into()))?;
            let count = cuda()?;
            if index < count {
                Ok(Device::Cuda(index))
            } else {
                Err(DeviceError::NoSuchIndex { index, count })
            }
        }
    }
}

/// The device of a process that is the `local_rank`-th of its machine: `auto` and `cuda` mean its own GPU then, or the only
/// one that it is shown.
///
/// # Errors
/// See [`DeviceError`].
pub fn rank_device(name: &str, local_rank: usize) -> Result<Device, DeviceError> {
    match (device(name)?, name) {
        (Device::Cuda(_), "auto" | "cuda") => match cuda()? {
            1 => Ok(Device::Cuda(0)),
            count if local_rank < count => Ok(Device::Cuda(local_rank)),
            count => Err(DeviceError::NoSuchIndex { index: local_rank, count }),
        },
        (device, _) => Ok(device),
    }
}

/// GPUs that a machine's processes can share out among them if they run on the device `name`: none for the CPU or one
/// certain GPU.
pub fn gpus(name: &str) -> usize {
    if matches!(name, "auto" | "cuda") { cuda().unwrap_or(0) } else { 0 }
}

/// Number of usable CUDA devices.
fn cuda() -> Result<usize, DeviceError> {
    static COUNT: OnceLock<Result<usize, DeviceError>> = OnceLock::new();
    COUNT
        .get_or_init(|| {
            ffi::load_cuda().map_err(|error| DeviceError::NoCuda(error.to_string()))?;
            match Cuda::device_count() {
                count if count > 0 && Cuda::is_available() => Ok(count as usize),
                _ => Err(DeviceError::NoCuda("libtorch sees no GPU".into())),
            }
        })
        .clone()
}

/// The kind that weights take by default: float32 on the CPU, bfloat16 on a GPU.
pub fn default_kind(device: Device) -> Kind {
    if device == Device::Cpu { Kind::Float } else { Kind::BFloat16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        assert_eq!(device("cpu"), Ok(Device::Cpu));
        assert_eq!(device("gpu"), Err(DeviceError::Unknown("gpu".into())));
        assert!(device("auto").is_ok());
        assert_eq!((rank_device("cpu", 3), gpus("cpu"), gpus("cuda:0")), (Ok(Device::Cpu), 0, 0));
    }
}
