//! Uncertainty of accepted lengths: bootstrap over prompts (Efron 1979), for one result and for the
//! difference of two.
//!
//! The cycles of one prompt are correlated, so the bootstrap resamples prompts, each with all its
//! cycles, turns and seeds. A suite's τ is a ratio of sums over its prompts; domains and overall
//! are means over suites. A resample gives every prompt a Poisson(1) weight (Hanley & MacGibbon
//! 2006) that depends only on suite, sample and resample. Two results over the same prompts thus
//! have equal resamples, and their differences are paired.

use deepspec_core::rng::{Purpose, Stream};
use serde::{Deserialize, Serialize};

/// Number of resamples; 50 of them are outside each end of a 95 % interval.
pub const RESAMPLES: usize = 2000;
/// A constant seed, so that repeated calls give equal intervals.
const BOOTSTRAP_SEED: u64 = 1979;
/// Share of the distribution beyond each end of a 95 % interval.
const INTERVAL_TAIL: f64 = 0.025;

/// Counts of one prompt, over all its turns and seeds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptCounts {
    /// Number of committed tokens.
    pub committed: u64,
    /// Number of cycles.
    pub cycles: u64,
}

/// The 95 % bootstrap interval of a value.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// Mean, median and upper percentiles of measured values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
}

impl Percentiles {
    /// Percentiles of `values`; None without any.
    pub fn from_values(mut values: Vec<f64>) -> Option<Self> {
        if values.is_empty() {
            return None;
        }
        values.sort_by(f64::total_cmp);
        let count = values.len();
        // The smallest value with at least this share of all values at or below it.
        let at = |share: f64| values[((count as f64 * share).ceil() as usize).clamp(1, count) - 1];
        let mean = values.iter().sum::<f64>() / count as f64;
        Some(Self { mean, p50: at(0.5), p95: at(0.95), p99: at(0.99) })
    }
}

/// A value with its bootstrap distribution over prompts.
#[derive(Debug, Clone)]
pub struct Estimate {
    /// The value over all prompts.
    pub value: Option<f64>,
    /// One value per resample, NaN for a division by zero.
    resampled: Vec<f64>,
}

impl Estimate {
    /// τ of a suite over its prompts, by sample id.
    pub fn accepted_length<'p>(
        suite: &str,
        prompts: impl IntoIterator<Item = (&'p str, PromptCounts)>,
    ) -> Self {
        Self::with_resamples(suite, prompts, RESAMPLES)
    }

    fn with_resamples<'p>(
        suite: &str,
        prompts: impl IntoIterator<Item = (&'p str, PromptCounts)>,
        resamples: usize,
    ) -> Self {
        let (mut total, mut speaking) = ([0.0; 2], 0);
        let mut resampled = vec![[0.0; 2]; resamples];
        for (sample, counts) in prompts.into_iter().filter(|(_, counts)| counts.cycles > 0) {
            let add = |sums: &mut [f64; 2], weight: f64| {
                sums[0] += weight * counts.committed as f64;
                sums[1] += weight * counts.cycles as f64;
            };
            add(&mut total, 1.0);
            resampled
                .iter_mut()
                .zip(poisson_weights(suite, sample))
                .for_each(|(sums, weight)| add(sums, weight));
            speaking += 1;
        }
        let ratio = |[committed, cycles]: [f64; 2]| committed / cycles;
        Self {
            value: (speaking > 0).then(|| ratio(total)),
            // The spread between prompts is unknown with a single prompt.
            resampled: if speaking > 1 { resampled.into_iter().map(ratio).collect() } else { vec![] },
        }
    }

    /// A value and its values over at most [`RESAMPLES`] resamples, each weighted by
    /// [`poisson_weights`].
    pub fn new(value: f64, resampled: Vec<f64>) -> Self {
        Self { value: Some(value), resampled }
    }

    /// A value without resamples.
    pub fn without_resamples(value: Option<f64>) -> Self {
        Self { value, resampled: vec![] }
    }

