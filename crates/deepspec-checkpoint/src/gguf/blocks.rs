//! Tensor types of GGUF: plain floats, and quantised blocks of small integers with scales.
//!
//! Dequantisation follows ggml's formulas in float32 and in ggml's order, so that values are equal
//! to the last bit.

use half::f16;

use crate::gguf::TensorType;

/// Maximum number of values in a block.
const MAX_BLOCK_VALUES: usize = 256;

/// Dequantises a block.
type DequantiseBlock = fn(&[u8], &mut [f32]);

/// A tensor type of ggml.
#[derive(Debug)]
pub struct BlockType {
    /// ggml's name.
    pub name: &'static str,
    /// Id in the file format.
    id: u32,
    /// Values per block.
    pub values: usize,
    /// Bytes per block.
    pub bytes: usize,
    /// Dequantises a block; None for plain floats.
    expand: Option<DequantiseBlock>,
}

const fn plain_type(name: &'static str, id: u32, bytes: usize) -> BlockType {
    BlockType { name, id, values: 1, bytes, expand: None }
}

const fn quantised_type(
    name: &'static str,
    id: u32,
    values: usize,
    bytes: usize,
    expand: DequantiseBlock,
) -> BlockType {
    BlockType { name, id, values, bytes, expand: Some(expand) }
}

static BLOCK_TYPES: [BlockType; 15] = [
    plain_type("F32", 0, 4),
    plain_type("F16", 1, 2),
    plain_type("BF16", 30, 2),
    quantised_type("Q4_0", 2, 32, 18, q4_0),
    quantised_type("Q4_1", 3, 32, 20, q4_1),
    quantised_type("Q5_0", 6, 32, 22, q5_0),
    quantised_type("Q5_1", 7, 32, 24, q5_1),
    quantised_type("Q8_0", 8, 32, 34, q8_0),
    quantised_type("Q2_K", 10, 256, 84, q2_k),
    quantised_type("Q3_K", 11, 256, 110, q3_k),
    quantised_type("Q4_K", 12, 256, 144, q4_k),
    quantised_type("Q5_K", 13, 256, 176, q5_k),
    quantised_type("Q6_K", 14, 256, 210, q6_k),
    quantised_type("IQ4_NL", 20, 32, 18, iq4_nl),
    quantised_type("IQ4_XS", 23, 256, 136, iq4_xs),
];

/// Ids of ggml types that are not supported.
const UNSUPPORTED_TYPES: [(u32, &str); 17] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
];

impl BlockType {
    /// ggml's name of an unsupported type; None if the id is unknown.
    pub(crate) fn unsupported_name(id: u32) -> Option<&'static str> {
        UNSUPPORTED_TYPES.iter().find(|(number, _)| *number == id).map(|(_, name)| *name)
    }

    /// All supported types.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        BLOCK_TYPES.iter()
    }

    /// The supported type with this id.
    pub(crate) fn from_id(id: u32) -> Option<&'static Self> {
        Self::all().find(|kind| kind.id == id)
    }

    /// Type of the values after dequantisation: a plain type itself, or float32 for a quantised
    /// type.
    pub fn decoded_type(&self) -> TensorType {
        match self.id {
            1 => TensorType::F16,
            30 => TensorType::Bf16,
            _ => TensorType::F32,
        }
    }

    /// Dequantises whole blocks to little-endian float32; plain values stay as they are.
    pub fn dequantise(&self, stored: Vec<u8>) -> Vec<u8> {
        let Some(expand) = self.expand else { return stored };
        let mut values = [0.0; MAX_BLOCK_VALUES];
        let values = &mut values[..self.values];
        let mut bytes = Vec::with_capacity(stored.len() / self.bytes * self.values * size_of::<f32>());
        for block in stored.chunks_exact(self.bytes) {
            expand(block, values);
            bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
        bytes
    }
}

/// Reads the float16 at byte `place`.
fn read_f16(block: &[u8], place: usize) -> f32 {
    f16::from_le_bytes([block[place], block[place + 1]]).to_f32()
}

/// The two 4-bit numbers of each byte. The lower ones are the first half of the block, the upper
/// ones the second half.
fn nibbles(bytes: &[u8]) -> impl Iterator<Item = (usize, u8)> {
    let (lower, upper) = (bytes.iter().map(|byte| byte & 15), bytes.iter().map(|byte| byte >> 4));
    lower.chain(upper).enumerate()
}

fn q4_0(block: &[u8], values: &mut [f32]) {
    let scale = read_f16(block, 0);
    for (place, number) in nibbles(&block[2..]) {
        values[place] = scale * (f32::from(number) - 8.0);
    }
}

fn q4_1(block: &[u8], values: &mut [f32]) {
    let (scale, least) = (read_f16(block, 0), read_f16(block, 2));
    for (place, number) in nibbles(&block[4..]) {
        values[place] = scale * f32::from(number) + least;
    }
}

/// Reads the fifth bits of a block's 32 values, one bit per value.
fn fifth_bits(block: &[u8], place: usize) -> u32 {
    u32::from_le_bytes([block[place], block[place + 1], block[place + 2], block[place + 3]])
}

fn fifth_bit_value(bits: u32, place: usize) -> u8 {
    if bits >> place & 1 == 1 { 16 } else { 0 }
}

fn q5_0(block: &[u8], values: &mut [f32]) {
    let (scale, bits) = (read_f16(block, 0), fifth_bits(block, 2));
    for (place, number) in nibbles(&block[6..]) {
        values[place] = scale * (f32::from(number | fifth_bit_value(bits, place)) - 16.0);
    }
}

