//! The loop over chunks of supervised rows: head, bias, losses and gradients.

use tch::{Device, Kind, Tensor};

use super::bias::{ChunkBias, LowRankBias};
use super::inputs::{AuxLoss, LossHead, SupervisedRows};
use super::recipe::LossRecipe;
use super::rows::LogitsTile;
use super::span::{BlockSpan, split_into_spans};
use super::terms::TERMS;
use super::vocab_chunks::{VocabChunk, padded_buffer};
use crate::ffi::{range, softmax_targets};
use crate::linear::matmul_into;

/// Bytes of a chunk's float32 buffer, and limits on its rows. More rows speed up matmuls, fewer rows save memory.
const CHUNK_BYTES: i64 = 40 << 20;
const CHUNK_ROW_LIMITS: (i64, i64) = (64, 224);
/// Limits if the bias is added to the logits in place and needs no buffer. Larger chunks let more rows share one
/// bias.
const CHUNK_BYTES_IN_PLACE: i64 = 64 << 20;
const CHUNK_ROW_LIMITS_IN_PLACE: (i64, i64) = (64, 448);
/// Limits on a GPU. Each chunk reads the whole head and writes all gradients of W2. At V = 151,936 and
/// 512 rows, each matmul for these gradients took 0.5 ms on an H200.
const GPU_CHUNK_BYTES: i64 = 544 << 20;
const GPU_CHUNK_ROW_LIMITS: (i64, i64) = (512, 1792);
/// Rows of a tile on a GPU, where losses need temporaries. The loss of block verification needs twice as many.
const GPU_TILE_ROWS: i64 = 512;
/// Bytes of a tile on a CPU. The losses read a tile a few times, and caches should hold it.
const TILE_BYTES: i64 = 1 << 19;
/// Bytes of a tile if a kernel computes losses and gradients in place. Larger tiles need fewer calls.
const TILE_BYTES_IN_PLACE: i64 = 4 << 20;
/// Vocabulary range of an in-place bias, small enough that caches hold the bias until it is added. A multiple of the
/// inputs per block of a matmul (matrices.cpp), so that sums keep their bits.
const BIAS_CHUNK_TOKENS: i64 = 512;
/// Gradients of the inputs, and measurements of each row.
pub struct LossOutput {
    /// Gradient of the hidden states, `[R, d]`.
    pub grad_hidden: Tensor,
    /// Gradient of the features, `[R, r]`; None without a bias. One row of a token group may hold the sum of
    /// the group.
    pub grad_features: Option<Tensor>,
    /// One float32 column for each [`LossColumn`].
    rows: Tensor,
}

/// A measurement of each row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossColumn {
    /// One of [`TERMS`], unweighted; 0 if not measured.
    Term(usize),
    /// Cross entropy with position weights that follow the drafter; 0 without such weights.
    AdaptiveCe,
    /// Weighted sum of all losses except the confidence head's.
    Loss,
    /// 1 where drafter and target have the same argmax; 0 if not requested.
    Agreement,
    /// A column of an [`AuxLoss`].
    Extra(i64),
}

impl LossColumn {
    /// −log p^d of the label.
    pub const CE: Self = Self::Term(0);
    /// ‖p^d − p^t‖₁, always measured.
    pub const L1: Self = Self::Term(1);
    /// −Σ p^t log p^d.
    pub const SOFT_CE: Self = Self::Term(2);
    /// Σ p^t log(p^t/p^d).
    pub const KL: Self = Self::Term(3);
    const COUNT: i64 = TERMS.len() as i64 + 3;

    fn column_index(self) -> i64 {
        match self {
            Self::Term(term) => term as i64,
            Self::AdaptiveCe => TERMS.len() as i64,
            Self::Loss => TERMS.len() as i64 + 1,
            Self::Agreement => TERMS.len() as i64 + 2,
            Self::Extra(column) => Self::COUNT + column,
        }
    }
}

impl LossOutput {
    /// One measurement of all rows, `[R]`.
    pub fn column(&self, column: LossColumn) -> Tensor {
        self.rows.select(1, column.column_index())
    }
}

/// Maximum rows of a chunk. `value` is the bytes of a logit; `adds_in_place` says whether a CPU adds the bias to the
/// logits in place.
fn max_chunk_rows(vocab: i64, adds_in_place: bool, value: usize, device: Device) -> i64 {
    let (bytes, value, (least, most)) = match (device, adds_in_place) {
        (Device::Cpu, false) => (CHUNK_BYTES, 4, CHUNK_ROW_LIMITS),
        (Device::Cpu, true) => (CHUNK_BYTES_IN_PLACE, 4, CHUNK_ROW_LIMITS_IN_PLACE),
        _ => (GPU_CHUNK_BYTES, value as i64, GPU_CHUNK_ROW_LIMITS),
    };
    (bytes / (value * vocab)).clamp(least, most)
}

