//! Training of P-EAGLE: objective, metrics and costs.

use deepspec_core::FinalStates;
use deepspec_core::config::ConfigError;
use deepspec_core::recipe::Recipe;
use deepspec_models::ModelConfig;
use deepspec_models::nn::{Builder, Heads};
use deepspec_ops::distill_loss::{LossColumn, LossOutput, LossRecipe, SupervisedRows, distill_loss};
use deepspec_ops::range;
use tch::{Kind, Tensor};

use super::batch::{MAX_CALL_ROWS, PEagleBatch};
use super::depths::{DownSampling, chains, is_supervised, supervised_positions};
use super::model::{PEagle, PEagleConfig, PEagleModules, PEagleObjective, PEagleRecipe, PEagleSettings};
use super::proposer::PEagleProposer;
use crate::block_common::{FROZEN_FACTOR, TRAINED_FACTOR};
use crate::draft_model::{DrafterKind, PassRows, Plan, SampleSize, checkpoint_kind};
use crate::registration::{DrafterKindInfo, ParamGroup, RecipeSection};
use crate::token_common::{
    HEADLINE, STEP_SUMS, full_attention_decoder, ratio, read_draft_vocab, step_metrics,
};
use crate::{
    ChoosePositions, ConfigIssue, Drafter, DrafterPlan, GradReadyHook, LossDenominator, Metrics, Predictions,
    TrainSample,
};

/// Registry entry of P-EAGLE.
pub const PEAGLE_INFO: DrafterKindInfo = DrafterKindInfo {
    name: "peagle",
    title: "P-EAGLE",
    param_groups: &[
        ParamGroup { name: "fusion", prefixes: &["fc.", "fc_norm.", "input_norm."] },
        ParamGroup { name: "mask_hidden", prefixes: &["mask_hidden"] },
        ParamGroup { name: "layers", prefixes: &["layers."] },
        ParamGroup { name: "norm", prefixes: &["norm."] },
    ],
    settings: Some(|schemas| schemas.subschema_for::<PEagleRecipe>()),
    checkpoints: Some(checkpoint_kind::<PEagleModules>("P-EAGLE", &super::formats::READER)),
};

/// Architecture and objective of a P-EAGLE drafter, without weights.
pub type PEaglePlan = Plan<PEagleModules>;

/// Sums of a depth behind its [`STEP_SUMS`]: two sums over chains and the number of chains. The sums add the probability that all drafts
/// up to this depth are accepted, of greedy and of sampled drafts.
const CHAIN_SUMS: usize = 3;

/// Reads and checks the recipe section of P-EAGLE. An error names the wrong key, with file and line.
pub fn read_recipe(section: &RecipeSection<'_>) -> Result<PEagleRecipe, ConfigError> {
    let own: PEagleRecipe = section.read()?;
    own.check().map_err(|(key, problem)| section.error(key, problem))?;
    Ok(own)
}

/// Builds the plan of a drafter for this target. An error names the key that does not fit.
pub fn build_plan<D>(
    own: &PEagleRecipe,
    recipe: &Recipe<D>,
    target: &ModelConfig,
) -> Result<Box<dyn DrafterPlan>, ConfigIssue> {
    let draft_vocab = own.draft_vocab.as_deref().map(|path| read_draft_vocab(path, target)).transpose()?;
    let config = PEagleConfig {
        decoder: full_attention_decoder(own.num_draft_layers, recipe, target)?,
        settings: PEagleSettings {
            num_depths: own.num_depths,
            mask_token_id: own.mask_token_id,
            draft_vocab_size: draft_vocab.as_ref().map(|vocab| vocab.tokens().len() as i64),
            norms: own.norms,
        },
    };
    config.check_recipe()?;
    let sampling = DownSampling {
        depths: own.num_depths,
        ratio: own.down_sample_ratio,
        least_ratio: own.down_sample_ratio_min,
    };
    let objective = PEagleObjective { sampling, segments: own.segments };
    Ok(Box::new(PEaglePlan::new(config, objective).with_draft_vocab(draft_vocab)))
}

