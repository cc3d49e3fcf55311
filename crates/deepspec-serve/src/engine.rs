//! Runs the engine on a separate thread that owns all tensors. Requests and tokens are sent over
//! channels.

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
    AcceptanceStats, Engine, EngineError, EngineOptions, Event, Finish, Proposer, Request, RequestId,
    VerifyRule, sequence_bytes,
};
use deepspec_hub::{HubError, model_dir};
use deepspec_models::{MemoryFit, TargetModel, TargetOptions, check_memory_fit, kv_cache_budget};
use hdrhistogram::Histogram;
use tokio::sync::{mpsc, oneshot};

use crate::metrics::Metrics;
use crate::schedule::{build_planner, load_temperatures};

/// Shortest context that is chosen automatically if memory is scarce.
const MIN_AUTO_CONTEXT: usize = 1024;

/// Arguments of the engine.
#[derive(Debug, Clone, clap::Args)]
pub struct EngineArgs {
    /// Folder or hub id of a drafter for the model; answers still follow the model's distribution, and come faster
    #[arg(long, value_name = "D")]
    pub draft: Option<PathBuf>,
    /// Drafted tokens of a block to verify. Rules without costs: whole, all of them; fixed:K, at most K tokens; threshold:T, those
    /// before the first token of confidence below T. Rules by the --cost of a step: prefix, the tokens that pay;
    /// prefix-async, prefix with a budget that is two steps old. With plain, no drafter runs
    #[arg(long, default_value = "whole", value_name = "S", requires = "draft")]
    pub schedule: Policy,
    /// Divide the drafter's confidence logits by the temperatures in this file, which `deepspec-eval calibrate` or SGLang wrote
    #[arg(long, value_name = "FILE", requires = "draft")]
    pub calibration: Option<PathBuf>,
    /// Time of a step by its tokens: a file that `deepspec-eval profile` or SGLang wrote, or a table (.csv)
    #[arg(long, value_name = "FILE", requires = "draft")]
    pub cost: Option<PathBuf>,
    /// Requests decoded at once
    #[arg(long, default_value_t = 16, value_name = "N")]
    pub max_num_seqs: usize,
    /// Where the model runs: auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Most tokens of prompt and answer together; by default, and at most, the context length of the model
    #[arg(long, value_name = "N")]
    pub max_model_len: Option<usize>,
}

impl EngineArgs {
    /// Resolves `model`, which `flag` named, and the drafter of these arguments to local folders. Hub ids are downloaded, and all arguments
    /// are checked.
    ///
    /// # Errors
    /// Usage errors, and failed downloads.
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

    /// Checks the arguments before anything is loaded.
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
        if self.max_num_seqs == 0 || self.max_model_len == Some(0) {
            usage!("--max-num-seqs and --max-model-len must be at least 1");
        }
        if self.max_num_seqs > MAX_SLOTS {
            usage!("--max-num-seqs {}: expected at most {MAX_SLOTS}", self.max_num_seqs);
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
        if let Err(error) = deepspec_ops::parse_device(&self.device) {
            usage!("--device: {error}");
        }
        Ok(())
    }
}

/// Maximum number of sequences that an engine can run at once; more than any single GPU supports.
const MAX_SLOTS: usize = 1 << 16;

/// An update of one request.
#[derive(Debug)]
pub enum RequestUpdate {
    /// The engine rejects the request or cannot continue it.
    Refused(EngineError),
    /// New tokens of the answer.
    Tokens(Vec<i64>),
    /// The answer is finished.
    Done(Finish),
}

struct QueuedRequest {
    request: Request,
    updates: mpsc::UnboundedSender<RequestUpdate>,
    since: Instant,
}

/// Figures of the engine, readable from any thread.
#[derive(Debug)]
pub struct EngineStats {
    /// Sequences in decoding.
    pub running: AtomicUsize,
    /// Sequences that wait for a slot.
    pub queued: AtomicUsize,
    /// Tokens generated since start.
    pub generated: AtomicU64,
    waits: Mutex<WaitHistogram>,
    /// The Prometheus metrics.
    pub metrics: Metrics,
}

/// Longest wait that the histogram can record, in milliseconds: one day.
const MAX_WAIT_MS: u64 = 86_400_000;

