//! Tiles of a sequence's blocks for the fused attention of a GPU.

use tch::{Device, Kind};

use super::SequenceAnchors;
use crate::attention::Heads;
use crate::ffi::{TiledAttention, TiledBlocks};
use crate::upload::Upload;

/// Blocks per tile. More blocks waste work on keys that only some of them see; fewer copy the shared keys more often.
pub(super) const BLOCKS_PER_TILE: usize = 16;
/// Shared keys of a tile end at a multiple of this.
const SHARED_KEY_ALIGN: usize = 64;
/// Minimum of [`max_partly_seen_keys`].
const MIN_PARTLY_SEEN_LIMIT: usize = 256;
/// Maximum bytes of a sequence's copied keys and values, with their gradients, in a backward pass.
pub(super) const MAX_COPY_BYTES: usize = 4 << 30;
/// Number of copied tensors: keys, values and their gradients.
pub(super) const COPIED_TENSORS: usize = 4;

/// Assignment of blocks to tiles.
#[derive(Debug, PartialEq, Eq)]
struct Tiles {
    /// Keys that all blocks of each tile see.
    seen: Vec<usize>,
    /// Block of each place. A tile's last block also fills its unused places.
    blocks: Vec<usize>,
    /// The place of each block.
    places: Vec<usize>,
    /// Maximum, over the tiles, of the number of keys after `seen` that at least one block of a tile sees, rounded up.
    rest: usize,
}

impl Tiles {
    /// Assigns the blocks at `anchors` to tiles, for a sequence of `tokens` tokens.
    fn assign_blocks(anchors: &[usize], tokens: usize) -> Self {
        let most_rest = max_partly_seen_keys(anchors.len(), tokens);
        let mut order: Vec<usize> = (0..anchors.len()).collect();
        order.sort_by_key(|&block| anchors[block]);
        let mut tiles = Self { seen: vec![], blocks: vec![], places: vec![0; anchors.len()], rest: 0 };
        let mut order = order.into_iter().peekable();
        while let Some(first) = order.next() {
            let seen = anchors[first] / SHARED_KEY_ALIGN * SHARED_KEY_ALIGN;
            let start = tiles.blocks.len();
            tiles.blocks.push(first);
            while tiles.blocks.len() < start + BLOCKS_PER_TILE
                && let Some(next) = order.next_if(|&next| anchors[next] - seen <= most_rest)
            {
                tiles.blocks.push(next);
            }
            for (slot, &block) in tiles.blocks.iter().enumerate().skip(start) {
                tiles.places[block] = slot;
            }
            let last = tiles.blocks[tiles.blocks.len() - 1];
            tiles.rest = tiles.rest.max(anchors[last] - seen);
            tiles.blocks.resize(start + BLOCKS_PER_TILE, last);
            tiles.seen.push(seen);
        }
        tiles.rest = tiles.rest.next_multiple_of(SHARED_KEY_ALIGN);
        tiles
    }

    /// Whether the copies of the backward pass fit; `line` is the bytes of one token's keys.
    fn fits_backward_memory(&self, line: usize) -> bool {
        COPIED_TENSORS * self.seen.iter().sum::<usize>() * line <= MAX_COPY_BYTES
    }
}

/// Maximum number of keys that only some blocks of a tile see: twice the average spacing of a full tile, or
/// more.
pub(super) fn max_partly_seen_keys(anchors: usize, tokens: usize) -> usize {
    (2 * BLOCKS_PER_TILE * tokens / anchors.max(1)).max(MIN_PARTLY_SEEN_LIMIT)
}

/// Plans of the fused attention for blocks of `size` slots; None where a sequence would take too much memory.
pub(super) fn plan_tiled_attention(
    heads: Heads,
    scale: f64,
    size: usize,
    spans: &[SequenceAnchors],
    device: Device,
) -> Option<Vec<TiledAttention>> {
    let rows = BLOCKS_PER_TILE * size * heads.num_kv_groups() as usize;
    let line = (heads.key_value * heads.dim) as usize * Kind::BFloat16.elt_size_in_bytes();
    // One upload carries the indices of all sequences.
    let (mut numbers, mut of_sequences) = (Upload::default(), vec![]);
    for SequenceAnchors { tokens, anchors, .. } in spans {
        let tiles = Tiles::assign_blocks(anchors, *tokens as usize);
        if !tiles.fits_backward_memory(line) {
            return None;
        }
        let count = tiles.seen.len();
        let mut offsets = vec![0];
        for seen in &tiles.seen {
            offsets.push(offsets[offsets.len() - 1] + seen);
        }
        let of_slot = tiles.blocks.iter().map(|&block| anchors[block]);
        // In the order that `TiledBlocks` documents.
        let list = (tiles.seen.iter().copied())
            .chain(offsets[..count].iter().copied())
            .chain(tiles.blocks.iter().copied())
            .chain(of_slot)
            .chain(tiles.places.iter().copied())
            .chain((0..=count).map(|tile| tile * rows))
            .chain(offsets.iter().copied())
            .chain((0..=count).map(|_| 0));
        let numbers = numbers.push(list.map(|number| number as i32));
        let blocks = TiledBlocks {
            tiles: count as i64,
            slots: BLOCKS_PER_TILE as i64,
            size: size as i64,
            repeats: heads.num_kv_groups(),
            groups: heads.key_value,
            dim: heads.dim,
            rest: tiles.rest as i64,
            tokens: *tokens,
            blocks: anchors.len() as i64,
            packed: offsets[count] as i64,
            most_seen: tiles.seen.iter().max().copied().unwrap_or(0) as i64,
            scale,
        };
        of_sequences.push((numbers, blocks));
    }
    let there = numbers.send(device);
    let plan = |(numbers, blocks)| TiledAttention::new(&there.slice(numbers), &blocks);
    Some(of_sequences.into_iter().map(plan).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_share_a_tile_until_it_is_full_or_too_wide() {
        let repeated = |blocks: &[usize]| {
            let mut all = blocks.to_vec();
            all.resize(BLOCKS_PER_TILE, blocks[blocks.len() - 1]);
            all
        };
        // In no order; behind 70 to 320 the next is too far away.
        let tiles = Tiles::assign_blocks(&[320, 70, 1000, 130, 321], 40);
        assert_eq!(tiles.seen, [64, 320, 960]);
        assert_eq!(tiles.blocks, [repeated(&[1, 3, 0]), repeated(&[4]), repeated(&[2])].concat());
        assert_eq!(tiles.places, [2, 0, 32, 1, 16]);
        assert_eq!(tiles.rest, 256);

        let many: Vec<usize> = (0..20).collect();
        let tiles = Tiles::assign_blocks(&many, 40);
        assert_eq!((tiles.seen, tiles.rest), (vec![0, 0], 64));
        assert_eq!(tiles.places, [(0..16).collect::<Vec<_>>(), (16..20).collect()].concat());
        assert_eq!(Tiles::assign_blocks(&[0], 40).rest, 0);
        // Far apart from one another, as many share a tile.
        let sparse: Vec<usize> = (0..64).map(|block| 500 * block).collect();
        let tiles = Tiles::assign_blocks(&sparse, 32000);
        assert_eq!(tiles.seen.len(), 4);
        assert!(tiles.fits_backward_memory(2048) && !tiles.fits_backward_memory(32_000));
    }
}
