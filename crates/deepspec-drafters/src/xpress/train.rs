//! Training of xPress: objective, metrics and costs.

use deepspec_core::config::ConfigError;
use deepspec_core::recipe::Recipe;
use deepspec_core::{FinalStates, SlotTarget};
use deepspec_models::ModelConfig;
use deepspec_models::nn::Builder;
use deepspec_ops::distill_loss::{
    LossColumn, LossOutput, LossRecipe, LowRankBias, SupervisedRows, distill_loss,
};
use deepspec_ops::{GradSum, add_rows};
use tch::{Kind, Tensor};

use super::model::{
    Consistency, XPress, XPressConfig, XPressModules, XPressRecipe, XPressSettings, previous_tokens,
};
use crate::block_common::sums::{LoggedSums, ratio};
use crate::block_common::{
    BlockBatch, BlockProposerOf, BlockSpec, FROZEN_FACTOR, LossSum, TRAINED_FACTOR, block_flops,
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

/// Registry entry of xPress.
pub const XPRESS_INFO: DrafterKindInfo = DrafterKindInfo {
    name: "xpress",
    title: "xPress",
    param_groups: &[block_common::BACKBONE, ParamGroup { name: "refiner", prefixes: &["xpress_head."] }],
    settings: Some(|schemas| schemas.subschema_for::<XPressRecipe>()),
    checkpoints: Some(checkpoint_kind::<XPressModules>("xPress", &super::formats::READER)),
};

/// An xPress drafter with a KV cache.
pub type XPressProposer = BlockProposerOf<XPressModules>;

/// Architecture and objective of an xPress drafter, without weights.
pub type XPressPlan = Plan<XPressModules>;

/// Loss weights of xPress.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct XPressObjective {
    /// Weights of the losses and of the slots, for each of the three parts of the objective.
    pub loss: LossRecipe,
    /// Rounds on the refiner's own tokens.
    pub consistency: Consistency,
    /// Weight of the losses of the LM head's own logits.
    pub base_alpha: f64,
}

impl XPressObjective {
    /// Rounds on the refiner's own tokens that are trained.
    fn rounds(&self) -> usize {
        if self.consistency.alpha > 0.0 { self.consistency.passes } else { 0 }
    }
}

/// Reads and checks the recipe section of xPress. An error names the wrong key, with file and line.
pub fn read_recipe(section: &RecipeSection<'_>) -> Result<XPressRecipe, ConfigError> {
    let own: XPressRecipe = section.read()?;
    let checked = own.check().and_then(|()| own.loss().check());
    checked.map_err(|(key, problem)| section.error(key, problem))?;
    Ok(own)
}

/// Builds the plan of a drafter for this target. An error names the key that does not fit.
pub fn build_plan<D>(
    own: &XPressRecipe,
    recipe: &Recipe<D>,
    target: &ModelConfig,
) -> Result<Box<dyn DrafterPlan>, ConfigIssue> {
    let config = XPressConfig {
        decoder: DraftDecoder::new(target.anchored_decoder(&own.layers().windows()), recipe, target)?,
        settings: XPressSettings {
            blocks: BlockSpec {
                block_size: own.block_size,
                slots: SlotTarget::FillIn,
                mask_token_id: own.mask_token_id,
                causal: false,
                num_anchors: own.num_anchors,
            },
            rank: own.refiner.rank,
            mlp_ratio: own.refiner.mlp_ratio,
            num_passes: own.refiner.num_passes,
            convolution: own.convolution(),
        },
    };
    config.check_recipe()?;
    let objective =
        XPressObjective { loss: own.loss(), consistency: own.consistency, base_alpha: own.base_alpha };
    Ok(Box::new(XPressPlan::new(config, objective)))
}

impl DrafterKind for XPressModules {
    type Settings = XPressSettings;
    type Objective = XPressObjective;
    const FINAL_STATES: FinalStates = FinalStates::Supervised;
    const RECOMPUTES: bool = true;

    fn new(b: &Builder, config: &XPressConfig) -> Self {
        Self::build(b, config)
    }

    fn loss_denominator_part(plan: &XPressPlan, loss_mask: &[bool], anchors: &[usize]) -> f64 {
        sum_of_slot_weights(&plan.config.settings.blocks, plan.objective.loss.decay_gamma, loss_mask, anchors)
    }

    fn accumulate(
        model: &XPress,
        objective: &XPressObjective,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        progress: f64,
        on_grad_ready: Option<GradReadyHook>,
    ) -> Option<Tensor> {
        let (device, kind) = (model.device(), model.kind());
        let batch = model.config().batch(samples, objective.loss.decay_gamma, device, kind)?;
        let objective = XPressObjective { loss: objective.loss.at(progress), ..*objective };
        Some(model.accumulate(&batch, &objective, normaliser, on_grad_ready))
    }

    fn grad_stages(model: &XPress) -> Vec<String> {
        model.layer_grad_stages()
    }

