//! Quantises matrices in blocks whose scales are powers of two (e8m0), as DeepSeek-V4 stores its drafter.
//!
//! Values that were quantised in this way before stay equal: another power of two as scale changes the exponents of their numbers only.

use rayon::prelude::*;
use safetensors::Dtype;

use crate::quantised::float8::{E4M3, e8m0};
use crate::quantised::{deepseek_v4, mxfp4};

/// Minimum number of values that a thread quantises.
const VALUES_PER_TASK: usize = 4096;
/// The byte of the scale 1.
const ONE: u8 = 127;

/// A format of numbers in blocks. Each value is a number times the scale of its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockFormat {
    /// float8 (e4m3) in blocks of 128 rows and columns.
    Float8,
    /// float4 (e2m1) in blocks of 32 columns of a row, two numbers to a byte (MXFP4).
    Float4,
}

impl BlockFormat {
    /// Dtype of the stored numbers. DeepSeek stores pairs of float4 as int8.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::Float8 => Dtype::F8_E4M3,
            Self::Float4 => Dtype::I8,
        }
    }

    /// Rows and columns of a block. Blocks of float8 may be smaller at the ends.
    pub fn block(self) -> [usize; 2] {
        match self {
            Self::Float8 => deepseek_v4::BLOCK,
            Self::Float4 => [1, mxfp4::BLOCK],
        }
    }

    /// Numbers in a byte.
    pub fn numbers_per_byte(self) -> usize {
        match self {
            Self::Float8 => 1,
            Self::Float4 => 2,
        }
    }

    /// The numbers from 0, ascending, by their codes.
    fn magnitudes(self) -> &'static [f32] {
        match self {
            Self::Float8 => &E4M3[..127],
            Self::Float4 => &mxfp4::E2M1[..8],
        }
    }

    /// The scales of finite values in rows of `columns`, a byte per block, row-major.
    pub fn scales(self, values: &[f32], columns: usize) -> Vec<u8> {
        let ([rows, width], magnitudes) = (self.block(), self.magnitudes());
        let limit = magnitudes[magnitudes.len() - 1];
        let of_block = |band: &[f32], first: usize| {
            let parts = band.chunks(columns).map(|row| &row[first..columns.min(first + width)]);
            scale_byte(parts.flatten().fold(0.0, |largest, value| value.abs().max(largest)), limit)
        };
        let bands = values.par_chunks(rows * columns);
        bands
            .flat_map_iter(|band| (0..columns).step_by(width).map(move |first| of_block(band, first)))
            .collect()
    }

    /// The bytes of the numbers of finite values in rows of `columns`.
    pub fn numbers(self, values: &[f32], columns: usize) -> Vec<u8> {
        let ([rows, width], scales) = (self.block(), self.scales(values, columns));
        let blocks = columns.div_ceil(width);
        let code = |(place, value): (usize, &f32)| {
            let (row, column) = (place / columns, place % columns);
            self.code(value / e8m0(scales[row / rows * blocks + column / width]))
        };
        let codes = values.par_iter().enumerate().with_min_len(VALUES_PER_TASK).map(code);
        let codes: Vec<u8> = codes.collect();
        match self {
            Self::Float8 => codes,
            Self::Float4 => codes.as_chunks::<2>().0.iter().map(|[low, high]| low | high << 4).collect(),
        }
    }

    /// The code of the number nearest to `value`, of two numbers the one whose last bit is 0.
    fn code(self, value: f32) -> u8 {
        let (magnitudes, magnitude) = (self.magnitudes(), value.abs());
        let sign = if value.is_sign_negative() { magnitudes.len().next_power_of_two() } else { 0 };
        let above = magnitudes.partition_point(|&number| number < magnitude).min(magnitudes.len() - 1);
        let below = above.saturating_sub(1);
        let (down, up) = (magnitude - magnitudes[below], magnitudes[above] - magnitude);
        let is_below = down < up || down == up && below % 2 == 0;
        (sign | if is_below { below } else { above }) as u8
    }
}

