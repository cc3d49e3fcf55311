//! Key/value histories of many slots, and attention of ragged batches over them.

use tch::{Device, Kind, Tensor};

use crate::nn::{Heads, Qkv};

/// Chunks up to this length share one padded attention call; longer ones (prompts) each get their own.
const SHORT_CHUNK: usize = 32;
/// Histories grow in powers of two from this many tokens.
const FIRST_CAPACITY: usize = 128;

/// What a fed token sees of its own chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Visibility {
    /// Itself and what came before.
    Causal,
    /// The whole chunk.
    Block,
}

/// Keys and values `[slots, capacity, G, D]` per layer, filled from the left.
pub struct KvCache {
    layers: Vec<(Tensor, Tensor)>,
    lens: Vec<usize>,
    capacity: usize,
    heads: Heads,
    options: (Kind, Device),
}

/// Where the rows of a feed go and what they see; the same for all layers.
pub struct Ragged {
    rows: Rows,
    groups: Vec<Group>,
}

/// Slot and position of every row of a feed, `[N]` int64 each.
pub struct Rows {
    slots: Tensor,
    positions: Tensor,
}

/// Chunks that attend together, padded to a common length.
struct Group {
    first_row: i64,
    rows: i64,
    slots: Slots,
    /// L, the longest chunk.
    width: i64,
    /// Row of each of the S·L cells, and cell of each row; None where no chunk needs padding.
    padding: Option<(Tensor, Tensor)>,
    /// T, the longest history.
    span: i64,
    /// 0 where visible, −∞ elsewhere: `[S, 1, repeats·L, T]`; None where all is visible.
    mask: Option<Tensor>,
}

enum Slots {
    Range(i64, i64),
    Picked(Tensor),
}

impl Ragged {
    /// Absolute position of every row, `[N]` int64.
    pub fn positions(&self) -> &Tensor {
        &self.rows.positions
    }
}

impl Rows {
    /// Absolute position of every row, `[N]` int64.
    pub fn positions(&self) -> &Tensor {
        &self.positions
    }
}

impl KvCache {
    /// Empty histories.
    pub fn new(layers: usize, slots: usize, heads: Heads, kind: Kind, device: Device) -> Self {
        let empty = || Tensor::zeros([slots as i64, 0, heads.key_value, heads.dim], (kind, device));
        let layers = (0..layers).map(|_| (empty(), empty())).collect();
        Self { layers, lens: vec![0; slots], capacity: 0, heads, options: (kind, device) }
    }

    /// Forgets everything of `slot` past `len`.
    pub fn truncate(&mut self, slot: usize, len: usize) {
        self.lens[slot] = self.lens[slot].min(len);
    }

    /// Places for chunks `(slot, tokens)`, one token or more each, behind their slots' histories.
    pub fn place(&mut self, chunks: &[(usize, usize)]) -> Rows {
        let needed = chunks.iter().map(|&(slot, len)| self.lens[slot] + len).max().unwrap_or(0);
        self.reserve(needed);
        let (mut slots, mut positions) = (vec![], vec![]);
        for &(slot, len) in chunks {
            slots.extend(std::iter::repeat_n(slot as i64, len));
            positions.extend((self.lens[slot]..self.lens[slot] + len).map(|p| p as i64));
        }
        let device = self.options.1;
        Rows {
            slots: Tensor::from_slice(&slots).to_device(device),
            positions: Tensor::from_slice(&positions).to_device(device),
        }
    }

    /// [`KvCache::place`]s chunks and works out what their queries see.
    pub fn plan(&mut self, chunks: &[(usize, usize)], visibility: Visibility) -> Ragged {
        let rows = self.place(chunks);
        let mut groups = vec![];
        let (mut row, mut start) = (0, 0);
        while start < chunks.len() {
            let short = chunks[start..].iter().take_while(|(_, len)| *len <= SHORT_CHUNK).count();
            let taken = short.max(1);
            groups.push(self.group(&chunks[start..start + taken], row, visibility));
            row += chunks[start..start + taken].iter().map(|&(_, len)| len as i64).sum::<i64>();
            start += taken;
        }
        Ragged { rows, groups }
    }

