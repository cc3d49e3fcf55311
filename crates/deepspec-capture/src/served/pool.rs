//! Several servers that share the samples. A server that dies is left out until it answers again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::vllm::{Served, ServerInfo, VllmServer};
use super::{Failure, ServedLimits};

/// First and longest pause before a server that failed is asked again.
const BACKOFF: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(30)];
/// Pause between two looks for a server that answers.
const POLL: Duration = Duration::from_millis(100);

/// Servers with equal models.
pub struct Pool {
    servers: Vec<Member>,
    limits: ServedLimits,
    /// Tokens of the longest sample.
    longest: usize,
}

struct Member {
    server: Arc<VllmServer>,
    /// Requests in progress.
    busy: AtomicUsize,
    health: Mutex<Health>,
}

/// State of a server, by its last answer.
#[derive(Clone)]
enum Health {
    Up(Arc<ServerInfo>),
    /// Not asked until then; the pause grows.
    Down {
        until: Instant,
        pause: Duration,
        problem: String,
    },
}

impl Pool {
    /// Probes all servers. Those that do not answer are asked again later.
    ///
    /// # Errors
    /// If none of them answers, or one of them cannot serve states.
    pub async fn connect(
        servers: Vec<VllmServer>,
        longest: usize,
        limits: ServedLimits,
    ) -> Result<Self, String> {
        let mut members = Vec::with_capacity(servers.len());
        let mut problems = vec![];
        for server in servers {
            let health = match server.probe(longest).await {
                Ok(info) => Health::Up(Arc::new(info)),
                Err(Failure::Unreachable(problem) | Failure::Request(problem)) => {
                    problems.push(problem.clone());
                    Health::down(BACKOFF[0], problem)
                }
                Err(Failure::Final(problem)) => return Err(problem),
            };
            members.push(Member {
                server: Arc::new(server),
                busy: AtomicUsize::new(0),
                health: Mutex::new(health),
            });
        }
        if problems.len() == members.len() {
            return Err(problems.join("; "));
        }
        problems.iter().for_each(|problem| tracing::warn!("{problem}; this server is asked again later"));
        Ok(Self { servers: members, limits, longest })
    }

    /// Facts of the servers that answer.
    pub fn infos(&self) -> Vec<(String, Arc<ServerInfo>)> {
        let up = |member: &Member| match member.health() {
            Health::Up(info) => Some((member.server.url().to_string(), info)),
            Health::Down { .. } => None,
        };
        self.servers.iter().filter_map(up).collect()
    }

    /// Number of servers.
    pub fn len(&self) -> usize {
        self.servers.len()
    }

    /// Requests the states of a prompt and checks them by `check`. A request that fails is repeated
    /// on any server that answers.
    ///
    /// # Errors
    /// The problem, if no server answers for the time of an outage, or this sample fails too often.
    pub async fn request<T: Send + 'static>(
        &self,
        ids: &[i32],
        check: impl Fn(Served) -> Result<T, String> + Clone + Send + 'static,
    ) -> Result<T, String> {
        let (mut failures, mut losses, mut outage) = (0, 0, None);
        loop {
            let (member, info) = self.pick(&mut outage).await?;
            member.busy.fetch_add(1, Ordering::Relaxed);
            let answer = member.server.request(&info, ids).await;
            member.busy.fetch_sub(1, Ordering::Relaxed);
            let failure = match answer {
                Err(failure) => failure,
                Ok(served) => {
                    let check = check.clone();
                    let checked = tokio::task::spawn_blocking(move || check(served)).await;
                    match checked.unwrap_or_else(|error| Err(error.to_string())) {
                        Ok(states) => return Ok(states),
                        Err(problem) => Failure::Request(format!("{}: {problem}", member.server.url())),
                    }
                }
            };
            match failure {
                Failure::Unreachable(problem) => {
                    // A prompt that ends every server must not end each of them for ever.
                    losses += 1;
                    if losses > self.limits.attempts * self.servers.len() {
                        return Err(format!("{problem} ({losses} requests were cut off)"));
                    }
                    member.mark_down(&info, problem);
                }
                Failure::Final(problem) => return Err(problem),
                Failure::Request(problem) => {
                    failures += 1;
                    if failures >= self.limits.attempts {
                        return Err(format!("{problem} ({failures} requests failed)"));
                    }
                    tracing::warn!("{problem}; it is requested again");
                    // A dying engine answers at once.
                    tokio::time::sleep(BACKOFF[0] * (failures as u32 - 1)).await;
                }
            }
        }
    }

    /// The least busy server that answers. Waits for one if there is none; `outage` is since when.
    async fn pick(&self, outage: &mut Option<Instant>) -> Result<(&Member, Arc<ServerInfo>), String> {
        loop {
            let up = self.servers.iter().filter_map(|member| match member.health() {
                Health::Up(info) => Some((member, info)),
                Health::Down { .. } => None,
            });
            if let Some(found) = up.min_by_key(|(member, _)| member.busy.load(Ordering::Relaxed)) {
                *outage = None;
                return Ok(found);
            }
            let since = *outage.get_or_insert_with(Instant::now);
            if since.elapsed() >= self.limits.outage {
                let problems: Vec<String> = self.servers.iter().filter_map(Member::problem).collect();
                return Err(format!(
                    "no server has answered for {} s: {}",
                    self.limits.outage.as_secs(),
                    problems.join("; ")
                ));
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Probes servers that are down whenever their pause is over; never returns.
    pub async fn revive_servers(&self) {
        loop {
            tokio::time::sleep(POLL).await;
            for member in &self.servers {
                let Some(pause) = member.due_pause() else { continue };
                match member.server.probe(self.longest).await {
                    Ok(info) => {
                        tracing::info!("{} answers again", member.server.url());
                        member.set(Health::Up(Arc::new(info)));
                    }
                    Err(
                        Failure::Unreachable(problem) | Failure::Request(problem) | Failure::Final(problem),
                    ) => member.set(Health::down((2 * pause).min(BACKOFF[1]), problem)),
                }
            }
        }
    }
}

impl Health {
    fn down(pause: Duration, problem: String) -> Self {
        Self::Down { until: Instant::now() + pause, pause, problem }
    }
}

impl Member {
    fn health(&self) -> Health {
        self.health.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, health: Health) {
        *self.health.lock().unwrap_or_else(PoisonError::into_inner) = health;
    }

    fn problem(&self) -> Option<String> {
        match self.health() {
            Health::Up(_) => None,
            Health::Down { problem, .. } => Some(problem),
        }
    }

    /// Leaves the server out for a while, unless it was probed since the request of `used`.
    fn mark_down(&self, used: &Arc<ServerInfo>, problem: String) {
        if let Health::Up(info) = self.health()
            && Arc::ptr_eq(&info, used)
        {
            tracing::warn!("{problem}; its samples go to the other servers, and it is asked again");
            self.set(Health::down(BACKOFF[0], problem));
        }
    }

    /// Returns the pause of a server that is due for a probe.
    fn due_pause(&self) -> Option<Duration> {
        match self.health() {
            Health::Down { until, pause, .. } if until <= Instant::now() => Some(pause),
            _ => None,
        }
    }
}
