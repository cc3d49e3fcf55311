//! Encodes and decodes a sample's hidden states. Only this module distinguishes the encodings.

use std::borrow::Cow;
use std::io;

use crc_fast::{CrcAlgorithm, Digest};

use crate::cache::error::Part;
use crate::cache::layout::{Encoding, Layout};
use crate::cache::shard::Parts;
use crate::cache::{bf16z, fp8, values};

/// Bytes copied and checksummed at a time; they stay in the L2 cache.
const BLOCK_BYTES: usize = 64 << 10;

/// Encodes finite bfloat16 hidden states.
pub(crate) fn encode<'s>(layout: &Layout, [taps, last]: [&'s [u8]; 2]) -> io::Result<Parts<Cow<'s, [u8]>>> {
    let none = || Cow::Borrowed(&[][..]);
    let mut stored =
        Parts { taps: none(), last: none(), taps_scale: none(), last_scale: none(), exponents: none() };
    match layout.encoding {
        Encoding::Bf16 => (stored.taps, stored.last) = (taps.into(), last.into()),
        Encoding::Bf16z => {
            let mut exponents = Vec::new();
            stored.taps = bf16z::encode(taps, &mut exponents)?.into();
            stored.last = bf16z::encode(last, &mut exponents)?.into();
            stored.exponents = exponents.into();
        }
        Encoding::Fp8 => {
            let [taps, last] = [taps, last].map(|states| fp8::encode(states, layout.hidden_size));
            (stored.taps, stored.taps_scale) = (taps.codes.into(), taps.scales.into());
            (stored.last, stored.last_scale) = (last.codes.into(), last.scales.into());
        }
    }
    Ok(stored)
}

/// Number of bytes that a shard of this layout needs for a sample's bfloat16 states `taps [L, m·d]`
/// and `last [K, d]`.
///
/// # Errors
/// Fails if zstd fails.
pub fn stored_bytes(layout: &Layout, taps: &[u8], last: &[u8]) -> io::Result<u64> {
    let stored = encode(layout, [taps, last])?.in_file_order();
    Ok(stored.iter().map(|bytes| bytes.len() as u64).sum())
}

/// Sizes in bytes of a sample's taps `[L, m·d]` and final states `[K, d]` after decoding to
/// bfloat16.
pub(crate) fn state_bytes(layout: &Layout, stored: Parts<&[u8]>) -> [usize; 2] {
    let values = layout.encoding.value_bytes();
    [stored.taps, stored.last].map(|stored| stored.len() / values * Encoding::Bf16.value_bytes())
}

/// Decodes a stored sample to bfloat16, into buffers with the sizes of [`state_bytes`].
///
/// # Errors
/// Fails if the exponents cannot be decompressed.
pub(crate) fn decode(layout: &Layout, stored: Parts<&[u8]>, [taps, last]: [&mut [u8]; 2]) -> io::Result<()> {
    match layout.encoding {
        Encoding::Bf16 => {
            taps.copy_from_slice(stored.taps);
            last.copy_from_slice(stored.last);
        }
        Encoding::Bf16z => {
            let rest = bf16z::decode(stored.taps, stored.exponents, taps)?;
            if !bf16z::decode(stored.last, rest, last)?.is_empty() {
                return Err(io::Error::other("more exponents than values"));
            }
        }
        Encoding::Fp8 => {
            fp8::decode(stored.taps, stored.taps_scale, layout.hidden_size, taps);
            fp8::decode(stored.last, stored.last_scale, layout.hidden_size, last);
        }
    }
    Ok(())
}

/// Copies a sample stored in bfloat16 and returns its [`checksum`]. Each block is checksummed while
/// it is in the CPU cache.
pub(crate) fn copy_with_checksum(stored: Parts<&[u8]>, [taps, last]: [&mut [u8]; 2]) -> u32 {
    let mut digest = crc32_digest();
    for (from, to) in [(stored.taps, taps), (stored.last, last)] {
        for (from, to) in from.chunks(BLOCK_BYTES).zip(to.chunks_mut(BLOCK_BYTES)) {
            to.copy_from_slice(from);
            digest.update(to);
        }
    }
    digest.finalize() as u32
}

/// Decodes a stored sample to bfloat16: taps `[L, m·d]` and final states `[K, d]`. Samples stored
/// in bfloat16 are borrowed.
///
/// # Errors
/// As [`decode`].
pub(crate) fn decode_to_bf16<'s>(layout: &Layout, stored: Parts<&'s [u8]>) -> io::Result<[Cow<'s, [u8]>; 2]> {
    if layout.encoding == Encoding::Bf16 {
        return Ok([stored.taps.into(), stored.last.into()]);
    }
    let [mut taps, mut last] = state_bytes(layout, stored).map(|bytes| vec![0; bytes]);
    decode(layout, stored, [&mut taps, &mut last])?;
    Ok([taps.into(), last.into()])
}

/// Row, tensor and value of the first NaN or infinity in bfloat16 states.
pub(crate) fn first_non_finite(layout: &Layout, [taps, last]: [&[u8]; 2]) -> Option<(usize, Part, f32)> {
    let d = layout.hidden_size;
    if let Some((index, value)) = values::first_non_finite(taps) {
        let (row, column) = (index / (layout.taps.len() * d), index % (layout.taps.len() * d));
        return Some((row, Part::Tap(layout.taps[column / d]), value));
    }
    values::first_non_finite(last).map(|(index, value)| (index / d, Part::Last, value))
}

/// CRC-32 of all stored bytes of a sample, in file order.
pub(crate) fn checksum(stored: Parts<&[u8]>) -> u32 {
    let mut digest = crc32_digest();
    stored.in_file_order().into_iter().for_each(|bytes| digest.update(bytes));
    digest.finalize() as u32
}

/// The CRC-32 of zip and zlib; the result is in the lower 32 of 64 bits.
fn crc32_digest() -> Digest {
    Digest::new(CrcAlgorithm::Crc32IsoHdlc)
}
