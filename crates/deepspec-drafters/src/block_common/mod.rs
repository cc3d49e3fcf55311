//! Block drafters: the parts that DSpark, DFlash and DFlash 2 share.
//!
//! B tokens `[anchor, mask, …, mask]` run through the backbone at once, and γ of the slots draft a token each ([`Slots`]). Each drafter
//! adds its own way from hidden states to logits.
//!
//! [`Slots`]: deepspec_core::Slots

mod backbone;
mod batch;
mod blocks;
mod cost;
mod examined;
pub(crate) mod formats;
mod layers;
mod proposer;
pub(crate) mod sums;

pub use backbone::Backbone;
pub use batch::{BlockBatch, anchor_candidates, block_weight, eval_mask, slot_weight};
pub use blocks::{BlockSpec, MAX_RANK, num_anchors};
pub use cost::{block_flops, block_pass_rows};
pub use examined::predict;
pub use layers::{DraftLayers, LayerType};
pub use proposer::{BlockProposerOf, Drafting};
pub use sums::LossSum;

use deepspec_engine::DraftSampling;
use deepspec_models::nn::LayerHook;
use tch::Tensor;

use crate::draft_model::{DraftConfig, DraftModel, DrafterKind};
use crate::registration::ParamGroup;

/// The backbone as `train.freeze` names it.
pub(crate) const BACKBONE: ParamGroup =
    ParamGroup { name: "backbone", prefixes: &["fc.", "hidden_norm.", "layers.", "norm."] };

/// A drafter of whole blocks.
pub trait BlockDrafter: DrafterKind {
    /// State from one drafted slot to the next.
    type State: Default;

    /// Its backbone.
    fn backbone(&self) -> &Backbone;

    /// Runs around attention and MLP of layer `layer`, over rows of whole blocks `[N·B, d]`; None for plain layers.
    fn hook(&self, _layer: usize) -> Option<&dyn LayerHook> {
        None
    }

    /// Its blocks.
    fn blocks(config: &DraftConfig<Self::Settings>) -> &BlockSpec;

    /// Whether it has a confidence head.
    fn has_confidence(_config: &DraftConfig<Self::Settings>) -> bool {
        false
    }

    /// See [`Drafter::draft_sampling`].
    ///
    /// [`Drafter::draft_sampling`]: crate::Drafter::draft_sampling
    fn draft_sampling(&self) -> DraftSampling {
        DraftSampling::Greedy
    }

    /// Turns the Markov head off; whether there is one.
    fn ignore_markov(&mut self) -> bool {
        false
    }

    /// Float32 logits `[S, V]` of one slot, from the shared head's logits `base`, hidden states `[S, d]` and previous tokens `[S]`.
    /// Also returns the embeddings `[S, r]` of the previous tokens, for the confidence head.
    fn step(
        model: &DraftModel<Self>,
        base: Tensor,
        hidden: &Tensor,
        previous: &Tensor,
        state: &mut Self::State,
    ) -> (Tensor, Option<Tensor>);

    /// Embeddings of the previous tokens, and features of the logits, `[A, γ, r]` each. They are teacher-forced from hidden
    /// states `[A, γ, d]` and previous tokens `[A, γ]`. None where logits depend on hidden states alone.
    fn logit_features(
        model: &DraftModel<Self>,
        hidden: &Tensor,
        previous: &Tensor,
    ) -> Option<(Tensor, Tensor)>;

    /// Float32 logits `[R, V]` from hidden states `[R, d]` and features `[R, r]`.
    fn slot_logits(model: &DraftModel<Self>, hidden: &Tensor, features: Option<&Tensor>) -> Tensor;

    /// Confidence logits `[..]` from hidden states `[.., d]` and embeddings `[.., r]`; None without a confidence head.
    fn confidence(
        _model: &DraftModel<Self>,
        _hidden: &Tensor,
        _embeddings: Option<&Tensor>,
    ) -> Option<Tensor> {
        None
    }
}
