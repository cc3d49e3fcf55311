//! States of many sequences in Gated DeltaNet layers, and ragged batches over them.

use tch::{Device, Kind, Tensor};

use super::{CHUNK, DeltaRows, GatedDeltaSpec, gated_delta_net};
use crate::kv_attention::Chunk;
use crate::whole_vectors::in_whole_vectors;

/// Number of tokens of a chunk that can be cut off again, in a chunk of at most this length.
pub const MAX_ROLLBACK_TOKENS: usize = CHUNK as usize - 1;

/// The states of every layer and sequence.
///
/// A state holds all tokens before it, and cannot be cropped. A layer keeps the state before the last tokens of a
/// sequence, and what these tokens add to it: the inputs of the convolution and both gates. Another state follows by
/// running the tokens that stay. In Qwen3.5-4B this takes 17 KB per token and layer in bfloat16. A state per token would
/// take 2 MB. The state behind the tokens is kept, too: most steps cut nothing off.
pub struct GatedDeltaCache {
    specs: Vec<GatedDeltaSpec>,
    slots: Vec<Sequence>,
    kind: Kind,
    device: Device,
}

/// One sequence.
#[derive(Default)]
struct Sequence {
    len: usize,
    /// Its state in each layer; empty before the first token.
    layers: Vec<LayerState>,
}

/// The state of a sequence in a layer.
struct LayerState {
    /// Tokens of the sequence before `recent`.
    start: usize,
    /// State behind these tokens, `[Hv, Dk, Dv]` float32.
    before: Tensor,
    /// The last tokens.
    recent: Rows,
    /// State behind the last tokens.
    behind: Tensor,
}

/// Inputs and gates of L tokens, from which a state is updated. Several sequences have a dimension of their own in front.
struct Rows {
    /// Inputs of the convolution, those of the K − 1 tokens before included: `[K−1+L, C]`.
    inputs: Tensor,
    /// g, `[L, Hv]` float32.
    log_decay: Tensor,
    /// β, `[L, Hv]` float32.
    beta: Tensor,
}

impl Rows {
    fn map(&self, inputs: impl Fn(&Tensor) -> Tensor, gates: impl Fn(&Tensor) -> Tensor) -> Self {
        Self { inputs: inputs(&self.inputs), log_decay: gates(&self.log_decay), beta: gates(&self.beta) }
    }

    /// The tokens from `first` on, along dimension `dim`.
    fn tokens(&self, dim: i64, first: i64, count: i64, kernel: i64) -> Self {
        self.map(|of| of.narrow(dim, first, kernel - 1 + count), |of| of.narrow(dim, first, count))
    }
}

/// Projections of N rows.
pub struct GatedDeltaInputs {
    /// Queries, keys and values before the convolution, `[N, C]`.
    pub qkv: Tensor,
    /// Inputs of the decay, `[N, Hv]`.
    pub a: Tensor,
    /// Inputs of β, `[N, Hv]`.
    pub b: Tensor,
}

/// Weights between the projections and the state, in float32.
pub struct GatedDeltaWeights {
    /// Depthwise causal convolution, `[C, K]`.
    pub conv: Tensor,
    /// A, `[Hv]`: `g = −A·softplus(a + dt_bias)`.
    pub decay_rate: Tensor,
    /// `[Hv]`.
    pub dt_bias: Tensor,
}

impl GatedDeltaCache {
    /// Empty sequences in layers of these sizes. Inputs have the dtype `kind`.
    pub fn new(specs: Vec<GatedDeltaSpec>, slots: usize, kind: Kind, device: Device) -> Self {
        Self { specs, slots: (0..slots).map(|_| Sequence::default()).collect(), kind, device }
    }

    /// Whether there are no layers.
    pub fn is_empty(&self) -> bool {
        self.specs.is_empty()
    }

    /// Bytes of a sequence, whatever its length.
    pub fn sequence_bytes(&self) -> usize {
        self.specs.iter().map(|spec| spec.sequence_bytes(self.kind)).sum()
    }

