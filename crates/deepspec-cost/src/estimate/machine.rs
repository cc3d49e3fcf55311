//! The devices that a pipeline runs on.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::economics::{HARDWARE, Hardware};
use serde::Serialize;

use crate::estimate::{Fit, Measured, Rates, ScaleError, Stage};

/// Share of an accelerator's peak that passes over whole sequences reach where nothing was measured: 43.5 % was published of a rival's
/// trainer and as much of its capture of states (SpecForge, H200, August 2026).
const SEQUENCES: f64 = 0.43;
/// The same of decoding, of peak and of bandwidth: an assumption.
const DECODING: f64 = 0.5;

/// One device, and the way from it to others.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Machine {
    /// What it is called.
    pub name: String,
    /// How fast it is at each stage, and how that is known.
    rates: BTreeMap<Stage, (Rates, Basis)>,
    /// To other devices.
    pub link: Link,
}

/// How rates are known.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// A share of what the makers state.
    Stated {
        /// Of the peak and of the bandwidth.
        share: f64,
    },
    /// Told from measurements.
    Measured {
        /// How many.
        count: usize,
        /// The furthest that a time told by them is off a measured one, as a share of it.
        worst: f64,
    },
}

/// How tensors are summed over devices.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Link {
    /// Bytes per second that a device sends while it receives as many.
    pub bytes_per_second: f64,
}

impl Link {
    /// Seconds of summing so many bytes over n devices that stand in a ring: each sends 2 (n − 1) / n of them (Patarasuk & Yuan 2009).
    pub fn reduce_seconds(&self, bytes: f64, devices: usize) -> f64 {
        let devices = devices as f64;
        2.0 * (devices - 1.0) / devices * bytes / self.bytes_per_second
    }
}

impl Machine {
    /// An accelerator as its makers state it, at shares that were published or are assumed.
    pub fn stated(name: &str, hardware: &Hardware) -> Self {
        let rates = Stage::ALL.map(|stage| {
            let share = match stage {
                Stage::Answers | Stage::Evaluation => DECODING,
                Stage::States | Stage::Training => SEQUENCES,
            };
            (stage, (Rates::share_of(hardware, share), Basis::Stated { share }))
        });
        Self { name: name.into(), rates: rates.into(), link: Link { bytes_per_second: hardware.link } }
    }

    /// The accelerator of this name or file, if one is meant, with the rates of what was measured in these files, which `read` reads.
    ///
    /// # Errors
    /// As [`read_hardware`] and `read`.
    pub fn open(
        hardware: Option<&str>,
        measured: &[PathBuf],
        read: impl Fn(&Path) -> Result<Vec<Measured>, ScaleError>,
    ) -> Result<Self, ScaleError> {
        let machine = match hardware {
            Some(name) => Self::stated(name, &read_hardware(name)?),
            None => Self::unknown("what was measured"),
        };
        let mut found = vec![];
        for file in measured {
            found.extend(read(file)?);
        }
        Ok(machine.measured(&found))
    }

    /// A device of which nothing is stated.
    pub fn unknown(name: &str) -> Self {
        Self { name: name.into(), rates: BTreeMap::new(), link: Link { bytes_per_second: f64::INFINITY } }
    }

    /// With the rates of the stages that were measured in place of stated ones.
    #[must_use]
    pub fn measured(mut self, measured: &[Measured]) -> Self {
        for stage in Stage::ALL {
            let of_stage = measured.iter().filter(|one| one.stage == stage);
            let count = of_stage.clone().count();
            if count > 0 {
                let Fit { rates, worst } = Rates::fit(of_stage);
                self.rates.insert(stage, (rates, Basis::Measured { count, worst }));
            }
        }
        self
    }

    /// How fast it is at a stage, and how that is known; none where it is not.
    pub fn rates(&self, stage: Stage) -> Option<(Rates, Basis)> {
        self.rates.get(&stage).copied()
    }
}

/// The accelerator of this name, or the one that a YAML file describes.
///
/// # Errors
/// There is neither, or the file describes none; the message names `--hardware`.
pub fn read_hardware(name: &str) -> Result<Hardware, ScaleError> {
    if let Some((_, known)) = HARDWARE.iter().find(|(known, _)| *known == name) {
        return Ok(*known);
    }
    let content = |problem: String| ScaleError::Content { path: name.into(), problem };
    let Ok(text) = fs::read_to_string(name) else {
        let known = HARDWARE.map(|(name, _)| name).join(", ");
        return Err(ScaleError::Hardware { name: name.into(), known });
    };
    let hardware: Hardware = serde_yaml::from_str(&text).map_err(|error| content(error.to_string()))?;
    hardware.problem().map_or(Ok(hardware), |problem| Err(content(problem)))
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
        let machine = Machine::stated("h100", &h100);
        let seconds = |machine: &Machine| machine.rates(Stage::Training).unwrap().0.seconds(work);
        assert!((seconds(&machine) - 1e15 / (0.989e15 * SEQUENCES)).abs() < 1e-9);
        let machine = machine.measured(&[Measured { stage: Stage::Training, work, seconds: 4.0 }]);
        assert!((seconds(&machine) - 4.0).abs() < 1e-9);
        assert!(matches!(machine.rates(Stage::Training).unwrap().1, Basis::Measured { count: 1, .. }));
        assert!(matches!(machine.rates(Stage::Answers).unwrap().1, Basis::Stated { .. }));
        assert_eq!(Machine::unknown("this").rates(Stage::States), None);
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
