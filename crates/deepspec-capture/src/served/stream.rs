//! A served target as a source of hidden states, in the order of the samples.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;

use deepspec_core::env;
use deepspec_core::recipe::StateServers;
use tch::Device;
use tokio::runtime::Runtime;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};

use super::check::StatesFile;
use super::files::sweep;
use super::pool::Pool;
use super::reader::{SampledToken, StatesReader};
use super::vllm::{Served, ServerInfo, VllmServer, http_client};
use super::{ServeCommand, ServedLimits, sweep_regularly};
use crate::cache::PlannedSample;
use crate::{SampleStates, StatesError, TargetSpec};

/// Threads that send requests; checks and files have threads of their own.
const REQUEST_THREADS: usize = 2;

/// A target that vLLM servers run. Samples go in by [`Self::submit`], and their states come out in
/// order by [`Self::next_states`].
///
/// Tokens in flight are limited: states that were not taken yet count, so a slow consumer slows the
/// servers down.
pub struct ServedTarget {
    /// `None` once no more samples are requested.
    samples: Option<mpsc::UnboundedSender<Job>>,
    pending: VecDeque<(String, oneshot::Receiver<Outcome>)>,
    command: ServeCommand,
    servers: Vec<(String, Arc<ServerInfo>)>,
    capacity: usize,
    /// Number of requests in progress, which [`Drop`] waits for.
    running: watch::Receiver<usize>,
    limits: ServedLimits,
    runtime: Option<Runtime>,
}

/// A sample, and the channel for its states.
type Job = (PlannedSample, oneshot::Sender<Outcome>);
/// The states, and the tokens that they hold until they are taken.
type Outcome = Result<(SampleStates, OwnedSemaphorePermit), String>;

impl ServedTarget {
    /// Connects to the servers, and deletes old leftovers from their folder. `longest` is the
    /// number of tokens of the longest sample, and `device` applies the norm and the LM head.
    ///
    /// # Errors
    /// If the target's norm and head cannot be read, or no server answers. Fails if a server is too
    /// old, or its `max_model_len` is too small. The message has the `vllm serve` command.
    pub fn connect(
        spec: &TargetSpec,
        servers: &StateServers,
        longest: usize,
        device: Device,
        limits: ServedLimits,
    ) -> Result<Self, StatesError> {
        let command = spec.serve_command(servers, longest)?;
        let refuse = |problem: String| StatesError::Servers { problem, command: command.to_string() };
        let folder: PathBuf = env::expand_home(servers.folder());
        let reader = Arc::new(StatesReader::open(spec, device)?);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(REQUEST_THREADS)
            .enable_all()
            .build()
            .map_err(|error| refuse(error.to_string()))?;
        let http = http_client(&limits).map_err(refuse)?;
        let members = servers.urls.iter().map(|url| VllmServer::new(&http, url, &folder, limits)).collect();
        let pool = Arc::new(runtime.block_on(Pool::connect(members, longest, limits)).map_err(refuse)?);
        let infos = pool.infos();
        if infos.iter().any(|(_, info)| !info.is_agent) {
            sweep(&folder, limits.leftover_age);
            runtime.spawn(sweep_regularly(folder.clone(), limits.leftover_age));
        }
        let revived = Arc::clone(&pool);
        runtime.spawn(async move { revived.revive_servers().await });
        let capacity = limits.tokens_per_server * pool.len();
        let (samples, jobs) = mpsc::unbounded_channel();
        let (count, running) = watch::channel(0);
        runtime.spawn(dispatch(jobs, Dispatcher { pool, reader, capacity, running: Arc::new(count) }));
        log_servers(&infos, &command);
        Ok(Self {
            samples: Some(samples),
            pending: VecDeque::new(),
            command,
            servers: infos,
            capacity,
            running,
            limits,
            runtime: Some(runtime),
        })
    }

    /// vLLM versions and layer ids, for the manifest of a cache.
    pub fn describe(&self) -> String {
        let mut versions: Vec<&str> = self.servers.iter().map(|(_, info)| info.version.as_str()).collect();
        versions.sort_unstable();
        versions.dedup();
        format!(
            "vLLM {}, layer ids {:?}, the last before the final norm, which was applied here",
            versions.join(" and "),
            self.command.layer_ids
        )
    }

    /// Maximum number of tokens in flight.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Requests the states of a sample.
    pub fn submit(&mut self, sample: PlannedSample) {
        let (sender, receiver) = oneshot::channel();
        self.pending.push_back((sample.id.clone(), receiver));
        // Sending fails only after the dispatcher has ended; the receiver then reports it.
        if let Some(samples) = &self.samples {
            let _ = samples.send((sample, sender));
        }
    }

