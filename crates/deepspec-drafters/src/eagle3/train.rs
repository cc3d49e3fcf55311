//! Training of Eagle3: objective, metrics and costs.

use deepspec_core::FinalStates;
use deepspec_core::config::ConfigError;
use deepspec_core::recipe::{LossNormalization, Recipe};
use deepspec_models::ModelConfig;
use deepspec_models::nn::{Builder, Heads};
use deepspec_ops::distill_loss::{LossColumn, LossOutput, LossRecipe, SupervisedRows, distill_loss};
use deepspec_ops::range;
use tch::{Kind, Tensor};

use super::batch::{Eagle3Batch, MAX_CALL_POSITIONS, TttStep, is_supervised, needed_positions};
use super::model::{
    Eagle3, Eagle3Config, Eagle3Modules, Eagle3Objective, Eagle3Proposer, Eagle3Recipe, Eagle3Settings,
    Supervise,
};
use crate::block_common::{FROZEN_FACTOR, TRAINED_FACTOR};
use crate::draft_model::{DrafterKind, PassRows, Plan, SampleSize, checkpoint_kind};
use crate::registration::{DrafterKindInfo, ParamGroup, RecipeSection};
use crate::token_common::{
    HEADLINE, STEP_SUMS, TAU_SUMS, full_attention_decoder, ratio, read_draft_vocab, step_metrics,
};
use crate::{
    ConfigIssue, Drafter, DrafterPlan, GradReadyHook, LossDenominator, Metrics, Predictions, TrainSample,
};

/// Registry entry of Eagle3.
pub const EAGLE3_INFO: DrafterKindInfo = DrafterKindInfo {
    name: "eagle3",
    title: "Eagle3",
    param_groups: &[
        ParamGroup { name: "fusion", prefixes: &["fc.", "fc_norm.", "input_norm."] },
        ParamGroup { name: "layers", prefixes: &["layers."] },
        ParamGroup { name: "norm", prefixes: &["norm."] },
    ],
    settings: Some(|schemas| schemas.subschema_for::<Eagle3Recipe>()),
    checkpoints: Some(checkpoint_kind::<Eagle3Modules>("Eagle3", &super::formats::READER)),
};

/// Architecture and objective of an Eagle3 drafter, without weights.
pub type Eagle3Plan = Plan<Eagle3Modules>;

/// Reads and checks the recipe section of Eagle3. An error names the wrong key, with file and line.
pub fn read_recipe(section: &RecipeSection<'_>) -> Result<Eagle3Recipe, ConfigError> {
    let own: Eagle3Recipe = section.read()?;
    own.check().map_err(|(key, problem)| section.error(key, problem))?;
    Ok(own)
}

/// Builds the plan of a drafter for this target. An error names the key that does not fit.
pub fn build_plan<D>(
    own: &Eagle3Recipe,
    recipe: &Recipe<D>,
    target: &ModelConfig,
) -> Result<Box<dyn DrafterPlan>, ConfigIssue> {
    let draft_vocab = own.draft_vocab.as_deref().map(|path| read_draft_vocab(path, target)).transpose()?;
    let config = Eagle3Config {
        decoder: full_attention_decoder(own.num_draft_layers, recipe, target)?,
        settings: Eagle3Settings {
            ttt_length: own.ttt_length,
            step_loss_decay: own.step_loss_decay,
            draft_vocab_size: draft_vocab.as_ref().map(|vocab| vocab.tokens().len() as i64),
            norms: own.norms,
        },
    };
    config.check_recipe()?;
    let objective = Eagle3Objective {
        supervise: own.supervise,
        step_loss_decay: own.step_loss_decay,
        normalization: recipe.train.loss_normalization,
    };
    Ok(Box::new(Eagle3Plan::new(config, objective).with_draft_vocab(draft_vocab)))
}

impl DrafterKind for Eagle3Modules {
    type Settings = Eagle3Settings;
    type Objective = Eagle3Objective;
    const FINAL_STATES: FinalStates = FinalStates::Supervised;
    const TREE_REFUSAL: Option<&'static str> = crate::drafter::TREE_REFUSAL;

    fn reads_last_token_state(objective: &Eagle3Objective) -> bool {
        objective.supervise == Supervise::Shifted
    }

