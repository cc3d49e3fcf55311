//! libtorch's fused AdamW, which tch does not offer.

use std::ffi::{c_char, c_void};

use tch::Tensor;

use super::c10d::check;

/// One tensor's update: float32 and contiguous, of one shape and device.
pub struct AdamWTensors<'a> {
    /// What is learned.
    pub weights: &'a mut Tensor,
    /// Its gradient, which is divided in place.
    pub gradient: &'a mut Tensor,
    /// First moment.
    pub exp_avg: &'a mut Tensor,
    /// Second moment.
    pub exp_avg_sq: &'a mut Tensor,
}

/// The numbers of a step.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWSettings {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Number of this step, from 1.
    pub step: f64,
}

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
}

/// Divides the gradients by `divisor`, a float32 scalar of their device, and takes one step of AdamW (Loshchilov & Hutter 2019).
///
/// # Panics
/// With libtorch's words, if a tensor is not as [`AdamWTensors`] says.
pub fn adamw(tensors: &mut [AdamWTensors<'_>], divisor: &Tensor, settings: AdamWSettings) {
    if tensors.is_empty() {
        return; // libtorch refuses empty lists
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
    // SAFETY: the shim takes counted references during the call only; all tensors stay mutably borrowed until it has returned,
    // and it catches every C++ exception. Both lists are as long as `count` says.
    let outcome = check(unsafe { ds_adamw(raw.as_ptr(), raw.len(), divisor.as_ptr().cast(), &settings) });
    if let Err(problem) = outcome {
        panic!("AdamW: {problem}");
    }
}
