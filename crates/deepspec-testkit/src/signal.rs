//! Sends signals to processes.

use std::process::Command;

/// Sends a signal by name, such as `TERM`, to a process, or to a process group by its negative id.
/// Returns whether the target exists.
///
/// The shell's built-in `kill` is used, because not every system has a `kill` program.
#[must_use]
pub fn send(name: &str, process: i64) -> bool {
    let line = format!("kill -s {name} -- {process}");
    Command::new("sh").args(["-c", &line]).status().expect("a shell").success()
}
