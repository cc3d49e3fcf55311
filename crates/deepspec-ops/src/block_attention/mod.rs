//! Attention of draft blocks: a block sees the context strictly before its anchor, and itself, whole or causally. No block sees another.

mod reference;
mod tiles;

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::attention::{AttentionSpec, Heads, Qkv};
use crate::ffi::{
    AttentionPart, BlockMasks, KeyValues, SequenceBlocks, TiledAttention, attend_by_block, block_attention,
    has_block_attention, has_tiled_attention,
};
use crate::kv_attention::MaskKind;
use tiles::plan_tiled_attention;

/// Maximum number of blocks in an [`AttentionPart`], whose blocks attend to the context together. Context before their first anchor needs
/// no mask; context between anchors does.
const BLOCKS_PER_PART: usize = 32;
/// Ranges of context keys are rounded to multiples of this. Otherwise libraries compile and keep a kernel for every new shape.
const KEY_RANGE_ALIGN: usize = 64;
/// Score of masked keys, or addition to it. It is finite, so that a row without visible keys still has a finite
/// log-sum-exp.
const MASKED_SCORE: f64 = -1e30;

/// Slots of a block, and which of them a slot sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockShape {
    /// B, number of slots.
    pub size: usize,
    /// Slots of its own block that a slot sees.
    pub mask: MaskKind,
}

/// Length and block anchors of one sequence.
pub struct SequenceAnchors {
    /// T, number of tokens of the sequence.
    pub tokens: i64,
    /// Positions of its anchors.
    pub anchors: Vec<usize>,
    /// Positions of its anchors on the device, `[A]`.
    pub positions: Tensor,
}

/// Attention of the blocks of some sequences, for layers of one shape.
pub struct BlockAttention {
    scale: f64,
    block_size: i64,
    kernel: Kernel,
}

/// Implementation that computes the attention.
enum Kernel {
    /// Products over tiles of blocks and parts of the context, merged by their log-sum-exps.
    Parts(Vec<SequenceParts>),
    /// Fused kernels of a GPU over all tiles of a sequence; `sizes` are its blocks and tokens.
    Tiled { sequences: Vec<TiledAttention>, sizes: Vec<[i64; 2]> },
    /// A CPU kernel, block by block.
    ByBlock { sequences: Vec<SequenceBlocks>, window: Option<i64> },
}

struct SequenceParts {
    spec: AttentionSpec,
    /// Positions of its anchors, `[A]`.
    anchors: Tensor,
    blocks: i64,
    tokens: i64,
    parts: Vec<AttentionPart>,
    mask: MaskKind,
    /// The additive mask within a block; None if its slots see each other.
    block_mask: Option<Tensor>,
}

/// Whether a CPU kernel computes the attention block by block.
fn has_cpu_block_kernel(heads: Heads, kind: Kind, device: Device) -> bool {
    device == Device::Cpu && kind == Kind::Float && has_block_attention(heads.dim)
}

impl BlockAttention {
    /// Plans blocks of this shape at the anchors of at least one sequence. Sorted anchors are fastest. `kind` is the dtype of the queries.
    /// Causal blocks and attention sinks are computed in parts.
    pub fn new(spec: &AttentionSpec, shape: BlockShape, spans: &[SequenceAnchors], kind: Kind) -> Self {
        let AttentionSpec { heads, scale, window, sinks } = *spec;
        debug_assert!(!spans.is_empty(), "no sequences");
        let is_whole = shape.mask == MaskKind::Block;
        // Only the merge of parts has sinks.
        let by_block = !sinks
            && is_whole
            && spans.iter().all(|span| has_cpu_block_kernel(heads, kind, span.positions.device()));
        let kernel = if by_block {
            let of = |span: &SequenceAnchors| SequenceBlocks {
                tokens: span.tokens,
                anchors: span.anchors.iter().map(|&anchor| anchor as i64).collect(),
            };
            let window = window.map(|window| window as i64);
            Kernel::ByBlock { sequences: spans.iter().map(of).collect(), window }
        } else if !sinks
            && is_whole
            && window.is_none()
            && has_tiled_attention(&spans[0].positions, kind, heads.dim)
            && let Some(sequences) =
                plan_tiled_attention(heads, scale, shape.size, spans, spans[0].positions.device())
        {
            let sizes = spans.iter().map(|span| [span.anchors.len() as i64, span.tokens]).collect();
            Kernel::Tiled { sequences, sizes }
        } else {
            Kernel::Parts(spans.iter().map(|span| SequenceParts::new(spec, shape, span, kind)).collect())
        };
        Self { scale, block_size: shape.size as i64, kernel }
    }

