//! Rows of a batch in the KV cache, and the keys that they see.

use std::cell::OnceCell;

use tch::{Kind, Tensor};

use super::calls::{AttentionCall, MaskShape};
use super::{Chunk, InPlace, KV_ALIGN, KvCache, MAX_DECODE_ROWS};

/// Most tokens of a chunk for the CPU kernel: draft blocks, accepted tokens and short prompts. SDPA would pad their keys to [`KV_ALIGN`].
/// Each thread keeps room for the scores of one key head, at most `FEW_SCORES` (4 MiB).
const FEW_TOKENS: usize = 128;
const FEW_SCORES: usize = 1 << 20;

/// Tokens of its own chunk that a token sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskKind {
    /// Itself and the tokens before it.
    Causal,
    /// The whole chunk.
    Block,
}

/// Pool row and position of every row of a batch.
pub struct Rows {
    /// Positions in the order of the batch, `[N]` int64.
    positions: Tensor,
    /// Row indices of the batch, pool after pool; None where all are in one pool.
    pub(super) order: Option<Tensor>,
    pub(super) pools: Vec<PoolRows>,
}

/// Rows of a batch that go to one pool.
pub(super) struct PoolRows {
    pub capacity: usize,
    /// The first of the ordered rows.
    pub first: i64,
    pub count: i64,
    /// Rows of the pool and positions, `[count]` each.
    pub place: [Tensor; 2],
}

/// Rows of a batch of chunks, and what their queries see. All layers share one plan.
pub struct AttentionPlan {
    /// Absolute position of every row, `[N]` int64.
    positions: Tensor,
    /// All positions are below.
    end: usize,
    /// The chunks in the order of the batch.
    pub(super) placed: Vec<Placed>,
    pub(super) visibility: MaskKind,
    /// Whether one kernel call attends to all chunks in place.
    pub(super) in_place: bool,
    /// The chunks by how they attend otherwise; computed when a layer first needs it.
    grouped: OnceCell<Grouped>,
}

/// Short chunks for the CPU kernel, and groups of the others for SDPA.
pub(super) struct Grouped {
    pub rows: Rows,
    /// Short chunks.
    pub few: Vec<Placed>,
    /// The groups' rows of the batch, one group after the other; None where that is the batch or there are none.
    pub order: Option<Tensor>,
    /// Brings ordered rows back into the order of the batch, where groups have all of them.
    pub back: Option<Tensor>,
    pub groups: Vec<Group>,
}

impl AttentionPlan {
    /// Absolute position of every row, `[N]` int64.
    pub fn positions(&self) -> &Tensor {
        &self.positions
    }

    /// One more than the largest position, where a kernel attends to all chunks in place: rotations of so few rows are slices of a
    /// table. None otherwise.
    pub fn end_in_place(&self) -> Option<usize> {
        self.in_place.then_some(self.end)
    }

    /// The chunks by how they attend in `cache`, which made the plan.
    pub(super) fn grouped(&self, cache: &KvCache) -> &Grouped {
        self.grouped.get_or_init(|| cache.grouped(self))
    }
}

/// Chunks of one length in one pool whose sequences round up to one multiple of KV_ALIGN.
pub(super) struct Group {
    pub capacity: usize,
    pub rows: i64,
    pub slots: Slots,
    /// L, the length of every chunk.
    pub width: i64,
    /// Tokens of the sequences before the chunks, `[S, 1, 1]` int64.
    pub past_len: Tensor,
    /// SDPA calls, for each mask shape of the cache.
    pub mask_shapes: Vec<Vec<AttentionCall>>,
}

/// Rows of a pool.
pub(super) enum Slots {
    Range(i64, i64),
    Picked(Tensor),
}

impl Rows {
    /// Absolute position of every row, `[N]` int64.
    pub fn positions(&self) -> &Tensor {
        &self.positions
    }
}

