//! Runs `cache build` in several processes of this machine, one per worker.

use std::ffi::OsString;
use std::num::NonZero;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use deepspec_core::cli::UsageError;
use deepspec_core::env;
use deepspec_ops::die_with_parent;

/// Flags that worker processes do not inherit, and whether a value follows. Each worker gets a
/// different value, or the parent has handled the flag.
const NOT_INHERITED_FLAGS: [(&str, bool); 6] = [
    ("--processes", true),
    ("--device", true),
    ("--overwrite", false),
    ("--force", false),
    ("--quiet", false),
    ("-q", false),
];
/// Interval between checks for finished workers.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Exit code of usage errors.
const USAGE_EXIT_CODE: i32 = 2;

/// The worker processes of a build. Dropping it kills the running ones.
struct WorkerProcesses(Vec<Child>);

impl WorkerProcesses {
    /// Waits until one of these processes ends; `None` if there are none.
    fn wait_for_next_exit(&mut self, running: &[usize]) -> anyhow::Result<Option<(usize, ExitStatus)>> {
        while !running.is_empty() {
            for &share in running {
                if let Some(status) = self.0[share].try_wait().context("waiting for a process")? {
                    return Ok(Some((share, status)));
                }
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(None)
    }
}

impl Drop for WorkerProcesses {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Runs `processes` workers, on a GPU each if `gpus` is above 1, and waits for all. If rows were
/// `rejected`, exit code 1 of a worker counts as success.
///
/// # Errors
/// As soon as a worker fails. The remaining workers are then killed, and finished shards stay.
pub fn build(processes: usize, device: &str, gpus: usize, rejected: bool) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("finding this program")?;
    let asked: Vec<OsString> = std::env::args_os().skip(1).collect();
    let mut workers = WorkerProcesses(vec![]);
    for share in 0..processes {
        let mut command = Command::new(&program);
        command.args(inherited_arguments(&asked)).args([
            "--force",
            "--worker",
            &format!("{share}/{processes}"),
        ]);
        let own = if gpus > 1 { format!("cuda:{}", share % gpus) } else { device.to_string() };
        command.args(["--device", &own]).stdin(Stdio::null()).stdout(Stdio::null());
        // The progress of one worker represents all workers, because shards are assigned in turns.
        if share > 0 || asked.iter().any(|flag| flag == "--quiet" || flag == "-q") {
            command.arg("--quiet");
        }
        if !env::has_thread_count() {
            let cores = thread::available_parallelism().map_or(1, NonZero::get);
            command.env(env::OMP_THREADS_VARIABLE, (cores / processes).max(1).to_string());
        }
        die_with_parent(&mut command);
        workers.0.push(command.spawn().with_context(|| format!("starting {}", program.display()))?);
    }
    let mut running: Vec<usize> = (0..processes).collect();
    while let Some((share, status)) = workers.wait_for_next_exit(&running)? {
        running.retain(|other| *other != share);
        match status.code() {
            Some(0) => {}
            Some(1) if rejected => {}
            Some(USAGE_EXIT_CODE) => {
                let problem = format!("share {share} of {processes} was refused; see above");
                return Err(UsageError(problem).into());
            }
            _ => bail!("share {share} of {processes} failed ({status}); run the same command to go on"),
        }
    }
    Ok(())
}

/// The arguments for workers, without [`NOT_INHERITED_FLAGS`] flags.
fn inherited_arguments(asked: &[OsString]) -> Vec<&OsString> {
    let (mut kept, mut follows) = (vec![], false);
    for argument in asked {
        let text = argument.to_string_lossy();
        let named = NOT_INHERITED_FLAGS.iter().find(|(flag, _)| text == *flag);
        let joined =
            NOT_INHERITED_FLAGS.iter().any(|(flag, value)| *value && text.starts_with(&format!("{flag}=")));
        if !follows && !joined && named.is_none() {
            kept.push(argument);
        }
        follows = !follows && named.is_some_and(|(_, value)| *value);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_one_share_are_not_handed_on() {
        let asked =
            ["cache", "build", "--processes", "2", "--device=cuda", "--input", "a", "--force", "--overwrite"];
        let asked: Vec<OsString> = asked.iter().chain(&["-q", "-v"]).map(OsString::from).collect();
        assert_eq!(inherited_arguments(&asked), ["cache", "build", "--input", "a", "-v"]);
    }
}
