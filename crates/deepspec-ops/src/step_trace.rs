//! A trace of some steps of a long run.

use std::fs;
use std::path::{Path, PathBuf};

use tch::Device;

use crate::ffi::ProfileRecording;

/// Steps that are skipped before the recording. They allocate memory, choose kernels and wait for data.
const WARM_UP_STEPS: usize = 3;

/// Number of recorded steps.
const RECORDED_STEPS: usize = 5;

/// Records some steps of its thread, and writes a file for chrome://tracing and ui.perfetto.dev.
pub struct StepTrace {
    path: Option<PathBuf>,
    with_gpu: bool,
    begun: usize,
    profile: Option<ProfileRecording>,
}

impl StepTrace {
    /// A trace that records nothing.
    pub fn disabled() -> Self {
        Self { path: None, with_gpu: false, begun: 0, profile: None }
    }

    /// A trace that skips three steps, records five, and writes them to `path`. If `path` exists, as in a
    /// resumed run, it records nothing and logs a warning.
    ///
    /// # Errors
    /// If `path` cannot be written.
    pub fn new(path: &Path, device: Device) -> Result<Self, String> {
        if path.exists() {
            tracing::warn!(
                "--torch-profile {}: there is such a file already; nothing is recorded",
                path.display()
            );
            return Ok(Self::disabled());
        }
        let partial = partial_path(path);
        let tried = fs::File::create(&partial).and_then(|_| fs::remove_file(&partial));
        tried.map_err(|error| format!("--torch-profile {}: {error}", path.display()))?;
        let with_gpu = matches!(device, Device::Cuda(_));
        Ok(Self { path: Some(path.to_path_buf()), with_gpu, ..Self::disabled() })
    }

    /// Call this before each step. If recording or writing fails, it logs a warning, and the run continues.
    pub fn begin_step(&mut self) {
        let Some(path) = &self.path else { return };
        self.begun += 1;
        if self.begun == WARM_UP_STEPS + 1 {
            match ProfileRecording::start(self.with_gpu) {
                Ok(profile) => self.profile = Some(profile),
                Err(problem) => {
                    tracing::warn!("--torch-profile {}: nothing is recorded: {problem}", path.display());
                    self.path = None;
                }
            }
        } else if self.begun == WARM_UP_STEPS + RECORDED_STEPS + 1 {
            self.finish();
        }
    }

    /// Writes the recorded steps, if they have not been written yet. Call this after the last step.
    pub fn finish(&mut self) {
        let Some(path) = self.path.take() else { return };
        let shown = path.display();
        let Some(profile) = self.profile.take() else {
            tracing::warn!(
                "--torch-profile {shown}: nothing to write; the first {WARM_UP_STEPS} steps are let pass, and there were no more"
            );
            return;
        };
        let partial = partial_path(&path);
        let written = profile
            .write(&partial)
            .and_then(|()| fs::rename(&partial, &path).map_err(|error| error.to_string()));
        match written {
            Ok(()) => {
                tracing::info!("where time went: {shown}; the speed of those steps includes the recording")
            }
            Err(problem) => tracing::warn!("--torch-profile {shown}: not written: {problem}"),
        }
    }
}

/// Temporary path of the trace, until it is complete.
fn partial_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(".partial");
    name.into()
}

#[cfg(test)]
mod tests {
    use tch::{Kind, Tensor};

    use super::*;
    use crate::range;

    #[test]
    fn some_steps_are_recorded_with_their_ranges() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        let mut trace = StepTrace::new(&path, Device::Cpu).unwrap();
        let x = Tensor::ones([8, 8], (Kind::Float, Device::Cpu));
        for step in 0..WARM_UP_STEPS + RECORDED_STEPS + 4 {
            trace.begin_step();
            assert_eq!(path.exists(), step >= WARM_UP_STEPS + RECORDED_STEPS, "before step {step}");
            let _range = range(c"a range of ours");
            let _ = x.mm(&x);
        }
        trace.finish();
        let text = fs::read_to_string(&path).unwrap();
        for name in ["a range of ours", "aten::mm"] {
            assert_eq!(text.matches(&format!("\"{name}\"")).count(), RECORDED_STEPS, "{name}");
        }
        // An existing file stays, and a recording ends when it is dropped.
        let mut other = StepTrace::new(&path, Device::Cpu).unwrap();
        (0..20).for_each(|_| other.begin_step());
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        let mut dropped = StepTrace::new(&folder.path().join("dropped.json"), Device::Cpu).unwrap();
        (0..WARM_UP_STEPS + 2).for_each(|_| dropped.begin_step());
        drop(dropped);
        assert!(ProfileRecording::start(false).is_ok(), "the dropped one still records");
        let nowhere = folder.path().join("nowhere/trace.json");
        assert!(StepTrace::new(&nowhere, Device::Cpu).is_err_and(|said| said.contains("nowhere")));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "something was left");
    }
}
