//! Plans where the rows of a batch are in the KV cache, and which keys each query sees.

use std::cell::OnceCell;

use tch::{Kind, Tensor};

use super::calls::{MaskShape, SdpaSlice};
use super::{Chunk, InPlaceKernel, KV_ALIGN, KvCache, MAX_DECODE_ROWS};

/// Maximum tokens of a chunk for the CPU kernel: draft blocks, accepted tokens and short prompts. SDPA would pad
/// their keys to [`KV_ALIGN`]. Each thread keeps room for the scores of one key head, at most
/// `MAX_SHORT_CHUNK_SCORES` (4 MiB).
const MAX_SHORT_CHUNK_TOKENS: usize = 128;
const MAX_SHORT_CHUNK_SCORES: usize = 1 << 20;

/// Which tokens of a chunk a token of the same chunk attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskKind {
    /// Itself and the tokens before it.
    Causal,
    /// The whole chunk.
    Block,
}

/// Pool row and position of every row of a batch.
pub struct PooledRows {
    /// Positions in the order of the batch, `[N]` int64.
    positions: Tensor,
    /// Indices that sort the rows of the batch by pool; None if all rows are in one pool.
    pub(super) order: Option<Tensor>,
    pub(super) pools: Vec<PoolSegment>,
}

/// Rows of a batch that go to one pool.
pub(super) struct PoolSegment {
    pub capacity: usize,
    /// Index of the segment's first row, after sorting by `PooledRows::order`.
    pub first: i64,
    pub count: i64,
    /// Rows of the pool and positions, `[count]` each.
    pub place: [Tensor; 2],
}

/// Rows of a batch of chunks, and what their queries see. All layers share one plan.
pub struct AttentionPlan {
    /// Absolute position of every row, `[N]` int64.
    pub(super) positions: Tensor,
    /// One more than the largest position.
    pub(super) end: usize,
    /// The chunks in the order of the batch.
    pub(super) placed: Vec<PlacedChunk>,
    pub(super) visibility: MaskKind,
    /// Whether one kernel call attends to all chunks in place.
    pub(super) in_place: bool,
    /// The chunks grouped by the way in which they attend if `in_place` is false. Computed when a layer first needs
    /// them.
    pub(super) grouped: OnceCell<ChunkGroups>,
}

/// Short chunks for the CPU kernel, and groups of longer chunks for SDPA.
pub(super) struct ChunkGroups {
    pub rows: PooledRows,
    /// Short chunks.
    pub few: Vec<PlacedChunk>,
    /// Indices that gather the groups' rows, group after group. None if that is the order of the batch, or if
    /// there are no groups.
    pub order: Option<Tensor>,
    /// Indices that restore the order of the batch. None if there are short chunks, or if nothing was reordered.
    pub back: Option<Tensor>,
    pub groups: Vec<SdpaGroup>,
}

impl AttentionPlan {
    /// Absolute position of every row, `[N]` int64.
    pub fn positions(&self) -> &Tensor {
        &self.positions
    }

    /// One more than the largest position, if a kernel attends to all chunks in place; None otherwise. Rotations
    /// of so few rows come from a table by `index_select`.
    pub fn in_place_position_end(&self) -> Option<usize> {
        self.in_place.then_some(self.end)
    }

    /// The chunks grouped by how `cache` computes their attention. `cache` must be the cache that made the plan.
    pub(super) fn chunk_groups(&self, cache: &KvCache) -> &ChunkGroups {
        self.grouped.get_or_init(|| cache.group_chunks(self))
    }
}

/// Chunks that share SDPA calls. They have one length and one pool, and their sequence lengths round up to one
/// multiple of `KV_ALIGN`.
pub(super) struct SdpaGroup {
    pub capacity: usize,
    pub rows: i64,
    pub slots: PoolRowSelection,
    /// L, the length of every chunk.
    pub width: i64,
    /// Tokens of the sequences before the chunks, `[S, 1, 1]` int64.
    pub past_len: Tensor,
    /// SDPA calls, for each mask shape of the cache.
    pub mask_shapes: Vec<Vec<SdpaSlice>>,
}

/// Selected rows of a pool: a range (first, count), or a tensor of row indices.
pub(super) enum PoolRowSelection {
    Range(i64, i64),
    Indices(Tensor),
}

impl PooledRows {
    /// Absolute position of every row, `[N]` int64.
    pub fn positions(&self) -> &Tensor {
        &self.positions
    }
}

/// A chunk, and its row in a pool.
#[derive(Clone, Copy)]
pub(super) struct PlacedChunk {
    pub chunk: Chunk,
    pub capacity: usize,
    pub row: usize,
    /// Index of the chunk's first row in the batch.
    pub first: usize,
}

