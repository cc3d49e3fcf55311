//! The learning rate: linear warm-up, then half a cosine down to zero.

/// Peak, warm-up and length of a learning-rate schedule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LrSchedule {
    peak: f64,
    warmup: usize,
    total: usize,
}

impl LrSchedule {
    /// Warms up over ⌊ratio · total⌋ steps.
    pub fn new(peak: f64, warmup_ratio: f64, total: usize) -> Self {
        Self { peak, warmup: (warmup_ratio * total as f64) as usize, total }
    }

    /// The rate of step `step` (0-based): peak·(step+1)/warm-up while warming up, then peak·(1 + cos(π·t/T))/2 with t steps since
    /// the warm-up of T that remain after it.
    pub fn at(&self, step: usize) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let progress = (step - self.warmup) as f64 / (self.total - self.warmup).max(1) as f64;
        self.peak * 0.5 * (1.0 + (std::f64::consts::PI * progress.min(1.0)).cos())
    }
}
