//! Training of MTP-1: objective, metrics and costs.

use deepspec_core::FinalStates;
use deepspec_core::config::ConfigError;
use deepspec_core::recipe::Recipe;
use deepspec_models::ModelConfig;
use deepspec_models::nn::{Builder, Heads};
use deepspec_ops::distill_loss::{LossColumn, LossOutput, LossRecipe, SupervisedRows, distill_loss};
use deepspec_ops::range;
use tch::{Kind, Tensor};

use super::model::{Mtp, MtpConfig, MtpModules, MtpProposer, MtpRecipe, MtpSettings};
use crate::block_common::{FROZEN_FACTOR, TRAINED_FACTOR};
use crate::draft_model::{DraftDecoder, DrafterKind, PassRows, Plan, SampleSize, checkpoint_kind};
use crate::registration::{DrafterKindInfo, ParamGroup, RecipeSection};
use crate::token_common::{
    StepBatch, StepObjective, StepRows, needed_positions, step_sums, supervised_count,
};
use crate::{
    ConfigIssue, Drafter, DrafterPlan, GradReadyHook, LossDenominator, Metrics, Predictions, TrainSample,
};

/// Registry entry of MTP-1.
pub const MTP_INFO: DrafterKindInfo = DrafterKindInfo {
    name: "mtp",
    title: "MTP-1",
    param_groups: &[
        ParamGroup { name: "fusion", prefixes: &["fc.", "pre_fc_norm_embedding.", "pre_fc_norm_hidden."] },
        ParamGroup { name: "layers", prefixes: &["layers."] },
        ParamGroup { name: "norm", prefixes: &["norm."] },
    ],
    settings: Some(|schemas| schemas.subschema_for::<MtpRecipe>()),
    checkpoints: Some(checkpoint_kind::<MtpModules>("MTP-1", &super::formats::READER)),
};

/// Architecture and objective of an MTP-1 drafter, without weights.
pub type MtpPlan = Plan<MtpModules>;

/// Reads and checks the recipe section of MTP-1. An error names the wrong key, with file and line.
pub fn read_recipe(section: &RecipeSection<'_>) -> Result<MtpRecipe, ConfigError> {
    let own: MtpRecipe = section.read()?;
    own.check().map_err(|(key, problem)| section.error(key, problem))?;
    Ok(own)
}

/// Builds the plan of a drafter for this target. An error names the key that does not fit.
pub fn build_plan<D>(
    own: &MtpRecipe,
    recipe: &Recipe<D>,
    target: &ModelConfig,
) -> Result<Box<dyn DrafterPlan>, ConfigIssue> {
    let MtpRecipe { num_speculative_steps, step_weight_beta } = *own;
    let config = MtpConfig {
        decoder: DraftDecoder::new(target.mtp_decoder(), recipe, target)?,
        settings: MtpSettings { num_speculative_steps, step_weight_beta },
    };
    config.check_recipe()?;
    Ok(Box::new(MtpPlan::new(config, StepObjective::new(step_weight_beta, num_speculative_steps))))
}

impl DrafterKind for MtpModules {
    type Settings = MtpSettings;
    type Objective = StepObjective;
    const FINAL_STATES: FinalStates = FinalStates::All;
    const TREE_REFUSAL: Option<&'static str> = crate::drafter::TREE_REFUSAL;

    fn new(b: &Builder, config: &MtpConfig) -> Self {
        Self::build(b, config)
    }

    fn loss_denominator_part(plan: &MtpPlan, loss_mask: &[bool], _anchors: &[usize]) -> f64 {
        plan.objective.loss_denominator_part(loss_mask)
    }

    fn accumulate(
        model: &Mtp,
        objective: &StepObjective,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        _progress: f64,
        _listener: Option<GradReadyHook>,
    ) -> Option<Tensor> {
        let batch = StepBatch::new(samples, &objective.step_weights, model.device(), model.kind())?;
        Some(model.accumulate(&batch, normaliser))
    }

    fn metric_defs(plan: &MtpPlan) -> Metrics {
        plan.objective.metric_defs()
    }

    fn flops(plan: &MtpPlan, samples: &[TrainSample]) -> f64 {
        samples.iter().map(|sample| sample_flops(&plan.config, sample)).sum()
    }

