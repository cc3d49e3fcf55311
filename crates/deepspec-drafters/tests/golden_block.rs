//! Compares DSpark and DFlash with the reference: forward, losses, gradients, inference.

mod common;

use common::{assert_close, device, tensor};
use deepspec_cost::planner::{Planner, StepLoad};
use deepspec_cost::policy::Policy;
use deepspec_drafters::{
    DSPARK_SUMS, DSpark, DSparkObjective, DSparkProposer, LossDenominator, LossRecipe, LossSum, TrainSample,
    anchor_candidates, supervised_draft_count,
};
use deepspec_engine::{Context, DraftRequest, Proposer, Sampling, SamplingBatch};
use deepspec_testkit::golden::Case;
use tch::{Device, Kind, Tensor};

const FORWARD: f64 = 1e-4;
const LOSS: f64 = 1e-5;

/// One sample per row, unpadded, with all last hidden states kept.
fn samples(case: &Case) -> Vec<TrainSample> {
    let of_row = |(b, sample): (usize, TrainSample)| {
        let keep = case.input("block_keep_mask").row(b).ints();
        let anchors = case.input("anchor_positions").row(b).ints();
        let kept = anchors.iter().zip(&keep).filter(|(_, keep)| **keep == 1);
        TrainSample { anchors: kept.map(|(&anchor, _)| anchor as usize).collect(), ..sample }
    };
    common::samples(case).into_iter().enumerate().map(of_row).collect()
}

/// Rows of the real blocks, `[A, γ, ..]`, of an expected array `[B, N, K, ..]`.
fn kept(case: &Case, name: &str) -> Tensor {
    let all = tensor(case.expected(name));
    let keep = tensor(case.input("block_keep_mask")).reshape([-1]).nonzero().squeeze_dim(1);
    all.flatten(0, 1).index_select(0, &keep)
}

fn alpha(case: &Case, name: &str) -> f64 {
    case.hyper(name).as_f64().unwrap_or(0.0)
}

fn check_training(name: &str) {
    let case = Case::load(name);
    let block = DSpark::load(&case.dir, device(), Kind::Float).unwrap_or_else(|error| panic!("{error}"));
    let gamma = block.config().settings.blocks.draft_len();
    for (_, parameter) in block.parameters() {
        let _ = parameter.set_requires_grad(true);
    }
    let samples = samples(&case);
    for (b, sample) in samples.iter().enumerate() {
        let mask = case.expected("anchor_candidate_mask").row(b).ints();
        let expected: Vec<usize> =
            mask.iter().enumerate().filter(|(_, m)| **m == 1).map(|(i, _)| i).collect();
        assert_eq!(anchor_candidates(&sample.loss_mask), expected);
    }
    let masks: Vec<i64> = samples
        .iter()
        .flat_map(|s| s.anchors.iter().map(|&a| supervised_draft_count(&s.loss_mask, a, gamma)))
        .flat_map(|n| (0..gamma).map(move |k| i64::from(k < n)))
        .collect();
    assert_eq!(Vec::<i64>::try_from(kept(&case, "eval_mask").reshape([-1])).unwrap(), masks);

    let decay = alpha(&case, "loss_decay_gamma");
    let batch = block.config().batch(&samples, decay, device(), Kind::Float).unwrap();
    let hidden = block.hidden_states(&batch);
    assert_close("output_hidden", &hidden.to_device(Device::Cpu), &kept(&case, "output_hidden"), FORWARD);
    let features = block.teacher_forced_features(&hidden, &batch.previous);
    let supervised = kept(&case, "eval_mask").reshape([-1]).nonzero().squeeze_dim(1);
    let rows = |t: &Tensor| t.to_device(Device::Cpu).flatten(0, 1).index_select(0, &supervised);
    let logits = block.teacher_forced_logits(&hidden, features.as_ref().map(|(_, f)| f));
    assert_close("draft_logits", &rows(&logits), &rows(&kept(&case, "draft_logits")), FORWARD);
    if let Some(confidence) = block.confidence_logits(&hidden, features.as_ref().map(|(e, _)| e)) {
        assert_close("confidence_pred", &rows(&confidence), &rows(&kept(&case, "confidence_pred")), FORWARD);
    }

    let scalar = |name: &str| case.expected(name).f64s()[0];
    let objective = DSparkObjective {
        loss: LossRecipe {
            ce_alpha: alpha(&case, "ce_loss_alpha"),
            l1_alpha: alpha(&case, "l1_loss_alpha"),
            ..LossRecipe::NONE
        },
        confidence_alpha: if block.config().settings.confidence.is_some() {
            alpha(&case, "confidence_head_alpha")
        } else {
            0.0
        },
    };
    let normaliser = LossDenominator(scalar("ce_loss_den"));
    let sums: Vec<f64> = Vec::try_from(block.accumulate(&batch, &objective, normaliser, None)).unwrap();
    let names = LossSum::all(gamma, &DSPARK_SUMS).map(LossSum::name).collect::<Vec<_>>();
    let sum = |name: &str| sums[names.iter().position(|n| n == name).unwrap()];
    let close = |what: &str, found: f64, expected: f64, tolerance: f64| {
        assert!(
            (found - expected).abs() <= tolerance * expected.abs().max(1.0),
            "{name}: {what} is {found}, expected {expected}"
        );
    };
    close("loss", sum("loss") / (normaliser.0 + 1e-6), scalar("loss"), LOSS);
    close("weight", sum("weight"), scalar("ce_loss_den"), LOSS);
    close("ce", sum("ce"), scalar("ce_loss_num"), LOSS);
    if case.all_expected().contains_key("l1_loss_num") && objective.loss.l1_alpha > 0.0 {
        close("l1", sum("l1"), scalar("l1_loss_num"), LOSS);
    }
    if objective.confidence_alpha > 0.0 {
        close("confidence", sum("confidence"), scalar("confidence_loss_num"), LOSS);
    }
    let metrics = case.scalar("train_metrics");
    let metric = |key: &str, found: f64| {
        let expected =
            metrics[format!("train/{key}")].as_f64().unwrap_or_else(|| panic!("{name}: no train/{key}"));
        close(key, found, expected, LOSS);
    };
    metric("tau_probabilistic", sum("tau") / sum("blocks"));
    if block.config().settings.confidence.is_some() {
        metric("confidence_abs_error", sum("confidence_abs_error") / sum("weight"));
        metric("confidence_bias", sum("confidence_bias") / sum("weight"));
        metric("confidence_cumprod_bias", sum("confidence_prefix_bias") / sum("weight"));
    }
    for k in 0..gamma {
        if sum(&format!("count@{k}")) > 0.0 {
            metric(&format!("accept_rate@{k}"), sum(&format!("accept@{k}")) / sum(&format!("count@{k}")));
        }
    }

    common::assert_gradients(&case, block.parameters());
}

