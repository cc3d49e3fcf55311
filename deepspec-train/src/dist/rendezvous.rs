//! The rendezvous of a job's ranks: a key-value store that also carries error messages.

use std::net::{IpAddr, ToSocketAddrs, UdpSocket};
use std::time::{Duration, Instant};

use deepspec_core::env::DistributedEnv;

use crate::dist::GroupError;
use deepspec_ops::c10d::Store;

/// Longest wait for the error messages of failed ranks.
const ERROR_GRACE: Duration = Duration::from_secs(5);
/// Timeout for reading a key that should exist already.
const KEY_TIMEOUT: Duration = Duration::from_millis(10);
/// Job id and attempt of jobs that our own launcher starts. They are constant, because each job has a different port
/// and only one attempt.
const LOCAL_JOB_ID: &str = "";
const FIRST_ATTEMPT: usize = 0;
/// A documentation address (RFC 5737), used to find the outgoing network interface. No packet is
/// sent.
const EXTERNAL_ADDRESS: (&str, u16) = ("192.0.2.1", 9);

/// A rendezvous store that the launcher opens for its child processes.
pub struct RendezvousServer {
    store: Store,
    port: u16,
}

impl RendezvousServer {
    /// Opens a store at a free local port; it closes when dropped.
    ///
    /// # Errors
    /// [`GroupError::Rendezvous`] if no port can be bound.
    pub fn open(world_size: usize, timeout: Duration) -> Result<Self, GroupError> {
        let (host, port) = (Self::ADDRESS.to_string(), 0);
        let (store, port) = Store::open(&host, port, true, timeout, &key_prefix(LOCAL_JOB_ID, FIRST_ATTEMPT))
            .map_err(|problem| GroupError::Rendezvous {
                rank: 0,
                world_size,
                host,
                port,
                timeout,
                problem: first_error_line(&problem),
            })?;
        Ok(Self { store, port })
    }

    /// Whether a failed rank failed only because another rank did.
    pub fn failed_after_another(&self, rank: usize) -> bool {
        self.store.get(&format!("end/{rank}"), KEY_TIMEOUT).is_ok_and(|words| words.is_empty())
    }

    /// Returns rank, world size and store address for one of `world_size` child processes on this
    /// machine.
    pub fn child_env(&self, rank: usize, world_size: usize) -> DistributedEnv {
        DistributedEnv {
            rank,
            world_size,
            local_rank: rank,
            host: Self::ADDRESS.into(),
            port: self.port,
            is_hosted: true,
            job: LOCAL_JOB_ID.into(),
            attempt: FIRST_ATTEMPT,
        }
    }

    const ADDRESS: &str = "127.0.0.1";
}

/// One rank's connection to the rendezvous store.
pub(crate) struct Rendezvous {
    pub store: Store,
    ranks: DistributedEnv,
    timeout: Duration,
}

/// State of the other ranks.
pub(crate) enum PeerStatus {
    /// The first rank that failed, and its error.
    Failed(usize, String),
    /// Ranks that did not answer.
    Silent(Vec<usize>),
    /// All ranks answered.
    Alive,
}

impl Rendezvous {
    /// Waits until all ranks have connected.
    pub fn open(ranks: &DistributedEnv, timeout: Duration) -> Result<Self, GroupError> {
        let begun = Instant::now();
        let (rank, world_size) = (ranks.rank, ranks.world_size);
        let is_host = rank == 0 && !ranks.is_hosted;
        let prefix = key_prefix(&ranks.job, ranks.attempt);
        let (store, _) =
            Store::open(&ranks.host, ranks.port, is_host, timeout, &prefix).map_err(|problem| {
                GroupError::Rendezvous {
                    rank,
                    world_size,
                    host: ranks.host.clone(),
                    port: ranks.port,
                    timeout,
                    problem: first_error_line(&problem),
                }
            })?;
        let meeting = Self { store, ranks: ranks.clone(), timeout };
        meeting.set_rank_key("here", "");
        let missing = meeting.peers_without_key("here", timeout.saturating_sub(begun.elapsed()));
        if missing.is_empty() {
            Ok(meeting)
        } else {
            Err(GroupError::Missing { rank, world_size, missing, timeout })
        }
    }

    /// Timeout of a collective. It leaves time to ask silent ranks for their errors, and for rank 0
    /// to keep the store open. All of this fits the job's timeout, plus [`KEY_TIMEOUT`] per silent rank.
    pub fn collective_timeout(&self) -> Duration {
        self.timeout - 2 * self.error_exchange_timeout()
    }

