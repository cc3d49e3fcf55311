//! Tokens per second of the engine, of the reference's own evaluator (`reference.py`), and of bare
//! forwards with the shapes that the engine runs. All in one run, float32, one thread, on the toy
//! target with `assets/tiny-dspark`:
//!
//! ```sh
//! DEEPSPEC_REFERENCE=CLONE_OF_DEEPSPEC DEEPSPEC_TEST_PYTHON=PYTHON cargo bench -p deepspec-eval --bench speed [-- PROMPTS_PER_SUITE]
//! ```
//! `DEEPSPEC_DRAFT` names another DSpark of that target; without `DEEPSPEC_REFERENCE` the engine is
//! timed alone. All take turns in three rounds, with 16 slots and bare forwards three times in
//! each. Medians count, and the engine's share of bare forwards is the median ratio of neighbouring
//! runs. Bare forwards are forwards of target and drafter with their logits, on the tokens of the
//! run itself. The engine adds confidences, sampling, verification and bookkeeping.

#![expect(clippy::print_stdout, reason = "its figures")]

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::time::Instant;

use anyhow::{Context as _, bail};
use deepspec_datasets::suites::{RequestTemplate, SuiteDir};
use deepspec_drafters::{DSpark, DSparkProposer};
use deepspec_engine::{
    AcceptanceStats, Completion, Context, DraftRequest, DraftSampling, Engine, EngineOptions, ModelInput,
    ModelOutput, Proposal, Proposer, Request, Sampling, Target, VerifyRule,
};
use deepspec_models::{ModelConfig, TargetModel, TargetOptions, stop_ids};
use deepspec_text::ChatTokenizer;
use serde::Deserialize;
use serde_json::json;
use tch::{Device, Kind, Tensor};

const SUITES: [&str; 3] = ["smoke-math", "smoke-code", "smoke-chat"];
const MAX_NEW_TOKENS: usize = 256;
const ROUNDS: usize = 3;
/// How often a round times 16 slots and bare forwards: they take seconds, and other load on the
/// processor comes and goes.
const TURNS: usize = 3;
const SLOTS: usize = 16;

/// The engine's calls of the models, in order.
enum Call {
    Forward { chunks: Vec<(usize, usize)>, tokens: Tensor },
    Logits { rows: i64 },
    Truncate { slot: usize, len: usize },
    Propose { context: Context, slots: Vec<usize>, anchors: Tensor, tokens: Tensor },
    Rewind { slot: usize, len: usize },
}

type Calls = Rc<RefCell<Vec<Call>>>;

/// A model that records its calls.
struct Recorded<M> {
    model: M,
    calls: Calls,
}

impl<T: Target> Target for Recorded<T> {
    fn forward(&mut self, feed: &ModelInput) -> ModelOutput {
        let (chunks, tokens) = (feed.chunks.to_vec(), feed.tokens.copy());
        self.calls.borrow_mut().push(Call::Forward { chunks, tokens });
        self.model.forward(feed)
    }

    fn logits(&self, hidden: &Tensor) -> Tensor {
        self.calls.borrow_mut().push(Call::Logits { rows: hidden.size()[0] });
        self.model.logits(hidden)
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.calls.borrow_mut().push(Call::Truncate { slot, len });
        self.model.truncate(slot, len);
    }

    fn vocab_size(&self) -> usize {
        self.model.vocab_size()
    }

    fn device(&self) -> Device {
        self.model.device()
    }
}

impl<P: Proposer> Proposer for Recorded<P> {
    fn draft_len(&self) -> usize {
        self.model.draft_len()
    }

    fn reads_hidden(&self) -> bool {
        self.model.reads_hidden()
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        let DraftRequest { context, slots, anchors, .. } = *request;
        let [taps, tokens, next] =
            [&context.captured_states, &context.tokens, &context.next].map(Tensor::copy);
        let hidden = context.hidden.as_ref().map(Tensor::copy);
        let seen = Context { captured_states: taps, hidden, tokens, next, chunks: context.chunks.clone() };
        let proposal = self.model.propose(request);
        let (slots, anchors, tokens) = (slots.to_vec(), anchors.copy(), proposal.tokens.copy());
        self.calls.borrow_mut().push(Call::Propose { context: seen, slots, anchors, tokens });
        proposal
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.calls.borrow_mut().push(Call::Rewind { slot, len });
        self.model.truncate(slot, len);
    }
}

