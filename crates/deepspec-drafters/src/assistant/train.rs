//! Training of assistants: objective, metrics and costs.
//!
//! Position t reads the target's keys and values up to t. They are constants, computed from the states that enter the target's layers.
//! Step j reads token t + 1 + j and the output of step j − 1, which is the target's final state at step 0. It predicts token t + 2 + j.

use std::path::Path;

use deepspec_core::cli::UsageError;
use deepspec_core::config::ConfigError;
use deepspec_core::recipe::{LoraRecipe, Recipe};
use deepspec_core::{FinalStates, Tap};
use deepspec_models::nn::{EmbedHead, Heads, LayerSpec, Qkv, Weight};
use deepspec_models::{ModelConfig, ModelError, Weights};
use deepspec_ops::{SavedTensorSizes, cat_to_device, range};
use serde_json::{Map, Value};
use tch::{Device, Kind, Tensor};

use super::config::{AssistantConfig, AssistantRecipe, KeySource, is_own_end};
use super::loss::{buffer_bytes, head_losses};
use super::model::Assistant;
use super::proposer::AssistantProposer;
use crate::block_common::{FROZEN_FACTOR, TRAINED_FACTOR};
use crate::draft_model::{LoraAdapters, SampleSize, TrainedParts, WarmStartCheck};
use crate::registration::RecipeSection;
use crate::token_common::{
    CausalKeys, StepBatch, StepObjective, needed_positions, step_sums, supervised_count,
};
use crate::{
    ChoosePositions, ConfigIssue, Drafter, DrafterPlan, GradReadyHook, LossDenominator, Metrics, ParamCounts,
    TrainSample, TrainableDrafter,
};

/// Reads and checks the recipe section of an assistant. An error names the wrong key, with file and line.
pub fn read_recipe(section: &RecipeSection<'_>) -> Result<AssistantRecipe, ConfigError> {
    let own: AssistantRecipe = section.read()?;
    own.check().map_err(|(key, problem)| section.error(key, problem))?;
    Ok(own)
}

/// Builds the plan of an assistant for this target. An error names the key that does not fit.
pub fn build_plan<D>(
    own: &AssistantRecipe,
    recipe: &Recipe<D>,
    target: &ModelConfig,
) -> Result<Box<dyn DrafterPlan>, ConfigIssue> {
    let config = AssistantConfig::of_recipe(own, target)?;
    let sources = config.key_sources(target).map_err(|error| ("layer_types", error.to_string()))?;
    let taps: Vec<Tap> = sources.iter().map(KeySource::tap).collect();
    if recipe.target.layer_ids != taps {
        let [wanted, found] = [&taps, &recipe.target.layer_ids].map(|taps| Tap::layer_ids(taps));
        let problem = format!(
            "{found:?}; an assistant for this target reads {wanted:?}, the layers below those whose keys and values it sees"
        );
        return Err(("target.layer_ids", problem));
    }
    let objective = StepObjective::new(own.step_weight_beta, own.num_speculative_steps);
    let (target, trained) = (target.clone(), TrainedParts::default());
    Ok(Box::new(AssistantPlan { config, sources, target, objective, trained }))
}

/// Architecture and objective of an assistant, without weights.
struct AssistantPlan {
    config: AssistantConfig,
    sources: Vec<KeySource>,
    target: ModelConfig,
    objective: StepObjective,
    trained: TrainedParts,
}

impl AssistantPlan {
    /// Number of steps, K.
    fn steps(&self) -> usize {
        self.objective.step_weights.len()
    }
}

impl DrafterPlan for AssistantPlan {
    fn draft_len(&self) -> usize {
        self.steps()
    }

    fn tiny_plan(&self) -> (Box<dyn DrafterPlan>, ModelConfig) {
        const WIDTH: i64 = 64;
        let (mut config, mut sources, mut target) =
            (self.config.clone(), self.sources.clone(), self.target.clone());
        // Keeps the head dims, on which rotary settings and scales depend.
        let shrink = |layer: &mut LayerSpec| {
            (layer.hidden_size, layer.intermediate_size) = (WIDTH, WIDTH);
            let heads = &mut layer.attention.heads;
            (heads.query, heads.key_value) = (2, 1);
        };
        config.model.layers.iter_mut().for_each(shrink);
        for source in &mut sources {
            shrink(&mut source.spec);
            (source.attention.heads.query, source.attention.heads.key_value) = (2, 1);
        }
        for model in [&mut config.model, &mut target] {
            (model.hidden_size, model.vocab_size) = (WIDTH, WIDTH);
        }
        config.backbone_hidden_size = WIDTH;
        let (objective, trained) = (self.objective.clone(), self.trained.clone());
        (Box::new(Self { config, sources, target: target.clone(), objective, trained }), target)
    }

