//! Products of large float32 matrices on the CPU.

use std::ffi::c_void;

use tch::{Device, Kind, Tensor};

unsafe extern "C" {
    fn ds_onednn_product(out: *const c_void, a: *const c_void, b: *const c_void, add: bool) -> bool;
}

/// Whether MKL, which libtorch asks for float32 products, leaves half of this processor's vectors unused: AMD's with AVX-512. SSE4a is AMD's alone.
#[cfg(target_arch = "x86_64")]
fn mkl_is_slow() -> bool {
    std::arch::is_x86_feature_detected!("sse4a") && std::arch::is_x86_feature_detected!("avx512f")
}

#[cfg(not(target_arch = "x86_64"))]
fn mkl_is_slow() -> bool {
    false
}

/// `a [M, K] · b [K, N]` into `out [M, N]`, or, with `add`, added to what is there, which may be of a wider kind. Without a graph.
///
/// On AMD's processors with AVX-512 float32 is multiplied by oneDNN: 240 operations per nanosecond on one core of a Zen 5, where MKL made 115
/// (no other was tried). It prepares every shape anew, for milliseconds and megabytes: for large products of few shapes.
///
/// # Panics
/// If the shapes do not fit.
pub fn product(out: &mut Tensor, a: &Tensor, b: &Tensor, add: bool) {
    let (m, k, n) = (a.size()[0], a.size()[1], b.size()[1]);
    assert!(
        b.size()[0] == k && out.size() == [m, n],
        "[{m}, {k}] times {:?} into {:?}",
        b.size(),
        out.size()
    );
    let wide = [&*out, a, b].iter().all(|of| of.kind() == Kind::Float && of.device() == Device::Cpu);
    let onednn = || {
        // SAFETY: the shim uses the three tensors during the call only, whose shapes and kinds were checked, and catches every C++ exception.
        unsafe { ds_onednn_product(out.as_ptr().cast(), a.as_ptr().cast(), b.as_ptr().cast(), add) }
    };
    if wide && mkl_is_slow() && onednn() {
        return;
    }
    let _ = match add {
        false => a.mm_out(out, b),
        true if out.kind() == a.kind() => out.addmm_(a, b),
        // What is added up may be of a wider kind.
        true => out.g_add_(&a.mm(b)),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_float32s_and_are_added_where_they_should_be() {
        let options = (Kind::Float, Device::Cpu);
        let [x, w] = [[200, 700], [96, 700]].map(|size| Tensor::rand(size, options));
        let exact = x.to_kind(Kind::Double).mm(&w.tr().to_kind(Kind::Double));
        let off =
            |found: &Tensor, times: f64| ((found / times - &exact) / &exact).abs().max().double_value(&[]);
        // Operands of 8 bits would be off by 1e-4; sums of 700 in float32 are by 4e-7 to 9e-7, as they are added up.
        let mut out = Tensor::full([200, 96], f64::NAN, options);
        if mkl_is_slow() {
            // SAFETY: three tensors of fitting shapes.
            let taken = unsafe {
                ds_onednn_product(out.as_ptr().cast(), x.as_ptr().cast(), w.tr().as_ptr().cast(), false)
            };
            assert!(taken, "libtorch has lost its way to oneDNN");
            assert!(off(&out, 1.0) < 2e-6, "{:e}", off(&out, 1.0));
        }
        product(&mut out, &x, &w.tr(), false);
        assert!(off(&out, 1.0) < 2e-6, "{:e}", off(&out, 1.0));
        product(&mut out, &x, &w.tr(), true);
        assert!(off(&out, 2.0) < 2e-6, "{:e}", off(&out, 2.0));
        // Into rows of something larger, from the other side.
        let mut larger = Tensor::zeros([300, 96], options);
        product(&mut larger.narrow(0, 50, 200), &x, &w.tr(), false);
        assert!(off(&larger.narrow(0, 50, 200), 1.0) < 2e-6);
        product(&mut larger, &Tensor::ones([300, 8], options), &Tensor::zeros([8, 96], options), false);
        assert_eq!(larger.abs().max().double_value(&[]), 0.0);
    }
}
