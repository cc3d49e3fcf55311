//! Real accepted length while training: the drafter as it stands, decoded by the engine that evaluation uses.

use std::path::Path;
use std::time::Instant;

use deepspec_capture::{Dataset, TargetSpec};
use deepspec_core::recipe::{EvalRecipe, Recipe};
use deepspec_core::{Tap, env, usage};
use deepspec_datasets::suites::{Folder, RequestTemplate, TokenizedSuite, is_file};
use deepspec_drafters::TrainableDrafter;
use deepspec_engine::{DraftSampling, Engine, EngineOptions, Sampling, Tally, Target as _};
use deepspec_models::{JUDGED_BYTES, TargetModel, TargetOptions, Weights};
use serde_json::{Value, json};
use tch::{Device, Kind};

use crate::budget::bytes_of;
use crate::dist::ProcessGroup;

/// The target and the suites, kept for the whole run.
pub struct Evaluation {
    target: TargetModel,
    suites: Vec<TokenizedSuite>,
    options: EngineOptions,
}

/// What an evaluation found.
pub struct Scores {
    /// One entry per suite.
    pub suites: Vec<SuiteScore>,
    /// Wall-clock time.
    pub seconds: f64,
}

/// What a suite gave.
pub struct SuiteScore {
    /// Its name.
    pub name: String,
    /// Its counts.
    pub tally: Tally,
}

/// What the evaluations of a run ask, and how.
pub struct EvalPrompts {
    eval: EvalRecipe,
    suites: Vec<TokenizedSuite>,
}

impl EvalPrompts {
    /// Reads the suites of `recipe`, if it has accepted length measured while training. They are asked as `deepspec-eval run`
    /// asks them, without a system prompt, and with thinking on where the samples were answered so.
    ///
    /// # Errors
    /// Usage errors for suites that are not there or do not fit.
    pub fn read(recipe: &Recipe, source: &TargetSpec, dataset: &Dataset) -> anyhow::Result<Option<Self>> {
        if recipe.logging.eval_every.is_none() {
            return Ok(None);
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
        let folder = Folder::open(&dir)?;
        let suites = folder.select(&eval.suites, &[])?.into_iter();
        let suites = suites.map(|suite| asking.prepare(folder.load(suite, eval.seed, eval.limit)?));
        let suites = suites.collect::<anyhow::Result<_>>()?;
        Ok(Some(Self { eval, suites }))
    }

    /// Bytes that evaluating takes: the target's weights and, in float32 on the CPU, its packed head; and while it decodes keys and values of the
    /// longest answers, what comes of the logits of blocks of `drafts` tokens and, there, a packed drafter of `drafter` values with its head.
    ///
    /// # Errors
    /// If the target's weights cannot be opened.
    pub fn bytes(
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
        let weights = Weights::open(&source.dir, "the target", device, kind)?.values();
        let head = (source.config.vocab_size * source.config.hidden_size) as usize;
        let (head, drafter) =
            if (device, kind) == (Device::Cpu, Kind::Float) { (head, head + drafter) } else { (0, 0) };
        let histories = source.config.history(self.eval.slots, longest);
        let judged = (self.eval.slots * (drafts + 1)) as u64 * source.config.vocab_size as u64;
        Ok(EvaluationBytes {
            always: bytes_of(weights + head, kind),
            decoding: bytes_of(drafter + histories, kind) + judged * JUDGED_BYTES,
        })
    }
}

/// What evaluating takes, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct EvaluationBytes {
    /// For the whole run.
    pub always: u64,
    /// While answers are decoded, and nothing is learned.
    pub decoding: u64,
}

impl Evaluation {
    /// Loads the target, which also captures `taps`.
    ///
    /// # Errors
    /// If the target cannot be loaded.
    pub fn open(
        questions: EvalPrompts,
        taps: Vec<Tap>,
        source: &TargetSpec,
        device: Device,
        kind: Kind,
    ) -> anyhow::Result<Self> {
        let slots = questions.eval.slots;
        Ok(Self {
            target: TargetModel::load(&source.dir, &TargetOptions { device, kind, slots, taps })?,
            suites: questions.suites,
            options: EngineOptions {
                slots,
                context: source.config.max_position_embeddings,
                max_draft_tokens: None,
                draft_sampling: DraftSampling::default(),
                counts_overrun: true,
            },
        })
    }

    /// Decodes all suites with the weights that `trainee` has now; every rank takes its share of the samples and gets all counts.
    /// Training goes on as if it had not been: draws are keyed by sample, no weight and no generator is touched.
    ///
    /// # Errors
    /// If a logit is not finite, or another rank has failed.
    pub fn run(&mut self, trainee: &dyn TrainableDrafter, group: &ProcessGroup) -> anyhow::Result<Scores> {
        let scores = self.decode(trainee, group);
        // What training goes on with is not to lie beside histories of answers that are over.
        self.target.release();
        scores
    }

    /// What [`Self::run`] gives, with histories left in the target's cache.
    fn decode(&mut self, trainee: &dyn TrainableDrafter, group: &ProcessGroup) -> anyhow::Result<Scores> {
        let started = Instant::now();
        let drafter = trainee.drafter(self.options.slots);
        let options = EngineOptions { draft_sampling: drafter.draft_sampling(), ..self.options };
        let mut engine = Engine::new(&mut self.target, Some(drafter), options);
        let mut suites = vec![];
        for suite in &self.suites {
            let mut tally = Tally::new(engine.draft_len());
            let mine = suite.requests.iter().skip(group.rank()).step_by(group.world_size());
            engine.run(mine.cloned().collect(), |completion| tally.add(completion))?;
            let tallies = group.all_gather("adding up accepted lengths", &serde_json::to_vec(&tally)?)?;
            let tally = tallies.iter().try_fold(Tally::new(engine.draft_len()), |mut sum, bytes| {
                sum.merge(&serde_json::from_slice(bytes)?);
                anyhow::Ok(sum)
            })?;
            suites.push(SuiteScore { name: suite.rows.suite.name.to_string(), tally });
        }
        Ok(Scores { suites, seconds: started.elapsed().as_secs_f64() })
    }
}

impl Scores {
    /// τ: the mean over the suites that had a cycle, each of them the mean over its cycles.
    pub fn tau(&self) -> Option<f64> {
        let taus: Vec<f64> = self.suites.iter().filter_map(|suite| suite.tally.accepted_length()).collect();
        (!taus.is_empty()).then(|| taus.iter().sum::<f64>() / taus.len() as f64)
    }

    /// What stands in a line of metrics: τ and, per suite, τ and the counts.
    pub fn to_json(&self) -> Value {
        let suites = self.suites.iter().map(|SuiteScore { name, tally }| {
            let found = json!({"tau": tally.accepted_length(), "samples": tally.samples, "cycles": tally.cycles,
                "committed": tally.committed, "accept_rate": tally.rates()});
            (name.clone(), found)
        });
        json!({"tau": self.tau(), "seconds": self.seconds, "suites": suites.collect::<serde_json::Map<_, _>>()})
    }
}
