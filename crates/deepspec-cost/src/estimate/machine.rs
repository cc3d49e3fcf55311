//! Speed of the devices that a pipeline runs on.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::economics::{ACCELERATORS, Hardware};
use serde::Serialize;

use crate::estimate::{FittedRates, MeasuredWork, Rates, ScaleError, Stage};

/// Assumed share of an accelerator's peak that passes over whole sequences reach. Published figures
/// are 43.5 % for SpecForge's trainer, and the same for its capture of hidden states (H200, August
/// 2026).
const SEQUENCE_PASS_SHARE: f64 = 0.43;
/// Assumed share of peak and bandwidth that decoding reaches.
const DECODING_SHARE: f64 = 0.5;

/// One device, and its link to other devices.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Machine {
    /// Name of the device.
    pub name: String,
    /// Rates of each stage, and their source.
    rates: BTreeMap<Stage, (Rates, RateSource)>,
    /// Link to other devices.
    pub link: Link,
}

/// Source of a stage's rates.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RateSource {
    /// A share of the vendor's figures.
    Stated {
        /// Share of peak and bandwidth.
        share: f64,
    },
    /// Fitted to measurements.
    Measured {
        /// Number of measurements.
        count: usize,
        /// Largest relative error of a fitted time.
        worst: f64,
    },
}

/// Link over which gradients are all-reduced.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Link {
    /// Bytes per second in each direction, both at once.
    pub bytes_per_second: f64,
}

impl Link {
    /// Seconds of a ring all-reduce of `bytes` over n devices: each device sends 2 (n − 1) / n of
    /// the bytes (Patarasuk & Yuan 2009).
    pub fn reduce_seconds(&self, bytes: f64, devices: usize) -> f64 {
        let devices = devices as f64;
        2.0 * (devices - 1.0) / devices * bytes / self.bytes_per_second
    }
}

impl Machine {
    /// A machine whose rates are published or assumed shares of the vendor's figures.
    pub fn from_vendor_figures(name: &str, hardware: &Hardware) -> Self {
        let rates = Stage::ALL.map(|stage| {
            let share = match stage {
                Stage::Answers | Stage::Evaluation => DECODING_SHARE,
                Stage::States | Stage::Training => SEQUENCE_PASS_SHARE,
            };
            (stage, (Rates::from_peak_share(hardware, share), RateSource::Stated { share }))
        });
        Self { name: name.into(), rates: rates.into(), link: Link { bytes_per_second: hardware.link } }
    }

    /// The accelerator `hardware`, if given, with rates fitted to the measurements that `read`
    /// reads from the files `measured`.
    ///
    /// # Errors
    /// As [`read_hardware`] and `read`.
    pub fn from_measurements(
        hardware: Option<&str>,
        measured: &[PathBuf],
        read: impl Fn(&Path) -> Result<Vec<MeasuredWork>, ScaleError>,
    ) -> Result<Self, ScaleError> {
        let machine = match hardware {
            Some(name) => Self::from_vendor_figures(name, &read_hardware(name)?),
            None => Self::without_rates("what was measured"),
        };
        let mut found = vec![];
        for file in measured {
            found.extend(read(file)?);
        }
        Ok(machine.with_measurements(&found))
    }

    /// A machine without known rates.
    pub fn without_rates(name: &str) -> Self {
        Self { name: name.into(), rates: BTreeMap::new(), link: Link { bytes_per_second: f64::INFINITY } }
    }

    /// Replaces the rates of the measured stages by fitted ones.
    #[must_use]
    pub fn with_measurements(mut self, measured: &[MeasuredWork]) -> Self {
        for stage in Stage::ALL {
            let of_stage = measured.iter().filter(|one| one.stage == stage);
            let count = of_stage.clone().count();
            if count > 0 {
                let FittedRates { rates, worst } = Rates::fit(of_stage);
                self.rates.insert(stage, (rates, RateSource::Measured { count, worst }));
            }
        }
        self
    }

    /// Rates of a stage and their source; None if unknown.
    pub fn rates(&self, stage: Stage) -> Option<(Rates, RateSource)> {
        self.rates.get(&stage).copied()
    }
}

/// The accelerator of this name, or the one described by a YAML file.
///
/// # Errors
/// Fails if neither exists, or if the file is invalid; the message names `--hardware`.
pub fn read_hardware(name: &str) -> Result<Hardware, ScaleError> {
    if let Some((_, known)) = ACCELERATORS.iter().find(|(known, _)| *known == name) {
        return Ok(*known);
    }
    let content = |problem: String| ScaleError::Content { path: name.into(), problem };
    let Ok(text) = fs::read_to_string(name) else {
        let known = ACCELERATORS.map(|(name, _)| name).join(", ");
        return Err(ScaleError::Hardware { name: name.into(), known });
    };
    let hardware: Hardware = serde_yaml::from_str(&text).map_err(|error| content(error.to_string()))?;
    hardware.describe_invalid_value().map_or(Ok(hardware), |problem| Err(content(problem)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::Work;

    #[test]
    fn a_ring_sends_twice_what_there_is_when_it_is_long() {
        let link = Link { bytes_per_second: 10.0 };
        assert_eq!(link.reduce_seconds(100.0, 1), 0.0);
        assert_eq!(link.reduce_seconds(100.0, 2), 10.0);
        assert!((link.reduce_seconds(100.0, 1000) - 20.0).abs() < 0.1);
    }

    #[test]
    fn what_was_measured_takes_the_place_of_what_is_stated() {
        let h100 = read_hardware("h100").unwrap();
        let work = Work { operations: 1e15, ..Work::default() };
        let machine = Machine::from_vendor_figures("h100", &h100);
        let seconds = |machine: &Machine| machine.rates(Stage::Training).unwrap().0.seconds(work);
        assert!((seconds(&machine) - 1e15 / (0.989e15 * SEQUENCE_PASS_SHARE)).abs() < 1e-9);
        let machine =
            machine.with_measurements(&[MeasuredWork { stage: Stage::Training, work, seconds: 4.0 }]);
        assert!((seconds(&machine) - 4.0).abs() < 1e-9);
        assert!(matches!(machine.rates(Stage::Training).unwrap().1, RateSource::Measured { count: 1, .. }));
        assert!(matches!(machine.rates(Stage::Answers).unwrap().1, RateSource::Stated { .. }));
        assert_eq!(Machine::without_rates("this").rates(Stage::States), None);
    }

    #[test]
    fn hardware_is_a_name_or_a_file() {
        let error = read_hardware("h1000").unwrap_err().to_string();
        assert!(error.contains("--hardware h1000") && error.contains("mi300x"), "{error}");
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("own.yaml");
        fs::write(&file, "{bandwidth: 1e11, bf16: -1, fp8: 1e12, fp4: 1e12}").unwrap();
        let error = read_hardware(file.to_str().unwrap()).unwrap_err().to_string();
        assert!(error.contains("own.yaml") && error.contains("`bf16` is -1"), "{error}");
    }
}