    /// The mean over the suites that have a value. It has no interval unless each of these suites
    /// has one.
    pub fn mean<'e>(suites: impl IntoIterator<Item = &'e Self>) -> Self {
        let suites: Vec<_> = suites.into_iter().filter_map(|suite| Some((suite.value?, suite))).collect();
        let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / suites.len() as f64;
        let resamples = suites.iter().map(|(_, suite)| suite.resampled.len()).min().unwrap_or(0);
        Self {
            value: (!suites.is_empty()).then(|| mean(&mut suites.iter().map(|(value, _)| *value))),
            resampled: (0..resamples)
                .map(|i| mean(&mut suites.iter().map(|(_, suite)| suite.resampled[i])))
                .collect(),
        }
    }

    /// The difference `self` − `other`, resample by resample.
    pub fn minus(&self, other: &Self) -> Self {
        Self {
            value: self.value.zip(other.value).map(|(a, b)| a - b),
            resampled: self.resampled.iter().zip(&other.resampled).map(|(a, b)| a - b).collect(),
        }
    }

    /// Accepted drafts per cycle, as a share of those of `base`: (τ − 1) / (τ of the base − 1), resample by resample. No value if the
    /// base accepted none. No interval if it accepted none in a resample, for the share has no bound there.
    pub fn gain_over(&self, base: &Self) -> Self {
        let share = |(new, base): (f64, f64)| (new - 1.0) / (base - 1.0);
        let value = self.value.zip(base.value).filter(|&(_, base)| base > 1.0).map(share);
        let resampled = if base.resampled.iter().any(|&base| base <= 1.0) {
            vec![]
        } else {
            self.resampled.iter().copied().zip(base.resampled.iter().copied()).map(share).collect()
        };
        Self { value, resampled }
    }

    /// The central 95 % of the resampled values.
    pub fn interval(&self) -> Option<Interval> {
        self.value?;
        let [low, high] = quantiles(&self.resampled, [INTERVAL_TAIL, 1.0 - INTERVAL_TAIL])?;
        Some(Interval { low, high })
    }

    /// [`Estimate::interval`] for a statistic that chance makes larger, such as a sum of absolute
    /// values. The mean increase by resampling is subtracted. Otherwise the interval might be above
    /// the value.
    pub fn centred_interval(&self) -> Option<Interval> {
        let (value, Interval { low, high }) = (self.value?, self.interval()?);
        let values = || self.resampled.iter().filter(|value| !value.is_nan());
        let added = values().sum::<f64>() / values().count() as f64 - value;
        Some(Interval { low: low - added, high: high - added })
    }

    /// Two-sided p-value of the hypothesis "the value is 0": twice the smaller share of resamples
    /// on either side of 0. A resample of 0 counts on both sides. The p-value is at least the
    /// resolution of the resamples.
    pub fn p_value(&self) -> Option<f64> {
        self.value?;
        let values = || self.resampled.iter().filter(|value| !value.is_nan());
        let (below, above) =
            (values().filter(|v| **v <= 0.0).count(), values().filter(|v| **v >= 0.0).count());
        let share = |count: usize| (count + 1) as f64 / (values().count() + 1) as f64;
        (values().count() > 0).then(|| (2.0 * share(below.min(above))).min(1.0))
    }
}

/// Weight of the prompt in each of [`RESAMPLES`] resamples.
pub fn poisson_weights(suite: &str, sample: &str) -> impl Iterator<Item = f64> {
    let stream = Stream::new(BOOTSTRAP_SEED, &format!("{suite}/{sample}"));
    (0..RESAMPLES as u64)
        .map(move |resample| poisson_quantile(stream.uniform(resample, Purpose::Resample, 0)))
}

/// Quantiles of the values at the given shares, with linear interpolation; None without values. NaN
/// is ignored.
pub fn quantiles<const N: usize>(values: &[f64], shares: [f64; N]) -> Option<[f64; N]> {
    let mut values: Vec<f64> = values.iter().copied().filter(|value| !value.is_nan()).collect();
    values.sort_by(f64::total_cmp);
    let last = values.len().checked_sub(1)?;
    Some(shares.map(|share| {
        let (place, part) = ((share * last as f64).floor() as usize, (share * last as f64).fract());
        values[place] + part * (values[(place + 1).min(last)] - values[place])
    }))
}

