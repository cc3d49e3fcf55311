//! Reads stored bfloat16 values.

/// All exponent bits of a bfloat16, which are all set only in NaN and ±∞.
const EXPONENT_MASK: u16 = 0x7F80;

/// Little-endian bfloat16 bytes as bit patterns. An odd last byte is ignored, because the caller
/// checks lengths.
fn bf16_bits(bytes: &[u8]) -> impl Iterator<Item = u16> + '_ {
    bytes.as_chunks::<2>().0.iter().map(|&pair| u16::from_le_bytes(pair))
}

/// The value of a bfloat16 bit pattern.
fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Little-endian bfloat16 bytes as f32 values.
pub(crate) fn read_bf16(bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bf16_bits(bytes).map(bf16_to_f32)
}

/// Index and value of the first NaN or infinity.
pub(crate) fn first_non_finite(bytes: &[u8]) -> Option<(usize, f32)> {
    // The maximum of the magnitudes vectorises. The exact index is searched only if a value is not
    // finite.
    let largest = bf16_bits(bytes).fold(0, |largest, bits| largest.max(bits & 0x7FFF));
    if largest < EXPONENT_MASK {
        return None;
    }
    bf16_bits(bytes)
        .enumerate()
        .find(|(_, bits)| bits & EXPONENT_MASK == EXPONENT_MASK)
        .map(|(index, bits)| (index, bf16_to_f32(bits)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_nan_and_infinity_are_not_finite() {
        for bits in 0..=u16::MAX {
            let mut bytes = [0; 64];
            bytes[20..22].copy_from_slice(&bits.to_le_bytes());
            let found = first_non_finite(&bytes);
            assert_eq!(
                found.map(|(index, _)| index),
                (!bf16_to_f32(bits).is_finite()).then_some(10),
                "{bits:04x}"
            );
        }
    }
}
