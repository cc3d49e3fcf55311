//! The training loop. The schedule, loader and recipe decide its steps.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::dist::ProcessGroup;
use anyhow::bail;
use deepspec_core::cli::{self, ExitWith};
use deepspec_drafters::Recipe;
use deepspec_drafters::{GradReadyHook, Metrics, TrainableDrafter};
use deepspec_ops::{StepTrace, range};

use crate::checkpoint::{Checkpoints, DataId, TrainState};
use crate::evaluation::Evaluation;
use crate::loader::Loader;
use crate::lr::LrSchedule;
use crate::metrics_window::MetricsWindow;
use crate::optimizer::AdamW;
use crate::reporters::TrainReporter;
use crate::run_report::write_run_report;
use crate::schedule::Schedule;

/// Exit code of a run that a signal stopped after saving; run it again to resume.
pub const EXIT_SAVED_EARLY: u8 = 75;

/// State of the training loop.
pub struct Trainer<'a> {
    pub recipe: &'a Recipe,
    pub group: &'a ProcessGroup,
    pub drafter: Box<dyn TrainableDrafter>,
    pub metrics: Metrics,
    pub optimizer: AdamW,
    pub schedule: Schedule,
    pub lr: LrSchedule,
    pub checkpoints: Checkpoints,
    /// Measures accepted length, if the recipe enables it.
    pub evaluation: Option<Evaluation>,
    /// Identity of the data set, stored in checkpoints.
    pub data: DataId,
    /// Profiler of some steps.
    pub trace: StepTrace,
    /// Set by SIGTERM and SIGUSR1.
    pub stop: Arc<AtomicBool>,
}

impl Trainer<'_> {
    /// Trains from step `first` to the end and saves. Only rank 0 has a report.
    ///
    /// # Errors
    /// Fails on damaged or missing hidden states, failed writes, and another rank's failure.
    /// Returns [`ExitWith`] 75 if a signal to any rank stopped all ranks after saving.
    pub fn run(
        &mut self,
        first: usize,
        mut loader: Loader,
        mut report: Option<TrainReporter>,
    ) -> anyhow::Result<()> {
        let mut window = MetricsWindow::new(&self.metrics);
        let logging = &self.recipe.logging;
        for step in first..self.schedule.max_train_steps {
            let begun = Instant::now();
            self.trace.begin_step();
            window.exclude_time(begun.elapsed());
            let progress = step as f64 / self.schedule.max_train_steps as f64;
            loop {
                let micro = {
                    let _range = range(c"data");
                    loader.next_batch()?
                };
                let (mut started, optimizer, group) = (Ok(()), &mut self.optimizer, self.group);
                // In the last micro-batch, the all-reduce of complete gradients starts while the
                // backward still runs.
                let is_heard = micro.ends_step && group.is_async() && optimizer.can_reduce_early();
                let mut start = |stages| {
                    if started.is_ok() {
                        started = optimizer.start_all_reduce(stages, group);
                    }
                };
                let listener = is_heard.then_some(&mut start as GradReadyHook);
                let sums = self.drafter.accumulate(&micro.samples, micro.normaliser, progress, listener);
                started?;
                self.optimizer.accumulate();
                window.add_micro_batch(sums.as_ref(), micro.samples.len(), micro.tokens);
                micro
                    .finite_flags
                    .into_iter()
                    .for_each(|(sample, finite)| window.watch_finite(sample, &finite));
                if micro.ends_step {
                    break;
                }
            }
            let lr = self.lr.lr_at(step);
            let norm = {
                let _range = range(c"optimiser");
                self.optimizer.step(lr, self.group)?
            };
            window.record_step(norm);
            let (done, last) = (step + 1, step + 1 == self.schedule.max_train_steps);
            let stopping = {
                let _range = range(c"collectives");
                self.group.any("ending a step", self.stop.load(Ordering::Relaxed))?
            };
            if step == first && self.group.is_leader() {
                tracing::info!(
                    "step {done}/{} took {:.1} s; a line every {} follows",
                    self.schedule.max_train_steps,
                    begun.elapsed().as_secs_f64(),
                    cli::count(logging.logging_steps, "step")
                );
            }
            let logs = done % logging.logging_steps == 0 || last;
            // A run that is asked to stop skips the evaluation.
            let evaluates = logging.eval_every.is_some_and(|every| done % every == 0 || last) && !stopping;
            let saves = done % logging.checkpointing_steps == 0 || last || stopping || evaluates;
            if logs || saves {
                if let Some(sample) = window.first_non_finite_sample() {
                    bail!(
                        "sample {sample:?}: the target's states are not finite; drop the sample, or try another data.target_device; the last checkpoint has not seen it"
                    );
                }
                if !window.are_grad_norms_finite() {
                    bail!(
                        "training diverged before step {done}: a gradient is not finite; lower train.lr and start anew with --overwrite"
                    );
                }
            }
            if logs {
                window.all_reduce(self.group)?;
                let metrics = window.take_metrics(done, lr, loader.take_wait_time());
                report.as_mut().map_or(Ok(()), |report| report.log_metrics(metrics))?;
            }
            // Evaluate before saving: a run killed in between then repeats both.
            let mut tau = None;
            if let Some(evaluation) = self.evaluation.as_mut().filter(|_| evaluates) {
                let scores = evaluation.run(self.drafter.as_ref(), self.group)?;
                window.exclude_time(Duration::from_secs_f64(scores.seconds));
                report.as_mut().map_or(Ok(()), |report| report.log_evaluation(done, &scores))?;
                tau = scores.tau();
            }
            if saves {
                self.save(done, tau)?;
            }
            if let Some(tau) = tau.filter(|_| self.group.is_leader()) {
                self.checkpoints.mark_best(done, tau)?;
            }
            if stopping && !last {
                self.trace.finish();
                let reason = format!(
                    "stopped by a signal at step {done} of {}; run the same command to go on",
                    self.schedule.max_train_steps
                );
                return Err(ExitWith { code: EXIT_SAVED_EARLY, reason }.into());
            }
        }
        self.trace.finish();
        loader.finish()?;
        if let Some(report) = report {
            // The drafter is saved; a page that cannot be written is no failure of the run.
            if let Err(error) = write_run_report(self.checkpoints.dir()) {
                tracing::warn!("the report of the run is not written: {error:#}");
            }
            let checkpoint = self.checkpoints.dir().join(format!("step_{}", self.schedule.max_train_steps));
            let summary = report.summary(&checkpoint, &self.recipe.target.model, self.data.thinking);
            summary.lines().for_each(|line| tracing::info!("{line}"));
        }
        Ok(())
    }

    /// Saves the state after `step` steps with the measured `tau`. Rank 0 writes, and all ranks
    /// wait until it is done.
    ///
    /// # Errors
    /// Any I/O failure, with the path, or another rank's failure.
    pub fn save(&self, step: usize, tau: Option<f64>) -> anyhow::Result<()> {
        let tensors = self.optimizer.state(self.group)?;
        if self.group.is_leader() {
            let train = &self.recipe.train;
            let state = TrainState::new(step, train.global_batch_size, &self.data, self.group.world_size());
            let state = TrainState { tau, ..state };
            let path = self.checkpoints.save(self.drafter.as_ref(), &tensors, self.recipe, &state)?;
            tracing::info!("saved {}", path.display());
        }
        Ok(self.group.barrier("saving a checkpoint")?)
    }
}
