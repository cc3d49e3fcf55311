//! Random numbers that no other test can disturb.

use std::f64::consts::TAU;

/// `count` draws from the standard normal distribution, by the seed alone. (Torch has one generator for a whole process, which
/// tests that run side by side would take from each other.)
pub fn noise(seed: u64, count: usize) -> Vec<f32> {
    // SplitMix64 (Steele, Lea & Flood 2014) into Box and Muller's transform.
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
