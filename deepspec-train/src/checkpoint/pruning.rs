//! Checkpoint pruning: keeps the newest checkpoints and the best one.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context, bail};
use deepspec_core::atomic::{self, FileError};
use serde::{Deserialize, Serialize};

use super::{BEST_FILE, BEST_LINK, Checkpoints, LATEST_LINK, TrainState};
use deepspec_drafters::TRAIN_STATE_FILE;

/// The best checkpoint so far.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BestCheckpoint {
    /// Completed optimiser steps.
    pub step: usize,
    /// Accepted length on the validation suite.
    pub tau: f64,
}

impl Checkpoints {
    /// The best checkpoint so far.
    ///
    /// # Errors
    /// Fails if best.json cannot be read.
    pub fn read_best(&self) -> anyhow::Result<Option<BestCheckpoint>> {
        let file = self.dir.join(BEST_FILE);
        if !file.is_file() {
            return Ok(None);
        }
        let best = serde_json::from_str(&atomic::read_text(&file)?);
        Ok(Some(best.with_context(|| format!("{}: not a record of the best checkpoint", file.display()))?))
    }

    /// Records accepted length `tau` on the validation suite for the saved checkpoint of `step`.
    /// The link `step_best` points at the best checkpoint, the earliest one in a tie, and pruning
    /// keeps it. Returns whether this checkpoint is the best.
    ///
    /// # Errors
    /// Fails if the checkpoint does not exist, or on any I/O failure.
    pub fn mark_best(&self, step: usize, tau: f64) -> anyhow::Result<bool> {
        if self.read_best()?.is_some_and(|best| best.tau >= tau) {
            return Ok(false);
        }
        if !self.has_checkpoint(step) {
            bail!("{}: there is no checkpoint of step {step} to be marked", self.dir.display());
        }
        // The record is written before the link. If the process is killed in between,
        // `recover_best` restores the link from the record.
        atomic::write_json(&self.dir.join(BEST_FILE), &BestCheckpoint { step, tau })?;
        self.set_link(BEST_LINK, step)?;
        Ok(true)
    }

    /// Repairs best.json and `step_best` after a kill. The kill came between saving the checkpoint
    /// `latest` and marking it, or between writing best.json and the link.
    ///
    /// # Errors
    /// Fails if best.json cannot be read, or on any I/O failure.
    pub fn recover_best(&self, latest: &TrainState) -> anyhow::Result<()> {
        if let Some(BestCheckpoint { step, .. }) = self.read_best()?
            && self.has_checkpoint(step)
            && fs::read_link(self.dir.join(BEST_LINK)).ok() != Some(format!("step_{step}").into())
        {
            self.set_link(BEST_LINK, step)?;
        }
        if let Some(tau) = latest.tau {
            self.mark_best(latest.step, tau)?;
        }
        Ok(())
    }

    /// Removes all checkpoints except the newest `keep`, `step_latest` and `step_best`. Keeps all
    /// if `keep` is `None`.
    pub(super) fn prune(&self, keep: Option<usize>) -> anyhow::Result<()> {
        let Some(keep) = keep else { return Ok(()) };
        let mut steps = self.saved_steps()?;
        steps.retain(|&step| self.has_checkpoint(step));
        steps.reverse();
        let linked = [LATEST_LINK, BEST_LINK].map(|name| fs::read_link(self.dir.join(name)).ok());
        for step in steps.into_iter().skip(keep) {
            let name = format!("step_{step}");
            if linked.iter().flatten().any(|target| target.as_path() == Path::new(&name)) {
                continue;
            }
            // Renamed first, so that a half-removed folder is never taken for a checkpoint.
            let path = self.dir.join(name);
            let partial = atomic::partial_path(&path);
            fs::rename(&path, &partial).map_err(FileError::at("removing", &path))?;
            fs::remove_dir_all(&partial).map_err(FileError::at("removing", &partial))?;
        }
        Ok(())
    }

    /// Points the symlink `name` at the checkpoint of `step`.
    pub(super) fn set_link(&self, name: &str, step: usize) -> anyhow::Result<()> {
        let (link, fresh) = (self.dir.join(name), self.dir.join(format!("{name}.partial")));
        let _ = fs::remove_file(&fresh);
        if let Err(error) = symlink(format!("step_{step}"), &fresh) {
            tracing::warn!(
                "{}: no link ({error}); a resume takes the checkpoint of the most steps",
                link.display()
            );
            return Ok(());
        }
        // A copy that followed links has a folder in place of the link.
        if link.symlink_metadata().is_ok_and(|found| found.is_dir()) {
            fs::remove_dir_all(&link).map_err(FileError::at("removing", &link))?;
        }
        fs::rename(&fresh, &link).map_err(FileError::at("writing", &link))?;
        let dir = fs::File::open(&self.dir).and_then(|dir| dir.sync_all());
        Ok(dir.map_err(FileError::at("syncing", &self.dir))?)
    }

