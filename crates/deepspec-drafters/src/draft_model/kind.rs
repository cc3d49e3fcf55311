//! The trait of a trained drafter, and the plan and the trainer's view that follow from it.

use std::fmt::Debug;
use std::path::Path;

use deepspec_checkpoint::Reader;
use deepspec_core::FinalStates;
use deepspec_models::nn::{Builder, LayerSpec};
use deepspec_models::{ModelConfig, ModelError};
use serde_json::{Map, Value};
use tch::{Device, Kind, Tensor};

use super::{DraftConfig, DraftDecoder, DraftModel, DrafterSettings, PassRows, SampleSize};
use crate::block_common::{BlockSpec, anchor_candidates};
use crate::registration::{Checkpoints, classes};
use crate::{
    Drafter, DrafterOptions, DrafterOverrides, DrafterPlan, DrafterProbe, GradReadyHook, LossDenominator,
    Metrics, Predictions, TrainSample, TrainableDrafter, WeightCounts,
};

/// A drafter that is trained on a target's hidden states. The type holds its own weights; [`DraftModel`] holds embedding, head and the
/// projection of captured hidden states.
pub trait DrafterKind: Sized + Send + 'static {
    /// Its settings.
    type Settings: DrafterSettings;
    /// Its objective.
    type Objective: Debug + Clone + Send + Sync + 'static;

    /// See [`DrafterPlan::final_states`].
    const FINAL_STATES: FinalStates;

    /// See [`DrafterPlan::recompute`].
    const RECOMPUTES: bool = false;

    /// Asks the builder for its tensors, in the order in which they are trained.
    fn new(b: &Builder, config: &DraftConfig<Self::Settings>) -> Self;

    /// See [`DrafterPlan::loss_weight`].
    fn loss_weight(_plan: &Plan<Self>, _loss_mask: &[bool], _anchors: &[usize]) -> f64 {
        1.0
    }

    /// See [`TrainableDrafter::accumulate`].
    fn accumulate(
        model: &DraftModel<Self>,
        objective: &Self::Objective,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        on_grad_ready: Option<GradReadyHook>,
    ) -> Option<Tensor>;

    /// See [`TrainableDrafter::stages`].
    fn stages(_model: &DraftModel<Self>) -> Vec<String> {
        vec![]
    }

    /// See [`DrafterPlan::metrics`].
    fn metrics(plan: &Plan<Self>) -> Metrics;

    /// See [`DrafterPlan::flops`].
    fn flops(plan: &Plan<Self>, samples: &[TrainSample]) -> f64;

    /// Rows of a pass over samples of these sizes.
    fn pass_rows(config: &DraftConfig<Self::Settings>, samples: &[SampleSize]) -> PassRows;

    /// A drafter for `slots` sequences.
    fn drafter(model: DraftModel<Self>, slots: usize) -> Box<dyn Drafter>;

    /// See [`DrafterProbe::predict`].
    fn predict<'a>(model: &'a DraftModel<Self>, samples: &[TrainSample]) -> Option<Predictions<'a>>;
}

/// Checkpoints of a kind; `hold` names their content, and `layouts` reads them in the formats of other tools.
pub const fn checkpoints<K: DrafterKind>(hold: &'static str, layouts: &'static Reader) -> Checkpoints {
    Checkpoints {
        classes: || classes(K::Settings::CLASS),
        hold,
        are_language_models: false,
        check: |dir| DraftConfig::<K::Settings>::load(dir).map(drop),
        load: |dir, &DrafterOptions { device, kind, slots }| {
            Ok(K::drafter(DraftModel::load_packed(dir, device, kind)?, slots))
        },
        layouts: Some(layouts),
    }
}

/// Architecture and objective of a drafter, without weights.
pub struct Plan<K: DrafterKind> {
    /// The architecture.
    pub config: DraftConfig<K::Settings>,
    /// How it is trained.
    pub objective: K::Objective,
    /// Prefixes of the names of frozen parameters.
    frozen: Vec<&'static str>,
    recomputes: bool,
}

impl<K: DrafterKind> Plan<K> {
    /// A drafter without frozen parameters.
    pub fn new(config: DraftConfig<K::Settings>, objective: K::Objective) -> Self {
        Self { config, objective, frozen: vec![], recomputes: false }
    }
}

impl<K: DrafterKind> DrafterPlan for Plan<K> {
    fn draft_len(&self) -> usize {
        self.config.settings.draft_len()
    }

    fn smallest(&self) -> (Box<dyn DrafterPlan>, ModelConfig) {
        let mut config = self.config.clone();
        config.settings.shrink();
        let model = &mut config.decoder.model;
        (model.hidden_size, model.vocab_size) = (64, 64);
        for layer in &mut model.layers {
            (layer.hidden_size, layer.intermediate_size) = (64, 64);
            // The head dim stays: rotary settings and scales depend on it.
            let heads = &mut layer.attention.heads;
            (heads.query, heads.key_value) = (2, 1);
        }
        let model = model.clone();
        let (objective, frozen) = (self.objective.clone(), self.frozen.clone());
        (Box::new(Self { config, objective, frozen, recomputes: self.recomputes }), model)
    }

