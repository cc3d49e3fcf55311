//! CPython's `random.Random(seed).shuffle`, bit for bit: it decides which rows of a capped suite are published.

/// Words of state.
const N: usize = 624;
/// Distance of the word that a new one is mixed with.
const M: usize = 397;

/// The generator MT19937 (Matsumoto & Nishimura 1998).
struct MersenneTwister {
    state: [u32; N],
    next: usize,
}

impl MersenneTwister {
    /// The state after `random.seed(seed)`: `init_by_array` over the seed's 32-bit words, least significant first.
    fn new(seed: u64) -> Self {
        let words = [seed as u32, (seed >> 32) as u32];
        let key = if words[1] == 0 { &words[..1] } else { &words[..] };
        let mut state = [0; N];
        state[0] = 19_650_218_u32;
        for i in 1..N {
            state[i] = 1_812_433_253_u32.wrapping_mul(spread(state[i - 1])).wrapping_add(i as u32);
        }
        let mut i = 1;
        for k in 0..N {
            let j = k % key.len();
            let mixed = state[i] ^ spread(state[i - 1]).wrapping_mul(1_664_525);
            state[i] = mixed.wrapping_add(key[j]).wrapping_add(j as u32);
            i = advance(i, &mut state);
        }
        for _ in 1..N {
            let mixed = state[i] ^ spread(state[i - 1]).wrapping_mul(1_566_083_941);
            state[i] = mixed.wrapping_sub(i as u32);
            i = advance(i, &mut state);
        }
        state[0] = 0x8000_0000;
        Self { state, next: N }
    }

    fn word(&mut self) -> u32 {
        if self.next == N {
            self.refill();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    fn refill(&mut self) {
        for i in 0..N {
            let y = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % N] & 0x7fff_ffff);
            let odd = if y & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + M) % N] ^ (y >> 1) ^ odd;
        }
        self.next = 0;
    }

    /// A uniform integer in `0..bound`: as many bits as the bound has, drawn again until they are below it.
    fn below(&mut self, bound: u32) -> u32 {
        let unused = bound.leading_zeros();
        loop {
            let drawn = self.word() >> unused;
            if drawn < bound {
                return drawn;
            }
        }
    }
}

fn spread(word: u32) -> u32 {
    word ^ (word >> 30)
}

/// The next index of the seeding's second and third pass, which wrap round to 1.
fn advance(i: usize, state: &mut [u32; N]) -> usize {
    if i + 1 < N {
        return i + 1;
    }
    state[0] = state[N - 1];
    1
}

/// Puts `items` into the order of `random.Random(seed).shuffle(items)`.
pub fn shuffle<T>(items: &mut [T], seed: u64) {
    let mut generator = MersenneTwister::new(seed);
    for i in (1..items.len()).rev() {
        items.swap(i, generator.below(i as u32 + 1) as usize);
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
