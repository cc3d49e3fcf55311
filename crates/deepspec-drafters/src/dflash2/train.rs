//! Training of DFlash 2: objective, metrics and costs.

use deepspec_core::config::ConfigError;
use deepspec_core::recipe::Recipe;
use deepspec_core::{FinalStates, SlotTarget};
use deepspec_models::ModelConfig;
use deepspec_models::nn::Builder;
use deepspec_ops::distill_loss::{
    AuxLoss, AuxLossOutput, BlockSpan, LossColumn, LossRecipe, SupervisedRows, distill_loss,
};
use deepspec_ops::{add_rows, grad_or_zeros};
use tch::{Kind, Tensor};

use super::model::{
    CandidateSelector, Candidates, DFlash2, DFlash2Config, DFlash2Modules, DFlash2Recipe, DFlash2Settings,
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

/// Registry entry of DFlash 2.
pub const DFLASH2_INFO: DrafterKindInfo = DrafterKindInfo {
    name: "dflash2",
    title: "DFlash 2",
    param_groups: &[
        block_common::BACKBONE,
        ParamGroup { name: "selector", prefixes: &["candidate_selector."] },
    ],
    settings: Some(|schemas| schemas.subschema_for::<DFlash2Recipe>()),
    checkpoints: Some(checkpoint_kind::<DFlash2Modules>("DFlash 2", &super::formats::READER)),
};

/// A DFlash 2 drafter with a KV cache.
pub type DFlash2Proposer = BlockProposerOf<DFlash2Modules>;

/// Architecture and objective of a DFlash 2 drafter, without weights.
pub type DFlash2Plan = Plan<DFlash2Modules>;

/// Loss weights of DFlash 2.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DFlash2Objective {
    /// Weights of the losses over the whole vocabulary, and of the slots.
    pub loss: LossRecipe,
    /// Weight of the selector's cross entropy.
    pub selector_alpha: f64,
}

/// Reads and checks the recipe section of DFlash 2. An error names the wrong key, with file and line.
pub fn read_recipe(section: &RecipeSection<'_>) -> Result<DFlash2Recipe, ConfigError> {
    let own: DFlash2Recipe = section.read()?;
    let checked = own.check().and_then(|()| own.loss().check());
    checked.map_err(|(key, problem)| section.error(key, problem))?;
    Ok(own)
}

/// Builds the plan of a drafter for this target. An error names the key that does not fit.
pub fn build_plan<D>(
    own: &DFlash2Recipe,
    recipe: &Recipe<D>,
    target: &ModelConfig,
) -> Result<Box<dyn DrafterPlan>, ConfigIssue> {
    let config = DFlash2Config {
        decoder: DraftDecoder::new(target.anchored_decoder(&own.layers().windows()), recipe, target)?,
        settings: DFlash2Settings {
            blocks: BlockSpec {
                block_size: own.block_size,
                slots: SlotTarget::FillIn,
                mask_token_id: own.mask_token_id,
                causal: false,
                num_anchors: own.num_anchors,
            },
            convolution: own.convolution,
            selector_rank: own.selector.rank,
            selector_top_k: own.selector.top_k,
        },
    };
    config.check_recipe()?;
    let objective = DFlash2Objective { loss: own.loss(), selector_alpha: own.selector.alpha };
    Ok(Box::new(DFlash2Plan::new(config, objective)))
}

impl DrafterKind for DFlash2Modules {
    type Settings = DFlash2Settings;
    type Objective = DFlash2Objective;
    const FINAL_STATES: FinalStates = FinalStates::Supervised;
    const RECOMPUTES: bool = true;

    fn new(b: &Builder, config: &DFlash2Config) -> Self {
        Self::build(b, config)
    }

    fn loss_denominator_part(plan: &DFlash2Plan, loss_mask: &[bool], anchors: &[usize]) -> f64 {
        sum_of_slot_weights(&plan.config.settings.blocks, plan.objective.loss.decay_gamma, loss_mask, anchors)
    }

    fn accumulate(
        model: &DFlash2,
        objective: &DFlash2Objective,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        progress: f64,
        on_grad_ready: Option<GradReadyHook>,
    ) -> Option<Tensor> {
        let DFlash2Objective { loss, selector_alpha } = objective;
        let batch = model.config().batch(samples, loss.decay_gamma, model.device(), model.kind())?;
        Some(model.accumulate(&batch, &loss.at(progress), *selector_alpha, normaliser, on_grad_ready))
    }

    fn grad_stages(model: &DFlash2) -> Vec<String> {
        model.layer_grad_stages()
    }

