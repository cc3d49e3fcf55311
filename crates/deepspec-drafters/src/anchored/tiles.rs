//! Blocks of a sequence in tiles, as fused attention on a GPU takes them.

use deepspec_models::nn::Heads;
use deepspec_native::{TiledAttention, TiledBlocks, pinned};
use tch::{Device, Kind, Tensor};

/// Blocks of a tile. Of what only some of them see most is computed in vain, and what all see is copied once a tile.
const SLOTS: usize = 16;
/// What all blocks of a tile see ends at a multiple of so many keys.
const ALIGNED: usize = 64;
/// A tile ends where more keys than these would be seen by some of its blocks only.
const MOST_REST: usize = 256;

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
    fn of(anchors: &[usize]) -> Self {
        let mut order: Vec<usize> = (0..anchors.len()).collect();
        order.sort_by_key(|&block| anchors[block]);
        let mut tiles = Self { seen: vec![], blocks: vec![], places: vec![0; anchors.len()], rest: 0 };
        let mut order = order.into_iter().peekable();
        while let Some(first) = order.next() {
            let seen = anchors[first] / ALIGNED * ALIGNED;
            let start = tiles.blocks.len();
            tiles.blocks.push(first);
            while tiles.blocks.len() < start + SLOTS
                && let Some(next) = order.next_if(|&next| anchors[next] - seen <= MOST_REST)
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
}

/// The attention of blocks of `size` positions behind `anchors` of a sequence of `tokens`, on a GPU.
pub(super) fn tiled(
    heads: Heads,
    scale: f64,
    size: usize,
    (tokens, anchors): (i64, &[usize]),
    device: Device,
) -> TiledAttention {
    let tiles = Tiles::of(anchors);
    let (count, rows) = (tiles.seen.len(), SLOTS * size * heads.repeats() as usize);
    let mut offsets = vec![0];
    for seen in &tiles.seen {
        offsets.push(offsets[offsets.len() - 1] + seen);
    }
    let of_slot = tiles.blocks.iter().map(|&block| anchors[block]);
    // As `TiledBlocks` wants them.
    let numbers: Vec<i32> = (tiles.seen.iter().copied())
        .chain(offsets[..count].iter().copied())
        .chain(tiles.blocks.iter().copied())
        .chain(of_slot)
        .chain(tiles.places.iter().copied())
        .chain((0..=count).map(|tile| tile * rows))
        .chain(offsets.iter().copied())
        .chain((0..=count).map(|_| 0))
        .map(|number| number as i32)
        .collect();
    let numbers = Tensor::from_slice(&numbers);
    let mut staged = pinned(&numbers.size(), &numbers);
    staged.copy_(&numbers);
    let blocks = TiledBlocks {
        tiles: count as i64,
        slots: SLOTS as i64,
        size: size as i64,
        repeats: heads.repeats(),
        groups: heads.key_value,
        dim: heads.dim,
        rest: tiles.rest as i64,
        tokens,
        blocks: anchors.len() as i64,
        packed: offsets[count] as i64,
        most_seen: tiles.seen.iter().max().copied().unwrap_or(0) as i64,
        scale,
    };
    TiledAttention::new(&staged.to_device_(device, Kind::Int, true, false), &blocks)
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
        let tiles = Tiles::of(&[320, 70, 1000, 130, 321]);
        assert_eq!(tiles.seen, [64, 320, 960]);
        assert_eq!(tiles.blocks, [repeated(&[1, 3, 0]), repeated(&[4]), repeated(&[2])].concat());
        assert_eq!(tiles.places, [2, 0, 32, 1, 16]);
        assert_eq!(tiles.rest, 256);

        let many: Vec<usize> = (0..20).collect();
        let tiles = Tiles::of(&many);
        assert_eq!((tiles.seen, tiles.rest), (vec![0, 0], 64));
        assert_eq!(tiles.places, [(0..16).collect::<Vec<_>>(), (16..20).collect()].concat());
        assert_eq!(Tiles::of(&[0]).rest, 0);
    }
}
