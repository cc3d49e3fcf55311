//! Sets of row ids in 16 bytes per id, so that millions of rows fit in memory.

use std::collections::HashSet;

use deepspec_core::digest;

/// A set of ids, stored as the first 128 bits of their SHA-256. A collision among ten million ids
/// has a probability below 1e-24.
#[derive(Debug, Default, Clone)]
pub struct IdSet(HashSet<u128>);

/// The first 128 bits of an id's SHA-256.
fn id_hash(id: &str) -> u128 {
    digest::fingerprint(id.as_bytes())
}

impl IdSet {
    /// Adds an id; false if the set had it.
    pub fn insert(&mut self, id: &str) -> bool {
        self.0.insert(id_hash(id))
    }

    /// Whether the set has an id.
    pub fn contains(&self, id: &str) -> bool {
        self.0.contains(&id_hash(id))
    }

    /// The fingerprints of the ids, in no order.
    pub fn fingerprints(&self) -> impl Iterator<Item = u128> {
        self.0.iter().copied()
    }

    /// Number of ids.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Removes all ids.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}
