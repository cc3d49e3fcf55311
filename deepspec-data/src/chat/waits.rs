//! How long requests waited, without keeping each.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Each bucket ends this much later than the one before; a quantile is told with that precision.
const GROWTH: f64 = 1.25;
/// Where the first bucket ends, in seconds.
const FIRST: f64 = 1e-3;
/// The last one takes whatever is longer, which is more than a day.
const BUCKETS: usize = 84;

/// Counts of waiting times in buckets that widen.
#[derive(Debug)]
pub struct Waits([AtomicU64; BUCKETS]);

impl Default for Waits {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; BUCKETS])
    }
}

impl Waits {
    /// Counts one.
    pub fn add(&self, wait: Duration) {
        let bucket = (wait.as_secs_f64() / FIRST).max(1.0).log(GROWTH).ceil() as usize;
        self.0[bucket.min(BUCKETS - 1)].fetch_add(1, Ordering::Relaxed);
    }

    /// What this share of them did not exceed, rounded up to the end of a bucket; None while there are none.
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let counts: Vec<u64> = self.0.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let wanted = (counts.iter().sum::<u64>() as f64 * share).ceil().max(1.0) as u64;
        let mut sum = 0;
        let bucket = counts.iter().position(|count| {
            sum += count;
            sum >= wanted
        })?;
        Some(Duration::from_secs_f64(FIRST * GROWTH.powi(bucket as i32)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_right_to_a_bucket() {
        let waits = Waits::default();
        assert_eq!(waits.quantile(0.99), None);
        (1..=1000).for_each(|millis| waits.add(Duration::from_millis(millis)));
        for (share, exact) in [(0.5, 0.5), (0.99, 0.99), (1.0, 1.0)] {
            let found = waits.quantile(share).unwrap().as_secs_f64();
            assert!((exact..exact * GROWTH).contains(&found), "{share}: {found}");
        }
        waits.add(Duration::MAX);
        assert!(waits.quantile(1.0).unwrap() > Duration::from_secs(86_400));
    }
}
