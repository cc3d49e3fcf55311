//! All stages, and what they take on a number of devices.

use serde::Serialize;

use crate::estimate::{Machine, Stage, Work};

/// What the stages do on a number of devices; but for training, what one of them does.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Pipeline {
    /// The target answers its share of the prompts.
    pub answers: Work,
    /// Its states are captured: once for a cache, in every epoch where they are not kept.
    pub states: Work,
    /// The drafter learns.
    pub training: Training,
    /// It is judged.
    pub evaluation: Work,
    /// What is written.
    pub bytes: Bytes,
}

/// Optimiser steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Training {
    /// How many.
    pub steps: f64,
    /// Samples of all devices in each.
    pub samples_per_step: usize,
    /// Samples of a forward, at most.
    pub samples_per_forward: usize,
    /// Forward and backward over one sample.
    pub sample: Work,
    /// What a device does to its weights at the end of a step.
    pub update: Work,
    /// Bytes of gradients, which are summed over the devices in every step.
    pub gradients: f64,
    /// Bytes of states that a sample is read with.
    pub read: f64,
}

/// Bytes on disk.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Bytes {
    /// The cache of states; 0 where there is none.
    pub states: f64,
    /// A checkpoint, with all that resuming takes.
    pub checkpoint: f64,
}

/// What the stages take.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Estimate {
    /// On so many devices.
    pub devices: usize,
    /// Seconds of each stage of which something is known, in their order.
    pub stages: Vec<(Stage, f64)>,
    /// Seconds of a training step; none where nothing is known.
    pub step_seconds: Option<f64>,
    /// Seconds of it that summing gradients takes, behind everything else.
    pub reduce_seconds: f64,
    /// Bytes per second of states that all devices read while they train.
    pub read_per_second: Option<f64>,
}

impl Estimate {
    /// Seconds of all stages that are known.
    pub fn seconds(&self) -> f64 {
        self.stages.iter().map(|(_, seconds)| seconds).sum()
    }

    /// Hours of all devices.
    pub fn device_hours(&self) -> f64 {
        self.seconds() * self.devices as f64 / 3600.0
    }
}

impl Training {
    /// What a device does in a step when n of them share it.
    pub fn of_device(&self, devices: usize) -> Work {
        let samples = self.samples_per_step.div_ceil(devices);
        let forwards = samples.div_ceil(self.samples_per_forward);
        Work { passes: forwards as f64, ..self.sample * samples as f64 }
    }
}

impl Pipeline {
    /// What it takes on the n devices that it was counted for: samples are divided among them, and gradients summed behind the last
    /// backward.
    pub fn on(&self, machine: &Machine, devices: usize) -> Estimate {
        let Training { steps, gradients, update, read, samples_per_step, .. } = self.training;
        let reduce_seconds = machine.link.reduce_seconds(gradients, devices);
        let step_seconds = machine.rates(Stage::Training).map(|(rates, _)| {
            rates.seconds(self.training.of_device(devices)) + rates.seconds(update) + reduce_seconds
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
    use crate::estimate::{Link, Measured};

    fn pipeline() -> Pipeline {
        let work = Work { operations: 100.0, bytes: 0.0, passes: 0.0 };
        let training = Training {
            steps: 10.0,
            samples_per_step: 8,
            samples_per_forward: 2,
            sample: Work { operations: 1.0, ..Work::default() },
            update: Work { bytes: 4.0, ..Work::default() },
            gradients: 30.0,
            read: 5.0,
        };
        let bytes = Bytes { states: 0.0, checkpoint: 0.0 };
        Pipeline { answers: work, states: work, training, evaluation: work, bytes }
    }

    fn machine() -> Machine {
        let of = |stage, work, seconds| Measured { stage, work, seconds };
        let operations = |operations| Work { operations, ..Work::default() };
        let measured = [
            of(Stage::Training, operations(2.0), 1.0),
            of(Stage::Training, Work { bytes: 1.0, ..Work::default() }, 0.25),
            of(Stage::Training, Work { passes: 10.0, ..Work::default() }, 1.0),
            of(Stage::States, operations(50.0), 1.0),
        ];
        let mut machine = Machine::unknown("test").measured(&measured);
        machine.link = Link { bytes_per_second: 15.0 };
        machine
    }

    #[test]
    fn more_devices_do_less_each_but_sum_more() {
        let steps = [1, 2, 4].map(|devices| pipeline().on(&machine(), devices));
        // 8 samples at half a second, 4 forwards at a tenth, an update of one second.
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
        let of = |devices| pipeline().training.of_device(devices);
        assert_eq!((of(3).operations, of(3).passes), (3.0, 2.0));
        assert_eq!((of(64).operations, of(64).passes), (1.0, 1.0));
    }
}