impl DrafterKind for PEagleModules {
    type Settings = PEagleSettings;
    type Objective = PEagleObjective;
    const FINAL_STATES: FinalStates = FinalStates::Supervised;

    fn new(b: &Builder, config: &PEagleConfig) -> Self {
        Self::build(b, config)
    }

    fn choose_anchors(plan: &PEaglePlan, loss_mask: &[bool], choose: ChoosePositions) -> Vec<usize> {
        plan.objective.sampling.sample(loss_mask, choose)
    }

    /// Number of supervised rows of all depths.
    fn loss_denominator_part(_plan: &PEaglePlan, loss_mask: &[bool], anchors: &[usize]) -> f64 {
        (supervised_positions(loss_mask).count() + anchors.len()) as f64
    }

    fn accumulate(
        model: &PEagle,
        objective: &PEagleObjective,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        _progress: f64,
        _listener: Option<GradReadyHook>,
    ) -> Option<Tensor> {
        let (mask, device, kind) = (model.config().settings.mask_token_id, model.device(), model.kind());
        let segments = (0..objective.segments).filter_map(|index| {
            let batch = PEagleBatch::new(samples, mask, (index, objective.segments), device, kind)?;
            Some(model.accumulate(&batch, normaliser))
        });
        segments.reduce(|sums, more| sums + more)
    }

    /// Each depth has [`STEP_SUMS`] with Σ KL and [`CHAIN_SUMS`].
    fn metric_defs(plan: &PEaglePlan) -> Metrics {
        let depths = plan.config.settings.num_depths;
        let compute = move |sums: &[f64], _: usize| {
            let (by_depth, by_chain) = sums.split_at(STEP_SUMS * depths);
            let losses: Vec<f64> =
                by_depth.chunks(STEP_SUMS).map(|depth| ratio(depth[0], depth[1])).collect();
            let total = |sum: usize| by_depth.chunks(STEP_SUMS).map(|depth| depth[sum]).sum::<f64>();
            // Fewer chains reach later depths, so that each depth has its own mean.
            let tau = |sum: usize| {
                by_chain.chunks(CHAIN_SUMS).map(|depth| ratio(depth[sum], depth[2])).sum::<f64>()
            };
            step_metrics(ratio(total(0), total(1)), &losses, by_depth, &[tau(0), tau(1), 1.0])
        };
        let count = (STEP_SUMS + CHAIN_SUMS) * depths;
        Metrics { count, headline: HEADLINE, compute: Box::new(compute) }
    }

    fn flops(plan: &PEaglePlan, samples: &[TrainSample]) -> f64 {
        samples.iter().map(|sample| sample_flops(&plan.config, plan.objective.segments, sample)).sum()
    }

    /// Assumes a segment with all positions, as the last one of an answer that ends with its sample.
    fn pass_rows(plan: &PEaglePlan, samples: &[SampleSize]) -> PassRows {
        let (config, segments) = (&plan.config, plan.objective.segments);
        let most = |rows: usize| {
            if segments == 1 { rows } else { rows.div_ceil(segments) + config.settings.num_depths }
        };
        let masked: Vec<usize> =
            samples.iter().map(|sample| most(sample.anchors).min(sample.anchors)).collect();
        let tokens: usize = samples.iter().map(|sample| sample.tokens).sum();
        let chain_rows: usize = masked.iter().sum();
        let supervised: usize = samples.iter().map(|sample| sample.supervised).sum();
        let (model, heads) = (config.model(), config.model().layers[0].attention.heads);
        let (keys, repeats) = ((heads.key_value * heads.dim) as usize, heads.num_kv_groups() as usize);
        // Every call copies the keys and values that it reads. Anchors are as spread as the supervised tokens at the end of a sample.
        let keys_read = |(sample, rows): (&SampleSize, &usize)| {
            let before_anchors = sample.tokens - sample.supervised / 2;
            rows.div_ceil(MAX_CALL_ROWS) * before_anchors + rows
        };
        let keys_read: usize = samples.iter().zip(&masked).map(keys_read).sum();
        let call_rows = masked.iter().max().copied().unwrap_or(0).min(MAX_CALL_ROWS);
        // Causal attention repeats keys and values for every query head.
        let repeated = 2 * (heads.query - heads.key_value) as usize * heads.dim as usize * tokens;
        PassRows {
            layers: tokens + chain_rows,
            at_once: tokens + chain_rows,
            tokens,
            context: 0,
            supervised: most(supervised).min(supervised) + chain_rows,
            own_values: model.hidden_size as usize,
            // The masks, which all layers share.
            head_values: keys_read * call_rows * repeats,
            attention: repeated + 2 * keys * keys_read,
        }
    }

