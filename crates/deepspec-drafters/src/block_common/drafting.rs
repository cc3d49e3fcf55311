//! Drafting blocks and trees of tokens from the backbone's hidden states.

use std::collections::BTreeMap;

use deepspec_engine::{DraftRequest, Proposal, TreeBudget, grow_tree, likeliest_tokens};
use deepspec_ops::DraftTree;
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

/// Recurrent state of the tokens behind an anchor, `[S, r]`; None before the first slot, and for drafters without such a state.
pub type PrefixState = Option<Tensor>;

/// One slot of S blocks, and the tokens before it.
pub struct SlotInputs<'a> {
    /// Drafting slot k, from 0.
    pub slot: i64,
    /// Logits of [`BlockDrafter::slot_logits`], `[S, V]`.
    pub base: Tensor,
    /// Hidden states of the slot, `[S, d]`, unless the heads read the anchor's slot.
    pub hidden: &'a Tensor,
    /// The tokens before the slot, `[S]`: anchors for slot 0.
    pub previous: &'a Tensor,
}

/// Drafts the tokens of blocks, one slot after the other. Returns the embeddings `[S, γ, r]` of the tokens before the slots, for the
/// confidence head.
pub fn draft<K: BlockDrafter>(
    model: &DraftModel<K>,
    blocks: &BlockStates,
    choose: ChooseTokens,
) -> Option<Tensor> {
    let base = K::slot_logits(model, blocks); // [S, γ, V]
    let (mut previous, mut state, mut embeddings) = (blocks.anchors.shallow_clone(), None, vec![]);
    for k in 0..base.size()[1] {
        let hidden = blocks.hidden.select(1, k);
        let slot = SlotInputs { slot: k, base: base.select(1, k), hidden: &hidden, previous: &previous };
        let (logits, embedding) = K::step(model, slot, &mut state);
        embeddings.extend(embedding);
        previous = choose(k, &logits);
    }
    (!embeddings.is_empty()).then(|| Tensor::stack(&embeddings, 1))
}

/// Drafts a block behind each anchor of `request`, and the confidence of its tokens.
pub fn propose<K: BlockDrafter>(
    model: &DraftModel<K>,
    blocks: &BlockStates,
    request: &DraftRequest,
) -> Proposal {
    let mut draws = vec![];
    let embeddings = draft(model, blocks, &mut |k, logits| {
        let (drawn, distribution) = request.sampling.sample(logits, &request.uniforms.select(1, k));
        draws.push((drawn.shallow_clone(), distribution));
        drawn
    });
    let confidence = model.confidence_logits(blocks.hidden, embeddings.as_ref());
    Proposal::stack(draws, confidence)
}

/// Grows a tree behind each anchor. `temperature(s)` divides the logits of sequence s for the ranking of its nodes.
pub fn grow_trees<K: BlockDrafter>(
    model: &DraftModel<K>,
    blocks: &BlockStates,
    budget: TreeBudget,
    max_depth: usize,
    temperature: impl Fn(usize) -> f64,
) -> Vec<DraftTree> {
    let base = K::slot_logits(model, blocks); // [S, γ, V]
    let max_depth = max_depth.min(base.size()[1] as usize);
    let sequences = 0..base.size()[0] as usize;
    sequences
        .map(|s| {
            let one = |rows: &Tensor| rows.narrow(0, s as i64, 1);
            let sequence = SequenceBlock {
                model,
                base: one(&base),
                hidden: one(blocks.hidden),
                anchor: one(blocks.anchors),
                temperature: temperature(s),
                width: budget.width,
            };
            if model.modules.reads_prefix() {
                sequence.grow_by_prefix(budget, max_depth)
            } else {
                grow_by_slot(&sequence.base.squeeze_dim(0), sequence.temperature, budget, max_depth)
            }
        })
        .collect()
}

/// Grows a tree over the slots' own distributions, of float32 logits `[γ, V]`. All nodes of a depth have the same children.
/// `max_depth` is γ at most.
pub fn grow_by_slot(logits: &Tensor, temperature: f64, budget: TreeBudget, max_depth: usize) -> DraftTree {
    let children = likeliest_tokens(logits, temperature, budget.width);
    grow_tree(budget, max_depth, |row| children[row.depth].clone())
}

/// The block of one sequence, from which a tree grows.
struct SequenceBlock<'a, K: BlockDrafter> {
    model: &'a DraftModel<K>,
    /// `[1, γ, V]`.
    base: Tensor,
    /// `[1, H, d]`.
    hidden: Tensor,
    /// `[1]`.
    anchor: Tensor,
    temperature: f64,
    /// Most children of a node.
    width: usize,
}

impl<K: BlockDrafter> SequenceBlock<'_, K> {
    /// Grows a tree over distributions that depend on the tokens of a node's path.
    fn grow_by_prefix(&self, budget: TreeBudget, max_depth: usize) -> DraftTree {
        // State behind every row's prefix. Rows that are never scored have none.
        let mut states: BTreeMap<usize, PrefixState> = BTreeMap::new();
        grow_tree(budget, max_depth, |row| {
            let slot = row.depth as i64;
            let mut state = match row.token {
                Some(_) => {
                    states.get(&row.parent).and_then(|state| state.as_ref().map(Tensor::shallow_clone))
                }
                None => None,
            };
            let previous = match row.token {
                Some(token) => Tensor::from_slice(&[token]).to_device(self.anchor.device()),
                None => self.anchor.shallow_clone(),
            };
            let inputs = SlotInputs {
                slot,
                base: self.base.select(1, slot),
                hidden: &self.hidden.select(1, slot),
                previous: &previous,
            };
            let (logits, _) = K::step(self.model, inputs, &mut state);
            states.insert(row.row, state);
            likeliest_tokens(&logits, self.temperature, self.width).remove(0)
        })
    }
}
