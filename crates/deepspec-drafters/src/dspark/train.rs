//! Training of DSpark and DFlash: objective, metrics and costs.

use deepspec_core::FinalStates;
use deepspec_core::config::ConfigError;
use deepspec_core::recipe::Recipe;
use deepspec_models::ModelConfig;
use deepspec_models::nn::Builder;
use deepspec_ops::distill_loss::{LossColumn, LossOutput, LossRecipe};
use deepspec_ops::grad_or_zeros;
use tch::{Kind, Reduction, Tensor};

use super::model::{
    ConfidenceSettings, DSpark, DSparkConfig, DSparkModules, DSparkRecipe, DSparkSettings, MarkovHead,
    MarkovKind,
};
use crate::block_common::sums::LoggedSums;
use crate::block_common::{
    BlockBatch, BlockDrafter, BlockProposerOf, BlockSpec, DraftBias, FROZEN_FACTOR, LossSum, TRAINED_FACTOR,
    block_flops, block_pass_rows, sum_of_slot_weights,
};
use crate::draft_model::{
    DraftDecoder, DraftModel, DrafterKind, DrafterSettings as _, PassRows, Plan, SampleSize, checkpoint_kind,
};
use crate::registration::{DrafterKindInfo, ParamGroup, RecipeSection};
use crate::{
    ConfigIssue, Drafter, DrafterPlan, GradReadyHook, LossDenominator, Metrics, Predictions, TrainSample,
    block_common,
};

/// Parameter groups that `train.freeze` names.
const PARAM_GROUPS: &[ParamGroup] = &[
    block_common::BACKBONE,
    ParamGroup { name: "markov", prefixes: &["markov_head."] },
    ParamGroup { name: "confidence", prefixes: &["confidence_head."] },
];

/// Registry entry of DSpark.
pub const DSPARK_INFO: DrafterKindInfo = DrafterKindInfo {
    name: "dspark",
    title: "DSpark",
    param_groups: PARAM_GROUPS,
    settings: Some(|schemas| schemas.subschema_for::<DSparkRecipe>()),
    checkpoints: Some(checkpoint_kind::<DSparkModules>(
        "a block drafter (DSpark, DFlash)",
        &super::formats::READER,
    )),
};

/// Registry entry of DFlash: DSpark without heads, trained with cross entropy. Its checkpoints have DSpark's class.
pub const DFLASH_INFO: DrafterKindInfo = DrafterKindInfo {
    name: "dflash",
    title: "DFlash",
    param_groups: PARAM_GROUPS,
    settings: Some(|schemas| schemas.subschema_for::<DSparkRecipe>()),
    checkpoints: None,
};

/// Default losses of DSpark.
pub const DSPARK_LOSS: LossRecipe = LossRecipe { ce_alpha: 0.1, l1_alpha: 0.9, ..LossRecipe::NONE };
/// Default losses of DFlash.
pub const DFLASH_LOSS: LossRecipe = LossRecipe { ce_alpha: 1.0, ..LossRecipe::NONE };

/// Reads and checks the recipe section of DSpark. An error names the wrong key, with file and line.
pub fn read_dspark(section: &RecipeSection<'_>) -> Result<DSparkRecipe, ConfigError> {
    check_recipe(section, section.read()?, DSPARK_LOSS)
}

/// Reads and checks the recipe section of DFlash, which has no heads.
pub fn read_dflash(section: &RecipeSection<'_>) -> Result<DSparkRecipe, ConfigError> {
    let recipe: DSparkRecipe = section.read()?;
    if recipe.markov.is_some() || recipe.confidence.is_some() {
        return Err(section.error("", "DFlash has no Markov and no confidence head; use `dspark`"));
    }
    check_recipe(section, recipe, DFLASH_LOSS)
}

fn check_recipe(
    section: &RecipeSection<'_>,
    block: DSparkRecipe,
    loss: LossRecipe,
) -> Result<DSparkRecipe, ConfigError> {
    let result = block.check().and_then(|()| block.loss.unwrap_or(loss).check());
    result.map_err(|(key, problem)| section.error(key, problem))?;
    Ok(block)
}