/// A chunk and the row of a pool that it goes to.
#[derive(Clone, Copy)]
pub(super) struct Placed {
    pub chunk: Chunk,
    pub capacity: usize,
    pub row: usize,
    /// Its first row in the batch.
    pub first: usize,
}

impl Placed {
    /// Its rows of the batch: the first and their number.
    fn rows(&self) -> (i64, i64) {
        (self.first as i64, self.chunk.len as i64)
    }

    /// Pool, width and span, which chunks of a group share.
    fn kind(&self) -> (usize, usize, usize) {
        let Chunk { past_len, len, .. } = self.chunk;
        (self.capacity, len, (past_len + len).next_multiple_of(KV_ALIGN))
    }
}

impl KvCache {
    /// Rows of these chunks, in the order of the batch. There must be room for them; see [`KvCache::reserve`].
    pub fn place(&self, chunks: &[Chunk]) -> Rows {
        let mut placed = self.placed(chunks);
        placed.sort_by_key(|placed| placed.capacity);
        let order = (!in_order(&placed)).then(|| self.order(&placed));
        let positions = self.arange.runs(chunks.iter().map(span));
        self.rows(&placed, chunks, order.as_ref(), positions)
    }

    /// Rows and masks of chunks, in the order of the batch. There must be room for them; see [`KvCache::reserve`].
    pub fn plan(&self, chunks: &[Chunk], visibility: MaskKind) -> AttentionPlan {
        AttentionPlan {
            positions: self.arange.runs(chunks.iter().map(span)),
            end: chunks.iter().map(|chunk| chunk.past_len + chunk.len).max().unwrap_or(0),
            placed: self.placed(chunks),
            visibility,
            in_place: self.all_in_place(chunks, visibility),
            grouped: OnceCell::new(),
        }
    }

    /// Whether one kernel call attends to all of these chunks in place. A CPU's kernel takes short chunks. A GPU's takes causal chunks
    /// of at most [`MAX_DECODE_ROWS`] rows in all: drafted blocks were not run with it on hardware.
    fn all_in_place(&self, chunks: &[Chunk], visibility: MaskKind) -> bool {
        let none_is_empty = !chunks.is_empty() && chunks.iter().all(|chunk| chunk.len > 0);
        let rows = || chunks.iter().map(|chunk| chunk.len).sum::<usize>();
        none_is_empty
            && match self.in_place {
                InPlace::Never => false,
                InPlace::ShortChunks => chunks.iter().all(|chunk| self.is_few(chunk)),
                InPlace::DecodeRows => visibility == MaskKind::Causal && rows() <= MAX_DECODE_ROWS,
            }
    }

    fn grouped(&self, plan: &AttentionPlan) -> Grouped {
        let (chunks, visibility) = (plan.placed.as_slice(), plan.visibility);
        let (few, mut placed): (Vec<Placed>, Vec<Placed>) =
            chunks.iter().partition(|placed| self.is_few(&placed.chunk));
        // Sorted by pool and row: adjacent rows are read without copying them.
        placed.sort_by_key(|placed| (placed.kind(), placed.row));
        let in_place = placed.is_empty() || (few.is_empty() && in_order(&placed));
        let order = (!in_place).then(|| self.order(&placed));
        let chunks: Vec<Chunk> = chunks.iter().map(|placed| placed.chunk).collect();
        Grouped {
            rows: self.rows(&placed, &chunks, order.as_ref(), plan.positions.shallow_clone()),
            back: (!in_place && few.is_empty()).then(|| self.back(&placed)),
            order,
            groups: placed
                .chunk_by(|a, b| a.kind() == b.kind())
                .map(|group| self.group(group, visibility))
                .collect(),
            few,
        }
    }

