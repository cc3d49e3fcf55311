//! Blocks of a sequence in tiles, as fused attention on a GPU takes them.

use tch::{Device, Kind};

use super::SequenceSpan;
use crate::attention::Heads;
use crate::ffi::{TiledAttention, TiledBlocks};
use crate::upload::Upload;

/// Blocks of a tile. Of what only some of them see most is computed in vain, and what all see is copied once a tile.
pub(super) const SLOTS: usize = 16;
/// What all blocks of a tile see ends at a multiple of so many keys.
const ALIGNED: usize = 64;
/// A tile ends where more keys would be seen by some of its blocks only than these, and than twice as many as so many blocks take on average.
const LEAST_REST: usize = 256;
/// Bytes that copies of what a sequence's tiles see, and their slopes, may take in a backward.
pub(super) const MOST_BYTES: usize = 4 << 30;
/// Keys and values, and the slopes of both.
pub(super) const COPIES: usize = 4;

/// Which blocks share a tile.
#[derive(Debug, PartialEq, Eq)]
struct Tiles {
    /// Keys that all blocks of a tile see.
    seen: Vec<usize>,
    /// The block of each slot; the last one of a tile once more in those that are left over.
    blocks: Vec<usize>,
    /// The slot of each block.
    places: Vec<usize>,
    /// Keys behind `seen` that hold all that some block of a tile sees.
    rest: usize,
}

impl Tiles {
    /// Of a sequence of so many tokens.
    fn of(anchors: &[usize], tokens: usize) -> Self {
        let most_rest = most_rest(anchors.len(), tokens);
        let mut order: Vec<usize> = (0..anchors.len()).collect();
        order.sort_by_key(|&block| anchors[block]);
        let mut tiles = Self { seen: vec![], blocks: vec![], places: vec![0; anchors.len()], rest: 0 };
        let mut order = order.into_iter().peekable();
        while let Some(first) = order.next() {
            let seen = anchors[first] / ALIGNED * ALIGNED;
            let start = tiles.blocks.len();
            tiles.blocks.push(first);
            while tiles.blocks.len() < start + SLOTS
                && let Some(next) = order.next_if(|&next| anchors[next] - seen <= most_rest)
            {
                tiles.blocks.push(next);
            }
            for (slot, &block) in tiles.blocks.iter().enumerate().skip(start) {
                tiles.places[block] = slot;
            }
            let last = tiles.blocks[tiles.blocks.len() - 1];
            tiles.rest = tiles.rest.max(anchors[last] - seen);
            tiles.blocks.resize(start + SLOTS, last);
            tiles.seen.push(seen);
        }
        tiles.rest = tiles.rest.next_multiple_of(ALIGNED);
        tiles
    }

    /// Whether what its backward copies has room, with heads of keys of so many bytes in all.
    fn has_room(&self, line: usize) -> bool {
        COPIES * self.seen.iter().sum::<usize>() * line <= MOST_BYTES
    }
}

/// Keys that some blocks of a tile may see alone.
pub(super) fn most_rest(anchors: usize, tokens: usize) -> usize {
    (2 * SLOTS * tokens / anchors.max(1)).max(LEAST_REST)
}

/// The attention of blocks of `size` positions behind the anchors of sequences, on a GPU; None where one of them would take too much memory.
pub(super) fn tiled(
    heads: Heads,
    scale: f64,
    size: usize,
    spans: &[SequenceSpan],
    device: Device,
) -> Option<Vec<TiledAttention>> {
    let rows = SLOTS * size * heads.repeats() as usize;
    let line = (heads.key_value * heads.dim) as usize * Kind::BFloat16.elt_size_in_bytes();
    // All sequences' numbers travel together.
    let (mut numbers, mut of_sequences) = (Upload::default(), vec![]);
    for SequenceSpan { tokens, anchors, .. } in spans {
        let tiles = Tiles::of(anchors, *tokens as usize);
        if !tiles.has_room(line) {
            return None;
        }
        let count = tiles.seen.len();
        let mut offsets = vec![0];
        for seen in &tiles.seen {
            offsets.push(offsets[offsets.len() - 1] + seen);
        }
        let of_slot = tiles.blocks.iter().map(|&block| anchors[block]);
        // As `TiledBlocks` wants them.
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
            slots: SLOTS as i64,
            size: size as i64,
            repeats: heads.repeats(),
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
    let plan = |(numbers, blocks)| TiledAttention::new(&there.of(numbers), &blocks);
    Some(of_sequences.into_iter().map(plan).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_share_a_tile_until_it_is_full_or_too_wide() {
        let repeated = |blocks: &[usize]| {
            let mut all = blocks.to_vec();
            all.resize(SLOTS, blocks[blocks.len() - 1]);
            all
        };
        // In no order; behind 70 to 320 the next is too far away.
        let tiles = Tiles::of(&[320, 70, 1000, 130, 321], 40);
        assert_eq!(tiles.seen, [64, 320, 960]);
        assert_eq!(tiles.blocks, [repeated(&[1, 3, 0]), repeated(&[4]), repeated(&[2])].concat());
        assert_eq!(tiles.places, [2, 0, 32, 1, 16]);
        assert_eq!(tiles.rest, 256);

        let many: Vec<usize> = (0..20).collect();
        let tiles = Tiles::of(&many, 40);
        assert_eq!((tiles.seen, tiles.rest), (vec![0, 0], 64));
        assert_eq!(tiles.places, [(0..16).collect::<Vec<_>>(), (16..20).collect()].concat());
        assert_eq!(Tiles::of(&[0], 40).rest, 0);
        // Far apart from one another, as many share a tile.
        let sparse: Vec<usize> = (0..64).map(|block| 500 * block).collect();
        let tiles = Tiles::of(&sparse, 32000);
        assert_eq!(tiles.seen.len(), 4);
        assert!(tiles.has_room(2048) && !tiles.has_room(32_000));
    }
}