/// Quantile `uniform` of the Poisson(1) distribution.
fn poisson_quantile(uniform: f64) -> f64 {
    let (mut count, mut mass) = (0.0, (-1.0f64).exp());
    let mut below = mass;
    while uniform >= below && mass > f64::EPSILON {
        count += 1.0;
        mass /= count;
        below += mass;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prompts with different accepted lengths: mean 2 + `shift`, uniform within ±1, with 3 to 30
    /// cycles each.
    fn prompts(experiment: u64, count: u64, shift: f64) -> Vec<(String, PromptCounts)> {
        let stream = Stream::new(experiment, "prompts");
        let prompt = |i| {
            let uniform = |lane| stream.uniform(i, Purpose::Init, lane);
            let cycles = 3 + (28.0 * uniform(0)) as u64;
            let committed = ((2.0 + shift + 2.0 * uniform(1) - 1.0) * cycles as f64).round() as u64;
            (format!("{experiment}-{i}"), PromptCounts { committed, cycles })
        };
        (0..count).map(prompt).collect()
    }

    fn tau(suite: &str, prompts: &[(String, PromptCounts)]) -> Estimate {
        Estimate::with_resamples(suite, prompts.iter().map(|(id, counts)| (id.as_str(), *counts)), 500)
    }

    #[test]
    fn the_interval_covers_the_truth_as_often_as_it_says() {
        let experiments = 400;
        let covers = |experiment: &u64| {
            let interval = tau("s", &prompts(*experiment, 60, 0.0)).interval().unwrap();
            interval.low <= 2.0 && 2.0 <= interval.high
        };
        let covered = (0..experiments).filter(covers).count() as f64 / experiments as f64;
        // Four standard errors of a share of 0.95 over 400 experiments are 0.044.
        assert!((0.906..=0.994).contains(&covered), "95 % intervals cover {covered}");
    }

    #[test]
    fn chance_is_called_significant_as_often_as_it_says() {
        let experiments = 400;
        let significant = |experiment: &u64| {
            let [a, b] = [2 * experiment, 2 * experiment + 1].map(|arm| tau("s", &prompts(arm, 60, 0.0)));
            a.minus(&b).p_value().unwrap() < 0.05
        };
        let rate = (0..experiments).filter(significant).count() as f64 / experiments as f64;
        assert!((0.006..=0.094).contains(&rate), "p < 0.05 in {rate} of null experiments");
        let [a, b] = [0.0, 0.5].map(|shift| tau("s", &prompts(7, 60, shift)));
        assert!(b.minus(&a).p_value().unwrap() < 0.01, "half a token over the same prompts is no chance");
    }

    #[test]
    fn swapping_the_arms_negates() {
        let suite = |name: &str, seed, shift| tau(name, &prompts(seed, 40, shift));
        let arm = |shift| Estimate::mean(&[suite("a", 1, shift), suite("b", 2, shift)]);
        let (a, b) = (arm(0.0), arm(0.2));
        let (there, back) = (b.minus(&a), a.minus(&b));
        assert_eq!(there.value.unwrap(), -back.value.unwrap());
        assert_eq!(there.p_value(), back.p_value());
        let (one, other) = (there.interval().unwrap(), back.interval().unwrap());
        assert!((one.low + other.high).abs() < 1e-12 && (one.high + other.low).abs() < 1e-12);
        assert_eq!(a.minus(&a).p_value(), Some(1.0));
    }

    #[test]
    fn pairing_sees_what_prompts_share() {
        // The second arm accepts 0.1 tokens more on every prompt, while prompts differ by much
        // more.
        let (a, b) = (prompts(3, 80, 0.0), prompts(3, 80, 0.1));
        let paired = tau("s", &b).minus(&tau("s", &a));
        let unpaired = tau("s", &b).minus(&tau("t", &a));
        let width = |estimate: &Estimate| estimate.interval().map(|i| i.high - i.low).unwrap();
        assert!(width(&paired) < width(&unpaired) / 4.0);
        assert!(paired.p_value().unwrap() < 0.01 && unpaired.p_value().unwrap() > 0.05);
    }

    #[test]
    fn nothing_to_divide_is_no_value() {
        let of = |counts: &[(u64, u64)]| {
            let counts = counts.iter().map(|&(committed, cycles)| PromptCounts { committed, cycles });
            tau("s", &counts.enumerate().map(|(id, counts)| (id.to_string(), counts)).collect::<Vec<_>>())
        };
        let none = of(&[(0, 0); 3]);
        assert_eq!((none.value, none.interval(), none.p_value()), (None, None, None));
        let one = of(&[(6, 3), (0, 0)]);
        assert_eq!((one.value, one.interval()), (Some(2.0), None));
        let two = of(&[(6, 3), (0, 0), (6, 3)]);
        assert_eq!(two.interval(), Some(Interval { low: 2.0, high: 2.0 }));
        assert_eq!(
            Estimate::mean([&none, &two]).interval(),
            two.interval(),
            "a suite without cycles is left out"
        );
        assert_eq!(Estimate::mean([&one, &two]).interval(), None);
        assert_eq!(Estimate::mean([]).value, None);
    }

    #[test]
    fn weights_are_poisson() {
        assert_eq!(
            [0.0, 0.36, 0.37, 0.73, 0.74, 0.919, 0.92].map(poisson_quantile),
            [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0]
        );
        assert!(poisson_quantile(1.0 - f64::EPSILON / 2.0) < 25.0);
    }
}
