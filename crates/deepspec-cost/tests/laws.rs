//! Properties that hold for any numbers.

use deepspec_core::rng::{Purpose, Stream};
use deepspec_cost::ScheduleError;
use deepspec_cost::calibrate::{Calibration, GridSearch, VerifiedProposal, fit_temperatures};
use deepspec_cost::curve::CostCurve;
use deepspec_cost::reliability::Reliability;
use deepspec_cost::scheduler::{fill_budget, global_prefix_lengths, prefix_lengths};
use deepspec_cost::survival::{sigmoid, survival_probabilities};
use proptest::collection::vec;
use proptest::prelude::*;

/// Probabilities with plenty of ties, zeros and ones.
fn probability() -> impl Strategy<Value = f64> {
    prop_oneof![3 => 0.0..=1.0, 1 => prop::sample::select(vec![0.0, 0.25, 0.5, 1.0])]
}

fn requests() -> impl Strategy<Value = Vec<Vec<f64>>> {
    vec(vec(probability(), 0..4), 1..5)
}

/// A jagged cost curve, often too short for all candidates.
fn curve() -> impl Strategy<Value = CostCurve> {
    vec(0.1..10.0, 4..20).prop_map(|table| CostCurve::new(table).unwrap())
}

/// A proposal and the number of its accepted tokens.
fn outcome<T: std::fmt::Debug + Clone>(
    token: impl Strategy<Value = T>,
) -> impl Strategy<Value = (Vec<T>, usize)> {
    vec(token, 0..5)
        .prop_flat_map(|tokens| (0..=tokens.len()).prop_map(move |accepted| (tokens.clone(), accepted)))
}

/// Θ for given prefix lengths, computed from its definition.
fn throughput(confidences: &[Vec<f64>], lengths: &[usize], curve: &CostCurve) -> f64 {
    let expected: f64 = confidences
        .iter()
        .zip(lengths)
        .map(|(row, &l)| 1.0 + survival_probabilities(row).take(l).sum::<f64>())
        .sum();
    expected * curve.steps_per_second(lengths.iter().map(|l| 1 + l).sum())
}

/// The number of a request's tokens with a nonzero survival probability; Algorithm 1 considers only
/// these.
fn alive(row: &[f64]) -> usize {
    survival_probabilities(row).filter(|&a| a > 0.0).count()
}

/// All combinations of one prefix length per request.
fn every_choice(confidences: &[Vec<f64>]) -> Vec<Vec<usize>> {
    confidences.iter().fold(vec![vec![]], |choices, row| {
        let extended = choices
            .iter()
            .flat_map(|choice| (0..=alive(row)).map(move |l| [choice.as_slice(), &[l]].concat()));
        extended.collect()
    })
}

