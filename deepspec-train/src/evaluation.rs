//! Measures accepted length during training, with the drafter's current weights and the engine of
//! `deepspec-eval`.

use std::path::Path;
use std::time::Instant;

use deepspec_capture::{Dataset, TargetSpec};
use deepspec_core::recipe::EvalRecipe;
use deepspec_core::{Tap, env, usage};
use deepspec_datasets::suites::{RequestTemplate, SuiteDir, TokenizedSuite, is_file};
use deepspec_drafters::Recipe;
use deepspec_drafters::TrainableDrafter;
use deepspec_engine::{
    AcceptanceStats, DraftSampling, Engine, EngineOptions, Sampling, Target as _, VerifyRule,
};
use deepspec_models::{TargetModel, TargetOptions, VERIFY_BYTES_PER_LOGIT, Weights};
use serde_json::{Value, json};
use tch::{Device, Kind};

use crate::budget::bytes_of;
use crate::dist::ProcessGroup;

/// The target and the suites, which stay loaded for the whole run.
pub struct Evaluation {
    target: TargetModel,
    suites: Vec<TokenizedSuite>,
    options: EngineOptions,
}

/// Result of an evaluation.
pub struct EvalScores {
    /// One entry per suite.
    pub suites: Vec<SuiteScore>,
    /// Wall-clock time.
    pub seconds: f64,
}

/// Result of one suite.
pub struct SuiteScore {
    /// Name of the suite.
    pub name: String,
    /// Counts of samples, cycles and accepted tokens.
    pub tally: AcceptanceStats,
}

/// Prompts and settings of a run's evaluations.
pub struct EvalPrompts {
    eval: EvalRecipe,
    suites: Vec<TokenizedSuite>,
}

impl EvalPrompts {
    /// Reads the suites of `recipe` if it enables evaluation during training. The prompts are those
    /// of `deepspec-eval run`, without a system prompt. Thinking is on if the samples were
    /// generated with thinking on.
    ///
    /// # Errors
    /// Usage errors for suites that do not exist or do not fit.
    pub fn read(recipe: &Recipe, source: &TargetSpec, dataset: &Dataset) -> anyhow::Result<Option<Self>> {
        if recipe.logging.eval_every.is_none() {
            return Ok(None);
        }
        if !source.config.has_forward {
            usage!(
                "logging.eval_every: {} does not run in this program; leave it out, and judge checkpoints with `deepspec-eval run --server`",
                source.target.model
            );
        }
        let eval = recipe.eval.clone().unwrap_or_default();
        let stop_ids = deepspec_models::stop_ids(&source.dir, source.tokenizer.eos_token_id())?;
        let asking = RequestTemplate {
            tokenizer: &source.tokenizer,
            sampling: Sampling::new(eval.temperature, eval.seed),
            max_new_tokens: eval.max_new_tokens,
            thinking: dataset.thinking(&source.tokenizer) == Some(true),
            system_prompt: None,
            stop_ids: &stop_ids,
            context: source.config.max_position_embeddings,
            vocab_size: source.config.vocab_size as usize,
        };
        let dir = env::expand_home(&eval.suites_dir);
        if !Path::new(&dir).is_dir() && !eval.suites.iter().all(|name| is_file(name)) {
            usage!("`eval.suites_dir`: {} does not exist", dir.display());
        }
        let folder = SuiteDir::open(&dir)?;
        let suites = folder.select(&eval.suites, &[])?.into_iter();
        let suites = suites.map(|suite| asking.prepare(folder.load(suite, eval.seed, eval.limit)?));
        let suites = suites.collect::<anyhow::Result<_>>()?;
        Ok(Some(Self { eval, suites }))
    }

    /// Bytes that evaluation needs: the target's weights and, in float32 on the CPU, its packed
    /// head. Decoding adds the KV cache of the longest answers and the logits of blocks of `drafts`
    /// tokens. In float32 on the CPU it also adds a packed drafter of `drafter` values with its
    /// head.
    ///
    /// # Errors
    /// Fails if the target's weights cannot be opened.
    pub fn memory_bytes(
        &self,
        source: &TargetSpec,
        drafter: usize,
        drafts: usize,
        device: Device,
        kind: Kind,
    ) -> anyhow::Result<EvaluationBytes> {
        let requests = self.suites.iter().flat_map(|suite| &suite.requests);
        let longest =
            requests.map(|request| request.prompt.len() + request.max_new_tokens).max().unwrap_or(0);
        let weights = Weights::open_target(&source.dir, "the target", device, kind)?.value_count();
        let head = (source.config.vocab_size * source.config.hidden_size) as usize;
        let (head, drafter) =
            if (device, kind) == (Device::Cpu, Kind::Float) { (head, head + drafter) } else { (0, 0) };
        let kv_cache_numel = source.config.kv_cache_numel(self.eval.slots, longest);
        let states = source.config.linear_attention_bytes(self.eval.slots, kind) as u64;
        let judged = (self.eval.slots * (drafts + 1)) as u64 * source.config.vocab_size as u64;
        Ok(EvaluationBytes {
            always: bytes_of(weights + head, kind),
            decoding: bytes_of(drafter + kv_cache_numel, kind) + states + judged * VERIFY_BYTES_PER_LOGIT,
        })
    }
}

