//! Time of scheduling one step: 256 requests with 16 drafted tokens each.

use std::sync::Arc;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use deepspec_core::rng::{Purpose, Stream};
use deepspec_cost::cost::StepCost;
use deepspec_cost::curve::CostCurve;
use deepspec_cost::planner::{Planner, StepLoad};
use deepspec_cost::policy::Policy;
use deepspec_cost::scheduler::{fill_budget, prefix_lengths};

const REQUESTS: usize = 256;
const BLOCK: usize = 16;

fn benchmark(criterion: &mut Criterion) {
    let stream = Stream::new(1, "confidences");
    let confidence = |request, k| stream.uniform(request as u64, Purpose::Draft, k as u64).powf(0.2);
    let rows: Vec<Vec<f64>> =
        (0..REQUESTS).map(|request| (0..BLOCK).map(|k| confidence(request, k)).collect()).collect();
    // Steep enough to stop half-way, and flat, so that every candidate is considered.
    let curve = |slope: f64| {
        let table = (1..=REQUESTS * (BLOCK + 1)).map(|batch| 1.0 / (1.0 + slope * batch as f64));
        CostCurve::new(table.collect()).expect("positive rates")
    };
    for (name, curve) in [("early stop", curve(1e-3)), ("all candidates", curve(0.0))] {
        let evaluated = prefix_lengths(&rows, &curve).expect("probabilities").evaluated;
        criterion.bench_function(&format!("prefix lengths, {name} after {evaluated}"), |bencher| {
            bencher.iter(|| prefix_lengths(&rows, &curve));
        });
    }
    let cost = StepCost::new(vec![(1, curve(1e-3))], vec![(1, 0.1)]).expect("positive times");
    let cost = Arc::new(cost);
    let load = StepLoad { requests: REQUESTS, context: 1 };
    for policy in [Policy::Prefix, Policy::PrefixAsync] {
        let mut planner = Planner::new(policy, Some(Arc::clone(&cost))).expect("costs are given");
        (0..3).for_each(|_| drop(planner.verify_lengths(load, BLOCK, rows.clone())));
        // The whole planner call of one engine step.
        criterion.bench_function(&format!("a step of {policy}"), |bencher| {
            bencher.iter_batched(
                || rows.clone(),
                |rows| (planner.should_draft(load), planner.verify_lengths(load, BLOCK, rows)),
                BatchSize::SmallInput,
            );
        });
    }
    criterion.bench_function("fill a budget of 1,024", |bencher| bencher.iter(|| fill_budget(&rows, 1024)));
}

criterion_group!(benches, benchmark);
criterion_main!(benches);