    fn build(
        &self,
        embed_tokens: &Tensor,
        lm_head: &Tensor,
        seed: u64,
        kind: Kind,
    ) -> Box<dyn TrainableDrafter> {
        let head = Weight::Stored(lm_head.shallow_clone());
        let ModelConfig { embed_scale, logit_softcap, .. } = self.target;
        let ends = EmbedHead::new(embed_tokens.shallow_clone(), head, embed_scale, logit_softcap);
        let mut model = Assistant::fresh(self.config.clone(), self.sources.clone(), ends, seed, kind);
        let adapters = self.trained.apply(model.tensors_mut(), seed);
        Box::new(AssistantWithLoss { model, objective: self.objective.clone(), adapters })
    }

    fn choose_anchors(&self, _loss_mask: &[bool], _choose: ChoosePositions) -> Vec<usize> {
        vec![]
    }

    fn final_states(&self) -> FinalStates {
        FinalStates::All
    }

    fn reads_last_token_state(&self) -> bool {
        false
    }

    fn loss_denominator_part(&self, loss_mask: &[bool], _anchors: &[usize]) -> f64 {
        self.objective.loss_denominator_part(loss_mask)
    }

    fn metric_defs(&self) -> Metrics {
        self.objective.metric_defs()
    }

    fn flops(&self, samples: &[TrainSample]) -> f64 {
        samples.iter().map(|sample| self.sample_flops(sample)).sum()
    }

    /// Assumes that the steps compute all positions, as for an answer that ends with its sample.
    fn activation_bytes(&self, samples: &[SampleSize], kind: Kind, device: Device) -> usize {
        let sum = |size: fn(&SampleSize) -> usize| samples.iter().map(size).sum::<usize>();
        let (tokens, supervised) = (sum(|sample| sample.tokens), sum(|sample| sample.supervised));
        let (model, value, steps) = (&self.config.model, kind.elt_size_in_bytes(), self.steps());
        let (d, h) = (self.config.backbone_hidden_size as usize, model.hidden_size as usize);
        let rows = steps * tokens;
        let by_layer = model.layers.iter().map(|layer| {
            let saved = SavedTensorSizes::new(kind, device, layer.activation);
            rows * (layer.saved_bytes(saved, value) - layer.saved_key_value_bytes(saved, value))
        });
        let (kept, largest) = (by_layer.clone().sum::<usize>(), by_layer.max().unwrap_or(0));
        // Keys and values are repeated for every query head, and all steps share them.
        let heads = |source: &KeySource| (source.attention.heads.query * source.attention.heads.dim) as usize;
        let keys = 2 * tokens * self.sources.iter().map(heads).sum::<usize>();
        let masks: usize = samples.iter().map(|sample| self.mask_values(sample.tokens)).sum();
        // The embedding beside the state, twice, the outputs of both projections, and the final norm.
        let between = rows * (4 * d + 3 * h);
        let inputs = tokens * d * (self.sources.len() + 1) + steps * supervised * (d + 3 * h);
        let head_values = (model.vocab_size * model.hidden_size) as usize;
        kept + largest / 2 / steps
            + (keys + masks + between + inputs) * value
            + buffer_bytes(model.vocab_size, steps * supervised, head_values, kind, device)
    }

    fn freeze(&mut self, prefixes: Vec<&'static str>) {
        self.trained.frozen = prefixes;
    }

    fn set_lora(&mut self, lora: LoraRecipe) -> Result<(), String> {
        let meta = Assistant::meta_parameters(self.config.clone(), self.sources.clone());
        self.trained.set_lora(lora, &meta)
    }

    fn enable_recompute(&mut self) -> bool {
        false
    }

    fn num_parameters(&self) -> ParamCounts {
        self.trained.count(Assistant::meta_parameters(self.config.clone(), self.sources.clone()))
    }
}

