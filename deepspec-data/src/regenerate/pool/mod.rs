//! Many servers as one: a request goes to whichever has a slot free, and elsewhere when that fails.
//!
//! There is one queue for all servers and none behind any of them, so a fast server takes from a slow one what it would
//! have got. A server that is given up loses what it was working on as well.

mod admission;
mod circuit;
mod extensions;
mod failure;
mod server;
mod stats;
mod watch;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{anyhow, bail};
use deepspec_core::{env, usage};
use deepspec_serve::fresh_number;
use serde_json::{Map, Value};

use super::answer::{Answer, AskError};
use admission::{Acquired, Admission, Slot};
use circuit::Change;
use extensions::{Extensions, Fields, Refusal};
use failure::{Class, Failure};
pub use server::check_urls;
use server::{Server, client};

/// Most requests in flight that a server may be given.
const MOST_CONCURRENT: usize = 65_536;
/// Pause before a row's second attempt; it doubles from one to the next and varies by half.
const BACK_OFF: Duration = Duration::from_millis(250);
/// How often a request may be told to wait before its row fails.
const MOST_WAITS: u32 = 100;

/// Refusals without a single answer after which the trouble cannot be the rows'.
const MOST_REFUSALS: u64 = 100;

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
    pub attempts: u32,
    /// Seconds to wait when no server answers, before the run ends with the rest of the rows pending
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    pub patience: u64,
    /// Environment variable with the servers' API key
    #[arg(long, default_value = "OPENAI_API_KEY", value_name = "NAME")]
    pub api_key_env: String,
}

impl Options {
    /// Checks what the types do not say.
    ///
    /// # Errors
    /// Usage errors.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.concurrency == 0 || self.timeout == 0 || self.attempts == 0 || self.patience == 0 {
            usage!("--concurrency, --timeout, --attempts and --patience must be at least 1");
        }
        if self.concurrency > MOST_CONCURRENT {
            usage!("--concurrency {}: expected at most {MOST_CONCURRENT}", self.concurrency);
        }
        if let Some(key) = env::secret(&self.api_key_env)
            && !key.bytes().all(|byte| byte.is_ascii_graphic())
        {
            usage!("the API key in {} has characters that no HTTP header may have", self.api_key_env);
        }
        Ok(())
    }
}

/// Servers that answer.
pub struct Pool {
    servers: Vec<Server>,
    options: Options,
    admission: Mutex<Admission>,
}

impl Pool {
    /// A pool of servers given by base URL.
    pub fn new(urls: &[String], options: Options) -> anyhow::Result<Self> {
        let http = client(urls, Duration::from_secs(options.timeout), options.concurrency)?;
        let servers =
            urls.iter().map(|url| Server::new(&http, url, env::secret(&options.api_key_env))).collect();
        Ok(Self { admission: Mutex::new(Admission::new(urls.len(), options.concurrency)), servers, options })
    }

    /// Checks that at least one server is there, and looks after those that are not.
    pub async fn check(self: &Arc<Self>) -> anyhow::Result<()> {
        let found = futures::future::join_all(self.servers.iter().map(Server::look)).await;
        let down: Vec<(usize, String)> =
            found.into_iter().enumerate().filter_map(|(index, found)| Some((index, found.err()?))).collect();
        if down.len() == self.servers.len() {
            let problems: Vec<String> = down.into_iter().map(|(_, problem)| problem).collect();
            bail!("server down: {}", problems.join("; "));
        }
        for (index, problem) in down {
            tracing::warn!("server down: {problem}; it is asked as soon as it answers");
            let change = self.lock().unreachable(index, &problem);
            self.follow(index, change);
        }
        self.keep_watch();
        Ok(())
    }