/// Maximum rows of a tile.
fn max_tile_rows(vocab: i64, device: Device, recipe: &LossRecipe) -> i64 {
    match device {
        Device::Cpu => TILE_BYTES / (4 * vocab),
        _ if recipe.block_verification.is_some() => GPU_TILE_ROWS / 2,
        _ => GPU_TILE_ROWS,
    }
}

/// Rows per chunk: `rows` split into equal chunks, rounded up to whole blocks of γ, at most `most`.
fn even_chunk_rows(most: i64, rows: i64, gamma: i64) -> i64 {
    let up = |value: i64, to: i64| (value + to - 1) / to;
    let chunks = up(rows, most).max(1);
    (up(up(rows, chunks), gamma) * gamma).min(most)
}

/// Estimated buffer bytes of [`distill_loss`] for this many rows: a chunk's logits of drafter and target, plus a
/// tile's float32 temporaries on a GPU.
pub fn buffer_bytes(vocab: i64, rows: usize, kind: Kind, device: Device) -> usize {
    const LOGIT_BUFFERS: usize = 2;
    const FLOAT32_TEMPORARIES: usize = 6;
    let value = kind.elt_size_in_bytes();
    let chunk = rows.min(max_chunk_rows(vocab, false, value, device) as usize);
    let tile = if device == Device::Cpu { 0 } else { rows.min(GPU_TILE_ROWS as usize) };
    (chunk * LOGIT_BUFFERS * value + tile * FLOAT32_TEMPORARIES * size_of::<f32>()) * vocab as usize
}

