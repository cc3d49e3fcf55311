//! Key/value histories of many slots, and attention of ragged batches over them.

mod piece;

use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor};

use crate::nn::{AttentionSpec, Heads, Qkv};
use piece::{Piece, View};

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

/// Keys and values per layer, filled from the left. Layers with a window keep everything too, so that a rollback is a change
/// of length everywhere; they read only what the window can reach.
pub struct KvCache {
    layers: Vec<Layer>,
    views: Vec<View>,
    lens: Vec<usize>,
    capacity: usize,
    options: (Kind, Device),
}

/// `[slots, capacity, G, D]` each.
struct Layer {
    keys: Tensor,
    values: Tensor,
    heads: Heads,
    scale: f64,
    /// Which of the cache's views it has.
    view: usize,
}

/// Where the rows of a feed go and what they see; the same for all layers.
pub struct Ragged {
    rows: Rows,
    /// Row order of the groups one after the other, and the way back; None where it is the feed's own.
    reorder: Option<(Tensor, Tensor)>,
    groups: Vec<Group>,
    visibility: Visibility,
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
    /// Tokens that the slots held before, `[S, 1, 1]` int64.
    held: Tensor,
    /// The calls that make up the attention, for each of the cache's views.
    views: Vec<Vec<Piece>>,
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
    /// Empty histories of layers that attend like this.
    pub fn new(layers: &[AttentionSpec], slots: usize, kind: Kind, device: Device) -> Self {
        let mut views: Vec<View> = vec![];
        let layers = layers
            .iter()
            .map(|&AttentionSpec { heads, scale, window }| {
                let view = View { repeats: heads.repeats() as usize, window };
                let empty = || Tensor::zeros([slots as i64, 0, heads.key_value, heads.dim], (kind, device));
                let number = views.iter().position(|known| *known == view).unwrap_or_else(|| {
                    views.push(view);
                    views.len() - 1
                });
                Layer { keys: empty(), values: empty(), heads, scale, view: number }
            })
            .collect();
        Self { layers, views, lens: vec![0; slots], capacity: 0, options: (kind, device) }
    }

    /// Tokens in the history of `slot`.
    pub fn held(&self, slot: usize) -> usize {
        self.lens[slot]
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
        Ragged { rows, reorder, groups, visibility }
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
        let held: Vec<i64> = slots.iter().map(|&slot| self.lens[slot] as i64).collect();
        let held = Tensor::from_slice(&held).view([-1, 1, 1]).to_device(device);
        let pieces = |view: &View| {
            let mut pieces = view.cut(width, span, visibility);
            if let [only] = pieces.as_mut_slice() {
                only.mask = Some(only.mask(view, &held, width as i64, visibility, kind));
            }
            pieces
        };
        let views = self.views.iter().map(pieces).collect();
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
            held,
            views,
        }
    }

    /// Stores keys and values `[N, G, D]` of the placed rows.
    pub fn write(&mut self, layer: usize, rows: &Rows, k: &Tensor, v: &Tensor) {
        let place = [Some(&rows.slots), Some(&rows.positions)];
        let Layer { keys, values, .. } = &mut self.layers[layer];
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
            outputs.push(self.attend_group(
                &self.layers[layer],
                group,
                plan.visibility,
                &q.narrow(0, row, group.rows),
            ));
            row += group.rows;
        }
        let y = if let [only] = outputs.as_slice() { only.shallow_clone() } else { Tensor::cat(&outputs, 0) };
        plan.reorder.as_ref().map_or_else(|| y.shallow_clone(), |(_, back)| y.index_select(0, back))
    }

    /// `q [S·L, H, D]` of one group to `[S·L, H·D]`.
    fn attend_group(&self, layer: &Layer, group: &Group, visibility: Visibility, q: &Tensor) -> Tensor {
        let Heads { query, key_value, dim } = layer.heads;
        let (repeats, view) = (layer.heads.repeats(), &self.views[layer.view]);
        let q = q.view([-1, group.width, key_value, repeats, dim]).permute([0, 2, 3, 1, 4]);
        let attend = |piece: &Piece| {
            let rows = (piece.rows.end - piece.rows.start) as i64;
            // The query heads that share keys become further queries: [S, G, repeats·L, D].
            let q = q.narrow(3, piece.rows.start as i64, rows).reshape([-1, key_value, repeats * rows, dim]);
            let history = |tensor: &Tensor| {
                let (first, count) = (piece.keys.start as i64, (piece.keys.end - piece.keys.start) as i64);
                match &group.slots {
                    Slots::Range(slot, slots) => tensor.narrow(0, *slot, *slots).narrow(1, first, count),
                    Slots::Picked(slots) => tensor.narrow(1, first, count).index_select(0, slots),
                }
                .transpose(1, 2)
            };
            let made;
            let mask = match &piece.mask {
                Some(mask) => mask,
                None => {
                    made = piece.mask(view, &group.held, group.width, visibility, self.options.0);
                    &made
                }
            };
            let (k, v) = (history(&layer.keys), history(&layer.values));
            let y =
                Tensor::scaled_dot_product_attention(&q, &k, &v, Some(mask), 0.0, false, layer.scale, false);
            y.view([-1, key_value, repeats, rows, dim]).permute([0, 3, 1, 2, 4]) // [S, L, G, repeats, D]
        };
        let outputs: Vec<Tensor> = group.views[layer.view].iter().map(attend).collect();
        let y = if let [only] = outputs.as_slice() { only.shallow_clone() } else { Tensor::cat(&outputs, 1) };
        y.reshape([-1, query * dim])
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
        let (slots, more) = (self.lens.len() as i64, (capacity - self.capacity) as i64);
        for Layer { keys, values, heads, .. } in &mut self.layers {
            let added = [slots, more, heads.key_value, heads.dim];
            for tensor in [keys, values] {
                *tensor = Tensor::cat(&[tensor.shallow_clone(), Tensor::zeros(added, self.options)], 1);
            }
        }
        self.capacity = capacity;
    }
}
