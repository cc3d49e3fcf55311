//! Training of DSpark of DeepSeek-V4: objective, metrics and costs.

use deepspec_core::FinalStates;
use deepspec_core::config::ConfigError;
use deepspec_core::recipe::Recipe;
use deepspec_models::ModelConfig;
use deepspec_models::config::MAX_LAYERS;
use deepspec_models::nn::Builder;
use deepspec_ops::distill_loss;
use tch::{Device, Kind, Tensor};

use super::model::{DSparkV4, DSparkV4Modules};
use super::proposer::DSparkV4Proposer;
use super::settings::{DSparkV4Config, DSparkV4Recipe, DSparkV4Settings, StageSettings};
use crate::block_common::{
    BlockBatch, FROZEN_FACTOR, TRAINED_FACTOR, block_pass_rows, predict_from, sum_of_slot_weights,
    supervised_draft_count,
};
use crate::draft_model::{
    DraftDecoder, DrafterKind, DrafterSettings as _, PassRows, Plan, SampleSize, checkpoint_kind,
};
use crate::dspark::{DSPARK_LOSS, DSparkObjective, HeadLosses, metric_defs};
use crate::registration::{DrafterKindInfo, ParamGroup, RecipeSection};
use crate::{
    ConfigIssue, Drafter, DrafterPlan, GradReadyHook, LossDenominator, Metrics, Predictions, TrainSample,
};

/// Registry entry of DSpark of DeepSeek-V4.
pub const DSPARK_V4_INFO: DrafterKindInfo = DrafterKindInfo {
    name: "dspark_v4",
    title: "DSpark of DeepSeek-V4",
    param_groups: &[
        ParamGroup { name: "backbone", prefixes: &["fc.", "hidden_norm.", "layers.", "hc_head_", "norm."] },
        ParamGroup { name: "markov", prefixes: &["markov_head."] },
        ParamGroup { name: "confidence", prefixes: &["confidence_head."] },
    ],
    settings: Some(|schemas| schemas.subschema_for::<DSparkV4Recipe>()),
    checkpoints: Some(checkpoint_kind::<DSparkV4Modules>("DSpark of DeepSeek-V4", &super::formats::READER)),
};

/// Architecture and objective of a DSpark drafter of DeepSeek-V4, without weights.
pub type DSparkV4Plan = Plan<DSparkV4Modules>;

/// Reads and checks the recipe section. An error names the wrong key, with file and line.
pub fn read_recipe(section: &RecipeSection<'_>) -> Result<DSparkV4Recipe, ConfigError> {
    let own: DSparkV4Recipe = section.read()?;
    let checked = own.check().and_then(|()| own.loss.unwrap_or(DSPARK_LOSS).check());
    checked.map_err(|(key, problem)| section.error(key, problem))?;
    Ok(own)
}

/// Builds the plan of a drafter for this target. An error names the key that does not fit.
pub fn build_plan<D>(
    own: &DSparkV4Recipe,
    recipe: &Recipe<D>,
    target: &ModelConfig,
) -> Result<Box<dyn DrafterPlan>, ConfigIssue> {
    let windows = vec![None; own.num_nextn_predict_layers.min(MAX_LAYERS + 1)];
    let decoder = DraftDecoder::new(target.anchored_decoder(&windows), recipe, target)
        .map_err(|(_, problem)| ("num_nextn_predict_layers", problem))?;
    let config = DSparkV4Config { decoder, settings: own.settings() };
    config.check_recipe()?;
    let objective =
        DSparkObjective { loss: own.loss.unwrap_or(DSPARK_LOSS), confidence_alpha: own.confidence_alpha };
    Ok(Box::new(DSparkV4Plan::new(config, objective)))
}

impl DrafterKind for DSparkV4Modules {
    type Settings = DSparkV4Settings;
    type Objective = DSparkObjective;
    const FINAL_STATES: FinalStates = FinalStates::Supervised;

    fn new(b: &Builder, config: &DSparkV4Config) -> Self {
        Self::build(b, config)
    }

    fn loss_denominator_part(plan: &DSparkV4Plan, loss_mask: &[bool], anchors: &[usize]) -> f64 {
        sum_of_slot_weights(&plan.config.settings.blocks, plan.objective.loss.decay_gamma, loss_mask, anchors)
    }

    fn accumulate(
        model: &DSparkV4,
        objective: &DSparkObjective,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        progress: f64,
        _: Option<GradReadyHook>,
    ) -> Option<Tensor> {
        let (device, kind) = (model.device(), model.kind());
        let batch = model.config().batch(samples, objective.loss.decay_gamma, device, kind)?;
        let objective = DSparkObjective { loss: objective.loss.at(progress), ..*objective };
        Some(model.accumulate(&batch, &objective, normaliser))
    }

    fn metric_defs(plan: &DSparkV4Plan) -> Metrics {
        metric_defs(plan.objective.loss, plan.config.settings.draft_len())
    }

    fn flops(plan: &DSparkV4Plan, samples: &[TrainSample]) -> f64 {
        samples.iter().map(|sample| sample_flops(&plan.config, sample)).sum()
    }

    fn pass_rows(plan: &DSparkV4Plan, samples: &[SampleSize]) -> PassRows {
        block_pass_rows(&plan.config.decoder, &plan.config.settings.blocks, samples)
    }

