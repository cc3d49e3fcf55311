//! The recurrence of Gated DeltaNet, token by token.

use tch::{Kind, Tensor};

use super::DeltaRows;

/// See [`super::gated_delta_net`]. Every operator works on single values or adds up a column, so that the bits of a
/// token depend neither on the tokens of its call nor on the other sequences.
pub(super) fn gated_delta_net(rows: &DeltaRows, state: &Tensor) -> (Tensor, Tensor) {
    let DeltaRows { q, k, v, decay, beta, .. } = rows;
    let mut state = state.shallow_clone();
    let mut outputs = vec![];
    for t in 0..q.size()[1] {
        let at = |of: &Tensor| of.select(1, t); // [S, Hv, ..]
        let column = |of: &Tensor| at(of).unsqueeze(-1); // [S, Hv, Dk, 1]
        let reads = |state: &Tensor, by: &Tensor| {
            (state * column(by)).sum_dim_intlist(-2, false, Kind::Float) // [S, Hv, Dv]
        };
        // S ← α S, then S ← S + k ⊗ β(v − Sᵀk), and o = Sᵀq.
        let decayed = state * column(decay).unsqueeze(-1);
        let delta = (at(v) - reads(&decayed, k)) * column(beta);
        state = decayed + column(k) * delta.unsqueeze(-2);
        outputs.push(reads(&state, q));
    }
    (Tensor::stack(&outputs, 1), state)
}
