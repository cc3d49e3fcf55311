//! Sets of row ids in 16 bytes an id, so that millions of rows fit.

use std::collections::HashSet;

use deepspec_core::digest;

/// A set of ids, kept as the first 128 bits of their SHA-256. Two ids out of ten million share them with a probability
/// below 1e-24.
#[derive(Debug, Default, Clone)]
pub struct IdSet(HashSet<u128>);

/// The bits that stand for an id.
fn key(id: &str) -> u128 {
    digest::fingerprint(id.as_bytes())
}

impl IdSet {
    /// Adds an id; false if it was there.
    pub fn insert(&mut self, id: &str) -> bool {
        self.0.insert(key(id))
    }

    /// Whether an id is there.
    pub fn contains(&self, id: &str) -> bool {
        self.0.contains(&key(id))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Removes all.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}
