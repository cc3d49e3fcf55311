//! Sequential temperature scaling (STS; docs/architecture.md, Sequential temperature scaling):
//! confidences c_k = σ(logit_k / t_k), one temperature per position.
//!
//! From left to right, t_k is the grid value with the least calibration error of the survival a_k = a_{k−1} · c_k.
//! Earlier temperatures are fixed. Division by a positive temperature is monotone, so the order of the c_k of one
//! position does not change. The order of products of c_k may change.

use crate::ScheduleError;
use crate::bins::{self, BinSums};
use crate::survival::{check_outcome, sigmoid};

/// A verified proposal: a confidence logit per proposed token, and the number of accepted leading
/// tokens.
#[derive(Debug, Clone, Copy)]
pub struct VerifiedProposal<'a> {
    /// Raw outputs of the confidence head.
    pub logits: &'a [f32],
    /// Number of accepted tokens, before a stop token truncates the answer.
    pub accepted: usize,
}

/// Grid search for temperatures. The paper specifies neither grid nor tie-break; here the first
/// minimum wins.
#[derive(Debug, Clone, PartialEq)]
pub struct GridSearch {
    /// Temperatures to try.
    pub grid: Vec<f64>,
    /// Number of equal bins of the calibration error.
    pub bins: usize,
}

impl Default for GridSearch {
    /// 200 temperatures from 0.1 to 10; 20 bins.
    fn default() -> Self {
        Self { grid: log_spaced(0.1, 10.0, 200), bins: 20 }
    }
}

/// `points` temperatures from `low` to `high`, evenly spaced in their logarithm.
pub fn log_spaced(low: f64, high: f64, points: usize) -> Vec<f64> {
    let step = (high / low).log10() / points.saturating_sub(1).max(1) as f64;
    (0..points).map(|i| 10f64.powf(low.log10() + step * i as f64)).collect()
}

/// The fitted temperature of one position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PositionFit {
    /// Number of proposals that reached this position.
    pub count: usize,
    /// Index of the temperature in the grid.
    pub grid_index: usize,
    /// The temperature.
    pub temperature: f64,
    /// Calibration error of the survival at this position with all temperatures 1.
    pub ece_before: f64,
    /// Calibration error with the fitted temperatures. It can exceed `ece_before`, since 1 need not
    /// be on the grid.
    pub ece_after: f64,
}

