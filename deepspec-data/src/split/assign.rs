//! Assigns rows one by one to the training or the held-out side, so that each side gets an exact
//! number of rows.

use deepspec_core::rng::{Purpose, Stream};
use deepspec_core::usage;

/// The side of a usable row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Training data.
    Train,
    /// Held-out prompts.
    Eval,
    /// Neither, because the row is not sampled.
    Out,
}

/// Number of a source's rows on each side.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Quota {
    /// Rows of training data.
    pub train: usize,
    /// Held-out rows.
    pub eval: usize,
}

/// Assigns sides by selection sampling (Knuth, volume 2, algorithm S). A side's probability is the
/// number of rows that it still needs, divided by the number of remaining rows. The totals are
/// therefore exact, all assignments are equally likely, and three counters suffice as state.
pub struct SplitAssigner {
    stream: Stream,
    step: u64,
    rows: usize,
    quota: Quota,
}

impl SplitAssigner {
    /// Assigns `quota` among `rows` rows. The sides depend only on the seed, the source's name and
    /// these numbers.
    pub fn new(seed: u64, source: Option<&str>, rows: usize, quota: Quota) -> Self {
        let name = source.map_or_else(|| "split".to_owned(), |source| format!("split/{source}"));
        Self { stream: Stream::new(seed, &name), step: 0, rows, quota }
    }

    /// The side of the next row.
    pub fn next(&mut self) -> Side {
        let lot = self.stream.below(self.rows.max(1) as u64, self.step, Purpose::Split, 0) as usize;
        self.step += 1;
        self.rows = self.rows.saturating_sub(1);
        if lot < self.quota.eval {
            self.quota.eval -= 1;
            Side::Eval
        } else if lot < self.quota.eval + self.quota.train {
            self.quota.train -= 1;
            Side::Train
        } else {
            Side::Out
        }
    }
}

/// A source's share of a mix.
pub struct Share<'a> {
    /// Name of the source; None if the input is not a mix.
    pub name: Option<&'a str>,
    /// Proportion of the output, relative to the weights of the other sources.
    pub weight: f64,
    /// Number of its usable rows.
    pub usable: usize,
}

