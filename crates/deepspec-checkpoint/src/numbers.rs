//! Conversion of values between float types, rounded like torch.

use half::{bf16, f16};
use safetensors::Dtype;

/// Converts `bytes` of type `from` to type `to`, rounded to nearest even. None for types that are
/// no plain floats.
pub fn cast(bytes: Vec<u8>, from: Dtype, to: Dtype) -> Option<Vec<u8>> {
    if from == to {
        return Some(bytes);
    }
    let values = to_float32(&bytes, from)?;
    Some(match to {
        Dtype::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        Dtype::BF16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
        _ => return None,
    })
}

/// Values of type `from` in float32. None for types that are no plain floats of at most 32 bits.
pub fn to_float32(bytes: &[u8], from: Dtype) -> Option<Vec<f32>> {
    let halves = bytes.as_chunks::<2>().0.iter();
    Some(match from {
        Dtype::F32 => bytes.as_chunks::<4>().0.iter().map(|&word| f32::from_le_bytes(word)).collect(),
        Dtype::BF16 => halves.map(|&word| bf16::from_le_bytes(word).to_f32()).collect(),
        Dtype::F16 => halves.map(|&word| f16::from_le_bytes(word).to_f32()).collect(),
        _ => return None,
    })
}

/// Number of rows of `width` bytes in which `a` and `b` differ.
pub fn differing_rows(a: &[u8], b: &[u8], width: usize) -> usize {
    a.chunks(width.max(1)).zip(b.chunks(width.max(1))).filter(|(a, b)| a != b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_to_nearest_even() {
        let bytes = |value: f32| value.to_le_bytes().to_vec();
        // Halfway between 1 and the next bfloat16: the even one is 1.
        assert_eq!(cast(bytes(1.0 + 1.0 / 256.0), Dtype::F32, Dtype::BF16), Some(vec![0x80, 0x3f]));
        assert_eq!(cast(bytes(1.0 + 3.0 / 256.0), Dtype::F32, Dtype::BF16), Some(vec![0x82, 0x3f]));
        let there = cast(bytes(0.375), Dtype::F32, Dtype::F16).unwrap();
        assert_eq!(cast(there, Dtype::F16, Dtype::F32), Some(bytes(0.375)));
        assert_eq!(cast(vec![0], Dtype::U8, Dtype::F32), None);
    }
}