    /// Asks until there is an answer or no hope. `home` is the server that is asked first if it is free; it becomes the
    /// one that answered.
    pub async fn ask(
        self: &Arc<Self>,
        body: &Map<String, Value>,
        home: &mut Option<usize>,
    ) -> Result<Answer, AskError> {
        let (mut attempts, mut waits, mut avoid) = (0, 0, None);
        loop {
            let permit = Permit::take(self, *home, avoid).await?;
            let index = permit.server();
            let server = &self.servers[index];
            let failure = match self.attempt(index, body).await {
                Ok(answer) => {
                    let change = self.lock().answer(index, answer.tokens);
                    self.follow(index, change);
                    *home = Some(index);
                    return Ok(answer);
                }
                Err(Attempt::Hopeless(error)) => return Err(AskError::Run(error)),
                Err(Attempt::Failed(failure)) => failure,
            };
            let problem = format!("{}: {failure}", server.url());
            tracing::debug!("{problem}");
            self.settle(index, &failure, &problem)?;
            drop(permit);
            avoid = Some(index);
            match failure.class {
                Class::Unreachable | Class::Recalled => {}
                // Its own fault, not the request's: another server may do, and this one will be given up.
                Class::Denied if !self.lock().answered(index) => {
                    tokio::time::sleep(jittered(BACK_OFF)).await;
                }
                Class::RateLimited => {
                    waits += 1;
                    if waits == MOST_WAITS {
                        return Err(AskError::Row(problem));
                    }
                }
                Class::Refused if self.lock().only_refusals(MOST_REFUSALS) => {
                    let error =
                        anyhow!("{MOST_REFUSALS} requests were refused and none was answered: {problem}");
                    return Err(AskError::Run(error));
                }
                Class::Refused => return Err(AskError::Row(problem)),
                Class::ServerError | Class::Timeout | Class::Broken | Class::Garbage | Class::Denied => {
                    attempts += 1;
                    if attempts >= self.options.attempts {
                        return Err(AskError::Row(format!("{problem} (attempt {attempts})")));
                    }
                    tokio::time::sleep(jittered(BACK_OFF * (1 << (attempts - 1).min(6)))).await;
                }
            }
        }
    }

    /// Requests at the servers.
    pub fn in_flight(&self) -> usize {
        self.lock().in_flight()
    }

    /// How many requests may be at the servers.
    pub fn capacity(&self) -> usize {
        self.servers.len() * self.options.concurrency
    }

    /// Share of the answers that each server gave, in percent, where there are several.
    pub fn shares(&self) -> String {
        let counts: Vec<u64> = self.lock().stats().map(|stats| stats.answered).collect();
        let total: u64 = counts.iter().sum::<u64>().max(1);
        let shares: Vec<String> = counts.iter().map(|count| format!("{}", 100 * count / total)).collect();
        if shares.len() > 1 { format!(", servers {} %", shares.join("/")) } else { String::new() }
    }

    /// The stats of all servers.
    pub fn record(&self) -> Vec<Value> {
        let admission = self.lock();
        let stats = admission.stats().zip(&self.servers);
        stats
            .map(|(stats, server)| stats.record(server.url(), &server.extensions.dropped().names()))
            .collect()
    }

    /// A line for every server that had trouble.
    pub fn troubles(&self) -> Vec<String> {
        let admission = self.lock();
        let line = |(stats, server): (&stats::ServerStats, &Server)| {
            let (answered, failures) = (stats.answered, stats.failures());
            (failures > 0).then(|| {
                format!(
                    "{}: {answered} requests answered, {failures} not ({})",
                    server.url(),
                    stats.classes()
                )
            })
        };
        admission.stats().zip(&self.servers).filter_map(line).collect()
    }

    /// One attempt, again without a field that the server turns out not to know.
    async fn attempt(&self, index: usize, body: &Map<String, Value>) -> Result<Answer, Attempt> {
        let server = &self.servers[index];
        loop {
            let sent = server.extensions.sent(body);
            let failure = match self.ask_once(index, body, sent).await {
                Ok(answer) => {
                    server.extensions.accept(body, sent);
                    return Ok(answer);
                }
                Err(failure) => failure,
            };
            match server.extensions.read(&failure, body, sent) {
                Refusal::OfThinking => {
                    return Err(Attempt::Hopeless(anyhow!(
                        "{} refuses the thinking switch ({failure}); without it the answers would silently be others: ask \
                         without --enable-thinking and --disable-thinking, or serve the model with an engine that knows \
                         chat_template_kwargs",
                        server.url()
                    )));
                }
                Refusal::Of(fields) => self.drop_fields(server, fields, &failure),
                Refusal::Perhaps(fields) => {
                    for suspected in fields.suspects() {
                        match self.ask_once(index, body, sent.without(suspected)).await {
                            Ok(answer) => {
                                self.drop_fields(server, suspected, &failure);
                                return Ok(answer);
                            }
                            // It is refused without them as well.
                            Err(again) if again.class == Class::Refused => {}
                            // Nothing was learned.
                            Err(again) => return Err(Attempt::Failed(again)),
                        }
                    }
                    return Err(Attempt::Failed(failure));
                }
                Refusal::Other => return Err(Attempt::Failed(failure)),
            }
        }
    }