    /// Queries, keys and values of the blocks `[ΣA·B, heads, D]`, and keys and values of the context `[ΣT, G, D]`, to `[ΣA·B, H·D]`.
    pub fn forward(&self, block: &Qkv, k: &Tensor, v: &Tensor) -> Tensor {
        match &self.kernel {
            Kernel::ByBlock { sequences, window } => {
                let (context, own) = (KeyValues { k, v }, KeyValues { k: &block.k, v: &block.v });
                attend_by_block(&block.q, &context, &own, sequences, *window, self.scale)
                    .expect("it was asked whether there are kernels for them")
            }
            Kernel::Parts(sequences) => {
                let sizes: Vec<[i64; 2]> = sequences.iter().map(|of| [of.blocks, of.tokens]).collect();
                let attend = |at: usize, block: &Qkv, k: &Tensor, v: &Tensor| {
                    self.attend_in_parts(&sequences[at], block, k, v)
                };
                self.attend_each_sequence(&sizes, block, (k, v), attend)
            }
            Kernel::Tiled { sequences, sizes } => {
                let attend = |at: usize, block: &Qkv, k: &Tensor, v: &Tensor| {
                    let (context, own) = (KeyValues { k, v }, KeyValues { k: &block.k, v: &block.v });
                    sequences[at].attend(&block.q, &context, &own)
                };
                self.attend_each_sequence(sizes, block, (k, v), attend)
            }
        }
    }

    /// Calls `attend` for each sequence. `sizes` holds (blocks, tokens) of each sequence.
    fn attend_each_sequence(
        &self,
        sizes: &[[i64; 2]],
        block: &Qkv,
        (k, v): (&Tensor, &Tensor),
        attend: impl Fn(usize, &Qkv, &Tensor, &Tensor) -> Tensor,
    ) -> Tensor {
        let rows: Vec<i64> = sizes.iter().map(|[blocks, _]| blocks * self.block_size).collect();
        let tokens: Vec<i64> = sizes.iter().map(|[_, tokens]| *tokens).collect();
        let [q, own_k, own_v] = [&block.q, &block.k, &block.v].map(|whole| split_rows(whole, &rows));
        let [k, v] = [k, v].map(|whole| split_rows(whole, &tokens));
        let own = q.into_iter().zip(own_k).zip(own_v).map(|((q, k), v)| Qkv {
            q,
            k,
            v,
            sinks: block.sinks.as_ref().map(Tensor::shallow_clone),
        });
        let mut outputs: Vec<Tensor> = (own.zip(k.iter().zip(&v)).enumerate())
            .map(|(at, (block, (k, v)))| attend(at, &block, k, v))
            .collect();
        match outputs.len() {
            1 => outputs.remove(0),
            _ => Tensor::cat(&outputs, 0),
        }
    }

    /// Attention of one sequence, in parts.
    fn attend_in_parts(&self, of: &SequenceParts, block: &Qkv, k: &Tensor, v: &Tensor) -> Tensor {
        let AttentionSpec { heads: Heads { query, key_value, dim }, scale, .. } = of.spec;
        let (repeats, size) = (of.spec.heads.num_kv_groups(), self.block_size);
        // The query heads that share keys become further queries: [A·B, H, D] -> [G, A, repeats·B, D].
        let q = block.q.view([-1, size, key_value, repeats, dim]).permute([2, 0, 3, 1, 4]);
        let q = q.reshape([key_value, -1, repeats * size, dim]);
        let own = |t: &Tensor| t.view([-1, size, key_value, dim]).permute([2, 0, 1, 3]); // [G, A, B, D]
        let (by_head, own_k, own_v) = ([k, v].map(|t| t.transpose(0, 1)), own(&block.k), own(&block.v));
        let (context, own) =
            (KeyValues { k: &by_head[0], v: &by_head[1] }, KeyValues { k: &own_k, v: &own_v });
        // The sinks of the query heads that share keys: [H] -> [G, 1, repeats·B].
        let sinks = block.sinks.as_ref().map(|sinks| {
            let by_head = sinks.view([key_value, 1, repeats, 1]).expand([key_value, 1, repeats, size], false);
            by_head.reshape([key_value, 1, repeats * size])
        });
        let masks = BlockMasks { parts: &of.parts, own: of.block_mask.as_ref() };
        let merged = block_attention(&q, &context, &own, &masks, sinks.as_ref(), scale);
        let Some(y) = merged else {
            return reference::block_attention(block, k, v, &of.anchors, (size, of.mask), &of.spec);
        };
        y.view([key_value, -1, repeats, size, dim]).permute([1, 3, 0, 2, 4]).reshape([-1, query * dim])
    }
}

/// Splits `whole` into parts of `rows` rows. With `narrow`, the gradient of each part would be as large as
/// `whole`.
fn split_rows(whole: &Tensor, rows: &[i64]) -> Vec<Tensor> {
    match rows {
        [_] => vec![whole.shallow_clone()],
        rows => whole.split_with_sizes(rows, 0),
    }
}

