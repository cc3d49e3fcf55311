//! Gated DeltaNet (Yang et al. 2024), a linear attention whose state has one matrix per head.
//!
//! For each token t with decay `α = e^g` and rate β: `S ← α S`, `S ← S + k ⊗ β(v − Sᵀk)`, `o = Sᵀq`. Keys and queries
//! are L2-normalised, and queries are divided by √Dk.

mod cache;
mod reference;

use crate::whole_vectors::in_whole_vectors;
use tch::{Device, Kind, Tensor};

pub use cache::{GatedDeltaCache, GatedDeltaInputs, GatedDeltaWeights, MAX_ROLLBACK_TOKENS};

/// Tokens that are computed at once. The work within a chunk grows with its square.
const CHUNK: i64 = 64;
/// ε of the L2 norm of queries and keys.
const L2_EPS: f64 = 1e-6;

/// Sizes of a Gated DeltaNet layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatedDeltaSpec {
    /// Hk, heads of queries and keys.
    pub key_heads: i64,
    /// Hv, heads of values, a multiple of Hk. Each has a state.
    pub value_heads: i64,
    /// Dk, width of a query or key.
    pub key_dim: i64,
    /// Dv, width of a value.
    pub value_dim: i64,
    /// K, tokens that the convolution sees, its own included.
    pub kernel: i64,
}

impl GatedDeltaSpec {
    /// Values of a token that pass the convolution: queries, keys and values.
    pub fn channels(&self) -> i64 {
        2 * self.key_heads * self.key_dim + self.value_width()
    }

    /// Hv·Dv, width of the layer's output.
    pub fn value_width(&self) -> i64 {
        self.value_heads * self.value_dim
    }

    /// Bytes that a sequence takes: the states before and behind its last tokens, and what these tokens add.
    pub fn sequence_bytes(&self, kind: Kind) -> usize {
        let float = Kind::Float.elt_size_in_bytes() as i64;
        let states = 2 * self.value_heads * self.key_dim * self.value_dim * float;
        let rows = MAX_ROLLBACK_TOKENS as i64;
        let inputs = (self.kernel - 1 + rows) * self.channels() * kind.elt_size_in_bytes() as i64;
        (states + inputs + 2 * rows * self.value_heads * float) as usize
    }
}

/// Rows of S sequences of L tokens each, in float32.
pub(crate) struct DeltaRows {
    /// Queries, normalised and scaled: `[S, L, Hv, Dk]`.
    q: Tensor,
    /// Keys, normalised: `[S, L, Hv, Dk]`.
    k: Tensor,
    /// Values, `[S, L, Hv, Dv]`.
    v: Tensor,
    /// g, the logarithm of the decay: `[S, L, Hv]`.
    log_decay: Tensor,
    /// `e^g`, `[S, L, Hv]`.
    decay: Tensor,
    /// β, `[S, L, Hv]`.
    beta: Tensor,
}

impl DeltaRows {
    /// Rows of queries and keys `[S, L, Hk, Dk]`, values `[S, L, Hv, Dv]` and gates `[S, L, Hv]`, in float32. Each
    /// query and key serves `Hv/Hk` heads in a row.
    pub fn new([q, k, v]: [&Tensor; 3], log_decay: Tensor, beta: Tensor) -> Self {
        let repeats = v.size()[2] / q.size()[2];
        let repeat =
            |x: Tensor| if repeats == 1 { x } else { x.repeat_interleave_self_int(repeats, 2, None) };
        let unit = |x: &Tensor| {
            x / ((x * x).sum_dim_intlist(-1, true, Kind::Float) + L2_EPS).sqrt() // length 1
        };
        let scale = (q.size()[3] as f64).powf(-0.5);
        let decay = in_whole_vectors(&log_decay, |log| log.exp());
        Self { q: repeat(unit(q) * scale), k: repeat(unit(k)), v: v.shallow_clone(), log_decay, decay, beta }
    }

    /// The L tokens of `self` from `first` on.
    fn tokens(&self, first: i64, count: i64) -> Self {
        let part = |of: &Tensor| of.narrow(1, first, count);
        let Self { q, k, v, log_decay, decay, beta } = self;
        Self {
            q: part(q),
            k: part(k),
            v: part(v),
            log_decay: part(log_decay),
            decay: part(decay),
            beta: part(beta),
        }
    }
}

/// Runs the rows of S sequences behind their states `[S, Hv, Dk, Dv]`, in float32. Returns the outputs
/// `[S, L, Hv, Dv]` and the states behind the last rows.
///
/// On the CPU, calls of fewer than 64 tokens run token by token: a token has the same bits in every such call. Other
/// calls run in chunks, which agree with that to about 1e-5 of the largest output.
pub(crate) fn gated_delta_net(rows: &DeltaRows, state: &Tensor) -> (Tensor, Tensor) {
    let tokens = rows.q.size()[1];
    let is_short = if state.device() == Device::Cpu { tokens < CHUNK } else { tokens == 1 };
    if is_short {
        return reference::gated_delta_net(rows, state);
    }
    let mut state = state.shallow_clone();
    let mut outputs = vec![];
    for first in (0..tokens).step_by(CHUNK as usize) {
        let (y, next) = run_chunk(&rows.tokens(first, CHUNK.min(tokens - first)), &state);
        outputs.push(y);
        state = next;
    }
    (Tensor::cat(&outputs, 1), state)
}