    /// Number of samples that were submitted and not taken.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Waits for the states of the oldest submitted sample; `None` if all were taken.
    ///
    /// # Errors
    /// If no server answers, or the servers return unusable states again and again.
    pub fn next_states(&mut self) -> Result<Option<SampleStates>, StatesError> {
        let Some((sample, receiver)) = self.pending.pop_front() else { return Ok(None) };
        let outcome = receiver.blocking_recv().unwrap_or_else(|error| Err(error.to_string()));
        match outcome {
            Ok((states, _tokens)) => Ok(Some(states)),
            Err(problem) => Err(StatesError::Servers {
                problem: format!("sample {sample:?}: {problem}"),
                command: self.command.to_string(),
            }),
        }
    }

    /// Forgets the samples that were not taken.
    pub fn discard_pending(&mut self) {
        self.pending.clear();
    }
}

impl Drop for ServedTarget {
    /// Waits for requests in progress, because each of them leaves a file that nobody else deletes.
    fn drop(&mut self) {
        self.pending.clear();
        self.samples = None;
        let Some(runtime) = self.runtime.take() else { return };
        let (mut running, limit) = (self.running.clone(), self.limits.file);
        let ended = async { running.wait_for(|running| *running == 0).await.is_ok() };
        if runtime.block_on(async { tokio::time::timeout(limit, ended).await }).is_err() {
            tracing::warn!("requests for states were cut off; their files are deleted by a later run");
        }
        runtime.shutdown_background();
    }
}

/// Starts the requests of samples.
struct Dispatcher {
    pool: Arc<Pool>,
    reader: Arc<StatesReader>,
    capacity: usize,
    /// Number of requests in progress.
    running: Arc<watch::Sender<usize>>,
}

/// Counts a request as long as it lives.
struct RunningRequest(Arc<watch::Sender<usize>>);

impl RunningRequest {
    fn start(count: &Arc<watch::Sender<usize>>) -> Self {
        count.send_modify(|running| *running += 1);
        Self(Arc::clone(count))
    }
}

impl Drop for RunningRequest {
    fn drop(&mut self) {
        self.0.send_modify(|running| *running -= 1);
    }
}

/// Starts the requests in order, each when its tokens have room.
async fn dispatch(mut jobs: mpsc::UnboundedReceiver<Job>, dispatcher: Dispatcher) {
    let Dispatcher { pool, reader, capacity, running } = dispatcher;
    let room = Arc::new(Semaphore::new(capacity));
    while let Some((sample, sender)) = jobs.recv().await {
        let tokens = sample.input_ids.len().clamp(1, capacity) as u32;
        // The semaphore is fair, so the oldest sample always has room first.
        let Ok(permit) = Arc::clone(&room).acquire_many_owned(tokens).await else { return };
        if sender.is_closed() {
            continue;
        }
        let (pool, reader, running) =
            (Arc::clone(&pool), Arc::clone(&reader), RunningRequest::start(&running));
        tokio::spawn(async move {
            let ids = sample.input_ids.clone();
            let sample = Arc::new(sample);
            let check = move |served: Served| read_served(&reader, &sample, &served);
            let outcome = pool.request(&ids, check).await.map(|states| (states, permit));
            // The receiver is gone if its samples were discarded.
            let _ = sender.send(outcome);
            drop(running);
        });
    }
}

/// The states of a sample in a server's answer. The token that the server sampled behind the prompt
/// checks the norm and the head.
fn read_served(
    reader: &StatesReader,
    sample: &PlannedSample,
    served: &Served,
) -> Result<SampleStates, String> {
    let file = StatesFile::parse(&served.file)?;
    if !file.has_tokens(&sample.input_ids) {
        return Err(format!(
            "`token_ids` of the file, {} of them, are not the {} tokens of the request",
            file.len(),
            sample.input_ids.len()
        ));
    }
    let position = sample.input_ids.len() - 1;
    let sampled = SampledToken { position, id: served.sampled, log_prob: served.log_prob };
    reader.read(sample, &file, &[sampled])
}

fn log_servers(infos: &[(String, Arc<ServerInfo>)], command: &ServeCommand) {
    for (url, info) in infos {
        let agent = if info.is_agent { " behind an agent" } else { "" };
        tracing::info!(
            "hidden states of layer ids {:?} from {url}{agent}: {} in vLLM {}",
            command.layer_ids,
            info.model,
            info.version
        );
    }
}
