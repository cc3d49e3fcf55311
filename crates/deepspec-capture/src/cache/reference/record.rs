//! A record of the format 2 index.

/// Bytes of a record.
pub(super) const RECORD_BYTES: usize = 56;

/// Location of a sample; the offsets in a record follow from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    pub sample: u64,
    pub shard: u32,
    pub length: u32,
    pub start: u64,
}

impl Record {
    /// Offsets of the five tensors and of the sample's end. `None` beyond 64 bits.
    pub fn offsets(self, taps: usize, hidden_size: usize) -> Option<[u64; 6]> {
        let (length, state) = (u64::from(self.length), (hidden_size as u64).checked_mul(2)?);
        let sizes = [4, 1, 1, state.checked_mul(taps as u64)?, state];
        let mut offsets = [self.start; 6];
        for (index, size) in sizes.into_iter().enumerate() {
            offsets[index + 1] = offsets[index].checked_add(length.checked_mul(size)?)?;
        }
        Some(offsets)
    }

    /// The record as bytes; `offsets` come from [`Self::offsets`].
    pub fn bytes(self, offsets: &[u64; 6]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(RECORD_BYTES);
        bytes.extend(self.sample.to_le_bytes());
        bytes.extend(self.shard.to_le_bytes());
        bytes.extend(self.length.to_le_bytes());
        bytes.extend(offsets[..5].iter().flat_map(|offset| offset.to_le_bytes()));
        bytes
    }

    /// Parses a record without checks.
    pub fn read(bytes: &[u8; RECORD_BYTES]) -> Self {
        let long = |at: usize| (0..8).fold(0, |sum, byte| sum | u64::from(bytes[at + byte]) << (8 * byte));
        let (sample, both, start) = (long(0), long(8), long(16));
        Self { sample, shard: both as u32, length: (both >> 32) as u32, start }
    }
}
