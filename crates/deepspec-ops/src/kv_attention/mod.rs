//! The KV cache of many sequences, and attention of ragged batches over it.

mod calls;
mod plan;
mod pool;
mod reference;
mod tree;

use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor};

use crate::attention::{AttentionSpec, Heads, Qkv};
use crate::decoder_layer::{Attend, AttendProjected};
use crate::ffi::{
    KvChunk, KvWindow, MAX_DECODE_ROWS, ProjectedHeads, QkvInput, decode_attention, has_decode_kernels,
    has_in_place_attention, in_place_attention,
};
use crate::upload::DeviceArange;
use calls::MaskShape;
pub use plan::{AttentionPlan, MaskKind, PooledRows};
use plan::{PlacedChunk, SdpaGroup};
use pool::{KvLayout, Pool};
pub use pool::{MAX_SPARE_BYTES, row_capacity};

/// Grouped attention reads keys in whole multiples of this many tokens.
///
/// The number of keys of a call changes the last bits of its sums. Only the length of the sequence decides that number, and only chunks
/// with equal numbers share a call. A sequence's states therefore do not depend on its batch.
const KV_ALIGN: usize = 256;

/// Keys and values of every layer, filled from the left.
///
/// Sliding-window layers also keep all tokens, so that a rollback only changes lengths. Memory is allocated for the length of each
/// sequence, and freed when the sequence is truncated to 0 tokens.
pub struct KvCache {
    layers: Vec<CacheLayer>,
    mask_shapes: Vec<MaskShape>,
    layout: KvLayout,
    /// Pools by the capacity of their rows.
    pools: BTreeMap<usize, Pool>,
    slots: Vec<SequenceSlot>,
    options: (Kind, Device),
    in_place: InPlaceKernel,
    /// Row indices and positions are slices of this arange.
    arange: DeviceArange,
}

/// Kernel that attends to the KV cache in place, without gathering keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InPlaceKernel {
    /// No kernel attends in place.
    Never,
    /// The CPU kernel for short chunks, in float32.
    ShortChunks,
    /// The GPU kernel for all chunks of a batch, in bfloat16, if they have at most [`MAX_DECODE_ROWS`] rows.
    DecodeRows,
}

impl InPlaceKernel {
    fn for_layers(specs: impl Iterator<Item = AttentionSpec> + Clone, kind: Kind, device: Device) -> Self {
        if specs.clone().any(|spec| spec.sinks) {
            return Self::Never;
        }
        let mut layers = specs.map(|spec| spec.heads);
        match (kind, device) {
            (Kind::Float, Device::Cpu) if layers.all(|heads| has_in_place_attention(heads.dim)) => {
                Self::ShortChunks
            }
            (Kind::BFloat16, Device::Cuda(_)) => {
                let like = Tensor::zeros([1], (kind, device));
                // All kernels support this width. The widths of the layers are checked with their weights.
                let has = |heads: Heads| {
                    has_decode_kernels(&like, PROBE_WIDTH, PROBE_WIDTH, heads.dim, heads.num_kv_groups())
                };
                if layers.all(has) { Self::DecodeRows } else { Self::Never }
            }
            _ => Self::Never,
        }
    }
}

/// A row width that all GPU kernels support.
const PROBE_WIDTH: i64 = 256;

struct CacheLayer {
    spec: AttentionSpec,
    /// Index of the layer's mask shape.
    view: usize,
}

/// Keys and values of one sequence.
#[derive(Default, Clone)]
struct SequenceSlot {
    /// Number of tokens of the sequence.
    len: usize,
    /// Tokens of its row that were written since the row was taken, rejected drafts included.
    written: usize,
    /// Capacity of the sequence's pool, and its row in that pool. None while the sequence is empty.
    place: Option<(usize, usize)>,
}

/// New tokens of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct Chunk {
    /// Slot of the sequence in the cache.
    pub slot: usize,
    /// Tokens of the sequence before the chunk.
    pub past_len: usize,
    /// Number of tokens of the chunk, at least one.
    pub len: usize,
}

