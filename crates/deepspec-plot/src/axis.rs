//! Values along an edge.

/// A range of values with ticks.
#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    /// What it measures, with the unit.
    pub label: String,
    /// The value at its beginning.
    pub low: f64,
    /// The value at its end.
    pub high: f64,
    /// Values that are written.
    pub ticks: Vec<(f64, String)>,
}

impl Axis {
    /// An axis with about `count` ticks at round values.
    pub fn new(label: &str, low: f64, high: f64, count: usize) -> Self {
        let (low, high) = if high > low { (low, high) } else { (low, low + 1.0) };
        let step = round_step((high - low) / count.max(1) as f64);
        let digits = (-step.log10().floor()).max(0.0) as usize;
        let first = (low / step - 1e-9).ceil() as i64;
        let last = (high / step + 1e-9).floor() as i64;
        let ticks = (first..=last).map(|i| (i as f64 * step, format!("{:.digits$}", i as f64 * step)));
        Self { label: label.to_string(), low, high, ticks: ticks.collect() }
    }

    /// An axis that begins at 0 and ends at a tick at or past `high`.
    pub fn from_zero(label: &str, high: f64, count: usize) -> Self {
        let high = if high > 0.0 && high.is_finite() { high } else { 1.0 };
        let step = round_step(high / count.max(1) as f64);
        Self::new(label, 0.0, (high / step - 1e-9).ceil() * step, count)
    }

    /// The integers from `low` to `high`, each in the middle of its place.
    pub fn steps(label: &str, low: usize, high: usize) -> Self {
        let every = (high.saturating_sub(low) / 16 + 1).max(1);
        let ticks = (low..=high).step_by(every).map(|k| (k as f64, k.to_string())).collect();
        Self { label: label.to_string(), low: low as f64 - 0.5, high: high as f64 + 0.5, ticks }
    }

    /// Which share of the axis lies before `value`.
    pub fn share(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }
}

/// 1, 2 or 5 times a power of ten, at least about `step`.
fn round_step(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0].into_iter().find(|factor| factor * power >= step * (1.0 - 1e-9));
    factor.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round() {
        let texts = |axis: Axis| axis.ticks.into_iter().map(|(_, text)| text).collect::<Vec<_>>();
        assert_eq!(texts(Axis::new("", 0.0, 1.0, 5)), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
        assert_eq!(texts(Axis::from_zero("", 6.2, 4)), ["0", "2", "4", "6", "8"]);
        assert_eq!(texts(Axis::from_zero("", 0.034, 4)), ["0.00", "0.01", "0.02", "0.03", "0.04"]);
        assert_eq!(texts(Axis::steps("", 1, 3)), ["1", "2", "3"]);
        assert!(texts(Axis::from_zero("", f64::NAN, 4)).len() > 2);
        assert!(texts(Axis::steps("", 1, 40)).len() < 20);
    }
}
