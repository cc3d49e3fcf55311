//! Process settings that the programs change themselves: the allocator, OpenMP's idle threads and MKL's choice of
//! routines. `docs/runtime.md` describes each and how to disable it.

/// The environment variable that selects the allocator of CPU tensors; `libc` keeps glibc's defaults.
const ALLOCATOR_VAR: &str = "DEEPSPEC_ALLOCATOR";

/// Sets the allocator. Links the code that shortens the spinning of OpenMP threads, and MKL's processor check. `main`
/// calls this first.
///
/// With `DEEPSPEC_ALLOCATOR=libc`, CPU tensors use the C library's allocator with its defaults. The default is
/// `pool`; other values cause a message on standard error.
pub fn init_runtime() {
    link_omp_wait();
    match std::env::var(ALLOCATOR_VAR).as_deref() {
        Ok("libc") => return,
        Ok("pool" | "") | Err(_) => {}
        Ok(other) => {
            eprintln!("{ALLOCATOR_VAR}={other} is not an allocator: use pool or libc. It is pool now.")
        }
    }
    keep_freed_memory();
    pool_large_blocks();
}

/// Makes the C allocator keep freed memory instead of returning it to the system. libtorch's smaller CPU tensors use
/// that allocator.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn keep_freed_memory() {
    /// The largest threshold that glibc accepts on 64-bit machines.
    const MMAP_THRESHOLD: libc::c_int = 32 << 20;
    const TOP_PAD: libc::c_int = 64 << 20;
    // SAFETY: mallopt only sets parameters of the allocator, which it locks. It rejects values out of range.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD);
        libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
        libc::mallopt(libc::M_TOP_PAD, TOP_PAD);
    }
}

/// Other allocators have no such thresholds.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn keep_freed_memory() {}

/// Links `cpp/waiting.cpp`, whose code has run before `main`.
#[cfg(target_os = "linux")]
fn link_omp_wait() {
    unsafe extern "C" {
        fn ds_wait_asleep();
    }
    // SAFETY: the function does nothing.
    unsafe { ds_wait_asleep() };
}

/// Does nothing: other systems run no code before a program's libraries.
#[cfg(not(target_os = "linux"))]
fn link_omp_wait() {}

/// Allocates libtorch's large CPU tensors from a pool, in which freed blocks leave no gaps.
#[cfg(target_os = "linux")]
fn pool_large_blocks() {
    unsafe extern "C" {
        fn ds_pool_large_blocks();
    }
    // SAFETY: the shim sets a pointer in libtorch's allocator table before any other thread reads it. The allocator
    // lives as long as the process, and each tensor keeps its own deleter.
    unsafe { ds_pool_large_blocks() };
}

/// Does nothing: other systems cannot resize a block in place.
#[cfg(not(target_os = "linux"))]
fn pool_large_blocks() {}

#[cfg(all(test, target_os = "linux", target_arch = "x86_64"))]
mod tests {
    /// `mkl_serv_intel_cpu_true`, by which MKL chooses its code, is the function of this program and not MKL's.
    #[test]
    fn mkl_calls_our_cpu_check() {
        unsafe extern "C" {
            fn mkl_serv_intel_cpu_true() -> libc::c_int;
        }
        // SAFETY: dlsym reads a C string. RTLD_DEFAULT finds the symbol that every library gets.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"mkl_serv_intel_cpu_true".as_ptr()) };
        assert_eq!(found.addr(), mkl_serv_intel_cpu_true as *const () as usize);
        // SAFETY: the function has no arguments and only queries the processor.
        let answer = unsafe { mkl_serv_intel_cpu_true() };
        let can = std::arch::is_x86_feature_detected!("avx512f");
        assert!(answer == 1 || !can || std::env::var_os("DEEPSPEC_MKL_BY_MAKER").is_some());
    }
}
