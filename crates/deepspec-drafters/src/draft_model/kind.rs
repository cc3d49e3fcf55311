//! Trait of a kind of trained drafter, and its implementations of [`DrafterPlan`], [`TrainableDrafter`] and [`DrafterProbe`].

use std::fmt::Debug;
use std::path::Path;

use deepspec_checkpoint::{DraftVocab, Reader};
use deepspec_core::recipe::LoraRecipe;
use deepspec_core::{FinalStates, Tap};
use deepspec_models::nn::{Builder, LayerSpec};
use deepspec_models::{ModelConfig, ModelError};
use serde_json::{Map, Value};
use tch::{Device, Kind, Tensor};

use super::{DraftConfig, DraftModel, DrafterSettings, LoraAdapters, PassRows, SampleSize, TrainedParts};
use crate::block_common::{BlockSpec, anchor_candidates};
use crate::registration::{CheckpointKind, drafter_classes};
use crate::{
    ChoosePositions, Drafter, DrafterOptions, DrafterOverrides, DrafterPlan, DrafterProbe, GradReadyHook,
    LossDenominator, Metrics, ParamCounts, Predictions, TrainSample, TrainableDrafter,
};

/// A kind of drafter that is trained on a target's hidden states. The type holds the weights of this kind. [`DraftModel`] holds embedding,
/// LM head and the projection of captured hidden states.
pub trait DrafterKind: Sized + Send + 'static {
    /// Settings in config.json.
    type Settings: DrafterSettings;
    /// Loss weights and other settings of training.
    type Objective: Debug + Clone + Send + Sync + 'static;

    /// See [`DrafterPlan::final_states`].
    const FINAL_STATES: FinalStates;

    /// See [`DrafterPlan::enable_recompute`].
    const RECOMPUTES: bool = false;

    /// See [`Proposer::tree_refusal`](deepspec_engine::Proposer::tree_refusal).
    const TREE_REFUSAL: Option<&'static str> = None;

    /// See [`DrafterPlan::reads_last_token_state`].
    fn reads_last_token_state(_objective: &Self::Objective) -> bool {
        false
    }

    /// Requests the parameters from the builder, in the order in which they are trained.
    fn new(b: &Builder, config: &DraftConfig<Self::Settings>) -> Self;

    /// See [`DrafterPlan::choose_anchors`]. By default, anchors of blocks.
    fn choose_anchors(plan: &Plan<Self>, loss_mask: &[bool], choose: ChoosePositions) -> Vec<usize> {
        let blocks = plan.config.settings.block_spec();
        blocks.map_or_else(Vec::new, |blocks| choose(&anchor_candidates(loss_mask), blocks.num_anchors, 0))
    }

    /// See [`DrafterPlan::loss_denominator_part`].
    fn loss_denominator_part(_plan: &Plan<Self>, _loss_mask: &[bool], _anchors: &[usize]) -> f64 {
        1.0
    }

    /// See [`TrainableDrafter::accumulate`].
    fn accumulate(
        model: &DraftModel<Self>,
        objective: &Self::Objective,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        progress: f64,
        on_grad_ready: Option<GradReadyHook>,
    ) -> Option<Tensor>;

    /// See [`TrainableDrafter::grad_stages`].
    fn grad_stages(_model: &DraftModel<Self>) -> Vec<String> {
        vec![]
    }

    /// See [`DrafterPlan::metric_defs`].
    fn metric_defs(plan: &Plan<Self>) -> Metrics;

    /// See [`DrafterPlan::flops`].
    fn flops(plan: &Plan<Self>, samples: &[TrainSample]) -> f64;

    /// Row counts of a training pass over samples of these sizes.
    fn pass_rows(plan: &Plan<Self>, samples: &[SampleSize]) -> PassRows;

    /// See [`DrafterPlan::activation_bytes`]. By default, that of decoder layers by [`DrafterKind::pass_rows`].
    fn activation_bytes(plan: &Plan<Self>, samples: &[SampleSize], kind: Kind, device: Device) -> usize {
        let vocab_size = plan.config.settings.draft_vocab_size().unwrap_or(plan.config.model().vocab_size);
        let rows = Self::pass_rows(plan, samples);
        rows.activation_bytes(&plan.config.decoder, vocab_size, kind, device, plan.recomputes)
    }

    /// Turns the model into a drafter for `slots` sequences.
    fn into_drafter(model: DraftModel<Self>, slots: usize) -> Box<dyn Drafter>;

    /// See [`DrafterProbe::predict`].
    fn predict<'a>(model: &'a DraftModel<Self>, samples: &[TrainSample]) -> Option<Predictions<'a>>;
}

