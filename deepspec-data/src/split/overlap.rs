//! Prompts that would stand on both sides: a held-out prompt that was trained on is answered too well.

use super::assign::{Side, SplitAssigner};
use super::dedup::Seen;
use super::drawn::Drawn;

/// The prompts that are held out, and how many training rows of each source ask the same.
pub struct Overlap {
    held_out: Seen,
    /// Training rows that ask what a held-out row asks, source by source.
    pub rows: Vec<usize>,
}

impl Overlap {
    /// Looks at all usable rows of the sources, as they are assigned.
    pub fn of(sources: &[Drawn<'_>], seed: u64) -> Self {
        let mut held_out = Seen::new();
        for source in sources {
            each(source, seed, |side, asked| {
                if side == Side::Eval {
                    held_out.insert(asked);
                }
            });
        }
        let count = |source: &Drawn<'_>| {
            let mut rows = 0;
            each(source, seed, |side, asked| {
                rows += usize::from(side == Side::Train && held_out.contains(asked))
            });
            rows
        };
        let rows = sources.iter().map(count).collect();
        Self { held_out, rows }
    }

    /// Training rows that ask what a held-out row asks.
    pub fn total(&self) -> usize {
        self.rows.iter().sum()
    }

    /// Whether a held-out row asks this.
    pub fn holds_out(&self, asked: u64) -> bool {
        self.held_out.contains(asked)
    }
}

/// Calls `see` with the side of every usable row and the hash of what it asks.
fn each(source: &Drawn<'_>, seed: u64, mut see: impl FnMut(Side, u64)) {
    let Drawn { input, found, quota } = source;
    let mut assigner = SplitAssigner::new(seed, input.name.as_deref(), found.usable_rows, *quota);
    for (row, &asked) in found.asked.iter().enumerate() {
        if found.usable.get(row) == Some(true) {
            see(assigner.next(), asked);
        }
    }
}
