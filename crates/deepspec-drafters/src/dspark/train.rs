//! Training of DSpark and DFlash: objective, metrics and costs.

use deepspec_core::FinalStates;
use deepspec_core::config::ConfigError;
use deepspec_core::recipe::Recipe;
use deepspec_models::ModelConfig;
use deepspec_models::nn::Builder;
use deepspec_ops::distill_loss::{Bias, Column, LossOutput, LossRecipe, Supervised, distill_loss};
use deepspec_ops::grad_or_zeros;
use tch::{Kind, Reduction, Tensor};

use super::model::{
    Block, BlockConfig, BlockParts, BlockRecipe, BlockSettings, Confidence, MarkovHead, MarkovKind,
};
use crate::block_common::sums::Window;
use crate::block_common::{
    BlockBatch, BlockProposerOf, BlockSpec, LossSum, block_flops, block_pass_rows, block_weight,
};
use crate::draft_model::{
    DraftDecoder, DrafterKind, DrafterSettings as _, PassRows, Plan, SampleSize, checkpoints,
};
use crate::registration::{DrafterKindInfo, ParamGroup, Section};
use crate::{
    ConfigIssue, Drafter, DrafterPlan, GradReadyHook, LossDenominator, Metrics, Predictions, TrainSample,
    block_common,
};

/// Parameter groups that `train.freeze` names.
const PARTS: &[ParamGroup] = &[
    block_common::BACKBONE,
    ParamGroup { name: "markov", prefixes: &["markov_head."] },
    ParamGroup { name: "confidence", prefixes: &["confidence_head."] },
];

/// Parallel block drafter with sequential heads.
pub const DSPARK: DrafterKindInfo = DrafterKindInfo {
    name: "dspark",
    title: "DSpark",
    parts: PARTS,
    settings: Some(|schemas| schemas.subschema_for::<BlockRecipe>()),
    checkpoints: Some(checkpoints::<BlockParts>("a block drafter (DSpark, DFlash)", &super::formats::READER)),
};

/// DSpark without heads, trained with cross entropy. Its checkpoints are DSpark's.
pub const DFLASH: DrafterKindInfo = DrafterKindInfo {
    name: "dflash",
    title: "DFlash",
    parts: PARTS,
    settings: Some(|schemas| schemas.subschema_for::<BlockRecipe>()),
    checkpoints: None,
};

/// Losses of DSpark where a recipe gives none.
pub const DSPARK_LOSS: LossRecipe = LossRecipe { ce_alpha: 0.1, l1_alpha: 0.9, ..LossRecipe::NONE };
/// Losses of DFlash where a recipe gives none.
pub const DFLASH_LOSS: LossRecipe = LossRecipe { ce_alpha: 1.0, ..LossRecipe::NONE };

/// Reads and checks the settings of DSpark.
///
/// # Errors
/// The wrong key, with file and line.
pub fn read_dspark(section: &Section<'_>) -> Result<BlockRecipe, ConfigError> {
    checked(section, section.read()?, DSPARK_LOSS)
}

/// Reads and checks the settings of DFlash, which has no heads.
///
/// # Errors
/// As [`read_dspark`].
pub fn read_dflash(section: &Section<'_>) -> Result<BlockRecipe, ConfigError> {
    let recipe: BlockRecipe = section.read()?;
    if recipe.markov.is_some() || recipe.confidence.is_some() {
        return Err(section.error("", "DFlash has no Markov and no confidence head; use `dspark`"));
    }
    checked(section, recipe, DFLASH_LOSS)
}

fn checked(section: &Section<'_>, block: BlockRecipe, loss: LossRecipe) -> Result<BlockRecipe, ConfigError> {
    let result = block.check().and_then(|()| block.loss.unwrap_or(loss).check());
    result.map_err(|(key, problem)| section.error(key, problem))?;
    Ok(block)
}

/// The drafter with these settings for this target; `loss` are the losses where the settings give none.
///
/// # Errors
/// The setting that does not fit.
pub fn fit<D>(
    block: &BlockRecipe,
    loss: LossRecipe,
    recipe: &Recipe<D>,
    target: &ModelConfig,
) -> Result<Box<dyn DrafterPlan>, ConfigIssue> {
    let config = BlockConfig {
        decoder: DraftDecoder::new(target.anchored_decoder(&block.layers().windows()), recipe, target)?,
        settings: BlockSettings {
            blocks: BlockSpec {
                block_size: block.block_size,
                slots: block.slots,
                mask_token_id: block.mask_token_id,
                num_anchors: block.num_anchors,
            },
            markov: block.markov,
            confidence: block.confidence.map(|head| Confidence { with_markov: head.with_markov }),
        },
    };
    config.check_recipe()?;
    let confidence_alpha = block.confidence.map_or(0.0, |head| head.alpha);
    let objective = BlockObjective { loss: block.loss.unwrap_or(loss), confidence_alpha };
    Ok(Box::new(BlockPlan::new(config, objective)))
}

/// A block drafter with a KV cache.
pub type BlockProposer = BlockProposerOf<BlockParts>;

/// Architecture and objective of a block drafter, without weights.
pub type BlockPlan = Plan<BlockParts>;