impl KvCache {
    /// An empty cache with `slots` slots, for layers with these specs.
    pub fn new(layers: &[AttentionSpec], slots: usize, kind: Kind, device: Device) -> Self {
        let mut mask_shapes: Vec<MaskShape> = vec![];
        let layout = KvLayout::new(layers.iter().map(|layer| layer.heads).collect(), (kind, device));
        let layers: Vec<CacheLayer> = layers
            .iter()
            .map(|&spec| {
                let view = MaskShape { repeats: spec.heads.num_kv_groups() as usize, window: spec.window };
                let number = mask_shapes.iter().position(|known| *known == view).unwrap_or_else(|| {
                    mask_shapes.push(view);
                    mask_shapes.len() - 1
                });
                CacheLayer { spec, view: number }
            })
            .collect();
        let in_place = InPlaceKernel::for_layers(layers.iter().map(|layer| layer.spec), kind, device);
        let slots = vec![SequenceSlot::default(); slots];
        let (options, arange) = ((kind, device), DeviceArange::new(device));
        Self { layers, mask_shapes, layout, pools: BTreeMap::new(), slots, options, in_place, arange }
    }

    fn kind(&self) -> Kind {
        self.options.0
    }

    fn mask_shapes(&self) -> &[MaskShape] {
        &self.mask_shapes
    }

    /// Tokens of the sequence in `slot`.
    pub fn len(&self, slot: usize) -> usize {
        self.slots[slot].len
    }

    /// Chunks that append a number of tokens to the sequences of slots, given as `(slot, tokens)`.
    pub fn chunks_to_append(&self, chunks: &[(usize, usize)]) -> Vec<Chunk> {
        let chunk = |&(slot, len): &(usize, usize)| Chunk { slot, past_len: self.len(slot), len };
        chunks.iter().map(chunk).collect()
    }

    /// Bytes of memory that a sequence of up to `tokens` takes.
    pub fn kv_cache_bytes(&self, tokens: usize) -> usize {
        row_capacity(tokens) * self.layout.token_bytes()
    }

    /// Bytes that are allocated now.
    #[cfg(test)]
    fn allocated_bytes(&self) -> usize {
        let rows = self.pools.values().map(|pool| pool.capacity * pool.used_and_total_rows().1);
        rows.sum::<usize>() * self.layout.token_bytes()
    }

    /// Truncates the sequence in `slot` to `len` tokens. A sequence of 0 tokens frees its memory.
    pub fn truncate(&mut self, slot: usize, len: usize) {
        self.slots[slot].len = self.slots[slot].len.min(len);
        if len == 0 {
            self.free_slot(slot);
        }
    }

    fn free_slot(&mut self, slot: usize) {
        let SequenceSlot { written, place, .. } = std::mem::take(&mut self.slots[slot]);
        let pool = place.and_then(|(capacity, row)| Some((self.pools.get_mut(&capacity)?, row)));
        if let Some((pool, row)) = pool {
            pool.free_row(row, written);
        }
        // Needed even without a row, because memory may have run out while a pool grew.
        self.free_unused(MAX_SPARE_BYTES);
    }

    /// Frees all memory that no sequence uses.
    pub fn free_cached_memory(&mut self) {
        self.free_unused(0);
    }

    /// Frees memory that no sequence uses, except `kept` bytes for the next sequences.
    fn free_unused(&mut self, kept: usize) {
        let token = self.layout.token_bytes();
        let unused = |pool: &Pool| {
            let (used, rows) = pool.used_and_total_rows();
            (rows - used) * pool.capacity * token
        };
        self.pools.values_mut().for_each(|pool| pool.trim_layers_to_row_count(&self.layout));
        self.pools.retain(|_, pool| pool.used_and_total_rows().1 > 0);
        while self.pools.values().map(unused).sum::<usize>() > kept {
            let Some(pool) = self.pools.values_mut().max_by_key(|pool| unused(pool)) else { return };
            let (capacity, slots) = (pool.capacity, &mut self.slots);
            if pool.used_and_total_rows().0 == 0 {
                self.pools.remove(&capacity);
                continue;
            }
            pool.compact(&self.layout, |from, to| {
                for slot in slots.iter_mut().filter(|slot| slot.place == Some((capacity, from))) {
                    slot.place = Some((capacity, to));
                }
            });
        }
    }

