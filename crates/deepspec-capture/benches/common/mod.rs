//! Shared measurements of both benches.

use std::{fs, thread};

/// CPU seconds of this thread. Without disk waits, this is the time on a quiet machine, whatever
/// else runs.
pub fn cpu_seconds() -> f64 {
    // The kernel updates the count at a timer tick, which is too rare, or when a thread yields.
    thread::yield_now();
    let text = fs::read_to_string("/proc/thread-self/schedstat").expect("Linux counts the time of threads");
    let nanoseconds: f64 = text.split(' ').next().and_then(|text| text.parse().ok()).expect("a number");
    nanoseconds / 1e9
}

/// The machine's load average, which is printed with every result.
pub fn load() -> String {
    fs::read_to_string("/proc/loadavg").unwrap_or_default().split(' ').next().unwrap_or_default().to_string()
}
