//! Speculative decoding is lossless: whatever the drafter proposes, the output has the target's own
//! distribution.
//!
//! Target and drafter are toys whose exact distribution can be computed.

mod common;

use std::sync::Arc;

use common::law::{LENGTH, exact_law, options, requests, samples};
use common::{
    GAMMA, ToyDrafter, ToyTarget, V, extended, logits_of, prefixes, prompt_prefix, propose, target_logits,
};
use deepspec_core::rng::{Purpose, Stream};
use deepspec_cost::cost::StepCost;
use deepspec_cost::curve::CostCurve;
use deepspec_cost::planner::Planner;
use deepspec_engine::{
    Completion, DraftSampling, Engine, EngineOptions, ModelInput, ModelOutput, Request, Sampling,
    SamplingBatch, Target, VerifyRule,
};
use deepspec_ops::{Verification, sample, verify, verify_block};
use deepspec_testkit::distribution::{Counts, chi_square_ratio, count_outputs};
use tch::{Device, Kind, Tensor};

fn run(options: EngineOptions, drafted: bool, requests: Vec<Request>) -> Vec<Completion> {
    run_planned(options, drafted.then(Planner::default), requests)
}

fn run_planned(options: EngineOptions, planner: Option<Planner>, requests: Vec<Request>) -> Vec<Completion> {
    let target = ToyTarget::new(options.slots);
    let drafter = planner.is_some().then(|| ToyDrafter::new(options.slots));
    let engine = Engine::new(target, drafter, options).with_planner(planner.unwrap_or_default());
    { engine }.run(requests, |_| {}).unwrap()
}

/// A planner for a machine whose steps take `slope` longer for every token beyond the first 64.
fn planner(policy: &str, slope: f64) -> Planner {
    let seconds = |batch: usize| 1.0 + slope * batch.saturating_sub(64) as f64;
    let curve = CostCurve::new((1..=64 * (GAMMA + 1)).map(|batch| 1.0 / seconds(batch)).collect()).unwrap();
    let cost = StepCost::new(vec![(1, curve)], vec![(1, 0.0)]).unwrap();
    Planner::new(policy.parse().unwrap(), Some(Arc::new(cost))).unwrap()
}

/// The misfit of the engine's outputs for a setting.
fn engine_chi_square_ratio(options: EngineOptions, sampling: Sampling, stop_ids: &[i64]) -> f64 {
    // Longer than the checked outputs, so that their last token may come from any position of a
    // block.
    planned_chi_square_ratio(options, Planner::default(), sampling, stop_ids)
}

fn planned_chi_square_ratio(
    options: EngineOptions,
    planner: Planner,
    sampling: Sampling,
    stop_ids: &[i64],
) -> f64 {
    let outputs = run_planned(options, Some(planner), requests(samples(), sampling, LENGTH + 2, stop_ids));
    let counts =
        count_outputs(outputs.into_iter().map(|done| done.tokens.into_iter().take(LENGTH).collect()));
    chi_square_ratio(&counts, &exact_law(sampling, stop_ids))
}

#[test]
fn the_first_tokens_have_the_targets_joint_law() {
    let plain = Sampling::new(1.0, 11);
    let short = EngineOptions { max_draft_tokens: Some(2), ..options(64) };
    let greedy = EngineOptions { draft_sampling: DraftSampling::Greedy, ..options(64) };
    let block = EngineOptions { verify_rule: VerifyRule::Block, ..options(64) };
    let short_block = EngineOptions { max_draft_tokens: Some(2), ..block };
    let greedy_block = EngineOptions { draft_sampling: DraftSampling::Greedy, ..block };
    let settings: [(&str, EngineOptions, Sampling, &[i64]); 12] = [
        ("temperature 1", options(64), plain, &[]),
        ("temperature 0.6", options(64), Sampling::new(0.6, 12), &[]),
        ("top-p and min-p", options(64), Sampling { top_p: 0.9, min_p: 0.05, ..Sampling::new(1.0, 13) }, &[]),
        ("stop token", options(64), Sampling::new(1.0, 14), &[3]),
        ("shorter blocks", short, Sampling::new(1.0, 16), &[]),
        ("greedy drafts", greedy, Sampling::new(1.0, 17), &[]),
        ("greedy drafts, top-k", greedy, Sampling { top_k: 3, ..Sampling::new(0.8, 18) }, &[3]),
        ("blocks", block, Sampling::new(1.0, 51), &[]),
        ("blocks, top-p", block, Sampling { top_p: 0.9, ..Sampling::new(0.7, 52) }, &[]),
        ("blocks, stop token", block, Sampling::new(1.0, 53), &[3]),
        ("shorter blocks as a whole", short_block, Sampling::new(1.0, 54), &[]),
        ("greedy drafts, blocks", greedy_block, Sampling::new(1.0, 55), &[]),
    ];
    for (what, options, sampling, stop_ids) in settings {
        let ratio = engine_chi_square_ratio(options, sampling, stop_ids);
        assert!(ratio < 1.0, "{what}: χ² is {ratio:.2} times its 99.9 % quantile");
    }
}