    fn new(b: &Builder, config: &Eagle3Config) -> Self {
        Self::build(b, config)
    }

    fn accumulate(
        model: &Eagle3,
        objective: &Eagle3Objective,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        _progress: f64,
        _listener: Option<GradReadyHook>,
    ) -> Option<Tensor> {
        let steps = model.config().settings.ttt_length;
        let batch = Eagle3Batch::new(samples, objective, steps, model.device(), model.kind());
        Some(model.accumulate(batch.as_ref(), normaliser, samples.len()))
    }

    fn metric_defs(plan: &Eagle3Plan) -> Metrics {
        metric_defs(plan.config.settings.ttt_length, plan.objective.step_loss_decay)
    }

    fn flops(plan: &Eagle3Plan, samples: &[TrainSample]) -> f64 {
        flops(&plan.config, samples, plan.objective.supervise)
    }

    /// Estimates the positions of each step after the first by the number of supervised tokens.
    fn pass_rows(plan: &Eagle3Plan, samples: &[SampleSize]) -> PassRows {
        let config = &plan.config;
        let sum = |size: fn(&SampleSize) -> usize| samples.iter().map(size).sum::<usize>();
        let (tokens, supervised) = (sum(|sample| sample.tokens), sum(|sample| sample.supervised));
        let steps = config.settings.ttt_length;
        // Every attention call copies its keys and values, and has a mask.
        let heads = config.model().layers.iter().map(|layer| layer.attention.heads);
        let attention = |heads: Heads| {
            let (keys, repeats) = ((heads.key_value * heads.dim) as usize, heads.num_kv_groups() as usize);
            let step_values = |count: usize, sample: &SampleSize, s: usize| {
                let (calls, rows) = (count.div_ceil(MAX_CALL_POSITIONS), MAX_CALL_POSITIONS.min(count));
                // A later call sees more keys of step 0: call i of `calls` sees the first i/`calls` of them. All calls together see
                // tokens·(calls + 1)/2 of them. Each later step adds `count` keys.
                let keys_read = sample.tokens * (calls + 1) / 2 + s * count;
                keys_read * (2 * keys + rows * repeats)
            };
            let sample_values = |sample: &SampleSize| {
                let later = (1..steps).map(|s| step_values(sample.supervised, sample, s));
                step_values(sample.tokens, sample, 0) + later.sum::<usize>()
            };
            samples.iter().map(sample_values).sum::<usize>()
        };
        PassRows {
            layers: tokens + (steps - 1) * supervised,
            at_once: tokens,
            tokens,
            context: 0,
            supervised: steps * supervised,
            own_values: 0,
            head_values: 0,
            attention: heads.map(attention).max().unwrap_or(0),
        }
    }

    fn into_drafter(model: Eagle3, slots: usize) -> Box<dyn Drafter> {
        Box::new(Eagle3Proposer::new(model, slots))
    }

    fn predict<'a>(model: &'a Eagle3, samples: &[TrainSample]) -> Option<Predictions<'a>> {
        let objective = Eagle3Objective {
            supervise: Supervise::Labels,
            step_loss_decay: 1.0,
            normalization: LossNormalization::Global,
        };
        let device = samples.first()?.taps.device();
        let batch =
            Eagle3Batch::new(samples, &objective, model.config().settings.ttt_length, device, model.kind())?;
        let states = model.step_states(&batch);
        let indices = |step: usize| batch.supervised_indices(step);
        let steps: Vec<usize> = (0..states.len()).take_while(|&step| indices(step).size()[0] > 0).collect();
        let counts: Vec<i64> = steps.iter().map(|&step| indices(step).size()[0]).collect();
        let teacher: Vec<Tensor> = steps.iter().map(|&step| batch.teacher_states(step)).collect();
        let states: Vec<Tensor> =
            steps.iter().map(|&step| states[step].index_select(0, &indices(step))).collect();
        if counts.is_empty() {
            return None;
        }
        let (teacher, states) = (Tensor::cat(&teacher, 0), Tensor::cat(&states, 0));
        let logits = move |start, len| model.draft_logits(&states.narrow(0, start, len));
        Some(Predictions { counts, teacher, logits: Box::new(logits), confidence: None })
    }
}