/// Waiting times for a slot, in milliseconds with two significant digits.
#[derive(Debug)]
struct WaitHistogram(Histogram<u32>);

impl Default for WaitHistogram {
    fn default() -> Self {
        // Fails only for more than five digits or a bound below two.
        Self(Histogram::new_with_max(MAX_WAIT_MS, 2).expect("two digits up to a day"))
    }
}

impl EngineStats {
    fn new(slots: usize) -> Result<Self, prometheus::Error> {
        Ok(Self {
            running: AtomicUsize::default(),
            queued: AtomicUsize::default(),
            generated: AtomicU64::default(),
            waits: Mutex::default(),
            metrics: Metrics::new(slots)?,
        })
    }

    /// Quantile `share` of the waiting times for a slot; None before the first sequence.
    pub fn wait_quantile(&self, share: f64) -> Option<Duration> {
        let waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        (!waits.0.is_empty()).then(|| Duration::from_millis(waits.0.value_at_quantile(share)))
    }

    fn record_wait(&self, wait: Duration) {
        self.metrics.record_wait(wait);
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        waits.0.saturating_record(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
    }
}

/// Handle of the engine's thread. Dropping it ends the thread.
pub struct EngineThread {
    jobs: Option<mpsc::UnboundedSender<QueuedRequest>>,
    thread: Option<JoinHandle<()>>,
    stats: Arc<EngineStats>,
    context: usize,
}

impl EngineThread {
    /// Loads target and drafter and starts the engine's loop.
    ///
    /// # Errors
    /// Fails if a model cannot be loaded, or if target and drafter do not fit.
    pub fn start(model: &Path, args: &EngineArgs) -> anyhow::Result<Self> {
        let (jobs, incoming) = mpsc::unbounded_channel();
        let (ready, loaded) = oneshot::channel();
        let stats = Arc::new(EngineStats::new(args.max_num_seqs)?);
        let (model, args, gauge) = (model.to_path_buf(), args.clone(), Arc::clone(&stats));
        let work = move || match load_engine(&model, &args) {
            Ok((engine, context)) => {
                // The receiver is gone only if the starting thread is; the jobs channel is then
                // closed too.
                let _ = ready.send(Ok(context));
                let counted = AcceptanceStats::default();
                EngineLoop { engine, live: HashMap::new(), waiting: VecDeque::new(), stats: gauge, counted }
                    .run(incoming);
            }
            Err(error) => drop(ready.send(Err(error))),
        };
        let thread = thread::Builder::new()
            .name("engine".into())
            .spawn(work)
            .context("starting the engine's thread")?;
        let context = loaded.blocking_recv().context("the engine ended while it was loading")??;
        Ok(Self { jobs: Some(jobs), thread: Some(thread), stats, context })
    }

    /// Queues a request; the receiver gets its updates. Dropping the receiver cancels the request.
    pub fn submit(&self, request: Request) -> mpsc::UnboundedReceiver<RequestUpdate> {
        let (updates, receiver) = mpsc::unbounded_channel();
        if let Some(jobs) = &self.jobs {
            // If the engine has ended, the sender is dropped here, which closes the receiver at
            // once.
            let _ = jobs.send(QueuedRequest { request, updates, since: Instant::now() });
        }
        receiver
    }

    /// Figures of the engine.
    pub fn stats(&self) -> &EngineStats {
        &self.stats
    }

    /// Context length of a conversation, in tokens.
    pub fn context(&self) -> usize {
        self.context
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already ended the process.
            let _ = thread.join();
        }
    }
}

/// An engine with the target alone, or with a drafter.
type ChatEngine = Engine<TargetModel, Box<dyn Drafter>>;

