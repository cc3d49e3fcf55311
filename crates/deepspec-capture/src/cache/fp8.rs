//! Hidden states in eight bits: e4m3 codes (four exponent bits, three mantissa bits, no infinity)
//! with one scale per state.
//!
//! A scale is the smallest power of two that makes the state's largest magnitude a finite e4m3
//! number. Scaling and decoding to bfloat16 are then exact. The only error is one rounding to
//! nearest, ties to even: at most 1/16 of the value, or scale · 2⁻¹⁰ if that is larger.

use std::sync::LazyLock;

/// The largest finite e4m3 value.
const MAX_E4M3: f32 = 448.0;
/// Code of NaN without its sign bit; every smaller code is finite.
const NAN_CODE: u8 = 0x7F;
/// Bits of the smallest scale. It is the smallest normal float32, so that its inverse is finite.
const MIN_SCALE_BITS: u32 = 1 << 23;
/// Maximum scale. With it, the value 256 would overflow to infinity on decoding, so codes stop at
/// 240.
const MAX_SCALE: f32 = f32::from_bits((127 + 120) << 23);
const MAX_E4M3_AT_MAX_SCALE: f32 = 240.0;
/// Adding this to a number below 2²² rounds it to an integer, ties to even.
const ROUNDING_OFFSET: f32 = 8_388_608.0;

/// The [`decode_table`] of each power of two, indexed by its exponent bits: 128 kB in total, though
/// a cache uses only a few of them.
static DECODE_TABLES: LazyLock<Vec<[u16; 256]>> =
    LazyLock::new(|| (0..256).map(|exponent| decode_table(f32::from_bits(exponent << 23))).collect());

/// Encoded states: one byte per value, and two bytes of scale per state.
pub(crate) struct EncodedStates {
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
}

/// Encodes finite bfloat16 `states` of `d` values each.
pub(crate) fn encode(states: &[u8], d: usize) -> EncodedStates {
    let (values, rest) = states.as_chunks::<2>();
    debug_assert!(rest.is_empty() && values.len().is_multiple_of(d));
    let mut codes = vec![0; values.len()];
    let mut scales = Vec::with_capacity(values.len() / d * 2);
    for (state, codes) in values.chunks_exact(d).zip(codes.chunks_exact_mut(d)) {
        let magnitude = |&pair: &[u8; 2]| u16::from_le_bytes(pair) & 0x7FFF;
        let largest = state.iter().map(magnitude).fold(0, u16::max);
        let scale = scale_for_max(f32::from_bits(u32::from(largest) << 16));
        let (inverse, most) =
            (scale.recip(), if scale >= MAX_SCALE { MAX_E4M3_AT_MAX_SCALE } else { MAX_E4M3 });
        for (code, &pair) in codes.iter_mut().zip(state) {
            let value = f32::from_bits(u32::from(u16::from_le_bytes(pair)) << 16);
            *code = encode_value((value * inverse).clamp(-most, most));
        }
        scales.extend_from_slice(&((scale.to_bits() >> 16) as u16).to_le_bytes());
    }
    EncodedStates { codes, scales }
}

/// Decodes states of `d` values each to bfloat16; `states` has two bytes per code.
pub(crate) fn decode(codes: &[u8], scales: &[u8], d: usize, states: &mut [u8]) {
    debug_assert!(states.len() == codes.len() * 2 && scales.len() / 2 * d == codes.len());
    let (states, _) = states.as_chunks_mut::<2>();
    let rows = codes.chunks_exact(d).zip(scales.as_chunks::<2>().0);
    for ((codes, &scale), state) in rows.zip(states.chunks_exact_mut(d)) {
        let scale = f32::from_bits(u32::from(u16::from_le_bytes(scale)) << 16);
        let own;
        let table = match DECODE_TABLES.get((scale.to_bits() >> 23) as usize) {
            Some(table) if scale.to_bits() << 9 == 0 => table,
            // The encoder never writes such a scale.
            _ => {
                own = decode_table(scale);
                &own
            }
        };
        for (value, &code) in state.iter_mut().zip(codes) {
            *value = table[usize::from(code)].to_le_bytes();
        }
    }
}

/// Returns the scale for a state with this largest magnitude.
fn scale_for_max(largest: f32) -> f32 {
    // 448 is 1.75 · 2⁸: a magnitude with a larger mantissa needs the next power of two.
    let (exponent, mantissa) = (largest.to_bits() >> 23, largest.to_bits() & 0x7F_FFFF);
    let exponent = (exponent + u32::from(mantissa > MAX_E4M3.to_bits() & 0x7F_FFFF)).saturating_sub(8);
    f32::from_bits((exponent << 23).max(MIN_SCALE_BITS))
}

/// Encodes a finite number as the nearest code, ties to even, clamped to ±448.
fn encode_value(value: f32) -> u8 {
    let sign = (value.to_bits() >> 24) as u8 & 0x80;
    let magnitude = value.abs().min(MAX_E4M3);
    let bits = magnitude.to_bits();
    // Normal numbers: keep three mantissa bits, round the rest, and change the exponent bias from
    // 127 to 7.
    let normal = ((bits + 0x7_FFFF + (bits >> 20 & 1)) >> 20).wrapping_sub(120 << 3);
    // Subnormal codes, below 2⁻⁶, are multiples of 2⁻⁹.
    let subnormal = (magnitude * 512.0 + ROUNDING_OFFSET).to_bits() & 0xF;
    let code = if magnitude < 0.015_625 { subnormal } else { normal };
    sign | code as u8
}

