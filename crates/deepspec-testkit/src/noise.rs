//! Random numbers that do not depend on other tests.

use std::f64::consts::TAU;

/// `count` samples of the standard normal distribution, determined by the seed. Torch has one
/// generator per process, which parallel tests would share.
pub fn noise(seed: u64, count: usize) -> Vec<f32> {
    // SplitMix64 (Steele, Lea & Flood 2014) followed by the Box–Muller transform.
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    };
    (0..count).map(|_| ((-2.0 * (1.0 - uniform()).ln()).sqrt() * (TAU * uniform()).cos()) as f32).collect()
}
