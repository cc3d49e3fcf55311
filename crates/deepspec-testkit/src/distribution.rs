//! Tests whether outputs follow a probability distribution.

use std::collections::BTreeMap;

/// Number of occurrences of each output.
pub type Counts = BTreeMap<Vec<i64>, u64>;

/// Counts outputs.
pub fn count_outputs(outputs: impl Iterator<Item = Vec<i64>>) -> Counts {
    let mut counts = Counts::new();
    outputs.for_each(|output| *counts.entry(output).or_default() += 1);
    counts
}

/// χ² of the counts against `distribution`, divided by its 99.9 % quantile. Above 1 the
/// counts follow another distribution. Outputs expected fewer than five times share one cell.
///
/// # Panics
/// Panics if an output of probability 0 occurs, or if there are too few different outputs for the
/// test.
pub fn chi_square_ratio(counts: &Counts, distribution: &BTreeMap<Vec<i64>, f64>) -> f64 {
    let total = counts.values().sum::<u64>() as f64;
    assert!(
        counts.keys().all(|output| distribution.get(output).is_some_and(|&p| p > 0.0)),
        "an output of probability 0 came"
    );
    let cells =
        distribution.iter().map(|(output, p)| (counts.get(output).copied().unwrap_or(0) as f64, p * total));
    let (common, rare): (Vec<_>, Vec<_>) = cells.partition(|&(_, expected)| expected >= 5.0);
    let rare = rare.into_iter().fold((0.0, 0.0), |(o, e), (observed, expected)| (o + observed, e + expected));
    let cells: Vec<(f64, f64)> = common.into_iter().chain((rare.1 >= 5.0).then_some(rare)).collect();
    assert!(cells.len() > 8, "too few outcomes to tell laws apart");
    let chi2: f64 = cells.iter().map(|(observed, expected)| (observed - expected).powi(2) / expected).sum();
    // Wilson & Hilferty (1931): the cube root of χ² per degree of freedom is nearly normal.
    let freedom = (cells.len() - 1) as f64;
    let spread = 2.0 / (9.0 * freedom);
    chi2 / (freedom * (1.0 - spread + 3.090 * spread.sqrt()).powi(3))
}
