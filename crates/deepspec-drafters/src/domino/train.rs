//! Training of Domino: objective, metrics and costs.

use deepspec_core::FinalStates;
use deepspec_core::config::ConfigError;
use deepspec_core::recipe::Recipe;
use deepspec_models::ModelConfig;
use deepspec_models::nn::Builder;
use deepspec_ops::distill_loss::{LossColumn, LossOutput, LossRecipe};
use tch::{Kind, Tensor};

use super::model::{
    Domino, DominoConfig, DominoModules, DominoRecipe, DominoSettings, GruSettings, LambdaBase,
};
use crate::block_common::sums::{LoggedSums, ratio};
use crate::block_common::{
    BlockBatch, BlockProposerOf, BlockSpec, DraftBias, FROZEN_FACTOR, LossSum, TRAINED_FACTOR, block_flops,
    block_pass_rows, sum_of_slot_weights,
};
use crate::draft_model::{
    DraftDecoder, DrafterKind, DrafterSettings as _, PassRows, Plan, SampleSize, checkpoint_kind,
};
use crate::registration::{DrafterKindInfo, ParamGroup, RecipeSection};
use crate::{
    ConfigIssue, Drafter, DrafterPlan, GradReadyHook, LossDenominator, Metrics, Predictions, TrainSample,
    block_common,
};

/// Registry entry of Domino.
pub const DOMINO_INFO: DrafterKindInfo = DrafterKindInfo {
    name: "domino",
    title: "Domino",
    param_groups: &[
        block_common::BACKBONE,
        ParamGroup { name: "correction", prefixes: &["prefix_gru.", "embed_proj."] },
    ],
    settings: Some(|schemas| schemas.subschema_for::<DominoRecipe>()),
    checkpoints: Some(checkpoint_kind::<DominoModules>("Domino", &super::formats::READER)),
};

/// A Domino drafter with a KV cache.
pub type DominoProposer = BlockProposerOf<DominoModules>;

/// Architecture and objective of a Domino drafter, without weights.
pub type DominoPlan = Plan<DominoModules>;

/// Loss weights of Domino.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DominoObjective {
    /// Weights of the losses, for both logits, and of the slots.
    pub loss: LossRecipe,
    /// Weight of the loss of the uncorrected logits, by the progress of training.
    pub lambda_base: LambdaBase,
}

/// Reads and checks the recipe section of Domino. An error names the wrong key, with file and line.
pub fn read_recipe(section: &RecipeSection<'_>) -> Result<DominoRecipe, ConfigError> {
    let own: DominoRecipe = section.read()?;
    own.check().map_err(|(key, problem)| section.error(key, problem))?;
    Ok(own)
}

/// Builds the plan of a drafter for this target. An error names the key that does not fit.
pub fn build_plan<D>(
    own: &DominoRecipe,
    recipe: &Recipe<D>,
    target: &ModelConfig,
) -> Result<Box<dyn DrafterPlan>, ConfigIssue> {
    let config = DominoConfig {
        decoder: DraftDecoder::new(target.anchored_decoder(&own.layers().windows()), recipe, target)?,
        settings: DominoSettings {
            blocks: BlockSpec {
                block_size: own.block_size,
                slots: own.slots,
                mask_token_id: own.mask_token_id,
                causal: false,
                num_anchors: own.num_anchors,
            },
            gru: own.gru,
        },
    };
    config.check_recipe()?;
    let objective = DominoObjective { loss: own.loss(), lambda_base: own.lambda_base };
    Ok(Box::new(DominoPlan::new(config, objective)))
}

impl DrafterKind for DominoModules {
    type Settings = DominoSettings;
    type Objective = DominoObjective;
    const FINAL_STATES: FinalStates = FinalStates::Supervised;
    const RECOMPUTES: bool = true;

    fn new(b: &Builder, config: &DominoConfig) -> Self {
        Self::build(b, config)
    }

    fn loss_denominator_part(plan: &DominoPlan, loss_mask: &[bool], anchors: &[usize]) -> f64 {
        sum_of_slot_weights(&plan.config.settings.blocks, plan.objective.loss.decay_gamma, loss_mask, anchors)
    }

    fn accumulate(
        model: &Domino,
        objective: &DominoObjective,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        progress: f64,
        on_grad_ready: Option<GradReadyHook>,
    ) -> Option<Tensor> {
        let (device, kind) = (model.device(), model.kind());
        let batch = model.config().batch(samples, objective.loss.decay_gamma, device, kind)?;
        let lambda = objective.lambda_base.at(progress);
        Some(model.accumulate(&batch, &objective.loss.at(progress), lambda, normaliser, on_grad_ready))
    }

    fn grad_stages(model: &Domino) -> Vec<String> {
        model.layer_grad_stages()
    }

    fn metric_defs(plan: &DominoPlan) -> Metrics {
        let (loss, gamma) = (plan.objective.loss, plan.config.settings.draft_len());
        let compute = move |sums: &[f64], samples| {
            let window = LoggedSums { gamma, own: &DOMINO_SUMS, sums };
            let [base_loss, base_tau, lambda] = DOMINO_SUMS.map(|name| window.get(LossSum::Own(name)));
            let own = [
                ("base_tau_probabilistic", ratio(base_tau, window.get(LossSum::Blocks))),
                ("lambda_base", window.weighted_mean(lambda)),
            ];
            window.to_metrics(&loss, samples, ("base_loss", window.weighted_mean(base_loss)), &own)
        };
        Metrics {
            count: LossSum::all(gamma, &DOMINO_SUMS).count(),
            headline: &[
                ("ce", "ce_loss"),
                ("base", "base_loss"),
                ("λ", "lambda_base"),
                ("τ", "tau_probabilistic"),
            ],
            compute: Box::new(compute),
        }
    }

