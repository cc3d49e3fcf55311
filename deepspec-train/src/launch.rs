//! The launcher: one process per device of this machine, which live and end together.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Write, stderr};
use std::num::NonZero;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::dist::Host;
use anyhow::{Context, bail};
use deepspec_core::cli::{ExitWith, UsageError};
use deepspec_core::env;
use deepspec_ops::{die_with_parent, signal};
use signal_hook::consts::{SIGCHLD, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use crate::trainer::SAVED_EARLY;

/// How the log marks an error.
const ERROR: &str = "ERROR";
/// Last lines of a process that are looked through for why it ended: a C++ exception brings some dozens of addresses.
const KEPT: usize = 200;
/// Exit code of a process that found a mistake of the user's.
const USAGE: i32 = 2;

/// Runs this very command as `processes` processes and waits for them.
///
/// # Errors
/// The failure of the rank that failed first, after all others were ended; [`ExitWith`] 75 if all have saved and stopped.
pub fn run(processes: usize, timeout: Duration) -> anyhow::Result<()> {
    // Before the first child, so that no end is missed.
    let mut signals = Signals::new([SIGCHLD, SIGTERM, SIGUSR1]).context("registering signal handlers")?;
    let host = Host::open(processes, timeout)?;
    let mut job = Job { host, running: BTreeMap::new(), early: 0, processes };
    for rank in 0..processes {
        let started = job.start(rank);
        if let Err(error) = started {
            job.kill();
            return Err(error);
        }
    }
    let mut asked = false;
    for received in &mut signals {
        match received {
            SIGCHLD => job.reap()?,
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
        return Err(ExitWith { code: SAVED_EARLY, reason }.into());
    }
    Ok(())
}

/// The processes of a job. Those that are left are killed when it is dropped.
struct Job {
    host: Host,
    running: BTreeMap<usize, Rank>,
    /// How many have saved and stopped before the end.
    early: usize,
    processes: usize,
}

struct Rank {
    child: Child,
    /// Reads what it says on standard error and returns the line that tells why it ended.
    reader: JoinHandle<String>,
}

impl Job {
    fn start(&mut self, rank: usize) -> anyhow::Result<()> {
        let program = std::env::current_exe().context("finding this program")?;
        let mut command = Command::new(&program);
        command
            .args(std::env::args_os().skip(1))
            .envs(self.host.place(rank, self.processes).variables())
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            // Signals to this process's group come here only, and are passed on once.
            .process_group(0);
        die_with_parent(&mut command);
        if !env::has_thread_count() {
            let cores = thread::available_parallelism().map_or(1, NonZero::get);
            command.env(env::THREADS, (cores / self.processes).max(1).to_string());
        }
        let is_leader = rank == 0;
        if !is_leader {
            command.stdout(Stdio::null());
        }
        let mut child = command.spawn().with_context(|| format!("starting {}", program.display()))?;
        let errors = child.stderr.take();
        let reader =
            thread::spawn(move || errors.map(|errors| listen(errors, is_leader)).unwrap_or_default());
        self.running.insert(rank, Rank { child, reader });
        Ok(())
    }

    /// Takes note of the processes that have ended; one that failed ends the job.
    fn reap(&mut self) -> anyhow::Result<()> {
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
                Some(code) if code == i32::from(SAVED_EARLY) => self.early += 1,
                _ => failed.push((rank, status, words)),
            }
        }
        // Where several have ended, those that only lost the others are not the cause.
        let cause = failed
            .into_iter()
            .min_by_key(|(rank, status, _)| (status.signal().is_none(), self.host.is_follower(*rank), *rank));
        match cause {
            None => Ok(()),
            Some((rank, status, words)) => {
                self.kill();
                Err(self.failure(rank, status, &words))
            }
        }
    }

    fn failure(&self, rank: usize, status: ExitStatus, words: &str) -> anyhow::Error {
        let how = match (status.signal(), status.code()) {
            (Some(number), _) => {
                let name = signal_hook::low_level::signal_name(number).unwrap_or("unknown");
                format!("was killed by signal {number} ({name})")
            }
            (None, code) => format!("failed with exit code {}", code.unwrap_or_default()),
        };
        let said = words.trim_start().trim_start_matches(ERROR).trim();
        let said = if said.is_empty() { String::new() } else { format!("; its last words: {said}") };
        let text = format!("rank {rank} of {} {how}, so the others were ended{said}", self.processes);
        if status.code() == Some(USAGE) { UsageError(text).into() } else { anyhow::Error::msg(text) }
    }

    /// Asks all processes to save and stop.
    fn ask_to_stop(&self) {
        for process in self.running.values() {
            // One that has just ended need not be asked.
            let _ = signal(&process.child, SIGUSR1);
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

/// Reads a process's standard error to its end, passes it through if it is the leader's, and returns the line that tells why the
/// process ended.
fn listen(errors: ChildStderr, pass: bool) -> String {
    let mut kept = VecDeque::new();
    for line in BufReader::new(errors).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        if pass {
            // A reader that has gone away must not end the work.
            let _ = writeln!(stderr(), "{line}");
        }
        if !line.trim().is_empty() {
            kept.push_back(line.into_owned());
            if kept.len() > KEPT {
                kept.pop_front();
            }
        }
    }
    telling(kept.make_contiguous()).to_owned()
}

/// Of a process's last lines the one that tells why it ended: our own error, else what a C++ exception says before its addresses,
/// else the last.
fn telling(lines: &[String]) -> &str {
    let own = |line: &&String| line.trim_start().starts_with(ERROR);
    let thrown = |line: &&String| line.trim_start().starts_with("what():");
    let line = lines.iter().rev().find(own).or_else(|| lines.iter().rev().find(thrown));
    line.or(lines.last()).map_or("", String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_that_tells_why_is_found() {
        let of =
            |lines: &[&str]| telling(&lines.iter().map(ToString::to_string).collect::<Vec<_>>()).to_owned();
        assert_eq!(of(&[]), "");
        assert_eq!(of(&[" WARN slow", "Killed"]), "Killed");
        assert_eq!(of(&["ERROR no room", "frame #0: 0x7f", "Aborted"]), "ERROR no room");
        let thrown = ["terminate called", "  what():  [Rank 1] Watchdog: timeout", "frame #0: 0x7f", ""];
        assert_eq!(of(&thrown), "  what():  [Rank 1] Watchdog: timeout");
    }
}