/// The objective of a block drafter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockObjective {
    /// Weights of the losses and of positions.
    pub loss: LossRecipe,
    /// Weight of the confidence head's binary cross entropy.
    pub confidence_alpha: f64,
}

impl DrafterKind for BlockParts {
    type Settings = BlockSettings;
    type Objective = BlockObjective;
    const FINAL_STATES: FinalStates = FinalStates::Supervised;
    const RECOMPUTES: bool = true;

    fn new(b: &Builder, config: &BlockConfig) -> Self {
        Self::build(b, config)
    }

    fn loss_weight(plan: &BlockPlan, loss_mask: &[bool], anchors: &[usize]) -> f64 {
        block_weight(&plan.config.settings.blocks, plan.objective.loss.decay_gamma, loss_mask, anchors)
    }

    fn accumulate(
        model: &Block,
        objective: &BlockObjective,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        on_grad_ready: Option<GradReadyHook>,
    ) -> Option<Tensor> {
        let (device, kind) = (model.device(), model.kind());
        let batch = model.config().batch(samples, objective.loss.decay_gamma, device, kind)?;
        Some(model.accumulate(&batch, objective, normaliser, on_grad_ready))
    }

    fn stages(model: &Block) -> Vec<String> {
        model.layer_stages()
    }

    fn metrics(plan: &BlockPlan) -> Metrics {
        let (loss, gamma) = (plan.objective.loss, plan.config.settings.blocks.drafted());
        let compute = move |sums: &[f64], samples| {
            let window = Window { gamma, own: &BLOCK_SUMS, sums };
            let means = BLOCK_SUMS.map(|name| (name, window.mean(window.of(LossSum::Own(name)))));
            window.metrics(&loss, samples, ("confidence_loss", means[0].1), &means[1..])
        };
        Metrics {
            count: LossSum::all(gamma, &BLOCK_SUMS).count(),
            headline: &[
                ("ce", "ce_loss"),
                ("l1", "l1_loss"),
                ("conf", "confidence_loss"),
                ("τ", "tau_probabilistic"),
            ],
            compute: Box::new(compute),
        }
    }

    fn flops(plan: &BlockPlan, samples: &[TrainSample]) -> f64 {
        let (model, settings) = (plan.config.model(), &plan.config.settings);
        let (d, vocab) = (model.hidden_size as f64, model.vocab_size as f64);
        block_flops(&plan.config, samples, |blocks, rows| {
            // The target's logits count once.
            let heads = settings.markov.map_or(0.0, |markov| {
                let (rank, slots) = (markov.rank as f64, blocks * settings.draft_len() as f64);
                let gate = match markov.kind {
                    MarkovKind::Vanilla => 0.0,
                    MarkovKind::Gated => (d + rank) * rank,
                    MarkovKind::Rnn => (d + 2.0 * rank) * 3.0 * rank,
                };
                3.0 * (rows * rank * vocab + slots * gate)
            });
            (2.0 + 1.0) * rows * d * vocab + heads
        })
    }

    fn pass_rows(config: &BlockConfig, samples: &[SampleSize]) -> PassRows {
        block_pass_rows(&config.decoder, &config.settings.blocks, samples)
    }

    fn drafter(model: Block, slots: usize) -> Box<dyn Drafter> {
        Box::new(BlockProposerOf::new(model, slots))
    }

    fn predict<'a>(model: &'a Block, samples: &[TrainSample]) -> Option<Predictions<'a>> {
        block_common::predict(model, samples)
    }
}

/// Sums that DSpark and DFlash add. The first is the confidence's binary cross entropy. The others are weighted: |c − c*|,
/// c − c* and Π c − Π c*.
pub const BLOCK_SUMS: [&str; 4] =
    ["confidence", "confidence_abs_error", "confidence_bias", "confidence_prefix_bias"];

