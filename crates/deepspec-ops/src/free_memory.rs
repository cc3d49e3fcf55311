//! Free memory of a device.

use std::fs;
use std::path::{Path, PathBuf};

use tch::Device;

use crate::ffi;

/// Mount point of cgroup v2.
const CGROUP_MOUNT: &str = "/sys/fs/cgroup";

/// Bytes that tensors on `device` can still use. On the CPU, the minimum over the system and the process's control
/// groups. None if unknown.
pub fn free_memory(device: Device) -> Option<u64> {
    match device {
        Device::Cuda(index) => ffi::gpu_free_memory(index),
        Device::Cpu => host_available_bytes().into_iter().chain(cgroup_free_bytes()).min(),
        _ => None,
    }
}

fn host_available_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes << 10)
}

/// Free bytes of each control group with a limit, from this process's group up to the root.
fn cgroup_free_bytes() -> Vec<u64> {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let Some(own) = text.lines().find_map(|line| line.strip_prefix("0::/")) else { return vec![] };
    let own = PathBuf::from(CGROUP_MOUNT).join(own);
    own.ancestors().take_while(|dir| dir.starts_with(CGROUP_MOUNT)).filter_map(free_bytes_of_cgroup).collect()
}

/// Free bytes of the group in `dir`: its limit minus its memory that cannot be reclaimed. None without a limit.
fn free_bytes_of_cgroup(dir: &Path) -> Option<u64> {
    let read = |file: &str| fs::read_to_string(dir.join(file)).ok();
    let number = |file: &str| read(file)?.trim().parse::<u64>().ok();
    let (limit, held) = (number("memory.max")?, number("memory.current")?);
    let stat = read("memory.stat").unwrap_or_default();
    let files = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.trim().parse().ok());
    Some(limit.saturating_sub(held.saturating_sub(files.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_lets_go_of_what_it_has_of_files() {
        let dir = std::env::temp_dir().join(format!("deepspec-group-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        assert_eq!(free_bytes_of_cgroup(&dir), None);
        let write = |file: &str, text: &str| fs::write(dir.join(file), text).unwrap();
        write("memory.max", "max\n");
        write("memory.current", "700\n");
        assert_eq!(free_bytes_of_cgroup(&dir), None, "there is no limit");
        write("memory.max", "1000\n");
        assert_eq!(free_bytes_of_cgroup(&dir), Some(300));
        write("memory.stat", "anon 500\ninactive_file 150\nactive_file 50\n");
        assert_eq!(free_bytes_of_cgroup(&dir), Some(450));
        fs::remove_dir_all(&dir).unwrap();
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_host_says_what_it_has() {
        assert!(free_memory(Device::Cpu).is_some_and(|bytes| bytes > 1 << 20));
    }
}
