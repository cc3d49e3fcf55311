//! What can go wrong among processes.

use std::time::Duration;

/// Why processes cannot work together, or no longer.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum GroupError {
    /// The meeting place cannot be reached or held.
    #[error("rank {rank} of {world_size}: no rendezvous at {host}:{port} within {} s: {problem}", timeout.as_secs())]
    Rendezvous {
        /// This rank.
        rank: usize,
        /// All ranks.
        world_size: usize,
        /// Where they were to meet.
        host: String,
        /// And at which port.
        port: u16,
        /// How long it was tried.
        timeout: Duration,
        /// What c10d said.
        problem: String,
    },
    /// Some ranks never came.
    #[error("rank {rank} of {world_size}: {} did not come within {} s", ranks(missing), timeout.as_secs())]
    Missing {
        /// This rank.
        rank: usize,
        /// All ranks.
        world_size: usize,
        /// Those that did not come.
        missing: Vec<usize>,
        /// How long they were waited for.
        timeout: Duration,
    },
    /// GPUs need NCCL.
    #[error(
        "processes on GPUs need NCCL: {0}; install its headers (scripts/setup.sh does on machines with a GPU) and build again, or take the slow way through host memory, --set train.backend=gloo"
    )]
    NoNccl(String),
    /// NCCL knows GPUs only.
    #[error("train.backend: nccl carries tensors among GPUs only; with --device cpu use auto or gloo")]
    NcclOnCpu,
    /// Another rank failed and said why.
    #[error("rank {rank} stopped in {operation}, because rank {peer} failed: {cause}")]
    Peer {
        /// This rank.
        rank: usize,
        /// What it was doing.
        operation: &'static str,
        /// The rank that failed.
        peer: usize,
        /// Its error.
        cause: String,
    },
    /// Another rank is gone or hangs, without a word.
    #[error("rank {rank} stopped in {operation} (given up within {} s): no word from {}, which died or hangs: {problem}", timeout.as_secs(), ranks(silent))]
    Silent {
        /// This rank.
        rank: usize,
        /// What it was doing.
        operation: &'static str,
        /// Within which it was to be given up.
        timeout: Duration,
        /// Ranks that did not answer.
        silent: Vec<usize>,
        /// What c10d said.
        problem: String,
    },
    /// A collective failed although all ranks are there.
    #[error("rank {rank}: {operation} failed: {problem}")]
    Collective {
        /// This rank.
        rank: usize,
        /// What it was doing.
        operation: &'static str,
        /// What c10d said.
        problem: String,
    },
}

fn ranks(list: &[usize]) -> String {
    let names: Vec<String> = list.iter().map(ToString::to_string).collect();
    format!("rank{} {}", if list.len() == 1 { "" } else { "s" }, names.join(", "))
}
