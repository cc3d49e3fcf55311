//! Matmuls with packed weights: float32, on the CPU, without gradients.

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::LazyLock;

use tch::{Device, Kind, Tensor};

use super::super::args::RmsNormParams;
use super::super::c10d::check;

/// The processor's instruction level, as the shim numbers it; 0 if the shim has no kernels for it.
static INSTRUCTION_LEVEL: LazyLock<i32> = LazyLock::new(|| {
    // SAFETY: the shim only queries the processor.
    unsafe { ds_product_level() }
});

/// The shim's `PackedPart`.
#[repr(C)]
struct RawPart {
    panels: *const c_void,
    outputs: i64,
}

unsafe extern "C" {
    fn ds_product_level() -> i32;
    fn ds_panel(level: i32) -> i64;
    fn ds_product(
        x: *const c_void,
        gain: *const c_void,
        eps: f64,
        parts: *const RawPart,
        count: usize,
        gate: *const c_void,
        residual: *const c_void,
        level: i32,
        out: *mut *mut c_void,
    ) -> *mut c_char;
}

/// A weight `[output, input]`, packed so that matmuls of few rows read it in memory order. On a Zen 4, products of 8
/// rows took a seventh to two thirds of libtorch's time. Products of many rows took about the same time.
///
/// Each value is one sum over the inputs in order, so a row's bits do not depend on other rows.
#[derive(Debug)]
pub struct PackedWeight {
    panels: Tensor, // [⌈output / panel⌉, input, panel], zeros after the last output
    outputs: i64,
    /// The instruction level of the panels.
    level: i32,
}

impl PackedWeight {
    /// Packs a copy of `weight [output, input]`. None unless it is float32 on the CPU without a gradient, and without
    /// AVX2.
    pub fn new(weight: &Tensor) -> Option<Self> {
        can_be_packed(weight).then(|| Self::for_level(*INSTRUCTION_LEVEL, weight)).flatten()
    }

    /// [`new`](Self::new) for an instruction level that the processor supports.
    fn for_level(level: i32, weight: &Tensor) -> Option<Self> {
        let &[outputs, width] = weight.size().as_slice() else { return None };
        // SAFETY: the function only returns a number.
        let panel = unsafe { ds_panel(level) };
        let (whole, rest) = (outputs / panel, outputs % panel);
        let panels = Tensor::empty([whole + i64::from(rest > 0), width, panel], (Kind::Float, Device::Cpu));
        let laid_out = weight.narrow(0, 0, whole * panel).view([whole, panel, width]);
        panels.narrow(0, 0, whole).copy_(&laid_out.transpose(1, 2));
        if rest > 0 {
            let mut last = panels.get(whole);
            let _ = last.zero_();
            last.narrow(1, 0, rest).copy_(&weight.narrow(0, whole * panel, rest).tr());
        }
        Some(Self { panels, outputs, level })
    }

    /// Bytes of the packed copy of `weight`; 0 if it cannot be packed.
    pub fn bytes(weight: &Tensor) -> u64 {
        let &[outputs, width] = weight.size().as_slice() else { return 0 };
        if !can_be_packed(weight) {
            return 0;
        }
        // SAFETY: the function only returns a number.
        let panel = unsafe { ds_panel(*INSTRUCTION_LEVEL) };
        ((outputs + panel - 1) / panel * panel * width) as u64 * size_of::<f32>() as u64
    }

    /// A second handle on this weight, not a copy.
    pub fn share(&self) -> Self {
        Self { panels: self.panels.shallow_clone(), ..*self }
    }

    /// The original weight, as a copy or as a view.
    pub fn unpacked(&self) -> Tensor {
        let width = self.panels.size()[1];
        self.panels.transpose(1, 2).reshape([-1, width]).narrow(0, 0, self.outputs)
    }

    /// `[output, input]`.
    pub fn size(&self) -> [i64; 2] {
        [self.outputs, self.panels.size()[1]]
    }

    /// `x Wᵀ` over the last dimension of `x [.., input]`: `[.., output]`.
    ///
    /// # Panics
    /// As `packed_product`.
    pub fn product(&self, x: &Tensor) -> Tensor {
        packed_product(x, None, &[self], None)
    }
}

/// `norm(x) [W₁; W₂; …]ᵀ + residual` over the last dimension of `x [.., input]`. The outputs of the weights are
/// concatenated. Bits equal those of a separate norm, matmuls and an addition. Autograd records nothing.
///
/// # Panics
/// If a tensor is not float32 on the CPU or has another width, or if x or the residual requires a gradient. If norm
/// or residual is not contiguous. If there is no weight, or weights have different instruction levels. If the result
/// cannot be allocated.
pub fn packed_product(
    x: &Tensor,
    gain: Option<RmsNormParams<'_>>,
    weights: &[&PackedWeight],
    residual: Option<&Tensor>,
) -> Tensor {
    run_packed_product(x, gain, weights, None, residual)
}

