//! Accelerators, and storage formats of weights.

use serde::{Deserialize, Serialize};

use super::{describe_invalid_value, infinite};

/// An accelerator.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// Memory bandwidth in bytes per second.
    pub bandwidth: f64,
    /// Operations per second in bfloat16.
    pub bf16: f64,
    /// Operations per second in 8-bit floats; equal to `bf16` without support.
    pub fp8: f64,
    /// Operations per second in 4-bit floats; equal to `fp8` without support.
    pub fp4: f64,
    /// Bytes per second to other accelerators, in each direction.
    #[serde(default = "infinite")]
    pub link: f64,
}

impl Hardware {
    /// The first invalid value: its key, the value, and the expected range.
    pub fn describe_invalid_value(&self) -> Option<String> {
        let Self { bandwidth, bf16, fp8, fp4, link } = *self;
        let rates = [("bandwidth", bandwidth), ("bf16", bf16), ("fp8", fp8), ("fp4", fp4), ("link", link)];
        describe_invalid_value(&rates, |value| value > 0.0, "a positive number per second")
    }
}

/// Accelerators by name, with dense peaks, memory bandwidth and links as the vendors state them.
pub const ACCELERATORS: [(&str, Hardware); 6] = {
    const fn accelerator(bandwidth: f64, bf16: f64, fp8: f64, fp4: f64, link: f64) -> Hardware {
        Hardware {
            bandwidth: bandwidth * 1e12,
            bf16: bf16 * 1e15,
            fp8: fp8 * 1e15,
            fp4: fp4 * 1e15,
            link: link * 1e9,
        }
    }
    [
        ("b200", accelerator(8.0, 2.25, 4.5, 9.0, 900.0)),
        ("h200", accelerator(4.8, 0.989, 1.979, 1.979, 450.0)),
        ("h100", accelerator(3.35, 0.989, 1.979, 1.979, 450.0)),
        ("a100", accelerator(2.039, 0.312, 0.312, 0.312, 300.0)),
        ("mi300x", accelerator(5.3, 1.307, 2.615, 2.615, 448.0)),
        ("l40s", accelerator(0.864, 0.362, 0.733, 0.733, 32.0)),
    ]
};

/// Bytes of memory of an accelerator of [`ACCELERATORS`], as the vendors state them. Of several
/// sizes it is the largest.
pub fn accelerator_memory(name: &str) -> Option<f64> {
    let gigabytes = match name {
        "b200" | "mi300x" => 192.0,
        "h200" => 141.0,
        "h100" | "a100" => 80.0,
        "l40s" => 48.0,
        _ => return None,
    };
    Some(gigabytes * 1e9)
}

/// Format in which weights are stored and multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 16 bits.
    Bf16,
    /// 8 bits.
    Fp8,
    /// 4 bits in blocks of 32 with a scale of 8 (MXFP4): 0.53 bytes.
    Fp4,
}

impl Precision {
    /// Bytes per weight.
    pub fn bytes(self) -> f64 {
        match self {
            Self::Bf16 => 2.0,
            Self::Fp8 => 1.0,
            Self::Fp4 => 0.53,
        }
    }

    /// Peak operations per second in this format.
    pub fn peak_operations(self, hardware: &Hardware) -> f64 {
        match self {
            Self::Bf16 => hardware.bf16,
            Self::Fp8 => hardware.fp8,
            Self::Fp4 => hardware.fp4,
        }
    }
}
