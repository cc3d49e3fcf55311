//! SDPA calls that compute the attention of a group of chunks, and their masks.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::{KV_ALIGN, MaskKind};

/// Maximum scores per key head and sequence for a chunk to be one call.
const MAX_UNSPLIT_SCORES: usize = 1 << 27;
/// Maximum scores per call of a longer chunk, which is split. The masks of its calls are built one at a time.
const MAX_CALL_SCORES: usize = 1 << 25;

/// Settings of a layer that determine its masks.
#[derive(PartialEq)]
pub struct MaskShape {
    /// Query heads per key/value head.
    pub repeats: usize,
    /// Sliding window: number of tokens that a query sees; None without a window.
    pub window: Option<usize>,
}

/// One SDPA call over queries of a group.
pub struct SdpaSlice {
    /// Rows within every chunk.
    pub rows: Range<usize>,
    /// Key positions that the call reads.
    pub keys: Range<usize>,
    /// The mask, if it is built in advance for all layers; see [`SdpaSlice::build_mask`].
    pub mask: Option<Tensor>,
}

impl MaskShape {
    /// Splits chunks of `width` tokens into calls. `span` is the sequence length after the chunk, rounded up to
    /// `KV_ALIGN`. For a mask shape, only these two numbers decide which keys a call reads.
    pub fn split_into_calls(&self, width: usize, span: usize, visibility: MaskKind) -> Vec<SdpaSlice> {
        let scores = self.repeats * span;
        let most =
            if scores * width <= MAX_UNSPLIT_SCORES { width } else { (MAX_CALL_SCORES / scores).max(1) };
        let most = self.window.map_or(most, |window| most.min(window.max(KV_ALIGN)));
        // Sequences of a group differ in length by less than KV_ALIGN.
        let (least_held, most_held) = ((span + 1).saturating_sub(KV_ALIGN + width), span - width);
        let piece = |start: usize| {
            let rows = start..width.min(start + most);
            let end = match visibility {
                MaskKind::Causal => (most_held + rows.end).next_multiple_of(KV_ALIGN),
                MaskKind::Block => span,
            };
            let first = self.window.map_or(0, |window| (least_held + start + 1).saturating_sub(window));
            SdpaSlice { rows, keys: first / KV_ALIGN * KV_ALIGN..end, mask: None }
        };
        (0..width).step_by(most).map(piece).collect()
    }
}

impl SdpaSlice {
    /// The additive mask, 0 or −∞, `[S, 1, repeats·rows, keys]`, for sequences of `past_len [S, 1, 1]` tokens.
    pub fn build_mask(
        &self,
        view: &MaskShape,
        past_len: &Tensor,
        width: i64,
        visibility: MaskKind,
        kind: Kind,
    ) -> Tensor {
        let range = |range: &Range<usize>| {
            Tensor::arange_start(range.start as i64, range.end as i64, (Kind::Int64, past_len.device()))
        };
        let (keys, own) = (range(&self.keys), past_len + range(&self.rows).unsqueeze(1)); // [T], [S, L, 1]
        let mut hidden = match visibility {
            MaskKind::Causal => keys.gt_tensor(&own),
            MaskKind::Block => keys.gt_tensor(&(past_len + (width - 1)).expand_as(&own)),
        }; // [S, L, T]
        if let Some(window) = view.window {
            hidden = hidden.logical_or(&keys.le_tensor(&(own - window as i64)));
        }
        let mask = hidden.zeros_like().to_kind(kind).masked_fill(&hidden, f64::NEG_INFINITY);
        let repeats = view.repeats as i64;
        mask.unsqueeze(1).expand([-1, repeats, -1, -1], false).flatten(1, 2).unsqueeze(1)
    }
}
