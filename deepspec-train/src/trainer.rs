//! The loop. It decides nothing: what, when and where were settled before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::bail;
use deepspec_core::cli::ExitWith;
use deepspec_core::recipe::Recipe;
use deepspec_models::{Learner, Terms};

use crate::checkpoint::{Checkpoints, TrainState};
use crate::loader::Loader;
use crate::lr::LrSchedule;
use crate::optimizer::AdamW;
use crate::report::{Report, Window};
use crate::schedule::Schedule;

/// "Try again": saved before the end because a signal asked for it.
const SAVED_EARLY: u8 = 75;

/// Everything the loop works with.
pub struct Trainer<'a> {
    pub recipe: &'a Recipe,
    pub learner: Learner,
    pub terms: Terms,
    pub optimizer: AdamW,
    pub schedule: Schedule,
    pub lr: LrSchedule,
    pub checkpoints: Checkpoints,
    /// Digest of the data set, kept in the training state.
    pub data: String,
    /// Raised by SIGTERM and SIGUSR1.
    pub stop: Arc<AtomicBool>,
}

impl Trainer<'_> {
    /// Trains from step `first` to the end and saves.
    ///
    /// # Errors
    /// Damaged or missing states, failed writes, or [`ExitWith`] 75 when a signal stopped it after saving.
    pub fn run(&mut self, first: usize, mut loader: Loader, mut report: Report) -> anyhow::Result<()> {
        let mut window = Window::new(self.terms.clone());
        let logging = &self.recipe.logging;
        for step in first..self.schedule.max_train_steps {
            for _ in 0..self.schedule.gradient_accumulation_steps {
                let micro = loader.next_batch()?;
                let sums = self.learner.accumulate(&micro.samples, micro.normaliser);
                self.optimizer.accumulate();
                window.add(sums.as_ref(), micro.samples.len(), micro.tokens);
            }
            let lr = self.lr.at(step);
            window.end_step(self.optimizer.step(lr));
            let (done, last) = (step + 1, step + 1 == self.schedule.max_train_steps);
            let stopping = self.stop.load(Ordering::Relaxed);
            let logs = done % logging.logging_steps == 0 || last;
            let saves = done % logging.checkpointing_steps == 0 || last || stopping;
            if (logs || saves) && !window.is_finite() {
                bail!(
                    "training diverged before step {done}: a gradient is not finite; lower train.lr and start anew with --overwrite"
                );
            }
            if logs {
                report.window(&window.take(done, lr, loader.take_waited()))?;
            }
            if saves {
                self.save(done)?;
            }
            if stopping && !last {
                let reason = format!(
                    "stopped by a signal at step {done} of {}; run the same command to go on",
                    self.schedule.max_train_steps
                );
                return Err(ExitWith { code: SAVED_EARLY, reason }.into());
            }
        }
        loader.finish()
    }

    /// Saves the state after `step` steps.
    ///
    /// # Errors
    /// Any I/O failure, with the path.
    pub fn save(&self, step: usize) -> anyhow::Result<()> {
        let state = TrainState::new(step, self.recipe.train.global_batch_size, &self.data);
        let path = self.checkpoints.save(&self.learner, &self.optimizer, self.recipe, &state)?;
        tracing::info!("saved {}", path.display());
        Ok(())
    }
}