    /// Truncates the sequence in `slot` to `len` tokens. At 0 tokens it frees its memory. It never takes memory: states
    /// are computed by the next forward.
    ///
    /// # Panics
    /// If the state of a layer cannot be rebuilt. A chunk of up to [`MAX_ROLLBACK_TOKENS`] can be truncated to any
    /// length, and be cut off whole. A longer one of n tokens loses its last `n mod 64` tokens at most.
    pub fn truncate(&mut self, slot: usize, len: usize) {
        let sequence = &mut self.slots[slot];
        if len == 0 {
            *sequence = Sequence::default();
            return;
        }
        sequence.len = sequence.len.min(len);
        let len = sequence.len;
        for layer in &sequence.layers {
            let (start, end) = (layer.start, layer.end());
            assert!(
                (start..=end).contains(&len),
                "the state of a linear-attention layer is kept for {start} to {end} tokens, and not for {len}"
            );
        }
    }

    /// Adds the lengths of chunks, which ran in every layer, to their sequences.
    pub fn commit_chunks(&mut self, chunks: &[Chunk]) {
        for chunk in chunks {
            self.slots[chunk.slot].len = chunk.past_len + chunk.len;
        }
    }

    /// Appends the rows `[N, ..]` of chunks to their sequences in layer `layer`, and returns their outputs
    /// `[N, Hv, Dv]`, in float32. The layers run in order.
    ///
    /// Short chunks of one length run together, others alone.
    pub fn forward(
        &mut self,
        layer: usize,
        chunks: &[Chunk],
        inputs: &GatedDeltaInputs,
        weights: &GatedDeltaWeights,
    ) -> Tensor {
        let mut first = 0;
        let mut placed: Vec<(Chunk, i64)> = vec![];
        for &chunk in chunks.iter().filter(|chunk| chunk.len > 0) {
            placed.push((chunk, first));
            first += chunk.len as i64;
        }
        let mut by_length: Vec<&(Chunk, i64)> = placed.iter().collect();
        by_length.sort_by_key(|(chunk, _)| chunk.len);
        let runs_together =
            |a: &&(Chunk, i64), b: &&(Chunk, i64)| a.0.len == b.0.len && a.0.len <= MAX_ROLLBACK_TOKENS;
        let mut outputs: Vec<(i64, Tensor)> = vec![];
        for group in by_length.chunk_by(runs_together) {
            let y = self.run_group(layer, group, inputs, weights);
            outputs.extend(group.iter().zip(0..).map(|((_, first), index)| (*first, y.select(0, index))));
        }
        outputs.sort_by_key(|(first, _)| *first);
        Tensor::cat(&outputs.into_iter().map(|(_, y)| y).collect::<Vec<_>>(), 0)
    }

    /// Runs chunks of one length, given with their first rows: `[S, L, Hv, Dv]`.
    fn run_group(
        &mut self,
        layer: usize,
        group: &[&(Chunk, i64)],
        inputs: &GatedDeltaInputs,
        weights: &GatedDeltaWeights,
    ) -> Tensor {
        let (spec, count) = (self.specs[layer], group[0].0.len as i64);
        let (columns, states): (Vec<Tensor>, Vec<Tensor>) =
            group.iter().map(|(chunk, _)| self.start(layer, *chunk, weights)).unzip();
        let rows = |of: &Tensor| {
            Tensor::stack(&group.iter().map(|(_, first)| of.narrow(0, *first, count)).collect::<Vec<_>>(), 0)
        };
        let gate = |of: &Tensor, gate: &dyn Fn(&Tensor) -> Tensor| gate(&rows(of).to_kind(Kind::Float));
        let rate = |a: &Tensor| {
            let soft = in_whole_vectors(&(a + &weights.dt_bias), |x| x.softplus());
            -(soft * &weights.decay_rate)
        };
        let all = Rows {
            inputs: Tensor::cat(&[Tensor::stack(&columns, 0), rows(&inputs.qkv)], 1),
            log_decay: gate(&inputs.a, &rate),
            // A view would keep the padding in memory.
            beta: gate(&inputs.b, &|b| in_whole_vectors(b, |b| b.sigmoid()).contiguous()),
        };
        // The state is kept before the last, incomplete chunk of 64.
        let kept = count % CHUNK;
        let head = count - kept;
        let (mut outputs, mut before) = (vec![], Tensor::stack(&states, 0));
        if head > 0 {
            let (y, next) = run(&spec, &all.tokens(1, 0, head, spec.kernel), &before, weights);
            outputs.push(y);
            before = next;
        }
        let recent = all.tokens(1, head, kept, spec.kernel);
        let mut behind = before.shallow_clone();
        if kept > 0 {
            let (y, next) = run(&spec, &recent, &before, weights);
            outputs.push(y);
            behind = next;
        }
        for ((chunk, _), index) in group.iter().zip(0..) {
            // A view would keep the inputs of a whole prompt in memory.
            let own = |of: &Tensor| {
                let own = of.select(0, index);
                if head > 0 { own.copy() } else { own }
            };
            let state = LayerState {
                start: chunk.past_len + head as usize,
                before: before.select(0, index),
                recent: recent.map(own, own),
                behind: behind.select(0, index),
            };
            let layers = &mut self.slots[chunk.slot].layers;
            if layer < layers.len() {
                layers[layer] = state;
            } else {
                debug_assert_eq!(layer, layers.len(), "layers run in order");
                layers.push(state);
            }
        }
        Tensor::cat(&outputs, 1)
    }

