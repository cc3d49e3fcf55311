//! Reliability of the survival probabilities a_k, per position of the proposal
//! (docs/architecture.md, Reliability, golden case `confidence_metrics`). An observation is the
//! pair of a_k and whether the prefix up to k was accepted.

use serde::{Deserialize, Serialize};

use crate::ScheduleError;
use crate::bins::{self, BinSums};
use crate::survival::{check_confidences, check_outcome, survival_probabilities};

/// Numbers of bins of probabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Binning {
    /// Number of equal bins of the calibration error and of the reliability diagram.
    pub coarse: usize,
    /// Number of equal bins of the AUROC; two probabilities in one bin count as a tie.
    pub fine: usize,
}

impl Default for Binning {
    fn default() -> Self {
        Self { coarse: 20, fine: 1000 }
    }
}

/// Accumulates observations of many proposals. Partial accumulators of threads or ranks can be
/// merged.
#[derive(Debug, Clone)]
pub struct Reliability {
    binning: Binning,
    positions: Vec<PositionStats>,
}

/// Sums over the observations at one position.
#[derive(Debug, Clone)]
struct PositionStats {
    squared_error: f64,
    coarse: Vec<BinSums>,
    /// [rejected, accepted] observations per fine bin.
    fine: Vec<[u64; 2]>,
}

impl Reliability {
    /// An empty accumulator for proposals of at most `positions` tokens, with 20 coarse and 1000
    /// fine bins.
    pub fn new(positions: usize) -> Self {
        Self::empty(positions, Binning::default())
    }

    /// [`Reliability::new`] with other bins.
    ///
    /// # Errors
    /// Fails if a bin count is 0.
    pub fn with_binning(positions: usize, binning: Binning) -> Result<Self, ScheduleError> {
        if binning.coarse == 0 || binning.fine == 0 {
            return Err(ScheduleError::Empty { what: "bins" });
        }
        Ok(Self::empty(positions, binning))
    }

    fn empty(positions: usize, binning: Binning) -> Self {
        let coarse = vec![BinSums::default(); binning.coarse];
        let stats = PositionStats { squared_error: 0.0, coarse, fine: vec![[0; 2]; binning.fine] };
        Self { binning, positions: vec![stats; positions] }
    }

    /// Adds a proposal: its conditional confidences c_k, one per proposed token, and its accepted
    /// length. The accepted length counts the leading tokens that verification accepted, before a
    /// stop token truncates the answer. An empty proposal adds no observation.
    ///
    /// # Errors
    /// Fails, and adds nothing, if a confidence is not a probability. Also fails if the proposal
    /// has more tokens than positions, or fewer than were accepted.
    pub fn update(&mut self, confidences: &[f64], accepted: usize) -> Result<(), ScheduleError> {
        check_outcome(accepted, confidences.len(), self.positions.len())?;
        check_confidences(confidences)?;
        for (k, (stats, a)) in self.positions.iter_mut().zip(survival_probabilities(confidences)).enumerate()
        {
            stats.add(bins::clamp_probability(a), k < accepted);
        }
        Ok(())
    }

    /// Adds the observations of another accumulator.
    ///
    /// # Errors
    /// Fails if the accumulators differ in positions or bins.
    pub fn merge(&mut self, other: &Self) -> Result<(), ScheduleError> {
        let sizes = [
            ("positions", self.positions.len(), other.positions.len()),
            ("coarse bins", self.binning.coarse, other.binning.coarse),
            ("fine bins", self.binning.fine, other.binning.fine),
        ];
        if let Some(&(what, left, right)) = sizes.iter().find(|(_, left, right)| left != right) {
            return Err(ScheduleError::Mismatch { what, left, right });
        }
        self.positions.iter_mut().zip(&other.positions).for_each(|(stats, other)| stats.merge(other));
        Ok(())
    }

    /// Number of observations so far, over all positions.
    pub fn observations(&self) -> u64 {
        self.positions.iter().flat_map(|stats| &stats.coarse).map(|bin| bin.count).sum()
    }

    /// Σ a_k − Σ accepted of every coarse bin, position by position. The calibration error of a
    /// report's summary is the sum of their absolute values per observation. Gaps of accumulators
    /// add up, while their errors do not.
    pub fn calibration_gaps(&self) -> impl Iterator<Item = f64> + '_ {
        let bins = self.positions.iter().flat_map(|stats| &stats.coarse);
        bins.map(|bin| bin.predicted - bin.accepted as f64)
    }

    /// The metrics of all observations so far.
    pub fn finish(&self) -> ReliabilityReport {
        let positions: Vec<_> = self.positions.iter().map(PositionStats::finish).collect();
        ReliabilityReport { summary: mean_metrics(&positions), positions }
    }
}