    fn has_checkpoint(&self, step: usize) -> bool {
        self.dir.join(format!("step_{step}")).join(TRAIN_STATE_FILE).is_file()
    }
}

#[cfg(test)]
mod tests {
    use super::super::DataId;
    use super::*;

    fn with_steps(steps: &[usize]) -> (tempfile::TempDir, Checkpoints) {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(dir.path().to_path_buf());
        for step in steps {
            let path = dir.path().join(format!("step_{step}"));
            fs::create_dir(&path).unwrap();
            fs::write(path.join(TRAIN_STATE_FILE), "{}").unwrap();
        }
        (dir, checkpoints)
    }

    fn left(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with("step_"))
            .collect();
        names.sort();
        names
    }

    #[test]
    fn the_newest_the_latest_and_the_best_stay() {
        let (dir, checkpoints) = with_steps(&[0, 3, 6, 9, 12]);
        checkpoints.set_link(LATEST_LINK, 12).unwrap();
        assert!(checkpoints.mark_best(3, 2.5).unwrap());
        assert!(!checkpoints.mark_best(6, 2.5).unwrap() && !checkpoints.mark_best(9, 1.0).unwrap());
        checkpoints.prune(None).unwrap();
        assert_eq!(left(dir.path()).len(), 7);
        checkpoints.prune(Some(2)).unwrap();
        assert_eq!(left(dir.path()), ["step_12", "step_3", "step_9", "step_best", "step_latest"]);
        assert!(checkpoints.mark_best(12, 3.0).unwrap());
        checkpoints.prune(Some(1)).unwrap();
        assert_eq!(left(dir.path()), ["step_12", "step_best", "step_latest"]);
        assert_eq!(checkpoints.read_best().unwrap(), Some(BestCheckpoint { step: 12, tau: 3.0 }));
        assert!(checkpoints.mark_best(15, 4.0).unwrap_err().to_string().contains("no checkpoint of step 15"));
    }

    /// The run is killed after saving the best checkpoint and before marking it. The resumed run
    /// starts after that step and would never measure it again.
    #[test]
    fn a_kill_between_save_and_mark_costs_no_best() {
        let (dir, checkpoints) = with_steps(&[3, 6]);
        assert!(checkpoints.mark_best(3, 2.5).unwrap());
        checkpoints.set_link(LATEST_LINK, 6).unwrap();
        let data = DataId { digest: "d".into(), rounding: None, thinking: None };
        let state = |tau| TrainState { tau, ..TrainState::new(6, 4, &data, 1) };
        checkpoints.recover_best(&state(None)).unwrap();
        checkpoints.recover_best(&state(Some(2.0))).unwrap();
        assert_eq!(checkpoints.read_best().unwrap(), Some(BestCheckpoint { step: 3, tau: 2.5 }));
        checkpoints.recover_best(&state(Some(3.0))).unwrap();
        assert_eq!(checkpoints.read_best().unwrap(), Some(BestCheckpoint { step: 6, tau: 3.0 }));
        assert_eq!(fs::read_link(dir.path().join(BEST_LINK)).unwrap(), Path::new("step_6"));
    }

    /// The record names step 6, the link still step 3.
    #[test]
    fn a_kill_between_record_and_link_is_made_good() {
        let (dir, checkpoints) = with_steps(&[3, 6, 9]);
        assert!(checkpoints.mark_best(3, 2.5).unwrap());
        let best = BestCheckpoint { step: 6, tau: 3.0 };
        atomic::write_json(&dir.path().join(BEST_FILE), &best).unwrap();
        let data = DataId { digest: "d".into(), rounding: None, thinking: None };
        checkpoints.recover_best(&TrainState::new(9, 4, &data, 1)).unwrap();
        assert_eq!(checkpoints.read_best().unwrap(), Some(best));
        checkpoints.set_link(LATEST_LINK, 9).unwrap();
        checkpoints.prune(Some(1)).unwrap();
        assert_eq!(left(dir.path()), ["step_6", "step_9", "step_best", "step_latest"]);
    }

    #[test]
    fn an_older_latest_stays() {
        let (dir, checkpoints) = with_steps(&[3, 6, 9]);
        checkpoints.set_link(LATEST_LINK, 3).unwrap();
        checkpoints.prune(Some(1)).unwrap();
        assert_eq!(left(dir.path()), ["step_3", "step_9", "step_latest"]);
    }
}