impl SequenceParts {
    fn new(spec: &AttentionSpec, shape: BlockShape, span: &SequenceAnchors, kind: Kind) -> Self {
        let BlockShape { size: block_size, mask } = shape;
        let (AttentionSpec { heads, window, .. }, SequenceAnchors { tokens, anchors, positions }) =
            (*spec, span);
        let masks = MaskBuilder {
            block_size: block_size as i64,
            repeats: heads.num_kv_groups(),
            window: window.map(|window| window as i64),
            mask,
            kind,
        };
        let rows = heads.num_kv_groups() * block_size as i64;
        let mut parts = vec![];
        for (tile, anchors) in anchors.chunks(BLOCKS_PER_PART).enumerate() {
            let first = (tile * BLOCKS_PER_PART) as i64;
            let positions = positions.narrow(0, first, anchors.len() as i64);
            for (keys, is_seen) in context_key_ranges(anchors, block_size, *tokens as usize, window) {
                let keys = keys.start as i64..keys.end as i64;
                let mask = (!is_seen).then(|| masks.context_mask(&positions, &keys));
                parts.push(AttentionPart {
                    rows: first * rows..(first + anchors.len() as i64) * rows,
                    keys,
                    mask,
                });
            }
        }
        let is_masked = mask == MaskKind::Causal || window.is_some_and(|window| window < block_size);
        let block_mask = is_masked.then(|| masks.block_mask(positions));
        let anchors_here = positions.shallow_clone();
        let blocks = anchors.len() as i64;
        Self { spec: *spec, anchors: anchors_here, blocks, tokens: *tokens, parts, mask, block_mask }
    }
}

/// Context key ranges of some blocks. The flag of a range is true if all slots see all its keys, and false if
/// only some do. A slot at position p sees keys after p − window.
fn context_key_ranges(
    anchors: &[usize],
    block_size: usize,
    tokens: usize,
    window: Option<usize>,
) -> impl Iterator<Item = (Range<usize>, bool)> + use<> {
    let (low, high) =
        (anchors.iter().min().copied().unwrap_or(0), anchors.iter().max().copied().unwrap_or(0));
    let behind = |position: usize| window.map_or(0, |window| (position + 1).saturating_sub(window));
    let down = |key: usize| key / KEY_RANGE_ALIGN * KEY_RANGE_ALIGN;
    let (first, last) = (down(behind(low)), high.next_multiple_of(KEY_RANGE_ALIGN).min(tokens));
    let of_all = behind(high + block_size - 1).next_multiple_of(KEY_RANGE_ALIGN)..down(low);
    let ranges = if of_all.is_empty() {
        [(first..last, false), (0..0, true), (0..0, false)]
    } else {
        [(first..of_all.start, false), (of_all.clone(), true), (of_all.end..last, false)]
    };
    // An anchor at 0 has no context.
    ranges.into_iter().filter(move |(keys, _)| high > 0 && !keys.is_empty())
}

struct MaskBuilder {
    block_size: i64,
    repeats: i64,
    window: Option<i64>,
    mask: MaskKind,
    kind: Kind,
}

impl MaskBuilder {
    /// The mask of context keys for blocks at `anchors [n]`: `[1, 1, n·repeats·B, K]`.
    fn context_mask(&self, anchors: &Tensor, keys: &Range<i64>) -> Tensor {
        let options = (Kind::Int64, anchors.device());
        let (anchors, blocks) = (anchors.view([-1, 1, 1]), anchors.size()[0]);
        let keys = Tensor::arange_start(keys.start, keys.end, options);
        let mut hidden = keys.ge_tensor(&anchors); // [n, 1, K]
        if let Some(window) = self.window {
            let slots = Tensor::arange(self.block_size, options).unsqueeze(1); // [B, 1]
            hidden = hidden.logical_or(&keys.le_tensor(&(anchors + slots - window))); // [n, B, K]
        }
        let all = [blocks, self.repeats, self.block_size, keys.size()[0]];
        self.additive_mask(&hidden.unsqueeze(1)).expand(all, false).reshape([1, 1, -1, all[3]])
    }

    /// The mask of a block for the keys of the same block, on the device of `like`: `[1, 1, repeats·B, B]`.
    fn block_mask(&self, like: &Tensor) -> Tensor {
        let slots = Tensor::arange(self.block_size, (Kind::Int64, like.device()));
        let window = self.window.unwrap_or(self.block_size);
        let mut hidden = slots.unsqueeze(0).le_tensor(&(slots.unsqueeze(1) - window)); // [B, B]
        if self.mask == MaskKind::Causal {
            hidden = hidden.logical_or(&slots.unsqueeze(0).gt_tensor(&slots.unsqueeze(1)));
        }
        self.additive_mask(&hidden).repeat([1, 1, self.repeats, 1])
    }