proptest! {
    #[test]
    fn global_search_is_brute_force(confidences in requests(), curve in curve()) {
        let found = global_prefix_lengths(&confidences, &curve).unwrap();
        let choices = every_choice(&confidences);
        let best = choices.iter().map(|l| throughput(&confidences, l, &curve)).fold(0.0, f64::max);
        prop_assert!((found.throughput - best).abs() <= 1e-12 * best);
        prop_assert!((throughput(&confidences, &found.lengths, &curve) - best).abs() <= 1e-12 * best);
    }

    #[test]
    fn admission_ignores_later_tokens(
        confidences in requests(), curve in curve(), others in vec(probability(), 0..4), pick in any::<prop::sample::Index>()
    ) {
        let lengths = prefix_lengths(&confidences, &curve).unwrap().lengths;
        let request = pick.index(confidences.len());
        for j in 0..confidences[request].len() {
            let mut changed = confidences.clone();
            changed[request].truncate(j + 1);
            changed[request].extend(&others);
            let again = prefix_lengths(&changed, &curve).unwrap().lengths;
            prop_assert_eq!(again[request] > j, lengths[request] > j);
        }
    }

    #[test]
    fn early_stop_verifies_a_part_of_what_the_global_search_does(confidences in requests(), curve in curve()) {
        let early = prefix_lengths(&confidences, &curve).unwrap();
        let global = global_prefix_lengths(&confidences, &curve).unwrap();
        prop_assert!(early.throughput <= global.throughput);
        prop_assert!(early.lengths.iter().zip(&global.lengths).all(|(early, global)| early <= global));
        prop_assert!(early.batch <= curve.max_batch() && global.batch <= curve.max_batch());
    }

    #[test]
    fn filling_takes_the_best(confidences in requests(), budget in 0usize..12) {
        let lengths = fill_budget(&confidences, budget).unwrap();
        let possible: usize = confidences.iter().map(|row| alive(row)).sum();
        prop_assert_eq!(lengths.iter().sum::<usize>(), budget.min(possible));
        let (mut worst_in, mut best_out) = (f64::INFINITY, 0.0f64);
        for (row, &l) in confidences.iter().zip(&lengths) {
            worst_in = survival_probabilities(row).take(l).fold(worst_in, f64::min);
            best_out = survival_probabilities(row).skip(l).fold(best_out, f64::max);
        }
        prop_assert!(worst_in >= best_out);
    }

    #[test]
    fn merging_is_one_stream(proposals in vec(outcome(probability()), 0..60), cut in any::<prop::sample::Index>()) {
        let gather = |part: &[(Vec<f64>, usize)]| {
            let mut all = Reliability::new(4);
            part.iter().for_each(|(confidences, accepted)| all.update(confidences, *accepted).unwrap());
            all
        };
        let (left, right) = proposals.split_at(cut.index(proposals.len() + 1));
        let mut merged = gather(left);
        merged.merge(&gather(right)).unwrap();
        let (merged, whole) = (merged.finish(), gather(&proposals).finish());
        prop_assert_eq!(merged.summary.is_some(), whole.summary.is_some());
        for (merged, whole) in merged.positions.iter().zip(&whole.positions) {
            prop_assert_eq!(merged.count, whole.count);
            if let (Some(merged), Some(whole)) = (merged.metrics, whole.metrics) {
                prop_assert_eq!(merged.auroc, whole.auroc);
                prop_assert!((merged.ece - whole.ece).abs() < 1e-12 && (merged.brier - whole.brier).abs() < 1e-12);
            }
        }
    }

    /// A slow reimplementation of the histogram: compares all pairs of accepted and rejected
    /// observations. Ties within a fine bin count half.
    #[test]
    fn auroc_compares_all_pairs(seen in vec((probability(), any::<bool>()), 0..50)) {
        let mut all = Reliability::new(1);
        seen.iter().for_each(|&(c, accepted)| all.update(&[c], usize::from(accepted)).unwrap());
        let ranks = |kind: bool| seen.iter().filter(move |s| s.1 == kind).map(|s| (s.0 * 1000.0).min(999.0) as i64);
        let pairs: Vec<f64> = ranks(true)
            .flat_map(|high| ranks(false).map(move |low| f64::from(1 + (high - low).signum() as i32) / 2.0))
            .collect();
        let mean = (!pairs.is_empty()).then(|| pairs.iter().sum::<f64>() / pairs.len() as f64);
        let auroc = all.finish().positions[0].metrics.and_then(|metrics| metrics.auroc);
        prop_assert_eq!(auroc.is_some(), mean.is_some());
        prop_assert!((auroc.unwrap_or(0.5) - mean.unwrap_or(0.5)).abs() < 1e-9);
    }

    #[test]
    fn scaling_keeps_the_order_within_a_position(
        proposals in vec(outcome(-8.0f32..8.0), 1..40), pair in (-8.0f32..8.0, -8.0f32..8.0)
    ) {
        let data: Vec<_> = proposals.iter().map(|(logits, accepted)| VerifiedProposal { logits, accepted: *accepted }).collect();
        let fits = fit_temperatures(&data, 4, &GridSearch::default()).unwrap();
        let calibration = Calibration::from_fits(&fits);
        let (low, high) = (pair.0.min(pair.1), pair.0.max(pair.1));
        let (low, high) = (calibration.confidences(&[low; 4]).unwrap(), calibration.confidences(&[high; 4]).unwrap());
        prop_assert!(low.iter().zip(&high).all(|(low, high)| low <= high));
        for (k, fit) in fits.iter().enumerate() {
            let reached = proposals.iter().filter(|(logits, _)| logits.len() > k).count();
            prop_assert_eq!(fit.map_or(0, |fit| fit.count), reached);
        }
    }

    /// The error that calibration reports equals the one that the reliability metrics measure.
    #[test]
    fn calibrated_error_is_the_measured_one(proposals in vec(outcome(-8.0f32..8.0), 1..40)) {
        let data: Vec<_> = proposals.iter().map(|(logits, accepted)| VerifiedProposal { logits, accepted: *accepted }).collect();
        let fits = fit_temperatures(&data, 4, &GridSearch::default()).unwrap();
        let calibration = Calibration::from_fits(&fits);
        let mut measured = Reliability::new(4);
        data.iter().for_each(|p| measured.update(&calibration.confidences(p.logits).unwrap(), p.accepted).unwrap());
        for (position, fit) in measured.finish().positions.iter().zip(&fits) {
            let (measured, found) = (position.metrics.map(|m| m.ece), fit.map(|fit| fit.ece_after));
            prop_assert_eq!(measured.is_some(), found.is_some());
            prop_assert!((measured.unwrap_or(0.0) - found.unwrap_or(0.0)).abs() < 1e-12);
        }
    }

    #[test]
    fn nothing_panics_on_rubbish(numbers in vec(any::<f64>(), 0..6), logits in vec(any::<f32>(), 0..6), accepted in 0usize..8) {
        let rows = [numbers.clone(), vec![0.5]];
        let curve = CostCurve::new(vec![1.0; 4]).unwrap();
        let _ = (prefix_lengths(&rows, &curve), global_prefix_lengths(&rows, &curve), fill_budget(&rows, accepted));
        let _ = CostCurve::new(numbers.clone());
        let points: Vec<_> = numbers.iter().enumerate().map(|(i, &s)| (i << (8 * accepted), s)).collect();
        let _ = CostCurve::from_step_seconds(&points);
        let _ = Reliability::new(3).update(&numbers, accepted);
        let _ = Calibration::new(numbers.clone()).and_then(|c| c.confidences(&logits));
        let _ = fit_temperatures(&[VerifiedProposal { logits: &logits, accepted }], 3, &GridSearch { grid: numbers, bins: accepted });
    }
}