/// Memory of evaluation, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct EvaluationBytes {
    /// During the whole run.
    pub always: u64,
    /// Only while answers are decoded; training is paused then.
    pub decoding: u64,
}

impl Evaluation {
    /// Loads the target and captures the hidden states `taps`.
    ///
    /// # Errors
    /// Fails if the target cannot be loaded.
    pub fn open(
        prompts: EvalPrompts,
        taps: Vec<Tap>,
        source: &TargetSpec,
        device: Device,
        kind: Kind,
    ) -> anyhow::Result<Self> {
        let slots = prompts.eval.slots;
        Ok(Self {
            target: TargetModel::load(&source.dir, &TargetOptions { device, kind, slots, taps })?,
            suites: prompts.suites,
            options: EngineOptions {
                slots,
                context: source.config.max_position_embeddings,
                max_draft_tokens: None,
                draft_sampling: DraftSampling::default(),
                verify_rule: VerifyRule::default(),
                counts_overrun: true,
            },
        })
    }

    /// Decodes all suites with the current weights of `drafter`. Each rank decodes its share of the
    /// samples, and all ranks get the total counts. Training is not affected: each sample has its
    /// own random stream, and neither weights nor random generators change.
    ///
    /// # Errors
    /// Fails if a logit is not finite, or another rank has failed.
    pub fn run(
        &mut self,
        drafter: &dyn TrainableDrafter,
        group: &ProcessGroup,
    ) -> anyhow::Result<EvalScores> {
        let scores = self.decode(drafter, group);
        // Frees the KV cache before training goes on.
        self.target.free_cached_memory();
        scores
    }

    /// Like [`Self::run`], but keeps the target's KV cache.
    fn decode(&mut self, drafter: &dyn TrainableDrafter, group: &ProcessGroup) -> anyhow::Result<EvalScores> {
        let started = Instant::now();
        let drafter = drafter.inference_drafter(self.options.slots);
        let options = EngineOptions { draft_sampling: drafter.draft_sampling(), ..self.options };
        let mut engine = Engine::new(&mut self.target, Some(drafter), options);
        let mut suites = vec![];
        for suite in &self.suites {
            let mut tally = AcceptanceStats::new(engine.draft_len());
            let mine = suite.requests.iter().skip(group.rank()).step_by(group.world_size());
            engine.run(mine.cloned().collect(), |completion| tally.add(completion))?;
            let tallies = group.all_gather("adding up accepted lengths", &serde_json::to_vec(&tally)?)?;
            let tally =
                tallies.iter().try_fold(AcceptanceStats::new(engine.draft_len()), |mut sum, bytes| {
                    sum.merge(&serde_json::from_slice(bytes)?);
                    anyhow::Ok(sum)
                })?;
            suites.push(SuiteScore { name: suite.rows.suite.name.to_string(), tally });
        }
        Ok(EvalScores { suites, seconds: started.elapsed().as_secs_f64() })
    }
}

impl EvalScores {
    /// τ: the mean over suites of the mean accepted length of their cycles. Suites without a cycle
    /// are ignored.
    pub fn tau(&self) -> Option<f64> {
        let taus: Vec<f64> = self.suites.iter().filter_map(|suite| suite.tally.accepted_length()).collect();
        (!taus.is_empty()).then(|| taus.iter().sum::<f64>() / taus.len() as f64)
    }

    /// The `eval` entry of a metrics line: τ and, per suite, τ and the counts.
    pub fn to_json(&self) -> Value {
        let suites = self.suites.iter().map(|SuiteScore { name, tally }| {
            let found = json!({"tau": tally.accepted_length(), "samples": tally.samples, "cycles": tally.cycles,
                "committed": tally.committed, "accept_rate": tally.acceptance_rates()});
            (name.clone(), found)
        });
        json!({"tau": self.tau(), "seconds": self.seconds, "suites": suites.collect::<serde_json::Map<_, _>>()})
    }
}
