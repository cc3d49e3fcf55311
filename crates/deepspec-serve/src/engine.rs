//! The engine on a thread of its own, which owns all tensors; requests and tokens travel by channel.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context;
use deepspec_core::cli::Verbosity;
use deepspec_core::usage;
use deepspec_cost::policy::Policy;
use deepspec_drafters::{Drafter, DrafterOptions};
use deepspec_engine::{
    Engine, EngineError, EngineOptions, Event, Finish, Proposer, Request, RequestId, Tally,
};
use deepspec_hub::{HubError, model_dir};
use deepspec_models::{Fit, TargetModel, TargetOptions, fit, history_bytes, room};
use hdrhistogram::Histogram;
use tokio::sync::{mpsc, oneshot};

use crate::metrics::Metrics;
use crate::schedule::{planner, temperatures};

/// Conversations are not cut to fewer tokens than this unasked.
const SHORTEST: usize = 1024;

/// What the engine runs and how.
#[derive(Debug, Clone, clap::Args)]
pub struct EngineArgs {
    /// Folder or hub id of a drafter for the model; answers stay the model's own, they come faster
    #[arg(long, value_name = "D")]
    pub draft: Option<PathBuf>,
    /// How much of each drafted block to verify: whole; fixed:K tokens; threshold:T, up to the first token of lower confidence; prefix, what
    /// pays at the --cost of a step; prefix-async, the same with a budget that is two steps old; plain leaves the drafter out
    #[arg(long, default_value = "whole", value_name = "S", requires = "draft")]
    pub schedule: Policy,
    /// Divide the drafter's confidence logits by the temperatures in this file, which `deepspec-eval calibrate` or SGLang wrote
    #[arg(long, value_name = "FILE", requires = "draft")]
    pub calibration: Option<PathBuf>,
    /// What steps cost: a file that `deepspec-eval profile` wrote, one of SGLang's, or a table (.csv)
    #[arg(long, value_name = "FILE", requires = "draft")]
    pub cost: Option<PathBuf>,
    /// Conversations answered at once
    #[arg(long, default_value_t = 16, value_name = "N")]
    pub slots: usize,
    /// Where the model runs: auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Tokens of prompt and answer that a conversation may hold; at most and by default what the model was made for
    #[arg(long, value_name = "N")]
    pub max_context: Option<usize>,
}

impl EngineArgs {
    /// The folder of `model`, which `flag` named, and these arguments with the drafter's folder; both are fetched where
    /// they are hub ids, and all of it is checked.
    ///
    /// # Errors
    /// Usage errors, and a hub that does not give what is named.
    pub fn resolve(
        &self,
        flag: &'static str,
        model: &str,
        verbosity: Verbosity,
    ) -> anyhow::Result<(PathBuf, Self)> {
        self.check_settings()?;
        let fetch = |flag: &'static str, model: &str| {
            model_dir(model, None, verbosity).map_err(HubError::report).context(flag)
        };
        let dir = fetch(flag, model)?;
        let draft =
            self.draft.as_ref().map(|draft| fetch("--draft", &draft.to_string_lossy())).transpose()?;
        let resolved = Self { draft, ..self.clone() };
        resolved.check(&dir)?;
        Ok((dir, resolved))
    }

    /// Checks what can be checked before anything is loaded.
    ///
    /// # Errors
    /// Usage errors.
    fn check(&self, model: &Path) -> anyhow::Result<()> {
        for (flag, dir) in [("model", Some(model)), ("draft", self.draft.as_deref())] {
            if let Some(dir) = dir.filter(|dir| !dir.is_dir()) {
                usage!(
                    "the {flag} folder {} does not exist; give the local folder of a Hugging Face model",
                    dir.display()
                );
            }
        }
        self.check_settings()
    }

    fn check_settings(&self) -> anyhow::Result<()> {
        if self.slots == 0 || self.max_context == Some(0) {
            usage!("--slots and --max-context must be at least 1");
        }
        if self.slots > MOST_SLOTS {
            usage!("--slots {}: expected at most {MOST_SLOTS}", self.slots);
        }
        match (self.schedule, &self.cost) {
            (policy, None) if policy.reads_cost() => usage!(
                "--schedule {policy} weighs tokens against the time they take: give --cost FILE, which `deepspec-eval profile` writes"
            ),
            (policy, Some(_)) if !policy.reads_cost() => usage!("--cost: --schedule {policy} reads no costs"),
            _ => {}
        }
        if self.calibration.is_some() && !self.schedule.reads_confidence() {
            usage!("--calibration: --schedule {} reads no confidences", self.schedule);
        }
        if let Err(error) = deepspec_ops::device(&self.device) {
            usage!("--device: {error}");
        }
        Ok(())
    }
}