    fn activation_bytes(plan: &DSparkV4Plan, samples: &[SampleSize], kind: Kind, device: Device) -> usize {
        let (model, settings) = (plan.config.model(), &plan.config.settings);
        let (d, stages, value) = (model.hidden_size as usize, model.layers.len(), kind.elt_size_in_bytes());
        let rows = Self::pass_rows(plan, samples);
        let latent = LATENT_COPIES * settings.stages.head_dim as usize * value;
        let block_rows = rows.layers * saved_bytes(&settings.stages, d, settings.blocks.block_size, value);
        let inputs = (rows.tokens * (plan.config.decoder.taps.len() + 4) + rows.supervised * 4) * d * value;
        stages * (block_rows + rows.tokens * latent)
            + inputs
            + distill_loss::buffer_bytes(model.vocab_size, rows.supervised, kind, device)
    }

    fn into_drafter(model: DSparkV4, slots: usize) -> Box<dyn Drafter> {
        Box::new(DSparkV4Proposer::new(model, slots))
    }

    fn predict<'a>(model: &'a DSparkV4, samples: &[TrainSample]) -> Option<Predictions<'a>> {
        predict_from(model, samples, |batch| model.block_states(batch))
    }
}

/// Tensors of a latent that autograd saves: before the norm, behind it and behind the rotation.
const LATENT_COPIES: usize = 3;
/// Tensors of a head's queries that autograd saves: before the norm, behind it, behind the rotation, and the output in groups.
const QUERY_COPIES: usize = 4;
/// Tensors of the width of an expert that autograd saves: gate, up projection, both within limits, SiLU and product.
const EXPERT_COPIES: usize = 6;

/// Bytes that autograd saves per row of a stage. A value of the weights' dtype has `value` bytes.
fn saved_bytes(settings: &StageSettings, d: usize, block: usize, value: usize) -> usize {
    let &StageSettings { num_attention_heads, head_dim, q_lora_rank, o_lora_rank, o_groups, .. } = settings;
    let [heads, head_dim, rank, streams, window, active, inner] = [
        num_attention_heads,
        head_dim,
        2 * q_lora_rank + 2 * o_groups * o_lora_rank,
        settings.hc_mult,
        settings.sliding_window,
        settings.num_experts_per_tok,
        settings.moe_intermediate_size,
    ]
    .map(|size| size as usize);
    let float = Kind::Float.elt_size_in_bytes();
    // The norm and both sums save the streams in float32, which is one tensor unless they have another dtype.
    let stream_copies = if value == float { float } else { 3 * float + value };
    let mixing = settings.hc_sinkhorn_iters * (2 * streams * streams + 2 * streams) * float;
    let hyper_connection = stream_copies * streams * d + 3 * d * float + mixing;
    let keys = window + block;
    let attention = value * (3 * d + rank + (QUERY_COPIES * heads + LATENT_COPIES) * head_dim)
        + 2 * heads * keys * float
        + keys * head_dim * value / block;
    let experts = (active + 1) * (EXPERT_COPIES * inner * value + d * (value + float));
    2 * hyper_connection + attention + experts
}

/// Floating-point operations of forward and backward pass over a sample: two per multiplication of a matrix product.
fn sample_flops(config: &DSparkV4Config, sample: &TrainSample) -> f64 {
    if sample.anchors.is_empty() {
        return 0.0;
    }
    let (model, settings) = (config.model(), &config.settings);
    let s = &settings.stages;
    let [d, vocab, rank] =
        [model.hidden_size, model.vocab_size, settings.markov_rank].map(|size| size as f64);
    let [heads, width, queries, outputs] =
        [s.num_attention_heads, s.head_dim, s.q_lora_rank, s.o_groups * s.o_lora_rank]
            .map(|size| size as f64);
    let [experts, active, inner, streams] =
        [s.n_routed_experts, s.num_experts_per_tok, s.moe_intermediate_size, s.hc_mult]
            .map(|size| size as f64);
    let gamma = settings.blocks.draft_len();
    let supervised = |&anchor: &usize| supervised_draft_count(&sample.loss_mask, anchor, gamma);
    let supervised = sample.anchors.iter().map(supervised).sum::<usize>() as f64;
    let block = settings.blocks.block_size;
    let (tokens, rows) = (sample.input_ids.len() as f64, (sample.anchors.len() * block) as f64);
    let window = s.sliding_window as usize;
    let seen: usize = sample.anchors.iter().map(|&anchor| block * (anchor.min(window) + block)).sum();
    let projections =
        d * (queries + width + outputs) + heads * width * (queries + outputs / s.o_groups as f64);
    let mixing = 2.0 * streams * d * streams * (streams + 3.0);
    let ffn = d * experts + (active + 1.0) * 3.0 * d * inner;
    let stage = rows * (projections + mixing + ffn) + tokens * d * width + 2.0 * seen as f64 * heads * width;
    let context = FROZEN_FACTOR * tokens * config.decoder.taps.len() as f64 * d * d;
    let logits = (FROZEN_FACTOR + 1.0) * supervised * d * vocab;
    2.0 * (context
        + TRAINED_FACTOR * (model.layers.len() as f64 * stage + supervised * rank * vocab)
        + logits)
}

impl DSparkV4 {
    /// Runs forward and backward over a batch, and adds to the gradients of the parameters, which must require gradients. Returns every
    /// [`LossSum`](crate::LossSum) of DSpark, `[K]` float64, detached. Losses and denominators are DSpark's.
    pub fn accumulate(
        &self,
        batch: &BlockBatch,
        objective: &DSparkObjective,
        normaliser: LossDenominator,
    ) -> Tensor {
        let markov = Some(&self.modules.markov);
        let hidden = self.block_states(batch);
        let losses = HeadLosses::new(self, markov, &hidden, batch, objective, normaliser.scale());
        losses.surrogate.backward();
        losses.finish(markov, batch)
    }
}
