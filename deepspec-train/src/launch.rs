//! The launcher: one process per device of this machine. If one process fails, all are ended.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Write, stderr};
use std::num::NonZero;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::dist::RendezvousServer;
use anyhow::{Context, bail};
use deepspec_core::cli::{ExitWith, UsageError};
use deepspec_core::env;
use deepspec_ops::{die_with_parent, send_signal};
use signal_hook::consts::{SIGCHLD, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use crate::trainer::EXIT_SAVED_EARLY;

/// Log prefix of errors.
const ERROR_PREFIX: &str = "ERROR";
/// Number of last stderr lines kept to find the cause of a failure. A C++ exception prints dozens
/// of stack frames.
const MAX_STDERR_LINES: usize = 200;
/// Exit code for usage errors.
const USAGE_EXIT_CODE: i32 = 2;

/// Runs the current command as `processes` processes and waits for them.
///
/// # Errors
/// The failure of the rank that failed first, after all others were killed. [`ExitWith`] 75 if all
/// ranks have saved and stopped.
pub fn run(processes: usize, timeout: Duration) -> anyhow::Result<()> {
    // Registered before the first child starts, so that no SIGCHLD is missed.
    let mut signals = Signals::new([SIGCHLD, SIGTERM, SIGUSR1]).context("registering signal handlers")?;
    let host = RendezvousServer::open(processes, timeout)?;
    let mut job = Job { host, running: BTreeMap::new(), early: 0, processes };
    for rank in 0..processes {
        let started = job.start_rank(rank);
        if let Err(error) = started {
            job.kill();
            return Err(error);
        }
    }
    let mut asked = false;
    for received in &mut signals {
        match received {
            SIGCHLD => job.collect_ended()?,
            _ if asked => {
                job.kill();
                bail!("ended by a second signal; the last checkpoint is kept");
            }
            _ => {
                asked = true;
                job.ask_to_stop();
            }
        }
        if job.running.is_empty() {
            break;
        }
    }
    if job.early > 0 {
        let reason = "all processes have saved and stopped; run the same command to go on".into();
        return Err(ExitWith { code: EXIT_SAVED_EARLY, reason }.into());
    }
    Ok(())
}

/// The processes of a job. Dropping it kills the remaining ones.
struct Job {
    host: RendezvousServer,
    running: BTreeMap<usize, RankProcess>,
    /// Number of processes that saved and stopped before the end.
    early: usize,
    processes: usize,
}

struct RankProcess {
    child: Child,
    /// Reads the process's stderr and returns the line that explains its end.
    reader: JoinHandle<String>,
}

impl Job {
    fn start_rank(&mut self, rank: usize) -> anyhow::Result<()> {
        let program = std::env::current_exe().context("finding this program")?;
        let mut command = Command::new(&program);
        command
            .args(std::env::args_os().skip(1))
            .envs(self.host.child_env(rank, self.processes).variables())
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            // Each child has a separate process group, so it does not get the terminal's signals.
            // The launcher forwards each signal once.
            .process_group(0);
        die_with_parent(&mut command);
        if !env::has_thread_count() {
            let cores = thread::available_parallelism().map_or(1, NonZero::get);
            command.env(env::OMP_THREADS_VARIABLE, (cores / self.processes).max(1).to_string());
        }
        let is_leader = rank == 0;
        if !is_leader {
            command.stdout(Stdio::null());
        }
        let mut child = command.spawn().with_context(|| format!("starting {}", program.display()))?;
        let errors = child.stderr.take();
        let reader =
            thread::spawn(move || errors.map(|errors| forward_stderr(errors, is_leader)).unwrap_or_default());
        self.running.insert(rank, RankProcess { child, reader });
        Ok(())
    }

    /// Collects ended processes; a failed one ends the job.
    fn collect_ended(&mut self) -> anyhow::Result<()> {
        let mut failed = vec![];
        let mut ended = vec![];
        for (&rank, process) in &mut self.running {
            if let Some(status) = process.child.try_wait().context("waiting for a process")? {
                ended.push((rank, status));
            }
        }
        for (rank, status) in ended {
            let Some(process) = self.running.remove(&rank) else { continue };
            let words = process.reader.join().unwrap_or_default();
            match status.code() {
                Some(0) => {}
                Some(code) if code == i32::from(EXIT_SAVED_EARLY) => self.early += 1,
                _ => failed.push((rank, status, words)),
            }
        }
        // If several processes ended, those that failed only because another rank failed are not
        // the cause.
        let cause = failed.into_iter().min_by_key(|(rank, status, _)| {
            (status.signal().is_none(), self.host.failed_after_another(*rank), *rank)
        });
        match cause {
            None => Ok(()),
            Some((rank, status, words)) => {
                self.kill();
                Err(self.describe_failure(rank, status, &words))
            }
        }
    }

    fn describe_failure(&self, rank: usize, status: ExitStatus, words: &str) -> anyhow::Error {
        let how = match (status.signal(), status.code()) {
            (Some(number), _) => {
                let name = signal_hook::low_level::signal_name(number).unwrap_or("unknown");
                format!("was killed by signal {number} ({name})")
            }
            (None, code) => format!("failed with exit code {}", code.unwrap_or_default()),
        };
        let said = words.trim_start().trim_start_matches(ERROR_PREFIX).trim();
        let said = if said.is_empty() { String::new() } else { format!("; its last error: {said}") };
        let text = format!("rank {rank} of {} {how}, so the others were ended{said}", self.processes);
        if status.code() == Some(USAGE_EXIT_CODE) {
            UsageError(text).into()
        } else {
            anyhow::Error::msg(text)
        }
    }

    /// Asks all processes to save and stop.
    fn ask_to_stop(&self) {
        for process in self.running.values() {
            // Ignored: the process may just have ended.
            let _ = send_signal(&process.child, SIGUSR1);
        }
    }

    fn kill(&mut self) {
        for process in self.running.values_mut() {
            let _ = process.child.kill();
        }
        for (_, mut process) in std::mem::take(&mut self.running) {
            let _ = process.child.wait();
            let _ = process.reader.join();
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Reads a process's stderr to its end and forwards the lines of rank 0. Returns the line that
/// explains why the process ended.
fn forward_stderr(errors: ChildStderr, pass: bool) -> String {
    let mut kept = VecDeque::new();
    for line in BufReader::new(errors).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        if pass {
            // A closed stderr of the launcher must not end the job.
            let _ = writeln!(stderr(), "{line}");
        }
        if !line.trim().is_empty() {
            kept.push_back(line.into_owned());
            if kept.len() > MAX_STDERR_LINES {
                kept.pop_front();
            }
        }
    }
    explaining_line(kept.make_contiguous()).to_owned()
}

/// Returns the line that explains why a process ended: an error of this program, or else the
/// `what()` of a C++ exception, or else the last line.
fn explaining_line(lines: &[String]) -> &str {
    let own = |line: &&String| line.trim_start().starts_with(ERROR_PREFIX);
    let thrown = |line: &&String| line.trim_start().starts_with("what():");
    let line = lines.iter().rev().find(own).or_else(|| lines.iter().rev().find(thrown));
    line.or(lines.last()).map_or("", String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_that_tells_why_is_found() {
        let of = |lines: &[&str]| {
            explaining_line(&lines.iter().map(ToString::to_string).collect::<Vec<_>>()).to_owned()
        };
        assert_eq!(of(&[]), "");
        assert_eq!(of(&[" WARN slow", "Killed"]), "Killed");
        assert_eq!(of(&["ERROR no room", "frame #0: 0x7f", "Aborted"]), "ERROR no room");
        let thrown = ["terminate called", "  what():  [Rank 1] Watchdog: timeout", "frame #0: 0x7f", ""];
        assert_eq!(of(&thrown), "  what():  [Rank 1] Watchdog: timeout");
    }
}