impl PositionStats {
    fn add(&mut self, probability: f64, accepted: bool) {
        self.squared_error += (probability - f64::from(u8::from(accepted))).powi(2);
        let (coarse, fine) = (self.coarse.len(), self.fine.len());
        self.coarse[bins::bin_index(probability, coarse)].add(probability, accepted);
        self.fine[bins::bin_index(probability, fine)][usize::from(accepted)] += 1;
    }

    fn merge(&mut self, other: &Self) {
        self.squared_error += other.squared_error;
        self.coarse.iter_mut().zip(&other.coarse).for_each(|(bin, other)| bin.merge(other));
        for (bin, other) in self.fine.iter_mut().zip(&other.fine) {
            *bin = [bin[0] + other[0], bin[1] + other[1]];
        }
    }

    fn finish(&self) -> PositionReliability {
        let mut total = BinSums::default();
        self.coarse.iter().for_each(|bin| total.merge(bin));
        let per_observation = |sum: f64| sum / total.count as f64;
        let metrics = bins::calibration_error(&self.coarse).map(|ece| Metrics {
            ece,
            auroc: auroc(&self.fine),
            brier: per_observation(self.squared_error),
            predicted_mean: per_observation(total.predicted),
            accepted_mean: per_observation(total.accepted as f64),
        });
        PositionReliability { count: total.count, metrics, bins: diagram_bins(&self.coarse) }
    }
}

/// Probability that a random accepted observation ranks above a random rejected one; a tie inside a
/// bin counts half. It is the Mann–Whitney U over histograms of `[rejected, accepted]`; `None` if
/// all observations are accepted, or all are rejected.
fn auroc(fine: &[[u64; 2]]) -> Option<f64> {
    let (mut rejected, mut accepted, mut above) = (0.0, 0.0, 0.0);
    for bin in fine {
        let [below, here] = bin.map(|count| count as f64);
        above += here * (rejected + 0.5 * below);
        rejected += below;
        accepted += here;
    }
    (rejected > 0.0 && accepted > 0.0).then(|| above / (rejected * accepted))
}

/// Reliability diagram: the coarse bins that have observations.
fn diagram_bins(coarse: &[BinSums]) -> Vec<ReliabilityBin> {
    let edge = |index: usize| index as f64 / coarse.len() as f64;
    let filled = coarse.iter().enumerate().filter(|(_, bin)| bin.count > 0);
    filled
        .map(|(index, bin)| ReliabilityBin {
            low: edge(index),
            high: edge(index + 1),
            count: bin.count,
            predicted_mean: bin.predicted / bin.count as f64,
            accepted_mean: bin.accepted as f64 / bin.count as f64,
        })
        .collect()
}

/// Means of the metrics over positions, weighted by observations.
fn mean_metrics(positions: &[PositionReliability]) -> Option<Metrics> {
    let mean = |of: &dyn Fn(&Metrics) -> Option<f64>| {
        let observed = positions
            .iter()
            .filter_map(|position| Some((position.count as f64, of(position.metrics.as_ref()?)?)));
        let (weight, sum) =
            observed.fold((0.0, 0.0), |(w, s), (count, value)| (w + count, s + count * value));
        (weight > 0.0).then(|| sum / weight)
    };
    Some(Metrics {
        ece: mean(&|m| Some(m.ece))?,
        auroc: mean(&|m| m.auroc),
        brier: mean(&|m| Some(m.brier))?,
        predicted_mean: mean(&|m| Some(m.predicted_mean))?,
        accepted_mean: mean(&|m| Some(m.accepted_mean))?,
    })
}

/// Report of [`Reliability::finish`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReliabilityReport {
    /// One entry per position of the proposal.
    pub positions: Vec<PositionReliability>,
    /// The means over positions, weighted by observations; the AUROC is averaged over the positions
    /// that have one. `None` without observations.
    pub summary: Option<Metrics>,
}

/// The reliability of one position.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PositionReliability {
    /// Number of observations: proposals that reached this position.
    pub count: u64,
    /// The metrics; `None` without observations.
    pub metrics: Option<Metrics>,
    /// Reliability diagram: the coarse bins with observations, ascending.
    pub bins: Vec<ReliabilityBin>,
}

/// Reliability metrics, all in [0, 1].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// Expected calibration error over the coarse bins.
    pub ece: f64,
    /// Area under the ROC curve from the fine bins; `None` if all or no prefixes were accepted.
    pub auroc: Option<f64>,
    /// Mean of (a_k − accepted)².
    pub brier: f64,
    /// Mean of a_k.
    pub predicted_mean: f64,
    /// Share of accepted prefixes.
    pub accepted_mean: f64,
}

/// One bin of a reliability diagram.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ReliabilityBin {
    /// Lower edge, inclusive.
    pub low: f64,
    /// Upper edge, exclusive except for the last bin.
    pub high: f64,
    /// Number of observations.
    pub count: u64,
    /// Mean of a_k.
    pub predicted_mean: f64,
    /// Share of accepted prefixes.
    pub accepted_mean: f64,
}