/// Describes the checkpoints of a kind. `layouts` reads the formats of other tools.
pub const fn checkpoint_kind<K: DrafterKind>(
    description: &'static str,
    layouts: &'static Reader,
) -> CheckpointKind {
    CheckpointKind {
        classes: || drafter_classes(K::Settings::CLASS),
        description,
        are_language_models: false,
        tree_refusal: K::TREE_REFUSAL,
        check: |dir| DraftConfig::<K::Settings>::load(dir).map(drop),
        load: |dir, &DrafterOptions { device, kind, slots, .. }| {
            Ok(K::into_drafter(DraftModel::load_packed(dir, device, kind)?, slots))
        },
        layouts: Some(layouts),
        engines: &[],
    }
}

/// Architecture and objective of a drafter, without weights.
pub struct Plan<K: DrafterKind> {
    /// Architecture.
    pub config: DraftConfig<K::Settings>,
    /// Loss weights and other settings of training.
    pub objective: K::Objective,
    trained: TrainedParts,
    recomputes: bool,
    /// A reduced vocabulary.
    draft_vocab: Option<DraftVocab>,
}

impl<K: DrafterKind> Plan<K> {
    /// A plan without frozen parameters.
    pub fn new(config: DraftConfig<K::Settings>, objective: K::Objective) -> Self {
        Self { config, objective, trained: TrainedParts::default(), recomputes: false, draft_vocab: None }
    }

    /// The plan of a drafter that can draft only the tokens of `draft_vocab`, if it is given.
    pub fn with_draft_vocab(self, draft_vocab: Option<DraftVocab>) -> Self {
        Self { draft_vocab, ..self }
    }
}

impl<K: DrafterKind> DrafterPlan for Plan<K> {
    fn draft_len(&self) -> usize {
        self.config.settings.draft_len()
    }

    fn tiny_plan(&self) -> (Box<dyn DrafterPlan>, ModelConfig) {
        let mut config = self.config.clone();
        config.settings.shrink();
        let model = &mut config.decoder.model;
        (model.hidden_size, model.vocab_size) = (64, 64);
        for layer in &mut model.layers {
            (layer.hidden_size, layer.intermediate_size) = (64, 64);
            // Keeps the head dim, on which rotary settings and scales depend.
            let heads = &mut layer.attention.heads;
            (heads.query, heads.key_value) = (2, 1);
            if let Some(experts) = &mut layer.experts {
                (experts.count, experts.active, experts.width) = (4, experts.active.min(2), 64);
                experts.shared_width = experts.shared_width.map(|_| 64);
            }
        }
        let model = model.clone();
        let (objective, trained) = (self.objective.clone(), self.trained.clone());
        let size = config.settings.draft_vocab_size();
        let counts = vec![0; model.vocab_size as usize];
        let draft_vocab = size.and_then(|size| DraftVocab::most_frequent(&counts, size as usize));
        (Box::new(Self { config, objective, trained, recomputes: self.recomputes, draft_vocab }), model)
    }

    fn build(
        &self,
        embed_tokens: &Tensor,
        lm_head: &Tensor,
        seed: u64,
        kind: Kind,
    ) -> Box<dyn TrainableDrafter> {
        let (config, ends) = (self.config.clone(), (embed_tokens, lm_head));
        let mut model =
            DraftModel::<K>::fresh_with_draft_vocab(config, ends, self.draft_vocab.as_ref(), seed, kind);
        let adapters = self.trained.apply(&mut model.tensors, seed);
        model.recomputes = self.recomputes;
        Box::new(DrafterWithLoss { model, objective: self.objective.clone(), adapters })
    }

    fn choose_anchors(&self, loss_mask: &[bool], choose: ChoosePositions) -> Vec<usize> {
        K::choose_anchors(self, loss_mask, choose)
    }

    fn final_states(&self) -> FinalStates {
        K::FINAL_STATES
    }

    fn reads_last_token_state(&self) -> bool {
        K::reads_last_token_state(&self.objective)
    }

    fn loss_denominator_part(&self, loss_mask: &[bool], anchors: &[usize]) -> f64 {
        K::loss_denominator_part(self, loss_mask, anchors)
    }

    fn metric_defs(&self) -> Metrics {
        K::metric_defs(self)
    }

    fn flops(&self, samples: &[TrainSample]) -> f64 {
        K::flops(self, samples)
    }

    fn activation_bytes(&self, samples: &[SampleSize], kind: Kind, device: Device) -> usize {
        K::activation_bytes(self, samples, kind, device)
    }

    fn own_head_rows(&self) -> Option<usize> {
        self.config.settings.draft_vocab_size().map(|rows| rows as usize)
    }