#[test]
fn under_every_schedule_the_first_tokens_have_the_targets_joint_law() {
    let policies = [
        ("plain", 0.0),
        ("fixed:2", 0.0),
        ("threshold:0.4", 0.0),
        ("prefix", 0.0),
        ("prefix", 0.006),
        ("prefix-async", 0.006),
        // Drafting pays off in some steps.
        ("prefix", 0.02),
    ];
    for (seed, (policy, slope)) in (30..).zip(policies) {
        let cases = [(VerifyRule::Token, &[][..]), (VerifyRule::Token, &[3]), (VerifyRule::Block, &[])];
        for (verify_rule, stop_ids) in cases {
            let options = EngineOptions { verify_rule, ..options(64) };
            let sampling = Sampling::new(1.0, seed);
            let ratio = planned_chi_square_ratio(options, planner(policy, slope), sampling, stop_ids);
            assert!(
                ratio < 1.0,
                "{policy}, {slope}, {verify_rule}: χ² is {ratio:.2} times its 99.9 % quantile"
            );
        }
    }
}

#[test]
fn schedules_cut_blocks_and_leave_them_out() {
    let asked = requests(2000, Sampling::new(1.0, 41), 16, &[]);
    let counts = |policy: &str, slope: f64| {
        let done = run_planned(options(64), Some(planner(policy, slope)), asked.clone());
        let cycles: Vec<_> = done.iter().flat_map(|done| &done.cycles).collect();
        let of = |proposed: fn(u32) -> bool| cycles.iter().filter(|cycle| proposed(cycle.proposed)).count();
        (of(|n| n == 0), of(|n| n == GAMMA as u32), cycles.len())
    };
    assert_eq!(counts("plain", 0.0).1, 0);
    let (_, whole, cycles) = counts("prefix", 0.0);
    assert_eq!(whole, cycles, "tokens are free");
    for policy in ["prefix", "prefix-async"] {
        let (none, whole, cycles) = counts(policy, 0.006);
        assert!(none > 0 && whole > 0 && none + whole < cycles, "{policy}: {none} and {whole} of {cycles}");
    }
    let (none, _, cycles) = counts("prefix", 1.0);
    assert!(none > cycles * 9 / 10 && none < cycles, "no token is worth a second: {none} of {cycles}");
}

/// Tokens committed without drafting reach the drafter later, in order; the toy checks every state.
/// The pending tokens of a sequence that ends meanwhile are dropped.
#[test]
fn the_drafter_catches_up_after_steps_without_it() {
    for (slots, policy) in [(1, "prefix"), (3, "prefix"), (3, "prefix-async")] {
        let asked = requests(40, Sampling::new(1.0, 43), 90, &[3]);
        // Drafting never pays off, except for probes.
        let table = (0..64).map(|batch| if batch < slots { 1e3 } else { 1.0 }).collect();
        let cost = StepCost::new(vec![(1, CostCurve::new(table).unwrap())], vec![]).unwrap();
        let planner = Planner::new(policy.parse().unwrap(), Some(Arc::new(cost))).unwrap();
        let options = EngineOptions { context: 128, ..options(slots) };
        let done = run_planned(options, Some(planner), asked);
        assert_eq!(done.len(), 40);
    }
}

