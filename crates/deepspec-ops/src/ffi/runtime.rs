//! Settings of the process that the programs change from inside: the allocator, OpenMP's idle threads and MKL's choice of
//! routines. `docs/runtime.md` describes each and how to switch it off.

/// The environment variable that names the allocator of CPU tensors; `libc` keeps glibc's own behaviour.
const ALLOCATOR: &str = "DEEPSPEC_ALLOCATOR";

/// Sets the allocator, links the code that shortens the spinning of OpenMP's threads, and links the answer to MKL's question for the
/// processor. `main` calls it first.
///
/// With `DEEPSPEC_ALLOCATOR=libc` CPU tensors come from the C library's allocator with its default settings. Other values than
/// `pool`, the default, are reported on standard error.
pub fn init_runtime() {
    link_omp_wait();
    match std::env::var(ALLOCATOR).as_deref() {
        Ok("libc") => return,
        Ok("pool" | "") | Err(_) => {}
        Ok(other) => eprintln!("{ALLOCATOR}={other} is not an allocator: use pool or libc. It is pool now."),
    }
    keep_freed_memory();
    pool_large_blocks();
}

/// Lets the C allocator keep freed memory instead of returning it to the system. libtorch takes its smaller CPU tensors from there.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn keep_freed_memory() {
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
fn keep_freed_memory() {}

/// Links `cpp/waiting.cpp`, which has run before `main`.
#[cfg(target_os = "linux")]
fn link_omp_wait() {
    unsafe extern "C" {
        fn ds_wait_asleep();
    }
    // SAFETY: the function does nothing.
    unsafe { ds_wait_asleep() };
}

/// Other systems run no code before a program's libraries.
#[cfg(not(target_os = "linux"))]
fn link_omp_wait() {}

/// Gives libtorch's large CPU tensors a pool of their own, in which freed blocks leave no gaps.
#[cfg(target_os = "linux")]
fn pool_large_blocks() {
    unsafe extern "C" {
        fn ds_pool_large_blocks();
    }
    // SAFETY: the shim sets a pointer in libtorch's table of allocators before any other thread reads it. The allocator lives as
    // long as the process, and tensors keep the deleter that they were made with.
    unsafe { ds_pool_large_blocks() };
}

/// Other systems cannot resize a block in place.
#[cfg(not(target_os = "linux"))]
fn pool_large_blocks() {}

#[cfg(all(test, target_os = "linux", target_arch = "x86_64"))]
mod tests {
    /// This program answers MKL's question for the processor, not MKL itself.
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
