//! What the process holds, as the system counts it.

use std::fs;

/// Bytes resident at most so far, or since [`restart_peak`]; none where the system does not say.
pub fn peak() -> Option<u64> {
    field("VmHWM:")
}

fn field(name: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes << 10)
}

/// Bytes resident now.
pub fn resident() -> Option<u64> {
    field("VmRSS:")
}

/// Lets [`peak`] count from what is resident now. A system that refuses keeps the older peak.
pub fn restart_peak() {
    // 5 is the kernel's word for it (proc_pid_clear_refs(5)).
    let _ = fs::write("/proc/self/clear_refs", "5");
}
