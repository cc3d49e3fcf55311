//! Training of DFlash 2: objective, metrics and costs.

use deepspec_core::config::ConfigError;
use deepspec_core::recipe::Recipe;
use deepspec_core::{FinalStates, Slots};
use deepspec_models::ModelConfig;
use deepspec_models::nn::Builder;
use deepspec_ops::add_rows;
use deepspec_ops::distill_loss::{
    AuxLossOutput, Column, LossRecipe, RowObjective, Span, Supervised, distill_loss,
};
use tch::{Device, Kind, Tensor};

use super::model::{Candidates, DFlash2, DFlash2Config, DFlash2Parts, DFlash2Recipe, PathSelector};
use crate::block_common::sums::{Window, ratio};
use crate::block_common::{
    BlockBatch, BlockLossSum, BlockProposerOf, BlockSpec, backbone_flops, block_pass_rows, block_weight,
    eval_mask, sums,
};
use crate::draft_model::{
    DraftDecoder, DrafterConfig, DrafterKind, PassRows, Plan, SampleSize, check, gradient, load,
};
use crate::registration::{Checkpoints, DrafterKindInfo, ParamGroup, Section, classes};
use crate::{
    ConfigIssue, Drafter, DrafterPlan, GradReadyHook, LossDenominator, Metrics, Predictions, TrainSample,
    block_common,
};

/// Parallel block drafter with convolutions and a path selector.
pub const KIND: DrafterKindInfo = DrafterKindInfo {
    name: "dflash2",
    title: "DFlash 2",
    parts: &[block_common::BACKBONE, ParamGroup { name: "selector", prefixes: &["candidate_selector."] }],
    settings: Some(|schemas| schemas.subschema_for::<DFlash2Recipe>()),
    checkpoints: Some(Checkpoints {
        classes: || classes(DFlash2Config::CLASS),
        hold: "DFlash 2",
        are_language_models: false,
        check: check::<DFlash2Parts>,
        load: load::<DFlash2Parts>,
        layouts: Some(&super::formats::READER),
    }),
};

/// A DFlash 2 drafter with a KV cache.
pub type DFlash2Proposer = BlockProposerOf<DFlash2Parts>;

/// Architecture and objective of a DFlash 2 drafter, without weights.
pub type DFlash2Plan = Plan<DFlash2Parts>;

/// The objective of a DFlash 2 drafter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DFlash2Objective {
    /// Weights of the losses of all logits, and of positions.
    pub loss: LossRecipe,
    /// Weight of the selector's loss.
    pub selector_alpha: f64,
}

/// Reads and checks the settings of DFlash 2.
///
/// # Errors
/// The wrong key, with file and line.
pub fn read(section: &Section<'_>) -> Result<DFlash2Recipe, ConfigError> {
    let own: DFlash2Recipe = section.read()?;
    let checked = own.check().and_then(|()| own.loss().check());
    checked.map_err(|(key, problem)| section.error(key, problem))?;
    Ok(own)
}

/// The drafter with these settings for this target.
///
/// # Errors
/// The setting that does not fit.
pub fn fit<D>(
    own: &DFlash2Recipe,
    recipe: &Recipe<D>,
    target: &ModelConfig,
) -> Result<Box<dyn DrafterPlan>, ConfigIssue> {
    let config = DFlash2Config {
        decoder: DraftDecoder::like_family(target, recipe, own.layers().windows())?,
        blocks: BlockSpec {
            block_size: own.block_size,
            slots: Slots::FillIn,
            mask_token_id: own.mask_token_id,
            num_anchors: own.num_anchors,
        },
        convolution: own.convolution,
        selector_rank: own.selector.rank,
        selector_top_k: own.selector.top_k,
    };
    config.validate().map_err(|(key, problem)| match key {
        "num_hidden_layers" => ("num_draft_layers", problem),
        "conv_kernel_size" => ("convolution.kernel_size", problem),
        "conv_group_size" => ("convolution.group_size", problem),
        "selector_rank" => ("selector.rank", problem),
        "selector_top_k" => ("selector.top_k", problem),
        other => (other, problem),
    })?;
    let objective = DFlash2Objective { loss: own.loss(), selector_alpha: own.selector.alpha };
    Ok(Box::new(DFlash2Plan::new(config, objective)))
}

impl DrafterKind for DFlash2Parts {
    type Config = DFlash2Config;
    type Objective = DFlash2Objective;
    const FINAL_STATES: FinalStates = FinalStates::Supervised;
    const RECOMPUTES: bool = true;

    fn new(b: &Builder, config: &DFlash2Config) -> Self {
        Self::build(b, config)
    }

    fn loss_weight(plan: &DFlash2Plan, loss_mask: &[bool], anchors: &[usize]) -> f64 {
        block_weight(&plan.config.blocks, plan.objective.loss.decay_gamma, loss_mask, anchors)
    }