fn q5_1(block: &[u8], values: &mut [f32]) {
    let (scale, least, bits) = (read_f16(block, 0), read_f16(block, 2), fifth_bits(block, 4));
    for (place, number) in nibbles(&block[8..]) {
        values[place] = scale * f32::from(number | fifth_bit_value(bits, place)) + least;
    }
}

fn q8_0(block: &[u8], values: &mut [f32]) {
    let scale = read_f16(block, 0);
    for (value, &number) in values.iter_mut().zip(&block[2..]) {
        *value = scale * f32::from(number.cast_signed());
    }
}

/// The lowest two bits of number `place` of 256. In each half of the block, four runs of 32 numbers share 32 bytes.
fn two_bits(bytes: &[u8], place: usize) -> u8 {
    bytes[place / 128 * 32 + place % 32] >> (place % 128 / 32 * 2) & 3
}

fn q2_k(block: &[u8], values: &mut [f32]) {
    let (scales, numbers) = (&block[..16], &block[16..80]);
    let (scale, least) = (read_f16(block, 80), read_f16(block, 82));
    for (place, value) in values.iter_mut().enumerate() {
        let part = scales[place / 16];
        let (factor, shift) = (scale * f32::from(part & 15), least * f32::from(part >> 4));
        *value = factor * f32::from(two_bits(numbers, place)) - shift;
    }
}

fn q3_k(block: &[u8], values: &mut [f32]) {
    let (upper, numbers, scales, scale) =
        (&block[..32], &block[32..96], &block[96..108], read_f16(block, 108));
    for (place, value) in values.iter_mut().enumerate() {
        // Sixteen scales of six bits: four bits in eight bytes, and two bits in four bytes.
        let part = place / 16;
        let low = scales[part % 8] >> (part / 8 * 4) & 15;
        let high = scales[8 + part % 4] >> (part / 4 * 2) & 3;
        let factor = scale * (f32::from(low | high << 4) - 32.0);
        let shift = if upper[place % 32] >> (place / 32) & 1 == 1 { 0.0 } else { 4.0 };
        *value = factor * (f32::from(two_bits(numbers, place)) - shift);
    }
}

/// Numbers of the types with a table in place of even steps.
const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

fn iq4_nl(block: &[u8], values: &mut [f32]) {
    let scale = read_f16(block, 0);
    for (place, number) in nibbles(&block[2..]) {
        values[place] = scale * f32::from(IQ4_VALUES[usize::from(number)]);
    }
}

fn iq4_xs(block: &[u8], values: &mut [f32]) {
    let (scale, upper) = (read_f16(block, 0), u16::from_le_bytes([block[2], block[3]]));
    for (part, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low = block[4 + part / 2] >> (part % 2 * 4) & 15;
        let high = (upper >> (2 * part) & 3) as u8;
        let factor = scale * (f32::from(low | high << 4) - 32.0);
        for (place, number) in nibbles(&block[8 + 16 * part..][..16]) {
            values[place] = factor * f32::from(IQ4_VALUES[usize::from(number)]);
        }
    }
}

/// The 6-bit scale and minimum of part `part` of eight, which are packed into twelve bytes.
fn scale_and_minimum(packed: &[u8], part: usize) -> (f32, f32) {
    let (scale, least) = match part {
        0..4 => (packed[part] & 63, packed[part + 4] & 63),
        _ => (
            packed[part + 4] & 15 | packed[part - 4] >> 6 << 4,
            packed[part + 4] >> 4 | packed[part] >> 6 << 4,
        ),
    };
    (f32::from(scale), f32::from(least))
}

/// Dequantises eight parts of 32 values, where two parts share 32 bytes. `upper(part, place)` is
/// the fifth bit's contribution to a number.
fn dequantise_k_parts(block: &[u8], numbers: &[u8], values: &mut [f32], upper: impl Fn(usize, usize) -> u8) {
    let (scale, least) = (read_f16(block, 0), read_f16(block, 2));
    for (part, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (factor, shift) = scale_and_minimum(&block[4..16], part);
        let (factor, shift) = (scale * factor, least * shift);
        let bytes = &numbers[part / 2 * 32..];
        for (place, value) in values.iter_mut().enumerate() {
            let number = if part % 2 == 0 { bytes[place] & 15 } else { bytes[place] >> 4 };
            *value = factor * f32::from(number | upper(part, place)) - shift;
        }
    }
}

fn q4_k(block: &[u8], values: &mut [f32]) {
    dequantise_k_parts(block, &block[16..], values, |_, _| 0);
}

fn q5_k(block: &[u8], values: &mut [f32]) {
    dequantise_k_parts(block, &block[48..], values, |part, place| (block[16 + place] >> part & 1) << 4);
}

fn q6_k(block: &[u8], values: &mut [f32]) {
    let (lower, upper, scales, scale) =
        (&block[..128], &block[128..192], &block[192..208], read_f16(block, 208));
    for (place, value) in values.iter_mut().enumerate() {
        // In each half of the block, four runs of 32 values share 64 bytes of lower and 32 bytes of
        // upper bits.
        let (side, run, at) = (place / 128, place % 128 / 32, place % 32);
        let low = lower[side * 64 + run % 2 * 32 + at];
        let low = if run < 2 { low & 15 } else { low >> 4 };
        let high = upper[side * 32 + at] >> (2 * run) & 3;
        let factor = scale * f32::from(scales[place / 16].cast_signed());
        *value = factor * (f32::from(low | high << 4) - 32.0);
    }
}