/// Repeats the recorded calls of the models and nothing else; returns seconds.
fn replay(calls: &[Call], (target, proposer): &mut (TargetModel, DSparkProposer)) -> f64 {
    let _no_grad = tch::no_grad_guard();
    let started = Instant::now();
    let mut hidden = Tensor::new();
    for call in calls {
        match call {
            Call::Forward { chunks, tokens } => {
                hidden = target.forward(&ModelInput { chunks, tokens: tokens.shallow_clone() }).hidden;
            }
            Call::Logits { rows } => drop(target.logits(&hidden.narrow(0, 0, *rows))),
            Call::Truncate { slot, len } => target.truncate(*slot, *len),
            Call::Propose { context, slots, anchors, tokens } => {
                let _ = proposer.forward(context, slots, anchors, |k, _| tokens.select(1, k));
            }
            Call::Rewind { slot, len } => proposer.truncate(*slot, *len),
        }
    }
    started.elapsed().as_secs_f64()
}

/// The output of `reference.py`.
#[derive(Deserialize)]
struct Loop {
    tokens: usize,
    seconds: f64,
    accepted_length: f64,
    /// Answers by request.
    outputs: HashMap<String, Vec<i64>>,
}

/// Target, drafter and prompts.
struct Bench {
    target: PathBuf,
    draft: PathBuf,
    requests: Vec<Request>,
    context: usize,
}