    fn additive_mask(&self, hidden: &Tensor) -> Tensor {
        Tensor::zeros(hidden.size(), (self.kind, hidden.device())).masked_fill(hidden, MASKED_SCORE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_shares_what_lies_before_it() {
        let of = |anchors: &[usize], window| context_key_ranges(anchors, 4, 300, window).collect::<Vec<_>>();
        assert_eq!(of(&[130, 140, 190], None), [(0..128, true), (128..192, false)]);
        assert_eq!(of(&[128], None), [(0..128, true)]);
        assert_eq!(of(&[290, 299], None), [(0..256, true), (256..300, false)]);
        assert_eq!(of(&[5, 9], None), [(0..64, false)]);
        assert_eq!(of(&[0], None), []);
        // The last slot of the last block stands at 203 and sees keys behind 3, the first slot of the first sees all.
        assert_eq!(of(&[190, 200], Some(200)), [(0..64, false), (64..128, true), (128..256, false)]);
        assert_eq!(of(&[190, 200], Some(30)), [(128..256, false)]);
        assert_eq!(of(&[190, 200], Some(1)), [(128..256, false)]);
    }

    /// Outputs of blocks of 4 slots at 40 anchors of 90 tokens, and gradients of all inputs.
    fn run(
        window: Option<usize>,
        sinks: bool,
        attend: impl Fn(&AttentionSpec, &SequenceAnchors, &Qkv, &Tensor, &Tensor) -> Tensor,
    ) -> Vec<Tensor> {
        let heads = Heads { query: 4, key_value: 2, dim: 16 };
        let spec = AttentionSpec { heads, scale: 0.25, window, sinks };
        let anchors: Vec<usize> = (0..40).map(|block| 2 * block + 5).collect();
        let positions: Vec<i64> = anchors.iter().map(|&anchor| anchor as i64).collect();
        let span = SequenceAnchors { tokens: 90, anchors, positions: Tensor::from_slice(&positions) };
        let values = |rows: i64, heads: i64, seed: u64| {
            let noise = deepspec_testkit::noise(seed, (rows * heads * 16) as usize);
            Tensor::from_slice(&noise).view([rows, heads, 16]).set_requires_grad(true)
        };
        let biases = Tensor::from_slice(&[-1.0_f32, 0.5, 2.0, 0.0]).set_requires_grad(true);
        let block = Qkv {
            q: values(160, 4, 1),
            k: values(160, 2, 2),
            v: values(160, 2, 3),
            sinks: sinks.then(|| biases.shallow_clone()),
        };
        let (k, v) = (values(90, 2, 4), values(90, 2, 5));
        let y = attend(&spec, &span, &block, &k, &v);
        (&y * y.sin()).sum(Kind::Float).backward();
        let inputs = [&block.q, &block.k, &block.v, &k, &v];
        let by_sinks = sinks.then(|| biases.grad());
        [y.detach()].into_iter().chain(inputs.map(Tensor::grad)).chain(by_sinks).collect()
    }

    #[test]
    fn kernels_compute_what_the_reference_computes() {
        let masks = [MaskKind::Block, MaskKind::Causal];
        let windows = [None, Some(30), Some(2)];
        let cases = masks.into_iter().flat_map(|mask| windows.map(|window| (mask, window)));
        for ((mask, window), sinks) in cases.flat_map(|case| [(case, false), (case, true)]) {
            let shape = BlockShape { size: 4, mask };
            let expected = run(window, sinks, |spec, span, block, k, v| {
                reference::block_attention(block, k, v, &span.positions, (4, mask), spec)
            });
            let found = run(window, sinks, |spec, span, block, k, v| {
                BlockAttention::new(spec, shape, std::slice::from_ref(span), Kind::Float).forward(block, k, v)
            });
            let in_parts = run(window, sinks, |spec, span, block, k, v| {
                let kernel = Kernel::Parts(vec![SequenceParts::new(spec, shape, span, Kind::Float)]);
                BlockAttention { scale: spec.scale, block_size: 4, kernel }.forward(block, k, v)
            });
            assert_eq!(expected.len(), 6 + usize::from(sinks));
            for (found, expected) in found.iter().chain(&in_parts).zip(expected.iter().cycle()) {
                // The gradient of a sink is a sum over all blocks.
                let scale = expected.abs().max().double_value(&[]).max(1.0);
                let error = (found - expected).abs().max().double_value(&[]) / scale;
                assert!(error < 1e-5, "{mask:?}, window {window:?}, sinks {sinks}: off by {error:e}");
            }
        }
    }
}