    fn group(&self, chunks: &[(usize, usize)], first_row: i64, visibility: Visibility) -> Group {
        let device = self.options.1;
        let width = chunks.iter().map(|&(_, len)| len).max().unwrap_or(0);
        let span = chunks.iter().map(|&(slot, len)| self.lens[slot] + len).max().unwrap_or(0);
        let consecutive = chunks.windows(2).all(|pair| pair[1].0 == pair[0].0 + 1);
        let slots = if consecutive {
            Slots::Range(chunks[0].0 as i64, chunks.len() as i64)
        } else {
            Slots::Picked(
                Tensor::from_slice(&chunks.iter().map(|&(slot, _)| slot as i64).collect::<Vec<_>>())
                    .to_device(device),
            )
        };
        let padding = chunks.iter().any(|&(_, len)| len != width).then(|| {
            let (mut row_of_cell, mut cell_of_row, mut row) = (vec![], vec![], 0);
            for (s, &(_, len)) in chunks.iter().enumerate() {
                row_of_cell.extend((0..width).map(|i| (row + i.min(len - 1)) as i64));
                cell_of_row.extend((0..len).map(|i| (s * width + i) as i64));
                row += len;
            }
            (
                Tensor::from_slice(&row_of_cell).to_device(device),
                Tensor::from_slice(&cell_of_row).to_device(device),
            )
        });
        // The last position that each cell sees; a padding cell repeats the chunk's last row.
        let last_seen: Vec<i64> = chunks
            .iter()
            .flat_map(|&(slot, len)| {
                let held = self.lens[slot];
                (0..width).map(move |i| match visibility {
                    Visibility::Causal => (held + i.min(len - 1)) as i64,
                    Visibility::Block => (held + len - 1) as i64,
                })
            })
            .collect();
        let all_visible = last_seen.iter().all(|&last| last + 1 == span as i64);
        let mask = (!all_visible).then(|| {
            let last_seen =
                Tensor::from_slice(&last_seen).view([chunks.len() as i64, width as i64, 1]).to_device(device);
            let hidden = Tensor::arange(span as i64, (Kind::Int64, device)).gt_tensor(&last_seen); // [S, L, T]
            let mask = hidden.zeros_like().to_kind(self.options.0).masked_fill(&hidden, f64::NEG_INFINITY);
            mask.repeat([1, self.heads.repeats(), 1]).unsqueeze(1)
        });
        let rows = chunks.iter().map(|&(_, len)| len as i64).sum();
        Group { first_row, rows, slots, width: width as i64, padding, span: span as i64, mask }
    }

    /// Stores keys and values `[N, G, D]` of the placed rows.
    pub fn write(&mut self, layer: usize, rows: &Rows, k: &Tensor, v: &Tensor) {
        let place = [Some(&rows.slots), Some(&rows.positions)];
        let (keys, values) = &mut self.layers[layer];
        let _ = keys.index_put_(&place, k, false);
        let _ = values.index_put_(&place, v, false);
    }

    /// Stores the planned rows and lets their queries attend to their slots' histories: `[N, H·D]`.
    pub fn attend(&mut self, layer: usize, plan: &Ragged, qkv: &Qkv) -> Tensor {
        self.write(layer, &plan.rows, &qkv.k, &qkv.v);
        let outputs: Vec<Tensor> =
            plan.groups.iter().map(|group| self.attend_group(layer, group, &qkv.q)).collect();
        if let [only] = outputs.as_slice() { only.shallow_clone() } else { Tensor::cat(&outputs, 0) }
    }

    fn attend_group(&self, layer: usize, group: &Group, q: &Tensor) -> Tensor {
        let Heads { query, key_value, dim } = self.heads;
        let (repeats, width) = (self.heads.repeats(), group.width);
        let rows = q.narrow(0, group.first_row, group.rows);
        let cells = group
            .padding
            .as_ref()
            .map_or_else(|| rows.shallow_clone(), |(row_of_cell, _)| rows.index_select(0, row_of_cell));
        // The query heads that share keys become further queries: [S, G, repeats·L, D].
        let q = cells.view([-1, width, key_value, repeats, dim]).permute([0, 2, 3, 1, 4]).reshape([
            -1,
            key_value,
            repeats * width,
            dim,
        ]);
        let history = |tensor: &Tensor| match &group.slots {
            Slots::Range(first, count) => {
                tensor.narrow(0, *first, *count).narrow(1, 0, group.span).transpose(1, 2)
            }
            Slots::Picked(slots) => tensor.narrow(1, 0, group.span).index_select(0, slots).transpose(1, 2),
        };
        let (keys, values) = &self.layers[layer];
        let y = Tensor::scaled_dot_product_attention(
            &q,
            &history(keys),
            &history(values),
            group.mask.as_ref(),
            0.0,
            false,
            self.heads.scale(),
            false,
        );
        let y =
            y.view([-1, key_value, repeats, width, dim]).permute([0, 3, 1, 2, 4]).reshape([-1, query * dim]);
        group
            .padding
            .as_ref()
            .map_or_else(|| y.shallow_clone(), |(_, cell_of_row)| y.index_select(0, cell_of_row))
    }

    /// Keeps the chunks that were written: their slots' histories grow.
    pub fn advance(&mut self, chunks: &[(usize, usize)]) {
        for &(slot, len) in chunks {
            self.lens[slot] += len;
        }
    }

    fn reserve(&mut self, needed: usize) {
        if needed <= self.capacity {
            return;
        }
        let capacity = needed.next_power_of_two().max(FIRST_CAPACITY);
        let added =
            [self.lens.len() as i64, (capacity - self.capacity) as i64, self.heads.key_value, self.heads.dim];
        for (keys, values) in &mut self.layers {
            for tensor in [keys, values] {
                *tensor = Tensor::cat(&[tensor.shallow_clone(), Tensor::zeros(added, self.options)], 1);
            }
        }
        self.capacity = capacity;
    }
}