/// Decodes a code without its scale. No intermediate value is subnormal, because CPUs are slow on
/// those.
fn decode_value(code: u8) -> f32 {
    let magnitude = u32::from(code & NAN_CODE);
    let value = match magnitude {
        0..8 => magnitude as f32 / 512.0,
        8..0x7F => f32::from_bits((magnitude << 20) + (120 << 23)),
        _ => f32::NAN,
    };
    f32::from_bits(value.to_bits() | u32::from(code & 0x80) << 24)
}

/// The bfloat16 bits of all 256 codes with this scale.
fn decode_table(scale: f32) -> [u16; 256] {
    std::array::from_fn(|code| ((decode_value(code as u8) * scale).to_bits() >> 16) as u16)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The value of a code by the definition of e4m3.
    fn meaning(code: u8) -> f64 {
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        match (exponent, code & 7) {
            (15, 7) => f64::NAN,
            (0, _) => sign * mantissa / 8.0 * 2.0_f64.powi(-6),
            _ => sign * (1.0 + mantissa / 8.0) * 2.0_f64.powi(exponent - 7),
        }
    }

    fn bf16(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes()).collect()
    }

    fn numbers(states: &[u8]) -> Vec<f64> {
        crate::cache::values::read_bf16(states).map(f64::from).collect()
    }

    #[test]
    fn every_code_means_what_e4m3_says_under_every_scale() {
        let powers = [10, 100, 120, 127, 128, 200, 246].map(|exponent| f32::from_bits(exponent << 23));
        for scale in powers.into_iter().chain([1.5, -2.0]) {
            for code in 0..=u8::MAX {
                let mut state = [0; 2];
                decode(&[code], &bf16(&[scale]), 1, &mut state);
                let (found, expected) = (numbers(&state)[0], meaning(code) * f64::from(scale));
                assert!(found == expected || (found.is_nan() && expected.is_nan()), "{code:02x} · {scale}");
            }
        }
    }

    #[test]
    fn every_finite_code_is_a_fixed_point_and_every_midpoint_goes_to_the_even_one() {
        for code in (0..NAN_CODE).flat_map(|code| [code, code | 0x80]) {
            assert_eq!(encode_value(meaning(code) as f32), code, "{code:02x}");
        }
        for code in 0..NAN_CODE - 1 {
            let (low, high) = (meaning(code), meaning(code + 1));
            let middle = ((low + high) / 2.0) as f32;
            assert_eq!(encode_value(middle), code + (code & 1), "between {low} and {high}");
            assert_eq!(encode_value(-middle), 0x80 | (code + (code & 1)));
            assert_eq!(encode_value(f32::from_bits(middle.to_bits() - 1)), code);
            assert_eq!(encode_value(f32::from_bits(middle.to_bits() + 1)), code + 1);
        }
        for large in [449.0, 1e30, f32::MAX] {
            assert_eq!((encode_value(large), encode_value(-large)), (0x7E, 0xFE));
        }
    }

    #[test]
    fn zero_tiny_and_huge_states_keep_their_bounds() {
        for values in [
            [0.0, -0.0],
            [f32::from_bits(1 << 16), 0.0],
            [3.3e38, -1.0],
            [f32::from_bits(0x7F7F_0000), 3e38],
            [1e-38, -1e-40],
        ] {
            check(&values);
        }
        let EncodedStates { codes, scales } = encode(&bf16(&[0.0; 4]), 4);
        assert_eq!((codes, scales.len()), (vec![0; 4], 2));
    }

    /// Checks the error bound of the module documentation on one state.
    fn check(values: &[f32]) {
        let states = bf16(values);
        let EncodedStates { codes, scales } = encode(&states, values.len());
        let scale = numbers(&scales)[0];
        let mut decoded = vec![0; states.len()];
        decode(&codes, &scales, values.len(), &mut decoded);
        assert_eq!(crate::cache::values::first_non_finite(&decoded), None);
        // bfloat16 truncates products below its smallest step.
        let step = 2.0_f64.powi(-133);
        for (value, found) in numbers(&states).into_iter().zip(numbers(&decoded)) {
            let bound = (value.abs() / 16.0).max(scale / 1024.0) + step;
            assert!((value - found).abs() <= bound, "{value} became {found} under {scale}");
        }
    }

    proptest! {
        #[test]
        fn errors_stay_within_half_a_step(bits in prop::collection::vec(any::<u16>(), 1..200)) {
            let finite = |bits: &u16| f32::from_bits(u32::from(*bits) << 16).is_finite();
            let values: Vec<f32> =
                bits.iter().filter(|bits| finite(bits)).map(|bits| f32::from_bits(u32::from(*bits) << 16)).collect();
            prop_assume!(!values.is_empty());
            check(&values);
        }

        #[test]
        fn ordinary_states_lose_at_most_a_sixteenth(values in prop::collection::vec(-30.0_f32..30.0, 64)) {
            check(&values);
        }
    }
}
