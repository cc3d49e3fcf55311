//! Work that may find no memory.

use deepspec_core::cli::contain_if;

/// How libtorch's allocators say that there is no memory: on a GPU, cuBLAS for its workspace, and two of them on the CPU.
const NO_MEMORY: [&str; 4] =
    ["out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", "no memory for"];

/// Runs work on tensors. Where it finds no memory, the allocator's words; any other panic goes on.
pub(super) fn guarded<R>(work: impl FnOnce() -> R) -> Result<R, String> {
    contain_if(|words| NO_MEMORY.iter().any(|phrase| words.contains(phrase)), work)
}