/// Sequences at once that an engine can be asked for; none on a single GPU runs as many.
const MOST_SLOTS: usize = 1 << 16;

/// News of one request.
#[derive(Debug)]
pub enum Update {
    /// The engine does not take it, or cannot go on with it.
    Refused(EngineError),
    /// New tokens.
    Tokens(Vec<i64>),
    /// No more tokens will come.
    Done(Finish),
}

struct Job {
    request: Request,
    updates: mpsc::UnboundedSender<Update>,
    since: Instant,
}

/// What the engine is doing, readable from any thread.
#[derive(Debug)]
pub struct Load {
    /// Sequences being decoded.
    pub running: AtomicUsize,
    /// Sequences waiting for a slot.
    pub queued: AtomicUsize,
    /// Tokens generated since the start.
    pub generated: AtomicU64,
    waits: Mutex<Waits>,
    /// The same and more for monitors.
    pub metrics: Metrics,
}

/// The longest wait that is told apart from longer ones, in milliseconds: a day.
const LONGEST_WAIT: u64 = 86_400_000;

/// How long sequences waited for a slot, in milliseconds to two digits.
#[derive(Debug)]
struct Waits(Histogram<u32>);

impl Default for Waits {
    fn default() -> Self {
        // Fails for more than five digits, or a bound below two.
        Self(Histogram::new_with_max(LONGEST_WAIT, 2).expect("two digits up to a day"))
    }
}

impl Load {
    fn new(slots: usize) -> Result<Self, prometheus::Error> {
        Ok(Self {
            running: AtomicUsize::default(),
            queued: AtomicUsize::default(),
            generated: AtomicU64::default(),
            waits: Mutex::default(),
            metrics: Metrics::new(slots)?,
        })
    }

    /// What this share of all sequences so far did not exceed in waiting for a slot; None while there are none.
    pub fn waited(&self, share: f64) -> Option<Duration> {
        let waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        (!waits.0.is_empty()).then(|| Duration::from_millis(waits.0.value_at_quantile(share)))
    }

    fn count_wait(&self, wait: Duration) {
        self.metrics.count_wait(wait);
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        waits.0.saturating_record(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
    }
}

/// The engine's thread. Dropping the handle ends it.
pub struct EngineThread {
    jobs: Option<mpsc::UnboundedSender<Job>>,
    thread: Option<JoinHandle<()>>,
    load: Arc<Load>,
    context: usize,
}

impl EngineThread {
    /// Loads target and drafter and starts the loop.
    ///
    /// # Errors
    /// If a model cannot be loaded or the two do not fit.
    pub fn start(model: &Path, args: &EngineArgs) -> anyhow::Result<Self> {
        let (jobs, incoming) = mpsc::unbounded_channel();
        let (ready, loaded) = oneshot::channel();
        let load = Arc::new(Load::new(args.slots)?);
        let (model, args, gauge) = (model.to_path_buf(), args.clone(), Arc::clone(&load));
        let work = move || match build(&model, &args) {
            Ok((engine, context)) => {
                // Nobody waits only if the starting thread is gone, and then the channel of jobs is closed too.
                let _ = ready.send(Ok(context));
                let counted = Tally::default();
                Worker { engine, live: HashMap::new(), waiting: VecDeque::new(), load: gauge, counted }
                    .run(incoming);
            }
            Err(error) => drop(ready.send(Err(error))),
        };
        let thread = thread::Builder::new()
            .name("engine".into())
            .spawn(work)
            .context("starting the engine's thread")?;
        let context = loaded.blocking_recv().context("the engine ended while it was loading")??;
        Ok(Self { jobs: Some(jobs), thread: Some(thread), load, context })
    }

    /// Queues a request; its news arrive at the receiver. Dropping the receiver cancels the request.
    pub fn submit(&self, request: Request) -> mpsc::UnboundedReceiver<Update> {
        let (updates, news) = mpsc::unbounded_channel();
        if let Some(jobs) = &self.jobs {
            // If the engine is gone the sender is dropped here, which ends the news at once.
            let _ = jobs.send(Job { request, updates, since: Instant::now() });
        }
        news
    }