/// Builds the plan of a drafter for this target; `loss` are the default losses. An error names the key that does not fit.
pub fn build_plan<D>(
    block: &DSparkRecipe,
    loss: LossRecipe,
    recipe: &Recipe<D>,
    target: &ModelConfig,
) -> Result<Box<dyn DrafterPlan>, ConfigIssue> {
    let mut decoder = DraftDecoder::new(target.anchored_decoder(&block.layers().windows()), recipe, target)?;
    if block.attention_sinks {
        let family = decoder.model.family;
        let problem = || ("attention_sinks", format!("draft layers of {family} have no attention sinks"));
        decoder.model = decoder.model.with_attention_sinks().ok_or_else(problem)?;
    }
    let config = DSparkConfig {
        decoder,
        settings: DSparkSettings {
            blocks: BlockSpec {
                block_size: block.block_size,
                slots: block.slots,
                mask_token_id: block.mask_token_id,
                causal: block.causal,
                num_anchors: block.num_anchors,
            },
            markov: block.markov,
            confidence: block.confidence.map(|head| ConfidenceSettings { with_markov: head.with_markov }),
        },
    };
    config.check_recipe()?;
    let confidence_alpha = block.confidence.map_or(0.0, |head| head.alpha);
    let objective = DSparkObjective { loss: block.loss.unwrap_or(loss), confidence_alpha };
    Ok(Box::new(DSparkPlan::new(config, objective)))
}

/// A block drafter with a KV cache.
pub type DSparkProposer = BlockProposerOf<DSparkModules>;

/// Architecture and objective of a block drafter, without weights.
pub type DSparkPlan = Plan<DSparkModules>;

/// Loss weights of DSpark or DFlash.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DSparkObjective {
    /// Weights of the losses and of the slots.
    pub loss: LossRecipe,
    /// Weight of the confidence head's binary cross entropy.
    pub confidence_alpha: f64,
}

impl DrafterKind for DSparkModules {
    type Settings = DSparkSettings;
    type Objective = DSparkObjective;
    const FINAL_STATES: FinalStates = FinalStates::Supervised;
    const RECOMPUTES: bool = true;

    fn new(b: &Builder, config: &DSparkConfig) -> Self {
        Self::build(b, config)
    }

    fn loss_denominator_part(plan: &DSparkPlan, loss_mask: &[bool], anchors: &[usize]) -> f64 {
        sum_of_slot_weights(&plan.config.settings.blocks, plan.objective.loss.decay_gamma, loss_mask, anchors)
    }

    fn accumulate(
        model: &DSpark,
        objective: &DSparkObjective,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        progress: f64,
        on_grad_ready: Option<GradReadyHook>,
    ) -> Option<Tensor> {
        let (device, kind) = (model.device(), model.kind());
        let batch = model.config().batch(samples, objective.loss.decay_gamma, device, kind)?;
        let objective = DSparkObjective { loss: objective.loss.at(progress), ..*objective };
        Some(model.accumulate(&batch, &objective, normaliser, on_grad_ready))
    }

    fn grad_stages(model: &DSpark) -> Vec<String> {
        model.layer_grad_stages()
    }

    fn metric_defs(plan: &DSparkPlan) -> Metrics {
        metric_defs(plan.objective.loss, plan.config.settings.blocks.draft_len())
    }

    fn flops(plan: &DSparkPlan, samples: &[TrainSample]) -> f64 {
        let (model, settings) = (plan.config.model(), &plan.config.settings);
        let (d, vocab) = (model.hidden_size as f64, model.vocab_size as f64);
        block_flops(&plan.config, samples, |blocks, rows| {
            let (draft_logits, target_logits) = (FROZEN_FACTOR * rows * d * vocab, rows * d * vocab);
            let heads = settings.markov.map_or(0.0, |markov| {
                let (rank, slots) = (markov.rank as f64, blocks * settings.draft_len() as f64);
                let gate = match markov.kind {
                    MarkovKind::Vanilla => 0.0,
                    MarkovKind::Gated => (d + rank) * rank,
                    MarkovKind::Rnn => (d + 2.0 * rank) * 3.0 * rank,
                };
                TRAINED_FACTOR * (rows * rank * vocab + slots * gate)
            });
            draft_logits + target_logits + heads
        })
    }

    fn pass_rows(plan: &DSparkPlan, samples: &[SampleSize]) -> PassRows {
        block_pass_rows(&plan.config.decoder, &plan.config.settings.blocks, samples)
    }

