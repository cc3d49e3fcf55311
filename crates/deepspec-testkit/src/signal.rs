//! Signals to processes.

use std::process::Command;

/// Sends a signal by its name, such as `TERM`, to a process, or to the group of a negative number. Returns whether there is one.
///
/// Every shell has `kill` built in; a program of that name is not everywhere.
#[must_use]
pub fn send(name: &str, process: i64) -> bool {
    let line = format!("kill -s {name} -- {process}");
    Command::new("sh").args(["-c", &line]).status().expect("a shell").success()
}