impl Bench {
    fn open(limit: Option<usize>) -> anyhow::Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let target = root.join("assets/tiny-target");
        let draft = std::env::var_os("DEEPSPEC_DRAFT");
        let draft = root.join(draft.unwrap_or_else(|| "assets/tiny-dspark".into()));
        let tokenizer = ChatTokenizer::load(&target)?;
        let config = ModelConfig::load(&target)?;
        let context = config.max_position_embeddings;
        let asking = RequestTemplate {
            tokenizer: &tokenizer,
            sampling: Sampling::new(0.0, 0),
            max_new_tokens: MAX_NEW_TOKENS,
            thinking: false,
            system_prompt: None,
            stop_ids: &stop_ids(&target, tokenizer.eos_token_id())?,
            context,
            vocab_size: config.vocab_size as usize,
        };
        let suites = root.join("eval_datasets");
        let folder = SuiteDir::open(&suites)?;
        let mut requests = vec![];
        for suite in folder.select(&SUITES.map(String::from), &[])? {
            requests.extend(asking.prepare(folder.load(suite, 0, limit)?)?.requests);
        }
        Ok(Self { target, draft, requests, context })
    }

    fn models(&self, slots: usize) -> anyhow::Result<(TargetModel, DSparkProposer)> {
        let (device, kind) = (Device::Cpu, Kind::Float);
        let proposer = DSparkProposer::new(DSpark::load_packed(&self.draft, device, kind)?, slots);
        let taps = proposer.model().config().decoder.taps.clone();
        Ok((TargetModel::load(&self.target, &TargetOptions { device, kind, slots, taps })?, proposer))
    }

    /// Decodes the prompts; returns answers and seconds. `warm` is called between the warm-up and
    /// the run.
    fn decode<T: Target, P: Proposer>(
        &self,
        (target, proposer): (T, P),
        slots: usize,
        temperature: f64,
        warm: impl FnOnce(),
    ) -> anyhow::Result<(Vec<Completion>, f64)> {
        let options = EngineOptions {
            slots,
            context: self.context,
            max_draft_tokens: None,
            draft_sampling: DraftSampling::default(),
            verify_rule: VerifyRule::default(),
            counts_overrun: true,
        };
        let ask = |request: &Request| Request { sampling: Sampling::new(temperature, 0), ..request.clone() };
        let requests: Vec<Request> = self.requests.iter().map(ask).collect();
        let mut engine = Engine::new(target, Some(proposer), options);
        engine.run(requests.iter().take(slots).cloned().collect(), |_| {})?;
        warm();
        let started = Instant::now();
        let completions = engine.run(requests, |_| {})?;
        Ok((completions, started.elapsed().as_secs_f64()))
    }

    /// Records the models' calls during a run.
    fn calls(&self, slots: usize, temperature: f64) -> anyhow::Result<Calls> {
        let calls = Calls::default();
        let (target, proposer) = self.models(slots)?;
        let target = Recorded { model: target, calls: calls.clone() };
        let proposer = Recorded { model: proposer, calls: calls.clone() };
        self.decode((target, proposer), slots, temperature, || calls.borrow_mut().clear())?;
        Ok(calls)
    }

    /// Runs the reference on the same prompts.
    fn python(&self, python: &str, temperature: f64) -> anyhow::Result<Loop> {
        let dir = tempfile::tempdir()?;
        let line = |request: &Request| json!({"id": request.id, "prompt": request.prompt}).to_string();
        let prompts = dir.path().join("prompts.jsonl");
        fs::write(&prompts, self.requests.iter().map(line).collect::<Vec<_>>().join("\n"))?;
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/reference.py");
        let mut command = Command::new(python);
        command.arg(script).arg("--target").arg(&self.target).arg("--draft").arg(&self.draft);
        command.arg("--prompts").arg(&prompts).args(["--max-new-tokens", &MAX_NEW_TOKENS.to_string()]);
        command.args(["--temperature", &temperature.to_string()]);
        let output =
            command.env("OMP_NUM_THREADS", "1").output().with_context(|| format!("starting {python}"))?;
        if !output.status.success() {
            bail!("{}", String::from_utf8_lossy(&output.stderr));
        }
        serde_json::from_slice(&output.stdout).context("reading what reference.py prints")
    }

    fn compare(&self, temperature: f64, python: Option<&str>) -> anyhow::Result<()> {
        let calls = self.calls(SLOTS, temperature)?;
        let mut rates: HashMap<&str, Vec<f64>> = HashMap::new();
        for _ in 0..ROUNDS {
            let mut round = vec![];
            let (completions, seconds) = self.decode(self.models(1)?, 1, temperature, || {})?;
            round.push(("engine, 1 slot", tokens(&completions) as f64 / seconds));
            let mut models = self.models(SLOTS)?;
            // One untimed pass allocates the KV caches.
            replay(&calls.borrow(), &mut models);
            let mut answers = vec![];
            for _ in 0..TURNS {
                let (completions, seconds) = self.decode(self.models(SLOTS)?, SLOTS, temperature, || {})?;
                round.push(("engine, 16 slots", tokens(&completions) as f64 / seconds));
                let seconds = replay(&calls.borrow(), &mut models);
                round.push(("bare forwards, 16 slots", tokens(&completions) as f64 / seconds));
                answers = completions;
            }
            if let Some(python) = python {
                let found = self.python(python, temperature)?;
                round.push(("the reference", found.tokens as f64 / found.seconds));
                let equal =
                    answers.iter().filter(|answer| found.outputs.get(&answer.id) == Some(&answer.tokens));
                let mut tally = AcceptanceStats::new(models.1.draft_len());
                answers.iter().for_each(|answer| tally.add(answer));
                println!(
                    "  {} of {} answers equal; τ {:.3} here, {:.3} there",
                    equal.count(),
                    answers.len(),
                    tally.accepted_length().unwrap_or(f64::NAN),
                    found.accepted_length
                );
            }
            for (name, rate) in round {
                rates.entry(name).or_default().push(rate);
            }
        }
        let [one, many, bare, there] =
            ["engine, 1 slot", "engine, 16 slots", "bare forwards, 16 slots", "the reference"]
                .map(|name| rates.remove(name).unwrap_or_default());
        // Ratios of neighbouring runs, which had the processor in the same state.
        let reached = median(many.iter().zip(&bare).map(|(many, bare)| many / bare).collect());
        let [one, many, bare, there] = [one, many, bare, there].map(median);
        println!("temperature {temperature}, {} prompts, tokens/s:", self.requests.len());
        let beside = |rate: f64| {
            python.map_or_else(String::new, |_| format!("   {:5.2} × the reference", rate / there))
        };
        if python.is_some() {
            println!("  the reference             {there:8.0}");
        }
        println!("  engine, 1 slot            {one:8.0}{}", beside(one));
        println!("  engine, {SLOTS} slots          {many:8.0}{}", beside(many));
        println!(
            "  bare forwards, {SLOTS} slots   {bare:8.0}   of which the engine reaches {:.0} %",
            100.0 * reached
        );
        Ok(())
    }
}

/// The median; NaN if there are no values.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn tokens(completions: &[Completion]) -> usize {
    completions.iter().map(|completion| completion.tokens.len()).sum()
}

fn main() -> anyhow::Result<()> {
    deepspec_ops::init_runtime();
    tch::set_num_threads(1);
    let limit = std::env::args().skip(1).find_map(|argument| argument.parse().ok());
    let python = std::env::var("DEEPSPEC_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let python = std::env::var_os("DEEPSPEC_REFERENCE").map(|_| python);
    let bench = Bench::open(limit)?;
    [0.0, 1.0].into_iter().try_for_each(|temperature| bench.compare(temperature, python.as_deref()))
}