    fn group(&self, group: &[Placed], visibility: MaskKind) -> Group {
        let (capacity, width, span) = group[0].kind();
        let past_len = self.arange.pick(group.iter().map(|placed| placed.chunk.past_len)).view([-1, 1, 1]);
        let pieces = |view: &MaskShape| {
            let mut pieces = view.cut(width, span, visibility);
            if let [only] = pieces.as_mut_slice() {
                only.mask = Some(only.mask(view, &past_len, width as i64, visibility, self.kind()));
            }
            pieces
        };
        let consecutive = group.windows(2).all(|pair| pair[1].row == pair[0].row + 1);
        Group {
            capacity,
            rows: (group.len() * width) as i64,
            slots: match consecutive {
                true => Slots::Range(group[0].row as i64, group.len() as i64),
                false => Slots::Picked(self.arange.pick(group.iter().map(|placed| placed.row))),
            },
            width: width as i64,
            mask_shapes: self.mask_shapes().iter().map(pieces).collect(),
            past_len,
        }
    }

    /// Whether a chunk is short enough for the CPU kernel. The chunk alone decides that.
    fn is_few(&self, chunk: &Chunk) -> bool {
        let repeats = self.mask_shapes().iter().map(|view| view.repeats).max().unwrap_or(1);
        // The kernel pads the queries of a key to whole vectors.
        let scores = (repeats * chunk.len).next_multiple_of(16) * (chunk.past_len + chunk.len);
        self.in_place == InPlace::ShortChunks && chunk.len <= FEW_TOKENS && scores <= FEW_SCORES
    }

    fn placed(&self, chunks: &[Chunk]) -> Vec<Placed> {
        let mut first = 0;
        let placed = |&chunk: &Chunk| {
            let (capacity, row) = self.row_of(chunk.slot);
            first += chunk.len;
            Placed { chunk, capacity, row, first: first - chunk.len }
        };
        chunks.iter().map(placed).collect()
    }

    /// Row indices that bring the batch into the order of `placed`.
    fn order(&self, placed: &[Placed]) -> Tensor {
        self.arange.runs(placed.iter().map(Placed::rows))
    }

    /// Row indices that bring rows in the order of `placed` back into the order of the batch.
    fn back(&self, placed: &[Placed]) -> Tensor {
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
        self.arange.runs(places.into_iter().map(|(_, place)| place))
    }

    /// Rows of chunks that are sorted by pool; `order` brings the batch into that order. Rows that all go to one pool keep theirs.
    fn rows(&self, placed: &[Placed], batch: &[Chunk], order: Option<&Tensor>, positions: Tensor) -> Rows {
        let mut first = 0;
        let mut pool = |placed: &[&Placed]| {
            let count = placed.iter().map(|placed| placed.chunk.len as i64).sum::<i64>();
            let rows = self.arange.repeated(placed.iter().map(|placed| (placed.row, placed.chunk.len)));
            first += count;
            let place = [rows, self.arange.runs(placed.iter().map(|placed| span(&placed.chunk)))];
            PoolRows { capacity: placed[0].capacity, first: first - count, count, place }
        };
        let mut all: Vec<&Placed> = placed.iter().collect();
        if placed.len() == batch.len() && placed.iter().all(|other| other.capacity == placed[0].capacity) {
            all.sort_by_key(|placed| placed.first);
            let only = pool(&all);
            return Rows { positions, order: None, pools: vec![only] };
        }
        Rows {
            positions,
            order: order.map(Tensor::shallow_clone),
            pools: all.chunk_by(|a, b| a.capacity == b.capacity).map(pool).collect(),
        }
    }
}

/// First position of a chunk, and its number of tokens.
fn span(chunk: &Chunk) -> (i64, i64) {
    (chunk.past_len as i64, chunk.len as i64)
}

fn in_order(placed: &[Placed]) -> bool {
    placed.is_sorted_by_key(|placed| placed.first)
}

impl Group {
    pub(super) fn mask(
        &self,
        piece: &AttentionCall,
        view: &MaskShape,
        visibility: MaskKind,
        kind: Kind,
    ) -> Tensor {
        match &piece.mask {
            Some(mask) => mask.shallow_clone(),
            None => piece.mask(view, &self.past_len, self.width, visibility, kind),
        }
    }
}