    /// Allocates room for chunks. Sequences that outgrow their rows move to larger rows.
    pub fn reserve(&mut self, chunks: &[Chunk]) {
        let mut moving: BTreeMap<usize, usize> = BTreeMap::new(); // slot to capacity
        for chunk in chunks {
            let needed = chunk.past_len + chunk.len;
            let slot = &mut self.slots[chunk.slot];
            if slot.place.is_none_or(|(capacity, _)| capacity < needed) {
                let capacity = moving.entry(chunk.slot).or_default();
                *capacity = pool::row_capacity(needed).max(*capacity);
            }
        }
        let moving: Vec<(usize, usize)> = moving.into_iter().collect();
        let bytes = moving.iter().map(|(_, capacity)| capacity).sum::<usize>() * self.layout.token_bytes();
        // If all large rows moved at once, each would need its memory twice.
        let turns = if bytes > MAX_SPARE_BYTES { 4 } else { 1 };
        for some in moving.chunks(moving.len().div_ceil(turns).max(1)) {
            let mut wanted: BTreeMap<usize, usize> = BTreeMap::new(); // capacity to rows
            some.iter().for_each(|&(_, capacity)| *wanted.entry(capacity).or_default() += 1);
            for (capacity, rows) in wanted {
                let pool = self.pools.entry(capacity).or_insert_with(|| Pool::new(capacity, &self.layout));
                pool.reserve_rows(rows, self.slots.len(), &self.layout);
            }
            for &(slot, capacity) in some {
                self.move_to_pool(slot, capacity);
            }
            self.free_unused(MAX_SPARE_BYTES);
        }
        for chunk in chunks {
            let slot = &mut self.slots[chunk.slot];
            slot.written = slot.written.max(chunk.past_len + chunk.len);
        }
    }

    /// Moves a sequence to a free row of another pool.
    fn move_to_pool(&mut self, slot: usize, capacity: usize) {
        let SequenceSlot { len, written, place } = self.slots[slot];
        let Some(row) = self.pools.get_mut(&capacity).map(Pool::take_row) else { return };
        self.slots[slot].place = Some((capacity, row));
        let Some((old, from)) = place else { return };
        if let (Some(pool), Some(other)) = (self.pools.get(&old), self.pools.get(&capacity)) {
            pool.copy_to(from, other, row, len);
        }
        if let Some(pool) = self.pools.get_mut(&old) {
            pool.free_row(from, written);
        }
    }

    /// Pool capacity and row of a slot. [`KvCache::reserve`] must have given it a row.
    fn pool_and_row(&self, slot: usize) -> (usize, usize) {
        let place = self.slots[slot].place;
        debug_assert!(place.is_some(), "room was made before");
        place.unwrap_or_default()
    }

    /// Stores keys and values `[N, G, D]` of the placed rows.
    pub fn write(&mut self, layer: usize, rows: &PooledRows, k: &Tensor, v: &Tensor) {
        let [k, v] = [k, v].map(|new| reorder_rows(new, rows.order.as_ref()));
        for part in &rows.pools {
            let Some(pool) = self.pools.get(&part.capacity) else { continue };
            let place = [Some(&part.place[0]), Some(&part.place[1])];
            for (tensor, new) in pool.layer_keys_values(layer).into_iter().zip([&k, &v]) {
                let new = new.narrow(0, part.first, part.count);
                let _ = tensor.shallow_clone().index_put_(&place, &new, false);
            }
        }
    }

    /// Attention of layer `layer` over the planned rows.
    pub fn attention<'a>(&'a mut self, layer: usize, plan: &'a AttentionPlan) -> KvAttention<'a> {
        KvAttention { cache: self, layer, plan }
    }

    /// Stores the planned rows, and attends from their queries to their sequences: `[N, H·D]`.
    fn attend(&mut self, layer: usize, plan: &AttentionPlan, qkv: &Qkv) -> Tensor {
        let grouped = plan.chunk_groups(self);
        let in_place = (!grouped.few.is_empty())
            .then(|| self.attend_in_place(layer, &grouped.few, plan.visibility, qkv));
        if grouped.groups.is_empty() {
            return in_place.unwrap_or_else(|| qkv.q.flatten(1, 2));
        }
        self.write(layer, &grouped.rows, &qkv.k, &qkv.v);
        let q = reorder_rows(&qkv.q, grouped.order.as_ref());
        let (mut outputs, mut row) = (Vec::with_capacity(grouped.groups.len()), 0);
        for group in &grouped.groups {
            let q = q.narrow(0, row, group.rows);
            outputs.push(self.attend_group(layer, group, plan.visibility, &q, qkv.sinks.as_ref()));
            row += group.rows;
        }
        let y = if let [only] = outputs.as_slice() { only.shallow_clone() } else { Tensor::cat(&outputs, 0) };
        match (in_place, &grouped.order) {
            (Some(mut all), Some(order)) => all.index_copy_(0, order, &y),
            _ => reorder_rows(&y, grouped.back.as_ref()),
        }
    }

