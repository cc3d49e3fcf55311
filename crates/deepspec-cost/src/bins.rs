//! Equal bins of [0, 1], shared by the reliability metrics and by calibration, which minimises the
//! calibration error.

/// ε. Probabilities are clamped to [ε, 1 − ε] before use, like in the reference.
const PROBABILITY_EPS: f64 = 1e-8;

/// Clamps a probability to [ε, 1 − ε].
pub fn clamp_probability(probability: f64) -> f64 {
    probability.clamp(PROBABILITY_EPS, 1.0 - PROBABILITY_EPS)
}

/// Index of the bin of a probability: ⌊p · bins⌋, and the last bin for 1. `bins` > 0.
pub fn bin_index(probability: f64, bins: usize) -> usize {
    ((probability * bins as f64) as usize).min(bins - 1)
}

/// Sums over the observations in one bin.
#[derive(Debug, Clone, Copy, Default)]
pub struct BinSums {
    /// Number of observations.
    pub count: u64,
    /// Sum of the predicted probabilities.
    pub predicted: f64,
    /// Number of observations whose prefix was accepted.
    pub accepted: u64,
}

impl BinSums {
    /// Adds one observation.
    pub fn add(&mut self, probability: f64, accepted: bool) {
        self.count += 1;
        self.predicted += probability;
        self.accepted += u64::from(accepted);
    }

    /// Adds the sums of another bin.
    pub fn merge(&mut self, other: &Self) {
        self.count += other.count;
        self.predicted += other.predicted;
        self.accepted += other.accepted;
    }
}

/// Expected calibration error Σ_b n_b/N · |mean predicted − mean accepted| = Σ_b |Σ predicted − Σ
/// accepted| / N. `None` without observations.
pub fn calibration_error(bins: &[BinSums]) -> Option<f64> {
    let count: u64 = bins.iter().map(|bin| bin.count).sum();
    let gap: f64 = bins.iter().map(|bin| (bin.predicted - bin.accepted as f64).abs()).sum();
    (count > 0).then(|| gap / count as f64)
}
