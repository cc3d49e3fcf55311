//! Gradients of parameters.

use std::ffi::c_void;

use tch::Tensor;

use super::tensor_from_raw;

unsafe extern "C" {
    fn ds_take_gradient(parameter: *const c_void) -> *mut c_void;
}

/// Moves the gradient out of a parameter. The next backward pass stores its gradient instead of adding it.
pub fn take_gradient(parameter: &Tensor) -> Option<Tensor> {
    // SAFETY: the shim moves the parameter's reference to its gradient out, or returns null. It catches every C++
    // exception.
    unsafe { tensor_from_raw(ds_take_gradient(parameter.as_ptr().cast())) }
}