    fn metric_defs(plan: &DFlash2Plan) -> Metrics {
        let (loss, draft_len) = (plan.objective.loss, plan.config.settings.blocks.draft_len());
        let compute = move |sums: &[f64], samples| {
            let window = LoggedSums { gamma: draft_len, own: &DFLASH2_SUMS, sums };
            let [selector, recalled] = DFLASH2_SUMS.map(|name| window.get(LossSum::Own(name)));
            let (selector, recall) =
                (window.weighted_mean(selector), ratio(recalled, window.get(LossSum::Drafts)));
            window.to_metrics(&loss, samples, ("selector_loss", selector), &[("candidate_recall", recall)])
        };
        Metrics {
            count: LossSum::all(draft_len, &DFLASH2_SUMS).count(),
            headline: &[
                ("ce", "ce_loss"),
                ("selector", "selector_loss"),
                ("recall", "candidate_recall"),
                ("τ", "tau_probabilistic"),
            ],
            compute: Box::new(compute),
        }
    }

    fn flops(plan: &DFlash2Plan, samples: &[TrainSample]) -> f64 {
        let (model, settings) = (plan.config.model(), &plan.config.settings);
        let (d, vocab, rank) =
            (model.hidden_size as f64, model.vocab_size as f64, settings.selector_rank as f64);
        let kernels = settings.convolution.multiplications(model);
        let (size, draft_len) = (settings.blocks.block_size as f64, settings.draft_len() as f64);
        block_flops(&plan.config, samples, |blocks, rows| {
            let pairs = rows * settings.selector_top_k as f64 * rank;
            let (draft_logits, target_logits) = (FROZEN_FACTOR * rows * d * vocab, rows * d * vocab);
            let trained = blocks * (size * kernels + draft_len * d * rank) + pairs;
            draft_logits + target_logits + TRAINED_FACTOR * trained
        })
    }

    fn pass_rows(plan: &DFlash2Plan, samples: &[SampleSize]) -> PassRows {
        let config = &plan.config;
        let own_values = config.settings.convolution.saved_values(config.model());
        PassRows { own_values, ..block_pass_rows(&config.decoder, &config.settings.blocks, samples) }
    }

    fn into_drafter(model: DFlash2, slots: usize) -> Box<dyn Drafter> {
        Box::new(BlockProposerOf::new(model, slots))
    }

    fn predict<'a>(model: &'a DFlash2, samples: &[TrainSample]) -> Option<Predictions<'a>> {
        block_common::predict(model, samples)
    }
}

/// Cross entropy of the label among the candidates, teacher-forced. A label that is not a candidate has no loss.
struct SelectorLoss<'a> {
    selector: &'a CandidateSelector,
    batch: &'a BlockBatch,
    /// Features of the slots, `[R, r]`; see [`CandidateSelector::features`].
    features: &'a Tensor,
    /// Output: gradient of the features, `[R, r]`.
    features_grad: Tensor,
    /// Output: gradient of the successor codebook, `[V, r]` float32; None if the codebook is frozen.
    successors_grad: Option<Tensor>,
    /// Weight of this loss.
    alpha: f64,
    /// Factor of the gradients: one over the loss denominator.
    scale: f64,
}

/// Output column of [`SelectorLoss`]: cross entropy; 0 if the label is not a candidate.
const CE_COLUMN: LossColumn = LossColumn::Extra(0);
/// Output column: 1 if the label is a candidate, else 0.
const RECALL_COLUMN: LossColumn = LossColumn::Extra(1);
/// Output column: acceptance probability, Σ min(q, p^t) over the candidates.
const ACCEPT_COLUMN: LossColumn = LossColumn::Extra(2);

