//! Computes distributions over the vocabulary and samples tokens from them.

mod reference;

use tch::{Device, Kind, Tensor};

use crate::ffi;

/// The index of the largest value of each row, the first of several: `[..]` int64 of `x [.., V]`.
pub fn argmax(x: &Tensor) -> Tensor {
    ffi::argmax(x).unwrap_or_else(|| x.argmax(-1, false))
}

/// softmax(logits / temperature): float32 `[n, V]` of `logits [n, V]` and `temperatures [n, 1]` float32. With kernels on the
/// CPU, a row's bits do not depend on the other rows.
pub fn temperature_softmax(logits: &Tensor, temperatures: &Tensor) -> Tensor {
    let mut logits = logits.to_kind(Kind::Float);
    if logits.device() == Device::Cpu {
        // The kernel takes contiguous rows only.
        logits = logits.contiguous();
    }
    ffi::temperature_softmax(&logits, temperatures)
        .unwrap_or_else(|| reference::temperature_softmax(&logits, temperatures))
}

/// Draws a token from each row by inverting the cumulative distribution: the first index whose cumulative weight exceeds
/// uniform · total. `weights [n, V]` need not be normalised, `uniforms [n]` are float64 in [0, 1): `[n]` int64.
pub fn sample(weights: &Tensor, uniforms: &Tensor) -> Tensor {
    // The kernel reads rows without gaps.
    let weights = &weights.contiguous();
    ffi::draw(weights, uniforms).unwrap_or_else(|| reference::sample(weights, uniforms))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_compute_what_the_reference_computes() {
        let values = |seed: u64, shape: [i64; 2]| {
            Tensor::from_slice(&deepspec_testkit::noise(seed, (shape[0] * shape[1]) as usize)).view(shape)
        };
        let (logits, temperatures) = (values(1, [7, 300]) * 9.0, values(2, [7, 1]).abs() + 0.1);
        let found = temperature_softmax(&logits, &temperatures);
        assert!(found.allclose(&reference::temperature_softmax(&logits, &temperatures), 1e-5, 1e-7, false));
        let uniforms = Tensor::from_slice(&[0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999_999]);
        assert_eq!(sample(&found, &uniforms), reference::sample(&found, &uniforms));
        assert_eq!(argmax(&logits), logits.argmax(-1, false));
    }

    #[test]
    fn rows_of_a_narrowed_view_are_drawn_from_their_own_weights() {
        // The second row's weight lies beyond the first row's gap.
        let wide = Tensor::from_slice(&[0.0_f32, 1.0, 9.0, 9.0, 1.0, 0.0, 9.0, 9.0]).view([2, 4]);
        let uniforms = Tensor::from_slice(&[0.5_f64, 0.5]);
        let drawn = sample(&wide.narrow(1, 0, 2), &uniforms);
        assert_eq!(Vec::<i64>::try_from(drawn).unwrap(), [1, 0]);
    }
}