fn check_inference(name: &str) {
    let _guard = tch::no_grad_guard();
    let case = Case::load(name);
    let block =
        DSpark::load_packed(&case.dir, device(), Kind::Float).unwrap_or_else(|error| panic!("{error}"));
    let gamma = block.config().settings.blocks.draft_len();
    // Slot 1 of 2, so that slot indexing matters.
    let mut proposer = DSparkProposer::new(block, 2);
    let uniforms = Tensor::zeros([1, gamma as i64], (Kind::Double, device()));
    let greedy = SamplingBatch::new(vec![Sampling::new(0.0, 0)], device());
    for round in ["r1", "r2"] {
        let of = |what: &str| case.expected(&format!("infer_{round}_{what}"));
        let taps = tensor(case.input(&format!("infer_{round}_context_features"))).get(0).to_device(device());
        let anchors = tensor(case.input(&format!("infer_{round}_anchor"))).to_device(device());
        let next = Tensor::zeros([taps.size()[0]], (Kind::Int64, device()));
        let tokens = next.shallow_clone();
        let context = Context {
            chunks: vec![(1, taps.size()[0] as usize)],
            captured_states: taps,
            hidden: None,
            tokens,
            next,
        };
        let proposal = proposer.propose(&DraftRequest {
            context: &context,
            slots: &[1],
            anchors: &anchors,
            uniforms: &uniforms,
            sampling: &greedy,
        });
        assert_eq!(
            Vec::<i64>::try_from(proposal.tokens.reshape([-1])).unwrap(),
            of("tokens").ints(),
            "{name} {round}"
        );
        if let Some(confidence) = proposal.confidence {
            let expected = tensor(of("confidence_logits"));
            let confidence = confidence.sigmoid();
            assert_close("confidence", &confidence.to_device(Device::Cpu), &expected.sigmoid(), FORWARD);
            let thresholds = case.scalar(&format!("infer_{round}_draft_token_count_by_threshold"));
            let thresholds = thresholds.as_object().filter(|thresholds| !thresholds.is_empty()).unwrap();
            let row = Vec::<f64>::try_from(confidence.to_kind(Kind::Double).reshape([-1])).unwrap();
            for (threshold, count) in thresholds {
                let policy = Policy::Threshold(threshold.parse().unwrap());
                let mut planner = Planner::new(policy, None).unwrap();
                let load = StepLoad { requests: 1, context: 1 };
                let kept = planner.verify_lengths(load, row.len(), vec![row.clone()]);
                assert_eq!(kept, [count.as_u64().unwrap() as usize], "{name} {round} at {threshold}");
            }
        }
    }
}

#[test]
fn golden_dspark_vanilla() {
    check_training("dspark_vanilla");
    check_inference("dspark_vanilla");
}

#[test]
fn golden_dspark_gated() {
    check_training("dspark_gated");
    check_inference("dspark_gated");
}

#[test]
fn golden_dspark_rnn() {
    check_training("dspark_rnn");
    check_inference("dspark_rnn");
}

#[test]
fn golden_dspark_gemma4() {
    check_training("dspark_gemma4");
    check_inference("dspark_gemma4");
}

#[test]
fn golden_dflash() {
    check_training("dflash");
    check_inference("dflash");
}
