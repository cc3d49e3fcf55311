//! Errors of process groups.

use std::time::Duration;

/// Why ranks cannot connect, or why a collective failed.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum GroupError {
    /// The rendezvous store cannot be reached or opened.
    #[error("rank {rank} of {world_size}: no rendezvous at {host}:{port} within {} s: {problem}", timeout.as_secs())]
    Rendezvous {
        /// Rank of this process.
        rank: usize,
        /// Number of processes.
        world_size: usize,
        /// Host of the store.
        host: String,
        /// Port of the store.
        port: u16,
        /// Timeout of the attempt.
        timeout: Duration,
        /// Message of c10d.
        problem: String,
    },
    /// Some ranks did not connect.
    #[error("rank {rank} of {world_size}: {} did not come within {} s", list_ranks(missing), timeout.as_secs())]
    Missing {
        /// Rank of this process.
        rank: usize,
        /// Number of processes.
        world_size: usize,
        /// Ranks that did not connect.
        missing: Vec<usize>,
        /// Timeout of the wait.
        timeout: Duration,
    },
    /// Several GPUs need NCCL, which the build lacks.
    #[error(
        "processes on GPUs need NCCL: {0}; install its headers (scripts/setup.sh does on machines with a GPU) and build again, or take the slow way through host memory, --set train.backend=gloo"
    )]
    NoNccl(String),
    /// NCCL works on GPUs only.
    #[error("train.backend: nccl carries tensors among GPUs only; with --device cpu use auto or gloo")]
    NcclOnCpu,
    /// Another rank failed and reported its error.
    #[error("rank {rank} stopped in {operation}, because rank {peer} failed: {cause}")]
    Peer {
        /// Rank of this process.
        rank: usize,
        /// The operation that was interrupted.
        operation: &'static str,
        /// The rank that failed.
        peer: usize,
        /// The error of that rank.
        cause: String,
    },
    /// Another rank died or hangs without reporting an error.
    #[error("rank {rank} stopped in {operation} (given up within {} s): no word from {}, which died or hangs: {problem}", timeout.as_secs(), list_ranks(silent))]
    Silent {
        /// Rank of this process.
        rank: usize,
        /// The operation that was interrupted.
        operation: &'static str,
        /// Timeout of the operation.
        timeout: Duration,
        /// Ranks that did not answer.
        silent: Vec<usize>,
        /// Message of c10d.
        problem: String,
    },
    /// A collective failed although all ranks are alive.
    #[error("rank {rank}: {operation} failed: {problem}")]
    Collective {
        /// Rank of this process.
        rank: usize,
        /// The operation that failed.
        operation: &'static str,
        /// Message of c10d.
        problem: String,
    },
}

fn list_ranks(list: &[usize]) -> String {
    let names: Vec<String> = list.iter().map(ToString::to_string).collect();
    format!("rank{} {}", if list.len() == 1 { "" } else { "s" }, names.join(", "))
}
