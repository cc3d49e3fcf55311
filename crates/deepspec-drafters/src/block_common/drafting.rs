//! Drafting the tokens of blocks from the backbone's hidden states.

use tch::Tensor;

use super::BlockDrafter;
use crate::draft_model::DraftModel;

/// Blocks of S sequences after the backbone.
pub struct BlockStates<'a> {
    /// Hidden states after the final norm of the H slots that the heads read, `[S, H, d]`: the γ drafting slots, or all slots of a block
    /// with [`READS_ANCHOR_SLOT`](crate::DrafterSettings::READS_ANCHOR_SLOT).
    pub hidden: &'a Tensor,
    /// Last committed token of each sequence, `[S]`.
    pub anchors: &'a Tensor,
    /// Token before each anchor, `[S]`; None unless the heads read the anchor's slot.
    pub before_anchors: Option<&'a Tensor>,
}

/// Picks the tokens `[S]` of drafted slot k from its float32 logits `[S, V]`. It is called once per slot, in order.
pub type ChooseTokens<'a> = &'a mut dyn FnMut(i64, &Tensor) -> Tensor;

/// Drafts one slot after the other: see [`BlockDrafter::draft`]. `step(base, hidden, previous)` returns the logits `[S, V]` of the next
/// slot and the embeddings `[S, r]` of the previous tokens `[S]`. `base` are the LM head's logits of the hidden states `[S, d]`.
pub fn draft_in_turn<K: BlockDrafter>(
    model: &DraftModel<K>,
    blocks: &BlockStates,
    choose: ChooseTokens,
    mut step: impl FnMut(Tensor, &Tensor, &Tensor) -> (Tensor, Option<Tensor>),
) -> Option<Tensor> {
    let base = model.base_logits(blocks.hidden); // [S, γ, V]
    let (mut previous, mut embeddings) = (blocks.anchors.shallow_clone(), vec![]);
    for k in 0..base.size()[1] {
        let (logits, embedding) = step(base.select(1, k), &blocks.hidden.select(1, k), &previous);
        embeddings.extend(embedding);
        previous = choose(k, &logits);
    }
    (!embeddings.is_empty()).then(|| Tensor::stack(&embeddings, 1))
}
