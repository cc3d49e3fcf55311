//! The walk over all supervised rows: head, Markov bias, losses and their gradients, some rows at a time.

use tch::{Device, Kind, Tensor};

use super::bias::{Bias, ChunkBias};
use super::inputs::{LossHead, RowObjective, Supervised};
use super::pieces::{TokenRange, pitch, spaced};
use super::recipe::LossRecipe;
use super::rows::Logits;
use super::span::{Span, spans};
use super::terms::TERMS;
use crate::ffi::{multiply, range, softmax_targets};

/// Rows of a chunk: matrix products want many, memory few. A chunk with this many bytes per float32 buffer lies between.
const CHUNK_BYTES: i64 = 40 << 20;
const CHUNK_ROWS: (i64, i64) = (64, 224);
/// Where a bias is added to the logits in place and has no buffer of its own: of more rows, more may have it in common.
const CHUNK_BYTES_IN_PLACE: i64 = 64 << 20;
const CHUNK_ROWS_IN_PLACE: (i64, i64) = (64, 448);
/// A GPU reads the whole head for every chunk, and writes the gradients of all of a Markov head's weights, which few rows do not pay for: each of the latter's
/// products took 0.5 ms of an H200 at V = 151,936, with 512 rows. A chunk with this many bytes per buffer lies between.
const GPU_CHUNK_BYTES: i64 = 544 << 20;
const GPU_CHUNK_ROWS: (i64, i64) = (512, 1792);
/// Rows whose temporaries a GPU has at a time, where it has any.
const GPU_TILE_ROWS: i64 = 512;
/// Between the products lie a few passes over a tile, which the CPU's caches should hold.
const TILE_BYTES: i64 = 1 << 19;
/// Of rows that are measured and differentiated in place, one after the other, it need not stay in the nearest ones: larger, so that operators are called
/// less often.
const TILE_BYTES_IN_PLACE: i64 = 4 << 20;
/// A bias that is added in place is made for so many tokens at a time, which the caches hold until it is added. A multiple of the inputs that our own products
/// add up at a time (matrices.cpp), whose sums so keep their bits.
const TOKENS_AT_A_TIME: i64 = 512;
/// Of logits, and of the states that they are made of: the drafter's and the target's.
const LOGITS: usize = 2;
/// Of a tile, at a time.
const TEMPORARIES: usize = 6;
/// With a soft-cap, whose slope is kept.
const TEMPORARIES_OF_CAP: usize = TEMPORARIES + 1;
/// The same of float32 on the CPU, where losses are measured and differentiated in place, and only a soft-cap leaves something.
const TEMPORARIES_OF_CAP_IN_PLACE: usize = 5;

/// Gradients by the inputs, and what was found about each row.
pub struct LossOutput {
    /// By the states, `[R, d]`.
    pub hidden: Tensor,
    /// By the features, `[R, r]`; None without a Markov head. Of rows that are given as alike, one may have the gradient of all.
    pub features: Option<Tensor>,
    /// One column for each [`Column`], float32.
    rows: Tensor,
}

/// What is found about a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Column {
    /// One of [`TERMS`], without any weight; 0 where it is not learned and was not measured.
    Term(usize),
    /// The label's cross entropy with D-PACE's weight; 0 without it.
    Dpace,
    /// The α- and position-weighted loss, the confidence's apart.
    Loss,
    /// 1 where drafter and target prefer the same token; 0 where that was not asked for.
    Agreement,
    /// One of the columns of a [`RowObjective`].
    Extra(i64),
}

impl Column {
    /// ‖p^d − p^t‖₁, always measured.
    pub const L1: Self = Self::Term(1);
    /// −Σ p^t log p^d.
    pub const SOFT_CE: Self = Self::Term(2);
    const COUNT: i64 = TERMS.len() as i64 + 3;

