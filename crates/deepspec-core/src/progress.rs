//! Progress of long work: a bar with rate and remaining time on a terminal, occasional log lines
//! elsewhere.

use std::fmt;
use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, HumanDuration, ProgressBar, ProgressState, ProgressStyle};

use crate::cli::Verbosity;

/// Interval of the log lines without a terminal.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Shows the user the number of finished units of work.
pub struct Progress {
    what: &'static str,
    in_bytes: bool,
    bar: Option<ProgressBar>,
    log: bool,
    total: u64,
    done: u64,
    already: u64,
    started: Instant,
    logged: Instant,
}

impl Progress {
    /// Starts counting `total` units, of which an earlier run finished `already`.
    pub fn new(verbosity: Verbosity, what: &'static str, total: u64, already: u64) -> Self {
        let template = "{msg:12} {wide_bar} {human_pos}/{human_len} {rate} ETA {eta}";
        Self::start(verbosity, what, total, already, template)
    }

    /// [`Self::new`] for bytes, shown with binary unit prefixes.
    pub fn for_bytes(verbosity: Verbosity, what: &'static str, total: u64, already: u64) -> Self {
        let template = "{msg:12} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} ETA {eta}";
        Self { in_bytes: true, ..Self::start(verbosity, what, total, already, template) }
    }

    fn start(
        verbosity: Verbosity,
        what: &'static str,
        total: u64,
        already: u64,
        template: &'static str,
    ) -> Self {
        let terminal = stderr().is_terminal();
        let bar = (terminal && verbosity != Verbosity::Quiet).then(|| {
            let style =
                ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
            let rate = |state: &ProgressState, text: &mut dyn fmt::Write| {
                let _ = write!(text, "{:.1}/s", state.per_sec());
            };
            let style = style.with_key("rate", rate);
            let bar = ProgressBar::new(total).with_style(style).with_message(what).with_position(already);
            bar.reset_eta();
            bar
        });
        let now = Instant::now();
        let log = !terminal && verbosity != Verbosity::Quiet;
        Self { what, in_bytes: false, bar, log, total, done: already, already, started: now, logged: now }
    }

    /// Adds finished units; `note` is called only if it is shown.
    pub fn add(&mut self, units: u64, note: impl FnOnce() -> String) {
        self.done += units;
        if let Some(bar) = &self.bar {
            bar.set_position(self.done);
            let note = note();
            bar.set_message(if note.is_empty() {
                self.what.to_string()
            } else {
                format!("{} {note}", self.what)
            });
        } else if self.log && self.logged.elapsed() >= LOG_INTERVAL {
            self.logged = Instant::now();
            let rate = (self.done - self.already) as f64 / self.started.elapsed().as_secs_f64();
            let left = Duration::from_secs_f64(
                ((self.total.saturating_sub(self.done)) as f64 / rate.max(1e-9)).min(1e9),
            );
            let note = note();
            let gap = if note.is_empty() { "" } else { ", " };
            let (done, total, rate) = if self.in_bytes {
                let text = |bytes: u64| HumanBytes(bytes).to_string();
                (text(self.done), text(self.total), text(rate as u64))
            } else {
                (self.done.to_string(), self.total.to_string(), format!("{rate:.1}"))
            };
            let left = HumanDuration(left);
            tracing::info!("{} {done}/{total} ({rate}/s, {left} left{gap}{note})", self.what);
        }
    }

    /// Removes the bar. The caller reports the result.
    pub fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}