    fn accumulate(
        model: &DFlash2,
        objective: &DFlash2Objective,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        on_grad_ready: Option<GradReadyHook>,
    ) -> Option<Tensor> {
        let DFlash2Objective { loss, selector_alpha } = objective;
        let batch = model.config().batch(samples, loss.decay_gamma, model.device(), model.kind())?;
        Some(model.accumulate(&batch, loss, *selector_alpha, normaliser, on_grad_ready))
    }

    fn stages(model: &DFlash2) -> Vec<String> {
        model.layer_stages()
    }

    fn metrics(plan: &DFlash2Plan) -> Metrics {
        let (loss, gamma) = (plan.objective.loss, plan.config.blocks.drafted());
        let compute = move |sums: &[f64], samples| {
            let window = Window { gamma, sums };
            let own = |sum| window.own(&DFlash2Sum::OWN, sum);
            let selector = window.mean(own(DFlash2Sum::Selector));
            let recall = ratio(own(DFlash2Sum::Recalled), window.of(BlockLossSum::Drafts));
            window.metrics(&loss, samples, ("selector_loss", selector), &[("candidate_recall", recall)])
        };
        Metrics {
            count: DFlash2Sum::all(gamma).count(),
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
        plan.config.flops(samples)
    }

    /// Autograd keeps the input of each convolution once per tap, and its coefficients.
    fn pass_rows(config: &DFlash2Config, samples: &[SampleSize]) -> PassRows {
        let taps = config.convolution.kernel_size * config.decoder.model.hidden_size;
        let own_values = SUBLAYERS * (CONVOLUTIONS_PER_SUBLAYER * taps as usize + config.coefficients());
        PassRows { own_values, ..block_pass_rows(&config.decoder, &config.blocks, samples) }
    }

    fn drafter(model: DFlash2, slots: usize) -> Box<dyn Drafter> {
        Box::new(BlockProposerOf::new(model, slots))
    }

    fn predict<'a>(model: &'a DFlash2, samples: &[TrainSample]) -> Option<Predictions<'a>> {
        block_common::predict(model, samples)
    }
}

impl DFlash2Config {
    /// Tensors of one pass over samples; see [`BlockBatch::new`].
    pub fn batch(
        &self,
        samples: &[TrainSample],
        decay_gamma: f64,
        device: Device,
        kind: Kind,
    ) -> Option<BlockBatch> {
        BlockBatch::new(samples, &self.blocks, true, decay_gamma, device, kind)
    }
}

/// The cross entropy with the label among the candidates after the true previous token. A label that is not a candidate has no loss.
struct SelectorLoss<'a> {
    selector: &'a PathSelector,
    batch: &'a BlockBatch,
    /// Features of the candidates, `[R, r]`.
    features: &'a Tensor,
    /// Receives the gradients of the features, `[R, r]`.
    features_grad: Tensor,
    /// Receives the gradients of B, `[V, r]` float32; None where B is frozen.
    successors_grad: Option<Tensor>,
    /// Its weight.
    alpha: f64,
    /// Factor on the gradients.
    scale: f64,
}

/// Columns of the [`SelectorLoss`]: its value, 0 where the label is no candidate.
const CE: Column = Column::Extra(0);
/// 1 where the label is a candidate.
const RECALLED: Column = Column::Extra(1);
/// The probability that the drafted token is accepted: Σ min(q, p^t) over the candidates.
const ACCEPT: Column = Column::Extra(2);

