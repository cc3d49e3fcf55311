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
}

struct Member {
    server: Arc<VllmServer>,
    /// Requests in progress.
    busy: AtomicUsize,
    health: Mutex<Health>,
}

/// What is known of a server.
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
    pub async fn connect(servers: Vec<VllmServer>, limits: ServedLimits) -> Result<Self, String> {
        let mut members = Vec::with_capacity(servers.len());
        let mut problems = vec![];
        for server in servers {
            let health = match server.probe().await {
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
        Ok(Self { servers: members, limits })
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
        let (mut failures, mut outage) = (0, None);
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
                Failure::Unreachable(problem) => member.mark_down(problem),
                Failure::Final(problem) => return Err(problem),
                Failure::Request(problem) => {
                    failures += 1;
                    if failures >= self.limits.attempts {
                        return Err(format!("{problem} ({failures} requests failed)"));
                    }
                    tracing::warn!("{problem}; it is requested again");
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
                self.revive().await?;
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
            self.revive().await?;
        }
    }

    /// Probes the servers whose pause is over.
    async fn revive(&self) -> Result<(), String> {
        for member in &self.servers {
            let Some(pause) = member.take_turn() else { continue };
            match member.server.probe().await {
                Ok(info) => {
                    tracing::info!("{} answers again", member.server.url());
                    member.set(Health::Up(Arc::new(info)));
                }
                Err(Failure::Unreachable(problem) | Failure::Request(problem)) => {
                    member.set(Health::down((2 * pause).min(BACKOFF[1]), problem));
                }
                Err(Failure::Final(problem)) => return Err(problem),
            }
        }
        Ok(())
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

    /// Leaves the server out for a while; the first failure is logged.
    fn mark_down(&self, problem: String) {
        if let Health::Up(_) = self.health() {
            tracing::warn!("{problem}; its samples go to the other servers, and it is asked again");
            self.set(Health::down(BACKOFF[0], problem));
        }
    }

    /// Returns the pause of a server that is due for a probe, and postpones the next one, so that
    /// one task probes it.
    fn take_turn(&self) -> Option<Duration> {
        let mut health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *health {
            Health::Down { until, pause, .. } if *until <= Instant::now() => {
                *until = Instant::now() + BACKOFF[1];
                Some(*pause)
            }
            _ => None,
        }
    }
}