#[test]
fn a_refusal_changes_nothing_and_says_why() {
    let mut all = Reliability::new(2);
    let refused = [
        (all.update(&[0.5, 1.5], 1), "confidence 1.5 at position 1 is not a probability in [0, 1]"),
        (all.update(&[0.5], 2), "2 tokens accepted of only 1 proposed"),
        (all.update(&[0.5; 3], 0), "proposal of 3 tokens, but there are only 2 positions"),
        (all.merge(&Reliability::new(3)), "2 positions on the left, 3 on the right: they must be as many"),
    ];
    for (result, message) in refused {
        assert_eq!(result.unwrap_err().to_string(), message);
    }
    assert_eq!(all.finish().summary, None);
    let crowded = prefix_lengths(&[[0.5]; 3], &CostCurve::new(vec![1.0; 2]).unwrap());
    assert_eq!(crowded, Err(ScheduleError::BeyondCurve { requests: 3, max_batch: 2 }));
}

#[test]
fn the_default_grid_is_200_temperatures_from_a_tenth_to_ten() {
    let grid = GridSearch::default().grid;
    assert_eq!(grid.len(), 200);
    assert!((grid[0] - 0.1).abs() < 1e-12 && (grid[199] - 10.0).abs() < 1e-12);
    assert!(grid.windows(2).all(|pair| (pair[1] / pair[0]).ln() - 100f64.ln() / 199.0 < 1e-12));
}

#[test]
fn no_requests_are_no_work() {
    let curve = CostCurve::new(vec![1.0]).unwrap();
    let plan = prefix_lengths(&[] as &[Vec<f64>], &curve).unwrap();
    assert_eq!((plan.batch, plan.throughput, plan.budget()), (0, 0.0, 0));
}

#[test]
fn step_times_are_linear_between_measurements() {
    let curve = CostCurve::from_step_seconds(&[(2, 0.5), (4, 1.0)]).unwrap();
    assert_eq!(
        [0, 1, 2, 3, 4, 5].map(|batch| curve.steps_per_second(batch)),
        [0.0, 2.0, 2.0, 1.0 / 0.75, 1.0, 0.0]
    );
    for (points, culprit) in
        [(&[(0, 1.0)][..], 0), (&[(3, 1.0), (3, 2.0)], 3), (&[(1, 1.0), (usize::MAX, 2.0)], usize::MAX)]
    {
        assert_eq!(CostCurve::from_step_seconds(points), Err(ScheduleError::Order { batch: culprit }));
    }
}