    /// The corrected and the plain losses share the logits of drafter and target, which count once although both compute them.
    fn flops(plan: &DominoPlan, samples: &[TrainSample]) -> f64 {
        let (model, settings) = (plan.config.model(), &plan.config.settings);
        let [d, vocab, state, rank] =
            [model.hidden_size, model.vocab_size, settings.gru.hidden_size, settings.gru.rank]
                .map(|size| size as f64);
        block_flops(&plan.config, samples, |blocks, rows| {
            let logits = (FROZEN_FACTOR + 1.0) * rows * d * vocab;
            let drafts = blocks * settings.draft_len() as f64;
            let gru = drafts * 3.0 * state * (FROZEN_FACTOR * d + TRAINED_FACTOR * state);
            logits + gru + TRAINED_FACTOR * (drafts * (d + state) * rank + rows * rank * vocab)
        })
    }

    fn pass_rows(plan: &DominoPlan, samples: &[SampleSize]) -> PassRows {
        let config = &plan.config;
        let GruSettings { hidden_size, rank } = config.settings.gru;
        // Autograd saves the embedding, the input of W1, and the gates and their parts of every step.
        let head_values = 2 * config.model().hidden_size + SAVED_STATES * hidden_size + SAVED_RANKS * rank;
        let rows = block_pass_rows(&config.decoder, &config.settings.blocks, samples);
        PassRows { head_values: rows.supervised * head_values as usize, ..rows }
    }

    fn into_drafter(model: Domino, slots: usize) -> Box<dyn Drafter> {
        Box::new(BlockProposerOf::new(model, slots))
    }

    fn predict<'a>(model: &'a Domino, samples: &[TrainSample]) -> Option<Predictions<'a>> {
        block_common::predict(model, samples)
    }
}

/// Saved values per draft in multiples of the GRU's state: products of both weights (3 each), gates, their complements and products, and
/// the states, once by themselves and twice in larger tensors.
const SAVED_STATES: i64 = 16;
/// Saved values per draft in multiples of the rank: input and output of the SiLU, padded and selected features, and their gradients.
const SAVED_RANKS: i64 = 5;

/// Sums that only Domino has: the weighted loss of the uncorrected logits, Σ over the blocks of their τ, and λ · Σ of the slot weights.
/// The other sums are those of the corrected logits; `loss` is the one of both.
pub const DOMINO_SUMS: [&str; 3] = ["base_loss", "base_tau", "lambda_base"];

impl Domino {
    /// Runs forward and backward over a batch, and adds to the gradients of the parameters, which must require gradients. Returns every
    /// [`LossSum`], `[K]` float64, detached. `on_grad_ready` is called as in [`TrainableDrafter`](crate::TrainableDrafter).
    ///
    /// The loss is `(1 − λ)·L(corrected logits) + λ·L(base logits)` with L = Σ w·loss / (normaliser + 1e-6), slot weights w over the
    /// supervised drafts, and `lambda` λ. The GRU reads the true previous tokens (teacher forcing).
    ///
    /// Autograd differentiates backbone, GRU and W1. Gradients through the frozen LM head, and of W2, are computed in closed form.
    pub fn accumulate(
        &self,
        batch: &BlockBatch,
        loss: &LossRecipe,
        lambda: f64,
        normaliser: LossDenominator,
        on_grad_ready: Option<GradReadyHook>,
    ) -> Tensor {
        let correction = &self.modules.head;
        let pass = self.training_pass(batch, on_grad_ready.is_some());
        let hidden = &pass.hidden; // [A, γ, d]
        let embeddings = tch::no_grad(|| self.embed(&batch.previous));
        let features = batch.select_supervised(&correction.teacher_forced_features(hidden, &embeddings)); // [R, E]
        let supervised_hidden = batch.select_supervised(hidden); // [R, d]
        let weigh = |bias, weight: f64| {
            let scale = weight * normaliser.scale();
            batch.losses(&self.vocabulary().loss_head(), &supervised_hidden, bias, loss, scale)
        };
        let (corrected, base) = tch::no_grad(|| {
            let bias = DraftBias { features: &features, feature_group: None, w2: correction.w2() };
            (weigh(Some(bias), 1.0 - lambda), weigh(None, lambda))
        });
        // Autograd continues from the closed-form gradients: the gradient of Σ x·g with respect to x is g.
        let mut surrogate =
            (&supervised_hidden * (&corrected.grad_hidden + &base.grad_hidden)).sum(Kind::Float);
        if let Some(grad_features) = &corrected.grad_features {
            surrogate += (&features * grad_features).sum(Kind::Float);
        }
        pass.backward(&surrogate, on_grad_ready);
        tch::no_grad(|| {
            let total = |output: &LossOutput| output.column(LossColumn::Loss).sum(Kind::Double);
            let accept_rate =
                |output: &LossOutput| (output.column(LossColumn::L1) * -0.5 + 1.0).clamp(0.0, 1.0);
            let base_survival = batch.scatter_to_blocks(&accept_rate(&base)).cumprod(1, Kind::Float);
            let own = [
                total(&base),
                base_survival.sum(Kind::Double) + batch.blocks as f64,
                batch.weights.sum(Kind::Double) * lambda,
            ];
            let both = total(&corrected) * (1.0 - lambda) + total(&base) * lambda;
            batch.loss_sums(&corrected, &both, &accept_rate(&corrected), own)
        })
    }
}