    /// Assumes that the steps compute all positions, as for an answer that ends with its sample.
    fn pass_rows(plan: &MtpPlan, samples: &[SampleSize]) -> PassRows {
        let config = &plan.config;
        let sum = |size: fn(&SampleSize) -> usize| samples.iter().map(size).sum::<usize>();
        let (tokens, supervised) = (sum(|sample| sample.tokens), sum(|sample| sample.supervised));
        let (model, steps) = (config.model(), config.settings.num_speculative_steps);
        let heads = model.layers[0].attention.heads;
        // Attention repeats keys and values for every query head.
        let repeated = 2 * (heads.query - heads.key_value) * heads.dim;
        // The gate before and after its sigmoid, and attention's output before it.
        let gated = if model.layers[0].output_gate { 3 * heads.query * heads.dim } else { 0 };
        PassRows {
            layers: steps * tokens,
            at_once: tokens,
            tokens,
            context: 0,
            supervised: steps * supervised,
            // The embedding, both inputs of `fc` side by side, and the state before its norm.
            own_values: (4 * model.hidden_size + repeated + gated) as usize,
            head_values: 0,
            attention: 0,
        }
    }

    fn into_drafter(model: Mtp, slots: usize) -> Box<dyn Drafter> {
        Box::new(MtpProposer::new(model, slots))
    }

    fn predict<'a>(model: &'a Mtp, samples: &[TrainSample]) -> Option<Predictions<'a>> {
        let equal = StepObjective::new(1.0, model.config().settings.num_speculative_steps);
        let device = samples.first()?.last.device();
        let batch = StepBatch::new(samples, &equal.step_weights, device, model.kind())?;
        Some(batch.predictions(&model.step_states(&batch), |states| model.draft_logits(states)))
    }
}

impl Mtp {
    /// Runs forward and backward over a batch, and adds to the gradients of the parameters. The loss is Σ w·CE / (normaliser + 1e-6) over
    /// the supervised labels of all steps, where w is the weight of the step. Returns the sums of the metrics, float64.
    ///
    /// Autograd differentiates the layer. [`distill_loss`] computes the gradients with respect to the states in closed form.
    pub fn accumulate(&self, batch: &StepBatch, normaliser: LossDenominator) -> Tensor {
        let states = Tensor::cat(&self.step_states(batch), 0); // [K·N, d]
        let rows = states.index_select(0, &batch.rows); // [R, d]
        let output = tch::no_grad(|| self.head_losses(batch, &rows, normaliser.scale()));
        let surrogate = (&rows * &output.grad_hidden).sum(Kind::Float);
        drop((states, rows));
        let backward = range(c"backward");
        surrogate.backward();
        drop(backward);
        tch::no_grad(|| {
            let rows = StepRows {
                ce: output.column(LossColumn::CE),
                agreement: output.column(LossColumn::Agreement),
                accept: (output.column(LossColumn::L1) * -0.5 + 1.0).clamp(0.0, 1.0),
            };
            step_sums(batch, &rows)
        })
    }

    /// Losses of the supervised rows, whose states are `rows [R, d]`. The caller must disable autograd.
    fn head_losses(&self, batch: &StepBatch, rows: &Tensor, scale: f64) -> LossOutput {
        // Every row is its own block.
        let slots = rows.new_zeros([rows.size()[0]], (Kind::Int64, rows.device()));
        let supervised = SupervisedRows {
            hidden: rows,
            bias: None,
            teacher: &batch.teacher,
            sources: batch.teacher_index(),
            labels: &batch.labels,
            weights: &batch.weights,
            slot_index: &slots,
            counts: &vec![1; rows.size()[0] as usize],
            gamma: 1,
            scale,
            agreement: true,
            argmax: None,
            extra: None,
        };
        let recipe = LossRecipe { ce_alpha: 1.0, ..LossRecipe::NONE };
        distill_loss(&self.vocabulary().loss_head(), &supervised, &recipe)
    }
}

/// Floating-point operations of forward and backward pass over a sample, counted as in
/// [`block_flops`](crate::block_common::block_flops).
fn sample_flops(config: &MtpConfig, sample: &TrainSample) -> f64 {
    let (model, steps) = (config.model(), config.settings.num_speculative_steps);
    let (d, vocab, layer) = (model.hidden_size as f64, model.vocab_size as f64, &model.layers[0]);
    let positions = needed_positions(&sample.loss_mask, steps);
    // Position t sees t + 1 positions of its step.
    let (count, seen) = (positions as f64, (positions * (positions + 1) / 2) as f64);
    let Heads { query, key_value, dim } = layer.attention.heads;
    let (queries, keys) = ((query * dim) as f64, (key_value * dim) as f64);
    let gates = if layer.output_gate { queries } else { 0.0 };
    let projected = d * (2.0 * d + 2.0 * queries + gates + 2.0 * keys) + layer.active_mlp_weights() as f64;
    let of_steps = TRAINED_FACTOR * steps as f64 * (count * projected + 2.0 * seen * queries);
    let rows: usize = (0..steps).map(|step| supervised_count(&sample.loss_mask, step, steps)).sum();
    let (draft_logits, target_logits) = (FROZEN_FACTOR * rows as f64 * d * vocab, rows as f64 * d * vocab);
    2.0 * (of_steps + draft_logits + target_logits)
}