fn load_engine(model: &Path, args: &EngineArgs) -> anyhow::Result<(ChatEngine, usize)> {
    let device = deepspec_ops::parse_device(&args.device)?;
    let (kind, slots) = (deepspec_ops::default_dtype(device), args.max_num_seqs);
    let dir = args.draft.as_ref().filter(|_| args.schedule != Policy::Plain);
    let drafter = match dir {
        Some(dir) => {
            let options = DrafterOptions { device, kind, slots, target: Some(model.to_path_buf()) };
            Some(deepspec_drafters::load_drafter(dir, &options)?)
        }
        None => None,
    };
    if let Some(drafter) = drafter.as_ref().filter(|_| args.schedule.reads_confidence())
        && !drafter.has_confidence_head()
    {
        usage!("--schedule {}: the drafter has no confidence head", args.schedule);
    }
    let block = drafter.as_ref().map_or(0, |drafter| drafter.draft_len());
    let (planner, temperatures) = (build_planner(model, args)?, load_temperatures(args, dir, block)?);
    let taps = drafter.as_ref().map(|drafter| drafter.taps().to_vec()).unwrap_or_default();
    let target = TargetModel::load(model, &TargetOptions { device, kind, slots, taps })?;
    if let Some(drafter) = &drafter {
        drafter.check_fits(target.config())?;
    }
    let draft_sampling = drafter.as_ref().map(|drafter| drafter.draft_sampling()).unwrap_or_default();
    let longest = target.config().max_position_embeddings;
    let wanted = args.max_model_len.map_or(longest, |wanted| wanted.min(longest));
    if let Some(asked) = args.max_model_len.filter(|&asked| asked > longest) {
        tracing::warn!(
            "--max-model-len {asked}: the model holds {longest} tokens; conversations may be as long"
        );
    }
    let (context, memory) =
        fit_context(wanted, args, &target, drafter.as_ref().map(|drafter| drafter as &dyn Proposer))?;
    let options = EngineOptions {
        slots,
        context,
        max_draft_tokens: None,
        draft_sampling,
        verify_rule: VerifyRule::Token,
        counts_overrun: false,
    };
    let engine = Engine::new(target, drafter, options).with_temperatures(temperatures).with_planner(planner);
    Ok((
        match memory {
            Some(bytes) => engine.with_kv_cache_limit(bytes),
            None => engine,
        },
        context,
    ))
}

/// Context length of a conversation, and bytes for the KV caches of all conversations. Both depend
/// on the memory that the models leave free. Without `--max-model-len`, the length may be less than
/// `wanted`.
fn fit_context(
    wanted: usize,
    args: &EngineArgs,
    target: &TargetModel,
    drafter: Option<&dyn Proposer>,
) -> anyhow::Result<(usize, Option<u64>)> {
    let drafted = drafter.map_or(0, |drafter| drafter.draft_len());
    let Some(memory) = kv_cache_budget(target, drafted, args.max_num_seqs, 1) else {
        return Ok((wanted, None));
    };
    let bytes = |tokens: usize| sequence_bytes(target, drafter, VerifyRule::Token, tokens);
    match check_memory_fit(args.max_num_seqs, wanted, memory, bytes) {
        MemoryFit::All => Ok((wanted, Some(memory))),
        MemoryFit::Fewer { told } => {
            tracing::warn!("{told}; the others wait. --max-num-seqs or --max-model-len can be lowered");
            Ok((wanted, Some(memory)))
        }
        MemoryFit::Shorter { tokens: 0, told } => {
            let slots = if args.max_num_seqs > 1 { ", a lower --max-num-seqs" } else { "" };
            usage!(
                "{told}; not even a short one has room, give a smaller model{slots} or a --device with more memory"
            )
        }
        MemoryFit::Shorter { tokens, told } if args.max_model_len.is_none() && tokens >= MIN_AUTO_CONTEXT => {
            tracing::warn!(
                "{told}: conversations may hold {tokens}. --max-model-len says so without this warning"
            );
            Ok((tokens, Some(memory)))
        }
        MemoryFit::Shorter { tokens, told } => {
            usage!(
                "{told}; give --max-model-len {tokens} or less, a smaller model, or a --device with more memory"
            )
        }
    }
}

struct EngineLoop {
    engine: ChatEngine,
    live: HashMap<RequestId, LiveRequest>,
    /// Requests that wait for a slot, in queue order, with their arrival times.
    waiting: VecDeque<(RequestId, Instant)>,
    stats: Arc<EngineStats>,
    /// Decoding cycles that the metrics include already.
    counted: AcceptanceStats,
}