impl Block {
    /// Forward and backward pass of a batch. Adds the gradients of all losses to those of the parameters, which must require them.
    /// Returns every [`LossSum`], `[K]` float64, detached.
    ///
    /// With weights w over the supervised slots, every loss of `objective` is Σ w·loss over the normaliser + 1e-6. The confidence
    /// loss is the BCE against c* = clamp(1 − ½‖p^d − p^t‖₁, 0, 1). p^t and c* are constants.
    ///
    /// Autograd sees the backbone and the small heads only. Losses are differentiated in closed form, and one backward pass through
    /// Σ state · gradient continues from there.
    ///
    /// `on_grad_ready` is called as in [`TrainableDrafter`](crate::TrainableDrafter).
    pub fn accumulate(
        &self,
        batch: &BlockBatch,
        objective: &BlockObjective,
        normaliser: LossDenominator,
        on_grad_ready: Option<GradReadyHook>,
    ) -> Tensor {
        let scale = normaliser.scale();
        let supervised = |tensor: &Tensor| tensor.flatten(0, 1).index_select(0, &batch.rows);
        let pass = self.pass(batch, on_grad_ready.is_some());
        let hidden = &pass.hidden; // [A, γ, d]
        // A leaf, because few rows of W1 have a gradient: autograd would make one for all of them.
        let e = self.parts.markov.as_ref().map(|markov| {
            let e = tch::no_grad(|| markov.embed(&batch.previous));
            e.set_requires_grad(true)
        });
        let features = self.parts.markov.as_ref().zip(e.as_ref()).map(|(markov, e)| {
            supervised(&markov.logit_features(hidden, e)) // [R, r]
        });
        let rows = supervised(hidden); // [R, d]
        let output =
            tch::no_grad(|| self.head_losses(batch, &rows, features.as_ref(), &objective.loss, scale));
        let accept = (output.column(Column::L1) * -0.5 + 1.0).clamp(0.0, 1.0);

        let mut surrogate = (&rows * &output.hidden).sum(Kind::Float);
        if let Some((features, by_features)) = features.as_ref().zip(output.features.as_ref()) {
            surrogate += (features * by_features).sum(Kind::Float);
        }
        let confidence_logits = self.confidence_logits(&rows, e.as_ref().map(&supervised).as_ref());
        let bce = confidence_logits.as_ref().map(|logits| batch.weighted(&confidence_loss(logits, &accept)));
        if let Some(bce) = &bce {
            surrogate += bce * (objective.confidence_alpha * scale);
        }
        pass.backward(&surrogate, on_grad_ready);
        tch::no_grad(|| {
            let markov = self.parts.markov.as_ref().filter(|markov| markov.w1().requires_grad());
            if let (Some(markov), Some(e), Some(grad)) = (markov, e, &batch.previous_grad) {
                grad.add_to(&grad_or_zeros(markov.w1()), &e.grad().flatten(0, 1));
            }
            let bce = bce.map(|bce| bce.detach() * objective.confidence_alpha);
            let mut loss = output.column(Column::Loss).sum(Kind::Double);
            if let Some(bce) = &bce {
                loss += bce;
            }
            let own = Self::confidence_sums(batch, &accept, confidence_logits.as_ref());
            batch.sums(&output, &loss, &accept, own)
        })
    }

    /// Losses of the final hidden states `rows [R, d]`, without a graph; the gradient of W2 is added to W2's.
    fn head_losses(
        &self,
        batch: &BlockBatch,
        rows: &Tensor,
        features: Option<&Tensor>,
        loss: &LossRecipe,
        scale: f64,
    ) -> LossOutput {
        let markov_w2 = self.parts.markov.as_ref().map(|markov| markov.w2().stored());
        let w2 = markov_w2.as_ref().filter(|w2| w2.requires_grad()).map(|w2| {
            let gradient = grad_or_zeros(w2);
            // A narrower dtype would round the sum once per chunk.
            let sum = match gradient.kind() {
                Kind::Float => gradient.shallow_clone(),
                _ => gradient.zeros_like().to_kind(Kind::Float),
            };
            (gradient, sum)
        });
        let reads_previous_alone = self.parts.markov.as_ref().is_some_and(MarkovHead::reads_previous_alone);
        let token_group = reads_previous_alone.then_some(&batch.tokens_before[..]);
        let bias = markov_w2.as_ref().zip(features).map(|(markov_w2, features)| {
            let w2_gradient = w2.as_ref().map(|(_, sum)| sum);
            Bias { features, token_group, w2: markov_w2, w2_gradient }
        });
        let supervised = Supervised {
            hidden: rows,
            bias,
            teacher: &batch.teacher,
            sources: batch.sources(),
            labels: &batch.labels,
            weights: &batch.weights,
            slot_index: &batch.rows,
            counts: &batch.counts,
            gamma: self.config().settings.blocks.drafted() as i64,
            scale,
            agreement: false,
            extra: None,
        };
        let output = distill_loss(&self.vocabulary().loss_head(), &supervised, loss);
        if let Some((mut gradient, sum)) = w2.filter(|(gradient, _)| gradient.kind() != Kind::Float) {
            let _ = gradient.g_add_(&sum.to_kind(gradient.kind()));
        }
        output
    }

    /// The [`BLOCK_SUMS`]; 0 without a confidence head. `accept [R]` are the accept rates.
    fn confidence_sums(batch: &BlockBatch, accept: &Tensor, logits: Option<&Tensor>) -> [Tensor; 4] {
        let Some(logits) = logits else {
            return BLOCK_SUMS.map(|_| Tensor::zeros([], (Kind::Double, accept.device())));
        };
        let confidence = logits.sigmoid();
        let error = &confidence - accept;
        let survival = |rates: &Tensor| batch.by_block(rates).cumprod(1, Kind::Float);
        let prefix = (survival(&confidence) - survival(accept)) * batch.by_block(&batch.weights);
        [
            batch.weighted(&confidence_loss(logits, accept)),
            batch.weighted(&error.abs()),
            batch.weighted(&error),
            prefix.sum(Kind::Float),
        ]
    }
}

/// The binary cross entropy of confidence logits against accept rates, `[R]`.
fn confidence_loss(logits: &Tensor, accept: &Tensor) -> Tensor {
    let none = None::<&Tensor>;
    logits.binary_cross_entropy_with_logits(accept, none, none, Reduction::None)
}