    fn freeze(&mut self, prefixes: Vec<&'static str>) {
        self.trained.frozen = prefixes;
    }

    fn set_lora(&mut self, lora: LoraRecipe) -> Result<(), String> {
        self.trained.set_lora(lora, &DraftModel::<K>::meta_parameters(self.config.clone()))
    }

    fn enable_recompute(&mut self) -> bool {
        self.recomputes = K::RECOMPUTES;
        K::RECOMPUTES
    }

    fn num_parameters(&self) -> ParamCounts {
        self.trained.count(DraftModel::<K>::meta_parameters(self.config.clone()))
    }
}

/// A drafter with the objective that it is trained with.
struct DrafterWithLoss<K: DrafterKind> {
    model: DraftModel<K>,
    objective: K::Objective,
    adapters: Option<LoraAdapters>,
}

impl<K: DrafterKind> DrafterWithLoss<K> {
    /// The model with its present weights.
    fn merged(&self) -> &DraftModel<K> {
        self.adapters.iter().for_each(LoraAdapters::merge);
        &self.model
    }
}

impl<K: DrafterKind> TrainableDrafter for DrafterWithLoss<K> {
    fn accumulate(
        &self,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        progress: f64,
        on_grad_ready: Option<GradReadyHook>,
    ) -> Option<Tensor> {
        let sums =
            K::accumulate(self.merged(), &self.objective, samples, normaliser, progress, on_grad_ready);
        self.adapters.iter().for_each(LoraAdapters::backward);
        sums
    }

    fn grad_stages(&self) -> Vec<String> {
        // The gradients of A and B are computed after the backward pass.
        if self.adapters.is_some() { vec![] } else { K::grad_stages(&self.model) }
    }

    fn inference_drafter(&self, slots: usize) -> Box<dyn Drafter> {
        K::into_drafter(self.merged().packed(), slots)
    }

    fn load_pretrained(&self, dir: &Path) -> Result<Vec<String>, ModelError> {
        let fresh = self.model.load_pretrained(dir)?;
        self.adapters.iter().for_each(LoraAdapters::take_base);
        Ok(fresh)
    }

    fn parameters(&self) -> &[(String, Tensor)] {
        self.adapters.as_ref().map_or_else(|| self.model.parameters(), LoraAdapters::parameters)
    }

    fn lora_base(&self) -> Vec<(String, Tensor)> {
        self.adapters.as_ref().map_or_else(Vec::new, LoraAdapters::base)
    }

    fn checkpoint(&self) -> Vec<(String, Tensor)> {
        self.merged().checkpoint()
    }

    fn config_json(&self) -> Map<String, Value> {
        self.model.config().to_json()
    }
}

impl<K: DrafterKind> DrafterProbe for DraftModel<K> {
    fn layers(&self) -> &[LayerSpec] {
        &self.config().model().layers
    }

    fn taps(&self) -> &[Tap] {
        &self.config().decoder.taps
    }

    fn names_taps(&self) -> bool {
        K::Settings::READS_LAYERS
    }

    fn block_spec(&self) -> Option<&BlockSpec> {
        self.config().settings.block_spec()
    }

    fn mask_token_id(&self) -> Option<i64> {
        self.config().settings.clone().mask_token_id_mut().copied()
    }

    fn chooses_slots(&self) -> bool {
        self.block_spec().is_some() && K::Settings::CHOOSES_SLOTS
    }

    fn may_be_causal(&self) -> bool {
        K::Settings::MAY_BE_CAUSAL
    }

    fn embed_and_head(&self) -> Option<(Tensor, Tensor)> {
        Some(DraftModel::embed_and_head(self))
    }

    fn draft_tokens(&self) -> Option<&Tensor> {
        DraftModel::draft_tokens(self)
    }

    fn with_overrides(&self, reading: &DrafterOverrides) -> Box<dyn DrafterProbe> {
        let mut config = self.config().clone();
        if let Some(like) = reading.rope_of {
            let turn = |(own, like): (&mut LayerSpec, &LayerSpec)| own.rope = like.rope;
            config.decoder.model.layers.iter_mut().zip(&like.layers).for_each(turn);
        }
        if let (Some(own), Some(other)) = (config.settings.mask_token_id_mut(), reading.mask_token_id) {
            *own = other;
        }
        if let Some(blocks) = config.settings.block_spec_mut() {
            blocks.slots = reading.slots.unwrap_or(blocks.slots);
            blocks.causal = reading.causal.unwrap_or(blocks.causal);
        }
        Box::new(self.share_with(config, reading.embed_and_head))
    }

    fn predict(&self, samples: &[TrainSample]) -> Option<Predictions<'_>> {
        K::predict(self, samples)
    }
}
