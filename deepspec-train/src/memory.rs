//! Memory of the process, from /proc.

use std::fs;

/// Peak resident bytes so far, or since [`restart_peak`]; None if the system does not report them.
pub fn peak() -> Option<u64> {
    field("VmHWM:")
}

fn field(name: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes << 10)
}

/// Resident bytes.
pub fn resident() -> Option<u64> {
    field("VmRSS:")
}

/// Resets [`peak`] to the resident bytes. If the system refuses, the older peak stays.
pub fn restart_peak() {
    // 5 resets the peak resident size; see proc_pid_clear_refs(5).
    let _ = fs::write("/proc/self/clear_refs", "5");
}
