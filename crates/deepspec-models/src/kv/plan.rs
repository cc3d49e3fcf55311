//! Where the rows of a feed go and what they see.

use deepspec_decode::{Part, Upload, Uploaded};
use tch::{Kind, Tensor};

use super::calls::{AttentionCall, MaskShape};
use super::{Chunk, KvCache, SPAN};

/// Tokens of a chunk that attends by itself on the CPU: blocks and what was accepted of them, not prompts. The scores of those query heads that
/// share keys, which each thread keeps room for (4 MiB), are no more than this.
const FEW_TOKENS: usize = 32;
const FEW_SCORES: usize = 1 << 20;

/// What a fed token sees of its own chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskKind {
    /// Itself and what came before.
    Causal,
    /// The whole chunk.
    Block,
}

/// Row and position of every row of a feed in the pools.
pub struct Rows {
    /// Positions in the order of the feed, `[N]` int64.
    positions: Tensor,
    /// The feed's rows pool after pool; None where all are in one.
    pub(super) order: Option<Tensor>,
    pub(super) pools: Vec<PoolRows>,
}

/// The rows of a feed that one pool takes.
pub(super) struct PoolRows {
    pub capacity: usize,
    /// Of the ordered rows.
    pub first: i64,
    pub count: i64,
    /// Row of the pool and position within it, `[count]` each.
    pub place: [Tensor; 2],
}

/// The same for an attention; the same for all layers.
pub struct BatchPlan {
    pub(super) rows: Rows,
    /// Chunks that attend one by one where they lie; the others are in groups.
    pub(super) few: Vec<Placed>,
    /// The groups' rows of the feed, one group after the other; None where that is the feed or there are none.
    pub(super) order: Option<Tensor>,
    /// Brings ordered rows back into the order of the feed, where groups have all of them.
    pub(super) back: Option<Tensor>,
    pub(super) groups: Vec<Group>,
    pub(super) visibility: MaskKind,
}

/// Chunks of one length in one pool whose histories need the same span.
pub(super) struct Group {
    pub capacity: usize,
    pub rows: i64,
    pub slots: Slots,
    /// L, the length of every chunk.
    pub width: i64,
    /// Tokens that the slots held before, `[S, 1, 1]` int64.
    pub past_len: Tensor,
    /// The calls that make up the attention, for each of the cache's views.
    pub views: Vec<Vec<AttentionCall>>,
}

/// Rows of a pool.
pub(super) enum Slots {
    Range(i64, i64),
    Picked(Tensor),
}

/// [`Rows`] whose numbers are on their way.
pub struct RowsSketch {
    positions: Part,
    order: Option<Part>,
    pools: Vec<(usize, i64, i64, Part, Part)>,
}

/// [`BatchPlan`] whose numbers are on their way.
pub struct PendingPlan {
    rows: RowsSketch,
    few: Vec<Placed>,
    order: Option<(Part, Option<Part>)>,
    groups: Vec<GroupSketch>,
    visibility: MaskKind,
}

struct GroupSketch {
    capacity: usize,
    chunks: usize,
    first: i64,
    /// Rows of the pool, where they are not consecutive.
    picked: Option<Part>,
    width: usize,
    span: usize,
    past_len: Part,
}

impl Rows {
    /// Absolute position of every row, `[N]` int64.
    pub fn positions(&self) -> &Tensor {
        &self.positions
    }
}

impl BatchPlan {
    /// Absolute position of every row, `[N]` int64.
    pub fn positions(&self) -> &Tensor {
        &self.rows.positions
    }
}

impl RowsSketch {
    /// The rows, now that the numbers are there.
    pub fn on(&self, sent: &Uploaded) -> Rows {
        let pool = |&(capacity, first, count, rows, positions): &(usize, i64, i64, Part, Part)| PoolRows {
            capacity,
            first,
            count,
            place: [sent.of(rows), sent.of(positions)],
        };
        Rows {
            positions: sent.of(self.positions),
            order: self.order.map(|order| sent.of(order)),
            pools: self.pools.iter().map(pool).collect(),
        }
    }
}

/// A chunk and the row of a pool that it goes to.
#[derive(Clone, Copy)]
pub(super) struct Placed {
    pub chunk: Chunk,
    pub capacity: usize,
    pub row: usize,
    /// Its first row in the feed.
    pub first: usize,
}

impl Placed {
    fn rows(&self) -> impl Iterator<Item = i64> {
        (self.first..self.first + self.chunk.len).map(|row| row as i64)
    }

    fn positions(&self) -> impl Iterator<Item = i64> {
        (self.chunk.past_len..self.chunk.past_len + self.chunk.len).map(|position| position as i64)
    }

    /// Pool, width and span: what chunks of a group have in common.
    fn kind(&self) -> (usize, usize, usize) {
        let Chunk { past_len, len, .. } = self.chunk;
        (self.capacity, len, (past_len + len).next_multiple_of(SPAN))
    }
}

impl KvCache {
    /// Where these chunks go, in the order of the feed. There must be room for them; see [`KvCache::reserve`].
    pub fn place(&self, chunks: &[Chunk], upload: &mut Upload<i64>) -> RowsSketch {
        let mut placed = self.placed(chunks);
        placed.sort_by_key(|placed| placed.capacity);
        let order = (!in_order(&placed)).then(|| upload.push(placed.iter().flat_map(Placed::rows)));
        rows_sketch(&placed, chunks, order, upload)
    }

