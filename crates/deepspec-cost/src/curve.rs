//! Cost of a verification batch: the profiled table SPS(B) (docs/architecture.md, Prefix
//! scheduler).

use crate::ScheduleError;

/// Limit on batch tokens. No batch comes near it, so that a larger number is a mistake that would
/// exhaust memory.
pub(crate) const MAX_BATCH_TOKENS: usize = 1 << 20;

/// Target forward passes per second for every batch size from 1 token to the largest that was
/// profiled.
///
/// B counts the tokens of one verification pass over all requests: B = Σ_r (1 + l_r). SPS does not
/// have to fall with B, because times of real kernels are step functions.
#[derive(Debug, Clone, PartialEq)]
pub struct CostCurve {
    /// SPS(1), SPS(2), …
    table: Vec<f64>,
}

impl CostCurve {
    /// A curve from SPS(1), SPS(2), … in steps per second.
    ///
    /// # Errors
    /// Fails if the table is empty, or if a rate is not finite and positive.
    pub fn new(table: Vec<f64>) -> Result<Self, ScheduleError> {
        if table.is_empty() {
            return Err(ScheduleError::Empty { what: "rates in the cost curve" });
        }
        match table.iter().position(|rate| !(rate.is_finite() && *rate > 0.0)) {
            Some(index) => Err(ScheduleError::Cost { batch: index + 1, value: table[index] }),
            None => Ok(Self { table }),
        }
    }

    /// A curve through measured points (batch tokens, seconds per step), ascending in the batch.
    /// Step times are interpolated between points. Below the first point its time holds.
    ///
    /// # Errors
    /// Fails without points, if batches do not ascend within 1 … 2²⁰, or if a time is not finite
    /// and positive.
    pub fn from_step_seconds(points: &[(usize, f64)]) -> Result<Self, ScheduleError> {
        let &(first, seconds) = points.first().ok_or(ScheduleError::Empty { what: "measured batches" })?;
        if let Some(&(batch, value)) =
            points.iter().find(|(_, seconds)| !(seconds.is_finite() && *seconds > 0.0))
        {
            return Err(ScheduleError::Cost { batch, value });
        }
        if let Some(&(batch, _)) = points.iter().find(|(batch, _)| !(1..=MAX_BATCH_TOKENS).contains(batch)) {
            return Err(ScheduleError::Order { batch });
        }
        let mut table = vec![1.0 / seconds; first];
        for pair in points.windows(2) {
            let [(low, before), (high, after)] = [pair[0], pair[1]];
            if high <= low {
                return Err(ScheduleError::Order { batch: high });
            }
            let slope = (after - before) / (high - low) as f64;
            table.extend((1..=high - low).map(|i| 1.0 / (before + slope * i as f64)));
        }
        Self::new(table)
    }

    /// The largest batch that was profiled, in tokens.
    pub fn max_batch(&self) -> usize {
        self.table.len()
    }

    /// SPS(`batch`) in steps per second; 0 for an empty batch and past [`Self::max_batch`], so that
    /// no scheduler forms a batch that was never profiled.
    pub fn steps_per_second(&self, batch: usize) -> f64 {
        batch.checked_sub(1).and_then(|index| self.table.get(index)).copied().unwrap_or(0.0)
    }

    /// Seconds of a step of `batch` tokens. Beyond [`Self::max_batch`] they are extrapolated with
    /// the mean increase over the upper half of the curve, or 0 if that falls.
    pub fn step_seconds(&self, batch: usize) -> f64 {
        let (batch, end) = (batch.max(1), self.table.len());
        let at = |batch: usize| 1.0 / self.table[batch - 1];
        if batch <= end {
            return at(batch);
        }
        let half = end.div_ceil(2);
        let slope = if half < end {
            (at(end) - at(half)).max(0.0) / (end - half) as f64
        } else {
            at(end) / end as f64
        };
        at(end) + slope * (batch - end) as f64
    }
}

/// The non-decreasing step times nearest to the measured ones in least squares
/// (pool-adjacent-violators). A larger batch that was measured as faster is noise, which would
/// mislead a scheduler.
pub fn isotonic_regression(seconds: &[f64]) -> Vec<f64> {
    let mut pools: Vec<(f64, usize)> = vec![];
    for &value in seconds {
        let mut pool = (value, 1);
        while let Some(&(before, count)) = pools.last().filter(|(before, _)| *before > pool.0) {
            pool =
                ((before * count as f64 + pool.0 * pool.1 as f64) / (count + pool.1) as f64, count + pool.1);
            pools.pop();
        }
        pools.push(pool);
    }
    pools.into_iter().flat_map(|(value, count)| std::iter::repeat_n(value, count)).collect()
}
