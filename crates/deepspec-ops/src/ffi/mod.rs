//! The one room of this crate with `unsafe` in it.
#![expect(
    unsafe_code,
    reason = "foreign code: the dynamic loader, the C allocator, signals, and the shim over c10d and libtorch"
)]

mod adamw;
mod attention;
pub mod c10d;
mod few_rows;
mod filling;
mod history;
mod losses;
mod matrices;
mod memory;
mod products;
mod profile;
mod rows;
mod stream;

use std::error::Error;
use std::io;
use std::process::{Child, Command};

use libloading::Library;

pub use adamw::{AdamWSettings, AdamWTensors, adamw, square_sum, take_gradient};
pub use attention::{
    AttentionPart, KeyValues, SequenceBlocks, TiledAttention, TiledBlocks, attend_by_block, attends_by_block,
    attends_in_tiles, block_attention,
};
pub use few_rows::{FEW_ROWS, few_rows_attention, few_rows_gated_product, few_rows_product, has_few_rows};
pub use filling::UninitTensor;
pub use history::{HistoryChunk, KvRows, KvWindow, ProjectedHeads, has_history_attention, history_attention};
pub use losses::{
    LogitRows, RowsMeasured, TargetProbs, add_to_rows, measure_rows, slope_rows, softmax_targets, sum_rows,
};
pub use matrices::{multiply, projection};
pub use memory::{DeviceMemory, device_memory, gpu_free_memory, has_bfloat16, restart_device_peak};
pub use products::{PackedWeight, packed_gated_product, packed_product};
pub use profile::{Profile, Range, range};
pub use rows::{RmsNormParams, argmax, distributions, draw, gated_product, rms_norm, rotate, silu_times};
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

/// Lets the C allocator, which libtorch's smaller CPU tensors come from, keep freed memory instead of returning it to the system.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn keep_freed_memory() {
    /// The largest threshold that glibc takes on 64-bit machines.
    const MMAP_THRESHOLD: libc::c_int = 32 << 20;
    const TOP_PAD: libc::c_int = 64 << 20;
    // SAFETY: mallopt only sets parameters of the allocator, which it locks; values out of range are refused, not undefined.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD);
        libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
        libc::mallopt(libc::M_TOP_PAD, TOP_PAD);
    }
}

/// Other allocators have no such thresholds.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn keep_freed_memory() {}

/// Takes into the program what lets OpenMP's threads wait asleep; it has run before `main`.
#[cfg(target_os = "linux")]
pub fn wait_asleep() {
    unsafe extern "C" {
        fn ds_wait_asleep();
    }
    // SAFETY: it does nothing.
    unsafe { ds_wait_asleep() };
}

/// Other systems have no such place before a program's libraries.
#[cfg(not(target_os = "linux"))]
pub fn wait_asleep() {}

/// Gives libtorch's large CPU tensors memory of their own, in which freed blocks leave no gaps.
#[cfg(target_os = "linux")]
pub fn pool_large_blocks() {
    unsafe extern "C" {
        fn ds_pool_large_blocks();
    }
    // SAFETY: the shim sets a pointer in libtorch's table of allocators, which nobody reads yet: this comes first in `main`.
    // The allocator that it installs lives for ever, and tensors keep the deleter that they were made with.
    unsafe { ds_pool_large_blocks() };
}

/// Other systems cannot resize a block in place.
#[cfg(not(target_os = "linux"))]
pub fn pool_large_blocks() {}

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

#[cfg(all(test, target_os = "linux", target_arch = "x86_64"))]
mod tests {
    /// MKL's question is answered by this program and not by MKL itself.
    #[test]
    fn mkl_asks_this_program_what_the_processor_can_do() {
        unsafe extern "C" {
            fn mkl_serv_intel_cpu_true() -> libc::c_int;
        }
        // SAFETY: dlsym reads a C string; with RTLD_DEFAULT it finds what the loader gives everyone who asks for the name.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"mkl_serv_intel_cpu_true".as_ptr()) };
        assert_eq!(found.addr(), mkl_serv_intel_cpu_true as *const () as usize);
        // SAFETY: it takes nothing and only asks the processor.
        let answer = unsafe { mkl_serv_intel_cpu_true() };
        let can = std::arch::is_x86_feature_detected!("avx512f");
        assert!(answer == 1 || !can || std::env::var_os("DEEPSPEC_MKL_BY_MAKER").is_some());
    }
}
