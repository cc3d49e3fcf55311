//! Reliability of a drafter's confidences, and the effect of cutting blocks at a confidence
//! threshold.

use deepspec_core::rng::{Purpose, Stream};
use deepspec_cost::ScheduleError;
use deepspec_cost::calibrate::Calibration;
use deepspec_cost::reliability::{Reliability, ReliabilityReport};
use deepspec_engine::Cycle;
use serde::{Deserialize, Serialize};

/// Thresholds of the sweep: 0, 0.05, …, 0.95.
const SWEEP_THRESHOLDS: u32 = 20;
/// Number of times that outcomes are drawn for the noise of the calibration error.
const NOISE_DRAWS: u64 = 200;

/// Confidence section of a run's results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ConfidenceResult {
    /// Reliability of the confidences that the run used.
    pub reliability: ReliabilityReport,
    /// Reliability of the confidence head's raw outputs, if the run calibrated them.
    pub uncalibrated: Option<ReliabilityReport>,
    /// Effect of thresholds on the confidence; empty if the run itself cut its blocks.
    pub sweep: Vec<SweepPoint>,
}

/// The cycles of a run, with each block cut before the first token below a confidence threshold.
/// This is an estimate: the run's cycles are cut in place, while a real run's later cycles would
/// start at other tokens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SweepPoint {
    /// The threshold.
    pub threshold: f64,
    /// Drafted tokens that would be verified.
    pub proposed: u64,
    /// Number of proposed tokens that were accepted.
    pub accepted: u64,
    /// Tokens that would be committed.
    pub committed: u64,
    /// Cycles.
    pub cycles: u64,
}

impl SweepPoint {
    /// τ.
    pub fn accepted_length(&self) -> f64 {
        self.committed as f64 / self.cycles as f64
    }

    /// Tokens that the target verifies per committed token. The anchor of each cycle is verified
    /// too.
    pub fn verified_per_committed(&self) -> f64 {
        (self.proposed + self.cycles) as f64 / self.committed as f64
    }
}

/// The verified tokens of a block, up to the first drafted stop token. Tokens after a stop token
/// belong to no answer, and no drafter is trained on them, so their acceptance is meaningless.
#[derive(Debug, Clone, PartialEq)]
pub struct ObservedBlock {
    /// Confidence logits of the tokens up to the stop token.
    pub logits: Vec<f32>,
    /// Number of these tokens that were accepted.
    pub accepted: usize,
}

/// The reliability and the threshold sweep of `cycles`; None without a confidence head.
///
/// # Errors
/// A logit is NaN, or there are more logits than positions.
pub fn measure_confidence<'c>(
    cycles: impl Iterator<Item = &'c Cycle> + Clone,
    positions: usize,
    temperatures: Option<&[f64]>,
    cut: bool,
) -> Result<Option<ConfidenceResult>, ScheduleError> {
    let cycles = cycles.filter(|cycle| !cycle.confidence.is_empty());
    if cycles.clone().next().is_none() {
        return Ok(None);
    }
    let raw = temperatures_by_position(&[], positions)?;
    let used = temperatures_by_position(temperatures.unwrap_or_default(), positions)?;
    let report = |calibration: &Calibration| {
        let observed = cycles.clone().map(|cycle| (cycle.confidence_until_stop(), cycle.accepted as usize));
        reliability(observed, positions, calibration)
    };
    let sweep = if cut { vec![] } else { threshold_sweep(cycles.clone(), positions, temperatures)? };
    Ok(Some(ConfidenceResult {
        reliability: report(&used)?,
        uncalibrated: temperatures.map(|_| report(&raw)).transpose()?,
        sweep,
    }))
}

/// The effect of thresholds on the confidence for cycles of whole blocks; empty without a
/// confidence head.
///
/// # Errors
/// As [`measure_confidence`].
pub fn threshold_sweep<'c>(
    cycles: impl Iterator<Item = &'c Cycle> + Clone,
    positions: usize,
    temperatures: Option<&[f64]>,
) -> Result<Vec<SweepPoint>, ScheduleError> {
    let cycles = cycles.filter(|cycle| !cycle.confidence.is_empty());
    if cycles.clone().next().is_none() {
        return Ok(vec![]);
    }
    let used = temperatures_by_position(temperatures.unwrap_or_default(), positions)?;
    let point = |step| sweep_point(cycles.clone(), &used, f64::from(step) / f64::from(SWEEP_THRESHOLDS));
    (0..SWEEP_THRESHOLDS).map(point).collect()
}

/// Temperatures for all positions. A missing temperature is 1.
pub fn temperatures_by_position(
    temperatures: &[f64],
    positions: usize,
) -> Result<Calibration, ScheduleError> {
    Calibration::new((0..positions).map(|k| temperatures.get(k).copied().unwrap_or(1.0)).collect())
}

/// Reliability of confidence logits under the temperatures of `calibration`, from the number of
/// accepted tokens of each block.
///
/// # Errors
/// A logit is NaN, or there are more logits than positions.
pub fn reliability<'o>(
    observed: impl Iterator<Item = (&'o [f32], usize)>,
    positions: usize,
    calibration: &Calibration,
) -> Result<ReliabilityReport, ScheduleError> {
    let mut sums = Reliability::new(positions);
    for (logits, accepted) in observed {
        sums.update(&calibration.confidences(logits)?, accepted)?;
    }
    Ok(sums.finish())
}

