//! How fast a device works.

use crate::economics::Hardware;
use crate::least_squares::non_negative;
use serde::{Deserialize, Serialize};

use crate::estimate::{Measured, Work};

/// Bytes that an update of AdamW moves for each weight: gradient, master and two moments are read, the last three and a narrow weight
/// written.
pub const UPDATE_BYTES: f64 = 30.0;

/// Seconds of a unit of each part of some work, which add up: operations and memory do not overlap.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Of an operation.
    pub per_operation: f64,
    /// Of a byte.
    pub per_byte: f64,
    /// Of a pass.
    pub per_pass: f64,
}

/// Rates, and how well they describe what they were told from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fit {
    /// The rates.
    pub rates: Rates,
    /// The furthest that a time told by them is off a measured one, as a share of it.
    pub worst: f64,
}

impl Rates {
    /// So much of the peaks that an accelerator's makers state, in bfloat16; passes cost nothing.
    pub fn share_of(hardware: &Hardware, share: f64) -> Self {
        Self {
            per_operation: 1.0 / (hardware.bf16 * share),
            per_byte: 1.0 / (hardware.bandwidth * share),
            per_pass: 0.0,
        }
    }

    /// Seconds of some work.
    pub fn seconds(&self, work: Work) -> f64 {
        self.per_operation * work.operations + self.per_byte * work.bytes + self.per_pass * work.passes
    }

    /// The rates by which measured work takes what it took: least squares of relative errors, none negative. What fewer measurements than
    /// parts cannot tell apart counts as operations, as far as there are any.
    pub fn fit<'m>(measured: impl IntoIterator<Item = &'m Measured> + Clone) -> Fit {
        let all = || measured.clone().into_iter();
        let rows: Vec<[f64; 3]> = all().map(|one| one.work.parts().map(|part| part / one.seconds)).collect();
        let [per_operation, per_byte, per_pass] = non_negative(&rows);
        let rates = Self { per_operation, per_byte, per_pass };
        let off = all().map(|one| (rates.seconds(one.work) / one.seconds - 1.0).abs());
        Fit { rates, worst: off.fold(0.0, f64::max) }
    }
}