impl AuxLoss for SelectorLoss<'_> {
    fn column_count(&self) -> i64 {
        3
    }

    fn evaluate(&self, draft: &Tensor, target: &Tensor, span: &BlockSpan) -> AuxLossOutput {
        let features = span.slice_rows(self.features);
        let Candidates { tokens, successors, scores } = self.selector.score_candidates(draft, &features);
        let is_label =
            tokens.eq_tensor(&span.slice_rows(&self.batch.labels).unsqueeze(1)).to_kind(Kind::Float);
        let recalled = is_label.sum_dim_intlist(-1, true, Kind::Float);
        let log_q = scores.log_softmax(-1, Kind::Float);
        let (q, ce) = (log_q.exp(), -(&log_q * &is_label).sum_dim_intlist(-1, true, Kind::Float));
        let p = (target.gather(1, &tokens, false) - target.logsumexp(-1, true)).exp();
        let accept = q.minimum(&p).sum_dim_intlist(-1, true, Kind::Float);

        let weights = span.slice_rows(&self.batch.weights).unsqueeze(1) * self.alpha;
        // dS, the gradient with respect to the scores; zero where the label is no candidate. dS is also the gradient of the top-k logits U;
        // `distill_loss` adds it to theirs. The loss is unscaled; the gradients include `scale`.
        let gradient = (q - is_label) * (&weights * &recalled * self.scale); // [n, k]
        let pair_scores_grad = gradient.unsqueeze(1); // [n, 1, k]
        span.slice_rows(&self.features_grad).copy_(&pair_scores_grad.bmm(&successors).squeeze_dim(1));
        if let Some(sum) = &self.successors_grad {
            let by_rows = gradient.unsqueeze(2) * features.to_kind(Kind::Float).unsqueeze(1); // [n, k, r]
            add_rows(sum, &tokens.flatten(0, 1), &by_rows.flatten(0, 1));
        }
        AuxLossOutput {
            columns: Tensor::cat(&[&ce, &recalled, &accept], 1),
            loss: ce * weights,
            tokens,
            gradient,
        }
    }
}

impl DFlash2 {
    /// Runs forward and backward over a batch, and adds to the gradients of the parameters, which must require gradients. Returns every
    /// [`LossSum`], `[K]` float64, detached.
    ///
    /// Every loss is Σ w·loss / (normaliser + 1e-6) with slot weights w over the supervised drafts. `alpha` is the weight of the selector's
    /// loss. Autograd differentiates only the backbone and the selector's features.
    pub fn accumulate(
        &self,
        batch: &BlockBatch,
        recipe: &LossRecipe,
        alpha: f64,
        normaliser: LossDenominator,
        on_grad_ready: Option<GradReadyHook>,
    ) -> Tensor {
        let scale = normaliser.scale();
        let select_supervised = |tensor: &Tensor| batch.select_supervised(tensor);
        let selector = &self.modules.selector;
        let (predecessors, successors) = selector.codebooks();
        let pass = self.training_pass(batch, on_grad_ready.is_some());
        let hidden = &pass.hidden; // [A, γ, d]
        // `previous_embeddings` is a detached leaf: autograd would allocate a dense `[V, r]` gradient of the predecessor codebook.
        let previous_embeddings = tch::no_grad(|| selector.embed(&batch.previous)).set_requires_grad(true);
        let features = select_supervised(&selector.features(hidden, &previous_embeddings)); // [R, r]
        let supervised_hidden = select_supervised(hidden); // [R, d]
        let learns = successors.requires_grad();
        let loss = SelectorLoss {
            selector,
            batch,
            features: &features.detach(),
            features_grad: features.zeros_like(),
            successors_grad: learns.then(|| successors.zeros_like().to_kind(Kind::Float).detach()),
            alpha,
            scale,
        };
        let output = tch::no_grad(|| {
            let inputs = batch.loss_inputs(&supervised_hidden, None, scale);
            let loss_inputs = SupervisedRows { extra: Some(&loss), ..inputs };
            distill_loss(&self.vocabulary().loss_head(), &loss_inputs, recipe)
        });
        // The gradient of this scalar equals the gradient of the losses.
        let surrogate = (&supervised_hidden * &output.grad_hidden).sum(Kind::Float)
            + (&features * &loss.features_grad).sum(Kind::Float);
        pass.backward(&surrogate, on_grad_ready);
        tch::no_grad(|| {
            if let (true, Some(grad)) = (predecessors.requires_grad(), &batch.previous_scatter) {
                grad.add_to(&grad_or_zeros(predecessors), &previous_embeddings.grad().flatten(0, 1));
            }
            if let Some(sum) = &loss.successors_grad {
                let mut gradient = grad_or_zeros(successors);
                let _ = gradient.g_add_(&sum.to_kind(gradient.kind()));
            }
            let numerator = output.column(LossColumn::Loss).sum(Kind::Double);
            let recalled = output.column(RECALL_COLUMN).sum(Kind::Double);
            let own = [batch.weighted_sum(&output.column(CE_COLUMN)), recalled];
            batch.loss_sums(&output, &numerator, &output.column(ACCEPT_COLUMN), own)
        })
    }
}

/// Sums that only DFlash 2 has: the selector's weighted cross entropy, and the number of labels among the candidates. Accept rates of
/// DFlash 2 are those of the selector after the true previous tokens.
pub const DFLASH2_SUMS: [&str; 2] = ["selector", "recalled"];