/// The expected acceptance rate of an answer's first drafted token, computed from the target's and
/// drafter's distributions.
fn first_acceptance(by: impl Fn(&[f64], &[f64]) -> f64) -> f64 {
    let law = |logits: [f32; V as usize]| -> Vec<f64> {
        Vec::try_from(Tensor::from_slice(&logits).softmax(-1, Kind::Double)).unwrap()
    };
    let firsts = law(target_logits(prompt_prefix()));
    let of = |(token, first): (usize, &f64)| {
        let prefix = extended(prompt_prefix(), token as i64);
        first * by(&law(target_logits(prefix)), &law(common::draft_logits(prefix)))
    };
    firsts.iter().enumerate().map(of).sum()
}

#[test]
fn greedy_drafts_are_accepted_with_the_targets_probability_of_them() {
    let most = |q: &[f64]| (0..q.len()).max_by(|&a, &b| q[a].total_cmp(&q[b])).unwrap();
    let drawn = first_acceptance(|p, q| p.iter().zip(q).map(|(p, q)| p.min(*q)).sum());
    let greedy = first_acceptance(|p, q| p[most(q)]);
    assert!((drawn - greedy).abs() > 0.1, "{drawn} and {greedy} could not be told apart");
    for (rule, expected) in [(DraftSampling::Probabilistic, drawn), (DraftSampling::Greedy, greedy)] {
        let options = EngineOptions { draft_sampling: rule, ..options(64) };
        let done = run(options, true, requests(samples(), Sampling::new(1.0, 19), 3, &[]));
        let accepted = done.iter().filter(|done| done.cycles[0].accepted > 0).count();
        let (found, count) = (accepted as f64 / samples() as f64, samples() as f64);
        let error = (expected * (1.0 - expected) / count).sqrt();
        assert!((found - expected).abs() < 4.0 * error, "{rule:?}: {found} instead of {expected} ± {error}");
    }
}

type Verify = fn(&Tensor, &Tensor, &Tensor, &Tensor, &Tensor, &Tensor) -> Verification;

/// A short version of the engine's loop with any verification: all sequences at once, and whole
/// blocks.
fn outputs_with(verify: Verify, sampling: Sampling) -> Counts {
    let count_of = samples();
    let streams: Vec<Stream> =
        (0..count_of).map(|i| Stream::new(sampling.seed, &format!("sample-{i}"))).collect();
    let settings = SamplingBatch::new(vec![sampling; count_of], Device::Cpu);
    let uniforms = |step: u64, purpose: Purpose, lanes: usize| {
        let draws: Vec<f64> = streams
            .iter()
            .flat_map(|s| (0..lanes as u64).map(move |lane| s.uniform(step, purpose, lane)))
            .collect();
        Tensor::from_slice(&draws).view([-1, lanes as i64])
    };
    let first =
        settings.distributions(&logits_of(vec![prompt_prefix(); count_of].into_iter(), target_logits));
    let first = prefixes(&sample(&first, &uniforms(0, Purpose::Target, 1).squeeze_dim(1)));
    let mut outputs: Vec<Vec<i64>> = first.into_iter().map(|token| vec![token]).collect();
    for step in 1..LENGTH as u64 {
        let now: Vec<i64> = outputs
            .iter()
            .map(|output| output.iter().fold(prompt_prefix(), |prefix, &t| extended(prefix, t)))
            .collect();
        let drafted = propose(now.clone(), &uniforms(step, Purpose::Draft, GAMMA), &settings);
        let tokens: Vec<Vec<i64>> = drafted.tokens.unbind(0).iter().map(prefixes).collect();
        let targets: Vec<Tensor> = (0..=GAMMA)
            .map(|k| {
                let after = now
                    .iter()
                    .zip(&tokens)
                    .map(|(&p, block)| block[..k].iter().fold(p, |p, &t| extended(p, t)));
                settings.distributions(&logits_of(after, target_logits))
            })
            .collect();
        let lens = Tensor::from_slice(&vec![GAMMA as i64; count_of]);
        let verdict = verify(
            &Tensor::stack(&targets, 1),
            &drafted.draft_probs(GAMMA as i64, V as usize),
            &drafted.tokens,
            &lens,
            &uniforms(step, Purpose::Accept, GAMMA),
            &uniforms(step, Purpose::Target, 1).squeeze_dim(1),
        );
        let (accepted, next) = (prefixes(&verdict.accepted), prefixes(&verdict.next));
        for (i, output) in outputs.iter_mut().enumerate() {
            output.extend(&tokens[i][..accepted[i] as usize]);
            output.push(next[i]);
        }
    }
    count_outputs(outputs.into_iter().map(|output| output.into_iter().take(LENGTH).collect()))
}

