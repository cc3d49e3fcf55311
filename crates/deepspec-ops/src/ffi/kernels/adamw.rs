//! An AdamW step that reads and writes each tensor once. GPUs use libtorch's fused AdamW, which tch does not expose;
//! the CPU has its own kernel.

use std::ffi::{c_char, c_void};

use tch::Tensor;

use super::super::args::{AdamWSettings, AdamWTensors};
use super::super::c10d::check;
use super::super::tensor_from_raw;

#[repr(C)]
struct RawTensors {
    weights: *mut c_void,
    gradient: *mut c_void,
    exp_avg: *mut c_void,
    exp_avg_sq: *mut c_void,
}

unsafe extern "C" {
    fn ds_adamw(
        tensors: *const RawTensors,
        count: usize,
        divisor: *const c_void,
        settings: *const AdamWSettings,
    ) -> *mut c_char;
    fn ds_square_sum(values: *const c_void) -> *mut c_void;
}

/// Divides the gradients by `divisor`, a float32 scalar, and takes one AdamW step (Loshchilov & Hutter 2019). All
/// tensors are on one device.
///
/// # Panics
/// If a tensor breaks the contract of [`AdamWTensors`].
pub fn adamw(tensors: &mut [AdamWTensors<'_>], divisor: &Tensor, settings: AdamWSettings) -> bool {
    if tensors.is_empty() {
        return true; // libtorch refuses empty lists
    }
    let raw: Vec<RawTensors> = tensors
        .iter_mut()
        .map(|tensors| RawTensors {
            weights: tensors.weights.as_mut_ptr().cast(),
            gradient: tensors.gradient.as_mut_ptr().cast(),
            exp_avg: tensors.exp_avg.as_mut_ptr().cast(),
            exp_avg_sq: tensors.exp_avg_sq.as_mut_ptr().cast(),
        })
        .collect();
    // SAFETY: the shim takes counted references during the call only, and catches every C++ exception. All tensors
    // stay mutably borrowed until the shim returns. `raw` has as many entries as the count says.
    let outcome = check(unsafe { ds_adamw(raw.as_ptr(), raw.len(), divisor.as_ptr().cast(), &settings) });
    if let Err(problem) = outcome {
        panic!("AdamW: {problem}");
    }
    true
}

/// Σ x² of contiguous float32 values on the CPU, a float64 scalar. The rounding error does not grow with their
/// number.
///
/// None for other tensors.
pub fn square_sum(values: &Tensor) -> Option<Tensor> {
    // SAFETY: the shim reads the tensor during the call, catches every C++ exception, and returns null or a new
    // tensor.
    unsafe { tensor_from_raw(ds_square_sum(values.as_ptr().cast())) }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn values(shape: &[i64], seed: f64) -> Tensor {
        let count = shape.iter().product::<i64>();
        (Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.7 + seed).sin().view(shape)
    }

    /// Compares with the formula in float64. Some shapes exceed one thread's share, and none is a multiple of a
    /// vector.
    #[test]
    fn steps_are_those_of_the_formula() {
        const SHAPES: [&[i64]; 4] = [&[], &[7], &[3, 5], &[401, 331]];
        let divisor = 1.7;
        let all = |seed: f64| SHAPES.map(|shape| values(shape, seed));
        let single = |tensors: &[Tensor; 4]| tensors.each_ref().map(|t| t.to_kind(Kind::Float));
        let (mut weights, mut exp_avgs, mut exp_avg_sqs) =
            (all(1.0), all(2.0).map(|t| t * 0.1), all(3.0).map(|t| t.square()));
        let (mut found, mut found_avgs, mut found_avg_sqs) =
            (single(&weights), single(&exp_avgs), single(&exp_avg_sqs));
        for step in 1..4 {
            let settings = AdamWSettings {
                lr: 0.03,
                beta1: 0.9,
                beta2: 0.99,
                weight_decay: 0.1,
                eps: 1e-8,
                step: f64::from(step),
            };
            let mut gradients = all(f64::from(step) * 0.3).map(|t| t.to_kind(Kind::Float));
            for (i, gradient) in gradients.iter().enumerate() {
                let gradient = gradient.to_kind(Kind::Double) / divisor;
                let part = |beta: f64, old: &Tensor, new: Tensor| old * beta + new * (1.0 - beta);
                exp_avgs[i] = part(settings.beta1, &exp_avgs[i], gradient.shallow_clone());
                exp_avg_sqs[i] = part(settings.beta2, &exp_avg_sqs[i], gradient.square());
                let corrected = |beta: f64, average: &Tensor| average / (1.0 - beta.powi(step));
                let (mean, square) =
                    (corrected(settings.beta1, &exp_avgs[i]), corrected(settings.beta2, &exp_avg_sqs[i]));
                let kept = &weights[i] * (1.0 - settings.lr * settings.weight_decay);
                weights[i] = kept - settings.lr * mean / (square.sqrt() + settings.eps);
            }
            let parts = found.iter_mut().zip(&mut gradients).zip(&mut found_avgs).zip(&mut found_avg_sqs);
            let mut tensors: Vec<AdamWTensors<'_>> = parts
                .map(|(((weights, gradient), exp_avg), exp_avg_sq)| AdamWTensors {
                    weights,
                    gradient,
                    exp_avg,
                    exp_avg_sq,
                })
                .collect();
            adamw(&mut tensors, &Tensor::from(divisor as f32), settings);
            for gradient in &gradients {
                assert!(gradient.eq(0.0).all().int64_value(&[]) == 1);
            }
        }
        for (expected, found) in [(weights, found), (exp_avgs, found_avgs), (exp_avg_sqs, found_avg_sqs)] {
            for (expected, found) in expected.iter().zip(found) {
                let error = (found.to_kind(Kind::Double) - expected).abs().max().double_value(&[]);
                assert!(error < 1e-6, "off by {error:e}");
            }
        }
    }

    #[test]
    fn squares_are_added_without_their_rounding() {
        for count in [0, 1, 100, 65_536, 200_001] {
            let x = (values(&[count], 0.5) * 3.0).to_kind(Kind::Float);
            let expected = x.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[]);
            let found = square_sum(&x).unwrap();
            assert_eq!(found.kind(), Kind::Double);
            let error = (found.double_value(&[]) - expected).abs();
            assert!(error <= 1e-6 * expected, "{count}: off by {error:e} of {expected}");
        }
        assert!(square_sum(&values(&[4], 0.0)).is_none());
        assert!(square_sum(&values(&[4, 6], 0.0).to_kind(Kind::Float).tr()).is_none());
    }
}