impl AssistantPlan {
    /// Values of the masks of a sample's windows.
    fn mask_values(&self, tokens: usize) -> usize {
        let is_masked = |source: &&KeySource| source.attention.window.is_some_and(|window| window < tokens);
        self.sources.iter().filter(is_masked).count() * tokens * tokens
    }

    /// Floating-point operations of forward and backward pass over a sample, counted as in
    /// [`block_flops`](crate::block_common::block_flops).
    fn sample_flops(&self, sample: &TrainSample) -> f64 {
        let (model, steps) = (&self.config.model, self.steps());
        let (h, d) = (model.hidden_size as f64, self.config.backbone_hidden_size as f64);
        let positions = needed_positions(&sample.loss_mask, steps);
        let count = positions as f64;
        let of_layer = |layer: &LayerSpec| {
            let Heads { query, dim, .. } = layer.attention.heads;
            let queries = (query * dim) as f64;
            // Position t sees t + 1 positions, or those of a window.
            let window =
                layer.attention.window.map_or(positions, |window| (window - 1).min(positions)) as f64;
            let seen = count * window - window * (window - 1.0) / 2.0;
            count * h * (2.0 * queries + 3.0 * layer.intermediate_size as f64) + 2.0 * seen * queries
        };
        let layers: f64 = model.layers.iter().map(of_layer).sum();
        let projections = count * h * d * (2.0 + (steps as f64 - 1.0) / steps as f64);
        let keys = |source: &KeySource| {
            let heads = source.spec.attention.heads;
            let queries = source.spec.hidden_size * heads.query * heads.dim * 2;
            // Weights of the mixer without those of queries and outputs.
            count * (source.spec.mixer_weights() - queries) as f64
        };
        let keys: f64 = self.sources.iter().map(keys).sum();
        let supervised = |step| supervised_count(&sample.loss_mask, step, steps);
        let rows = (0..steps).map(supervised).sum::<usize>() as f64;
        let head_factor = if self.num_parameters().has_lora { FROZEN_FACTOR } else { TRAINED_FACTOR };
        let vocab = model.vocab_size as f64;
        let heads = head_factor * rows * h * vocab + supervised(0) as f64 * d * vocab;
        2.0 * (TRAINED_FACTOR * steps as f64 * (layers + projections) + keys + heads)
    }
}

/// An assistant with the objective that it is trained with.
struct AssistantWithLoss {
    model: Assistant,
    objective: StepObjective,
    adapters: Option<LoraAdapters>,
}

impl AssistantWithLoss {
    /// The model with its present weights.
    fn merged(&self) -> &Assistant {
        self.adapters.iter().for_each(LoraAdapters::merge);
        &self.model
    }
}

impl TrainableDrafter for AssistantWithLoss {
    fn accumulate(
        &self,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        _progress: f64,
        _on_grad_ready: Option<GradReadyHook>,
    ) -> Option<Tensor> {
        let model = self.merged();
        let (kind, device) = model.options();
        let batch = StepBatch::new(samples, &self.objective.step_weights, device, kind)?;
        let captured = captured_states(samples, &batch, device, kind);
        let sums = model.accumulate(&batch, &captured, normaliser);
        self.adapters.iter().for_each(LoraAdapters::backward);
        Some(sums)
    }

    fn grad_stages(&self) -> Vec<String> {
        vec![]
    }

    fn inference_drafter(&self, slots: usize) -> Box<dyn Drafter> {
        let mut drafter = AssistantProposer::new(self.merged().packed(), slots);
        drafter.set_draft_len(self.objective.step_weights.len());
        Box::new(drafter)
    }

    fn load_target(&self, dir: &Path) -> Result<(), ModelError> {
        self.model.load_target(dir)
    }

