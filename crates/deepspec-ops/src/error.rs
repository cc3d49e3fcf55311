//! Why a device cannot be used.

/// Why a device cannot be used.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum DeviceError {
    /// Not a device name.
    #[error("`{0}` is no device; use auto, cpu, cuda, cuda:N or cuda:{{local_rank+N}}")]
    Unknown(String),
    /// CUDA was requested but is not available.
    #[error("no CUDA device: {0}; use --device cpu")]
    NoCuda(String),
    /// The index is too high.
    #[error("cuda:{index} does not exist; this machine has {count} CUDA devices")]
    NoSuchIndex {
        /// Requested index.
        index: usize,
        /// Devices present.
        count: usize,
    },
    /// More processes than GPUs.
    #[error(
        "process {local_rank} of this machine (from 0) finds no GPU of its own among {count}; start as many processes as GPUs, or let them share with --set train.backend=gloo, which is slow"
    )]
    NoneLeft {
        /// The process.
        local_rank: usize,
        /// Devices present.
        count: usize,
    },
    /// One of several processes would run on the CPU of a machine with GPUs.
    #[error(
        "{0}; processes that work together do not fall back to the CPU by themselves: say --device cpu if that is meant"
    )]
    Unused(String),
}