    /// [`KvCache::place`] and what the chunks' queries see.
    pub fn plan(&self, chunks: &[Chunk], visibility: MaskKind, upload: &mut Upload<i64>) -> PendingPlan {
        let (few, mut placed): (Vec<Placed>, Vec<Placed>) =
            self.placed(chunks).into_iter().partition(|placed| self.is_few(&placed.chunk));
        // Pool after pool, and in a group row after row: rows that lie side by side are read without copying them.
        placed.sort_by_key(|placed| (placed.kind(), placed.row));
        let in_place = placed.is_empty() || (few.is_empty() && in_order(&placed));
        let order = (!in_place).then(|| {
            let order: Vec<i64> = placed.iter().flat_map(Placed::rows).collect();
            let back = few.is_empty().then(|| {
                let mut back = vec![0; order.len()];
                for (place, &row) in order.iter().enumerate() {
                    back[row as usize] = place as i64;
                }
                upload.push(back)
            });
            (upload.push(order), back)
        });
        let rows = rows_sketch(&placed, chunks, order.map(|(order, _)| order), upload);
        let group = |group: &[Placed]| {
            let (capacity, width, span) = group[0].kind();
            let consecutive = group.windows(2).all(|pair| pair[1].row == pair[0].row + 1);
            let rows = group.iter().map(|placed| placed.row as i64);
            GroupSketch {
                capacity,
                chunks: group.len(),
                first: group[0].row as i64,
                picked: (!consecutive).then(|| upload.push(rows)),
                width,
                span,
                past_len: upload.push(group.iter().map(|placed| placed.chunk.past_len as i64)),
            }
        };
        let groups = placed.chunk_by(|a, b| a.kind() == b.kind()).map(group).collect();
        PendingPlan { rows, few, order, groups, visibility }
    }

    /// Whether a chunk attends by itself. That follows from the chunk alone.
    fn is_few(&self, chunk: &Chunk) -> bool {
        let repeats = self.views().iter().map(|view| view.repeats).max().unwrap_or(1);
        let scores = repeats * chunk.len * (chunk.past_len + chunk.len);
        self.attends_in_place() && chunk.len <= FEW_TOKENS && scores <= FEW_SCORES
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

    /// The plan, now that the numbers are there.
    pub fn ready(&self, sketch: &PendingPlan, sent: &Uploaded) -> BatchPlan {
        let (kind, visibility) = (self.kind(), sketch.visibility);
        let group = |group: &GroupSketch| {
            let past_len = sent.of(group.past_len).view([-1, 1, 1]);
            let pieces = |view: &MaskShape| {
                let mut pieces = view.cut(group.width, group.span, visibility);
                if let [only] = pieces.as_mut_slice() {
                    only.mask = Some(only.mask(view, &past_len, group.width as i64, visibility, kind));
                }
                pieces
            };
            Group {
                capacity: group.capacity,
                rows: (group.chunks * group.width) as i64,
                slots: match group.picked {
                    None => Slots::Range(group.first, group.chunks as i64),
                    Some(rows) => Slots::Picked(sent.of(rows)),
                },
                width: group.width as i64,
                views: self.views().iter().map(pieces).collect(),
                past_len,
            }
        };
        BatchPlan {
            rows: sketch.rows.on(sent),
            few: sketch.few.clone(),
            order: sketch.order.map(|(order, _)| sent.of(order)),
            back: sketch.order.and_then(|(_, back)| back).map(|back| sent.of(back)),
            groups: sketch.groups.iter().map(group).collect(),
            visibility,
        }
    }
}

fn in_order(placed: &[Placed]) -> bool {
    placed.is_sorted_by_key(|placed| placed.first)
}

/// The rows of chunks that are ordered by pool, and `order`, what brings the feed into that order. All of one pool are written
/// as they come.
fn rows_sketch(
    placed: &[Placed],
    feed: &[Chunk],
    order: Option<Part>,
    upload: &mut Upload<i64>,
) -> RowsSketch {
    let mut first = 0;
    let mut pool = |placed: &[&Placed]| {
        let rows = placed.iter().flat_map(|placed| std::iter::repeat_n(placed.row as i64, placed.chunk.len));
        let rows = upload.push(rows);
        let positions = upload.push(placed.iter().flat_map(|placed| placed.positions()));
        let count = placed.iter().map(|placed| placed.chunk.len as i64).sum::<i64>();
        first += count;
        (placed[0].capacity, first - count, count, rows, positions)
    };
    let mut all: Vec<&Placed> = placed.iter().collect();
    if placed.len() == feed.len() && placed.iter().all(|other| other.capacity == placed[0].capacity) {
        all.sort_by_key(|placed| placed.first);
        let only = pool(&all);
        return RowsSketch { positions: only.4, order: None, pools: vec![only] };
    }
    let pools = all.chunk_by(|a, b| a.capacity == b.capacity).map(pool).collect();
    let positions =
        feed.iter().flat_map(|chunk| (chunk.past_len..chunk.past_len + chunk.len).map(|p| p as i64));
    RowsSketch { positions: upload.push(positions), order, pools }
}

/// What a piece's mask takes from its group.
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