    fn into_drafter(model: PEagle, slots: usize) -> Box<dyn Drafter> {
        Box::new(PEagleProposer::new(model, slots))
    }

    /// Predicts every supervised token at all depths.
    fn predict<'a>(model: &'a PEagle, samples: &[TrainSample]) -> Option<Predictions<'a>> {
        let PEagleSettings { num_depths, mask_token_id, .. } = model.config().settings;
        let whole = |sample: &TrainSample| TrainSample {
            input_ids: sample.input_ids.clone(),
            loss_mask: sample.loss_mask.clone(),
            taps: sample.taps.shallow_clone(),
            last: sample.last.shallow_clone(),
            last_positions: sample.last_positions.clone(),
            anchors: all_anchors(&sample.loss_mask, num_depths),
        };
        let samples: Vec<TrainSample> = samples.iter().map(whole).collect();
        let device = samples.first()?.taps.device();
        let batch = PEagleBatch::new(&samples, mask_token_id, (0, 1), device, model.kind())?;
        let (mut counts, order, teacher) = batch.rows_by_depth(num_depths);
        counts.retain(|&count| count > 0);
        let states = model.row_states(&batch).index_select(0, &batch.rows).index_select(0, &order);
        let logits = move |start, len| model.draft_logits(&states.narrow(0, start, len));
        Some(Predictions { counts, teacher, logits: Box::new(logits), confidence: None })
    }
}

/// Anchors of whole chains: each supervised position with all depths up to its first one that predicts nothing supervised.
fn all_anchors(loss_mask: &[bool], depths: usize) -> Vec<usize> {
    let rows =
        |&anchor: &usize| (1..depths).take_while(|depth| is_supervised(loss_mask, anchor + depth)).count();
    supervised_positions(loss_mask).flat_map(|anchor| vec![anchor; rows(&anchor)]).collect()
}

impl PEagle {
    /// Runs forward and backward over a batch, and adds to the gradients of the parameters. The loss is Σ KL / (normaliser + 1e-6) over
    /// the supervised rows of all depths. Returns the sums of the metrics, float64.
    ///
    /// Autograd differentiates the layers. [`distill_loss`] computes the gradients with respect to the normed states in closed form.
    pub fn accumulate(&self, batch: &PEagleBatch, normaliser: LossDenominator) -> Tensor {
        let rows = self.final_norm(&self.row_states(batch).index_select(0, &batch.rows)); // [R, d]
        let output = tch::no_grad(|| self.head_losses(batch, &rows, normaliser.scale()));
        let surrogate = (rows * &output.grad_hidden).sum(Kind::Float);
        let backward = range(c"backward");
        surrogate.backward();
        drop(backward);
        tch::no_grad(|| metric_sums(batch, &output, self.config().settings.num_depths as i64))
    }

    /// Losses of the supervised rows, whose normed states are `rows [R, d]`. The caller must disable autograd.
    fn head_losses(&self, batch: &PEagleBatch, rows: &Tensor, scale: f64) -> LossOutput {
        // The divergence reads no labels, and every row is its own block.
        let zeros = rows.new_zeros([rows.size()[0]], (Kind::Int64, rows.device()));
        let ones = rows.new_ones([rows.size()[0]], (Kind::Float, rows.device()));
        let supervised = SupervisedRows {
            hidden: rows,
            bias: None,
            teacher: &batch.teacher,
            sources: batch.teacher_index(),
            labels: &zeros,
            weights: &ones,
            slot_index: &zeros,
            counts: &vec![1; rows.size()[0] as usize],
            gamma: 1,
            scale,
            agreement: true,
            argmax: None,
            extra: None,
        };
        let recipe = LossRecipe { kl_alpha: 1.0, ..LossRecipe::NONE };
        distill_loss(&self.vocabulary().loss_head(), &supervised, &recipe)
    }
}