impl Eagle3 {
    /// Runs forward and backward over a batch of `sequences` samples, and adds to the gradients of the parameters. `batch` is None if no
    /// token is supervised. The loss is Σ_s decay^s · Σ w·CE_s / normaliser. w is 1 over the sequence's length, or over the longest
    /// sequence's with `LossNormalization::MicroBatch`. Returns the sums for [`super::metric_defs`], float64.
    ///
    /// Autograd differentiates only the layers. [`distill_loss`] computes the gradients with respect to the normed states in closed form.
    pub fn accumulate(
        &self,
        batch: Option<&Eagle3Batch>,
        normaliser: LossDenominator,
        sequences: usize,
    ) -> Tensor {
        let double = (Kind::Double, self.device());
        let count = Tensor::full([1], sequences as f64, double);
        let Some(batch) = batch else {
            let sums = STEP_SUMS * self.config().settings.ttt_length + TAU_SUMS;
            let empty = Tensor::zeros([sums as i64], double);
            return Tensor::cat(&[empty, count], 0);
        };
        let states = self.step_states(batch);
        let normed = |(step, states): (&TttStep, &Tensor)| {
            self.final_norm(&states.index_select(0, &batch.step_list(step.supervised_indices)))
        };
        // Sorted by target state, so that the logits of each target state are computed once for all steps.
        let rows = Tensor::cat(&batch.steps.iter().zip(&states).map(normed).collect::<Vec<_>>(), 0)
            .index_select(0, &batch.ordered.order); // [R, d]
        let output = tch::no_grad(|| self.head_losses(batch, &rows, 1.0 / normaliser.0));
        let by_step = |column: LossColumn| output.column(column).index_select(0, &batch.ordered.inverse);
        let accept = (by_step(LossColumn::L1) * -0.5 + 1.0).clamp(0.0, 1.0); // Σ min(p^d, p^t)
        let correct = by_step(LossColumn::Agreement);
        let soft_ce = by_step(LossColumn::SOFT_CE) * &batch.weights;
        let mut sums: Vec<Tensor> = vec![];
        let mut taus = [(); 2].map(|()| Tensor::zeros([], double));
        // Probability of each chain of drafts up to the current step, if drafts are greedy and if they are sampled.
        let mut chains: Option<[Tensor; 2]> = None;
        for (step, states) in batch.steps.iter().zip(&states) {
            let [soft_ce, correct, accept] =
                [&soft_ce, &correct, &accept].map(|all| step.select_supervised(all));
            let total = |values: &Tensor| values.sum(Kind::Double);
            sums.extend([total(&soft_ce), total(&correct.ones_like()), total(&correct), total(&accept)]);
            let positions = states.size()[0];
            let accepted = [(0, &correct), (1, &accept)].map(|(i, accept)| {
                chain_acceptance(batch, step, positions, accept, chains.as_ref().map(|chains| &chains[i]))
            });
            taus.iter_mut().zip(&accepted).for_each(|(tau, accepted)| *tau += total(accepted));
            chains = Some(accepted);
        }
        let surrogate = (rows * &output.grad_hidden).sum(Kind::Float);
        drop(states);
        let backward = range(c"backward");
        surrogate.backward();
        drop(backward);
        let none = Tensor::zeros([], double);
        sums.resize_with(STEP_SUMS * self.config().settings.ttt_length, || none.shallow_clone());
        let positions = sums[1].shallow_clone(); // supervised at step 0, where a chain of drafts begins
        sums.extend(taus.into_iter().chain([positions, count]));
        let sums: Vec<Tensor> = sums.iter().map(|sum| sum.to_kind(Kind::Double).reshape([1])).collect();
        Tensor::cat(&sums, 0)
    }

