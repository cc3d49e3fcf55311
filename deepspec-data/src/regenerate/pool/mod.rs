//! A pool of servers: a request goes to a free slot of a server, and to another server if that server fails.
//!
//! A request queues at all servers at once and takes the first free slot, so faster servers get
//! more requests. When a server's circuit opens, its requests in progress move to others.

mod extensions;
mod failure;
mod server;
mod server_state;
mod stats;
mod watch;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{anyhow, bail};
use deepspec_capture::served::{Failure as StatesFailure, ServedLimits, sweep_regularly, take_states};
use deepspec_core::{env, usage};
use futures::future::{BoxFuture, join_all, pending, select_all};
use serde_json::{Map, Value};
use tokio::sync::watch as watching;

use super::answer::{Answer, AskError};
use extensions::{FieldSet, Refusal};
use failure::{Failure, FailureClass};
pub use server::check_urls;
use server::{Server, VersionProblem, client};
use server_state::{CircuitState, Slot, StateChange, exponential_backoff};

/// Upper limit on requests in flight per server.
const MAX_CONCURRENT_REQUESTS: usize = 65_536;
/// First and longest pause between attempts at a row, for [`exponential_backoff`].
const RETRY_PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(16));
/// Maximum wait for the file of states of an unusable answer.
const UNUSABLE_STATES_WAIT: Duration = Duration::from_secs(5);
/// Maximum number of times that one request may be rate-limited before its row fails.
const MAX_RATE_LIMITS: u32 = 100;

/// The run ends after this many refusals without any answer, because the rows cannot be the cause.
const MAX_REFUSALS: u64 = 100;

/// How a pool asks.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Requests in flight at once, per server
    #[arg(long, default_value_t = 32, value_name = "N")]
    pub concurrency: usize,
    /// Seconds after which a server's answer is given up
    #[arg(long, default_value_t = 1800, value_name = "SECONDS")]
    pub timeout: u64,
    /// Attempts per request, pauses that servers ask for and servers that cannot be reached not counted
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub max_attempts: u32,
    /// Seconds to wait when no server answers, before the run ends with the rest of the rows pending
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    pub server_wait: u64,
    /// Environment variable with the servers' API key
    #[arg(long, default_value = "OPENAI_API_KEY", value_name = "NAME")]
    pub api_key_env: String,
    /// True if the user turned thinking on or off.
    #[arg(skip)]
    pub sets_thinking: bool,
    /// Folder of the servers' files of hidden states, if they are wanted.
    #[arg(skip)]
    pub states_folder: Option<PathBuf>,
}

impl Options {
    /// Checks the ranges of values.
    ///
    /// # Errors
    /// With a usage error if a value is out of range.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.concurrency == 0 || self.timeout == 0 || self.max_attempts == 0 || self.server_wait == 0 {
            usage!("--concurrency, --timeout, --max-attempts and --server-wait must be at least 1");
        }
        if self.concurrency > MAX_CONCURRENT_REQUESTS {
            usage!("--concurrency {}: expected at most {MAX_CONCURRENT_REQUESTS}", self.concurrency);
        }
        if let Some(key) = env::read_secret(&self.api_key_env)
            && !key.bytes().all(|byte| byte.is_ascii_graphic())
        {
            usage!("the API key in {} has characters that no HTTP header may have", self.api_key_env);
        }
        Ok(())
    }
}

/// A pool of servers.
pub struct Pool {
    servers: Vec<Arc<Server>>,
    options: Options,
    /// Notifies waiting requests that a server's state has changed, or that the pool was closed.
    changes: watching::Sender<()>,
    /// Why the pool accepts no more requests.
    closed: OnceLock<String>,
}

impl Pool {
    /// A pool of servers by base URL.
    pub fn new(urls: &[String], options: Options) -> anyhow::Result<Self> {
        let http = client(urls, Duration::from_secs(options.timeout), options.concurrency)?;
        urls.iter().for_each(|url| env::warn_unencrypted_key(&options.api_key_env, url));
        let key = || env::read_secret(&options.api_key_env);
        let server = |url: &String| Arc::new(Server::new(&http, url, key(), options.concurrency));
        let servers = urls.iter().map(server).collect();
        Ok(Self { servers, options, changes: watching::Sender::new(()), closed: OnceLock::new() })
    }

