//! `calibration.json`.

use std::path::Path;

use deepspec_core::digest::short;
use deepspec_core::{atomic, usage};
use deepspec_models::{config_digest, weights_digest};
use deepspec_schedule::reliability::ReliabilityReport;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::results::{DrafterIdentity, TargetIdentity};

const FORMAT: &str = "deepspec-calibration";
const VERSION: u64 = 1;

/// Temperatures for the confidences of one drafter, how they were found, and what they are worth.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    format: String,
    format_version: u64,
    tool_version: String,
    /// The drafter they are for.
    drafter: DrafterIdentity,
    /// The target it drafted for.
    target: TargetIdentity,
    /// Temperature of the run that was observed.
    sampling_temperature: f64,
    /// t_1, t_2, …: divide the confidence logits.
    pub temperatures: Vec<f64>,
    /// How each was found.
    pub fit: Vec<Option<Fit>>,
    /// Prompts whose blocks the temperatures were fitted to.
    pub fit_prompts: usize,
    /// What they are worth on other prompts.
    pub held_out: HeldOut,
}

/// The temperature of a position on the prompts it was fitted to.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Fit {
    /// Blocks that reached the position.
    pub count: usize,
    /// Calibration error with all temperatures 1.
    pub ece_before: f64,
    /// Calibration error with those found.
    pub ece_after: f64,
}

/// Reliability on prompts that had no say in the temperatures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeldOut {
    /// How many.
    pub prompts: usize,
    /// With all temperatures 1.
    pub before: ReliabilityReport,
    /// With the temperatures.
    pub after: ReliabilityReport,
    /// 95 % quantile of the mean calibration error when outcomes are drawn from the calibrated confidences themselves.
    pub ece_of_chance: f64,
}

impl Calibration {
    /// Everything but what stays the same.
    pub fn new(
        (drafter, target): (DrafterIdentity, TargetIdentity),
        sampling_temperature: f64,
        temperatures: Vec<f64>,
        fit: Vec<Option<Fit>>,
        fit_prompts: usize,
        held_out: HeldOut,
    ) -> Self {
        let (format, tool_version) = (FORMAT.into(), env!("CARGO_PKG_VERSION").into());
        Self {
            format,
            format_version: VERSION,
            tool_version,
            drafter,
            target,
            sampling_temperature,
            temperatures,
            fit,
            fit_prompts,
            held_out,
        }
    }

    /// Reads a calibration.
    ///
    /// # Errors
    /// Usage errors: no such file, not a calibration that this version reads.
    pub fn read(file: &Path) -> anyhow::Result<Self> {
        if !file.is_file() {
            usage!("{} does not exist; `deepspec-eval calibrate` writes it", file.display());
        }
        let json: Value = match serde_json::from_str(&atomic::read_text(file)?) {
            Ok(json) => json,
            Err(error) => usage!("{}: not valid JSON: {error}", file.display()),
        };
        if json["format"] != FORMAT || json["format_version"] != VERSION {
            usage!("{}: not a calibration; expected {FORMAT} {VERSION}", file.display());
        }
        let read: Self = match serde_json::from_value(json) {
            Ok(read) => read,
            Err(error) => usage!("{}: {error}", file.display()),
        };
        match deepspec_schedule::calibrate::Calibration::new(read.temperatures.clone()) {
            Ok(_) => Ok(read),
            Err(error) => usage!("{}: `temperatures`: {error}", file.display()),
        }
    }

    /// The temperatures, if they were found for the drafter in `dir`.
    ///
    /// # Errors
    /// A usage error if they were not.
    pub fn for_drafter(self, file: &Path, dir: &Path) -> anyhow::Result<Vec<f64>> {
        let theirs = [&self.drafter.config_digest, &self.drafter.weights_digest];
        let ours = [&config_digest(dir)?, &weights_digest(dir)?];
        for ((what, theirs), ours) in ["config", "weights"].into_iter().zip(theirs).zip(ours) {
            if theirs != ours {
                usage!(
                    "{} was found for the drafter {} ({what} {}), not for {} ({what} {}); calibrate this one",
                    file.display(),
                    self.drafter.path,
                    short(theirs),
                    dir.display(),
                    short(ours)
                );
            }
        }
        Ok(self.temperatures)
    }
}
