//! CPython's `random.Random(seed).shuffle`, which selects the rows of a capped suite in the
//! published table.

use rand_mt::Mt;

/// Shuffles `items` like `random.Random(seed).shuffle(items)`.
pub fn shuffle<T>(items: &mut [T], seed: u64) {
    // `random.seed` uses the seed's 32-bit words, least significant first.
    let words = [seed as u32, (seed >> 32) as u32];
    let key = if words[1] == 0 { &words[..1] } else { &words[..] };
    let mut generator = Mt::new_with_key(key.iter().copied());
    for i in (1..items.len()).rev() {
        items.swap(i, random_below(&mut generator, i as u32 + 1) as usize);
    }
}

/// A uniform integer in `0..bound`. It draws as many bits as `bound` has until the value is below
/// `bound`.
fn random_below(generator: &mut Mt, bound: u32) -> u32 {
    loop {
        let drawn = generator.next_u32() >> bound.leading_zeros();
        if drawn < bound {
            return drawn;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shuffled(seed: u64, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        shuffle(&mut order, seed);
        order
    }

    /// `r = list(range(n)); random.Random(seed).shuffle(r)` in CPython 3.11.
    #[test]
    fn orders_are_cpythons() {
        assert_eq!(
            shuffled(980_406, 1319)[..12],
            [435, 902, 303, 1168, 403, 611, 608, 977, 229, 1263, 566, 1191]
        );
        assert_eq!(shuffled(980_406, 1319)[1318], 487);
        assert_eq!(shuffled(980_406, 10), [2, 0, 1, 5, 4, 8, 7, 6, 9, 3]);
        assert_eq!(shuffled(0, 10), [7, 8, 1, 5, 3, 4, 2, 0, 9, 6]);
        assert_eq!(shuffled((1 << 40) + 5, 12), [3, 5, 2, 9, 6, 7, 1, 10, 0, 4, 11, 8]);
        assert_eq!(shuffled(7, 2), [0, 1]);
        assert_eq!(shuffled(1, 1), [0]);
        assert_eq!(shuffled(1, 0), [0; 0]);
    }

    #[test]
    fn long_orders_use_many_refills() {
        let mut order = shuffled(3, 5000);
        assert_ne!(order[..4], [0, 1, 2, 3]);
        order.sort_unstable();
        assert!(order.into_iter().eq(0..5000));
    }
}