    /// The last K − 1 inputs `[K−1, C]` and the state `[Hv, Dk, Dv]` before a chunk.
    fn start(&self, layer: usize, chunk: Chunk, weights: &GatedDeltaWeights) -> (Tensor, Tensor) {
        let spec = &self.specs[layer];
        match self.slots[chunk.slot].layers.get(layer) {
            Some(state) if chunk.past_len > 0 => state.at(chunk.past_len, spec, weights),
            _ => {
                let zeros = |shape: &[i64], kind| Tensor::zeros(shape, (kind, self.device));
                let state = [spec.value_heads, spec.key_dim, spec.value_dim];
                (zeros(&[spec.kernel - 1, spec.channels()], self.kind), zeros(&state, Kind::Float))
            }
        }
    }
}

impl LayerState {
    /// Tokens of the sequence, the last ones included.
    fn end(&self) -> usize {
        self.start + self.recent.beta.size()[0] as usize
    }

    /// The inputs of the convolution before token `len`, and the state there.
    fn at(&self, len: usize, spec: &GatedDeltaSpec, weights: &GatedDeltaWeights) -> (Tensor, Tensor) {
        let kept = (len - self.start) as i64;
        let columns = self.recent.inputs.narrow(0, kept, spec.kernel - 1);
        let state = if len == self.end() {
            self.behind.shallow_clone()
        } else if kept == 0 {
            self.before.shallow_clone()
        } else {
            let rows = self.recent.tokens(0, 0, kept, spec.kernel);
            let one = |of: &Tensor| of.unsqueeze(0);
            run(spec, &rows.map(one, one), &one(&self.before), weights).1.squeeze_dim(0)
        };
        (columns, state)
    }
}

/// Runs the rows of S sequences behind their states: outputs `[S, L, Hv, Dv]` and the next states, in float32.
fn run(spec: &GatedDeltaSpec, rows: &Rows, state: &Tensor, weights: &GatedDeltaWeights) -> (Tensor, Tensor) {
    let GatedDeltaSpec { key_heads, value_heads, key_dim, value_dim, .. } = *spec;
    let kind = rows.inputs.kind();
    let mixed = convolve(&rows.inputs, &weights.conv).silu().to_kind(kind).to_kind(Kind::Float); // [S, L, C]
    let width = key_heads * key_dim;
    let part = |first: i64, heads: i64, dim: i64| {
        let part = mixed.narrow(2, first, heads * dim).contiguous();
        part.view([mixed.size()[0], -1, heads, dim])
    };
    let (q, k) = (part(0, key_heads, key_dim), part(width, key_heads, key_dim));
    let v = part(2 * width, value_heads, value_dim);
    let gates = [&rows.log_decay, &rows.beta].map(Tensor::shallow_clone);
    let [log_decay, beta] = gates;
    gated_delta_net(&DeltaRows::new([&q, &k, &v], log_decay, beta), state)
}

/// Depthwise causal convolution of `[S, K−1+L, C]` with `[C, K]`: `[S, L, C]` in float32. It adds up one token after
/// another, so that the bits of a row depend on its own tokens alone.
fn convolve(inputs: &Tensor, weight: &Tensor) -> Tensor {
    let kernel = weight.size()[1];
    let count = inputs.size()[1] - (kernel - 1);
    let tap = |at: i64| inputs.narrow(1, at, count).to_kind(Kind::Float) * weight.select(1, at);
    (1..kernel).fold(tap(0), |sum, at| sum + tap(at))
}
