//! The one room of this crate with `unsafe` in it.
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
    AdamWSettings, AdamWTensors, AttentionPart, KeyValues, KvChunk, KvRows, KvWindow, LogitRows,
    MAX_DECODE_ROWS, ProjectedHeads, RmsNormParams, RowsMeasured, SequenceBlocks, TargetProbs, TiledBlocks,
};
pub use filling::UninitTensor;
pub use gradient::take_gradient;
pub use kernels::*;
pub use memory::{DeviceMemory, device_memory, gpu_free_memory, has_bfloat16, restart_device_peak};
pub use profile::{Profile, Range, range};
pub use runtime::init_runtime;
pub use stream::{CudaEvent, CudaStream, StreamGuard, pinned};

/// libtorch's CUDA part. Our binaries need only libtorch_cpu, so CUDA stays invisible until this is opened.
const CUDA_LIBRARY: &str = "libtorch_cuda.so";

/// Opens libtorch's CUDA part for the rest of the process.
///
/// # Errors
/// What the dynamic loader says.
pub fn load_cuda() -> Result<(), String> {
    // SAFETY: the library is the sibling of the libtorch_cpu that is linked already, found by the same run path; its initialisers
    // only register kernels. It is never closed, so nothing it registered can dangle.
    let opened = unsafe { Library::new(CUDA_LIBRARY) };
    // The error itself says only that it failed, its source what is missing.
    let told =
        |error: libloading::Error| error.source().map_or_else(|| error.to_string(), ToString::to_string);
    let library = opened.map_err(told)?;
    std::mem::forget(library);
    Ok(())
}

/// Lets the process go at once when it is about to exit, with code 1: a thread that is held in foreign code for good would otherwise
/// see the libraries under it taken down, and may keep the process from ending.
pub fn leave_at_exit() {
    extern "C" fn leave() {
        // SAFETY: it takes a plain number and does not return.
        unsafe { libc::_exit(1) }
    }
    // SAFETY: the function lives as long as the program and unwinds never. Where the table is full, the exit is an ordinary one.
    unsafe { libc::atexit(leave) };
}

/// Sends a signal to a child process.
pub fn signal(child: &Child, signal: i32) -> io::Result<()> {
    // SAFETY: kill takes plain numbers. The number still means this child: only waiting for it, which needs `child` mutably,
    // can free it for another process, and one that was waited for already is not signalled.
    let sent = unsafe { libc::kill(child.id() as libc::pid_t, signal) };
    if sent == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Lets the command's process be killed when the thread that starts it ends, whatever ends it. Only Linux can.
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

/// Other systems have no such request.
#[cfg(not(target_os = "linux"))]
pub fn die_with_parent(_command: &mut Command) {}

/// # Safety
/// `made` is null or a tensor from `new` that belongs to nobody else.
unsafe fn owned(made: *mut c_void) -> Option<Tensor> {
    // SAFETY: by this function's own contract; tch frees it by `delete`.
    (!made.is_null()).then(|| unsafe { Tensor::from_ptr(made.cast()) })
}