/// Computes losses and gradients of all rows. Autograd must be off.
///
/// Memory is used for the buffers of one chunk and the temporaries of one tile.
pub fn distill_loss(head: &LossHead, rows: &SupervisedRows, recipe: &LossRecipe) -> LossOutput {
    let _range = range(c"objective");
    let (weight, kind, device) = (&head.weight, rows.hidden.kind(), rows.hidden.device());
    let vocab = weight.size()[0];
    // The kernels need target probabilities, computed once for all rows that share a target state. A soft-cap, an
    // `AuxLoss`, block verification and the argmax need the logits of whole rows instead.
    let is_weighed = cfg!(feature = "kernels")
        && kind == Kind::Float
        && device == Device::Cpu
        && head.softcap.is_none()
        && rows.extra.is_none()
        && !rows.agreement
        && recipe.block_verification.is_none();
    // With the kernels, the bias is added to the logits in place, and both share one gradient. Elsewhere the bias has
    // a buffer per row. GPU sums over shared rows would depend on thread order, a soft-cap applies to the base alone,
    // and bfloat16 would round twice.
    let adds_in_place = is_weighed && rows.bias.is_some();
    let most = max_chunk_rows(vocab, adds_in_place, kind.elt_size_in_bytes(), device);
    let chunks = split_into_spans(rows.counts, even_chunk_rows(most, rows.labels.size()[0], rows.gamma));
    // libtorch caches code for every shape of a bfloat16 matmul on the CPU, so there each row gets its own target
    // state.
    let are_shared = kind == Kind::Float || device != Device::Cpu;
    let range_of =
        |chunk: &BlockSpan| if are_shared { rows.sources.state_range(chunk) } else { (0, chunk.rows) };
    let ranges: Vec<(i64, i64)> = chunks.iter().map(range_of).collect();
    let tile =
        if is_weighed { TILE_BYTES_IN_PLACE / (4 * vocab) } else { max_tile_rows(vocab, device, recipe) };
    let of_sources = ranges.iter().map(|(_, count)| *count).max().unwrap_or(0);
    let largest = chunks.iter().map(|chunk| chunk.rows).max().unwrap_or(0);
    let buffer = |rows: i64| match is_weighed {
        true => padded_buffer(rows, vocab),
        false => Tensor::empty([rows, vocab], (kind, device)),
    };
    let logits = buffer(largest + of_sources);
    let biases = rows.bias.filter(|_| !adds_in_place).map(|_| buffer(largest));
    let at_a_time = if adds_in_place { BIAS_CHUNK_TOKENS.min(vocab) } else { vocab };
    let have_it_in_common = |bias: &LowRankBias| adds_in_place && bias.feature_group.is_some();
    let shared_bias = rows.bias.filter(have_it_in_common).map(|_| padded_buffer(largest, at_a_time));
    let columns = LossColumn::COUNT + rows.extra.map_or(0, AuxLoss::column_count);
    let output = LossOutput {
        grad_hidden: rows.hidden.empty_like(),
        grad_features: rows.bias.map(|bias| bias.features.empty_like()),
        rows: Tensor::zeros([rows.labels.size()[0], columns], (Kind::Float, device)),
    };
    for (chunk, &(first, count)) in chunks.iter().zip(&ranges) {
        let (n, are_rows) = (chunk.rows, !are_shared || rows.sources.has_consecutive_states(chunk));
        let source_of_row = (!are_rows).then(|| chunk.slice_rows(rows.sources.there) - first);
        let teacher = if are_shared {
            rows.teacher.narrow(0, first, count)
        } else {
            rows.teacher.index_select(0, &chunk.slice_rows(rows.sources.there))
        };
        // Drafter and target share the LM head, so one matmul computes the logits of both and reads the head once.
        let states = Tensor::cat(&[chunk.slice_rows(rows.hidden), teacher], 0);
        let (base, mut target) = (logits.narrow(0, 0, n), logits.narrow(0, n, count));
        let mut bias = rows
            .bias
            .zip(output.grad_features.as_ref())
            .map(|(of, by_features)| ChunkBias::new(of, chunk, by_features, shared_bias.as_ref()));
        let bias_buffer = biases.as_ref().map(|biases| biases.narrow(0, 0, n));
        let both = logits.narrow(0, 0, n + count);
        for tokens in VocabChunk::split_vocab(vocab, at_a_time) {
            matmul_into(&states, &tokens.slice_weight(weight).tr(), &mut tokens.slice_logits(&both), false);
            if let Some(bias) = &bias {
                bias.write_logits(
                    &tokens,
                    &mut tokens.slice_logits(bias_buffer.as_ref().unwrap_or(&base)),
                    bias_buffer.is_none(),
                );
            }
        }
        let entropies = is_weighed.then(|| {
            softmax_targets(&mut target, rows.required_stats(recipe).soft)
                .expect("float32 logits as a product leaves them, and memory")
        });
        for tile in split_into_spans(&rows.counts[chunk.first_block..chunk.first_block + chunk.blocks], tile)
        {
            let in_all = BlockSpan {
                first_block: chunk.first_block + tile.first_block,
                first_row: chunk.first_row + tile.first_row,
                ..tile
            };
            let of_tile =
                |of: &Tensor| if source_of_row.is_some() { of.shallow_clone() } else { tile.slice_rows(of) };
            let logits = LogitsTile {
                base: tile.slice_rows(&base),
                bias: bias_buffer.as_ref().map(|bias_buffer| tile.slice_rows(bias_buffer)),
                target: of_tile(&target),
                entropies: entropies.as_ref().map(of_tile),
                source_of_row: source_of_row.as_ref().map(|of_row| tile.slice_rows(of_row)),
            };
            let found = logits.backward_in_place(head, rows, &in_all, recipe);
            in_all.slice_rows(&output.rows).copy_(&found);
        }
        let by_bias = bias_buffer.as_ref().unwrap_or(&base);
        // Without a soft-cap, base and bias share one gradient, in the bias buffer.
        let by_base = if head.softcap.is_none() { by_bias } else { &base };
        let mut by_hidden = chunk.slice_rows(&output.grad_hidden);
        for tokens in VocabChunk::split_vocab(vocab, at_a_time) {
            let by_logits = tokens.slice_logits(by_base);
            matmul_into(&by_logits, &tokens.slice_weight(weight), &mut by_hidden, !tokens.is_first());
            if let Some(bias) = &mut bias {
                bias.backward(&tokens, &tokens.slice_logits(by_bias));
            }
        }
        if let Some((bias, by_features)) = bias.zip(output.grad_features.as_ref()) {
            bias.write_shared_gradients(chunk, by_features);
        }
    }
    output
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_even_and_no_larger_than_they_may_be() {
        assert_eq!(even_chunk_rows(128, 448, 7), 112, "four, and not three of 126 and one of 70");
        assert_eq!(even_chunk_rows(224, 672, 7), 224);
        assert_eq!(even_chunk_rows(64, 3584, 7), 64, "of which whole blocks fill 63");
        assert_eq!(
            (even_chunk_rows(224, 5, 7), even_chunk_rows(64, 65, 1), even_chunk_rows(64, 0, 7)),
            (7, 33, 0)
        );
        // Each chunk has less than a block of unused rows.
        let counts: Vec<usize> = (0..64).map(|block| 1 + block % 7).collect();
        let rows = counts.iter().sum::<usize>() as i64;
        let chunks = split_into_spans(&counts, even_chunk_rows(100, rows, 7));
        assert!(chunks.iter().all(|chunk| chunk.rows <= 100) && chunks.len() == 3, "{}", chunks.len());
    }

    /// Named columns match the terms of that name, and no two columns share a place.
    #[test]
    fn every_column_is_found_where_it_was_put() {
        for (column, name) in
            [(LossColumn::CE, "ce"), (LossColumn::L1, "l1"), (LossColumn::SOFT_CE, "soft_ce")]
        {
            let LossColumn::Term(term) = column else { panic!("{column:?} is no term") };
            assert_eq!(TERMS[term].name(), name);
        }
        let all = (0..TERMS.len()).map(LossColumn::Term).chain([
            LossColumn::AdaptiveCe,
            LossColumn::Loss,
            LossColumn::Agreement,
        ]);
        assert!(all.map(LossColumn::column_index).eq(0..LossColumn::COUNT));
    }
}