/// The byte of the smallest power of two s with `largest ≤ limit · s`, for the largest magnitude of a block. Blocks of zeros have 1. No
/// scale is subnormal in float32.
fn scale_byte(largest: f32, limit: f32) -> u8 {
    if largest == 0.0 {
        return ONE;
    }
    let parts = |value: f32| ((value.to_bits() >> 23) as i32, value.to_bits() & 0x7f_ffff);
    let ((exponent, mantissa), (limit_exponent, limit_mantissa)) = (parts(largest), parts(limit));
    let power = exponent - limit_exponent + i32::from(mantissa > limit_mantissa);
    (power + i32::from(ONE)).clamp(1, 254) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use BlockFormat::{Float4, Float8};

    #[test]
    fn numbers_are_rounded_to_the_nearest_even_one() {
        let code = |format: BlockFormat, value: f32| format.code(value);
        for (value, number) in
            [(0.25, 0), (0.26, 1), (0.75, 2), (1.75, 4), (2.5, 4), (5.0, 6), (5.1, 7), (6.0, 7)]
        {
            assert_eq!((code(Float4, value), code(Float4, -value)), (number, number + 8), "{value}");
        }
        assert_eq!((code(Float4, 7.0), code(Float4, -0.0)), (7, 8));
        // The steps are 2⁻⁹ around 0, 1/8 from 1 on, and 32 up to the largest number.
        let half = 2.0_f32.powi(-10);
        for (value, number) in
            [(half, 0), (half * 1.1, 1), (half * 3.0, 2), (1.0625, 56), (1.07, 57), (1.1875, 58)]
        {
            assert_eq!((code(Float8, value), code(Float8, -value)), (number, number + 128), "{value}");
        }
        assert_eq!((code(Float8, 448.0), code(Float8, 431.0), code(Float8, 1e9)), (126, 125, 126));
    }

    #[test]
    fn scales_are_the_smallest_powers_of_two_without_overflow() {
        assert_eq!(
            [6.0, 6.01, 3.0, 12.0, 0.0].map(|largest| scale_byte(largest, 6.0)),
            [127, 128, 126, 128, 127]
        );
        assert_eq!([448.0, 448.1, 1.75, 1.0].map(|largest| scale_byte(largest, 448.0)), [127, 128, 119, 119]);
        assert_eq!([f32::MIN_POSITIVE / 8.0, f32::MAX].map(|largest| scale_byte(largest, 6.0)), [1, 253]);
    }

    /// Blocks at the ends of float8 are smaller. All numbers of a format come back as the values that they stood for.
    #[test]
    fn quantised_values_stay_equal() {
        let (rows, columns) = (130, 160);
        for format in [Float8, Float4] {
            let ([height, width], magnitudes) = (format.block(), format.magnitudes());
            let value = |place: usize| {
                let block = place / columns / height + place % columns / width;
                let sign = if place.is_multiple_of(3) { -1.0 } else { 1.0 };
                sign * magnitudes[place % magnitudes.len()] * 2.0_f32.powi(block as i32 % 7 - 9)
            };
            let values: Vec<f32> = (0..rows * columns).map(value).collect();
            let (scales, bytes) = (format.scales(&values, columns), format.numbers(&values, columns));
            let blocks = columns.div_ceil(width);
            assert_eq!(
                (scales.len(), bytes.len()),
                (rows.div_ceil(height) * blocks, values.len() / format.numbers_per_byte())
            );
            for (place, value) in values.iter().enumerate() {
                let number = match format {
                    Float8 => E4M3[usize::from(bytes[place])],
                    Float4 => mxfp4::E2M1[usize::from(bytes[place / 2] >> (place % 2 * 4) & 15)],
                };
                let scale = e8m0(scales[place / columns / height * blocks + place % columns / width]);
                assert_eq!((number * scale).to_bits(), value.to_bits(), "{format:?} {place}");
            }
        }
    }
}
