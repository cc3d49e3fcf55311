//! Divisors of RoPE frequencies, as llama.cpp reads them from the tensor `rope_freqs.weight`.

use std::f64::consts::TAU;

/// Defaults of YaRN's ramp, which llama.cpp applies to most architectures whatever the file says.
pub const YARN_BETAS: [(&str, f64); 2] = [("beta_fast", 32.0), ("beta_slow", 1.0)];

/// YaRN's factor on cosines and sines in a config that does not say it: 0.1·ln(s) + 1 for a factor s above 1.
pub fn yarn_attention_factor(factor: f64) -> f64 {
    0.1 * factor.ln().max(0.0) + 1.0
}

/// Settings of Llama 3's RoPE scaling.
#[derive(Debug, Clone, Copy)]
pub struct Llama3Scaling {
    /// `low_freq_factor`: frequencies with fewer rotations within the original context get the full
    /// factor.
    pub low_freq_factor: f64,
    /// `high_freq_factor`: frequencies with more rotations are not scaled.
    pub high_freq_factor: f64,
    /// Original context length, in tokens.
    pub original: f64,
}

impl Llama3Scaling {
    /// Divisor of a RoPE frequency, which is given in radians per token. Low frequencies get
    /// `max_factor`.
    pub fn rope_factor(&self, frequency: f64, max_factor: f64) -> f64 {
        let turns = self.original * frequency / TAU;
        let part =
            ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0.0, 1.0);
        1.0 / ((1.0 - part) / max_factor + part)
    }
}

/// Settings of YaRN (Peng et al. 2023), with the names of transformers.
#[derive(Debug, Clone, Copy)]
pub struct YarnScaling {
    /// Divisor of low frequencies.
    pub factor: f64,
    /// Frequencies with at least this many rotations within the original context are not scaled.
    pub beta_fast: f64,
    /// Frequencies with at most this many rotations get the full factor.
    pub beta_slow: f64,
    /// Original context length, in tokens.
    pub original: f64,
    /// Whether the ends of the ramp are rounded to whole dimension pairs.
    pub truncate: bool,
}

impl YarnScaling {
    /// Divisor of the frequency of each dimension pair of a head of `dim` values, with RoPE base `theta` above 1.
    pub fn rope_factors(&self, theta: f64, dim: u64) -> Vec<f64> {
        let width = dim as f64;
        // Index of the pair with so many rotations, as a real number.
        let pair = |turns: f64| width * (self.original / (turns * TAU)).ln() / (2.0 * theta.ln());
        let (mut first, mut last) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (first, last) = (first.floor(), last.ceil());
        }
        (first, last) = (first.max(0.0), last.min(width - 1.0));
        // transformers widens a ramp of no width by as much.
        let ramp = if first == last { 0.001 } else { last - first };
        let factor = |pair: u64| {
            let slowed = ((pair as f64 - first) / ramp).clamp(0.0, 1.0);
            1.0 / ((1.0 - slowed) + slowed / self.factor)
        };
        (0..dim / 2).map(factor).collect()
    }
}