/// Divides the output among the sources: `sample_size` rows, or as many as the weights allow.
///
/// # Errors
/// With a usage error if a source has fewer rows than its weight requires. If there is only one
/// source, all its rows are used instead.
pub fn quotas(
    shares: &[Share<'_>],
    test_size: f64,
    sample_size: Option<usize>,
) -> anyhow::Result<Vec<Quota>> {
    let weights: Vec<f64> = shares.iter().map(|share| share.weight).collect();
    let most = max_total(shares, &weights);
    let total = match (sample_size, shares) {
        (Some(asked), [_]) => asked.min(most),
        (Some(asked), _) if asked > most => {
            let scarce = apportion(asked, &weights).into_iter().zip(shares);
            let scarce = scarce.filter(|(drawn, share)| *drawn > share.usable).map(|(drawn, share)| {
                let name = share.name.unwrap_or_default();
                format!("source `{name}` has {} of the {drawn} rows that its weight asks for", share.usable)
            });
            usage!(
                "--sample-size {asked}: {}; at these weights the mix has {most} rows",
                scarce.collect::<Vec<_>>().join(", ")
            );
        }
        (Some(asked), _) => asked,
        (None, _) => most,
    };
    let drawn = apportion(total, &weights);
    let held_out = apportion_whole((total as f64 * test_size).ceil() as usize, &drawn);
    Ok(drawn.into_iter().zip(held_out).map(|(drawn, eval)| Quota { train: drawn - eval, eval }).collect())
}

/// The largest total at which no source runs out.
fn max_total(shares: &[Share<'_>], weights: &[f64]) -> usize {
    let sum: f64 = weights.iter().sum();
    // Rounding may give a source one row less than its proportion, so the search begins one row
    // above.
    let bounds = shares.iter().map(|share| ((share.usable + 1) as f64 * sum / share.weight) as usize + 1);
    let available = shares.iter().map(|share| share.usable).sum();
    let mut total = bounds.min().unwrap_or(0).min(available);
    let fits =
        |total| apportion(total, weights).iter().zip(shares).all(|(&drawn, share)| drawn <= share.usable);
    while !fits(total) {
        total -= 1;
    }
    total
}

/// Integers in proportion to the weights that add up to `total` (largest remainders; ties go to the
/// first).
fn apportion(total: usize, weights: &[f64]) -> Vec<usize> {
    let sum: f64 = weights.iter().sum();
    let exact: Vec<f64> = weights.iter().map(|weight| total as f64 * (weight / sum)).collect();
    let whole = exact.iter().map(|part| *part as usize).collect();
    round_up(total, whole, |index| exact[index].fract())
}

/// [`apportion`] in exact arithmetic, for integer weights. If `total` is at most their sum, no part
/// exceeds its weight.
fn apportion_whole(total: usize, weights: &[usize]) -> Vec<usize> {
    let sum = weights.iter().sum::<usize>().max(1) as u128;
    let product = |index: usize| total as u128 * weights[index] as u128;
    let whole = (0..weights.len()).map(|index| (product(index) / sum) as usize).collect();
    round_up(total, whole, |index| product(index) % sum)
}

fn round_up<F: PartialOrd>(total: usize, mut parts: Vec<usize>, fraction: impl Fn(usize) -> F) -> Vec<usize> {
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by(|&a, &b| fraction(b).partial_cmp(&fraction(a)).unwrap_or(std::cmp::Ordering::Equal));
    let missing = total.saturating_sub(parts.iter().sum());
    order.into_iter().take(missing).for_each(|index| parts[index] += 1);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sides(seed: u64, rows: usize, train: usize, eval: usize) -> Vec<Side> {
        let mut assigner = SplitAssigner::new(seed, None, rows, Quota { train, eval });
        (0..rows).map(|_| assigner.next()).collect()
    }

    #[test]
    fn sides_follow_the_seed_and_the_fractions() {
        let count = |sides: &[Side], side| sides.iter().filter(|&&found| found == side).count();
        let one = |usable, sample_size| {
            quotas(&[Share { name: None, weight: 1.0, usable }], 0.05, sample_size).unwrap()[0]
        };
        assert_eq!(one(101, None), Quota { train: 95, eval: 6 });
        assert_eq!(one(101, Some(20)), Quota { train: 19, eval: 1 });
        assert_eq!(one(101, Some(200)), one(101, None));
        let some = sides(42, 101, 19, 1);
        assert_eq!(
            (count(&some, Side::Train), count(&some, Side::Eval), count(&some, Side::Out)),
            (19, 1, 81)
        );
        assert_eq!(some, sides(42, 101, 19, 1));
        assert_ne!(some, sides(43, 101, 19, 1));
    }

    #[test]
    fn every_row_is_as_likely_as_any_other() {
        let (rows, seeds) = (20, 20_000);
        let mut counts = vec![0.0f64; rows];
        for seed in 0..seeds {
            for (row, side) in sides(seed, rows, 5, 3).into_iter().enumerate() {
                counts[row] += f64::from(u8::from(side == Side::Eval));
            }
        }
        let expected = seeds as f64 * 3.0 / rows as f64;
        let chi2: f64 = counts.iter().map(|count| (count - expected).powi(2) / expected).sum();
        assert!(chi2 < 43.8, "chi² {chi2} of 19 degrees of freedom exceeds its 99.9 % quantile");
    }

    #[test]
    fn a_mix_takes_what_its_scarcest_source_allows() {
        let share = |name, weight, usable| Share { name: Some(name), weight, usable };
        let drawn = |quotas: &[Quota]| -> Vec<usize> { quotas.iter().map(|q| q.train + q.eval).collect() };
        let shares = [share("a", 3.0, 1000), share("b", 1.0, 100)];
        let all = quotas(&shares, 0.1, None).unwrap();
        // The proportion 3 : 1 is exact up to rounding: rows 401 and 402 are still the first
        // source's.
        assert_eq!(drawn(&all), [302, 100]);
        assert_eq!(all.iter().map(|quota| quota.eval).sum::<usize>(), 41);
        assert_eq!(drawn(&quotas(&shares, 0.1, Some(10)).unwrap()), [8, 2]);
        let error = quotas(&shares, 0.1, Some(1000)).unwrap_err().to_string();
        assert!(
            error.contains("source `b` has 100 of the 250 rows") && error.contains("402 rows"),
            "{error}"
        );
        assert_eq!(drawn(&quotas(&[share("a", 1.0, 5), share("b", 1.0, 0)], 0.0, None).unwrap()), [1, 0]);
    }

    proptest! {
        #[test]
        fn parts_add_up(weights in prop::collection::vec(0.01f64..100.0, 1..8), usable in prop::collection::vec(0usize..5000, 8), test_size in 0.0f64..1.0) {
            let shares: Vec<Share<'_>> = weights.iter().zip(&usable).map(|(&weight, &usable)| Share { name: Some("x"), weight, usable }).collect();
            let quotas = quotas(&shares, test_size, None).unwrap();
            let total: usize = quotas.iter().map(|quota| quota.train + quota.eval).sum();
            prop_assert!(quotas.iter().zip(&shares).all(|(quota, share)| quota.train + quota.eval <= share.usable));
            prop_assert_eq!(quotas.iter().map(|quota| quota.eval).sum::<usize>(), (total as f64 * test_size).ceil() as usize);
            // One more row does not fit.
            let more = apportion(total + 1, &weights);
            prop_assert!(more.iter().zip(&shares).any(|(&drawn, share)| drawn > share.usable) || total == usable[..weights.len()].iter().sum::<usize>());
        }
    }
}