/// The verification with the next token drawn from p.
fn next_from_target(right: Verification, p: &Tensor, next: &Tensor) -> Verification {
    let at = right.accepted.view([-1, 1, 1]).expand([-1, 1, V], false);
    Verification { next: sample(&p.gather(1, &at, false).squeeze_dim(1), next), accepted: right.accepted }
}

/// Draws the token after a rejection from p instead of normalise(max(p − q, 0)).
fn without_residual(
    p: &Tensor,
    q: &Tensor,
    x: &Tensor,
    lens: &Tensor,
    accept: &Tensor,
    next: &Tensor,
) -> Verification {
    next_from_target(verify(p, q, x, lens, accept, next), p, next)
}

/// Accepts with probability p(x) instead of min(1, p(x) / q(x)).
fn without_ratio(
    p: &Tensor,
    q: &Tensor,
    x: &Tensor,
    lens: &Tensor,
    accept: &Tensor,
    next: &Tensor,
) -> Verification {
    let chosen = q.gather(2, &x.unsqueeze(2), false).squeeze_dim(2);
    verify(p, q, x, lens, &(accept / chosen.to_kind(Kind::Double)), next)
}

/// Block verification that draws the token after a rejection from p.
fn block_without_residual(
    p: &Tensor,
    q: &Tensor,
    x: &Tensor,
    lens: &Tensor,
    accept: &Tensor,
    next: &Tensor,
) -> Verification {
    next_from_target(verify_block(p, q, x, lens, accept, next), p, next)
}

/// Block verification that ends at the first rejected prefix, as token by token.
fn block_up_to_the_first_rejection(
    p: &Tensor,
    q: &Tensor,
    x: &Tensor,
    lens: &Tensor,
    accept: &Tensor,
    next: &Tensor,
) -> Verification {
    let whole = verify_block(p, q, x, lens, accept, next).accepted;
    // A rejected prefix is one that is not accepted when the block's later uniforms reject everything.
    let accepted_alone = |length: i64| {
        let behind = Tensor::arange(x.size()[1], (Kind::Int64, Device::Cpu)).ge(length);
        verify_block(p, q, x, lens, &accept.masked_fill(&behind, 2.0), next).accepted.eq(length)
    };
    let mut accepted = whole.zeros_like();
    let mut open = whole.ones_like();
    for length in 1..=x.size()[1] {
        open = &open * accepted_alone(length).to_kind(Kind::Int64);
        accepted = &accepted + &open;
    }
    // Uniforms that reject everything behind the accepted prefix draw the token that belongs to it.
    let position = Tensor::arange(x.size()[1], (Kind::Int64, Device::Cpu)).unsqueeze(0);
    let behind = position.ge_tensor(&accepted.unsqueeze(1));
    verify_block(p, q, x, lens, &accept.masked_fill(&behind, 2.0), next)
}

#[test]
fn the_law_tells_wrong_block_verifications_apart() {
    let sampling = Sampling::new(1.0, 22);
    let law = exact_law(sampling, &[]);
    let of = |verify| chi_square_ratio(&outputs_with(verify, sampling), &law);
    let right = of(verify_block);
    let (residual, first) = (of(block_without_residual), of(block_up_to_the_first_rejection));
    assert!(right < 1.0, "the right verification: χ² is {right:.2} times its 99.9 % quantile");
    assert!(residual > 1.5, "drawing from p goes unnoticed: χ² is {residual:.2} times its quantile");
    assert!(first > 1.5, "ending at the first rejection goes unnoticed: χ² is {first:.2} times its quantile");
}

