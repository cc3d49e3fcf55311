//! Learning rate schedule: linear warm-up, then a half cosine down to zero.

/// Peak, warm-up and length of a learning-rate schedule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LrSchedule {
    peak: f64,
    warmup: usize,
    total: usize,
}

impl LrSchedule {
    /// A schedule with ⌊ratio · total⌋ warm-up steps.
    pub fn new(peak: f64, warmup_ratio: f64, total: usize) -> Self {
        Self { peak, warmup: (warmup_ratio * total as f64) as usize, total }
    }

    /// The learning rate of step `step` (0-based). In warm-up it is peak·(step+1)/warm-up. Later it
    /// is peak·(1 + cos(π·t/T))/2, at t of the T steps after warm-up.
    pub fn lr_at(&self, step: usize) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let progress = (step - self.warmup) as f64 / (self.total - self.warmup).max(1) as f64;
        self.peak * 0.5 * (1.0 + (std::f64::consts::PI * progress.min(1.0)).cos())
    }
}
