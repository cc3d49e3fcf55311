//! What the process holds, as the system counts it.

use std::fs;

use tch::{Device, Kind, Tensor};

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

/// Bytes of the program and its libraries: what is resident before anything of a run is there, but with the code that products of
/// this kind and their gradients need. More of it comes with every kernel that a run uses.
pub fn program(kind: Kind) -> Option<u64> {
    let ones = |rows: i64| Tensor::ones([rows, 64], (kind, Device::Cpu));
    let weight = ones(64).set_requires_grad(true);
    ones(32).mm(&weight).softmax(-1, Kind::Float).sum(Kind::Float).backward();
    resident()
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