/// Sums of the metrics, `[(STEP_SUMS + CHAIN_SUMS) · K]` float64.
fn metric_sums(batch: &PEagleBatch, output: &LossOutput, depths: i64) -> Tensor {
    let kl = output.column(LossColumn::KL);
    let accept = (output.column(LossColumn::L1) * -0.5 + 1.0).clamp(0.0, 1.0); // Σ min(p^d, p^t)
    let columns = [&kl, &kl.ones_like(), &output.column(LossColumn::Agreement), &accept];
    let columns = Tensor::stack(&columns, 1).to_kind(Kind::Double); // [R, STEP_SUMS]
    let shape = [depths, batch.positions(), STEP_SUMS as i64];
    let all = Tensor::zeros([shape[0] * shape[1], shape[2]], (Kind::Double, columns.device()));
    let all = all.index_copy(0, &batch.places, &columns).view(shape); // [K, N, STEP_SUMS]
    let by_depth = all.sum_dim_intlist(1, false, Kind::Double);
    // A chain ends behind its last sampled row, and at an anchor without a loss of its own it does not begin.
    let chains = all.narrow(2, 1, 3).cumprod(0, Kind::Double).sum_dim_intlist(1, false, Kind::Double);
    let chains = Tensor::cat(&[chains.narrow(1, 1, 2), chains.narrow(1, 0, 1)], 1); // [K, CHAIN_SUMS]
    Tensor::cat(&[by_depth.flatten(0, 1), chains.flatten(0, 1)], 0)
}

/// Floating-point operations of forward and backward pass over a sample, counted as in [`block_flops`](crate::block_common::block_flops).
/// Segment i of S is taken to read the first i/S of the positions.
fn sample_flops(config: &PEagleConfig, segments: usize, sample: &TrainSample) -> f64 {
    let model = config.model();
    let (d, taps) = (model.hidden_size as f64, config.decoder.taps.len() as f64);
    let vocab = config.settings.draft_vocab_size.unwrap_or(model.vocab_size) as f64;
    let supervised: Vec<usize> = supervised_positions(&sample.loss_mask).collect();
    let last = supervised.last().copied().max(sample.anchors.last().copied());
    let positions = last.map_or(0.0, |last| (last + 1) as f64);
    let segments = segments as f64;
    // Σ i/S and Σ (i/S)² over the segments.
    let read = positions * (segments + 1.0) / 2.0;
    let pairs =
        (positions * positions * (segments + 1.0) * (2.0 * segments + 1.0) / (6.0 * segments) + read) / 2.0;
    // A position sees the positions up to itself. A masked row sees those up to its anchor, and its chain up to itself.
    let behind: usize =
        chains(&sample.anchors).map(|(anchor, len)| len * (anchor + 1) + len * (len + 1) / 2).sum();
    let seen = pairs + behind as f64;
    let rows = read + sample.anchors.len() as f64;
    let mut multiplications = FROZEN_FACTOR * read * taps * d * d; // the captured states are constant
    for (i, layer) in model.layers.iter().enumerate() {
        let Heads { query, key_value, dim } = layer.attention.heads;
        let (queries, keys) = ((query * dim) as f64, (key_value * dim) as f64);
        let inputs = if i == 0 { 2.0 } else { 1.0 };
        let projected =
            inputs * d * (queries + 2.0 * keys) + queries * d + 3.0 * d * layer.intermediate_size as f64;
        multiplications += TRAINED_FACTOR * (rows * projected + 2.0 * seen * queries);
    }
    let losses = (supervised.len() + sample.anchors.len()) as f64;
    multiplications += (FROZEN_FACTOR + 1.0) * losses * d * vocab;
    2.0 * multiplications
}
