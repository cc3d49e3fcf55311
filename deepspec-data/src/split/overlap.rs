//! Finds training rows whose prompt is also held out. They would inflate evaluation scores.

use super::assign::{Side, SplitAssigner};
use super::dedup::HashSet64;
use super::sampled::SampledSource;

/// Hashes of the held-out prompts, and number of training rows with such a prompt.
pub struct Overlap {
    held_out: HashSet64,
    /// Number of training rows with a held-out prompt, by source.
    pub rows: Vec<usize>,
}

impl Overlap {
    /// Compares all usable rows of the sources by their assigned sides.
    pub fn of(sources: &[SampledSource<'_>], seed: u64) -> Self {
        let mut held_out = HashSet64::new();
        for source in sources {
            each(source, seed, |side, asked| {
                if side == Side::Eval {
                    held_out.insert(asked);
                }
            });
        }
        let count = |source: &SampledSource<'_>| {
            let mut rows = 0;
            each(source, seed, |side, asked| {
                rows += usize::from(side == Side::Train && held_out.contains(asked))
            });
            rows
        };
        let rows = sources.iter().map(count).collect();
        Self { held_out, rows }
    }

    /// Number of training rows with a held-out prompt.
    pub fn total(&self) -> usize {
        self.rows.iter().sum()
    }

    /// Whether a held-out row has the prompt with this hash.
    pub fn holds_out(&self, asked: u64) -> bool {
        self.held_out.contains(asked)
    }
}

/// Calls `see` with the side and the prompt's hash of every usable row.
fn each(source: &SampledSource<'_>, seed: u64, mut see: impl FnMut(Side, u64)) {
    let SampledSource { input, found, quota } = source;
    let mut assigner = SplitAssigner::new(seed, input.name.as_deref(), found.usable_rows, *quota);
    for (row, &asked) in found.asked.iter().enumerate() {
        if found.usable.get(row) == Some(true) {
            see(assigner.next(), asked);
        }
    }
}