    fn place(self) -> i64 {
        match self {
            Self::Term(term) => term as i64,
            Self::Dpace => TERMS.len() as i64,
            Self::Loss => TERMS.len() as i64 + 1,
            Self::Agreement => TERMS.len() as i64 + 2,
            Self::Extra(column) => Self::COUNT + column,
        }
    }
}

impl LossOutput {
    /// What was found of all rows, `[R]`.
    pub fn column(&self, column: Column) -> Tensor {
        self.rows.select(1, column.place())
    }
}

/// Most rows of a chunk, of values of so many bytes; `adds_in_place` says whether on the CPU a bias is added to its logits in place.
fn most_chunk_rows(vocab: i64, adds_in_place: bool, value: usize, device: Device) -> i64 {
    let (bytes, value, (least, most)) = match (device, adds_in_place) {
        (Device::Cpu, false) => (CHUNK_BYTES, 4, CHUNK_ROWS),
        (Device::Cpu, true) => (CHUNK_BYTES_IN_PLACE, 4, CHUNK_ROWS_IN_PLACE),
        _ => (GPU_CHUNK_BYTES, value as i64, GPU_CHUNK_ROWS),
    };
    (bytes / (value * vocab)).clamp(least, most)
}

/// Most rows of a tile.
fn most_tile_rows(vocab: i64, device: Device) -> i64 {
    match device {
        Device::Cpu => TILE_BYTES / (4 * vocab),
        _ => GPU_TILE_ROWS,
    }
}

/// Rows of a chunk, of so many rows in blocks of γ: all chunks have as many as one another, but for the last block's.
fn even(most: i64, rows: i64, gamma: i64) -> i64 {
    let up = |value: i64, to: i64| (value + to - 1) / to;
    let chunks = up(rows, most).max(1);
    (up(up(rows, chunks), gamma) * gamma).min(most)
}

/// Shape of a head, as far as memory depends on it.
#[derive(Debug, Clone, Copy)]
pub struct HeadShape {
    /// V, size of the vocabulary.
    pub vocab: i64,
    /// d, width of the hidden states.
    pub width: usize,
    /// Whether logits have a soft-cap.
    pub is_capped: bool,
}

/// Bytes that [`distill_loss`] works with beside its results for so many rows in blocks of γ, in a kind of `value` bytes: a chunk's logits and the
/// states that they are made of, the `bias` of a Markov head where that has a buffer of its own, else what rows have of it in common, and a tile's
/// temporaries. No two rows are taken to have one source, and drafters with a bias to have no other objective. Of a few rows less, which take one
/// chunk less, there can be more in a chunk.
pub fn buffer_bytes(
    head: HeadShape,
    bias: bool,
    rows: usize,
    gamma: i64,
    value: usize,
    device: Device,
) -> usize {
    let HeadShape { vocab, width, is_capped } = head;
    let is_float_on_cpu = device == Device::Cpu && value == size_of::<f32>();
    let is_weighed = is_float_on_cpu && !is_capped;
    let most = most_chunk_rows(vocab, bias && is_weighed, value, device);
    let chunk = even(most, rows as i64, gamma).max(gamma) as usize;
    let of_logits = if is_weighed { pitch(vocab) } else { vocab };
    let of_bias = match (bias, is_weighed) {
        (false, _) => 0,
        (true, true) => pitch(TOKENS_AT_A_TIME.min(vocab)),
        (true, false) => vocab,
    };
    let of_row = LOGITS * of_logits as usize + of_bias as usize + LOGITS * width;
    let temporaries = match (is_float_on_cpu, is_capped) {
        (true, false) => 0,
        (true, true) => TEMPORARIES_OF_CAP_IN_PLACE,
        (false, true) => TEMPORARIES_OF_CAP,
        (false, false) => TEMPORARIES,
    };
    // Unless targets are weighed before ([`distill_loss`]), rows get copies of their sources'.
    let tile = tile_rows(vocab, rows, gamma, device) * vocab as usize;
    chunk * of_row * value + tile * (value + temporaries * size_of::<f32>())
}