    /// What it is doing.
    pub fn load(&self) -> &Load {
        &self.load
    }

    /// Tokens that one conversation may hold.
    pub fn context(&self) -> usize {
        self.context
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic has already ended the process.
            let _ = thread.join();
        }
    }
}

/// Answers with the target alone, or with a drafter beside it.
type ChatEngine = Engine<TargetModel, Box<dyn Drafter>>;

fn build(model: &Path, args: &EngineArgs) -> anyhow::Result<(ChatEngine, usize)> {
    let device = deepspec_ops::device(&args.device)?;
    let (kind, slots) = (deepspec_ops::default_kind(device), args.slots);
    let dir = args.draft.as_ref().filter(|_| args.schedule != Policy::Plain);
    let drafter = match dir {
        Some(dir) => Some(deepspec_drafters::load(dir, &DrafterOptions { device, kind, slots })?),
        None => None,
    };
    if let Some(drafter) = drafter.as_ref().filter(|_| args.schedule.reads_confidence())
        && !drafter.has_confidence()
    {
        usage!("--schedule {}: the drafter has no confidence head", args.schedule);
    }
    let block = drafter.as_ref().map_or(0, |drafter| drafter.draft_len());
    let (planner, temperatures) = (planner(model, args)?, temperatures(args, dir, block)?);
    let taps = drafter.as_ref().map(|drafter| drafter.taps().to_vec()).unwrap_or_default();
    let target = TargetModel::load(model, &TargetOptions { device, kind, slots, taps })?;
    if let Some(drafter) = &drafter {
        drafter.check_fits(target.config())?;
    }
    let draft_sampling = drafter.as_ref().map(|drafter| drafter.draft_sampling()).unwrap_or_default();
    let longest = target.config().max_position_embeddings;
    let wanted = args.max_context.map_or(longest, |wanted| wanted.min(longest));
    if let Some(asked) = args.max_context.filter(|&asked| asked > longest) {
        tracing::warn!(
            "--max-context {asked}: the model holds {longest} tokens; conversations may be as long"
        );
    }
    let (context, memory) =
        fitting(wanted, args, &target, drafter.as_ref().map(|drafter| drafter as &dyn Proposer))?;
    let options =
        EngineOptions { slots, context, max_draft_tokens: None, draft_sampling, counts_overrun: false };
    let engine = Engine::new(target, drafter, options).with_temperatures(temperatures).with_planner(planner);
    Ok((
        match memory {
            Some(bytes) => engine.with_memory(bytes),
            None => engine,
        },
        context,
    ))
}

/// Tokens that a conversation may hold, and bytes for the histories of all of them: as many as fit beside the models. Without
/// `--max-context` fewer tokens than `wanted` may have to do.
fn fitting(
    wanted: usize,
    args: &EngineArgs,
    target: &TargetModel,
    drafter: Option<&dyn Proposer>,
) -> anyhow::Result<(usize, Option<u64>)> {
    let Some(memory) = room(target, drafter, args.slots, 1) else { return Ok((wanted, None)) };
    let bytes = |tokens: usize| history_bytes(target, drafter, tokens);
    match fit(args.slots, wanted, memory, bytes) {
        Fit::All => Ok((wanted, Some(memory))),
        Fit::Fewer { told } => {
            tracing::warn!("{told}; the others wait. --slots or --max-context can be lowered");
            Ok((wanted, Some(memory)))
        }
        Fit::Shorter { tokens: 0, told } => {
            let slots = if args.slots > 1 { ", fewer --slots" } else { "" };
            usage!(
                "{told}; not even a short one has room, give a smaller model{slots} or a --device with more memory"
            )
        }
        Fit::Shorter { tokens, told } if args.max_context.is_none() && tokens >= SHORTEST => {
            tracing::warn!(
                "{told}: conversations may hold {tokens}. --max-context says so without this warning"
            );
            Ok((tokens, Some(memory)))
        }
        Fit::Shorter { tokens, told } => {
            usage!(
                "{told}; give --max-context {tokens} or less, a smaller model, or a --device with more memory"
            )
        }
    }
}

struct Worker {
    engine: ChatEngine,
    live: HashMap<RequestId, Live>,
    /// Those that wait for a slot, in the order in which they get one, and since when.
    waiting: VecDeque<(RequestId, Instant)>,
    load: Arc<Load>,
    /// Cycles that are in the metrics.
    counted: Tally,
}

