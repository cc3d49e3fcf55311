//! Catching out-of-memory panics.

use deepspec_core::cli::catch_panic_if;

/// Parts of out-of-memory messages: the CUDA allocator's, cuBLAS's, and two of libtorch's CPU
/// allocators.
const OUT_OF_MEMORY_MESSAGES: [&str; 4] =
    ["out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", "no memory for"];

/// Runs tensor code.
///
/// # Errors
/// The allocator's message if memory ran out. Any other panic propagates.
pub fn catch_out_of_memory<R>(work: impl FnOnce() -> R) -> Result<R, String> {
    catch_panic_if(|message| OUT_OF_MEMORY_MESSAGES.iter().any(|phrase| message.contains(phrase)), work)
}