/// An unfinished request.
struct LiveRequest {
    updates: mpsc::UnboundedSender<RequestUpdate>,
    /// Arrival times of the request and of its last tokens.
    since: Instant,
    last: Option<Instant>,
}

impl EngineLoop {
    /// Runs engine steps while there is work, else sleeps. Ends when the handle is dropped.
    fn run(mut self, mut jobs: mpsc::UnboundedReceiver<QueuedRequest>) {
        loop {
            if self.engine.is_idle() {
                self.publish_load();
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
            self.publish_load();
            let started = Instant::now();
            let events = self.engine.step();
            self.record_waits(started);
            for event in events {
                self.send_update(event);
            }
        }
    }

    fn accept(&mut self, job: QueuedRequest) {
        let prompt = job.request.prompt.len() as u64;
        match self.engine.submit(job.request) {
            Ok(request_id) => {
                self.stats.metrics.prompts.inc_by(prompt);
                self.waiting.push_back((request_id, job.since));
                self.live
                    .insert(request_id, LiveRequest { updates: job.updates, since: job.since, last: None });
            }
            // Send errors are ignored here and below: the caller may be gone.
            Err(error) => drop(job.updates.send(RequestUpdate::Refused(error))),
        }
    }

    fn cancel_abandoned(&mut self) {
        let engine = &mut self.engine;
        self.live.retain(|&request_id, live| {
            let abandoned = live.updates.is_closed();
            if abandoned {
                engine.cancel(request_id);
            }
            !abandoned
        });
        self.waiting.retain(|(request_id, _)| self.live.contains_key(request_id));
    }

    /// Records waiting times of requests that got a slot in the step that began at `started`.
    fn record_waits(&mut self, started: Instant) {
        while self.waiting.len() > self.engine.queued() {
            let Some((_, since)) = self.waiting.pop_front() else { return };
            self.stats.record_wait(started.saturating_duration_since(since));
        }
    }

    fn send_update(&mut self, event: Event) {
        match event {
            Event::Tokens(request_id, tokens) => {
                let (metrics, now) = (&self.stats.metrics, Instant::now());
                self.stats.generated.fetch_add(tokens.len() as u64, Ordering::Relaxed);
                metrics.generated.inc_by(tokens.len() as u64);
                if let Some(live) = self.live.get_mut(&request_id) {
                    match live.last.replace(now) {
                        Some(last) => metrics.record_token_latency(now - last, tokens.len()),
                        None => metrics.record_first_token(now - live.since),
                    }
                    let _ = live.updates.send(RequestUpdate::Tokens(tokens));
                }
            }
            Event::Done(request_id, completion) => {
                if let Some(live) = self.live.remove(&request_id) {
                    let _ = live.updates.send(RequestUpdate::Done(completion.finish));
                }
            }
            Event::Failed(request_id, error) => {
                tracing::warn!("an answer cannot be finished: {error}");
                if let Some(live) = self.live.remove(&request_id) {
                    let _ = live.updates.send(RequestUpdate::Refused(error));
                }
            }
        }
    }

    fn publish_load(&mut self) {
        let queued = self.engine.queued();
        let running = self.live.len().saturating_sub(queued);
        self.stats.queued.store(queued, Ordering::Relaxed);
        self.stats.running.store(running, Ordering::Relaxed);
        self.stats.metrics.set_load(running, queued);
        self.stats.metrics.add_decoding_counts(&self.counted, self.engine.counts());
        self.counted = self.engine.counts().clone();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_waits_are_right_to_two_digits() {
        let stats = EngineStats::new(1).unwrap();
        assert_eq!(stats.wait_quantile(0.99), None);
        (1..=1000).for_each(|millis| stats.record_wait(Duration::from_millis(millis)));
        for (share, exact) in [(0.5, 0.5), (0.99, 0.99), (1.0, 1.0)] {
            let found = stats.wait_quantile(share).unwrap().as_secs_f64();
            assert!((found - exact).abs() <= 0.01 * exact, "{share}: {found}");
        }
        stats.record_wait(Duration::MAX);
        assert!(stats.wait_quantile(1.0).unwrap() >= Duration::from_millis(MAX_WAIT_MS));
    }
}
