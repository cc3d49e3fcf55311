//! Speed of a device, in seconds per unit of work.

use crate::economics::Hardware;
use crate::least_squares::non_negative_least_squares;
use serde::{Deserialize, Serialize};

use crate::estimate::{MeasuredWork, Work};

/// Bytes that an AdamW update moves per weight. It reads the gradient, the master weight and two
/// moments; it writes the last three and a narrow weight.
pub const ADAMW_BYTES_PER_WEIGHT: f64 = 30.0;

/// Seconds per unit of each part of the work. The parts add up: operations and memory traffic do
/// not overlap.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Seconds per operation.
    pub per_operation: f64,
    /// Seconds per byte.
    pub per_byte: f64,
    /// Seconds per pass.
    pub per_pass: f64,
}

/// Fitted rates and their error.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FittedRates {
    /// The rates.
    pub rates: Rates,
    /// Largest relative error of a fitted time.
    pub worst: f64,
}

impl Rates {
    /// Rates at a share of the vendor's bfloat16 peak and bandwidth; passes cost nothing.
    pub fn from_peak_share(hardware: &Hardware, share: f64) -> Self {
        Self {
            per_operation: 1.0 / (hardware.bf16 * share),
            per_byte: 1.0 / (hardware.bandwidth * share),
            per_pass: 0.0,
        }
    }

    /// Seconds that the work takes.
    pub fn seconds(&self, work: Work) -> f64 {
        self.per_operation * work.operations + self.per_byte * work.bytes + self.per_pass * work.passes
    }

    /// Fits rates to measurements: non-negative least squares of relative errors. If there are too
    /// few measurements to separate the parts, the time is attributed to operations first.
    pub fn fit<'m>(measured: impl IntoIterator<Item = &'m MeasuredWork> + Clone) -> FittedRates {
        let all = || measured.clone().into_iter();
        let rows: Vec<[f64; 3]> =
            all().map(|one| one.work.to_array().map(|part| part / one.seconds)).collect();
        let [per_operation, per_byte, per_pass] = non_negative_least_squares(&rows);
        let rates = Self { per_operation, per_byte, per_pass };
        let off = all().map(|one| (rates.seconds(one.work) / one.seconds - 1.0).abs());
        FittedRates { rates, worst: off.fold(0.0, f64::max) }
    }
}
