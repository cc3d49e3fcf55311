//! Products of float32 matrices on the CPU that something learns of, where libtorch's own are slow.

use std::ffi::c_void;

use tch::{Kind, Tensor};

use super::rows::owned;

unsafe extern "C" {
    fn ds_multiplies() -> bool;
    fn ds_multiply(a: *const c_void, b: *const c_void, out: *const c_void, add: bool) -> bool;
    fn ds_projection(x: *const c_void, weight: *const c_void) -> *mut c_void;
}

/// `a b` of `a [m, k]` and `b [k, n]`, whichever way they lie, in place of `out [m, n]`, or added to it: on one device, of one kind, but that sums may be
/// float32, and without a graph. `out` shares no memory with them.
///
/// # Panics
/// As libtorch's own product, where they do not fit together.
pub fn multiply(a: &Tensor, b: &Tensor, out: &mut Tensor, add: bool) {
    // SAFETY: it only asks the processor.
    let here = unsafe { ds_multiplies() };
    if here && multiply_here(a, b, out, add) {
        return;
    }
    let _ = match add {
        true if a.kind() == out.kind() && a.kind() == Kind::Float => out.addmm_(a, b),
        true => out.g_add_(&a.mm(b)),
        false => a.mm_out(out, b),
    };
}

/// The same by the shim; false where it takes other tensors, or none on this processor.
fn multiply_here(a: &Tensor, b: &Tensor, out: &mut Tensor, add: bool) -> bool {
    // SAFETY: the shim reads a and b and writes to `out`, during the call only; it checks kinds, sizes and strides, and catches every C++ exception.
    unsafe { ds_multiply(a.as_ptr().cast(), b.as_ptr().cast(), out.as_ptr().cast(), add) }
}

/// `x Wᵀ` over the last dimension of `x [.., input]`, for gradients; `weight [output, input]`.
///
/// None where libtorch's own product is to be taken: on other devices, of other kinds or layouts, where nothing learns, and where the processor has
/// AVX-512 or no AVX2. Gradients cannot be differentiated once more.
pub fn projection(x: &Tensor, weight: &Tensor) -> Option<Tensor> {
    // SAFETY: the shim reads both tensors, and holds what a backward reads by libtorch's own count of references, as libtorch's operators do. It catches
    // every C++ exception, and returns null or a tensor of its own.
    unsafe { owned(ds_projection(x.as_ptr().cast(), weight.as_ptr().cast())) }
}
