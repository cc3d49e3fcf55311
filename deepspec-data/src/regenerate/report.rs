//! The report of a run, printed at its end and written beside the output.

use std::io::{self, Write};
use std::time::Instant;

use deepspec_core::atomic::{self, FileError};
use deepspec_core::cli;
use serde_json::{Value, json};

use super::answer::TokenCounts;
use super::backend::Backend;
use super::store::{ResultStore, report_path};

/// Counts of a run so far.
pub struct RunStats {
    started: Instant,
    /// Rows answered by this run.
    pub rows: u64,
    /// Rows reused from earlier outputs.
    pub reused: usize,
    /// Tokens of the answered rows.
    pub tokens: TokenCounts,
    /// Concurrent requests, over all servers.
    pub concurrency: usize,
}

impl RunStats {
    /// Counts of a new run.
    pub fn new() -> Self {
        Self { started: Instant::now(), rows: 0, reused: 0, tokens: TokenCounts::default(), concurrency: 0 }
    }

    /// Restarts the clock, so that loading and reuse do not count as answering.
    pub fn start_clock(&mut self) {
        self.started = Instant::now();
    }

    /// The text next to the progress bar: speed, requests in flight, and the servers' shares.
    pub fn progress_note(&self, backend: &Backend) -> String {
        let rate = self.tokens.completion as f64 / self.started.elapsed().as_secs_f64().max(1e-9);
        let shares = match backend {
            Backend::Servers(pool) => pool.shares(),
            Backend::Embedded(_) => String::new(),
        };
        format!("{rate:.0} tokens/s, {} in flight{shares}", backend.in_flight())
    }

    /// Writes the report of the whole output and of this run's requests beside the output.
    pub fn write(&self, store: &ResultStore, backend: Option<&Backend>) -> Result<(), FileError> {
        let servers: Vec<Value> = match backend {
            Some(Backend::Servers(pool)) => pool.to_json(),
            Some(Backend::Embedded(_)) | None => vec![],
        };
        let done = store.done();
        let seconds = self.started.elapsed().as_secs_f64();
        let report = json!({
            "format": 1,
            "tool_version": deepspec_core::VERSION,
            "rows": {
                "total": store.index.ids.len(),
                "ok": done.ok.len(),
                "failed": done.failed.len(),
                "pending": store.pending(),
                "malformed_lines": store.index.rejected.len(),
                "cut": done.truncated_count(),
                "finish_reasons": done.finished,
                "broken_off": done.broken_off,
            },
            "this_run": {
                "rows_answered": self.rows,
                "rows_reused": self.reused,
                "prompt_tokens": self.tokens.prompt,
                "completion_tokens": self.tokens.completion,
                "concurrency": self.concurrency,
                "seconds": (seconds * 1000.0).round() / 1000.0,
                "servers": servers,
            },
        });
        atomic::write_json(&report_path(store.output()), &report)
    }

    /// Logs failures of servers, and prints the row counts.
    pub fn print(&self, store: &ResultStore, backend: Option<&Backend>) -> io::Result<()> {
        if let Some(Backend::Servers(pool)) = backend {
            pool.server_failures().iter().for_each(|line| tracing::info!("{line}"));
        }
        if self.rows > 0 {
            let seconds = self.started.elapsed().as_secs_f64().max(1e-9);
            let TokenCounts { prompt, completion } = self.tokens;
            tracing::info!(
                "{} in {seconds:.1} s ({:.1} rows/s), {prompt} tokens read, {completion} written ({:.0}/s)",
                cli::count(self.rows as usize, "row"),
                self.rows as f64 / seconds,
                completion as f64 / seconds
            );
        }
        let done = store.done();
        if done.truncated_count() > 0 {
            let reasons = done.finished.iter().map(|(reason, rows)| format!("{rows} {reason}"));
            tracing::info!(
                "{} with answers that were cut; their end of turn is not learned (finish_reason: {})",
                cli::count(done.truncated_count(), "row"),
                reasons.collect::<Vec<_>>().join(", ")
            );
        }
        tracing::info!("accounts in {}", report_path(store.output()).display());
        writeln!(
            cli::stdout(),
            "{} = {} ok + {} failed + {} pending; {} malformed lines",
            cli::count(store.index.ids.len(), "row"),
            done.ok.len(),
            done.failed.len(),
            store.pending(),
            store.index.rejected.len()
        )
    }
}
