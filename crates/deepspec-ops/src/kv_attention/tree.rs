//! Attention of drafted trees over the KV cache, by libtorch's operators alone: every tree is a group of one row with a mask.
//!
//! A tree's rows are stored behind the sequence in the order of the tree. A row's position is that of its depth. After verification
//! [`KvCache::keep_rows`] moves the accepted rows together.

use std::cell::OnceCell;

use super::calls::{MaskShape, SdpaSlice};
use super::plan::{ChunkGroups, MaskKind, PlacedChunk, PoolRowSelection, SdpaGroup};
use super::{AttentionPlan, Chunk, KV_ALIGN, KvCache};
use crate::draft_tree::{DraftTree, tree_attention_mask};

impl KvCache {
    /// Plans the attention of trees. Chunk i holds the rows of `trees[i]`. Call [`KvCache::reserve`] first.
    pub fn plan_trees(&self, chunks: &[Chunk], trees: &[DraftTree]) -> AttentionPlan {
        let placed = self.locate_chunks(chunks);
        let groups = ChunkGroups {
            rows: self.plan_write(chunks),
            few: vec![],
            order: None,
            back: None,
            groups: placed.iter().zip(trees).map(|(placed, tree)| self.tree_group(placed, tree)).collect(),
        };
        let deepest = |tree: &DraftTree| tree.row_depths().max().unwrap_or(0);
        let ends = chunks.iter().zip(trees).map(|(chunk, tree)| chunk.past_len + deepest(tree) + 1);
        let rows_end = ends.max().unwrap_or(0);
        let positions = chunks
            .iter()
            .zip(trees)
            .flat_map(|(chunk, tree)| tree.row_depths().map(|depth| chunk.past_len + depth));
        AttentionPlan {
            positions: self.arange.int_tensor(positions),
            end: rows_end,
            placed,
            visibility: MaskKind::Causal,
            in_place: false,
            grouped: OnceCell::from(groups),
        }
    }

    /// Bytes of the masks of a tree of `rows` rows, at the end of a sequence of up to `tokens` tokens.
    pub fn tree_mask_bytes(&self, rows: usize, tokens: usize) -> usize {
        let repeats: usize = self.mask_shapes.iter().map(|shape| shape.repeats).sum();
        repeats * rows * tokens.next_multiple_of(KV_ALIGN) * self.kind().elt_size_in_bytes()
    }

    /// One tree's rows as a group of their own, with the tree's masks.
    fn tree_group(&self, placed: &PlacedChunk, tree: &DraftTree) -> SdpaGroup {
        let PlacedChunk { chunk: Chunk { past_len, len, .. }, capacity, row, .. } = *placed;
        // As many keys as a chain of this length reads; see [`KV_ALIGN`].
        let keys = (past_len + len).next_multiple_of(KV_ALIGN).min(capacity);
        let call = |shape: &MaskShape| {
            let (kind, device) = self.options;
            let mask = tree_attention_mask(tree, past_len, keys, shape.window, kind, device);
            let mask = mask.repeat([shape.repeats as i64, 1]).unsqueeze(0).unsqueeze(0); // [1, 1, repeats·L, keys]
            vec![SdpaSlice { rows: 0..len, keys: 0..keys, mask: Some(mask) }]
        };
        SdpaGroup {
            capacity,
            rows: len as i64,
            slots: PoolRowSelection::Range(row as i64, 1),
            width: len as i64,
            past_len: self.arange.int_tensor([past_len]).view([1, 1, 1]),
            mask_shapes: self.mask_shapes.iter().map(call).collect(),
        }
    }

