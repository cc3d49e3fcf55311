//! An entry of the index, and its record.

use std::ops::Range;

use crate::cache::PlannedSample;
use crc_fast::CrcAlgorithm;

/// Location and size of a sample.
pub(super) struct Entry {
    pub offset: u64,
    pub tokens: u32,
    spans: u32,
    /// Bytes of the sample's id.
    id: u32,
    /// CRC-32 of the record.
    pub checksum: u32,
}

impl Entry {
    pub const BYTES: usize = 24;

    /// The entry and record of a sample at `offset`; `None` if a size exceeds 32 bits.
    pub fn encode(sample: &PlannedSample, offset: u64) -> Option<(Self, Vec<u8>)> {
        let size = |len: usize| u32::try_from(len).ok();
        let (tokens, spans, id) =
            (size(sample.input_ids.len())?, size(sample.spans.len())?, size(sample.id.len())?);
        let mut record =
            Vec::with_capacity(sample.input_ids.len() * 4 + sample.spans.len() * 8 + sample.id.len());
        record.extend(sample.input_ids.iter().flat_map(|id| id.to_le_bytes()));
        record.extend(sample.spans.iter().flat_map(|&(start, end)| [start, end]).flat_map(u32::to_le_bytes));
        record.extend(sample.id.as_bytes());
        let checksum = checksum(&[&record]);
        Some((Self { offset, tokens, spans, id, checksum }, record))
    }

    /// Converts the entry to its bytes in the index.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.offset.to_le_bytes());
        let numbers = [self.tokens, self.spans, self.id, self.checksum];
        for (place, number) in bytes[8..].chunks_exact_mut(4).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// Parses an entry from its bytes in the index.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let offset = u64_at(bytes, 0).unwrap_or(u64::MAX);
        let mut numbers = u32s(bytes.get(8..).unwrap_or_default());
        let mut next = || numbers.next().unwrap_or_default();
        let (tokens, spans, id, checksum) = (next(), next(), next(), next());
        Self { offset, tokens, spans, id, checksum }
    }

    /// Byte range of the record; `None` beyond 64 bits.
    pub fn record_range(&self) -> Option<Range<u64>> {
        let bytes = 4 * u64::from(self.tokens) + 8 * u64::from(self.spans) + u64::from(self.id);
        Some(self.offset..self.offset.checked_add(bytes)?)
    }

    /// Decodes the sample from its record.
    pub fn decode(&self, record: &[u8]) -> PlannedSample {
        let (ids, rest) = record.split_at((4 * self.tokens as usize).min(record.len()));
        let (spans, id) = rest.split_at((8 * self.spans as usize).min(rest.len()));
        let mut bounds = u32s(spans);
        PlannedSample {
            id: String::from_utf8_lossy(id).into_owned(),
            input_ids: u32s(ids).map(u32::cast_signed).collect(),
            spans: std::iter::from_fn(|| Some((bounds.next()?, bounds.next()?))).collect(),
        }
    }
}

pub(super) fn checksum(parts: &[&[u8]]) -> u32 {
    let mut digest = crc_fast::Digest::new(CrcAlgorithm::Crc32IsoHdlc);
    parts.iter().for_each(|part| digest.update(part));
    // The CRC-32 is in the lower 32 of 64 bits.
    digest.finalize() as u32
}

pub(super) fn u64_at(bytes: &[u8], place: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(place..)?.first_chunk()?))
}

fn u32s(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.chunks_exact(4).map(|four| four.try_into().map_or(0, u32::from_le_bytes))
}
