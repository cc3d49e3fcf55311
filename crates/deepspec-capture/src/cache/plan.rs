//! Plans the exact content of a build before the target runs.

use std::collections::HashSet;
use std::ops::Range;

use deepspec_core::digest::Hasher;
use serde_json::Value;

use crate::cache::error::CacheError;
use crate::cache::files::CacheTotals;
use crate::cache::identity::Identity;
use crate::cache::identity::Recipe;
use crate::cache::layout::Layout;
use crate::cache::sample::{PlannedSample, find_outside_vocab};
use crate::cache::shard::Geometry;

/// Consecutive samples that share a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedShard {
    /// Indices into [`Plan::samples`].
    pub samples: Range<usize>,
    /// Rows of `taps`: tokens.
    pub rows: u64,
    /// Rows of `last`: stored final hidden states.
    pub last_rows: u64,
}

impl PlannedShard {
    /// Layout of the shard file; for a compressing encoding, that of uncompressed exponents.
    pub(crate) fn geometry(&self, layout: &Layout) -> Result<Geometry, CacheError> {
        let bytes = |planned: Option<u64>| planned.ok_or_else(|| bad_layout_error(layout, self.rows));
        let most = bytes(layout.planned_bytes(self.rows, self.last_rows))?;
        let exponents = most - bytes(layout.sample_bytes(self.rows, self.last_rows))?;
        Geometry::new(layout, self.rows, self.last_rows, exponents)
    }
}

/// Samples in input order, grouped into shards. Equal inputs give equal plans.
#[derive(Debug)]
pub struct Plan {
    samples: Vec<PlannedSample>,
    layout: Layout,
    shard_bytes: u64,
    shards: Vec<PlannedShard>,
    counts: CacheTotals,
    bytes: u64,
    digest: String,
    reference: Option<Value>,
}

impl Plan {
    /// Groups `samples`, in order, into shards of at most `shard_bytes` of hidden states. A larger
    /// sample gets its own shard.
    ///
    /// # Errors
    /// Fails without samples, on an empty sample, on spans outside a sample, on duplicate ids, and
    /// on a layout without values.
    pub fn new(samples: Vec<PlannedSample>, layout: Layout, shard_bytes: u64) -> Result<Self, CacheError> {
        let mut filled: u64 = 0;
        let starts = |_, bytes: u64| {
            let new = filled.saturating_add(bytes) > shard_bytes;
            filled = if new { bytes } else { filled + bytes };
            new
        };
        Self::group_into_shards(samples, layout, shard_bytes, starts)
    }

    /// A plan whose shards begin at the given samples, for an imported cache. The manifest stores
    /// `reference`.
    pub(crate) fn from_imported(
        samples: Vec<PlannedSample>,
        layout: Layout,
        starts: &HashSet<usize>,
        reference: Value,
    ) -> Result<Self, CacheError> {
        let plan = Self::group_into_shards(samples, layout, u64::MAX, |index, _| starts.contains(&index))?;
        let bytes =
            |shard: &PlannedShard| plan.layout.planned_bytes(shard.rows, shard.last_rows).unwrap_or(0);
        let shard_bytes = plan.shards.iter().map(bytes).max().unwrap_or(0);
        Ok(Self { shard_bytes, reference: Some(reference), ..plan })
    }

    /// Groups samples into shards. `starts` returns whether a new shard begins with a sample, given
    /// its index and bytes.
    fn group_into_shards(
        samples: Vec<PlannedSample>,
        layout: Layout,
        shard_bytes: u64,
        mut starts: impl FnMut(usize, u64) -> bool,
    ) -> Result<Self, CacheError> {
        if samples.is_empty() {
            return Err(CacheError::EmptyPlan);
        }
        if shard_bytes == 0 {
            return Err(CacheError::ZeroShardBytes);
        }
        let (mut seen, mut hasher) = (HashSet::new(), Hasher::default());
        let mut shards: Vec<PlannedShard> = Vec::new();
        let mut counts = CacheTotals::default();
        for (index, sample) in samples.iter().enumerate() {
            sample.check()?;
            if !seen.insert(sample.id.as_str()) {
                return Err(CacheError::DuplicateId { sample: sample.id.clone() });
            }
            sample.add_to(&mut hasher);
            let rows = u64::from(sample.length());
            let last_rows = sample.last_positions(layout.last).len() as u64;
            let bytes =
                layout.planned_bytes(rows, last_rows).ok_or_else(|| bad_layout_error(&layout, rows))?;
            let new = starts(index, bytes);
            match shards.last_mut() {
                Some(shard) if !new => {
                    shard.samples.end = index + 1;
                    shard.rows += rows;
                    shard.last_rows += last_rows;
                }
                _ => shards.push(PlannedShard { samples: index..index + 1, rows, last_rows }),
            }
            counts.samples += 1;
            counts.tokens += rows;
            counts.supervised_tokens += u64::from(sample.supervised_count());
        }
        drop(seen);
        let mut bytes: u64 = 0;
        for shard in &shards {
            let total = shard.geometry(&layout)?.bytes();
            bytes = bytes.checked_add(total).ok_or_else(|| bad_layout_error(&layout, counts.tokens))?;
        }
        let (digest, reference) = (hasher.hex_digest(), None);
        Ok(Self { samples, layout, shard_bytes, shards, counts, bytes, digest, reference })
    }

    /// Plans these samples in another layout, to compare the sizes of encodings.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn in_layout(self, layout: Layout) -> Result<Self, CacheError> {
        Self::new(self.samples, layout, self.shard_bytes)
    }

    /// The samples, in input order.
    pub fn samples(&self) -> &[PlannedSample] {
        &self.samples
    }

    /// The shape of the rows.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The shards, in order; together they contain every sample once.
    pub fn shards(&self) -> &[PlannedShard] {
        &self.shards
    }

    /// Number of samples, tokens and supervised tokens.
    pub fn counts(&self) -> &CacheTotals {
        &self.counts
    }

    /// Bytes of all shard files, headers included; an upper bound if the encoding compresses.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Digest over ids, token ids and spans of all samples, in order.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// The recipe of this plan for `identity`. Fails if the two do not fit together.
    pub(crate) fn recipe(&self, identity: &Identity) -> Result<Recipe, CacheError> {
        let planned = Identity {
            taps: self.layout.taps.clone(),
            hidden_size: self.layout.hidden_size,
            ..identity.clone()
        };
        let differences = planned.differences(identity);
        if !differences.is_empty() {
            return Err(CacheError::PlanIdentity { differences });
        }
        for sample in &self.samples {
            let length = sample.input_ids.len();
            if length > identity.max_length {
                return Err(CacheError::TooLong {
                    sample: sample.id.clone(),
                    length,
                    max_length: identity.max_length,
                });
            }
            if let Some(position) = find_outside_vocab(&sample.input_ids, identity.vocab_size) {
                let (token, vocab_size) = (sample.input_ids[position], identity.vocab_size);
                return Err(CacheError::TokenOutside {
                    sample: sample.id.clone(),
                    position,
                    token,
                    vocab_size,
                });
            }
        }
        Ok(Recipe {
            identity: identity.clone(),
            encoding: self.layout.encoding,
            last: self.layout.last,
            shard_bytes: self.shard_bytes,
            counts: self.counts.clone(),
            input: self.digest.clone(),
            reference: self.reference.clone(),
        })
    }
}

fn bad_layout_error(layout: &Layout, rows: u64) -> CacheError {
    CacheError::BadLayout { taps: layout.taps.len(), hidden_size: layout.hidden_size, rows }
}