    fn error_exchange_timeout(&self) -> Duration {
        ERROR_GRACE.min(self.timeout / 6)
    }

    /// Returns the address of this machine that the other ranks can reach.
    pub fn reachable_address(&self) -> String {
        let host = &self.ranks.host;
        let way = |to: (&str, u16)| {
            let to = to.to_socket_addrs().ok()?.next()?;
            let from = UdpSocket::bind((if to.is_ipv6() { "::" } else { "0.0.0.0" }, 0)).ok()?;
            from.connect(to).ok()?;
            Some(from.local_addr().ok()?.ip())
        };
        let address = way((host, self.ranks.port.max(1)));
        let is_local = host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
        let address = match address {
            // A host name that resolves to a loopback address on this machine has another address on other machines.
            Some(ip) if ip.is_loopback() && !is_local => way(EXTERNAL_ADDRESS).or(Some(ip)),
            found => found,
        };
        address.map_or_else(|| RendezvousServer::ADDRESS.into(), |ip| ip.to_string())
    }

    /// Stores the error that ends this rank for the other ranks.
    pub fn fail(&self, cause: &str) {
        self.set_rank_key("end", cause);
        self.set_rank_key("bye", "");
        if self.ranks.rank == 0 && !self.ranks.is_hosted {
            // The store ends with this process, so wait until the others have read the error.
            self.peers_without_key("bye", self.error_exchange_timeout());
        }
    }

    /// Whether any other rank has reported its end.
    pub fn any_peer_ended(&self) -> bool {
        (0..self.ranks.world_size)
            .any(|peer| peer != self.ranks.rank && self.read_peer_key("end", peer, Instant::now()).is_some())
    }

    /// Asks for the state of the other ranks after a collective has failed.
    pub fn query_peers(&self) -> PeerStatus {
        // Rank 0 hosts the store, and may be the rank that ended.
        let _ = self.store.set_silence_timeout(self.error_exchange_timeout());
        self.set_rank_key("end", "");
        let (deadline, mut silent) = (Instant::now() + self.error_exchange_timeout(), vec![]);
        let mut failed = None;
        for peer in (0..self.ranks.world_size).filter(|&peer| peer != self.ranks.rank) {
            match self.read_peer_key("end", peer, deadline) {
                None => silent.push(peer),
                Some(cause) if !cause.is_empty() => {
                    failed.get_or_insert((peer, cause));
                }
                Some(_) => {}
            }
        }
        self.set_rank_key("bye", "");
        if self.ranks.rank == 0 && !self.ranks.is_hosted {
            self.peers_without_key("bye", self.error_exchange_timeout());
        }
        match failed {
            Some((peer, cause)) => PeerStatus::Failed(peer, cause),
            None if silent.is_empty() => PeerStatus::Alive,
            None => PeerStatus::Silent(silent),
        }
    }

    /// Sets a key of this rank. Errors are ignored: if the store is gone, its rank is reported as
    /// silent.
    fn set_rank_key(&self, key: &str, words: &str) {
        let _ = self.store.set(&format!("{key}/{}", self.ranks.rank), words.as_bytes());
    }

    fn read_peer_key(&self, key: &str, peer: usize, deadline: Instant) -> Option<String> {
        let left = deadline.saturating_duration_since(Instant::now()).max(KEY_TIMEOUT);
        let words = self.store.get(&format!("{key}/{peer}"), left).ok()?;
        Some(String::from_utf8_lossy(&words).into_owned())
    }

    /// Returns the other ranks that do not set their key in time.
    fn peers_without_key(&self, key: &str, timeout: Duration) -> Vec<usize> {
        let deadline = Instant::now() + timeout;
        (0..self.ranks.world_size)
            .filter(|&peer| peer != self.ranks.rank && self.read_peer_key(key, peer, deadline).is_none())
            .collect()
    }
}

fn key_prefix(job: &str, attempt: usize) -> String {
    format!("{job}/attempt_{attempt}")
}

/// The first line of a c10d error without its source location. The other lines are stack frames.
pub(crate) fn first_error_line(problem: &str) -> String {
    let line = problem.lines().next().unwrap_or_default();
    let said = line.strip_prefix('[').and_then(|line| line.split_once("] "));
    said.filter(|(place, _)| place.contains(".cc:")).map_or(line, |(_, said)| said).trim().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_c10d_says_is_told_in_a_line() {
        assert_eq!(first_error_line("[/a/b.cc:78] Timed out\nframe #0"), "Timed out");
        assert_eq!(first_error_line("[1] closed"), "[1] closed");
        assert_eq!(first_error_line(""), "");
    }
}