/// Fits the temperatures of `positions` positions. A position that no proposal reached has no fit.
///
/// The cost is proposals × positions × grid evaluations of the logistic function.
///
/// # Errors
/// Fails if the grid or the bins are empty, if a temperature is not finite and positive, or if a
/// logit is NaN. Also fails if a proposal is longer than `positions` or has fewer tokens than were
/// accepted.
pub fn fit_temperatures(
    proposals: &[VerifiedProposal<'_>],
    positions: usize,
    search: &GridSearch,
) -> Result<Vec<Option<PositionFit>>, ScheduleError> {
    check_inputs(proposals, positions, search)?;
    let mut raw = vec![1.0; proposals.len()]; // a_{k−1} of each proposal, uncalibrated
    let mut calibrated = raw.clone();
    let mut fits = Vec::with_capacity(positions);
    for k in 0..positions {
        let fitted = fit_position(proposals, k, [&raw, &calibrated], search);
        if let Some(fit) = &fitted {
            multiply_survival(&mut raw, proposals, k, 1.0);
            multiply_survival(&mut calibrated, proposals, k, fit.temperature);
        }
        fits.push(fitted);
    }
    Ok(fits)
}

fn fit_position(
    proposals: &[VerifiedProposal<'_>],
    k: usize,
    [raw, calibrated]: [&[f64]; 2],
    search: &GridSearch,
) -> Option<PositionFit> {
    let reached: Vec<_> = (0..proposals.len()).filter(|&i| proposals[i].logits.len() > k).collect();
    let ece = |before: &[f64], temperature: f64| {
        let mut sums = vec![BinSums::default(); search.bins];
        for &i in &reached {
            let a =
                bins::clamp_probability(before[i] * sigmoid(f64::from(proposals[i].logits[k]) / temperature));
            sums[bins::bin_index(a, search.bins)].add(a, k < proposals[i].accepted);
        }
        bins::calibration_error(&sums)
    };
    let ece_before = ece(raw, 1.0)?;
    let errors = search.grid.iter().map(|&temperature| ece(calibrated, temperature).unwrap_or(f64::INFINITY));
    let (grid_index, ece_after) = errors.enumerate().min_by(|(_, a), (_, b)| a.total_cmp(b))?; // the first minimum
    let temperature = search.grid[grid_index];
    Some(PositionFit { count: reached.len(), grid_index, temperature, ece_before, ece_after })
}

/// Multiplies the survival of every proposal that reached position `k`: a_k = a_{k−1} · σ(logit_k / t_k).
fn multiply_survival(survival: &mut [f64], proposals: &[VerifiedProposal<'_>], k: usize, temperature: f64) {
    for (a, proposal) in survival.iter_mut().zip(proposals) {
        if let Some(&logit) = proposal.logits.get(k) {
            *a *= sigmoid(f64::from(logit) / temperature);
        }
    }
}

/// Fits one temperature for all positions: the first grid value with the least mean calibration
/// error. Engines that read raw confidences can use it, since it can be folded into the head's
/// weights.
///
/// # Errors
/// As [`fit_temperatures`].
pub fn fit_shared_temperature(
    proposals: &[VerifiedProposal<'_>],
    positions: usize,
    search: &GridSearch,
) -> Result<f64, ScheduleError> {
    check_inputs(proposals, positions, search)?;
    let error =
        |&temperature: &f64| mean_calibration_error(proposals, &vec![temperature; positions], search.bins);
    Ok(argmin(&search.grid, error))
}

/// Fits one temperature per position by coordinate descent, starting from the shared temperature. Each sweep visits
/// every temperature and sets it to the grid value with the least mean calibration error, while all other temperatures
/// stay fixed. It ends when no temperature changes, or after `sweeps` sweeps.
///
/// # Errors
/// As [`fit_temperatures`].
pub fn fit_joint_temperatures(
    proposals: &[VerifiedProposal<'_>],
    positions: usize,
    search: &GridSearch,
    sweeps: usize,
) -> Result<Calibration, ScheduleError> {
    let mut temperatures = vec![fit_shared_temperature(proposals, positions, search)?; positions];
    for _ in 0..sweeps {
        let before = temperatures.clone();
        for k in 0..positions {
            let error = |&temperature: &f64| {
                let mut tried = temperatures.clone();
                tried[k] = temperature;
                mean_calibration_error(proposals, &tried, search.bins)
            };
            temperatures[k] = argmin(&search.grid, error);
        }
        if temperatures == before {
            break;
        }
    }
    Calibration::new(temperatures)
}

fn argmin(grid: &[f64], error: impl Fn(&f64) -> f64) -> f64 {
    let errors = grid.iter().map(|temperature| (*temperature, error(temperature)));
    errors.min_by(|(_, a), (_, b)| a.total_cmp(b)).map_or(1.0, |(temperature, _)| temperature)
}

/// Calibration error over all positions, weighted by their observations.
fn mean_calibration_error(proposals: &[VerifiedProposal<'_>], temperatures: &[f64], bins: usize) -> f64 {
    let mut sums = vec![BinSums::default(); bins * temperatures.len()];
    for proposal in proposals {
        let mut a = 1.0;
        for (k, (logit, temperature)) in proposal.logits.iter().zip(temperatures).enumerate() {
            a *= sigmoid(f64::from(*logit) / temperature);
            let clamped = bins::clamp_probability(a);
            sums[k * bins + bins::bin_index(clamped, bins)].add(clamped, k < proposal.accepted);
        }
    }
    bins::calibration_error(&sums).unwrap_or(f64::INFINITY)
}

/// Temperatures of the confidence logits, one per position.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibration {
    temperatures: Vec<f64>,
}

impl Calibration {
    /// Wraps stored temperatures.
    ///
    /// # Errors
    /// A temperature is not finite and positive.
    pub fn new(temperatures: Vec<f64>) -> Result<Self, ScheduleError> {
        check_temperatures(&temperatures)?;
        Ok(Self { temperatures })
    }

    /// Temperatures of the fits; a position without a fit has t = 1.
    pub fn from_fits(fits: &[Option<PositionFit>]) -> Self {
        Self { temperatures: fits.iter().map(|fit| fit.map_or(1.0, |fit| fit.temperature)).collect() }
    }

    /// The temperatures t_1, t_2, …
    pub fn temperatures(&self) -> &[f64] {
        &self.temperatures
    }

    /// Calibrated confidences c_k = σ(logit_k / t_k) of one proposal.
    ///
    /// # Errors
    /// A logit is NaN, or there are more logits than temperatures.
    pub fn confidences(&self, logits: &[f32]) -> Result<Vec<f64>, ScheduleError> {
        check_outcome(0, logits.len(), self.temperatures.len())?;
        check_logits(logits)?;
        Ok(logits.iter().zip(&self.temperatures).map(|(&logit, t)| sigmoid(f64::from(logit) / t)).collect())
    }
}

fn check_inputs(
    proposals: &[VerifiedProposal<'_>],
    positions: usize,
    search: &GridSearch,
) -> Result<(), ScheduleError> {
    check_temperatures(&search.grid)?;
    if search.grid.is_empty() || search.bins == 0 {
        return Err(ScheduleError::Empty { what: "temperature grid or bins" });
    }
    for proposal in proposals {
        check_outcome(proposal.accepted, proposal.logits.len(), positions)?;
        check_logits(proposal.logits)?;
    }
    Ok(())
}

fn check_temperatures(temperatures: &[f64]) -> Result<(), ScheduleError> {
    match temperatures.iter().position(|t| !(t.is_finite() && *t > 0.0)) {
        Some(index) => Err(ScheduleError::Temperature { index, value: temperatures[index] }),
        None => Ok(()),
    }
}

fn check_logits(logits: &[f32]) -> Result<(), ScheduleError> {
    match logits.iter().position(|logit| logit.is_nan()) {
        Some(position) => Err(ScheduleError::Logit { position }),
        None => Ok(()),
    }
}
