//! AdamW (Loshchilov and Hutter 2019), and the squared norm that gradients are clipped by.

mod reference;

use tch::{Kind, Tensor};

use crate::ffi;
pub use crate::ffi::{AdamWSettings, AdamWTensors};

/// Divides the gradients by `divisor`, a float32 scalar on their device, and takes one step of AdamW. All tensors are float32,
/// contiguous and on one device.
///
/// Kernels read and write each tensor once: libtorch's fused AdamW on GPUs, and a kernel of this crate on the CPU.
///
/// # Panics
/// If the tensors of an entry differ in shape, dtype or device.
pub fn adamw(tensors: &mut [AdamWTensors<'_>], divisor: &Tensor, settings: AdamWSettings) {
    if !ffi::adamw(tensors, divisor, settings) {
        tensors.iter_mut().for_each(|tensors| reference::adamw(tensors, divisor, settings));
    }
}

/// Σ x², a float64 scalar; rounding does not grow with the number of values.
pub fn square_sum(values: &Tensor) -> Tensor {
    ffi::square_sum(values).unwrap_or_else(|| values.square().sum(Kind::Double))
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn kernels_step_as_the_reference_steps() {
        let values = |seed: u64| Tensor::from_slice(&deepspec_testkit::noise(seed, 5000)).view([50, 100]);
        let divisor = Tensor::from(1.7_f32);
        let settings =
            AdamWSettings { lr: 0.03, beta1: 0.9, beta2: 0.99, weight_decay: 0.1, eps: 1e-8, step: 2.0 };
        let run = |step: &dyn Fn(&mut AdamWTensors<'_>)| {
            let [mut weights, mut gradient, mut exp_avg] = [1, 2, 3].map(values);
            let mut exp_avg_sq = values(4).square();
            step(&mut AdamWTensors {
                weights: &mut weights,
                gradient: &mut gradient,
                exp_avg: &mut exp_avg,
                exp_avg_sq: &mut exp_avg_sq,
            });
            Tensor::stack(&[weights, gradient, exp_avg, exp_avg_sq], 0)
        };
        let found = run(&|tensors| adamw(std::slice::from_mut(tensors), &divisor, settings));
        let expected = run(&|tensors| reference::adamw(tensors, &divisor, settings));
        assert!(found.allclose(&expected, 1e-5, 1e-7, false));
    }

    #[test]
    fn squares_are_summed_in_float64() {
        let x = Tensor::from_slice(&deepspec_testkit::noise(5, 70_000));
        let expected = x.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[]);
        let found = square_sum(&x);
        assert_eq!((found.kind(), found.device()), (Kind::Double, Device::Cpu));
        assert!((found.double_value(&[]) - expected).abs() <= 1e-6 * expected);
    }
}