    fn build(
        &self,
        embed_tokens: &Tensor,
        lm_head: &Tensor,
        seed: u64,
        kind: Kind,
    ) -> Box<dyn TrainableDrafter> {
        let mut model = DraftModel::<K>::fresh(self.config.clone(), embed_tokens, lm_head, seed, kind);
        model.freeze(&self.frozen);
        model.recomputes = self.recomputes;
        Box::new(DrafterWithLoss { model, objective: self.objective.clone() })
    }

    fn anchors(
        &self,
        loss_mask: &[bool],
        choose: &mut dyn FnMut(&[usize], usize) -> Vec<usize>,
    ) -> Vec<usize> {
        let blocks = self.config.settings.block_spec();
        blocks.map_or_else(Vec::new, |blocks| choose(&anchor_candidates(loss_mask), blocks.num_anchors))
    }

    fn final_states(&self) -> FinalStates {
        K::FINAL_STATES
    }

    fn loss_weight(&self, loss_mask: &[bool], anchors: &[usize]) -> f64 {
        K::loss_weight(self, loss_mask, anchors)
    }

    fn metrics(&self) -> Metrics {
        K::metrics(self)
    }

    fn flops(&self, samples: &[TrainSample]) -> f64 {
        K::flops(self, samples)
    }

    fn activation_bytes(&self, samples: &[SampleSize], kind: Kind, device: Device) -> usize {
        let rows = K::pass_rows(&self.config, samples);
        rows.activation_bytes(&self.config.decoder, kind, device, self.recomputes)
    }

    fn freeze(&mut self, prefixes: Vec<&'static str>) {
        self.frozen = prefixes;
    }

    fn recompute(&mut self) -> bool {
        self.recomputes = K::RECOMPUTES;
        K::RECOMPUTES
    }

    fn weights(&self) -> WeightCounts {
        let mut counts = WeightCounts { trained: 0, frozen: 0 };
        for (name, tensor) in DraftModel::<K>::meta(self.config.clone()) {
            let is_frozen = self.frozen.iter().any(|prefix| name.starts_with(prefix));
            let count = if is_frozen { &mut counts.frozen } else { &mut counts.trained };
            *count += tensor.numel();
        }
        counts
    }
}

/// A drafter with its objective.
struct DrafterWithLoss<K: DrafterKind> {
    model: DraftModel<K>,
    objective: K::Objective,
}

impl<K: DrafterKind> TrainableDrafter for DrafterWithLoss<K> {
    fn accumulate(
        &self,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        on_grad_ready: Option<GradReadyHook>,
    ) -> Option<Tensor> {
        K::accumulate(&self.model, &self.objective, samples, normaliser, on_grad_ready)
    }

    fn stages(&self) -> Vec<String> {
        K::stages(&self.model)
    }

    fn drafter(&self, slots: usize) -> Box<dyn Drafter> {
        K::drafter(self.model.packed(), slots)
    }

    fn load_pretrained(&self, dir: &Path) -> Result<Vec<String>, ModelError> {
        self.model.load_pretrained(dir)
    }

    fn parameters(&self) -> &[(String, Tensor)] {
        self.model.parameters()
    }

    fn checkpoint(&self) -> Vec<(String, Tensor)> {
        self.model.checkpoint()
    }

    fn config_json(&self) -> Map<String, Value> {
        self.model.config().to_json()
    }
}

impl<K: DrafterKind> DrafterProbe for DraftModel<K> {
    fn decoder(&self) -> &DraftDecoder {
        &self.config().decoder
    }

    fn block_spec(&self) -> Option<&BlockSpec> {
        self.config().settings.block_spec()
    }

    fn chooses_slots(&self) -> bool {
        self.block_spec().is_some() && K::Settings::CHOOSES_SLOTS
    }

    fn embed_and_head(&self) -> (Tensor, Tensor) {
        DraftModel::embed_and_head(self)
    }

    fn with_overrides(&self, reading: &DrafterOverrides) -> Box<dyn DrafterProbe> {
        let mut config = self.config().clone();
        if let Some(like) = reading.rope_of {
            let turn = |(own, like): (&mut LayerSpec, &LayerSpec)| own.rope = like.rope;
            config.decoder.model.layers.iter_mut().zip(&like.layers).for_each(turn);
        }
        if let Some(blocks) = config.settings.block_spec_mut() {
            blocks.mask_token_id = reading.mask_token_id.unwrap_or(blocks.mask_token_id);
            blocks.slots = reading.slots.unwrap_or(blocks.slots);
        }
        Box::new(self.share_as(config, reading.embed_and_head))
    }

    fn predict(&self, samples: &[TrainSample]) -> Option<Predictions<'_>> {
        K::predict(self, samples)
    }
}
