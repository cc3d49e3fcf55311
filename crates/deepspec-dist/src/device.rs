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
    }
}