/// Rows of a tile, of so many rows in blocks of γ.
pub fn tile_rows(vocab: i64, rows: usize, gamma: i64, device: Device) -> usize {
    most_tile_rows(vocab, device).min(rows as i64).max(gamma) as usize
}

/// Losses of all rows and their gradients. To be called without a graph.
///
/// Beside its results it holds the buffers of one chunk and the temporaries of a tile ([`buffer_bytes`]).
pub fn distill_loss(head: &LossHead, rows: &Supervised, recipe: &LossRecipe) -> LossOutput {
    let _range = range(c"objective");
    let (weight, kind, device) = (&head.weight, rows.hidden.kind(), rows.hidden.device());
    let vocab = weight.size()[0];
    // The target's logits become probabilities before rows are measured beside them, once for all rows of a source. A soft-cap and an extra objective
    // go over the logits of whole rows, and which token is preferred is asked of them.
    let is_weighed = kind == Kind::Float
        && device == Device::Cpu
        && head.softcap.is_none()
        && rows.extra.is_none()
        && !rows.agreement;
    // Then a bias is added to the logits at once, and both have one gradient. Elsewhere it has a place of its own, and is by row: on GPUs sums over rows
    // that have it in common would depend on the order of threads, a soft-cap lies between both, and narrower kinds would be rounded once more.
    let adds_in_place = is_weighed && rows.bias.is_some();
    let most = most_chunk_rows(vocab, adds_in_place, kind.elt_size_in_bytes(), device);
    let chunks = spans(rows.counts, even(most, rows.labels.size()[0], rows.gamma));
    // For bfloat16 products of the CPU libtorch keeps code for each number of rows: there they stay as many as the chunk's.
    let are_shared = kind == Kind::Float || device != Device::Cpu;
    let range_of = |chunk: &Span| if are_shared { rows.sources.range(chunk) } else { (0, chunk.rows) };
    let ranges: Vec<(i64, i64)> = chunks.iter().map(range_of).collect();
    let tile = if is_weighed { TILE_BYTES_IN_PLACE / (4 * vocab) } else { most_tile_rows(vocab, device) };
    let of_sources = ranges.iter().map(|(_, count)| *count).max().unwrap_or(0);
    let largest = chunks.iter().map(|chunk| chunk.rows).max().unwrap_or(0);
    let buffer = |rows: i64| match is_weighed {
        true => spaced(rows, vocab),
        false => Tensor::empty([rows, vocab], (kind, device)),
    };
    let logits = buffer(largest + of_sources);
    let biases = rows.bias.filter(|_| !adds_in_place).map(|_| buffer(largest));
    let at_a_time = if adds_in_place { TOKENS_AT_A_TIME.min(vocab) } else { vocab };
    let have_it_in_common = |bias: &Bias| adds_in_place && bias.alike.is_some();
    let in_common = rows.bias.filter(have_it_in_common).map(|_| spaced(largest, at_a_time));
    let columns = Column::COUNT + rows.extra.map_or(0, RowObjective::columns);
    let output = LossOutput {
        hidden: rows.hidden.empty_like(),
        features: rows.bias.map(|bias| bias.features.empty_like()),
        rows: Tensor::zeros([rows.labels.size()[0], columns], (Kind::Float, device)),
    };
    for (chunk, &(first, count)) in chunks.iter().zip(&ranges) {
        let (n, are_rows) = (chunk.rows, !are_shared || rows.sources.are_the_rows(chunk));
        let source_of_row = (!are_rows).then(|| chunk.of(rows.sources.there) - first);
        let teacher = if are_shared {
            rows.teacher.narrow(0, first, count)
        } else {
            rows.teacher.index_select(0, &chunk.of(rows.sources.there))
        };
        // Draft and target share the head, so that it is read once for both.
        let states = Tensor::cat(&[chunk.of(rows.hidden), teacher], 0);
        let (base, mut target) = (logits.narrow(0, 0, n), logits.narrow(0, n, count));
        let mut bias = rows
            .bias
            .zip(output.features.as_ref())
            .map(|(of, by_features)| ChunkBias::new(of, chunk, by_features, in_common.as_ref()));
        let apart = biases.as_ref().map(|biases| biases.narrow(0, 0, n));
        let both = logits.narrow(0, 0, n + count);
        for tokens in TokenRange::pieces(vocab, at_a_time) {
            multiply(&states, &tokens.of_weight(weight).tr(), &mut tokens.of_logits(&both), false);
            if let Some(bias) = &bias {
                bias.write(&tokens, &mut tokens.of_logits(apart.as_ref().unwrap_or(&base)), apart.is_none());
            }
        }
        let entropies = is_weighed.then(|| {
            softmax_targets(&mut target, rows.needs(recipe).soft)
                .expect("float32 logits as a product leaves them, and memory")
        });
        for tile in spans(&rows.counts[chunk.first_block..chunk.first_block + chunk.blocks], tile) {
            let in_all = Span {
                first_block: chunk.first_block + tile.first_block,
                first_row: chunk.first_row + tile.first_row,
                ..tile
            };
            let of_tile =
                |of: &Tensor| if source_of_row.is_some() { of.shallow_clone() } else { tile.of(of) };
            let logits = Logits {
                base: tile.of(&base),
                bias: apart.as_ref().map(|apart| tile.of(apart)),
                target: of_tile(&target),
                entropies: entropies.as_ref().map(of_tile),
                source_of_row: source_of_row.as_ref().map(|of_row| tile.of(of_row)),
            };
            let found = logits.differentiate(head, rows, &in_all, recipe);
            in_all.of(&output.rows).copy_(&found);
        }
        let by_bias = apart.as_ref().unwrap_or(&base);
        // Without a soft-cap the gradients by base and bias are the same, and lie where the bias' do.
        let by_base = if head.softcap.is_none() { by_bias } else { &base };
        let mut by_hidden = chunk.of(&output.hidden);
        for tokens in TokenRange::pieces(vocab, at_a_time) {
            let by_logits = tokens.of_logits(by_base);
            multiply(&by_logits, &tokens.of_weight(weight), &mut by_hidden, !tokens.is_first());
            if let Some(bias) = &mut bias {
                bias.backward(&tokens, &tokens.of_logits(by_bias));
            }
        }
        if let Some((bias, by_features)) = bias.zip(output.features.as_ref()) {
            bias.finish(chunk, by_features);
        }
    }
    output
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_even_and_no_larger_than_they_may_be() {
        assert_eq!(even(128, 448, 7), 112, "four, and not three of 126 and one of 70");
        assert_eq!(even(224, 672, 7), 224);
        assert_eq!(even(64, 3584, 7), 64, "of which whole blocks fill 63");
        assert_eq!((even(224, 5, 7), even(64, 65, 1), even(64, 0, 7)), (7, 33, 0));
        // What is left over is less than a block for each chunk.
        let counts: Vec<usize> = (0..64).map(|block| 1 + block % 7).collect();
        let rows = counts.iter().sum::<usize>() as i64;
        let chunks = spans(&counts, even(100, rows, 7));
        assert!(chunks.iter().all(|chunk| chunk.rows <= 100) && chunks.len() == 3, "{}", chunks.len());
    }

    /// Columns that are named here are the terms of that name, and no two share a place.
    #[test]
    fn every_column_is_found_where_it_was_put() {
        for (column, name) in [(Column::L1, "l1"), (Column::SOFT_CE, "soft_ce")] {
            let Column::Term(term) = column else { panic!("{column:?} is no term") };
            assert_eq!(TERMS[term].name(), name);
        }
        let all = (0..TERMS.len()).map(Column::Term).chain([Column::Dpace, Column::Loss, Column::Agreement]);
        assert!(all.map(Column::place).eq(0..Column::COUNT));
    }
}