impl PlacedChunk {
    /// The chunk's rows in the batch, as (first row, number of rows).
    fn batch_row_run(&self) -> (i64, i64) {
        (self.first as i64, self.chunk.len as i64)
    }

    /// Pool capacity, chunk length and rounded sequence length. They are equal for all chunks of a group.
    fn group_key(&self) -> (usize, usize, usize) {
        let Chunk { past_len, len, .. } = self.chunk;
        (self.capacity, len, (past_len + len).next_multiple_of(KV_ALIGN))
    }
}

impl KvCache {
    /// Pool rows and positions to write these chunks to, in the order of the batch. Call [`KvCache::reserve`]
    /// first.
    pub fn plan_write(&self, chunks: &[Chunk]) -> PooledRows {
        let mut placed = self.locate_chunks(chunks);
        placed.sort_by_key(|placed| placed.capacity);
        let order = (!is_in_batch_order(&placed)).then(|| self.gather_indices(&placed));
        let positions = self.arange.cat_runs(chunks.iter().map(position_range));
        self.group_rows_by_pool(&placed, chunks, order.as_ref(), positions)
    }

    /// Plans the attention of these chunks, in the order of the batch. Call [`KvCache::reserve`] first.
    pub fn plan(&self, chunks: &[Chunk], visibility: MaskKind) -> AttentionPlan {
        AttentionPlan {
            positions: self.arange.cat_runs(chunks.iter().map(position_range)),
            end: chunks.iter().map(|chunk| chunk.past_len + chunk.len).max().unwrap_or(0),
            placed: self.locate_chunks(chunks),
            visibility,
            in_place: self.can_attend_in_place(chunks, visibility),
            grouped: OnceCell::new(),
        }
    }

    /// Whether one kernel call attends to all of these chunks in place. The CPU kernel takes short chunks. The
    /// GPU kernel takes causal chunks of at most [`MAX_DECODE_ROWS`] rows in total; it was not tested on
    /// hardware with draft blocks.
    fn can_attend_in_place(&self, chunks: &[Chunk], visibility: MaskKind) -> bool {
        let none_is_empty = !chunks.is_empty() && chunks.iter().all(|chunk| chunk.len > 0);
        let rows = || chunks.iter().map(|chunk| chunk.len).sum::<usize>();
        none_is_empty
            && match self.in_place {
                InPlaceKernel::Never => false,
                InPlaceKernel::ShortChunks => chunks.iter().all(|chunk| self.is_short_chunk(chunk)),
                InPlaceKernel::DecodeRows => visibility == MaskKind::Causal && rows() <= MAX_DECODE_ROWS,
            }
    }

    fn group_chunks(&self, plan: &AttentionPlan) -> ChunkGroups {
        let (chunks, visibility) = (plan.placed.as_slice(), plan.visibility);
        let (few, mut placed): (Vec<PlacedChunk>, Vec<PlacedChunk>) =
            chunks.iter().partition(|placed| self.is_short_chunk(&placed.chunk));
        // Sorted by pool and row, so that adjacent rows are read without a copy.
        placed.sort_by_key(|placed| (placed.group_key(), placed.row));
        let in_place = placed.is_empty() || (few.is_empty() && is_in_batch_order(&placed));
        let order = (!in_place).then(|| self.gather_indices(&placed));
        let chunks: Vec<Chunk> = chunks.iter().map(|placed| placed.chunk).collect();
        ChunkGroups {
            rows: self.group_rows_by_pool(&placed, &chunks, order.as_ref(), plan.positions.shallow_clone()),
            back: (!in_place && few.is_empty()).then(|| self.batch_order_indices(&placed)),
            order,
            groups: placed
                .chunk_by(|a, b| a.group_key() == b.group_key())
                .map(|group| self.build_group(group, visibility))
                .collect(),
            few,
        }
    }

    fn build_group(&self, group: &[PlacedChunk], visibility: MaskKind) -> SdpaGroup {
        let (capacity, width, span) = group[0].group_key();
        let past_len =
            self.arange.int_tensor(group.iter().map(|placed| placed.chunk.past_len)).view([-1, 1, 1]);
        let pieces = |view: &MaskShape| {
            let mut pieces = view.split_into_calls(width, span, visibility);
            if let [only] = pieces.as_mut_slice() {
                only.mask = Some(only.build_mask(view, &past_len, width as i64, visibility, self.kind()));
            }
            pieces
        };
        let consecutive = group.windows(2).all(|pair| pair[1].row == pair[0].row + 1);
        SdpaGroup {
            capacity,
            rows: (group.len() * width) as i64,
            slots: match consecutive {
                true => PoolRowSelection::Range(group[0].row as i64, group.len() as i64),
                false => {
                    PoolRowSelection::Indices(self.arange.int_tensor(group.iter().map(|placed| placed.row)))
                }
            },
            width: width as i64,
            mask_shapes: self.mask_shapes().iter().map(pieces).collect(),
            past_len,
        }
    }