/// A request that is not finished.
struct Live {
    updates: mpsc::UnboundedSender<Update>,
    /// When it came, and when its last tokens did.
    since: Instant,
    last: Option<Instant>,
}

impl Worker {
    /// Steps while there is anything to do and sleeps while there is not; ends when the handle is dropped.
    fn run(mut self, mut jobs: mpsc::UnboundedReceiver<Job>) {
        loop {
            if self.engine.is_idle() {
                self.publish();
                match jobs.blocking_recv() {
                    Some(job) => self.accept(job),
                    None => return,
                }
            }
            loop {
                match jobs.try_recv() {
                    Ok(job) => self.accept(job),
                    Err(mpsc::error::TryRecvError::Empty) => break,
                    Err(mpsc::error::TryRecvError::Disconnected) => return,
                }
            }
            self.cancel_abandoned();
            self.publish();
            let started = Instant::now();
            let events = self.engine.step();
            self.count_waits(started);
            for event in events {
                self.report(event);
            }
        }
    }

    fn accept(&mut self, job: Job) {
        let prompt = job.request.prompt.len() as u64;
        match self.engine.submit(job.request) {
            Ok(ticket) => {
                self.load.metrics.prompts.inc_by(prompt);
                self.waiting.push_back((ticket, job.since));
                self.live.insert(ticket, Live { updates: job.updates, since: job.since, last: None });
            }
            // The caller may have gone; then nobody needs the news. The same holds below.
            Err(error) => drop(job.updates.send(Update::Refused(error))),
        }
    }

    fn cancel_abandoned(&mut self) {
        let engine = &mut self.engine;
        self.live.retain(|&ticket, live| {
            let abandoned = live.updates.is_closed();
            if abandoned {
                engine.cancel(ticket);
            }
            !abandoned
        });
        self.waiting.retain(|(ticket, _)| self.live.contains_key(ticket));
    }

    /// The step that began at `started` took in those that the engine no longer counts as waiting.
    fn count_waits(&mut self, started: Instant) {
        while self.waiting.len() > self.engine.queued() {
            let Some((_, since)) = self.waiting.pop_front() else { return };
            self.load.count_wait(started.saturating_duration_since(since));
        }
    }

    fn report(&mut self, event: Event) {
        match event {
            Event::Tokens(ticket, tokens) => {
                let (metrics, now) = (&self.load.metrics, Instant::now());
                self.load.generated.fetch_add(tokens.len() as u64, Ordering::Relaxed);
                metrics.generated.inc_by(tokens.len() as u64);
                if let Some(live) = self.live.get_mut(&ticket) {
                    match live.last.replace(now) {
                        Some(last) => metrics.count_tokens(now - last, tokens.len()),
                        None => metrics.count_first(now - live.since),
                    }
                    let _ = live.updates.send(Update::Tokens(tokens));
                }
            }
            Event::Done(ticket, completion) => {
                if let Some(live) = self.live.remove(&ticket) {
                    let _ = live.updates.send(Update::Done(completion.finish));
                }
            }
            Event::Failed(ticket, error) => {
                tracing::warn!("an answer cannot be finished: {error}");
                if let Some(live) = self.live.remove(&ticket) {
                    let _ = live.updates.send(Update::Refused(error));
                }
            }
        }
    }

    fn publish(&mut self) {
        let queued = self.engine.queued();
        let running = self.live.len().saturating_sub(queued);
        self.load.queued.store(queued, Ordering::Relaxed);
        self.load.running.store(running, Ordering::Relaxed);
        self.load.metrics.set_load(running, queued);
        self.load.metrics.count_cycles(&self.counted, self.engine.counts());
        self.counted = self.engine.counts().clone();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_waits_are_right_to_two_digits() {
        let load = Load::new(1).unwrap();
        assert_eq!(load.waited(0.99), None);
        (1..=1000).for_each(|millis| load.count_wait(Duration::from_millis(millis)));
        for (share, exact) in [(0.5, 0.5), (0.99, 0.99), (1.0, 1.0)] {
            let found = load.waited(share).unwrap().as_secs_f64();
            assert!((found - exact).abs() <= 0.01 * exact, "{share}: {found}");
        }
        load.count_wait(Duration::MAX);
        assert!(load.waited(1.0).unwrap() >= Duration::from_millis(LONGEST_WAIT));
    }
}