    /// Kernel arguments for these chunks in one layer.
    fn kv_chunks(&self, layer: usize, placed: &[PlacedChunk]) -> Vec<KvChunk<'_>> {
        let chunk = |placed: &PlacedChunk| {
            let pool = self.pools.get(&placed.capacity)?.layer_keys_values(layer);
            let PlacedChunk { chunk: Chunk { past_len, len, .. }, row, first, .. } = *placed;
            Some(KvChunk { pool, row, past_len, len, first })
        };
        placed.iter().filter_map(chunk).collect()
    }

    /// Attention of the short chunks `few` by the CPU kernel: `[N, H·D]`, with zeros in the rows of other
    /// chunks.
    fn attend_in_place(&self, layer: usize, few: &[PlacedChunk], visibility: MaskKind, qkv: &Qkv) -> Tensor {
        let AttentionSpec { scale, window, .. } = self.layers[layer].spec;
        let chunks = self.kv_chunks(layer, few);
        let [q, k, v] = [&qkv.q, &qkv.k, &qkv.v].map(Tensor::contiguous);
        let sees_chunk = visibility == MaskKind::Block;
        let view = KvWindow { scale, window, sees_chunk };
        in_place_attention(QkvInput::Separate([&q, &k, &v]), &chunks, view)
    }

    /// Attention of one group by SDPA: `q [S·L, H, D]` to `[S·L, H·D]`. `sinks` is `[H]`.
    fn attend_group(
        &self,
        layer: usize,
        group: &SdpaGroup,
        visibility: MaskKind,
        q: &Tensor,
        sinks: Option<&Tensor>,
    ) -> Tensor {
        let Some(pool) = self.pools.get(&group.capacity) else { return q.flatten(1, 2) };
        let CacheLayer { spec, view } = &self.layers[layer];
        reference::kv_attention(
            q,
            pool.layer_keys_values(layer),
            group,
            &group.mask_shapes[*view],
            spec,
            visibility,
            sinks,
        )
    }

    /// Adds the lengths of written chunks to the lengths of their sequences.
    pub fn commit_chunks(&mut self, chunks: &[Chunk]) {
        for chunk in chunks {
            self.slots[chunk.slot].len = chunk.past_len + chunk.len;
        }
    }
}

/// Attention of one layer over the rows of a plan, whose keys and values it stores.
pub struct KvAttention<'a> {
    cache: &'a mut KvCache,
    layer: usize,
    plan: &'a AttentionPlan,
}

impl Attend for KvAttention<'_> {
    fn attend(&mut self, qkv: &Qkv) -> Tensor {
        self.cache.attend(self.layer, self.plan, qkv)
    }

    fn as_attend_projected(&mut self) -> Option<&mut dyn AttendProjected> {
        if self.plan.in_place { Some(self) } else { None }
    }
}

impl AttendProjected for KvAttention<'_> {
    /// A GPU's kernel starts to read the cache before the previous kernel ends. Work that moves rows of the cache must be enqueued
    /// before the layers.
    fn attend_projected(&mut self, qkv: &Tensor, heads: ProjectedHeads<'_>) -> Tensor {
        let Self { cache, layer, plan } = self;
        let AttentionSpec { scale, window, .. } = cache.layers[*layer].spec;
        let view = KvWindow { scale, window, sees_chunk: plan.visibility == MaskKind::Block };
        let chunks = cache.kv_chunks(*layer, &plan.placed);
        match cache.in_place {
            InPlaceKernel::DecodeRows => decode_attention(qkv, &heads, &chunks, view),
            InPlaceKernel::ShortChunks | InPlaceKernel::Never => {
                in_place_attention(QkvInput::Fused(qkv, heads), &chunks, view)
            }
        }
    }
}