    /// Whether a chunk is short enough for the CPU kernel. This depends on the chunk alone, not on its batch.
    fn is_short_chunk(&self, chunk: &Chunk) -> bool {
        let repeats = self.mask_shapes().iter().map(|view| view.repeats).max().unwrap_or(1);
        // The kernel pads the queries of a key to whole vectors.
        let scores = (repeats * chunk.len).next_multiple_of(16) * (chunk.past_len + chunk.len);
        self.in_place == InPlaceKernel::ShortChunks
            && chunk.len <= MAX_SHORT_CHUNK_TOKENS
            && scores <= MAX_SHORT_CHUNK_SCORES
    }

    /// Finds each chunk's pool row, and its first row in the batch.
    pub(super) fn locate_chunks(&self, chunks: &[Chunk]) -> Vec<PlacedChunk> {
        let mut first = 0;
        let placed = |&chunk: &Chunk| {
            let (capacity, row) = self.pool_and_row(chunk.slot);
            first += chunk.len;
            PlacedChunk { chunk, capacity, row, first: first - chunk.len }
        };
        chunks.iter().map(placed).collect()
    }

    /// Row indices that bring the batch into the order of `placed`.
    fn gather_indices(&self, placed: &[PlacedChunk]) -> Tensor {
        self.arange.cat_runs(placed.iter().map(PlacedChunk::batch_row_run))
    }

    /// Row indices that bring rows in the order of `placed` back into the order of the batch.
    fn batch_order_indices(&self, placed: &[PlacedChunk]) -> Tensor {
        let mut ends = 0;
        let mut places: Vec<(usize, (i64, i64))> = placed
            .iter()
            .map(|placed| {
                let len = placed.chunk.len as i64;
                ends += len;
                (placed.first, (ends - len, len))
            })
            .collect();
        places.sort_unstable();
        self.arange.cat_runs(places.into_iter().map(|(_, place)| place))
    }

    /// Groups the rows of `placed` by pool. `placed` is sorted by pool, and `order` holds the row indices that sort the
    /// batch by pool. If all rows go to one pool, they stay in the order of the batch.
    fn group_rows_by_pool(
        &self,
        placed: &[PlacedChunk],
        batch: &[Chunk],
        order: Option<&Tensor>,
        positions: Tensor,
    ) -> PooledRows {
        let mut first = 0;
        let mut pool = |placed: &[&PlacedChunk]| {
            let count = placed.iter().map(|placed| placed.chunk.len as i64).sum::<i64>();
            let rows = self.arange.repeat_each(placed.iter().map(|placed| (placed.row, placed.chunk.len)));
            first += count;
            let place =
                [rows, self.arange.cat_runs(placed.iter().map(|placed| position_range(&placed.chunk)))];
            PoolSegment { capacity: placed[0].capacity, first: first - count, count, place }
        };
        let mut all: Vec<&PlacedChunk> = placed.iter().collect();
        if placed.len() == batch.len() && placed.iter().all(|other| other.capacity == placed[0].capacity) {
            all.sort_by_key(|placed| placed.first);
            let only = pool(&all);
            return PooledRows { positions, order: None, pools: vec![only] };
        }
        PooledRows {
            positions,
            order: order.map(Tensor::shallow_clone),
            pools: all.chunk_by(|a, b| a.capacity == b.capacity).map(pool).collect(),
        }
    }
}

/// First position of a chunk, and its number of tokens.
fn position_range(chunk: &Chunk) -> (i64, i64) {
    (chunk.past_len as i64, chunk.len as i64)
}

fn is_in_batch_order(placed: &[PlacedChunk]) -> bool {
    placed.is_sorted_by_key(|placed| placed.first)
}

impl SdpaGroup {
    pub(super) fn call_mask(
        &self,
        piece: &SdpaSlice,
        view: &MaskShape,
        visibility: MaskKind,
        kind: Kind,
    ) -> Tensor {
        match &piece.mask {
            Some(mask) => mask.shallow_clone(),
            None => piece.build_mask(view, &self.past_len, self.width, visibility, kind),
        }
    }
}
