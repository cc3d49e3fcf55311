//! State after the last committed token of each slot.

use deepspec_engine::Context;
use deepspec_ops::{DeviceArange, cat_row_runs};
use tch::{Device, Kind, Tensor};

/// State after the last committed token of each slot of an engine.
pub struct LastStates {
    /// `[slots, d]`.
    states: Tensor,
    /// Source of index tensors.
    arange: DeviceArange,
}

impl LastStates {
    /// States of `slots` slots without tokens, `width` wide.
    pub fn new(slots: usize, width: i64, kind: Kind, device: Device) -> Self {
        let states = Tensor::zeros([slots as i64, width], (kind, device));
        Self { states, arange: DeviceArange::new(device) }
    }

    /// Takes over the last state of every slot of the context, of which `states [C, d]` holds one row per token.
    pub fn update(&mut self, context: &Context, states: &Tensor) {
        let ends = context.chunks.iter().scan(0, |end, &(_, rows)| {
            *end += rows as i64;
            Some((*end - 1, 1))
        });
        let slots = self.arange.int_tensor(context.chunks.iter().map(|&(slot, _)| slot));
        let _ = self.states.index_copy_(0, &slots, &cat_row_runs(states, ends));
    }

    /// States of these slots, `[S, d]`.
    pub fn of_slots(&self, slots: &[usize]) -> Tensor {
        self.states.index_select(0, &self.arange.int_tensor(slots.iter().copied()))
    }
}
