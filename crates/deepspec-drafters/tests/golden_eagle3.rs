//! Compares Eagle3 with the reference: states, losses, metrics, gradients, inference.

mod common;

use common::{assert_close, device, tensor};
use deepspec_core::recipe::LossNormalization;
use deepspec_drafters::{
    Eagle3, Eagle3Batch, Eagle3Objective, Eagle3Proposer, LossDenominator, Supervise, eagle3_metric_defs,
};
use deepspec_engine::{Context, DraftRequest, Proposer, Sampling, SamplingBatch};
use deepspec_testkit::golden::Case;
use tch::{Device, Kind, Tensor};

const FORWARD: f64 = 1e-4;
const LOSS: f64 = 1e-5;

fn load(case: &Case) -> Eagle3 {
    Eagle3::load(&case.dir, device(), Kind::Float).unwrap_or_else(|error| panic!("{error}"))
}

fn check_training(name: &str) {
    let case = Case::load(name);
    let model = load(&case);
    let (steps, decay) = (model.config().settings.ttt_length, model.config().settings.step_loss_decay);
    for (_, parameter) in model.parameters() {
        let _ = parameter.set_requires_grad(true);
    }
    let samples = common::samples(&case);
    let objective = Eagle3Objective {
        supervise: Supervise::Shifted,
        step_loss_decay: decay,
        normalization: LossNormalization::MicroBatch,
    };
    let batch = Eagle3Batch::new(&samples, &objective, steps, device(), Kind::Float).unwrap();
    let states = model.step_states(&batch);
    for (s, states) in states.iter().enumerate() {
        let supervised =
            tensor(case.expected("position_masks")).get(s as i64).reshape([-1]).nonzero().squeeze_dim(1);
        let expected =
            |name: &str| tensor(case.expected(name)).get(s as i64).flatten(0, 1).index_select(0, &supervised);
        let rows = states.index_select(0, &batch.supervised_indices(s));
        let close = |what: &str, found: &Tensor| {
            let found = found.detach().to_device(Device::Cpu);
            assert_close(&format!("{name}, step {s}: {what}"), &found, &expected(what), FORWARD);
        };
        close("hidden_states", &rows);
        close("draft_logits", &model.draft_logits(&rows));
    }

    let sums = model.accumulate(Some(&batch), LossDenominator(samples.len() as f64), samples.len());
    let sums: Vec<f64> = Vec::try_from(sums).unwrap();
    let terms = eagle3_metric_defs(steps, decay);
    assert_eq!(sums.len(), terms.count);
    let metrics = (terms.compute)(&sums, 1);
    let expected = case.scalar("train_metrics");
    let close = |key: &str, found: f64| {
        let expected = expected[format!("train/{key}")].as_f64().unwrap_or_else(|| panic!("no train/{key}"));
        assert!(
            (found - expected).abs() <= LOSS * expected.abs().max(1.0),
            "{name}: {key} is {found} for {expected}"
        );
    };
    for key in ["loss", "tau_greedy", "tau_probabilistic"] {
        close(key, metrics[key].as_f64().unwrap());
    }
    for s in 0..steps {
        let of_step = |key: &str| metrics[key][s].as_f64().unwrap();
        close(&format!("ploss_{s}"), of_step("step_loss"));
        close(&format!("valid_tokens@{s}"), of_step("valid_tokens"));
        close(&format!("accuracy@{s}"), of_step("accuracy"));
        close(&format!("accept_rate@{s}"), of_step("accept_rate"));
    }
    common::assert_gradients(&case, model.parameters());
}

fn check_inference(name: &str) {
    let _guard = tch::no_grad_guard();
    let case = Case::load(name);
    // Slot 1 of 2, so that slot indexing matters.
    let load = || {
        let model = Eagle3::load_packed(&case.dir, device(), Kind::Float);
        Eagle3Proposer::new(model.unwrap_or_else(|error| panic!("{error}")), 2)
    };
    let (mut proposer, mut greedy) = (load(), load());
    let batch = |temperature: f64| SamplingBatch::new(vec![Sampling::new(temperature, 0)], device());
    for round in ["r1", "r2"] {
        let of = |what: &str| case.expected(&format!("infer_{round}_{what}"));
        let input =
            |what: &str| tensor(case.input(&format!("infer_{round}_{what}"))).get(0).to_device(device());
        let (taps, next) = (input("features"), input("paired_ids"));
        let rows = taps.size()[0];
        let anchors = next.narrow(0, rows - 1, 1);
        // Eagle3 reads only `next`, the tokens after the states.
        let tokens = next.zeros_like();
        let context =
            Context { chunks: vec![(1, rows as usize)], captured_states: taps, hidden: None, tokens, next };
        let (tokens, expected) = (of("tokens").ints(), tensor(of("logits")).get(0).softmax(-1, Kind::Double));
        let uniforms = common::forcing(&expected, &tokens).to_device(device());
        let drawn = |tokens: Tensor| Vec::<i64>::try_from(tokens.reshape([-1])).unwrap();
        let proposal = proposer.propose(&DraftRequest {
            context: &context,
            slots: &[1],
            anchors: &anchors,
            uniforms: &uniforms,
            sampling: &batch(1.0),
        });
        assert_eq!(drawn(proposal.tokens), tokens, "{name} {round}");
        let found = proposal.probs.expect("drawn at temperature 1").get(0).to_device(Device::Cpu);
        assert_close(&format!("{name} {round}: probabilities"), &found, &expected, FORWARD);
        let proposal = greedy.propose(&DraftRequest {
            context: &context,
            slots: &[1],
            anchors: &anchors,
            uniforms: &uniforms,
            sampling: &batch(0.0),
        });
        assert_eq!(drawn(proposal.tokens), tokens, "{name} {round}, greedily");
    }
}

#[test]
fn golden_eagle3_qwen3() {
    check_training("eagle3_qwen3");
    check_inference("eagle3_qwen3");
}

#[test]
fn golden_eagle3_gemma4() {
    check_training("eagle3_gemma4");
    check_inference("eagle3_gemma4");
}