    fn metric_defs(plan: &XPressPlan) -> Metrics {
        let (loss, gamma) = (plan.objective.loss, plan.config.settings.draft_len());
        let compute = move |sums: &[f64], samples| {
            let window = LoggedSums { gamma, own: &XPRESS_SUMS, sums };
            let [rounds, base, last_accept, base_accept] =
                XPRESS_SUMS.map(|name| window.get(LossSum::Own(name)));
            let rate = |accepted| ratio(accepted, window.get(LossSum::Drafts));
            let own = [
                ("base_loss", window.weighted_mean(base)),
                ("consistency_accept_rate", rate(last_accept)),
                ("base_accept_rate", rate(base_accept)),
            ];
            window.to_metrics(&loss, samples, ("consistency_loss", window.weighted_mean(rounds)), &own)
        };
        Metrics {
            count: LossSum::all(gamma, &XPRESS_SUMS).count(),
            headline: &[
                ("ce", "ce_loss"),
                ("l1", "l1_loss"),
                ("rounds", "consistency_loss"),
                ("base", "base_loss"),
                ("τ", "tau_probabilistic"),
            ],
            compute: Box::new(compute),
        }
    }

    /// The parts of the objective share the logits of drafter and target, which count once although each part computes them.
    fn flops(plan: &XPressPlan, samples: &[TrainSample]) -> f64 {
        let (model, settings) = (plan.config.model(), &plan.config.settings);
        let (d, vocab) = (model.hidden_size as f64, model.vocab_size as f64);
        let (rank, size) = (settings.rank as f64, settings.blocks.block_size as f64);
        let refinements = (1 + plan.objective.rounds()) as f64;
        let kernels = settings.convolution.map_or(0.0, |convolution| convolution.multiplications(model));
        block_flops(&plan.config, samples, |blocks, rows| {
            let logits = (FROZEN_FACTOR + 1.0) * rows * d * vocab;
            let of_states = blocks * (size + 1.0) * d * rank;
            let of_slot = rank * (3.0 * rank + (size + 1.0) / 2.0 + 3.0 * rank * settings.mlp_ratio as f64);
            let refiner = of_states + refinements * (blocks * size * of_slot + rows * rank * vocab);
            logits + TRAINED_FACTOR * (blocks * size * kernels + refiner)
        })
    }

    /// Autograd saves the inputs of the refiner's layers for each refinement, and those of the layers' convolutions. Each part of the
    /// objective has gradients of the hidden states and features.
    fn pass_rows(plan: &XPressPlan, samples: &[SampleSize]) -> PassRows {
        let settings = &plan.config.settings;
        let rows = block_pass_rows(&plan.config.decoder, &settings.blocks, samples);
        let [rank, ratio, width] =
            [settings.rank, settings.mlp_ratio, plan.config.model().hidden_size].map(|size| size as usize);
        let refinements = 1 + plan.objective.rounds();
        let of_slots = rows.layers * rank * (2 + refinements * (9 + 4 * ratio));
        let of_losses = rows.supervised * (width + refinements * (width + 2 * rank));
        let own_values =
            settings.convolution.map_or(0, |convolution| convolution.saved_values(plan.config.model()));
        PassRows { own_values, head_values: of_slots + of_losses, ..rows }
    }

    fn into_drafter(model: XPress, slots: usize) -> Box<dyn Drafter> {
        Box::new(BlockProposerOf::new(model, slots))
    }

    fn predict<'a>(model: &'a XPress, samples: &[TrainSample]) -> Option<Predictions<'a>> {
        block_common::predict(model, samples)
    }
}

/// Sums that only xPress has: the mean loss of the free-running rounds and that of the LM head's own logits, with slot weights. The
/// accept rates of the last round and of the LM head follow. All other sums are those of the refiner after the true tokens.
pub const XPRESS_SUMS: [&str; 4] = ["consistency", "base", "consistency_accept", "base_accept"];

/// A pass of the refiner over all blocks.
struct Refinement {
    /// Tokens before all slots, `[A, B]`.
    previous: Tensor,
    /// Their embeddings `[A, B, r]`, a detached leaf: autograd would allocate a dense `[V, r]` gradient of W1.
    embeddings: Tensor,
    /// Features of the supervised drafts, `[R, r]`.
    features: Tensor,
    output: LossOutput,
}