    async fn ask_once(
        &self,
        index: usize,
        body: &Map<String, Value>,
        sent: Fields,
    ) -> Result<Answer, Failure> {
        let server = &self.servers[index];
        let recalled = server.recalled.notified();
        tokio::pin!(recalled);
        // First listened, then looked: whatever happens to the server from here on is heard.
        recalled.as_mut().enable();
        if self.lock().is_out(index) {
            return Err(Failure::recalled());
        }
        tokio::select! {
            answer = server.ask(Extensions::trim(body, sent)) => answer,
            () = recalled => Err(Failure::recalled()),
        }
    }

    fn drop_fields(&self, server: &Server, fields: Fields, failure: &Failure) {
        if server.extensions.drop(fields) {
            let names = fields.names().join(", ");
            tracing::warn!("{} refuses {names} ({failure}); it is asked without from now on", server.url());
        }
    }

    /// Lets a failure count for the server.
    fn settle(self: &Arc<Self>, index: usize, failure: &Failure, problem: &str) -> Result<(), AskError> {
        let change = {
            let mut admission = self.lock();
            admission.count(index, failure.class);
            match failure.class {
                Class::Unreachable => admission.unreachable(index, problem),
                Class::RateLimited => admission.limit(index, failure.retry_after, problem),
                Class::Denied if !admission.answered(index) => {
                    let disabled = admission.deny(index, problem);
                    if admission.all_disabled() {
                        let all = admission.problems(&self.urls());
                        return Err(AskError::Run(anyhow!("no server answers: {all}")));
                    }
                    if disabled {
                        tracing::warn!("{problem}; this server is not asked again");
                    }
                    Change::None
                }
                Class::ServerError | Class::Timeout | Class::Broken | Class::Garbage | Class::Denied => {
                    admission.failure(index, problem)
                }
                Class::Refused | Class::Recalled => Change::None,
            }
        };
        self.follow(index, change);
        self.keep_watch();
        Ok(())
    }

    fn urls(&self) -> Vec<&str> {
        self.servers.iter().map(Server::url).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Admission> {
        // Nothing panics while it holds the lock; should it, the process ends.
        self.admission.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to have one request at a server. Dropping it gives the slot to the next in line.
struct Permit {
    pool: Arc<Pool>,
    taken: Slot,
}

impl Permit {
    /// Waits for a slot, at `home` if it has one free, at `avoid` only if no other server serves.
    async fn take(pool: &Arc<Pool>, home: Option<usize>, avoid: Option<usize>) -> Result<Self, AskError> {
        let turn = pool.lock().take(home, avoid);
        let taken = match turn.map_err(|problem| AskError::Run(anyhow!(problem)))? {
            Acquired::Now(taken) => taken,
            Acquired::Later(turn) => turn.await.map_err(|_| {
                let problem = pool.lock().closed().unwrap_or("the run has ended").to_string();
                AskError::Run(anyhow!(problem))
            })?,
        };
        Ok(Self { pool: Arc::clone(pool), taken })
    }

    /// The server's number.
    fn server(&self) -> usize {
        self.taken.server
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.pool.lock().release(self.taken);
    }
}

/// Why an attempt gave no answer.
enum Attempt {
    Failed(Failure),
    /// No request will be answered as it should.
    Hopeless(anyhow::Error),
}

/// Between half and one and a half times as long, so that those who failed together do not come back together.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + fraction())
}

/// A random number from 0 to 1.
fn fraction() -> f64 {
    fresh_number() as f64 / u64::MAX as f64
}
