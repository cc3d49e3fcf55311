//! The meeting place of a job's ranks: a key-value store that also carries last words.

use std::net::{IpAddr, ToSocketAddrs, UdpSocket};
use std::time::{Duration, Instant};

use deepspec_core::env::Ranks;

use crate::dist::GroupError;
use deepspec_ops::c10d::Store;

/// The longest that a rank which has lost others waits for their last words.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// What is waited for what should be there already.
const MOMENT: Duration = Duration::from_millis(10);
/// A job of our own launcher has a port of its own, and one try.
const JOB: &str = "";
const ATTEMPT: usize = 0;
/// Where packets to a documentation address would leave (RFC 5737); none is sent.
const ELSEWHERE: (&str, u16) = ("192.0.2.1", 9);

/// A meeting place that is held for child processes.
pub struct Host {
    store: Store,
    port: u16,
}

impl Host {
    /// Holds a meeting place at a free local port until it is dropped.
    ///
    /// # Errors
    /// [`GroupError::Rendezvous`] if no port can be bound.
    pub fn open(world_size: usize, timeout: Duration) -> Result<Self, GroupError> {
        let (host, port) = (Self::ADDRESS.to_string(), 0);
        let (store, port) =
            Store::open(&host, port, true, timeout, &prefix(JOB, ATTEMPT)).map_err(|problem| {
                GroupError::Rendezvous {
                    rank: 0,
                    world_size,
                    host,
                    port,
                    timeout,
                    problem: one_line(&problem),
                }
            })?;
        Ok(Self { store, port })
    }

    /// Whether a rank that has ended with an error only did so because others did.
    pub fn is_follower(&self, rank: usize) -> bool {
        self.store.get(&format!("end/{rank}"), MOMENT).is_ok_and(|words| words.is_empty())
    }

    /// The place of one of `world_size` child processes of this machine.
    pub fn place(&self, rank: usize, world_size: usize) -> Ranks {
        Ranks {
            rank,
            world_size,
            local_rank: rank,
            host: Self::ADDRESS.into(),
            port: self.port,
            is_hosted: true,
            job: JOB.into(),
            attempt: ATTEMPT,
        }
    }

    const ADDRESS: &str = "127.0.0.1";
}

/// A rank at the meeting place.
pub(crate) struct Rendezvous {
    pub store: Store,
    ranks: Ranks,
    timeout: Duration,
}

/// What became of the other ranks.
pub(crate) enum PeerStatus {
    /// The first that failed, and its error.
    Failed(usize, String),
    /// Those that did not answer.
    Silent(Vec<usize>),
    /// All were there.
    Alive,
}

impl Rendezvous {
    /// Waits until all ranks have come.
    pub fn open(ranks: &Ranks, timeout: Duration) -> Result<Self, GroupError> {
        let begun = Instant::now();
        let (rank, world_size) = (ranks.rank, ranks.world_size);
        let is_host = rank == 0 && !ranks.is_hosted;
        let prefix = prefix(&ranks.job, ranks.attempt);
        let (store, _) =
            Store::open(&ranks.host, ranks.port, is_host, timeout, &prefix).map_err(|problem| {
                GroupError::Rendezvous {
                    rank,
                    world_size,
                    host: ranks.host.clone(),
                    port: ranks.port,
                    timeout,
                    problem: one_line(&problem),
                }
            })?;
        let meeting = Self { store, ranks: ranks.clone(), timeout };
        meeting.say("here", "");
        let missing = meeting.missing("here", timeout.saturating_sub(begun.elapsed()));
        if missing.is_empty() {
            Ok(meeting)
        } else {
            Err(GroupError::Missing { rank, world_size, missing, timeout })
        }
    }

    /// The longest that a collective may take: after it, silent ranks are asked for last words, and rank 0 stays for those of others. All of
    /// it takes the job's timeout, and a moment for each silent rank.
    pub fn patience(&self) -> Duration {
        self.timeout - 2 * self.last_words()
    }

    fn last_words(&self) -> Duration {
        LAST_WORDS.min(self.timeout / 6)
    }

    /// This machine's address on the way to the others.
    pub fn address(&self) -> String {
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
            // A host name that means the loopback device on its own machine is another address elsewhere.
            Some(ip) if ip.is_loopback() && !is_local => way(ELSEWHERE).or(Some(ip)),
            found => found,
        };
        address.map_or_else(|| Host::ADDRESS.into(), |ip| ip.to_string())
    }

    /// Leaves the error that ends this rank for the others.
    pub fn fail(&self, cause: &str) {
        self.say("end", cause);
        self.say("bye", "");
        if self.ranks.rank == 0 && !self.ranks.is_hosted {
            // The words go with this process: stay until the others have read them.
            self.missing("bye", self.last_words());
        }
    }

    /// Whether any other rank has said that it ends.
    pub fn has_ended(&self) -> bool {
        (0..self.ranks.world_size)
            .any(|peer| peer != self.ranks.rank && self.heard("end", peer, Instant::now()).is_some())
    }

    /// Asks what became of the others when a collective has failed.
    pub fn ask(&self) -> PeerStatus {
        // Rank 0's machine may be what is missing.
        let _ = self.store.notice_silence(self.last_words());
        self.say("end", "");
        let (deadline, mut silent) = (Instant::now() + self.last_words(), vec![]);
        let mut failed = None;
        for peer in (0..self.ranks.world_size).filter(|&peer| peer != self.ranks.rank) {
            match self.heard("end", peer, deadline) {
                None => silent.push(peer),
                Some(cause) if !cause.is_empty() => {
                    failed.get_or_insert((peer, cause));
                }
                Some(_) => {}
            }
        }
        self.say("bye", "");
        if self.ranks.rank == 0 && !self.ranks.is_hosted {
            self.missing("bye", self.last_words());
        }
        match failed {
            Some((peer, cause)) => PeerStatus::Failed(peer, cause),
            None if silent.is_empty() => PeerStatus::Alive,
            None => PeerStatus::Silent(silent),
        }
    }

    /// Sets a key of this rank. Where the store is gone, its holder is missed instead.
    fn say(&self, key: &str, words: &str) {
        let _ = self.store.set(&format!("{key}/{}", self.ranks.rank), words.as_bytes());
    }

    fn heard(&self, key: &str, peer: usize, deadline: Instant) -> Option<String> {
        let left = deadline.saturating_duration_since(Instant::now()).max(MOMENT);
        let words = self.store.get(&format!("{key}/{peer}"), left).ok()?;
        Some(String::from_utf8_lossy(&words).into_owned())
    }

    /// The other ranks that do not set their key in time.
    fn missing(&self, key: &str, timeout: Duration) -> Vec<usize> {
        let deadline = Instant::now() + timeout;
        (0..self.ranks.world_size)
            .filter(|&peer| peer != self.ranks.rank && self.heard(key, peer, deadline).is_none())
            .collect()
    }
}

fn prefix(job: &str, attempt: usize) -> String {
    format!("{job}/attempt_{attempt}")
}

/// The first line of what c10d says, without the place in its code; the rest are addresses of it.
pub(crate) fn one_line(problem: &str) -> String {
    let line = problem.lines().next().unwrap_or_default();
    let said = line.strip_prefix('[').and_then(|line| line.split_once("] "));
    said.filter(|(place, _)| place.contains(".cc:")).map_or(line, |(_, said)| said).trim().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_c10d_says_is_told_in_a_line() {
        assert_eq!(one_line("[/a/b.cc:78] Timed out\nframe #0"), "Timed out");
        assert_eq!(one_line("[1] closed"), "[1] closed");
        assert_eq!(one_line(""), "");
    }
}