    /// Keeps some rows of the last chunk of `slot`, which began behind `past_len` tokens. The kept rows, runs (first, count) within the
    /// chunk, move together. The sequence then ends behind them.
    pub fn keep_rows(&mut self, slot: usize, past_len: usize, runs: &[(i64, i64)]) {
        let kept: Vec<i64> = runs.iter().flat_map(|&(first, count)| first..first + count).collect();
        let (count, past) = (kept.len() as i64, past_len as i64);
        // Rows in front stay where they are.
        let still = kept.iter().zip(0..).take_while(|&(&row, place)| row == place).count();
        self.slots[slot].len = past_len + kept.len();
        let (capacity, row) = self.pool_and_row(slot);
        let Some(pool) = self.pools.get(&capacity).filter(|_| still < kept.len()) else { return };
        let moved = self.arange.cat_runs(kept[still..].iter().map(|&from| (past + from, 1)));
        for layer in 0..self.layers.len() {
            for tensor in pool.layer_keys_values(layer) {
                let tokens = tensor.get(row as i64);
                let rows = tokens.index_select(0, &moved);
                tokens.narrow(0, past + still as i64, count - still as i64).copy_(&rows);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;
    use crate::attention::{AttentionSpec, Heads, Qkv};
    use crate::decoder_layer::Attend;

    const HEADS: Heads = Heads { query: 4, key_value: 2, dim: 16 };
    const PAST: usize = 300;

    /// A cache of two layers, one of them with a window, and `PAST` tokens in slot 1. Both layers have attention sinks, or none has.
    fn cache(sinks: bool) -> KvCache {
        let spec = |window| AttentionSpec { heads: HEADS, scale: 0.3, window, sinks };
        let mut cache = KvCache::new(&[spec(None), spec(Some(5))], 2, Kind::Float, Device::Cpu);
        let _ = append(&mut cache, &(0..PAST as i64).collect::<Vec<_>>());
        cache
    }

    /// Queries, keys and values of rows that each have a number.
    fn qkv(rows: &[i64], sinks: bool) -> Qkv {
        let of = |heads: i64, seed: f64| {
            let rows = Tensor::from_slice(rows).to_kind(Kind::Float).view([-1, 1, 1]);
            let inner =
                Tensor::arange(heads * HEADS.dim, (Kind::Float, Device::Cpu)).view([1, heads, HEADS.dim]);
            ((rows + 1.0) * (inner + seed)).sin()
        };
        let sinks = sinks.then(|| Tensor::from_slice(&[0.5f32, -1.0, 2.0, 1.0]));
        Qkv { q: of(HEADS.query, 0.3), k: of(HEADS.key_value, 1.7), v: of(HEADS.key_value, 2.9), sinks }
    }

    fn append(cache: &mut KvCache, rows: &[i64]) -> [Tensor; 2] {
        let chunks = cache.chunks_to_append(&[(1, rows.len())]);
        cache.reserve(&chunks);
        let plan = cache.plan(&chunks, MaskKind::Causal);
        let rows = qkv(rows, cache.layers[0].spec.sinks);
        let outputs = [0, 1].map(|layer| cache.attention(layer, &plan).attend(&rows));
        cache.commit_chunks(&chunks);
        outputs
    }

    /// Two paths behind the anchor 1000: 1001 then 1003 then 1004, and 1002 then 1005.
    fn tree() -> DraftTree {
        let mut tree = DraftTree::default();
        for (parent, token) in [(0, 1001), (0, 1002), (1, 1003), (3, 1004), (2, 1005)] {
            tree.add(parent, token);
        }
        tree
    }

    fn run_tree(cache: &mut KvCache) -> [Tensor; 2] {
        let chunks = cache.chunks_to_append(&[(1, 6)]);
        cache.reserve(&chunks);
        let plan = cache.plan_trees(&chunks, &[tree()]);
        let positions: Vec<i64> = Vec::try_from(plan.positions()).unwrap();
        assert_eq!(positions, [0, 1, 1, 2, 3, 2].map(|depth| depth + PAST as i64));
        let rows = qkv(&(1000..1006).collect::<Vec<_>>(), cache.layers[0].spec.sinks);
        let outputs = [0, 1].map(|layer| cache.attention(layer, &plan).attend(&rows));
        cache.commit_chunks(&chunks);
        outputs
    }

    #[test]
    fn every_path_attends_as_it_does_alone() {
        let paths = [
            ([1000, 1001, 1003, 1004].as_slice(), [0i64, 1, 3, 4].as_slice()),
            (&[1000, 1002, 1005], &[0, 2, 5]),
        ];
        for (sinks, (path, rows)) in
            [false, true].into_iter().flat_map(|sinks| paths.map(|path| (sinks, path)))
        {
            let of_tree = run_tree(&mut cache(sinks));
            let alone = append(&mut cache(sinks), path);
            for (tree, alone) in of_tree.iter().zip(&alone) {
                let tree = tree.index_select(0, &Tensor::from_slice(rows));
                assert!(tree.allclose(alone, 1e-5, 1e-6, false), "path {path:?}, sinks: {sinks}");
            }
        }
    }

    #[test]
    fn masks_take_as_many_bytes_as_foretold() {
        let mut cache = cache(false);
        let chunks = cache.chunks_to_append(&[(1, 6)]);
        cache.reserve(&chunks);
        let plan = cache.plan_trees(&chunks, &[tree()]);
        let groups = &plan.grouped.get().unwrap().groups;
        let masks = groups.iter().flat_map(|group| group.mask_shapes.iter().flatten());
        let bytes = masks.map(|slice| slice.mask.as_ref().unwrap().numel() * size_of::<f32>()).sum::<usize>();
        assert!(bytes > 0);
        assert_eq!(cache.tree_mask_bytes(6, PAST + 6), bytes);
    }

    #[test]
    fn kept_rows_are_the_sequence() {
        for (runs, path) in [
            ([(0, 2), (3, 2)].as_slice(), vec![1000, 1001, 1003, 1004]),
            (&[(0, 1), (2, 1), (5, 1)], vec![1000, 1002, 1005]),
            (&[(0, 2)], vec![1000, 1001]),
        ] {
            let (mut kept, mut alone) = (cache(false), cache(false));
            let _ = run_tree(&mut kept);
            kept.keep_rows(1, PAST, runs);
            let _ = append(&mut alone, &path);
            assert_eq!(kept.len(1), PAST + path.len());
            for (kept, alone) in append(&mut kept, &[7, 8]).iter().zip(append(&mut alone, &[7, 8])) {
                assert!(kept.allclose(&alone, 1e-6, 1e-7, false), "path {path:?}");
            }
        }
    }
}
