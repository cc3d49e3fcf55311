//! Golden arrays as tensors, and tolerances.
#![allow(dead_code, reason = "each test binary uses its part")]

use deepspec_testkit::golden::{Array, Values};
use tch::{Kind, Tensor};

pub fn tensor(array: &Array) -> Tensor {
    match &array.values {
        Values::Float(values) => Tensor::from_slice(values),
        Values::Double(values) => Tensor::from_slice(values),
        Values::Int(values) => Tensor::from_slice(values),
    }
    .view(array.shape.as_slice())
}

/// Standard normal draws, float32.
pub fn noise(seed: u64, shape: &[i64]) -> Tensor {
    let count = shape.iter().product::<i64>() as usize;
    Tensor::from_slice(&deepspec_testkit::noise(seed, count)).view(shape)
}

pub fn max_abs(tensor: &Tensor) -> f64 {
    if tensor.numel() == 0 { 0.0 } else { tensor.abs().max().double_value(&[]) }
}

/// Asserts that `found` is within the absolute `tolerance` of `expected`.
pub fn assert_close(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(found.size(), expected.size(), "{what}: shapes differ");
    let error = max_abs(&(found.to_kind(Kind::Double) - expected.to_kind(Kind::Double)));
    assert!(error <= tolerance, "{what}: off by {error:.3e}, allowed {tolerance:.0e}");
}

/// The device of the golden tests: `DEEPSPEC_TEST_DEVICE`, else the CPU.
pub fn device() -> tch::Device {
    let name = std::env::var("DEEPSPEC_TEST_DEVICE").unwrap_or_else(|_| "cpu".into());
    deepspec_ops::parse_device(&name).unwrap_or_else(|error| panic!("{error}"))
}
