//! Memory of block attention in training.

use tch::{Device, Kind};

use super::tiles::{COPIES, MOST_BYTES, SLOTS, most_rest};
use super::{ALIGNED, TILE, is_by_block};
use crate::attention::{AttentionSpec, Heads};

/// Float32 tensors of the size of a sequence's queries in its backward pass: the gradient of the output, and the gradients of the
/// queries through the block and through a part of the context.
const QUERIES_AT_WORK: usize = 3;
/// The number where blocks run one by one.
const QUERIES_BY_BLOCK: usize = 1;
/// Float32 tensors of the size of a sequence's keys and values, beside their gradients: gradients by part.
const KEYS_AT_WORK: usize = 2;
/// The number on CPUs, whose kernel packs keys and values in two layouts each.
const PANELS_AT_WORK: usize = 4;
/// Keys and values.
const SIDES: usize = 2;
/// Score tensors of one tile at a time, where no fused kernel runs.
const SCORES_AT_WORK: usize = 3;
const FLOAT: usize = size_of::<f32>();

/// One sequence of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSizes {
    /// T, its tokens.
    pub tokens: usize,
    /// A, its blocks.
    pub blocks: usize,
}

impl BlockSizes {
    /// Bytes of the masks that layers of this attention share, over some sequences, at `bytes` per value.
    pub fn mask_bytes(sequences: &[Self], spec: &AttentionSpec, size: usize, bytes: usize) -> usize {
        // Masks cover the context among the blocks of a tile, and the ends of windows.
        let masked = |of: &Self| {
            let tiles = of.blocks.div_ceil(TILE);
            of.blocks.min(TILE) * (of.tokens + tiles * ALIGNED).min(tiles * of.tokens)
        };
        let sides = if spec.window.is_some() { 2 } else { 1 };
        sides * sequences.iter().map(masked).sum::<usize>() * spec.heads.repeats() as usize * size * bytes
    }

    /// Bytes that one layer keeps of its attention over so many `slots` for the backward, beside queries, keys, values and output.
    pub fn kept_bytes(slots: usize, heads: Heads, bytes: usize, device: Device) -> usize {
        // In parts, the output is kept in two orders.
        let queries = (heads.query * heads.dim) as usize;
        let folded = if by_block(heads, bytes, device) { 0 } else { queries * bytes };
        slots * (folded + heads.query as usize * FLOAT)
    }

    /// Bytes that the backward of one layer's attention holds at most: gradients of all sequences, and the tensors of one.
    pub fn backward_bytes(
        sequences: &[Self],
        spec: &AttentionSpec,
        size: usize,
        bytes: usize,
        device: Device,
    ) -> usize {
        let gradients = |of: &Self| {
            let (queries, keys) = widths(spec.heads);
            (of.blocks * size * queries + SIDES * (of.tokens + of.blocks * size) * keys) * FLOAT
        };
        let at_work = |of: &Self| of.at_work(spec, size, bytes, device);
        sequences.iter().map(gradients).sum::<usize>() + sequences.iter().map(at_work).max().unwrap_or(0)
    }

    fn at_work(&self, spec: &AttentionSpec, size: usize, bytes: usize, device: Device) -> usize {
        let (queries, keys) = widths(spec.heads);
        let (slots, sources) = (self.blocks * size, self.tokens + self.blocks * size);
        let scores = match device {
            Device::Cpu => 0,
            _ => SCORES_AT_WORK * self.blocks.min(TILE) * size * spec.heads.query as usize * self.tokens,
        };
        let of_keys = if device == Device::Cpu { PANELS_AT_WORK } else { KEYS_AT_WORK };
        let of_queries = if by_block(spec.heads, bytes, device) { QUERIES_BY_BLOCK } else { QUERIES_AT_WORK };
        let in_parts = (of_queries * slots * queries + of_keys * sources * keys + scores) * FLOAT;
        let may_be_tiled = device != Device::Cpu && bytes < FLOAT && spec.window.is_none();
        if may_be_tiled { in_parts.max(self.tiled_at_work(size, queries, keys, bytes)) } else { in_parts }
    }

    /// Bytes of one sequence in tiles on a GPU. They are copies of the context with their gradients, the queries with three
    /// gradients, and float32 sums.
    fn tiled_at_work(&self, size: usize, queries: usize, keys: usize, bytes: usize) -> usize {
        const OF_QUERIES: usize = 4;
        let tiles = self.blocks.div_ceil(SLOTS);
        let seen = (COPIES * tiles * self.tokens * keys * bytes).min(MOST_BYTES);
        let rest = tiles * (most_rest(self.blocks, self.tokens) + SLOTS * size);
        seen + COPIES * rest * keys * bytes + tiles * SLOTS * size * queries * (OF_QUERIES * bytes + FLOAT)
    }
}

fn by_block(heads: Heads, bytes: usize, device: Device) -> bool {
    bytes == FLOAT && is_by_block(heads, Kind::Float, device)
}

/// Widths of all query heads and of all key heads.
fn widths(heads: Heads) -> (usize, usize) {
    ((heads.query * heads.dim) as usize, (heads.key_value * heads.dim) as usize)
}
