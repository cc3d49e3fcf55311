//! The file `calibration.json`.

use std::collections::BTreeMap;
use std::path::Path;

use deepspec_core::digest::short_digest;
use deepspec_core::usage;
use deepspec_cost::reliability::ReliabilityReport;
use deepspec_models::{config_digest, weights_digest};
use serde::{Deserialize, Serialize};

use crate::results::{DrafterIdentity, TargetIdentity};
use crate::statistics::Interval;
use crate::versioned;

const FORMAT_NAME: &str = "deepspec-calibration";
const FORMAT_VERSION: u64 = 1;

/// Temperatures for the confidences of one drafter, their fits, and their effect on held-out
/// prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    format: String,
    format_version: u64,
    tool_version: String,
    /// The drafter that the temperatures belong to.
    drafter: DrafterIdentity,
    /// The target that the drafter drafted for.
    target: TargetIdentity,
    /// Sampling temperature of the run that was observed.
    sampling_temperature: f64,
    /// Temperatures t_1, t_2, … by position, which divide the confidence logits.
    pub temperatures: Vec<f64>,
    /// Fit of each temperature; None for a position without observations.
    pub fit: Vec<Option<TemperatureFit>>,
    /// Number of prompts whose blocks the temperatures were fitted to.
    pub fit_prompts: usize,
    /// Reliability on the held-out prompts.
    pub held_out: HeldOutReport,
    /// Fits by other methods on the same prompts, tested on the same held-out prompts. Files of
    /// earlier versions lack them.
    #[serde(default)]
    pub alternatives: Vec<AlternativeFit>,
}

/// Temperatures from a fit method other than the default, for comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AlternativeFit {
    /// Method: `pooled` (one for all positions), `joint` (all positions together), or `by domain`
    /// (one list of temperatures per domain, fitted like `temperatures`).
    pub method: String,
    /// t_1, t_2, … by domain. The key is `all` if one list serves all domains.
    pub temperatures: BTreeMap<String, Vec<f64>>,
    /// Mean calibration error on the held-out prompts.
    pub ece: Option<f64>,
    /// 95 % interval, over resampled prompts, of this error minus that of `temperatures`: below 0
    /// is better.
    pub change: Option<Interval>,
}

/// Fit of the temperature of one position.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TemperatureFit {
    /// Number of blocks that reached the position.
    pub count: usize,
    /// Calibration error with all temperatures 1.
    pub ece_before: f64,
    /// Calibration error with the fitted temperatures.
    pub ece_after: f64,
}

/// Reliability on prompts that the temperatures were not fitted to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeldOutReport {
    /// Number of held-out prompts.
    pub prompts: usize,
    /// Reliability with all temperatures 1.
    pub before: ReliabilityReport,
    /// Reliability with the fitted temperatures.
    pub after: ReliabilityReport,
    /// 95 % quantile of the mean calibration error if outcomes are drawn from the calibrated
    /// confidences, independently for each block.
    pub ece_of_chance: f64,
    /// `ece_of_chance` of the raw confidences. This field and the next are absent from files of
    /// earlier versions.
    #[serde(default)]
    pub ece_of_chance_before: Option<f64>,
    /// Mean calibration errors over resampled prompts.
    #[serde(default)]
    pub bootstrap: Option<EceBootstrap>,
}

/// Bootstrap over prompts of the mean calibration errors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EceBootstrap {
    /// Error with all temperatures 1.
    pub before: EceUncertainty,
    /// Error with the fitted temperatures.
    pub after: EceUncertainty,
    /// 95 % interval of the difference (error after minus error before), over the same resamples.
    /// If it is below 0 the temperatures help, and if it is above 0 they harm.
    pub change: Option<Interval>,
}

/// Uncertainty of a mean calibration error.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EceUncertainty {
    /// 95 % bootstrap interval of the error over prompts.
    pub interval: Option<Interval>,
    /// 95 % quantile of the error that differences between prompts alone would cause.
    pub ece_of_chance: f64,
}

impl Calibration {
    /// A calibration of this version's format.
    pub fn new(
        (drafter, target): (DrafterIdentity, TargetIdentity),
        sampling_temperature: f64,
        temperatures: Vec<f64>,
        fit: Vec<Option<TemperatureFit>>,
        fit_prompts: usize,
        held_out: HeldOutReport,
        alternatives: Vec<AlternativeFit>,
    ) -> Self {
        let (format, tool_version) = (FORMAT_NAME.into(), deepspec_core::VERSION.into());
        Self {
            format,
            format_version: FORMAT_VERSION,
            tool_version,
            drafter,
            target,
            sampling_temperature,
            temperatures,
            fit,
            fit_prompts,
            held_out,
            alternatives,
        }
    }

    /// Reads a `calibration.json`.
    ///
    /// # Errors
    /// Usage errors: the file does not exist, or this version cannot read it as a calibration.
    pub fn read(file: &Path) -> anyhow::Result<Self> {
        if !file.is_file() {
            usage!("{} does not exist; `deepspec-eval calibrate` writes it", file.display());
        }
        let read: Self = versioned::read(file, (FORMAT_NAME, FORMAT_VERSION), "not a calibration")?;
        match read.describe_invalid_value() {
            Some(problem) => usage!("{}: {problem}; run `deepspec-eval calibrate` again", file.display()),
            None => Ok(read),
        }
    }