    /// Checks that at least one server responds, and starts to probe the remaining servers.
    pub async fn check(self: &Arc<Self>) -> anyhow::Result<()> {
        let found = join_all(self.servers.iter().map(|server| server.probe())).await;
        let down: Vec<(&Arc<Server>, String)> = self
            .servers
            .iter()
            .zip(found)
            .filter_map(|(server, found)| Some((server, found.err()?)))
            .collect();
        if down.len() == self.servers.len() {
            let problems: Vec<String> = down.into_iter().map(|(_, problem)| problem).collect();
            bail!("server down: {}", problems.join("; "));
        }
        if let Some(folder) = self.options.states_folder.clone() {
            let down: Vec<&str> = down.iter().map(|(server, _)| server.url()).collect();
            for server in self.servers.iter().filter(|server| !down.contains(&server.url())) {
                match server.check_vllm_version().await {
                    Err(VersionProblem::Unsupported(problem)) => bail!("{problem}"),
                    Err(VersionProblem::Unknown(problem)) => tracing::warn!("{problem}"),
                    Ok(()) => {}
                }
            }
            tokio::spawn(sweep_regularly(folder, ServedLimits::default().leftover_age));
        }
        for (server, problem) in down {
            tracing::warn!("server down: {problem}; it is asked as soon as it answers");
            self.apply_change(server, server.state.record_unreachable(&problem));
        }
        tokio::spawn(Arc::clone(self).watch_servers());
        Ok(())
    }

    /// Sends a request until it is answered or cannot succeed. `home` is the preferred server. After an answer it is
    /// the server that answered.
    pub async fn ask(
        self: &Arc<Self>,
        body: &Map<String, Value>,
        home: &mut Option<usize>,
    ) -> Result<Answer, AskError> {
        let (mut attempts, mut waits, mut avoid) = (0, 0, None);
        let mut pauses = exponential_backoff(RETRY_PAUSES);
        loop {
            let (index, slot) = self.acquire_slot(*home, avoid).await?;
            let server = &self.servers[index];
            let answer = match self.attempt(server, body).await {
                Ok(answer) => self.add_states(server, answer).await,
                Err(error) => Err(error),
            };
            let failure = match answer {
                Ok(answer) => {
                    self.apply_change(server, server.state.record_answer(answer.tokens));
                    *home = Some(index);
                    return Ok(answer);
                }
                Err(AttemptError::Hopeless(error)) => return Err(AskError::Run(error)),
                Err(AttemptError::Failed(failure)) => failure,
            };
            let problem = format!("{}: {failure}", server.url());
            tracing::debug!("{problem}");
            self.record_failure(server, &failure, &problem)?;
            drop(slot);
            if let Some((folder, path)) =
                self.options.states_folder.as_ref().zip(failure.states_path.as_ref())
            {
                // Reading a file deletes it. A sweep deletes one that comes later.
                let _ = take_states(folder, path, UNUSABLE_STATES_WAIT).await;
            }
            avoid = Some(index);
            match failure.class {
                FailureClass::Unreachable | FailureClass::Cancelled => {}
                // The server is at fault, not the request. Another server may answer, and this one
                // will be disabled.
                FailureClass::Denied if !server.has_answered() => tokio::time::sleep(RETRY_PAUSES.0).await,
                FailureClass::RateLimited => {
                    waits += 1;
                    if waits == MAX_RATE_LIMITS {
                        return Err(AskError::Row(problem));
                    }
                }
                FailureClass::Refused if self.has_only_refusals() => {
                    let error =
                        anyhow!("{MAX_REFUSALS} requests were refused and none was answered: {problem}");
                    return Err(AskError::Run(error));
                }
                FailureClass::Refused => return Err(AskError::Row(problem)),
                FailureClass::ServerError
                | FailureClass::Timeout
                | FailureClass::Broken
                | FailureClass::InvalidResponse
                | FailureClass::BrokenOff
                | FailureClass::Denied => {
                    attempts += 1;
                    if attempts >= self.options.max_attempts {
                        let problem = format!("{problem} (attempt {attempts})");
                        return Err(match failure.finish {
                            Some(reason) => AskError::BrokenOff(problem, reason),
                            None => AskError::Row(problem),
                        });
                    }
                    tokio::time::sleep(pauses.next().unwrap_or(RETRY_PAUSES.1)).await;
                }
            }
        }
    }