impl RowObjective for SelectorLoss<'_> {
    fn columns(&self) -> i64 {
        3
    }

    fn evaluate(&self, draft: &Tensor, target: &Tensor, span: &Span) -> AuxLossOutput {
        let features = span.of(self.features);
        let Candidates { tokens, successors, scores } = self.selector.candidates(draft, &features);
        let label = tokens.eq_tensor(&span.of(&self.batch.labels).unsqueeze(1)).to_kind(Kind::Float);
        let recalled = label.sum_dim_intlist(-1, true, Kind::Float);
        let log_q = scores.log_softmax(-1, Kind::Float);
        let (q, ce) = (log_q.exp(), -(&log_q * &label).sum_dim_intlist(-1, true, Kind::Float));
        let p = (target.gather(1, &tokens, false) - target.logsumexp(-1, true)).exp();
        let accept = q.minimum(&p).sum_dim_intlist(-1, true, Kind::Float);

        let weights = span.of(&self.batch.weights).unsqueeze(1) * self.alpha;
        let gradient = (q - label) * (&weights * &recalled * self.scale); // [n, k]
        let pair_scores_grad = gradient.unsqueeze(1); // [n, 1, k]
        span.of(&self.features_grad).copy_(&pair_scores_grad.bmm(&successors).squeeze_dim(1));
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
    /// Forward and backward pass of a batch. Adds the gradients of all losses to those of the parameters, which must require them.
    /// Returns every [`DFlash2Sum`], `[K]` float64, detached.
    ///
    /// With weights w over the supervised drafts, every loss is Σ w·loss over the normaliser + 1e-6; `alpha` weighs the selector's.
    /// Autograd sees the backbone and the selector's features only.
    pub fn accumulate(
        &self,
        batch: &BlockBatch,
        recipe: &LossRecipe,
        alpha: f64,
        normaliser: LossDenominator,
        on_grad_ready: Option<GradReadyHook>,
    ) -> Tensor {
        let scale = normaliser.scale();
        let supervised = |tensor: &Tensor| tensor.flatten(0, 1).index_select(0, &batch.rows);
        let selector = &self.parts.selector;
        let (predecessors, successors) = selector.codebooks();
        let pass = self.pass(batch, on_grad_ready.is_some());
        let hidden = &pass.hidden; // [A, γ, d]
        // A leaf, because few rows of A have a gradient: autograd would make one for all of them.
        let e = tch::no_grad(|| selector.embed(&batch.previous)).set_requires_grad(true);
        let features = supervised(&selector.features(hidden, &e)); // [R, r]
        let rows = supervised(hidden); // [R, d]
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
            let rows = Supervised {
                hidden: &rows,
                bias: None,
                teacher: &batch.teacher,
                sources: batch.sources(),
                labels: &batch.labels,
                weights: &batch.weights,
                slot_index: &batch.rows,
                counts: &batch.counts,
                gamma: self.config().blocks.drafted() as i64,
                scale,
                agreement: false,
                extra: Some(&loss),
            };
            distill_loss(&self.vocabulary().loss_head(), &rows, recipe)
        });
        let surrogate =
            (&rows * &output.hidden).sum(Kind::Float) + (&features * &loss.features_grad).sum(Kind::Float);
        pass.backward(&surrogate, on_grad_ready);
        tch::no_grad(|| {
            if let (true, Some(sums)) = (predecessors.requires_grad(), &batch.previous_sums) {
                sums.add(&gradient(predecessors), &e.grad().flatten(0, 1));
            }
            if let Some(sum) = &loss.successors_grad {
                let mut gradient = gradient(successors);
                let _ = gradient.g_add_(&sum.to_kind(gradient.kind()));
            }
            let numerator = output.column(Column::Loss).sum(Kind::Double);
            let own = sums::joined(DFlash2Sum::OWN.into_iter().map(|sum| match sum {
                DFlash2Sum::Recalled => output.column(RECALLED).sum(Kind::Double),
                _ => batch.weighted(&output.column(CE)),
            }));
            Tensor::cat(&[batch.sums(&output, &numerator, &output.column(ACCEPT)), own], 0)
        })
    }
}

/// Sums of a micro-batch. Accept rates are the selector's after the true previous tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DFlash2Sum {
    /// A sum that all block drafters have.
    Shared(BlockLossSum),
    /// The selector's cross entropy with position weights.
    Selector,
    /// Labels that were among the candidates.
    Recalled,
}

impl DFlash2Sum {
    /// Sums of DFlash 2 alone, in their order.
    pub const OWN: [Self; 2] = [Self::Selector, Self::Recalled];

    /// All sums for blocks of γ drafts, in their order.
    pub fn all(gamma: usize) -> impl Iterator<Item = Self> {
        BlockLossSum::all(gamma).map(Self::Shared).chain(Self::OWN)
    }
}

/// Attention and MLP of a layer, with convolutions before and after each.
const SUBLAYERS: usize = 2;
/// Convolutions around attention or MLP.
const CONVOLUTIONS_PER_SUBLAYER: usize = 2;

impl DFlash2Config {
    /// Outputs of one projection to coefficients.
    fn coefficients(&self) -> usize {
        let channels = self.decoder.model.hidden_size / self.convolution.group_size;
        (CONVOLUTIONS_PER_SUBLAYER as i64 * self.convolution.kernel_size * channels) as usize
    }

    /// Floating-point operations of forward and backward pass over `samples`, counted as in `backbone_flops`.
    pub fn flops(&self, samples: &[TrainSample]) -> f64 {
        let (model, rank) = (&self.decoder.model, self.selector_rank as f64);
        let (d, vocab, gamma) = (model.hidden_size as f64, model.vocab_size as f64, self.blocks.drafted());
        let coefficients = (SUBLAYERS * model.layers.len() * self.coefficients()) as f64;
        let of_sample = |sample: &TrainSample| {
            let supervised = sample.anchors.iter().map(|&anchor| eval_mask(&sample.loss_mask, anchor, gamma));
            let rows = supervised.sum::<usize>() as f64;
            let slots = (sample.anchors.len() * self.blocks.block_size) as f64;
            let drafts = (sample.anchors.len() * gamma) as f64;
            let pairs = rows * self.selector_top_k as f64 * rank;
            let products = rows * d * vocab + slots * d * coefficients + drafts * d * rank + pairs;
            backbone_flops(&self.decoder, &self.blocks, sample) + 2.0 * 3.0 * products
        };
        samples.iter().filter(|sample| !sample.anchors.is_empty()).map(of_sample).sum()
    }
}