    /// Losses of the supervised positions of all steps. `rows [R, d]` are their normed states, sorted by target state. The caller must
    /// disable autograd.
    fn head_losses(&self, batch: &Eagle3Batch, rows: &Tensor, scale: f64) -> LossOutput {
        // The soft cross entropy reads no labels, and every row is its own block.
        let zeros = rows.new_zeros([rows.size()[0]], (Kind::Int64, rows.device()));
        let supervised = SupervisedRows {
            hidden: rows,
            bias: None,
            teacher: &batch.teacher,
            sources: batch.ordered.teacher_index(),
            labels: &zeros,
            weights: &batch.ordered.decayed,
            slot_index: &zeros,
            counts: &vec![1; rows.size()[0] as usize],
            gamma: 1,
            scale,
            agreement: true,
            argmax: None,
            extra: None,
        };
        let recipe = LossRecipe { soft_ce_alpha: 1.0, ..LossRecipe::NONE };
        distill_loss(&self.vocabulary().loss_head(), &supervised, &recipe)
    }
}

/// Probability per position of `step` that the target accepts the drafts of all steps up to this one, `[n]` float32.
///
/// `accept [R]` holds the acceptance of the step's supervised positions. `before_kept` is the result for the step before, whose positions
/// `step.kept` selects from; None at step 0. A chain counts as 0 where the step is not supervised.
fn chain_acceptance(
    batch: &Eagle3Batch,
    step: &TttStep,
    positions: i64,
    accept: &Tensor,
    before_kept: Option<&Tensor>,
) -> Tensor {
    let indices = batch.step_list(step.supervised_indices);
    let accept = Tensor::zeros([positions], (Kind::Float, accept.device())).index_add(0, &indices, accept);
    let Some(before_kept) = before_kept else { return accept };
    match step.kept {
        Some(kept) => before_kept.index_select(0, &batch.step_list(kept)) * accept,
        None => before_kept * accept,
    }
}

/// Metrics of Eagle3 over `steps` steps. The loss of step s has the weight `decay`^s.
///
/// Each step has [`STEP_SUMS`] with Σ w·CE, [`TAU_SUMS`] follow, and the last sum is the number of sequences.
pub fn metric_defs(steps: usize, decay: f64) -> Metrics {
    let compute = move |sums: &[f64], _: usize| {
        let (by_step, tail) = sums.split_at(STEP_SUMS * steps);
        let sequences = tail[TAU_SUMS];
        let losses: Vec<f64> = by_step.chunks(STEP_SUMS).map(|step| ratio(step[0], sequences)).collect();
        let weighted = losses.iter().enumerate().map(|(s, loss)| decay.powi(s as i32) * loss);
        step_metrics(weighted.sum(), &losses, by_step, tail)
    };
    Metrics { count: STEP_SUMS * steps + TAU_SUMS + 1, headline: HEADLINE, compute: Box::new(compute) }
}

/// Floating-point operations of forward and backward pass over `samples`, counted as in [`block_flops`](crate::block_common::block_flops).
fn flops(config: &Eagle3Config, samples: &[TrainSample], supervise: Supervise) -> f64 {
    let (model, steps) = (config.model(), config.settings.ttt_length);
    let vocab = config.settings.draft_vocab_size.unwrap_or(model.vocab_size) as f64;
    let d = model.hidden_size as f64;
    let taps = config.decoder.taps.len() as f64;
    let mut multiplications = 0.0;
    for (sample, s) in samples.iter().flat_map(|sample| (0..steps).map(move |s| (sample, s))) {
        let positions = needed_positions(supervise, &sample.loss_mask, s, steps);
        let has_loss = |i: &&usize| is_supervised(supervise, &sample.loss_mask, **i, s);
        let rows = positions.iter().filter(has_loss).count() as f64;
        // Position i sees i + 1 positions of step 0 and one of each later step.
        let seen: usize = positions.iter().map(|i| i + 1 + s).sum();
        let count = positions.len() as f64;
        if s == 0 {
            multiplications += FROZEN_FACTOR * count * taps * d * d; // the captured states are constant
        }
        for layer in &model.layers {
            let Heads { query, key_value, dim } = layer.attention.heads;
            let (queries, keys) = ((query * dim) as f64, (key_value * dim) as f64);
            let inner = layer.intermediate_size as f64;
            let projected = 2.0 * d * (queries + 2.0 * keys) + queries * d + 3.0 * d * inner;
            multiplications += TRAINED_FACTOR * (count * projected + 2.0 * seen as f64 * queries);
        }
        let (draft_logits, target_logits) = (FROZEN_FACTOR * rows * d * vocab, rows * d * vocab);
        multiplications += draft_logits + target_logits;
    }
    2.0 * multiplications
}