#[test]
fn the_law_tells_wrong_verifications_apart() {
    let sampling = Sampling::new(1.0, 21);
    let law = exact_law(sampling, &[]);
    let of = |verify| chi_square_ratio(&outputs_with(verify, sampling), &law);
    let (right, residual, ratio) = (of(verify), of(without_residual), of(without_ratio));
    assert!(right < 1.0, "the right verification: χ² is {right:.2} times its 99.9 % quantile");
    assert!(
        residual > 1.5,
        "drawing from p after a rejection goes unnoticed: χ² is {residual:.2} times its quantile"
    );
    assert!(ratio > 1.5, "accepting without the ratio goes unnoticed: χ² is {ratio:.2} times its quantile");
}

#[test]
fn at_temperature_0_speculation_is_plain_decoding() {
    for slots in [1, 4, 16] {
        for stop_ids in [&[][..], &[3]] {
            let requests = requests(20, Sampling::new(0.0, 5), 12, stop_ids);
            let mut longer = requests.clone();
            longer
                .iter_mut()
                .enumerate()
                .for_each(|(i, request)| request.prompt.extend([i as i64 % V, i as i64 / V % V]));
            for asked in [requests, longer] {
                let plain: Vec<_> =
                    run(options(1), false, asked.clone()).into_iter().map(|done| done.tokens).collect();
                let drafted: Vec<_> =
                    run(options(slots), true, asked).into_iter().map(|done| done.tokens).collect();
                assert_eq!(plain, drafted, "{slots} slots");
            }
        }
    }
}

/// The toys compute every row independently, so rounding cannot explain a difference.
#[test]
fn a_sample_does_not_depend_on_its_batch() {
    let mut asked = requests(50, Sampling::new(1.0, 7), 9, &[3]);
    let one_by_one: Vec<Completion> =
        asked.iter().flat_map(|request| run(options(1), true, vec![request.clone()])).collect();
    for slots in [1, 4, 16] {
        for backwards in [false, true] {
            if backwards {
                asked.reverse();
            }
            let mut together = run(options(slots), true, asked.clone());
            if backwards {
                asked.reverse();
                together.reverse();
            }
            for (a, b) in one_by_one.iter().zip(&together) {
                assert_eq!(
                    (&a.id, &a.tokens, &a.cycles, a.finish),
                    (&b.id, &b.tokens, &b.cycles, b.finish),
                    "{slots} slots"
                );
            }
        }
    }
}

#[test]
fn a_cancelled_sequence_leaves_nothing_behind() {
    let all = requests(4, Sampling::new(1.0, 5), 12, &[]);
    let alone = run(options(1), true, all.clone());
    let block = ToyDrafter::new(2);
    let target = ToyTarget::new(2);
    let mut engine = Engine::new(target, Some(block), options(2));
    let tickets: Vec<_> = all.into_iter().map(|request| engine.submit(request).unwrap()).collect();
    let mut done = vec![];
    for step in 0.. {
        if engine.is_idle() {
            break;
        }
        for event in engine.step() {
            if let deepspec_engine::Event::Done(_, completion) = event {
                done.push(completion);
            }
        }
        // Its states are still on their way to the drafter when its slot goes to the next request.
        if step == 1 {
            engine.cancel(tickets[0]);
        }
    }
    assert_eq!(done.len(), 3);
    for completion in done {
        let expected = alone.iter().find(|other| other.id == completion.id).unwrap();
        assert_eq!((&completion.tokens, &completion.cycles), (&expected.tokens, &expected.cycles));
    }
}

#[test]
fn logits_that_are_not_finite_are_an_error() {
    struct Broken(ToyTarget);
    impl Target for Broken {
        fn forward(&mut self, feed: &ModelInput) -> ModelOutput {
            self.0.forward(feed)
        }
        fn logits(&self, hidden: &Tensor) -> Tensor {
            self.0.logits(hidden) * f64::NAN
        }
        fn truncate(&mut self, slot: usize, len: usize) {
            self.0.truncate(slot, len);
        }
        fn vocab_size(&self) -> usize {
            self.0.vocab_size()
        }
        fn device(&self) -> Device {
            Device::Cpu
        }
    }
    let target = Broken(ToyTarget::new(1));
    let mut engine: Engine<Broken, ToyDrafter> = Engine::new(target, None, options(1));
    let error = engine.run(requests(1, Sampling::new(1.0, 5), 4, &[]), |_| {}).unwrap_err();
    assert_eq!(error, deepspec_engine::EngineError::NotFinite);
}
