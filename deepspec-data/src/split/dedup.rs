//! What occurred before, in about 20 bytes a thing.

use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hasher};

use twox_hash::XxHash3_64;

/// Parts of the table, each of which grows alone, so that growing never doubles the whole.
const PARTS: usize = 64;

/// A set of 64-bit hashes.
///
/// Two different things with the same hash are taken for one: among n things that happens with a probability of about
/// n² / 2⁶⁵, which is 3 in 10⁸ for a million and 3 in 10⁴ for a hundred million.
pub struct Seen([HashSet<u64, BuildHasherDefault<AsItIs>>; PARTS]);

/// What is a hash already need not be hashed.
#[derive(Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = hash(bytes);
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

impl Seen {
    pub fn new() -> Self {
        Self(std::array::from_fn(|_| HashSet::default()))
    }

    /// Adds a hash; false if it was there.
    pub fn insert(&mut self, hash: u64) -> bool {
        self.0[Self::part(hash)].insert(hash)
    }

    /// Whether a hash was added.
    pub fn contains(&self, hash: u64) -> bool {
        self.0[Self::part(hash)].contains(&hash)
    }

    /// Neither the highest bits nor the lowest, by which a part finds its own.
    fn part(hash: u64) -> usize {
        (hash >> 40) as usize % PARTS
    }
}

/// The hash of some bytes; the same everywhere and always.
pub fn hash(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_added_is_known_and_nothing_else() {
        let mut seen = Seen::new();
        let hashes = || (0..100_000u64).map(|index| hash(&index.to_le_bytes())).chain([0, u64::MAX]);
        assert!(hashes().all(|hash| !seen.contains(hash) && seen.insert(hash)));
        assert!(hashes().all(|hash| seen.contains(hash) && !seen.insert(hash)));
        assert!(!seen.contains(1));
    }
}