    fn into_drafter(model: DSpark, slots: usize) -> Box<dyn Drafter> {
        Box::new(BlockProposerOf::new(model, slots))
    }

    fn predict<'a>(model: &'a DSpark, samples: &[TrainSample]) -> Option<Predictions<'a>> {
        block_common::predict(model, samples)
    }
}

/// Metrics of a drafter with DSpark's losses and sums, for blocks of `gamma` drafts.
pub fn metric_defs(loss: LossRecipe, gamma: usize) -> Metrics {
    let compute = move |sums: &[f64], samples| {
        let window = LoggedSums { gamma, own: &DSPARK_SUMS, sums };
        let means = DSPARK_SUMS.map(|name| (name, window.weighted_mean(window.get(LossSum::Own(name)))));
        window.to_metrics(&loss, samples, ("confidence_loss", means[0].1), &means[1..])
    };
    Metrics {
        count: LossSum::all(gamma, &DSPARK_SUMS).count(),
        headline: &[
            ("ce", "ce_loss"),
            ("l1", "l1_loss"),
            ("conf", "confidence_loss"),
            ("τ", "tau_probabilistic"),
        ],
        compute: Box::new(compute),
    }
}

/// Sums that only DSpark, DFlash and DSpark of DeepSeek-V4 have, with slot weights: the confidence's BCE, |c − c*|, c − c* and Π c − Π c*.
pub const DSPARK_SUMS: [&str; 4] =
    ["confidence", "confidence_abs_error", "confidence_bias", "confidence_prefix_bias"];

impl DSpark {
    /// Runs forward and backward over a batch, and adds to the gradients of the parameters, which must require gradients. Returns every
    /// [`LossSum`], `[K]` float64, detached. `on_grad_ready` is called as in [`TrainableDrafter`](crate::TrainableDrafter).
    ///
    /// Every loss is Σ w·loss / (normaliser + 1e-6) with slot weights w over the supervised drafts. The confidence loss is the BCE against
    /// c* = clamp(1 − ½‖p^d − p^t‖₁, 0, 1). p^t and c* are constants.
    ///
    /// Autograd differentiates the backbone, the layers that compute the Markov features, and the confidence head. Gradients
    /// through the frozen LM head, and of W2, are computed in closed form. The gradient of W1 is scattered from that of
    /// `previous_embeddings`.
    pub fn accumulate(
        &self,
        batch: &BlockBatch,
        objective: &DSparkObjective,
        normaliser: LossDenominator,
        on_grad_ready: Option<GradReadyHook>,
    ) -> Tensor {
        let pass = self.training_pass(batch, on_grad_ready.is_some());
        let markov = self.modules.markov.as_ref();
        let losses = HeadLosses::new(self, markov, &pass.hidden, batch, objective, normaliser.scale());
        pass.backward(&losses.surrogate, on_grad_ready);
        losses.finish(markov, batch)
    }
}

/// Losses of a batch, before autograd's backward pass.
pub struct HeadLosses {
    /// A scalar whose gradients with respect to the hidden states and to the parameters of the heads are those of the losses.
    pub surrogate: Tensor,
    /// Detached leaf, `[A, H, r]`; None without a Markov head.
    previous_embeddings: Option<Tensor>,
    output: LossOutput,
    /// `[R]`.
    accept_rate: Tensor,
    /// `[R]`; None without a confidence head.
    confidence_logits: Option<Tensor>,
    /// Weighted sum of the confidence loss, times its weight.
    bce: Option<Tensor>,
}