    /// Looks for invalid values in a file of the right layout, and describes the first one.
    fn describe_invalid_value(&self) -> Option<String> {
        let (found, block) = (self.temperatures.len(), self.drafter.block_size);
        if found > block {
            return Some(format!("`temperatures` has {found} values, blocks of the drafter {block} tokens"));
        }
        if found != self.fit.len() {
            return Some(format!("`temperatures` has {found} values, `fit` {}", self.fit.len()));
        }
        // The engine divides in float32, where a smaller temperature would be 0 or subnormal.
        let at = self.temperatures.iter().position(|&t| !(t > 0.0 && (t as f32).is_normal()))?;
        Some(format!("`temperatures[{at}]` is {:e}, no positive number of 32 bits", self.temperatures[at]))
    }

    /// Checks that the temperatures were fitted for the drafter in `dir`, and returns them.
    ///
    /// # Errors
    /// A usage error if they were fitted for another drafter.
    pub fn into_temperatures_for(self, file: &Path, dir: &Path) -> anyhow::Result<Vec<f64>> {
        let theirs = [&self.drafter.config_digest, &self.drafter.weights_digest];
        let ours = [&config_digest(dir)?, &weights_digest(dir)?];
        for ((what, theirs), ours) in ["config", "weights"].into_iter().zip(theirs).zip(ours) {
            if theirs != ours {
                usage!(
                    "{} was found for the drafter {} ({what} {}), not for {} ({what} {}); calibrate this one",
                    file.display(),
                    self.drafter.path,
                    short_digest(theirs),
                    dir.display(),
                    short_digest(ours)
                );
            }
        }
        Ok(self.temperatures)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use deepspec_core::cli::one_line;
    use deepspec_testkit::mutate::Fuzzer;
    use serde_json::{Value, json};

    use super::*;

    fn sound() -> Value {
        let target = json!({"path": "t", "config_digest": "a", "weights_digest": "b", "tokenizer_digest": "c",
            "template_digest": "d", "stop_ids": [1]});
        let drafter = json!({"path": "d", "config_digest": "a", "weights_digest": "b", "block_size": 3, "taps": [-1, 2]});
        let metrics =
            json!({"ece": 0.1, "auroc": 0.75, "brier": 0.2, "predicted_mean": 0.5, "accepted_mean": 0.5});
        let bin = json!({"low": 0.5, "high": 0.55, "count": 4, "predicted_mean": 0.52, "accepted_mean": 0.5});
        let position = json!({"count": 4, "metrics": metrics, "bins": [bin]});
        let report = json!({"positions": [position, position], "summary": metrics});
        json!({
            "format": FORMAT_NAME, "format_version": FORMAT_VERSION, "tool_version": "0", "drafter": drafter, "target": target,
            "sampling_temperature": 1.0, "temperatures": [1.5, 0.5], "fit_prompts": 4,
            "fit": [{"count": 8, "ece_before": 0.2, "ece_after": 0.1}, null],
            "held_out": {"prompts": 3, "before": report, "after": report, "ece_of_chance": 0.05}
        })
    }

    #[test]
    fn damaged_calibrations_are_refused_by_key() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("calibration.json");
        let sound = serde_json::to_vec_pretty(&sound()).unwrap();
        fs::write(&file, &sound).unwrap();
        assert_eq!(Calibration::read(&file).unwrap().temperatures, [1.5, 0.5]);
        let mut dice =
            Fuzzer::new(16, &["temperatures", "drafter", "fit", "held_out", FORMAT_NAME, "block_size"]);
        let mut refused = 0;
        for _ in 0..400 {
            fs::write(&file, dice.file(&sound)).unwrap();
            match Calibration::read(&file) {
                Ok(read) => {
                    let usable = |&t: &f64| t > 0.0 && (t as f32).is_normal();
                    assert!(
                        read.temperatures.iter().all(usable)
                            && read.temperatures.len() <= read.drafter.block_size
                    );
                    let told = read.into_temperatures_for(&file, dir.path()).unwrap_err();
                    assert!(one_line(&told).contains(dir.path().to_str().unwrap()), "{told}");
                }
                Err(error) => {
                    let told = one_line(&error);
                    assert!(told.contains("calibration.json: ") || told.contains("reading "), "{told}");
                    assert!(
                        told.contains("calibration.json") && !told.contains(char::is_control),
                        "{told:?}"
                    );
                    refused += 1;
                }
            }
        }
        assert!(refused > 200, "only {refused} of 400 were refused");
    }

    #[test]
    fn temperatures_must_fit_the_drafter() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("calibration.json");
        let told = |temperatures: Value| {
            let mut damaged = sound();
            damaged["temperatures"] = temperatures;
            fs::write(&file, damaged.to_string()).unwrap();
            let told = Calibration::read(&file).unwrap_err().to_string();
            told.rsplit_once("calibration.json: ").unwrap().1.to_string()
        };
        assert!(
            told(json!([1, 1, 1, 1]))
                .starts_with("`temperatures` has 4 values, blocks of the drafter 3 tokens")
        );
        assert!(told(json!([1])).starts_with("`temperatures` has 1 values, `fit` 2"));
        assert!(
            told(json!([1, 1e-300]))
                .starts_with("`temperatures[1]` is 1e-300, no positive number of 32 bits")
        );
        assert!(told(json!([-2, 1])).starts_with("`temperatures[0]` is -2e0,"));
        assert!(told(json!([1, "x"])).starts_with("`temperatures[1]`: invalid type: string"));
    }
}