/// Blocks of a confidence head that predicts σ(`factor`·z) when the true probability is σ(z).
fn overconfident(experiment: u64, factor: f32) -> Vec<(Vec<f32>, usize)> {
    let stream = Stream::new(experiment, "blocks");
    let block = |i| {
        let uniform = |purpose, k| stream.uniform(i, purpose, k);
        let truth: Vec<f64> = (0..4).map(|k| 4.0 * uniform(Purpose::Draft, k) - 1.0).collect();
        let accepts = |(k, z): &(usize, &f64)| uniform(Purpose::Accept, *k as u64) < sigmoid(**z);
        let accepted = truth.iter().enumerate().take_while(accepts).count();
        (truth.iter().map(|&z| factor * z as f32).collect(), accepted)
    };
    (0..4000).map(block).collect()
}

fn proposals(blocks: &[(Vec<f32>, usize)]) -> Vec<VerifiedProposal<'_>> {
    blocks.iter().map(|(logits, accepted)| VerifiedProposal { logits, accepted: *accepted }).collect()
}

fn mean_error(blocks: &[(Vec<f32>, usize)], calibration: &Calibration) -> f64 {
    let mut sums = Reliability::new(4);
    for (logits, accepted) in blocks {
        sums.update(&calibration.confidences(logits).unwrap(), *accepted).unwrap();
    }
    sums.finish().summary.unwrap().ece
}

#[test]
fn scaling_mends_held_out_blocks() {
    let (fitted, held_out) = (overconfident(1, 2.0), overconfident(2, 2.0));
    let found = fit_temperatures(&proposals(&fitted), 4, &GridSearch::default()).unwrap();
    let calibration = Calibration::from_fits(&found);
    let raw = Calibration::new(vec![1.0; 4]).unwrap();
    let (before, after) = (mean_error(&held_out, &raw), mean_error(&held_out, &calibration));
    // The chance level: the same blocks with outcomes drawn from the calibrated confidences
    // themselves.
    let mut chance: Vec<f64> = (0..100)
        .map(|draw| {
            let stream = Stream::new(draw, "labels");
            let drawn = held_out.iter().enumerate().map(|(i, (logits, _))| {
                let confidences = calibration.confidences(logits).unwrap();
                let holds =
                    |(k, c): &(usize, &f64)| stream.uniform(i as u64, Purpose::Accept, *k as u64) < **c;
                (logits.clone(), confidences.iter().enumerate().take_while(holds).count())
            });
            mean_error(&drawn.collect::<Vec<_>>(), &calibration)
        })
        .collect();
    chance.sort_by(f64::total_cmp);
    assert!(before > 0.04, "{before}");
    assert!(after <= (0.5 * before).max(chance[95]), "{before} became {after}, chance is {}", chance[95]);
    // After the first position the survival is a product, whose calibration error is flat around
    // its minimum.
    let first = calibration.temperatures()[0];
    assert!((1.8..2.2).contains(&first), "a head twice too sure needs a temperature near 2, not {first}");
}

#[test]
fn doubled_logits_double_the_temperatures() {
    // A grid that contains the double of every temperature.
    let grid = |first: f64| (0..97).map(|i| first * 2f64.powf(f64::from(i) / 16.0)).collect::<Vec<_>>();
    let blocks = overconfident(3, 1.0);
    let doubled: Vec<_> = overconfident(3, 1.0)
        .into_iter()
        .map(|(logits, accepted)| (logits.iter().map(|z| 2.0 * z).collect(), accepted))
        .collect();
    let fitted = |blocks: &[(Vec<f32>, usize)], grid| {
        fit_temperatures(&proposals(blocks), 4, &GridSearch { grid, bins: 20 })
    };
    let (one, two) = (fitted(&blocks, grid(0.25)).unwrap(), fitted(&doubled, grid(0.5)).unwrap());
    for (one, two) in one.into_iter().zip(two).map(|(one, two)| (one.unwrap(), two.unwrap())) {
        assert!((two.temperature / one.temperature - 2.0).abs() < 1e-12);
        assert!((two.ece_after - one.ece_after).abs() < 1e-9);
    }
    let order = |calibration: &Calibration, k: usize| {
        let mut order: Vec<usize> = (0..blocks.len()).collect();
        let c: Vec<f64> =
            blocks.iter().map(|(logits, _)| calibration.confidences(logits).unwrap()[k]).collect();
        order.sort_by(|&i, &j| c[i].total_cmp(&c[j]));
        order
    };
    let (raw, calibrated) =
        (Calibration::new(vec![1.0; 4]).unwrap(), Calibration::new(vec![0.3, 2.0, 5.0, 1.1]).unwrap());
    (0..4).for_each(|k| assert_eq!(order(&raw, k), order(&calibrated, k)));
}