impl HeadLosses {
    /// Computes the losses of the hidden states `[A, γ, d]` of a drafter whose Markov head is `markov`. Adds to the gradient of
    /// W2. `scale` is a factor of the gradients.
    pub fn new<K: BlockDrafter>(
        model: &DraftModel<K>,
        markov: Option<&MarkovHead>,
        hidden: &Tensor,
        batch: &BlockBatch,
        objective: &DSparkObjective,
        scale: f64,
    ) -> Self {
        let select_supervised = |tensor: &Tensor| batch.select_supervised(tensor);
        // `previous_embeddings` is a detached leaf: autograd would allocate a dense `[V, r]` gradient of W1.
        let previous_embeddings = markov.map(|markov| {
            let previous_embeddings = tch::no_grad(|| markov.embed(&batch.previous));
            previous_embeddings.set_requires_grad(true)
        });
        let features = markov.zip(previous_embeddings.as_ref()).map(|(markov, previous_embeddings)| {
            select_supervised(&markov.teacher_forced_features(hidden, previous_embeddings)) // [R, r]
        });
        let supervised_hidden = select_supervised(hidden); // [R, d]
        let head_states = K::head_states(model, &supervised_hidden);
        // Losses, and their gradients with respect to `head_states` and `features`, in closed form.
        let output = tch::no_grad(|| {
            let bias = markov.zip(features.as_ref()).map(|(markov, features)| DraftBias {
                features,
                // Rows with the same previous token have equal vanilla features, so the kernel computes their bias once.
                feature_group: markov.reads_previous_alone().then_some(&batch.supervised_previous[..]),
                w2: markov.w2(),
            });
            batch.losses(&model.vocabulary().loss_head(), &head_states, bias, &objective.loss, scale)
        });
        let accept_rate = (output.column(LossColumn::L1) * -0.5 + 1.0).clamp(0.0, 1.0);
        // Autograd continues from the closed-form gradients: the gradient of Σ x·g with respect to x is g.
        let mut surrogate = (&head_states * &output.grad_hidden).sum(Kind::Float);
        if let Some((features, grad_features)) = features.as_ref().zip(output.grad_features.as_ref()) {
            surrogate += (features * grad_features).sum(Kind::Float);
        }
        let confidence_logits = K::confidence_logits(
            model,
            &supervised_hidden,
            previous_embeddings.as_ref().map(&select_supervised).as_ref(),
        );
        let bce = confidence_logits.as_ref().map(|logits| {
            batch.weighted_sum(&confidence_loss(logits, &accept_rate)) * objective.confidence_alpha
        });
        if let Some(bce) = &bce {
            surrogate += bce * scale;
        }
        Self { surrogate, previous_embeddings, output, accept_rate, confidence_logits, bce }
    }

    /// After the backward pass: adds to the gradient of W1, and returns every [`LossSum`], `[K]` float64.
    pub fn finish(self, markov: Option<&MarkovHead>, batch: &BlockBatch) -> Tensor {
        tch::no_grad(|| {
            // The gradient of W1, scattered from the gradient of `previous_embeddings`.
            let markov = markov.filter(|markov| markov.w1().requires_grad());
            if let (Some(markov), Some(previous_embeddings), Some(grad)) =
                (markov, &self.previous_embeddings, &batch.previous_scatter)
            {
                grad.add_to(&grad_or_zeros(markov.w1()), &previous_embeddings.grad().flatten(0, 1));
            }
            let mut loss = self.output.column(LossColumn::Loss).sum(Kind::Double);
            if let Some(bce) = &self.bce {
                loss += bce.detach();
            }
            batch.loss_sums(&self.output, &loss, &self.accept_rate, self.confidence_sums(batch))
        })
    }

    /// Values of [`DSPARK_SUMS`]; zeros without a confidence head.
    fn confidence_sums(&self, batch: &BlockBatch) -> [Tensor; 4] {
        let accept_rate = &self.accept_rate;
        let Some(logits) = &self.confidence_logits else {
            return DSPARK_SUMS.map(|_| Tensor::zeros([], (Kind::Double, accept_rate.device())));
        };
        let confidence = logits.sigmoid();
        let error = &confidence - accept_rate;
        let survival = |rates: &Tensor| batch.scatter_to_blocks(rates).cumprod(1, Kind::Float);
        let prefix = survival(&confidence) - survival(accept_rate);
        [
            batch.weighted_sum(&confidence_loss(logits, accept_rate)),
            batch.weighted_sum(&error.abs()),
            batch.weighted_sum(&error),
            (prefix * batch.scatter_to_blocks(&batch.weights)).sum(Kind::Float),
        ]
    }
}

/// Binary cross entropy of confidence logits against accept rates, `[R]`.
fn confidence_loss(logits: &Tensor, accept_rate: &Tensor) -> Tensor {
    let none = None::<&Tensor>;
    logits.binary_cross_entropy_with_logits(accept_rate, none, none, Reduction::None)
}