/// `silu(norm(x) Gᵀ) ⊙ (norm(x) Wᵀ)`, without a tensor for either factor.
///
/// # Panics
/// As `packed_product`, and if G has another size.
pub fn packed_gated_product(
    x: &Tensor,
    gain: Option<RmsNormParams<'_>>,
    gate: &PackedWeight,
    up: &PackedWeight,
) -> Tensor {
    assert_eq!((gate.size(), gate.level), (up.size(), up.level), "a gate of another weight");
    run_packed_product(x, gain, &[up], Some(gate), None)
}

/// Calls the kernel for [`packed_product`] and [`packed_gated_product`].
fn run_packed_product(
    x: &Tensor,
    gain: Option<RmsNormParams<'_>>,
    weights: &[&PackedWeight],
    gate: Option<&PackedWeight>,
    residual: Option<&Tensor>,
) -> Tensor {
    let is_plain = |of: &Tensor| of.device() == Device::Cpu && of.kind() == Kind::Float;
    let (size, outputs) = (x.size(), weights.iter().map(|weight| weight.outputs).sum::<i64>());
    let (width, level) = (
        size.last().copied().unwrap_or(0),
        weights.first().map_or(*INSTRUCTION_LEVEL, |weight| weight.level),
    );
    assert!(!weights.is_empty(), "a product with no weight");
    for weight in weights {
        let [_, inputs] = weight.size();
        let fits = is_plain(x) && inputs == width && weight.level == level;
        assert!(fits, "{:?} {size:?} on {:?} and a packed weight of {inputs} inputs", x.kind(), x.device());
    }
    let lies = |of: &Tensor, values: i64| is_plain(of) && of.is_contiguous() && of.numel() as i64 == values;
    assert!(
        !x.requires_grad() && residual.is_none_or(|of| !of.requires_grad()),
        "a packed weight gives no gradient"
    );
    let rows = x.numel() as i64 / width.max(1);
    assert!(gain.is_none_or(|gain| lies(gain.weights, width)), "a norm of {width} values");
    assert!(
        residual.is_none_or(|residual| lies(residual, rows * outputs)),
        "a residual of {rows} rows of {outputs}"
    );
    let part =
        |weight: &&PackedWeight| RawPart { panels: weight.panels.as_ptr().cast(), outputs: weight.outputs };
    let parts: Vec<RawPart> = weights.iter().map(part).collect();
    let pointer = |of: Option<&Tensor>| of.map_or(ptr::null(), |of| of.as_ptr().cast());
    let (norm, eps) = (pointer(gain.map(|gain| gain.weights)), gain.map_or(0.0, |gain| gain.eps));
    let (gate, residual) = (pointer(gate.map(|gate| &gate.panels)), pointer(residual));
    let (x, count, mut out) = (x.as_ptr().cast(), parts.len(), ptr::null_mut());
    // SAFETY: the shim reads the tensors during the call only. The checks here and in `new` ensure that x has rows of
    // `width` float32 values, and that panels, norm and residual fit and are contiguous. The processor supports the
    // level of the panels. The shim catches every C++ exception, and sets `out` if it returns null.
    let problem = unsafe { ds_product(x, norm, eps, parts.as_ptr(), count, gate, residual, level, &mut out) };
    if let Err(problem) = check(problem) {
        panic!("a product with a packed weight: {problem}");
    }
    // SAFETY: without an error, `out` is a tensor from `new` that nobody else owns; tch frees it by `delete`.
    unsafe { Tensor::from_ptr(out.cast()) }
}