    /// Waits for a slot: preferably at `home`, and at `avoid` only if no other server gets
    /// requests.
    async fn acquire_slot(
        &self,
        home: Option<usize>,
        avoid: Option<usize>,
    ) -> Result<(usize, Slot), AskError> {
        let mut changes = self.changes.subscribe();
        loop {
            if let Some(problem) = self.closed.get() {
                return Err(AskError::Run(anyhow!("{problem}")));
            }
            let numbered = self.servers.iter().enumerate();
            let asked = numbered.clone().filter(|(_, server)| server.state.circuit() == CircuitState::Closed);
            let elsewhere = asked.map(|(index, _)| Some(index)).any(|index| index != avoid);
            let mut open: Vec<(usize, &Arc<Server>)> =
                numbered.filter(|(index, _)| !elsewhere || Some(*index) != avoid).collect();
            open.sort_by_cached_key(|(index, server)| (Some(*index) != home, server.state.load()));
            if let Some(taken) =
                open.iter().find_map(|(index, server)| Some((*index, server.state.try_slot()?)))
            {
                return Ok(taken);
            }
            let line = |(index, server): &(usize, &Arc<Server>)| -> BoxFuture<'static, (usize, Slot)> {
                let (index, state) = (*index, Arc::clone(&server.state));
                Box::pin(async move { (index, state.next_slot().await) })
            };
            // `select_all` panics on an empty list.
            let lines = open.iter().map(line).chain([Box::pin(pending()) as BoxFuture<'_, _>]);
            tokio::select! {
                biased;
                _ = changes.changed() => {}
                (taken, ..) = select_all(lines) => return Ok(taken),
            }
        }
    }

    /// Requests in progress at all servers.
    pub fn in_flight(&self) -> usize {
        self.servers.iter().map(|server| server.state.in_flight()).sum()
    }

    /// Most requests in progress at all servers.
    pub fn capacity(&self) -> usize {
        self.servers.len() * self.options.concurrency
    }

    /// Percentage of the answers by server; empty for a single server.
    pub fn shares(&self) -> String {
        let counts: Vec<u64> = self.servers.iter().map(|server| server.state.stats().answered).collect();
        let total: u64 = counts.iter().sum::<u64>().max(1);
        let shares: Vec<String> = counts.iter().map(|count| format!("{}", 100 * count / total)).collect();
        if shares.len() > 1 { format!(", servers {} %", shares.join("/")) } else { String::new() }
    }

    /// The statistics of all servers.
    pub fn to_json(&self) -> Vec<Value> {
        let record = |server: &Arc<Server>| {
            server.state.stats().to_json(server.url(), &server.extensions.dropped().names())
        };
        self.servers.iter().map(record).collect()
    }

    /// A line for every server with failures.
    pub fn server_failures(&self) -> Vec<String> {
        let line = |server: &Arc<Server>| {
            let stats = server.state.stats();
            let (answered, failures) = (stats.answered, stats.failures());
            (failures > 0).then(|| {
                let (url, classes) = (server.url(), stats.classes());
                format!("{url}: {answered} requests answered, {failures} not ({classes})")
            })
        };
        self.servers.iter().filter_map(line).collect()
    }

    /// Number of servers that get requests.
    fn serving_count(&self) -> usize {
        self.servers.iter().filter(|server| server.state.circuit() == CircuitState::Closed).count()
    }

    /// Whether many requests were refused and no request was answered.
    fn has_only_refusals(&self) -> bool {
        let stats: Vec<_> = self.servers.iter().map(|server| server.state.stats()).collect();
        stats.iter().map(|stats| stats.count(FailureClass::Refused)).sum::<u64>() >= MAX_REFUSALS
            && stats.iter().all(|stats| stats.answered == 0)
    }

    /// The last failures of all servers.
    fn last_failures(&self) -> String {
        let problem = |server: &Arc<Server>| match server.state.problem() {
            none if none.is_empty() => server.url().to_string(),
            problem => problem,
        };
        self.servers.iter().map(problem).collect::<Vec<_>>().join("; ")
    }

    /// Closes the pool and fails waiting requests.
    fn close(&self, problem: String) {
        self.closed.get_or_init(|| problem);
        self.notify_change();
    }

    fn notify_change(&self) {
        self.changes.send_replace(());
    }

    /// Makes one attempt, and repeats it without the optional fields that the server rejects.
    async fn attempt(&self, server: &Server, body: &Map<String, Value>) -> Result<Answer, AttemptError> {
        loop {
            let sent = server.extensions.fields_to_send(body);
            let failure = match server.ask_once(body, sent).await {
                Ok(answer) => {
                    server.extensions.accept(body, sent);
                    return Ok(answer);
                }
                Err(failure) => failure,
            };
            match server.extensions.interpret_refusal(&failure, body, sent, self.options.sets_thinking) {
                Refusal::OfThinking => {
                    return Err(AttemptError::Hopeless(anyhow!(
                        "{} refuses the thinking switch ({failure}); without it the answers would silently be others: ask \
                         without --enable-thinking and --disable-thinking, or serve the model with an engine that knows \
                         chat_template_kwargs",
                        server.url()
                    )));
                }
                Refusal::Of(fields) => self.drop_fields(server, fields, &failure),
                Refusal::Perhaps(fields) => {
                    for suspected in fields.subsets_to_omit() {
                        match server.ask_once(body, sent.without(suspected)).await {
                            Ok(answer) => {
                                self.drop_fields(server, suspected, &failure);
                                return Ok(answer);
                            }
                            // The server also refuses the request if these fields are omitted.
                            Err(again) if again.class == FailureClass::Refused => {}
                            // Another failure does not show whether the fields were the cause.
                            Err(again) => return Err(AttemptError::Failed(again)),
                        }
                    }
                    return Err(AttemptError::Failed(failure));
                }
                Refusal::Other => return Err(AttemptError::Failed(failure)),
            }
        }
    }

    /// Reads the hidden states of an answer, if they are wanted, and deletes the server's file.
    async fn add_states(&self, server: &Server, answer: Answer) -> Result<Answer, AttemptError> {
        let Some(folder) = &self.options.states_folder else { return Ok(answer) };
        let hopeless = |problem: String| AttemptError::Hopeless(anyhow!(problem));
        let Some(path) = answer.states_path.as_deref() else {
            return Err(hopeless(format!(
                "{}: the answer names no file of states; start vLLM by `deepspec-data states vllm-command`",
                server.url()
            )));
        };
        let states = take_states(folder, path, ServedLimits::default().file).await;
        let file = states.map_err(|failure| match failure {
            StatesFailure::Final(problem) => hopeless(format!("{}: {problem}", server.url())),
            StatesFailure::Request(problem) | StatesFailure::Unreachable(problem) => {
                AttemptError::Failed(Failure::states(problem))
            }
        })?;
        // A server that was down at the start was not asked for its version.
        match server.check_vllm_version().await {
            Ok(()) => {}
            Err(VersionProblem::Unknown(problem)) => {
                return Err(AttemptError::Failed(Failure::states(problem)));
            }
            Err(VersionProblem::Unsupported(problem)) => return Err(hopeless(problem)),
        }
        let checked = tokio::task::spawn_blocking(move || answer.with_states(file)).await;
        let checked = checked.unwrap_or_else(|error| Err(error.to_string()));
        checked.map_err(|problem| AttemptError::Failed(Failure::states(problem)))
    }

    fn drop_fields(&self, server: &Server, fields: FieldSet, failure: &Failure) {
        if server.extensions.drop(fields) {
            let names = fields.names().join(", ");
            tracing::warn!("{} refuses {names} ({failure}); it is asked without from now on", server.url());
        }
    }

    /// Records a failure at the server.
    fn record_failure(
        self: &Arc<Self>,
        server: &Arc<Server>,
        failure: &Failure,
        problem: &str,
    ) -> Result<(), AskError> {
        let state = &server.state;
        state.count_failure(failure.class);
        let change = match failure.class {
            FailureClass::Unreachable => state.record_unreachable(problem),
            FailureClass::RateLimited => state.record_rate_limit(failure.retry_after, problem),
            FailureClass::Denied if !server.has_answered() => {
                let disabled = state.record_denial(problem);
                if self.servers.iter().all(|server| server.state.circuit() == CircuitState::Disabled) {
                    return Err(AskError::Run(anyhow!("no server answers: {}", self.last_failures())));
                }
                if disabled {
                    tracing::warn!("{problem}; this server is not asked again");
                    self.notify_change();
                }
                StateChange::None
            }
            FailureClass::ServerError
            | FailureClass::Timeout
            | FailureClass::Broken
            | FailureClass::InvalidResponse
            | FailureClass::Denied => state.record_failure(problem),
            // The server responds; it may answer the next request.
            FailureClass::BrokenOff | FailureClass::Refused | FailureClass::Cancelled => StateChange::None,
        };
        self.apply_change(server, change);
        Ok(())
    }
}

/// Why an attempt failed.
enum AttemptError {
    Failed(Failure),
    /// Every request would fail the same way.
    Hopeless(anyhow::Error),
}
