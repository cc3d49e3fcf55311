//! What both benches measure with.

use std::{fs, thread};

/// Processor seconds that this thread has had. Where nothing waits for a disk, this is the time on a quiet machine, whatever
/// else runs.
pub fn cpu_seconds() -> f64 {
    // The kernel brings the count up to date at a tick, which is too seldom, or when a thread gives way.
    thread::yield_now();
    let text = fs::read_to_string("/proc/thread-self/schedstat").expect("Linux counts the time of threads");
    let nanoseconds: f64 = text.split(' ').next().and_then(|text| text.parse().ok()).expect("a number");
    nanoseconds / 1e9
}

/// How busy the machine is, to stand beside every figure.
pub fn load() -> String {
    fs::read_to_string("/proc/loadavg").unwrap_or_default().split(' ').next().unwrap_or_default().to_string()
}
