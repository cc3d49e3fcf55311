//! Compares whole generations at temperature 0 with the reference: tokens, accepted lengths,
//! proposal lengths.

mod common;

use common::device;
use deepspec_cost::planner::Planner;
use deepspec_cost::policy::Policy;
use deepspec_drafters::DrafterOptions;
use deepspec_engine::{AcceptanceStats, DraftSampling, Engine, EngineOptions, Request, Sampling, VerifyRule};
use deepspec_models::{TargetModel, TargetOptions};
use deepspec_testkit::golden::Case;
use tch::Kind;

fn run(case: &Case, drafter: &str, name: &str, threshold: f64, with_stops: bool, slots: usize) {
    let options = DrafterOptions { device: device(), kind: Kind::Float, slots, target: None };
    let drafter = deepspec_drafters::load_drafter(&case.dir.join(drafter), &options)
        .unwrap_or_else(|error| panic!("{error}"));
    let options = TargetOptions { device: device(), kind: Kind::Float, slots, taps: drafter.taps().to_vec() };
    let target =
        TargetModel::load(&case.dir.join("target"), &options).unwrap_or_else(|error| panic!("{error}"));
    let options = EngineOptions {
        slots,
        context: 256,
        max_draft_tokens: None,
        draft_sampling: DraftSampling::default(),
        verify_rule: VerifyRule::default(),
        counts_overrun: true,
    };
    let planner = Planner::new(Policy::Threshold(threshold), None).unwrap();
    let mut engine = Engine::new(target, Some(drafter), options).with_planner(planner);
    let prompts = case.input("prompts");
    let max_new_tokens = case.hyper("max_new_tokens").as_u64().unwrap() as usize;
    let requests: Vec<Request> = (0..prompts.shape[0] as usize)
        .map(|i| Request {
            id: i.to_string(),
            prompt: prompts.ragged_row(i),
            sampling: Sampling::new(0.0, 0),
            max_new_tokens,
            stop_ids: if with_stops { case.input("stop_token_ids").ragged_row(i) } else { vec![] },
        })
        .collect();
    let completions = engine.run(requests, |_| {}).unwrap();
    let mut tally = AcceptanceStats::new(engine.draft_len());
    for (i, completion) in completions.iter().enumerate() {
        let expected = |what: &str| case.expected(&format!("{name}.{what}")).ragged_row(i);
        let ids: Vec<i64> =
            prompts.ragged_row(i).into_iter().chain(completion.tokens.iter().copied()).collect();
        assert_eq!(ids, expected("output_ids"), "{name}, prompt {i}");
        let lengths = |of: fn(&deepspec_engine::Cycle) -> u32| {
            completion.cycles.iter().map(|c| i64::from(of(c))).collect::<Vec<_>>()
        };
        assert_eq!(lengths(|c| c.committed), expected("acceptance_lengths"), "{name}, prompt {i}");
        assert_eq!(lengths(|c| c.proposed), expected("proposal_lengths"), "{name}, prompt {i}");
        assert_eq!(lengths(|c| c.accepted), expected("accepted_draft_lengths"), "{name}, prompt {i}");
        tally.add(completion);
    }
    let summary = &case.scalar(name)["metric_summary"];
    assert_eq!(tally.cycles, summary["proposal_count"].as_u64().unwrap());
    assert_eq!(tally.committed, summary["acceptance_length_sum"].as_u64().unwrap());
    assert_eq!(tally.proposed, summary["proposal_length_sum"].as_u64().unwrap());
    let counts =
        |key: &str| summary[key].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect::<Vec<_>>();
    assert_eq!(tally.proposed_at, counts("proposals_at_pos"));
    assert_eq!(tally.accepted_at, counts("accepted_at_pos"));
    let verify_rate = case.scalar(name)["metrics_row"]["verify_rate"].as_f64().unwrap();
    assert!((tally.verify_rate().unwrap() - verify_rate).abs() < 1e-12);
}

#[test]
fn golden_greedy_trace_dspark() {
    let case = Case::load("greedy_trace");
    for slots in [1, 3, 8] {
        run(&case, "dspark", "dspark", 0.0, false, slots);
        run(&case, "dspark", "dspark_stop", 0.0, true, slots);
        let threshold = case.hyper("confidence_threshold_of_dspark_threshold").as_f64().unwrap();
        run(&case, "dspark", "dspark_threshold", threshold, false, slots);
    }
}

#[test]
fn golden_greedy_trace_eagle3() {
    let case = Case::load("greedy_trace");
    for slots in [1, 3, 8] {
        run(&case, "eagle3", "eagle3", 0.0, false, slots);
        run(&case, "eagle3", "eagle3_stop", 0.0, true, slots);
    }
}
