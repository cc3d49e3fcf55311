//! Drafters of whole blocks behind anchors: what DSpark, DFlash and their kin share.
//!
//! B inputs `[anchor, mask, …, mask]` run through the backbone at once; γ of the slots draft a token each ([`Slots`]). A kind adds
//! what turns the states of these slots into logits.
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
mod token_sums;

pub use backbone::Backbone;
pub use batch::{BlockBatch, anchor_candidates, block_weight, eval_mask, slot_weight};
pub use blocks::{BlockSpec, MAX_RANK, num_anchors};
pub use cost::{backbone_flops, backbone_pass_bytes, backbone_product_shapes};
pub use examined::predict;
pub use layers::{DraftLayers, LayerType};
pub use proposer::{AnchoredProposer, Drafting};
pub use sums::AnchoredSum;

use deepspec_engine::DraftSampling;
use deepspec_models::nn::LayerHook;
use tch::Tensor;

use crate::draft_model::{DraftModel, DrafterKind};
use crate::registration::ParamGroup;

/// The backbone as `train.freeze` names it.
pub(crate) const BACKBONE: ParamGroup =
    ParamGroup { name: "backbone", prefixes: &["fc.", "hidden_norm.", "layers.", "norm."] };

/// A kind of drafter that drafts whole blocks behind anchors.
pub trait BlockDrafter: DrafterKind {
    /// What drafting a slot leaves for the next one.
    type State: Default;

    /// Its backbone.
    fn backbone(&self) -> &Backbone;

    /// Runs around attention and MLP of layer `layer`, over rows of whole blocks `[N·B, d]`; None for plain layers.
    fn hook(&self, _layer: usize) -> Option<&dyn LayerHook> {
        None
    }

    /// Its blocks.
    fn blocks(config: &Self::Config) -> &BlockSpec;

    /// Whether its proposals come with confidences.
    fn has_confidence(_config: &Self::Config) -> bool {
        false
    }

    /// See [`Drafter::draft_sampling`].
    ///
    /// [`Drafter::draft_sampling`]: crate::Drafter::draft_sampling
    fn draft_sampling(&self) -> DraftSampling {
        DraftSampling::Greedy
    }

    /// Drafts without the Markov head from now on; whether there is one.
    fn ignore_markov(&mut self) -> bool {
        false
    }

    /// Drafts one slot: float32 logits `[S, V]` from those of the head alone (`base`), its states `[S, d]` and the tokens before it
    /// `[S]`; and the embeddings of these that the confidence reads, `[S, r]`.
    fn step(
        model: &DraftModel<Self>,
        base: Tensor,
        hidden: &Tensor,
        previous: &Tensor,
        state: &mut Self::State,
    ) -> (Tensor, Option<Tensor>);

    /// Embeddings of the previous tokens and the features that the logits depend on, both `[A, γ, r]`, of whole blocks with states
    /// `[A, γ, d]` and the true previous tokens `[A, γ]`; None where logits depend on states alone.
    fn features(model: &DraftModel<Self>, hidden: &Tensor, previous: &Tensor) -> Option<(Tensor, Tensor)>;

    /// Logits of slots, float32 `[R, V]`: states `[R, d]` and features `[R, r]`.
    fn slot_logits(model: &DraftModel<Self>, hidden: &Tensor, features: Option<&Tensor>) -> Tensor;

    /// Confidence logits `[..]` of states `[.., d]` and embeddings `[.., r]`; None without such a head.
    fn confidence(
        _model: &DraftModel<Self>,
        _hidden: &Tensor,
        _embeddings: Option<&Tensor>,
    ) -> Option<Tensor> {
        None
    }
}
