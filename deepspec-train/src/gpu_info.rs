//! Name and peak performance of a GPU.

use std::fs;

use tch::{Device, Kind};

/// Dense peak in TFLOP/s of bf16 tensor cores with float32 accumulation, by a part of the driver's
/// name for the GPU. The first match counts.
const PEAK_TFLOPS: [(&str, f64); 8] = [
    ("B200", 2250.0),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100", 989.4),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("A10", 125.0),
    ("4090", 165.2),
];

/// The driver's name for a GPU.
pub fn gpu_name(device: Device) -> Option<String> {
    let Device::Cuda(index) = device else { return None };
    let mut folders: Vec<_> =
        fs::read_dir("/proc/driver/nvidia/gpus").ok()?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    folders.sort();
    let text = fs::read_to_string(folders.get(index)?.join("information")).ok()?;
    Some(text.lines().find_map(|line| line.strip_prefix("Model:"))?.trim().to_string())
}

/// Dense peak in TFLOP/s of a GPU with this name; None for dtypes other than bfloat16 and for
/// unknown names.
pub fn peak_tflops(name: &str, kind: Kind) -> Option<f64> {
    let known = PEAK_TFLOPS.iter().find(|(part, _)| name.contains(part)).filter(|_| kind == Kind::BFloat16);
    known.map(|&(_, peak)| peak)
}

/// Waits until the device has finished all queued work, so that timings are valid.
pub fn synchronize(device: Device) {
    if let Device::Cuda(index) = device {
        tch::Cuda::synchronize(index as i64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_name_that_fits_counts() {
        assert_eq!(peak_tflops("NVIDIA H100 80GB HBM3", Kind::BFloat16), Some(989.4));
        assert_eq!(peak_tflops("NVIDIA H100 PCIe", Kind::BFloat16), Some(756.0));
        assert_eq!(peak_tflops("NVIDIA A100-SXM4-80GB", Kind::BFloat16), Some(312.0));
        assert_eq!(peak_tflops("NVIDIA H100 80GB HBM3", Kind::Float), None);
        assert_eq!(peak_tflops("Some other", Kind::BFloat16), None);
    }
}
