//! A set of hashes in about 20 bytes per entry.

use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hasher};

use twox_hash::XxHash3_64;

/// Number of sub-tables. Each sub-table grows separately, so the memory of the whole set never
/// doubles at once.
const SUB_TABLES: usize = 64;

/// A set of 64-bit hashes.
///
/// Two items with equal hashes count as one. Among n items the probability is about n² / 2⁶⁵: 3 in
/// 10⁸ for a million, 3 in 10⁴ for a hundred million.
pub struct HashSet64([HashSet<u64, BuildHasherDefault<IdentityHasher>>; SUB_TABLES]);

/// A hasher that passes hashes through unchanged.
#[derive(Default)]
struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
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

impl HashSet64 {
    pub fn new() -> Self {
        Self(std::array::from_fn(|_| HashSet::default()))
    }

    /// Adds a hash; false if the set had it.
    pub fn insert(&mut self, hash: u64) -> bool {
        self.0[Self::part(hash)].insert(hash)
    }

    /// Whether a hash was added.
    pub fn contains(&self, hash: u64) -> bool {
        self.0[Self::part(hash)].contains(&hash)
    }

    /// The index of a hash's sub-table. It depends on middle bits, because the lookup in a
    /// sub-table uses the highest and the lowest bits.
    fn part(hash: u64) -> usize {
        (hash >> 40) as usize % SUB_TABLES
    }
}

/// The hash of some bytes, equal on all machines.
pub fn hash(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_added_is_known_and_nothing_else() {
        let mut seen = HashSet64::new();
        let hashes = || (0..100_000u64).map(|index| hash(&index.to_le_bytes())).chain([0, u64::MAX]);
        assert!(hashes().all(|hash| !seen.contains(hash) && seen.insert(hash)));
        assert!(hashes().all(|hash| seen.contains(hash) && !seen.insert(hash)));
        assert!(!seen.contains(1));
    }
}
