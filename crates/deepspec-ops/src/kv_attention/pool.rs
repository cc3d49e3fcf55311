//! Memory of the KV cache: pools of rows of one capacity.
//!
//! A row belongs to one sequence. Sequences of similar length share a tensor, and attention reads many of them without copying. A sequence
//! that outgrows its row moves to a pool of longer rows.

use tch::{Device, Kind, Tensor};

use super::KV_ALIGN;
use crate::attention::Heads;

/// Maximum bytes of unused rows that stay allocated for later sequences.
pub const MAX_SPARE_BYTES: usize = 16 << 20;

/// Capacity of the rows for sequences of up to `tokens`: a multiple of 256, two sizes per octave for long ones.
pub fn row_capacity(tokens: usize) -> usize {
    let tokens = tokens.max(1);
    tokens.next_multiple_of((tokens.next_power_of_two() / 4).max(KV_ALIGN))
}

/// Shapes of a token's keys and values in every layer.
pub struct KvLayout {
    layers: Vec<Heads>,
    options: (Kind, Device),
}

/// A pool of rows of one capacity.
pub struct Pool {
    /// Tokens of a row.
    pub capacity: usize,
    /// Whether each row is in use.
    used: Vec<bool>,
    /// Keys and values of every layer, `[rows, capacity, G, D]` each. A layer may have more rows than `used`, if
    /// memory ran out while the pool grew.
    layers: Vec<[Tensor; 2]>,
}

impl KvLayout {
    /// The layout of layers with these heads.
    pub fn new(layers: Vec<Heads>, options: (Kind, Device)) -> Self {
        Self { layers, options }
    }

    /// Bytes of one token's keys and values.
    pub fn token_bytes(&self) -> usize {
        let values: i64 = self.layers.iter().map(|heads| 2 * heads.key_value * heads.dim).sum();
        values as usize * self.options.0.elt_size_in_bytes()
    }

    fn zeros(&self, heads: Heads, rows: usize, capacity: usize) -> Tensor {
        Tensor::zeros([rows as i64, capacity as i64, heads.key_value, heads.dim], self.options)
    }
}

impl Pool {
    /// A pool without rows.
    pub fn new(capacity: usize, layout: &KvLayout) -> Self {
        let empty = |&heads: &Heads| [(); 2].map(|()| layout.zeros(heads, 0, capacity));
        Self { capacity, used: vec![], layers: layout.layers.iter().map(empty).collect() }
    }

    /// Number of rows in use, and number of all rows.
    pub fn used_and_total_rows(&self) -> (usize, usize) {
        (self.used.iter().filter(|&&used| used).count(), self.used.len())
    }

    /// Keys and values of a layer, `[rows, capacity, G, D]` each.
    pub fn layer_keys_values(&self, layer: usize) -> [&Tensor; 2] {
        let [keys, values] = &self.layers[layer];
        [keys, values]
    }

    /// Allocates memory so that `more` rows can be taken. If rows are small, it also allocates a few spare rows, up to `most` rows in the
    /// pool.
    pub fn reserve_rows(&mut self, more: usize, most: usize, layout: &KvLayout) {
        let (used, rows) = self.used_and_total_rows();
        let needed = used + more;
        if needed <= rows {
            return;
        }
        let spare = (needed / 2).min(MAX_SPARE_BYTES / (layout.token_bytes() * self.capacity).max(1));
        let wanted = (needed + spare).min(most.max(needed));
        // Layers move one by one, so that only one layer at a time has old and new memory.
        for (tensors, &heads) in self.layers.iter_mut().zip(&layout.layers) {
            for tensor in tensors {
                let there = tensor.size()[0];
                if there < wanted as i64 {
                    let grown = layout.zeros(heads, wanted, self.capacity);
                    grown.narrow(0, 0, there).copy_(tensor);
                    *tensor = grown;
                }
            }
        }
        self.used.resize(wanted, false);
    }

    /// Takes the first free row, which holds zeros.
    pub fn take_row(&mut self) -> usize {
        let row = self.used.iter().position(|used| !used).unwrap_or(self.used.len());
        debug_assert!(row < self.used.len(), "room was made before");
        self.used[row] = true;
        row
    }

    /// Zeros the first `written` tokens of a row and frees it. Attention multiplies masked values by 0, and a NaN among them would
    /// reach the next sequence.
    pub fn free_row(&mut self, row: usize, written: usize) {
        let written = written.min(self.capacity) as i64;
        if written > 0 {
            for tensor in self.layers.iter().flatten() {
                let _ = tensor.get(row as i64).narrow(0, 0, written).zero_();
            }
        }
        self.used[row] = false;
    }

    /// Copies the first `tokens` of `row` to a row of another pool.
    pub fn copy_to(&self, row: usize, other: &Self, to: usize, tokens: usize) {
        for (from, into) in self.layers.iter().flatten().zip(other.layers.iter().flatten()) {
            let tokens = tokens as i64;
            into.get(to as i64).narrow(0, 0, tokens).copy_(&from.get(row as i64).narrow(0, 0, tokens));
        }
    }

    /// Moves the rows in use to the front and frees the others. Calls `moved(from, to)` for each row that moves.
    pub fn compact(&mut self, layout: &KvLayout, mut moved: impl FnMut(usize, usize)) {
        let (used, rows) = self.used_and_total_rows();
        let mut last = rows;
        for hole in 0..used {
            if self.used[hole] {
                continue;
            }
            while !self.used[last - 1] {
                last -= 1;
            }
            let from = last - 1;
            self.copy_to(from, self, hole, self.capacity);
            (self.used[hole], self.used[from]) = (true, false);
            moved(from, hole);
        }
        self.used.truncate(used);
        self.trim_layers_to_row_count(layout);
    }

    /// Frees rows that only some layers have because memory ran out.
    pub fn trim_layers_to_row_count(&mut self, layout: &KvLayout) {
        let rows = self.used.len() as i64;
        for (tensors, heads) in self.layers.iter_mut().zip(&layout.layers) {
            for tensor in tensors {
                let beyond = tensor.size()[0] - rows;
                if beyond == 0 {
                    continue;
                }
                let size = [rows, self.capacity as i64, heads.key_value, heads.dim];
                match Tensor::f_empty(size, layout.options) {
                    Ok(mut fewer) => {
                        fewer.copy_(&tensor.narrow(0, 0, rows));
                        *tensor = fewer;
                    }
                    // If even that allocation fails, the layer keeps its rows for later.
                    Err(_) => drop(tensor.narrow(0, rows, beyond).zero_()),
                }
            }
        }
    }
}