fn can_be_packed(weight: &Tensor) -> bool {
    *INSTRUCTION_LEVEL > 0
        && weight.device() == Device::Cpu
        && weight.kind() == Kind::Float
        && weight.numel() > 0
        && !weight.requires_grad()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(shape: &[i64]) -> Tensor {
        let count = shape.iter().product::<i64>();
        (Tensor::arange(count, (Kind::Float, Device::Cpu)) * 0.7).sin().view(shape)
    }

    #[test]
    fn rows_are_multiplied_whatever_their_number() {
        assert!(*INSTRUCTION_LEVEL > 0, "this processor has no AVX2");
        // Whole and partial panels, short and long sums.
        for [outputs, width] in [[192, 288], [96, 1024], [32, 1], [33, 7], [1, 600], [21, 48], [8, 5]] {
            let (x, weight) = (values(&[300, width]), values(&[outputs, width]));
            let all = PackedWeight::new(&weight).unwrap().product(&x);
            let [exact, double] = [&x, &weight].map(|tensor| tensor.to_kind(Kind::Double));
            let exact = exact.linear(&double, None::<&Tensor>);
            assert!(all.to_kind(Kind::Double).allclose(&exact, 1e-5, 1e-5, false), "{outputs} of {width}");
            for level in 1..=*INSTRUCTION_LEVEL {
                let packed = PackedWeight::for_level(level, &weight).unwrap();
                assert_eq!(packed.size(), [outputs, width]);
                assert!(packed.unpacked().equal(&weight));
                // Other instruction levels give the same sums.
                for rows in (0..40).chain([127, 128, 129, 257]) {
                    let some = packed.product(&x.narrow(0, 300 - rows, rows));
                    let equal = some.equal(&all.narrow(0, 300 - rows, rows));
                    assert!(equal, "{rows} rows, {outputs} of {width}, level {level}");
                }
            }
        }
    }

    #[test]
    fn gated_products_are_those_of_gate_and_product() {
        for [rows, outputs, width] in [[1, 512, 192], [200, 40, 300], [17, 7, 5]] {
            let [x, gate, up] = [(rows, 0.1), (outputs, 0.2), (outputs, 0.3)]
                .map(|(lines, shift)| (values(&[lines, width]) + shift) * 0.5);
            for level in 1..=*INSTRUCTION_LEVEL {
                let [gate, up] = [&gate, &up].map(|weight| PackedWeight::for_level(level, weight).unwrap());
                let expected = gate.product(&x).silu() * up.product(&x);
                assert!(packed_gated_product(&x, None, &gate, &up).allclose(&expected, 1e-6, 1e-6, false));
            }
        }
    }

    #[test]
    fn norms_sums_and_weights_side_by_side_change_no_bit() {
        let before = tch::get_num_threads();
        for ([rows, width], outputs) in
            [([1, 192], [288, 96, 96]), ([131, 300], [40, 7, 25]), ([17, 5], [1, 24, 2])]
        {
            let (x, gain) = (values(&[rows, width]), values(&[width]) * 0.3 + 1.0);
            let gain = RmsNormParams { weights: &gain, eps: 1e-5 };
            let normed = super::super::rms_norm(&x, gain.weights, gain.eps).unwrap();
            for level in 1..=*INSTRUCTION_LEVEL {
                let packed = outputs
                    .map(|lines| PackedWeight::for_level(level, &(values(&[lines, width]) + 0.1)).unwrap());
                let [first, second, third] = &packed;
                let split_rows = Tensor::cat(&packed.each_ref().map(|weight| weight.product(&normed)), 1);
                let residual = values(&[rows, outputs.iter().sum()]) * 3.0;
                for threads in [1, 3] {
                    tch::set_num_threads(threads);
                    let weights = [first, second, third];
                    assert!(packed_product(&x, Some(gain), &weights, None).equal(&split_rows));
                    let added = packed_product(&x, Some(gain), &weights, Some(&residual));
                    assert!(
                        added.equal(&(&split_rows + &residual)),
                        "{rows} rows, {threads} threads, level {level}"
                    );
                    let gated = packed_gated_product(&x, Some(gain), first, first);
                    assert!(gated.equal(&packed_gated_product(&normed, None, first, first)));
                }
            }
        }
        tch::set_num_threads(before);
    }

    #[test]
    #[should_panic(expected = "a residual of 2 rows of 40")]
    fn residuals_of_another_size_are_refused() {
        let (x, weight) = (values(&[2, 16]), PackedWeight::new(&values(&[40, 16])).unwrap());
        let _ = packed_product(&x, None, &[&weight], Some(&values(&[1, 40])));
    }

    #[test]
    #[should_panic(expected = "a norm of 16 values")]
    fn norms_of_another_width_are_refused() {
        let (x, weight) = (values(&[2, 16]), PackedWeight::new(&values(&[40, 16])).unwrap());
        let _ =
            packed_product(&x, Some(RmsNormParams { weights: &values(&[8]), eps: 1e-6 }), &[&weight], None);
    }

    #[test]
    fn threads_change_nothing() {
        let (x, weight) = (values(&[200, 512]), values(&[1000, 512]));
        let packed = PackedWeight::new(&weight).unwrap();
        let before = tch::get_num_threads();
        let [one, three] = [1, 3].map(|threads| {
            tch::set_num_threads(threads);
            packed.product(&x)
        });
        tch::set_num_threads(before);
        assert!(one.equal(&three));
    }

    #[test]
    fn rows_may_have_any_shape_and_layout() {
        let (x, weight) = (values(&[16, 5, 3]), values(&[40, 16]));
        let packed = PackedWeight::new(&weight).unwrap();
        let x = x.permute([2, 1, 0]);
        let found = packed.share().product(&x);
        assert_eq!(found.size(), [3, 5, 40]);
        assert!(found.allclose(&x.linear(&weight, None::<&Tensor>), 1e-5, 1e-5, false));
    }

    #[test]
    fn what_learns_or_is_of_another_kind_is_not_packed() {
        let weight = values(&[40, 16]);
        let packed = PackedWeight::new(&weight).expect("this processor has no AVX2");
        assert_eq!(PackedWeight::bytes(&weight), (packed.panels.numel() * size_of::<f32>()) as u64);
        for other in [weight.to_kind(Kind::BFloat16), weight.copy().set_requires_grad(true)] {
            assert!(PackedWeight::new(&other).is_none());
            assert_eq!(PackedWeight::bytes(&other), 0);
        }
    }

    #[test]
    #[should_panic(expected = "a packed weight of 16 inputs")]
    fn rows_of_another_width_are_refused() {
        let _ = PackedWeight::new(&values(&[40, 16])).unwrap().product(&values(&[2, 17]));
    }
}
