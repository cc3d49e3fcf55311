//! Key/value histories of many slots, and attention of ragged batches over them.

use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor};

use crate::nn::{Heads, Qkv};

/// Attention reads histories in whole multiples of this many tokens.
///
/// The sums of an attention depend, in the last bits, on how many keys it is handed. So that a sequence's states do not
/// depend on the sequences it rides with, that number follows from its own length alone, and only chunks that agree in it
/// share a call.
const SPAN: usize = 256;

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
    /// Row order of the groups one after the other, and the way back; None where it is the feed's own.
    reorder: Option<(Tensor, Tensor)>,
    groups: Vec<Group>,
}

/// Slot and position of every row of a feed, `[N]` int64 each.
pub struct Rows {
    slots: Tensor,
    positions: Tensor,
}

/// Chunks of one length whose histories need the same span.
struct Group {
    rows: i64,
    slots: Slots,
    /// L, the length of every chunk.
    width: i64,
    /// T, keys handed to the attention.
    span: i64,
    /// 0 where visible, −∞ elsewhere: `[S, 1, repeats·L, T]`.
    mask: Tensor,
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
        let mut members: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
        for (i, &(slot, len)) in chunks.iter().enumerate() {
            members.entry((len, (self.lens[slot] + len).next_multiple_of(SPAN))).or_default().push(i);
        }
        let order: Vec<usize> = members.values().flatten().copied().collect();
        let reorder = (!order.is_sorted()).then(|| self.reorder(chunks, &order));
        let groups = members
            .iter()
            .map(|(&(width, span), members)| {
                let slots: Vec<usize> = members.iter().map(|&i| chunks[i].0).collect();
                self.group(&slots, width, span, visibility)
            })
            .collect();
        Ragged { rows, reorder, groups }
    }

    /// Row indices that bring chunks into `order`, and those that bring them back.
    fn reorder(&self, chunks: &[(usize, usize)], order: &[usize]) -> (Tensor, Tensor) {
        let starts: Vec<usize> = chunks
            .iter()
            .scan(0, |row, &(_, len)| {
                *row += len;
                Some(*row - len)
            })
            .collect();
        let rows_of = |&i: &usize| (starts[i]..starts[i] + chunks[i].1).map(|row| row as i64);
        let there: Vec<i64> = order.iter().flat_map(rows_of).collect();
        let mut back = vec![0; there.len()];
        for (place, &row) in there.iter().enumerate() {
            back[row as usize] = place as i64;
        }
        let device = self.options.1;
        (Tensor::from_slice(&there).to_device(device), Tensor::from_slice(&back).to_device(device))
    }

    fn group(&self, slots: &[usize], width: usize, span: usize, visibility: Visibility) -> Group {
        let (kind, device) = self.options;
        // The last position that each row sees.
        let last_seen: Vec<i64> = slots
            .iter()
            .flat_map(|&slot| {
                let held = self.lens[slot];
                (0..width).map(move |i| match visibility {
                    Visibility::Causal => (held + i) as i64,
                    Visibility::Block => (held + width - 1) as i64,
                })
            })
            .collect();
        let shape = [slots.len() as i64, width as i64, 1];
        let last_seen = Tensor::from_slice(&last_seen).view(shape).to_device(device);
        let hidden = Tensor::arange(span as i64, (Kind::Int64, device)).gt_tensor(&last_seen); // [S, L, T]
        let mask = hidden.zeros_like().to_kind(kind).masked_fill(&hidden, f64::NEG_INFINITY);
        let consecutive = slots.windows(2).all(|pair| pair[1] == pair[0] + 1);
        Group {
            rows: (slots.len() * width) as i64,
            slots: if consecutive {
                Slots::Range(slots[0] as i64, slots.len() as i64)
            } else {
                let slots: Vec<i64> = slots.iter().map(|&slot| slot as i64).collect();
                Slots::Picked(Tensor::from_slice(&slots).to_device(device))
            },
            width: width as i64,
            span: span as i64,
            mask: mask.repeat([1, self.heads.repeats(), 1]).unsqueeze(1),
        }
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
        let reordered = plan.reorder.as_ref().map(|(there, _)| qkv.q.index_select(0, there));
        let q = reordered.as_ref().unwrap_or(&qkv.q);
        let (mut outputs, mut row) = (Vec::with_capacity(plan.groups.len()), 0);
        for group in &plan.groups {
            outputs.push(self.attend_group(layer, group, &q.narrow(0, row, group.rows)));
            row += group.rows;
        }
        let y = if let [only] = outputs.as_slice() { only.shallow_clone() } else { Tensor::cat(&outputs, 0) };
        plan.reorder.as_ref().map_or_else(|| y.shallow_clone(), |(_, back)| y.index_select(0, back))
    }

    /// `q [S·L, H, D]` of one group to `[S·L, H·D]`.
    fn attend_group(&self, layer: usize, group: &Group, q: &Tensor) -> Tensor {
        let Heads { query, key_value, dim } = self.heads;
        let (repeats, width) = (self.heads.repeats(), group.width);
        // The query heads that share keys become further queries: [S, G, repeats·L, D].
        let q = q.view([-1, width, key_value, repeats, dim]).permute([0, 2, 3, 1, 4]);
        let q = q.reshape([-1, key_value, repeats * width, dim]);
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
            Some(&group.mask),
            0.0,
            false,
            self.heads.scale(),
            false,
        );
        y.view([-1, key_value, repeats, width, dim]).permute([0, 3, 1, 2, 4]).reshape([-1, query * dim])
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
        let capacity = needed.next_power_of_two().max(SPAN);
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
