//! Memory of the process, from /proc.

use std::fs;

/// Peak resident bytes so far, or since [`reset_peak_rss`]; None if the system does not report them.
pub fn peak_rss_bytes() -> Option<u64> {
    proc_status_bytes("VmHWM:")
}

fn proc_status_bytes(name: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes << 10)
}

/// Resident bytes.
pub fn rss_bytes() -> Option<u64> {
    proc_status_bytes("VmRSS:")
}

/// Resets [`peak_rss_bytes`] to the resident bytes. If the system refuses, the older peak stays.
pub fn reset_peak_rss() {
    // 5 resets the peak resident size; see proc_pid_clear_refs(5).
    let _ = fs::write("/proc/self/clear_refs", "5");
}
