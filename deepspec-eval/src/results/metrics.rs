//! Times of a run, and ratios computed from them.

use std::time::Duration;

use deepspec_engine::{AcceptanceStats, StepTimes};
use serde::{Deserialize, Serialize};

use crate::statistics::Interval;

/// Seconds of wall clock, summed over the worker processes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Time from the first prompt to the last token.
    pub wall_s: f64,
    /// Time of drafting.
    pub draft_s: f64,
    /// Time of the target's forwards, including verification and the wait for its results.
    pub verify_s: f64,
    /// Time of bookkeeping on the host.
    pub host_s: f64,
    /// Number of forwards of the target.
    pub steps: u64,
}

impl Timing {
    /// A duration of zero.
    pub const ZERO: Self = Self { wall_s: 0.0, draft_s: 0.0, verify_s: 0.0, host_s: 0.0, steps: 0 };

    /// Whether a clock can have measured this: no part is negative or longer than thirty years.
    pub fn is_plausible(&self) -> bool {
        const LONGEST: f64 = 1e9;
        let parts = [self.wall_s, self.draft_s, self.verify_s, self.host_s, self.steps as f64];
        parts.iter().all(|part| (0.0..=LONGEST).contains(part))
    }

    /// Adds the times of `other`.
    pub fn add(&mut self, other: &Self) {
        self.wall_s += other.wall_s;
        self.draft_s += other.draft_s;
        self.verify_s += other.verify_s;
        self.host_s += other.host_s;
        self.steps += other.steps;
    }

    /// `wall`, with the difference of the engine's times.
    pub fn from_step_times(before: StepTimes, after: StepTimes, wall: Duration) -> Self {
        Self {
            wall_s: wall.as_secs_f64(),
            draft_s: (after.draft - before.draft).as_secs_f64(),
            verify_s: (after.verify - before.verify).as_secs_f64(),
            host_s: (after.host - before.host).as_secs_f64(),
            steps: after.steps - before.steps,
        }
    }

    fn per_second(&self, tokens: u64) -> Option<f64> {
        (self.wall_s > 0.0).then(|| tokens as f64 / self.wall_s)
    }
}

/// Results of plain decoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Baseline {
    /// Number of generated tokens.
    pub output_tokens: u64,
    /// Times of plain decoding.
    pub timing: Timing,
    /// `output_tokens` per second.
    pub tokens_per_s: Option<f64>,
}

impl Baseline {
    /// Plain decoding of `output_tokens` tokens in time `timing`.
    pub fn new(output_tokens: u64, timing: Timing) -> Self {
        Self { output_tokens, timing, tokens_per_s: timing.per_second(output_tokens) }
    }
}

/// Ratios of a suite, or their averages over suites; None for a division by zero.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Metrics {
    /// τ: tokens committed per cycle.
    pub accepted_length: Option<f64>,
    /// 95 % bootstrap interval of the accepted length over prompts.
    #[serde(default)]
    pub accepted_length_interval: Option<Interval>,
    /// Committed tokens per token that the target verified.
    pub verify_rate: Option<f64>,
    /// Fraction of verified draft tokens that were thrown away.
    pub wasted_verify: Option<f64>,
    /// Fraction of blocks that accepted position k, whatever their earlier positions.
    pub rates: Vec<Option<f64>>,
    /// Fraction of blocks that accepted position k, among blocks that accepted all earlier
    /// positions.
    pub conditional_rates: Vec<Option<f64>>,
    /// Generated tokens per second.
    pub tokens_per_s: Option<f64>,
    /// `tokens_per_s` over that of plain decoding.
    pub speed_up: Option<f64>,
}

impl Metrics {
    /// The ratios of one suite.
    pub fn new(counts: &AcceptanceStats, timing: &Timing, baseline: Option<&Baseline>) -> Self {
        let tokens_per_s = timing.per_second(counts.output_tokens);
        let plain = baseline.and_then(|baseline| baseline.tokens_per_s).filter(|&plain| plain > 0.0);
        Self {
            accepted_length: counts.accepted_length(),
            accepted_length_interval: None,
            verify_rate: counts.verify_rate(),
            wasted_verify: counts.rejected_fraction(),
            rates: counts.acceptance_rates(),
            conditional_rates: counts.conditional_acceptance_rates(),
            tokens_per_s,
            speed_up: tokens_per_s.zip(plain).map(|(drafted, plain)| drafted / plain),
        }
    }

    /// The mean over suites, each value over the suites that have it.
    pub fn mean<'m>(suites: impl Iterator<Item = &'m Self> + Clone) -> Self {
        let over = |value: &dyn Fn(&Self) -> Option<f64>| mean(suites.clone().filter_map(value));
        let positions = suites.clone().map(|suite| suite.rates.len()).max().unwrap_or(0);
        let at = |rates: &Vec<Option<f64>>, k: usize| rates.get(k).copied().flatten();
        Self {
            accepted_length: over(&|suite| suite.accepted_length),
            accepted_length_interval: None,
            verify_rate: over(&|suite| suite.verify_rate),
            wasted_verify: over(&|suite| suite.wasted_verify),
            rates: (0..positions).map(|k| over(&|suite| at(&suite.rates, k))).collect(),
            conditional_rates: (0..positions)
                .map(|k| over(&|suite| at(&suite.conditional_rates, k)))
                .collect(),
            tokens_per_s: over(&|suite| suite.tokens_per_s),
            speed_up: over(&|suite| suite.speed_up),
        }
    }
}

/// The mean of the values; None without values.
pub fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}
