//! Answers many rows concurrently, with one reader, many workers and one writer. Bounded queues
//! connect them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use deepspec_core::atomic::FileError;
use deepspec_core::progress::Progress;
use deepspec_text::FinishReason;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Mutex;
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::task::JoinSet;

use super::answer::AskError;
use super::backend::Backend;
use super::index;
use super::report::RunStats;
use super::rows::{AnsweredRow, Row};
use super::settings::RequestSettings;
use super::store::ResultStore;

/// Interval of syncing the outputs to disk and updating the report.
const SYNC_INTERVAL: Duration = Duration::from_secs(10);

/// How the work ended.
pub enum Ending {
    /// No row is pending.
    Finished,
    /// A signal stopped it.
    Interrupted,
    /// No backend answers.
    Broken(anyhow::Error),
}

/// Inputs, backend and outputs of the work.
pub struct Work<'a> {
    /// The input files.
    pub inputs: Vec<PathBuf>,
    /// The settings of requests.
    pub settings: Arc<RequestSettings>,
    /// The backend.
    pub backend: Arc<Backend>,
    /// Number of rows in progress.
    pub workers: usize,
    /// The output files.
    pub store: &'a mut ResultStore,
    /// Counts of the run.
    pub stats: &'a mut RunStats,
    /// The progress bar.
    pub progress: Progress,
}

type Outcome = (Row, Result<AnsweredRow, AskError>);

impl Work<'_> {
    /// Answers pending rows until all are done, no backend answers or a signal comes. Each row is
    /// recorded only when all its answers are complete, so a run may stop at any point.
    pub async fn run(mut self) -> anyhow::Result<Ending> {
        let (mut interrupt, mut terminate) =
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        if let Backend::Servers(pool) = &*self.backend {
            tokio::select! {
                _ = interrupt.recv() => return Ok(Ending::Interrupted),
                _ = terminate.recv() => return Ok(Ending::Interrupted),
                checked = pool.check() => if let Err(error) = checked { return Ok(Ending::Broken(error)) },
            }
        }
        let (mut outcomes, _workers) = self.start();
        let mut secured = Instant::now();
        let ending = loop {
            let outcome = tokio::select! {
                _ = interrupt.recv() => break Ending::Interrupted,
                _ = terminate.recv() => break Ending::Interrupted,
                outcome = outcomes.recv() => outcome,
            };
            let Some(outcome) = outcome else { break Ending::Finished };
            if let Some(error) = self.record_outcome(outcome?)? {
                break Ending::Broken(error);
            }
            if secured.elapsed() >= SYNC_INTERVAL {
                self.store.sync()?;
                self.stats.write(self.store, Some(&self.backend))?;
                secured = Instant::now();
            }
        };
        self.progress.finish();
        Ok(ending)
    }

    /// Starts the reader and the workers. They end after the last row, or when the returned values
    /// are dropped.
    fn start(&self) -> (Receiver<anyhow::Result<Outcome>>, JoinSet<()>) {
        let (row_sender, rows) = mpsc::channel(self.workers.max(64));
        let (sender, outcomes) = mpsc::channel(self.workers.max(64));
        // Rows added since the inputs were indexed are left for the next run.
        let (indexed, done) = (Arc::clone(&self.store.index), self.store.done().clone());
        let (inputs, settings) = (self.inputs.clone(), Arc::clone(&self.settings));
        let errors = sender.clone();
        tokio::task::spawn_blocking(move || {
            for row in
                index::select_rows(&inputs, &settings, |id| indexed.ids.contains(id) && done.is_pending(id))
            {
                // Sending fails only after the receiver has ended.
                let sent = match row {
                    Ok(row) => row_sender.blocking_send(row).is_ok(),
                    Err(error) => {
                        let _ = errors.blocking_send(Err(error.into()));
                        false
                    }
                };
                if !sent {
                    return;
                }
            }
        });
        let (rows, mut workers) = (Arc::new(Mutex::new(rows)), JoinSet::new());
        for _ in 0..self.workers {
            let (rows, sender) = (Arc::clone(&rows), sender.clone());
            let (settings, backend) = (Arc::clone(&self.settings), Arc::clone(&self.backend));
            workers.spawn(async move { answer_rows(&rows, &sender, &settings, &backend).await });
        }
        (outcomes, workers)
    }

    /// Records a row; returns an error that affects all rows.
    fn record_outcome(&mut self, (row, answered): Outcome) -> anyhow::Result<Option<anyhow::Error>> {
        match answered {
            Ok(answered) => {
                self.stats.rows += 1;
                self.stats.tokens += answered.tokens;
                self.store.record_ok(&row.id, &answered.fields)?;
            }
            Err(AskError::Row(problem)) => self.record_failed_row(row, &problem, None)?,
            Err(AskError::BrokenOff(problem, reason)) => {
                self.record_failed_row(row, &problem, Some(reason))?
            }
            Err(AskError::Run(error)) => return Ok(Some(error)),
        }
        let (stats, backend) = (&*self.stats, &self.backend);
        self.progress.add(1, || stats.progress_note(backend));
        Ok(None)
    }

    fn record_failed_row(
        &mut self,
        row: Row,
        problem: &str,
        finish: Option<FinishReason>,
    ) -> Result<(), FileError> {
        tracing::debug!("row {}: {problem}", row.id);
        self.store.record_failed(row, problem, finish)
    }
}

/// Takes rows from the queue and answers them one after the other.
async fn answer_rows(
    rows: &Mutex<Receiver<Row>>,
    outcomes: &Sender<anyhow::Result<Outcome>>,
    settings: &RequestSettings,
    backend: &Backend,
) {
    loop {
        // In a `while let`, the lock would be held until the row is answered.
        let row = rows.lock().await.recv().await;
        let Some(row) = row else { return };
        let answered = row.generate_answers(backend, settings).await;
        if outcomes.send(Ok((row, answered))).await.is_err() {
            return;
        }
    }
}
