//! What occurred before, in at most 16 bytes a thing.

use twox_hash::XxHash3_64;

/// Parts of the table, each of which grows alone, so that growing never doubles the whole.
const PARTS: usize = 64;

/// A part grows when it is fuller than 4 in 5 ...
const FULL: (usize, usize) = (4, 5);

/// ... by half, which leaves it 8 in 15 full: 15 bytes a thing are the most.
const GROWTH: (usize, usize) = (3, 2);

/// Slots of a part that has just been made.
const SMALLEST: usize = 8;

/// A set of 64-bit hashes in flat tables of 8 bytes a slot, with linear probing.
///
/// Two different things with the same hash are taken for one: among n things that happens with a probability of about
/// n² / 2⁶⁵, which is 3 in 10⁸ for a million and 3 in 10⁴ for a hundred million.
pub struct Seen {
    parts: Vec<Part>,
}

#[derive(Clone)]
struct Part {
    /// Hashes; zero marks a free slot.
    slots: Box<[u64]>,
    used: usize,
}

impl Seen {
    pub fn new() -> Self {
        Self { parts: vec![Part { slots: vec![0; SMALLEST].into(), used: 0 }; PARTS] }
    }

    /// Adds a hash; false if it was there.
    pub fn insert(&mut self, hash: u64) -> bool {
        // Zero is taken for its neighbour, which adds one pair in 2⁶⁴ to those that collide.
        let hash = hash.max(1);
        self.parts[(hash >> 58) as usize].insert(hash)
    }

    /// Whether a hash was added.
    pub fn contains(&self, hash: u64) -> bool {
        let hash = hash.max(1);
        let part = &self.parts[(hash >> 58) as usize];
        part.slots[part.find(hash)] == hash
    }

    /// How many there are.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.parts.iter().map(|part| part.used).sum()
    }

    /// Bytes of all tables.
    #[cfg(test)]
    fn bytes(&self) -> usize {
        self.parts.iter().map(|part| size_of_val(&*part.slots)).sum()
    }
}

impl Part {
    fn insert(&mut self, hash: u64) -> bool {
        let slot = self.find(hash);
        if self.slots[slot] == hash {
            return false;
        }
        self.slots[slot] = hash;
        self.used += 1;
        if self.used * FULL.1 > self.slots.len() * FULL.0 {
            self.grow();
        }
        true
    }

    /// Where `hash` is, or the free slot where it belongs. There is always one.
    fn find(&self, hash: u64) -> usize {
        // The bits behind those that chose the part, as a fraction of the table: any size will do, not only powers of two.
        let mut slot = ((u128::from(hash << 6) * self.slots.len() as u128) >> 64) as usize;
        while self.slots[slot] != 0 && self.slots[slot] != hash {
            slot = if slot + 1 == self.slots.len() { 0 } else { slot + 1 };
        }
        slot
    }

    fn grow(&mut self) {
        let size = self.slots.len() * GROWTH.0 / GROWTH.1;
        let old = std::mem::replace(&mut self.slots, vec![0; size].into());
        for &hash in old.iter().filter(|&&hash| hash != 0) {
            let slot = self.find(hash);
            self.slots[slot] = hash;
        }
    }
}

/// The hash of some bytes; the same everywhere and always.
pub fn hash(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    #[test]
    fn it_never_takes_more_than_16_bytes_a_thing() {
        let mut seen = Seen::new();
        for index in 0..300_000u64 {
            assert!(seen.insert(hash(&index.to_le_bytes())));
            // One part that is being copied comes on top; before that, the parts have hardly begun.
            let peak = seen.bytes() + seen.bytes() / PARTS;
            assert!(index < 20_000 || peak <= 16 * seen.len(), "{peak} bytes for {}", seen.len());
        }
        assert!((0..300_000u64).all(|index| seen.contains(hash(&index.to_le_bytes()))));
        assert!((0..300_000u64).all(|index| !seen.insert(hash(&index.to_le_bytes()))));
    }

    proptest! {
        #[test]
        fn it_is_a_set(hashes in prop::collection::vec(prop_oneof![0..50u64, any::<u64>(), (0..50u64).prop_map(|x| u64::MAX - x)], 0..500)) {
            let (mut seen, mut expected) = (Seen::new(), HashSet::new());
            for hash in hashes {
                prop_assert_eq!(seen.insert(hash), expected.insert(hash.max(1)));
            }
            prop_assert_eq!(seen.len(), expected.len());
        }
    }
}
