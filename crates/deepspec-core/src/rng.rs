//! Counter-based random numbers: a number depends on its purpose, not on when or where it is drawn.
//!
//! A [`Stream`] is keyed by (seed, name); each draw specifies its step, purpose and lane. There is
//! no state, so results do not depend on batching, order, threads or devices. Resuming needs no
//! generator state.

/// The decision that a random number makes. Different purposes get independent numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Purpose {
    /// A token drawn from the draft distribution.
    Draft = 1,
    /// Whether a drafted token is accepted.
    Accept = 2,
    /// A token drawn from the target (plain, residual or bonus).
    Target = 3,
    /// Order of samples in an epoch.
    Shuffle = 4,
    /// Anchors of a training sequence.
    Anchor = 5,
    /// Initial weights.
    Init = 6,
    /// Assignment of rows to the sides of a split, and draws of a replay.
    Split = 7,
    /// Selection of samples in a bootstrap resample.
    Resample = 8,
}

/// The golden-ratio increment of SplitMix64 (Steele, Lea & Flood 2014).
const SPLITMIX_INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// The output function of SplitMix64: a bijection in which every output bit depends on every input
/// bit.
fn splitmix64_output(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn mix_word(state: u64, word: u64) -> u64 {
    splitmix64_output(
        state.wrapping_add(SPLITMIX_INCREMENT) ^ splitmix64_output(word.wrapping_add(SPLITMIX_INCREMENT)),
    )
}

/// A stateless random stream, keyed by a seed and a name (a sample id, a parameter, an epoch).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream(u64);

impl Stream {
    /// The stream of `seed` and `name`.
    pub fn new(seed: u64, name: &str) -> Self {
        let mut state = mix_word(seed, name.len() as u64);
        for chunk in name.as_bytes().chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            state = mix_word(state, u64::from_le_bytes(word));
        }
        Self(state)
    }

    /// 64 random bits for one decision.
    pub fn bits(self, step: u64, purpose: Purpose, lane: u64) -> u64 {
        mix_word(mix_word(mix_word(self.0, step), purpose as u64), lane)
    }

    /// A uniform number in [0, 1) with 53 random bits.
    pub fn uniform(self, step: u64, purpose: Purpose, lane: u64) -> f64 {
        (self.bits(step, purpose, lane) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A uniform integer in 0..bound; its bias of at most bound/2⁶⁴ is negligible.
    pub fn below(self, bound: u64, step: u64, purpose: Purpose, lane: u64) -> u64 {
        ((u128::from(self.bits(step, purpose, lane)) * u128::from(bound)) >> 64) as u64
    }

    /// A random permutation of 0..n (Fisher–Yates).
    pub fn permutation(self, n: usize, purpose: Purpose) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        self.shuffle_prefix(&mut order, n, purpose);
        order
    }

    /// Draws `count` of the items without replacement, in random order.
    pub fn choose<T: Copy>(self, items: &[T], count: usize, purpose: Purpose) -> Vec<T> {
        let mut pool = items.to_vec();
        let count = count.min(pool.len());
        self.shuffle_prefix(&mut pool, count, purpose);
        pool.truncate(count);
        pool
    }

    fn shuffle_prefix<T>(self, items: &mut [T], count: usize, purpose: Purpose) {
        for i in 0..count {
            let j = i as u64 + self.below((items.len() - i) as u64, i as u64, purpose, 0);
            items.swap(i, j as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uniforms_are_uniform_and_independent_of_neighbours() {
        let n = 200_000;
        let (mut histogram, mut product) = ([0u32; 20], 0.0);
        for i in 0..n {
            let stream = Stream::new(7, &format!("row-{i}"));
            let (u, v) = (stream.uniform(0, Purpose::Accept, 0), stream.uniform(0, Purpose::Accept, 1));
            histogram[(u * 20.0) as usize] += 1;
            product += (u - 0.5) * (v - 0.5);
        }
        let expected = f64::from(n) / 20.0;
        let chi2: f64 = histogram.iter().map(|&c| (f64::from(c) - expected).powi(2) / expected).sum();
        assert!(chi2 < 43.8, "chi² {chi2} of 19 degrees of freedom exceeds its 99.9 % quantile");
        assert!((product / f64::from(n)).abs() < 4.0 / 12.0 / f64::from(n).sqrt());
    }

    #[test]
    fn every_part_of_the_key_matters() {
        let base = Stream::new(1, "a").bits(2, Purpose::Draft, 3);
        assert_ne!(base, Stream::new(2, "a").bits(2, Purpose::Draft, 3));
        assert_ne!(base, Stream::new(1, "b").bits(2, Purpose::Draft, 3));
        assert_ne!(base, Stream::new(1, "a").bits(3, Purpose::Draft, 3));
        assert_ne!(base, Stream::new(1, "a").bits(2, Purpose::Accept, 3));
        assert_ne!(base, Stream::new(1, "a").bits(2, Purpose::Draft, 4));
        assert_ne!(Stream::new(1, "a\0"), Stream::new(1, "a"));
    }

    #[test]
    fn permutations_are_permutations() {
        let mut order = Stream::new(42, "epoch").permutation(1000, Purpose::Shuffle);
        assert_ne!(order[..10], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        order.sort_unstable();
        assert!(order.into_iter().eq(0..1000));
    }
}
