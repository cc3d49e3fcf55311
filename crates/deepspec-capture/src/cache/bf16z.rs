//! Lossless bfloat16 in two thirds of the bytes.
//!
//! The eight exponent bits of hidden states carry less than three bits of information; sign and
//! mantissa are noise. Sign and mantissa are stored uncompressed in one byte per value, with the
//! sign in the lowest bit. The exponents, one byte per value, are compressed by zstd; each run of
//! [`VALUES_PER_FRAME`] values is a frame.

use std::io;

use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::{self, CParameter};

/// Values per frame. A decoded frame stays in the CPU cache until it is joined with the mantissas.
const VALUES_PER_FRAME: usize = 128 << 10;

/// Returns the sign and mantissa bytes of bfloat16 `states`, and appends the frames of their
/// exponents to `frames`.
pub(crate) fn encode(states: &[u8], frames: &mut Vec<u8>) -> io::Result<Vec<u8>> {
    let mut compressor = Compressor::new(1)?;
    // Exponents repeat only by chance. Searching for matches costs time and space; entropy coding
    // does the compression.
    compressor.set_parameter(CParameter::MinMatch(7))?;
    compressor.set_parameter(CParameter::HashLog(6))?;
    let turned = |pair: &[u8; 2]| u16::from_le_bytes(*pair).rotate_left(1).to_le_bytes();
    let (values, _) = states.as_chunks::<2>();
    for run in values.chunks(VALUES_PER_FRAME) {
        let exponents: Vec<u8> = run.iter().map(|pair| turned(pair)[1]).collect();
        frames.extend(compressor.compress(&exponents)?);
    }
    Ok(values.iter().map(|pair| turned(pair)[0]).collect())
}

/// Joins the sign and mantissa bytes `low` with the first exponents of `frames` into bfloat16
/// `states`, two bytes each. Returns the remaining frames, which belong to the next tensor.
///
/// # Errors
/// Fails if a frame is not zstd, or if it has fewer or more exponents.
pub(crate) fn decode<'f>(low: &[u8], mut frames: &'f [u8], states: &mut [u8]) -> io::Result<&'f [u8]> {
    debug_assert!(states.len() == low.len() * 2);
    let mut decompressor = Decompressor::new()?;
    let mut exponents = vec![0; VALUES_PER_FRAME.min(low.len())];
    for (low, states) in
        low.chunks(VALUES_PER_FRAME).zip(states.as_chunks_mut::<2>().0.chunks_mut(VALUES_PER_FRAME))
    {
        let problem = |code| io::Error::other(zstd_safe::get_error_name(code));
        let size = zstd_safe::find_frame_compressed_size(frames).map_err(problem)?;
        let (frame, rest) = frames.split_at_checked(size).ok_or(io::ErrorKind::UnexpectedEof)?;
        let found = decompressor.decompress_to_buffer(frame, &mut exponents[..low.len()])?;
        if found != low.len() {
            return Err(io::Error::other(format!("a frame of {found} exponents, expected {}", low.len())));
        }
        for ((state, &low), &exponent) in states.iter_mut().zip(low).zip(&exponents) {
            *state = u16::from_le_bytes([low, exponent]).rotate_right(1).to_le_bytes();
        }
        frames = rest;
    }
    Ok(frames)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_value_comes_back_over_the_ends_of_frames() {
        let states: Vec<u8> = (0..=u16::MAX)
            .cycle()
            .take(2 * VALUES_PER_FRAME + 17)
            .flat_map(|bits| bits.to_le_bytes())
            .collect();
        let mut frames = vec![];
        let low = encode(&states, &mut frames).unwrap();
        let mut read = vec![0; states.len()];
        assert!(decode(&low, &frames, &mut read).unwrap().is_empty() && read == states);
    }

    proptest! {
        #[test]
        fn tensors_follow_each_other(tensors in prop::collection::vec(prop::collection::vec(any::<u16>(), 0..300), 1..4)) {
            let bytes = |tensor: &Vec<u16>| tensor.iter().flat_map(|bits| bits.to_le_bytes()).collect::<Vec<u8>>();
            let tensors: Vec<Vec<u8>> = tensors.iter().map(bytes).collect();
            let mut frames = vec![];
            let low: Vec<Vec<u8>> = tensors.iter().map(|tensor| encode(tensor, &mut frames).unwrap()).collect();
            let mut rest = &frames[..];
            for (low, tensor) in low.iter().zip(&tensors) {
                let mut read = vec![0; tensor.len()];
                rest = decode(low, rest, &mut read).unwrap();
                prop_assert_eq!(&read, tensor);
            }
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn foreign_frames_are_errors(frames in prop::collection::vec(any::<u8>(), 0..100), values in 1_usize..50) {
            let low = vec![0; values];
            prop_assert!(decode(&low, &frames, &mut vec![0; 2 * values]).is_err());
            let mut right = vec![];
            encode(&vec![0; 2 * values], &mut right).unwrap();
            let shorter = vec![0; values - 1];
            prop_assert!(values == 1 || decode(&shorter, &right, &mut vec![0; 2 * values - 2]).is_err());
        }
    }
}
