//! Gradients of parameters.

use std::ffi::c_void;

use tch::Tensor;

use super::owned;

unsafe extern "C" {
    fn ds_take_gradient(parameter: *const c_void) -> *mut c_void;
}

/// Takes the gradient of a parameter, which has none afterwards: the next backward pass stores its gradient instead of adding it.
pub fn take_gradient(parameter: &Tensor) -> Option<Tensor> {
    // SAFETY: the shim moves the parameter's own reference to its gradient out, or returns null; it catches every C++ exception.
    unsafe { owned(ds_take_gradient(parameter.as_ptr().cast())) }
}
