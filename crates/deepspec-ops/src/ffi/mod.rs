//! The only module of this crate with `unsafe` code.
#![expect(
    unsafe_code,
    reason = "foreign code: the dynamic loader, the C allocator, signals, and the shim over c10d and libtorch"
)]

#[cfg_attr(not(feature = "kernels"), allow(dead_code, reason = "only kernels read these arguments"))]
mod args;
pub mod c10d;
mod filling;
mod gradient;
#[cfg(feature = "kernels")]
mod kernels;
#[cfg(not(feature = "kernels"))]
#[path = "without_kernels.rs"]
mod kernels;
mod memory;
mod profile;
mod runtime;
mod stream;

use std::error::Error;
use std::ffi::c_void;
use std::io;
use std::process::{Child, Command};

use libloading::Library;
use tch::Tensor;

pub use args::{
    AdamWSettings, AdamWTensors, AttentionPart, BlockMasks, KeyValues, KvChunk, KvWindow, LogitRows,
    MAX_DECODE_ROWS, ProjectedHeads, QkvInput, RmsNormParams, RowDistances, SequenceBlocks, TargetProbs,
    TiledBlocks,
};
pub use filling::CpuTensorBuilder;
pub use gradient::take_gradient;
pub use kernels::*;
pub use memory::{DeviceMemory, device_memory, gpu_free_memory, has_bfloat16, reset_device_peak};
pub use profile::{ProfileRecording, Range, range};
pub use runtime::init_runtime;
pub use stream::{CudaEvent, CudaStream, StreamGuard, empty_pinned};

/// libtorch's CUDA library. The binaries link only libtorch_cpu, so CUDA is unavailable until this library is loaded.
const CUDA_LIBRARY: &str = "libtorch_cuda.so";

/// Loads libtorch's CUDA library for the rest of the process.
///
/// # Errors
/// The dynamic loader's message.
pub fn load_cuda() -> Result<(), String> {
    // SAFETY: the run path of the linked libtorch_cpu finds the library, and its initialisers only register kernels.
    // The library is never closed, so no registered pointer dangles.
    let opened = unsafe { Library::new(CUDA_LIBRARY) };
    // The error says only that loading failed; its source names the cause.
    let cause =
        |error: libloading::Error| error.source().map_or_else(|| error.to_string(), ToString::to_string);
    let library = opened.map_err(cause)?;
    std::mem::forget(library);
    Ok(())
}

/// Makes a later `exit` end the process at once, with code 1. Otherwise `exit` can hang, because it unloads libraries
/// while NCCL threads still run their code.
pub fn skip_exit_cleanup() {
    extern "C" fn leave() {
        // SAFETY: `_exit` takes a plain number and does not return.
        unsafe { libc::_exit(1) }
    }
    // SAFETY: the function lives as long as the program and never unwinds. If the handler table is full, `exit` works
    // as usual.
    unsafe { libc::atexit(leave) };
}

/// Sends a signal to a child process that nobody has waited for.
pub fn send_signal(child: &Child, signal: i32) -> io::Result<()> {
    // SAFETY: kill takes plain numbers. Only a wait, which needs `child` mutably, frees the PID for another process.
    let sent = unsafe { libc::kill(child.id() as libc::pid_t, signal) };
    if sent == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes the system kill the command's process when the thread that starts it ends. Linux only.
#[cfg(target_os = "linux")]
pub fn die_with_parent(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    let ask = || {
        // SAFETY: prctl with this option takes plain numbers.
        let asked = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong) };
        if asked == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
    unsafe { command.pre_exec(ask) };
}

/// Does nothing, because only Linux supports this request.
#[cfg(not(target_os = "linux"))]
pub fn die_with_parent(_command: &mut Command) {}

/// # Safety
/// `made` is null or a tensor from `new` that no other code owns.
unsafe fn tensor_from_raw(made: *mut c_void) -> Option<Tensor> {
    // SAFETY: the function's contract makes this tensor ours; tch frees it by `delete`.
    (!made.is_null()).then(|| unsafe { Tensor::from_ptr(made.cast()) })
}
