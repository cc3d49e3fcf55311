//! Examination of an assistant by the doctor.

use deepspec_core::Tap;
use deepspec_models::nn::LayerSpec;
use tch::Tensor;

use super::model::Assistant;
use super::train::captured_states;
use crate::block_common::BlockSpec;
use crate::token_common::{StepBatch, StepObjective};
use crate::{DrafterOverrides, DrafterProbe, Predictions, TrainSample};

/// An assistant with its number of drafted tokens.
pub struct AssistantProbe {
    /// The model.
    pub model: Assistant,
    /// Drafted tokens per block.
    pub draft_len: usize,
}

impl DrafterProbe for AssistantProbe {
    fn layers(&self) -> &[LayerSpec] {
        &self.model.config().model.layers
    }

    fn taps(&self) -> &[Tap] {
        self.model.taps()
    }

    /// They follow from the attention types of the target's layers.
    fn names_taps(&self) -> bool {
        false
    }

    fn block_spec(&self) -> Option<&BlockSpec> {
        None
    }

    fn mask_token_id(&self) -> Option<i64> {
        None
    }

    fn chooses_slots(&self) -> bool {
        false
    }

    fn may_be_causal(&self) -> bool {
        false
    }

    /// The embedding is read from the target, and the head is the assistant's own.
    fn embed_and_head(&self) -> Option<(Tensor, Tensor)> {
        None
    }

    fn draft_tokens(&self) -> Option<&Tensor> {
        None
    }

    fn with_overrides(&self, reading: &DrafterOverrides) -> Box<dyn DrafterProbe> {
        let model =
            reading.rope_of.map_or_else(|| self.model.share(), |like| self.model.share_with_rope_of(like));
        Box::new(Self { model, draft_len: self.draft_len })
    }

    fn predict(&self, samples: &[TrainSample]) -> Option<Predictions<'_>> {
        let (equal, (kind, device)) = (StepObjective::new(1.0, self.draft_len), self.model.options());
        let batch = StepBatch::new(samples, &equal.step_weights, device, kind)?;
        let captured = captured_states(samples, &batch, device, kind);
        let outputs = self.model.step_outputs(&batch, &captured);
        Some(batch.predictions(&outputs, |rows| self.model.logits(rows)))
    }
}