/// The rows selected by `order`; all rows unchanged without it.
fn reorder_rows(rows: &Tensor, order: Option<&Tensor>) -> Tensor {
    order.map_or_else(|| rows.shallow_clone(), |order| rows.index_select(0, order))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

    /// One layer, 8 KB per token.
    fn cache(slots: usize) -> KvCache {
        let heads = Heads { query: 8, key_value: 8, dim: 128 };
        KvCache::new(
            &[AttentionSpec { heads, scale: 0.1, window: None, sinks: false }],
            slots,
            Kind::Float,
            Device::Cpu,
        )
    }

    /// Appends tokens with these keys and values to a slot, and what their queries see.
    fn attend(cache: &mut KvCache, slot: usize, states: &Tensor) -> Tensor {
        let chunks = cache.chunks_to_append(&[(slot, states.size()[0] as usize)]);
        cache.reserve(&chunks);
        let plan = cache.plan(&chunks, MaskKind::Causal);
        let [q, k, v] = [0.1, 0.2, 0.3].map(|scale| states * scale);
        let y = cache.attention(0, &plan).attend(&Qkv { q, k, v, sinks: None });
        cache.commit_chunks(&chunks);
        y
    }

    fn states(tokens: i64) -> Tensor {
        Tensor::arange(tokens * 1024, CPU).sin().view([tokens, 8, 128])
    }

    #[test]
    fn memory_follows_what_is_held_and_is_given_back() {
        let mut used = cache(16);
        let chunk = |slot, len| Chunk { slot, past_len: 0, len };
        used.reserve(&(1..16).map(|slot| chunk(slot, 100)).collect::<Vec<_>>());
        let short = used.allocated_bytes();
        assert!(short <= 16 * used.kv_cache_bytes(100), "{short}");
        // As long as this one, all would take 2 GB.
        used.reserve(&[chunk(0, 16_000)]);
        assert_eq!(used.allocated_bytes(), short + used.kv_cache_bytes(16_000));
        used.truncate(0, 0);
        assert_eq!(used.allocated_bytes(), short);
        // The pool of what is left closes up, and its history keeps what it holds.
        let mut lone = cache(1);
        assert_eq!(attend(&mut used, 15, &states(4)), attend(&mut lone, 0, &states(4)));
        (1..15).for_each(|slot| used.truncate(slot, 0));
        assert!(used.allocated_bytes() <= short / 15 + MAX_SPARE_BYTES, "{}", used.allocated_bytes());
        assert_eq!(attend(&mut used, 15, &states(3)), attend(&mut lone, 0, &states(3)));
        used.truncate(15, 0);
        assert!(used.allocated_bytes() <= MAX_SPARE_BYTES);
    }

    #[test]
    fn rows_that_were_outgrown_are_given_back() {
        let mut growing = cache(8);
        for len in [200, 400, 700, 1000, 1500] {
            growing.reserve(&(0..8).map(|slot| Chunk { slot, past_len: 0, len }).collect::<Vec<_>>());
            let live = 8 * growing.kv_cache_bytes(len);
            assert!(
                growing.allocated_bytes() <= live + MAX_SPARE_BYTES,
                "{len} tokens: {} of {live}",
                growing.allocated_bytes()
            );
        }
    }

    #[test]
    fn a_history_that_moves_takes_its_tokens_along() {
        let all = states(1300);
        let whole = attend(&mut cache(3), 1, &all);
        let mut cache = cache(3);
        let parts: Vec<Tensor> = (0..13)
            .map(|part| {
                // Neighbours come and go beside it.
                let _ = attend(&mut cache, if part % 2 == 0 { 0 } else { 2 }, &states(90));
                if part == 7 {
                    cache.truncate(0, 0);
                }
                attend(&mut cache, 1, &all.narrow(0, part * 100, 100))
            })
            .collect();
        assert!(Tensor::cat(&parts, 0).allclose(&whole, 1e-6, 1e-6, false));
        assert_eq!(cache.len(1), 1300);
    }

    #[test]
    fn nothing_of_a_broken_history_reaches_the_next() {
        let mut cache = cache(2);
        let clean = attend(&mut cache, 0, &states(5));
        cache.truncate(0, 0);
        let _ = attend(&mut cache, 0, &(states(300) * f64::NAN));
        cache.truncate(0, 0);
        assert_eq!(attend(&mut cache, 0, &states(5)), clean);
    }
}
