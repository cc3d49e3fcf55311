//! Code that Eagle3, P-EAGLE, MTP-1 and assistants of Gemma 4 share, which read tokens beside the target's states.
//!
//! Such a drafter reads the state before a token and the token, and predicts the token behind it from the new state. States of
//! committed tokens come from the target. Eagle3 and MTP-1 draft one token after the other ([`TokenDrafter`]).

mod attention;
mod formats;
mod fusion;
mod last_states;
mod metrics;
mod proposer;
mod step_batch;
mod steps;

pub use attention::{CausalKeys, additive_mask, causal_attention, masked_attention};
pub use formats::{TAPS_KEY, add_fusion_norm_shapes, captured_layers, default_taps};
pub use fusion::{Eagle3Norms, FusionNorms, read_draft_vocab, write_vocab_and_norms};
pub use last_states::LastStates;
pub use metrics::{HEADLINE, STEP_SUMS, TAU_SUMS, ratio, step_metrics};
pub use proposer::TokenProposer;
pub use step_batch::{StepBatch, needed_positions, supervised_count};
pub use steps::{StepObjective, StepRows, check_max_steps, check_steps, step_sums};

use deepspec_core::recipe::Recipe;
use deepspec_engine::Context;
use deepspec_models::ModelConfig;
use deepspec_models::config::MAX_LAYERS;
use deepspec_ops::kv_attention::{AttentionPlan, KvCache};
use tch::Tensor;

use crate::ConfigIssue;
use crate::draft_model::{DraftDecoder, DraftModel, DrafterKind};

/// The decoder of a recipe with this many draft layers, all with full attention.
///
/// # Errors
/// A key of the recipe, and the problem with its value.
pub fn full_attention_decoder<D>(
    num_draft_layers: usize,
    recipe: &Recipe<D>,
    target: &ModelConfig,
) -> Result<DraftDecoder, ConfigIssue> {
    let windows = vec![None; num_draft_layers.min(MAX_LAYERS + 1)];
    DraftDecoder::new(target.draft_decoder(&windows), recipe, target)
        .map_err(|(_, problem)| ("num_draft_layers", problem))
}

/// A drafter that drafts one token after the other.
pub trait TokenDrafter: DrafterKind {
    /// See [`Proposer::reads_hidden`](deepspec_engine::Proposer::reads_hidden).
    const READS_HIDDEN: bool;

    /// States before the tokens `context.next`, from the target's states, `[C, d]`.
    fn context_states(model: &DraftModel<Self>, context: &Context) -> Tensor;

    /// States `[N, d]` after `tokens [N]`, given the states before them, `[N, d]`. Writes keys and values to `cache`.
    fn next_states(
        model: &DraftModel<Self>,
        states: &Tensor,
        tokens: &Tensor,
        plan: &AttentionPlan,
        cache: &mut KvCache,
    ) -> Tensor;

    /// Float32 logits `[S, V]` of states `[S, d]`.
    fn state_logits(model: &DraftModel<Self>, states: &Tensor) -> Tensor;
}
