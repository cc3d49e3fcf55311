//! Float formats of eight bits.

/// The number of each byte of float8_e4m3fn: sign, four bits of exponent and three of mantissa. There is no infinity.
pub(crate) static E4M3: [f32; 256] = e4m3();

const fn e4m3() -> [f32; 256] {
    const BIAS: u32 = 7;
    // Exponents and mantissas of float32.
    const OWN_BIAS: u32 = 127;
    const OWN_MANTISSA_BITS: u32 = 23;
    let mut values = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (exponent, mantissa) = (byte as u32 >> 3 & 15, byte as u32 & 7);
        let magnitude = match (exponent, mantissa) {
            (15, 7) => f32::NAN,
            (0, _) => mantissa as f32 / 512.0,
            _ => f32::from_bits(
                (exponent + OWN_BIAS - BIAS) << OWN_MANTISSA_BITS | mantissa << (OWN_MANTISSA_BITS - 3),
            ),
        };
        values[byte] = if byte < 128 { magnitude } else { -magnitude };
        byte += 1;
    }
    values
}

/// The number of a byte of float8_e8m0fnu, which is a power of two.
pub(crate) fn e8m0(byte: u8) -> f32 {
    match byte {
        0 => f32::MIN_POSITIVE / 2.0,
        255 => f32::NAN,
        exponent => f32::from_bits(u32::from(exponent) << 23),
    }
}
