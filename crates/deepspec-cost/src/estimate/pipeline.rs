//! Work of all stages, and their time on a number of devices.

use serde::Serialize;

use crate::estimate::{Machine, Stage, Work};

/// Work of the stages. Except for training, it is the work of one device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Pipeline {
    /// Work of the target answering its share of the prompts.
    pub answers: Work,
    /// Work of capturing hidden states: once if they are cached, otherwise in every epoch.
    pub states: Work,
    /// Training of the drafter.
    pub training: TrainingWork,
    /// Work of evaluating the drafter.
    pub evaluation: Work,
    /// Bytes written to disk.
    pub bytes: DiskBytes,
}

/// Work of training.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TrainingWork {
    /// Number of optimiser steps.
    pub steps: f64,
    /// Number of samples per step, over all devices.
    pub samples_per_step: usize,
    /// Maximum number of samples per forward.
    pub samples_per_forward: usize,
    /// Work of forward and backward over one sample.
    pub sample: Work,
    /// Work of the optimiser update on each device.
    pub update: Work,
    /// Bytes of gradients that are all-reduced in every step.
    pub gradients: f64,
    /// Bytes of hidden states that are read per sample.
    pub read: f64,
}

/// Bytes on disk.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DiskBytes {
    /// Size of the cache of hidden states; 0 without one.
    pub states: f64,
    /// Size of a checkpoint, including the state for resuming.
    pub checkpoint: f64,
}

/// Estimated times of the stages.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Estimate {
    /// Number of devices.
    pub devices: usize,
    /// Seconds of each stage with known rates, in order.
    pub stages: Vec<(Stage, f64)>,
    /// Seconds of a training step; None without known rates.
    pub step_seconds: Option<f64>,
    /// Seconds of the all-reduce in a training step, which does not overlap with other work.
    pub reduce_seconds: f64,
    /// Bytes of hidden states that all devices read per second of training.
    pub read_per_second: Option<f64>,
}

impl Estimate {
    /// Seconds of all stages with known rates.
    pub fn seconds(&self) -> f64 {
        self.stages.iter().map(|(_, seconds)| seconds).sum()
    }

    /// Device hours: hours times devices.
    pub fn device_hours(&self) -> f64 {
        self.seconds() * self.devices as f64 / 3600.0
    }
}

impl TrainingWork {
    /// Work of one device in a training step on n devices, without the optimiser update.
    pub fn work_per_device(&self, devices: usize) -> Work {
        let samples = self.samples_per_step.div_ceil(devices);
        let forwards = samples.div_ceil(self.samples_per_forward);
        Work { passes: forwards as f64, ..self.sample * samples as f64 }
    }
}

impl Pipeline {
    /// Estimates the times on the n devices that the work was counted for. Samples are divided
    /// among the devices, and gradients are all-reduced after the last backward.
    pub fn estimate_on(&self, machine: &Machine, devices: usize) -> Estimate {
        let TrainingWork { steps, gradients, update, read, samples_per_step, .. } = self.training;
        let reduce_seconds = machine.link.reduce_seconds(gradients, devices);
        let step_seconds = machine.rates(Stage::Training).map(|(rates, _)| {
            rates.seconds(self.training.work_per_device(devices)) + rates.seconds(update) + reduce_seconds
        });
        let of = |stage, work: Work| Some(machine.rates(stage)?.0.seconds(work));
        let stages = Stage::ALL.into_iter().filter_map(|stage| {
            let seconds = match stage {
                Stage::Answers => of(stage, self.answers),
                Stage::States => of(stage, self.states),
                Stage::Training => step_seconds.map(|seconds| seconds * steps),
                Stage::Evaluation => of(stage, self.evaluation),
            };
            Some((stage, seconds?))
        });
        Estimate {
            devices,
            stages: stages.collect(),
            step_seconds,
            reduce_seconds,
            read_per_second: step_seconds.map(|seconds| read * samples_per_step as f64 / seconds),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::{Link, MeasuredWork};

    fn pipeline() -> Pipeline {
        let work = Work { operations: 100.0, bytes: 0.0, passes: 0.0 };
        let training = TrainingWork {
            steps: 10.0,
            samples_per_step: 8,
            samples_per_forward: 2,
            sample: Work { operations: 1.0, ..Work::default() },
            update: Work { bytes: 4.0, ..Work::default() },
            gradients: 30.0,
            read: 5.0,
        };
        let bytes = DiskBytes { states: 0.0, checkpoint: 0.0 };
        Pipeline { answers: work, states: work, training, evaluation: work, bytes }
    }

    fn machine() -> Machine {
        let of = |stage, work, seconds| MeasuredWork { stage, work, seconds };
        let operations = |operations| Work { operations, ..Work::default() };
        let measured = [
            of(Stage::Training, operations(2.0), 1.0),
            of(Stage::Training, Work { bytes: 1.0, ..Work::default() }, 0.25),
            of(Stage::Training, Work { passes: 10.0, ..Work::default() }, 1.0),
            of(Stage::States, operations(50.0), 1.0),
        ];
        let mut machine = Machine::without_rates("test").with_measurements(&measured);
        machine.link = Link { bytes_per_second: 15.0 };
        machine
    }

    #[test]
    fn more_devices_do_less_each_but_sum_more() {
        let steps = [1, 2, 4].map(|devices| pipeline().estimate_on(&machine(), devices));
        // 8 samples at half a second, 4 forwards at a tenth, and an update of one second.
        let expected = [4.0 + 0.4 + 1.0, 2.0 + 0.2 + 1.0 + 2.0, 1.0 + 0.1 + 1.0 + 3.0];
        for (estimate, expected) in steps.iter().zip(expected) {
            assert!((estimate.step_seconds.unwrap() - expected).abs() < 1e-6, "{estimate:?}");
            assert!((estimate.read_per_second.unwrap() - 40.0 / expected).abs() < 1e-6);
        }
        assert_eq!(
            steps[1].stages.iter().map(|of| of.0).collect::<Vec<_>>(),
            [Stage::States, Stage::Training]
        );
        assert!((steps[1].stages[0].1 - 2.0).abs() < 1e-9, "100 operations at a fiftieth");
        assert!((steps[1].device_hours() - 2.0 * (2.0 + 52.0) / 3600.0).abs() < 1e-9);
    }

    #[test]
    fn samples_that_do_not_divide_make_some_device_wait() {
        let of = |devices| pipeline().training.work_per_device(devices);
        assert_eq!((of(3).operations, of(3).passes), (3.0, 2.0));
        assert_eq!((of(64).operations, of(64).passes), (1.0, 1.0));
    }
}