impl XPress {
    /// Runs forward and backward over a batch, and adds to the gradients of the parameters, which must require gradients. Returns every
    /// [`LossSum`], `[K]` float64, detached. `on_grad_ready` is called as in [`TrainableDrafter`](crate::TrainableDrafter).
    ///
    /// ℓ is Σ w·loss / (normaliser + 1e-6) over the supervised drafts. The objective is
    /// `ℓ(true tokens) + consistency.alpha · mean_j ℓ(tokens of round j − 1) + base_alpha · ℓ(LM head)`. Round 0 is the LM head. No gradient
    /// flows through the choice of tokens.
    ///
    /// The refiner is causal and the supervised drafts of a block are its first ones, so tokens of other drafts have no effect.
    pub fn accumulate(
        &self,
        batch: &BlockBatch,
        objective: &XPressObjective,
        normaliser: LossDenominator,
        on_grad_ready: Option<GradReadyHook>,
    ) -> Tensor {
        let (refiner, rounds) = (&self.modules.refiner, objective.rounds());
        // 1. Forward of the backbone.
        let pass = self.training_pass(batch, on_grad_ready.is_some());
        let hidden = self.supervised_rows(batch, &pass.hidden); // [R, d]
        let inputs = refiner.state_inputs(&pass.hidden); // [A, B, 2r]

        // 2. Losses, and their gradients with respect to `hidden` and the features, in closed form.
        let w2 = refiner.w2().to_tensor();
        let (w1_sum, w2_sum) = tch::no_grad(|| (GradSum::new(refiner.w1()), GradSum::new(&w2)));
        let drafted = batch.labels.empty_like(); // likeliest tokens of the part that is computed last, [R]
        let losses = |features: Option<&Tensor>, alpha: f64, argmax: Option<&Tensor>| {
            let scale = normaliser.scale() * alpha;
            let w2_gradient = w2_sum.as_ref().map(GradSum::sum);
            let bias =
                features.map(|features| LowRankBias { features, feature_group: None, w2: &w2, w2_gradient });
            let rows = SupervisedRows { argmax, ..batch.loss_inputs(&hidden, bias, scale) };
            tch::no_grad(|| distill_loss(&self.vocabulary().loss_head(), &rows, &objective.loss))
        };
        let refine = |previous: Tensor, alpha: f64, argmax: Option<&Tensor>| {
            let embeddings = tch::no_grad(|| refiner.embed(&previous)).set_requires_grad(true);
            let features = self.supervised_rows(batch, &refiner.features(&inputs, &embeddings));
            let output = losses(Some(&features), alpha, argmax);
            Refinement { previous, embeddings, features, output }
        };
        let mut refinements = vec![refine(batch.previous.shallow_clone(), 1.0, None)];
        let base = losses(None, objective.base_alpha, Some(&drafted));
        for round in 0..rounds {
            let previous = tch::no_grad(|| batch.previous_after(&drafted));
            let argmax = (round + 1 < rounds).then_some(&drafted);
            refinements.push(refine(previous, objective.consistency.alpha / rounds as f64, argmax));
        }

        // 3. Backward. Autograd continues from the closed-form gradients: the gradient of Σ x·g with respect to x is g.
        let mut surrogate = (&hidden * &base.grad_hidden).sum(Kind::Float);
        for Refinement { features, output, .. } in &refinements {
            surrogate += (&hidden * &output.grad_hidden).sum(Kind::Float);
            if let Some(grad_features) = &output.grad_features {
                surrogate += (features * grad_features).sum(Kind::Float);
            }
        }
        pass.backward(&surrogate, on_grad_ready);
        tch::no_grad(|| {
            if let Some(sum) = w2_sum {
                sum.finish();
            }
            if let Some(sum) = w1_sum {
                for Refinement { previous, embeddings, .. } in &refinements {
                    let gradient = embeddings.grad().flatten(0, 1).to_kind(Kind::Float);
                    add_rows(sum.sum(), &previous.flatten(0, 1), &gradient);
                }
                sum.finish();
            }
            batch.sums(objective, &refinements, &base)
        })
    }

    /// The rows of the supervised drafts, `[A, B, ..]` to `[R, ..]`.
    fn supervised_rows(&self, batch: &BlockBatch, rows: &Tensor) -> Tensor {
        self.drafting_slots(rows).flatten(0, 1).index_select(0, &batch.supervised_indices)
    }
}

impl BlockBatch {
    /// The tokens before all slots `[A, B]`, where these tokens `[R]` are drafted in the supervised slots.
    fn previous_after(&self, drafted: &Tensor) -> Tensor {
        let shape = [self.blocks as i64, self.gamma as i64];
        let all = Tensor::zeros([shape[0] * shape[1]], (Kind::Int64, drafted.device()));
        let all = all.index_copy(0, &self.supervised_indices, drafted).view(shape);
        previous_tokens(&self.previous.narrow(1, 0, 2), &all)
    }

    /// Every [`LossSum`] of a pass: the refinement after the true tokens comes first, then the rounds.
    fn sums(&self, objective: &XPressObjective, refinements: &[Refinement], base: &LossOutput) -> Tensor {
        let loss = |output: &LossOutput| output.column(LossColumn::Loss).sum(Kind::Double);
        let accept = |output: &LossOutput| (output.column(LossColumn::L1) * -0.5 + 1.0).clamp(0.0, 1.0);
        let (forced, rounds) = (&refinements[0].output, &refinements[1..]);
        let none = || Tensor::zeros([], (Kind::Double, self.weights.device()));
        let mut of_rounds = none();
        for Refinement { output, .. } in rounds {
            of_rounds += loss(output) / rounds.len() as f64;
        }
        let of_base = loss(base);
        let total = loss(forced) + &of_rounds * objective.consistency.alpha + &of_base * objective.base_alpha;
        let accepted = |output: &LossOutput| accept(output).sum(Kind::Double);
        let last = rounds.last().map_or_else(none, |round| accepted(&round.output));
        self.loss_sums(forced, &total, &accept(forced), [of_rounds, of_base, last, accepted(base)])
    }
}
