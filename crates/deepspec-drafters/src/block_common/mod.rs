//! Code that the block drafters DSpark, DFlash, DFlash 2, Domino, xPress and DSpark of DeepSeek-V4 share.
//!
//! B tokens `[anchor, mask, …, mask]` run through the backbone at once, and γ of the slots draft one token each ([`SlotTarget`]). The
//! drafters differ in how they compute logits from hidden states.
//!
//! [`SlotTarget`]: deepspec_core::SlotTarget

mod backbone;
mod batch;
mod blocks;
mod convolution;
mod cost;
mod drafting;
pub(crate) mod formats;
mod layers;
mod losses;
mod predictions;
mod proposer;
pub(crate) mod sums;

pub use backbone::Backbone;
pub use batch::{BlockBatch, anchor_candidates, slot_weight, sum_of_slot_weights, supervised_draft_count};
pub(crate) use blocks::IS_CAUSAL;
pub use blocks::{BlockSpec, MAX_RANK, default_num_anchors};
pub use convolution::{CONVOLUTION_KEYS, CONVOLUTION_RECIPE_KEYS, Convolution, LayerConvolutions};
pub use cost::{FROZEN_FACTOR, TRAINED_FACTOR, block_flops, block_pass_rows};
pub use drafting::{BlockStates, PrefixState, SlotInputs, grow_by_slot, grow_trees, propose};
pub use layers::{DraftLayers, LayerType};
pub use losses::{DraftBias, add_bias};
pub use predictions::{predict, predict_from};
pub use proposer::{BlockProposerOf, ConfidenceInputs};
pub use sums::LossSum;

use deepspec_engine::DraftSampling;
use deepspec_models::nn::LayerHook;
use tch::Tensor;

use crate::draft_model::{DraftConfig, DraftModel, DrafterKind};
use crate::registration::ParamGroup;

/// Parameter group `backbone` of `train.freeze`.
pub(crate) const BACKBONE: ParamGroup =
    ParamGroup { name: "backbone", prefixes: &["fc.", "hidden_norm.", "layers.", "norm."] };

/// A block drafter whose layers are decoder layers of the target's kind.
pub trait BackboneDrafter: BlockDrafter {
    /// The drafter's backbone.
    fn backbone(&self) -> &Backbone;

    /// Wraps attention and MLP of layer `layer`, over rows of whole blocks `[N·B, d]`; None for plain layers.
    fn layer_hook(&self, _layer: usize) -> Option<&dyn LayerHook> {
        None
    }
}

/// A drafter that drafts all tokens of a block in one pass. Its hidden states `[.., d]` are those that its heads read.
pub trait BlockDrafter: DrafterKind {
    /// Shape of the drafter's blocks.
    fn block_spec(config: &DraftConfig<Self::Settings>) -> &BlockSpec;

    /// Whether the drafter has a confidence head.
    fn has_confidence_head(_config: &DraftConfig<Self::Settings>) -> bool {
        false
    }

    /// See [`Drafter::draft_sampling`].
    ///
    /// [`Drafter::draft_sampling`]: crate::Drafter::draft_sampling
    fn draft_sampling(&self) -> DraftSampling {
        DraftSampling::Greedy
    }

    /// Stops adding the Markov bias to the logits. Returns whether there is a Markov head.
    fn disable_markov_bias(&mut self) -> bool {
        false
    }

    /// States that the LM head reads: by default the hidden states.
    fn head_states(_model: &DraftModel<Self>, hidden: &Tensor) -> Tensor {
        hidden.shallow_clone()
    }

    /// Float32 logits of the drafting slots before any token is chosen, `[S, γ, V]`: by default the LM head's.
    fn slot_logits(model: &DraftModel<Self>, blocks: &BlockStates) -> Tensor {
        model.base_logits(blocks.hidden)
    }

    /// Whether a slot's logits depend on the tokens that were drafted before it, as [`BlockDrafter::step`] computes them.
    fn reads_prefix(&self) -> bool;

    /// Float32 logits `[S, V]` of a slot, given the tokens before it. `state` holds the tokens before
    /// `slot.previous`, and then those up to it. Also returns the embeddings `[S, r]` of the tokens before the slot, for the confidence head.
    /// Chains and trees are drafted by these logits.
    fn step(
        _model: &DraftModel<Self>,
        slot: SlotInputs,
        _state: &mut PrefixState,
    ) -> (Tensor, Option<Tensor>) {
        (slot.base, None)
    }

    /// Embeddings of the previous tokens, and the features that the logits read, `[A, γ, r]` each. Both are teacher-forced, from hidden
    /// states `[A, H, d]` and previous tokens `[A, H]` of the slots that the heads read. None if the logits depend only on hidden states.
    fn teacher_forced_features(
        model: &DraftModel<Self>,
        hidden: &Tensor,
        previous: &Tensor,
    ) -> Option<(Tensor, Tensor)>;

    /// Float32 logits `[R, V]` from hidden states `[R, d]` and features `[R, r]`.
    fn teacher_forced_logits(model: &DraftModel<Self>, hidden: &Tensor, features: Option<&Tensor>) -> Tensor;

    /// Confidence logits `[..]` from hidden states `[.., d]` and embeddings `[.., r]`; None without a confidence head.
    fn confidence_logits(
        _model: &DraftModel<Self>,
        _hidden: &Tensor,
        _embeddings: Option<&Tensor>,
    ) -> Option<Tensor> {
        None
    }
}

impl<K: BlockDrafter> DraftModel<K> {
    /// Float32 logits of the target's LM head, `[.., d]` to `[.., V]`, without a Markov bias.
    pub fn base_logits(&self, hidden: &Tensor) -> Tensor {
        self.vocabulary().logits(&K::head_states(self, hidden))
    }

    /// See [`BlockDrafter::teacher_forced_features`].
    pub fn teacher_forced_features(&self, hidden: &Tensor, previous: &Tensor) -> Option<(Tensor, Tensor)> {
        K::teacher_forced_features(self, hidden, previous)
    }

    /// See [`BlockDrafter::teacher_forced_logits`].
    pub fn teacher_forced_logits(&self, hidden: &Tensor, features: Option<&Tensor>) -> Tensor {
        K::teacher_forced_logits(self, hidden, features)
    }

    /// See [`BlockDrafter::confidence_logits`].
    pub fn confidence_logits(&self, hidden: &Tensor, embeddings: Option<&Tensor>) -> Option<Tensor> {
        K::confidence_logits(self, hidden, embeddings)
    }
}