/// One chunk of c tokens. With `G_i = g_1 + … + g_i` and the change `δ_i = β_i(v_i − S_iᵀk_i)` that token i makes, the
/// state behind token i is `e^{G_i} S + Σ_{j ≤ i} e^{G_i − G_j} k_j ⊗ δ_j`. The δ therefore solve a triangular system.
fn run_chunk(rows: &DeltaRows, state: &Tensor) -> (Tensor, Tensor) {
    let by_head = |of: &Tensor| of.transpose(1, 2).contiguous(); // [S, Hv, c, ..]
    let [q, k, v] = [&rows.q, &rows.k, &rows.v].map(by_head);
    let beta = by_head(&rows.beta).unsqueeze(-1); // [S, Hv, c, 1]
    // In float64: after strong decays, small differences of large sums would lose digits.
    let sums = by_head(&rows.log_decay).cumsum(-1, Kind::Double); // [S, Hv, c]
    let factor = |exponent: Tensor| exponent.exp().to_kind(Kind::Float);
    // e^{G_i − G_j} at j ≤ i. The exponents above the diagonal are positive and could overflow.
    let between = factor((sums.unsqueeze(-1) - sums.unsqueeze(-2)).tril(0)).tril(0); // [S, Hv, c, c]
    let from_start = factor(sums.unsqueeze(-1)); // [S, Hv, c, 1]
    let count = sums.size()[2];
    let last = sums.narrow(2, count - 1, 1);
    let to_end = factor(&last - &sums).unsqueeze(-1); // [S, Hv, c, 1]

    let system = (&k * &beta).matmul(&k.transpose(-1, -2)) * &between;
    let wanted = (v - k.matmul(state) * &from_start) * &beta;
    // The solver takes the diagonal as ones, and does not read above it.
    let changes = system.linalg_solve_triangular(&wanted, false, true, true); // [S, Hv, c, Dv]
    let scores = q.matmul(&k.transpose(-1, -2)) * &between;
    let y = q.matmul(state) * &from_start + scores.matmul(&changes);
    let next =
        state * factor(last.shallow_clone()).unsqueeze(-1) + (k * to_end).transpose(-1, -2).matmul(&changes);
    (y.transpose(1, 2), next)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(shape: &[i64], seed: u64) -> Tensor {
        let count = shape.iter().product::<i64>() as usize;
        Tensor::from_slice(&deepspec_testkit::noise(seed, count)).view(shape)
    }

    fn rows(sequences: i64, tokens: i64) -> (DeltaRows, Tensor) {
        let keys = [sequences, tokens, 2, 16];
        let (q, k, v) = (values(&keys, 1), values(&keys, 2), values(&[sequences, tokens, 4, 32], 3));
        let gates = [sequences, tokens, 4];
        // Decays from almost none to almost all.
        let log_decay = -(values(&gates, 4) * 3.0).exp();
        let beta = values(&gates, 5).sigmoid();
        (DeltaRows::new([&q, &k, &v], log_decay, beta), values(&[sequences, 4, 16, 32], 6))
    }

    /// The largest difference, over the largest value.
    fn off(found: &Tensor, expected: &Tensor) -> f64 {
        let largest = |of: &Tensor| of.abs().max().double_value(&[]);
        largest(&(found - expected)) / largest(expected)
    }

    #[test]
    fn chunks_compute_what_the_recurrence_computes() {
        let _no_grad = tch::no_grad_guard();
        for tokens in [1, 2, 63, 64, 65, 150, 192] {
            let (rows, state) = rows(2, tokens);
            let (expected, end) = reference::gated_delta_net(&rows, &state);
            let (found, found_end) = gated_delta_net(&rows, &state);
            assert!(off(&found, &expected) < 1e-5, "{tokens}: {:e}", off(&found, &expected));
            assert!(off(&found_end, &end) < 1e-5, "{tokens}: {:e}", off(&found_end, &end));
            // Also a chunk of any other length.
            if tokens <= CHUNK {
                let (found, found_end) = run_chunk(&rows, &state);
                assert!(off(&found, &expected) < 1e-5 && off(&found_end, &end) < 1e-5, "{tokens}");
            }
        }
    }

    #[test]
    fn a_token_has_the_same_bits_in_every_short_call() {
        let _no_grad = tch::no_grad_guard();
        let (all, start) = rows(3, 40);
        let (expected, end) = gated_delta_net(&all, &start);
        for first in [1, 7, 39] {
            let (before, state) = gated_delta_net(&all.tokens(0, first), &start);
            let (behind, state) = gated_delta_net(&all.tokens(first, 40 - first), &state);
            assert!(Tensor::cat(&[before, behind], 1).equal(&expected) && state.equal(&end), "{first}");
        }
    }
}