    fn load_pretrained(&self, dir: &Path) -> Result<Vec<String>, ModelError> {
        let misfit = |problem: String| {
            ModelError::Mismatch(UsageError(format!("train.init_from: {}: {problem}", dir.display())))
        };
        let found = crate::registry::find_checkpoint_kind(dir)?;
        if !(found.classes)().contains(&super::CLASSES[0].to_string()) {
            let problem =
                format!("it holds {}, the recipe asks for another kind of drafter", found.description);
            return Err(misfit(problem));
        }
        let there = AssistantConfig::load(dir)?;
        let mut transfer = WarmStartCheck::default();
        self.model.config().compare_for_warm_start(&there, &mut transfer);
        let differing = transfer.differences();
        if !differing.is_empty() {
            let problem = format!("another drafter than the recipe asks for: {}", differing.join("; "));
            return Err(misfit(problem));
        }
        let _guard = tch::no_grad_guard();
        let weights = Weights::open(dir, "an assistant", self.model.options().1, Kind::Float)?;
        weights.check_finite()?;
        for (name, mut tensor) in self.model.tensors().all_tensors() {
            tensor.copy_(&weights.get(&name, &tensor.size())?);
        }
        let mut unread = weights.unread_names();
        unread.retain(|name| !is_own_end(name));
        if !unread.is_empty() {
            return Err(misfit(format!("an assistant has no use for its tensors {}", unread.join(", "))));
        }
        self.adapters.iter().for_each(LoraAdapters::take_base);
        Ok(vec![])
    }

    fn parameters(&self) -> &[(String, Tensor)] {
        let own = &self.model.tensors().parameters;
        self.adapters.as_ref().map_or(own, LoraAdapters::parameters)
    }

    fn lora_base(&self) -> Vec<(String, Tensor)> {
        self.adapters.as_ref().map_or_else(Vec::new, LoraAdapters::base)
    }

    fn checkpoint(&self) -> Vec<(String, Tensor)> {
        self.merged().tensors().all_tensors()
    }

    fn config_json(&self) -> Map<String, Value> {
        self.model.config().to_json()
    }
}

/// Captured states `[N, m·d]` of the positions of a batch.
pub(super) fn captured_states(
    samples: &[TrainSample],
    batch: &StepBatch,
    device: Device,
    kind: Kind,
) -> Tensor {
    let rows = batch.used.iter().zip(&batch.lengths);
    let parts: Vec<Tensor> =
        rows.map(|(&sample, &length)| samples[sample].taps.narrow(0, 0, length)).collect();
    cat_to_device(&parts, parts[0].device(), device, kind)
}

impl Assistant {
    /// Normed outputs `[N, h]` of each of the K steps. `captured [N, m·d]` holds the states that enter the target's layers.
    pub(super) fn step_outputs(&self, batch: &StepBatch, captured: &Tensor) -> Vec<Tensor> {
        let _range = range(c"forward");
        let positions = batch.row_positions();
        let keys_values = tch::no_grad(|| self.keys_values(captured, &positions));
        let sequences = self.attention_specs().into_iter().zip(&keys_values);
        let keys: Vec<CausalKeys> =
            sequences.map(|(spec, (k, v))| CausalKeys::new(&spec, &batch.lengths, [k, v])).collect();
        // All steps have the position of the anchor, as in decoding.
        let rotations = self.query_rotations(&(positions + 1));
        let mut attend = |source: usize, queries: &Qkv| keys[source].attend(&queries.q);
        let mut outputs: Vec<Tensor> = vec![];
        for step in 0..batch.steps() {
            let next = outputs.last().map(|x| self.next_states(x));
            let states = next.as_ref().unwrap_or(&batch.states);
            outputs.push(self.hidden(&batch.step_tokens(step), states, &rotations, &mut attend));
        }
        outputs
    }

    /// Runs forward and backward over a batch, and adds to the gradients of the parameters. The loss is Σ w·CE / (normaliser + 1e-6) over
    /// the supervised labels of all steps, where w is the weight of the step. Returns the sums of the metrics, float64.
    fn accumulate(&self, batch: &StepBatch, captured: &Tensor, normaliser: LossDenominator) -> Tensor {
        let outputs = Tensor::cat(&self.step_outputs(batch, captured), 0); // [K·N, h]
        let rows = outputs.index_select(0, &batch.rows); // [R, h]
        let losses = tch::no_grad(|| head_losses(self, batch, &rows.detach(), normaliser.scale()));
        // Nothing but the head may be trained.
        if rows.requires_grad() {
            let surrogate = (&rows * &losses.grad_outputs).sum(Kind::Float);
            drop((outputs, rows));
            let _range = range(c"backward");
            surrogate.backward();
        }
        tch::no_grad(|| step_sums(batch, &losses.rows))
    }
}