/// 95 % quantile of the calibration error, averaged over positions as in a report's summary, for
/// outcomes drawn from these confidences. It is the error that chance causes in a calibrated head
/// whose blocks are independent.
///
/// # Errors
/// As [`reliability`].
pub fn ece_noise_quantile<'o>(
    observed: impl Iterator<Item = &'o ObservedBlock>,
    positions: usize,
    calibration: &Calibration,
) -> Result<f64, ScheduleError> {
    let confidences: Vec<Vec<f64>> =
        observed.map(|block| calibration.confidences(&block.logits)).collect::<Result<_, _>>()?;
    let mut errors = vec![];
    for draw in 0..NOISE_DRAWS {
        let stream = Stream::new(draw, "labels");
        let mut sums = Reliability::new(positions);
        for (i, row) in confidences.iter().enumerate() {
            let uniform = |k: usize| stream.uniform(i as u64, Purpose::Accept, k as u64);
            let accepted = row.iter().enumerate().take_while(|(k, c)| uniform(*k) < **c).count();
            sums.update(row, accepted)?;
        }
        errors.extend(sums.finish().summary.map(|summary| summary.ece));
    }
    errors.sort_by(f64::total_cmp);
    Ok(errors.get(errors.len() * 95 / 100).copied().unwrap_or(0.0))
}

fn sweep_point<'c>(
    cycles: impl Iterator<Item = &'c Cycle>,
    calibration: &Calibration,
    threshold: f64,
) -> Result<SweepPoint, ScheduleError> {
    let mut point = SweepPoint { threshold, proposed: 0, accepted: 0, committed: 0, cycles: 0 };
    for cycle in cycles {
        let confidences = calibration.confidences(&cycle.confidence)?;
        let kept = confidences.iter().take_while(|&&c| c >= threshold).count() as u32;
        let accepted = cycle.accepted.min(kept);
        // An accepted stop token ends the answer, and no bonus token follows it.
        let stopped = cycle.committed == cycle.accepted && accepted == cycle.accepted;
        point.proposed += u64::from(kept);
        point.accepted += u64::from(accepted);
        point.committed += u64::from(accepted + u32::from(!stopped));
        point.cycles += 1;
    }
    Ok(point)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cycle(logits: &[f32], accepted: u32, committed: u32) -> Cycle {
        let (proposed, confidence) = (logits.len() as u32, logits.to_vec());
        Cycle { proposed, nodes: 0, until_stop: proposed, accepted, committed, confidence }
    }

    #[test]
    fn nothing_counts_behind_a_stop_token_that_was_drafted() {
        // The second drafted token is the stop token: the first block accepts it, the others reject
        // it or go past it.
        let stopped = cycle(&[1.0, 0.5], 2, 2);
        let rejected =
            |accepted| Cycle { until_stop: 2, ..cycle(&[1.0, 0.5, 4.0, 4.0], accepted, accepted + 1) };
        let cycles = [stopped, rejected(1), rejected(0), cycle(&[1.0, 0.5, 0.0, 0.0], 4, 5)];
        let found = measure_confidence(cycles.iter(), 4, None, false).unwrap().unwrap();
        let counts: Vec<u64> = found.reliability.positions.iter().map(|position| position.count).collect();
        assert_eq!(counts, [4, 4, 1, 1], "only the last block has tokens that an answer can have");
        assert_eq!(found.reliability.positions[2].metrics.unwrap().accepted_mean, 1.0);
        assert_eq!(found.sweep[0].proposed, 14, "what was verified is verified all the same");
    }

    #[test]
    fn the_sweep_begins_with_what_the_run_did_and_ends_with_plain_decoding() {
        let sure = 9.0;
        let cycles = [cycle(&[1.0, 0.0, -1.0], 2, 3), cycle(&[sure, sure], 2, 2), cycle(&[-4.0, 3.0], 0, 1)];
        let found = measure_confidence(cycles.iter(), 3, None, false).unwrap().unwrap();
        let first = found.sweep[0];
        assert_eq!((first.proposed, first.accepted, first.committed, first.cycles), (7, 4, 6, 3));
        // At 0.95 only the second block keeps tokens, including its stop token.
        let last = found.sweep[19];
        assert_eq!((last.proposed, last.accepted, last.committed, last.cycles), (2, 2, 4, 3));
        assert_eq!((last.accepted_length(), last.verified_per_committed()), (4.0 / 3.0, 5.0 / 4.0));
        for pair in found.sweep.windows(2) {
            assert!(pair[1].proposed <= pair[0].proposed && pair[1].committed <= pair[0].committed);
        }
        assert!(measure_confidence(cycles.iter(), 3, None, true).unwrap().unwrap().sweep.is_empty());
        assert_eq!(measure_confidence([cycle(&[], 0, 1)].iter(), 3, None, false), Ok(None));
        assert!(measure_confidence([cycle(&[f32::NAN], 0, 1)].iter(), 3, None, false).is_err());
    }

    #[test]
    fn temperatures_show_before_and_after() {
        let cycles = [cycle(&[2.0], 1, 2), cycle(&[2.0], 0, 1)];
        let found = measure_confidence(cycles.iter(), 1, Some(&[1e6]), false).unwrap().unwrap();
        let ece = |report: &ReliabilityReport| report.summary.unwrap().ece;
        assert!(
            ece(&found.reliability) < 1e-5,
            "half of them are accepted, and now one half is what it says"
        );
        assert!((ece(found.uncalibrated.as_ref().unwrap()) - 0.3808).abs() < 1e-4); // σ(2) − 0.5
        assert_eq!(measure_confidence(cycles.iter(), 1, None, false).unwrap().unwrap().uncalibrated, None);
    }
}
