//! MTP-1: decoding is training's first step and a plain recurrence behind it, and gradients are autograd's.

mod common;

use std::path::Path;

use common::{assert_close, noise};
use deepspec_core::FinalStates;
use deepspec_drafters::{
    DraftDecoder, DrafterPlan, LossDenominator, Mtp, MtpConfig, MtpPlan, MtpProposer, MtpSettings, StepBatch,
    StepObjective, TrainSample,
};
use deepspec_engine::{Context, DraftRequest, Proposer, Sampling, SamplingBatch};
use deepspec_models::ModelConfig;
use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor};

const TOKENS: usize = 40;
const VOCAB: i64 = 64;
const WIDTH: i64 = 32;
const STEPS: usize = 3;
const BETA: f64 = 0.6;

/// Targets whose weights are large enough that every part of the model affects its output.
fn targets() -> [ModelConfig; 5] {
    let common = json!({
        "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "initializer_range": 0.3,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    });
    let gemma4 = json!({
        "model_type": "gemma4_unified_text", "global_head_dim": 16, "num_global_key_value_heads": 1,
        "attention_k_eq_v": true, "sliding_window": 8, "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    });
    let llama = json!({"model_type": "llama", "rope_theta": 1e4});
    // An MTP layer of a hybrid has full attention with a gate.
    let qwen3_5 = json!({"model_type": "qwen3_5_text", "partial_rotary_factor": 0.5, "rope_theta": 1e4});
    // It has experts, too, if the target has them.
    let mut mixture = qwen3_5.clone();
    let experts = json!({"model_type": "qwen3_5_moe_text", "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24});
    mixture.as_object_mut().unwrap().extend(experts.as_object().unwrap().clone());
    [json!({"model_type": "qwen3", "rope_theta": 1e5}), gemma4, llama, qwen3_5, mixture].map(|own| {
        let mut raw = common.as_object().cloned().unwrap();
        raw.extend(own.as_object().cloned().unwrap());
        ModelConfig::parse(Path::new("config.json"), raw).unwrap()
    })
}

fn config(target: &ModelConfig) -> MtpConfig {
    MtpConfig {
        decoder: DraftDecoder {
            model: target.mtp_decoder().unwrap(),
            taps: vec![],
            num_target_layers: target.layers.len(),
        },
        settings: MtpSettings { num_speculative_steps: STEPS, step_weight_beta: BETA },
    }
}

fn fresh(config: MtpConfig, kind: Kind) -> Mtp {
    let shape = [config.model().vocab_size, WIDTH];
    let ends = [3, 4].map(|seed| (noise(seed, &shape) * 0.3).to_kind(kind));
    Mtp::fresh(config, &ends[0], &ends[1], 11, kind)
}

/// A text in which everything after token 4 is supervised.
fn sample(tokens: usize) -> TrainSample {
    TrainSample {
        input_ids: (0..tokens as i64).map(|i| (i * i + 3 * i) % VOCAB).collect(),
        loss_mask: (0..tokens).map(|i| i > 4).collect(),
        taps: Tensor::zeros([tokens as i64, 0], (Kind::Float, Device::Cpu)),
        last: noise(6, &[tokens as i64, WIDTH]),
        last_positions: (0..tokens as u32).collect(),
        anchors: vec![],
    }
}

fn batch(sample: &TrainSample, weights: &[f64]) -> StepBatch {
    StepBatch::new(std::slice::from_ref(sample), weights, Device::Cpu, sample.last.kind()).unwrap()
}

/// The state of `position` after one step from `states [n, d]`, the states before tokens 1 to n of the text.
fn after_one_step(model: &Mtp, sample: &TrainSample, states: &Tensor, position: usize) -> Tensor {
    let rows = TOKENS as i64 - states.size()[0];
    let rest = Tensor::zeros([rows, WIDTH], (Kind::Float, Device::Cpu));
    let sample = TrainSample {
        input_ids: sample.input_ids.clone(),
        loss_mask: vec![true; TOKENS],
        taps: sample.taps.shallow_clone(),
        last: Tensor::cat(&[states, &rest], 0),
        last_positions: sample.last_positions.clone(),
        anchors: vec![],
    };
    model.step_states(&batch(&sample, &[1.0]))[0].get(position as i64)
}

/// Decoding after token p + 1 drafts from the state of position p. The first draft is step 0 of training. Each draft behind it adds
/// the drafter's own state to the target's.
#[test]
fn drafts_follow_the_recurrence_and_begin_with_step_0() {
    let _guard = tch::no_grad_guard();
    let sample = sample(TOKENS);
    for target in targets() {
        let model = fresh(config(&target), Kind::Float);
        let trained = model.step_states(&batch(&sample, &StepObjective::new(BETA, STEPS).step_weights));
        let mut proposer = MtpProposer::new(fresh(config(&target), Kind::Float), 3);
        assert!(proposer.reads_hidden() && proposer.draft_len() == STEPS);
        let mut seen = 0;
        for position in [5, 6, 20, 33] {
            let mut states = sample.last.narrow(0, 0, position as i64 + 1);
            let mut expected = vec![];
            for step in 0..STEPS {
                let state = after_one_step(&model, &sample, &states, position + step);
                if step == 0 {
                    assert_close("step 0 of training", &state, &trained[0].get(position as i64), 1e-5);
                }
                expected.push(model.draft_logits(&state).softmax(-1, Kind::Float));
                states = Tensor::cat(&[states, state.unsqueeze(0)], 0);
            }
            let expected = Tensor::stack(&expected, 0);
            let tokens = &sample.input_ids[position + 2..position + 2 + STEPS];
            let rows = position + 1 - seen;
            let [committed, next] =
                [seen, seen + 1].map(|from| Tensor::from_slice(&sample.input_ids[from..from + rows]));
            let context = Context {
                captured_states: Tensor::zeros([rows as i64, 0], (Kind::Float, Device::Cpu)),
                hidden: Some(sample.last.narrow(0, seen as i64, rows as i64)),
                tokens: committed,
                next,
                chunks: vec![(2, rows)],
            };
            let proposal = proposer.propose(&DraftRequest {
                context: &context,
                slots: &[2],
                anchors: &Tensor::from_slice(&sample.input_ids[position + 1..position + 2]),
                uniforms: &common::forcing(&expected, tokens),
                sampling: &SamplingBatch::new(vec![Sampling::new(1.0, 0)], Device::Cpu),
            });
            assert_eq!(Vec::<i64>::try_from(proposal.tokens.reshape([-1])).unwrap(), tokens);
            let what = format!("{}, position {position}", target.family);
            assert_close(&what, &proposal.probs.expect("drawn at temperature 1").get(0), &expected, 1e-5);
            seen = position + 1;
        }
    }
}

/// A saved drafter is the one that was saved, in the target's family and without layer ids.
#[test]
fn checkpoints_hold_the_whole_drafter() {
    let _guard = tch::no_grad_guard();
    let sample = sample(TOKENS);
    let classes =
        ["Qwen3MTPModel", "Gemma4MTPModel", "LlamaMTPModel", "Qwen3_5MTPModel", "Qwen3_5MoeMTPModel"];
    for (target, class) in targets().iter().zip(classes) {
        let model = fresh(config(target), Kind::Float);
        let dir = tempfile::tempdir().unwrap();
        let map = model.config().to_json();
        assert_eq!(map["architectures"], json!([class]));
        assert_eq!((&map["target_layer_ids"], &map["num_speculative_steps"]), (&json!([]), &json!(STEPS)));
        let write = |map: &Map<String, Value>| {
            std::fs::write(dir.path().join("config.json"), json!(map).to_string()).unwrap();
        };
        write(&map);
        deepspec_models::save(&dir.path().join("model.safetensors"), &model.checkpoint(), Kind::Float)
            .unwrap();
        let loaded = Mtp::load(dir.path(), Device::Cpu, Kind::Float).unwrap();
        let weights = StepObjective::new(BETA, STEPS).step_weights;
        let [own, other] = [&model, &loaded].map(|model| model.step_states(&batch(&sample, &weights)));
        assert!(own.iter().zip(&other).all(|(own, other)| own.equal(other)), "{class}");
        for (key, value, told) in [
            ("target_layer_ids", json!([1]), "reads final states and no layers"),
            ("num_speculative_steps", json!(0), "num_speculative_steps"),
            ("num_speculative_steps", json!(65), "65 is not between 1 and 64"),
        ] {
            let mut wrong = map.clone();
            wrong.insert(key.into(), value);
            write(&wrong);
            let error = Mtp::load(dir.path(), Device::Cpu, Kind::Float).err().unwrap().to_string();
            assert!(error.contains(key) && error.contains(told), "{error}");
        }
    }
}

fn gradients(model: &Mtp) -> Vec<Tensor> {
    let taken = |(_, parameter): &(String, Tensor)| {
        let gradient = parameter.grad().to_kind(Kind::Double).copy();
        parameter.shallow_clone().zero_grad();
        gradient
    };
    model.parameters().iter().map(taken).collect()
}

/// Cross entropy of each step, computed by autograd over whole logits, and the metrics of the same rows.
#[test]
fn losses_and_gradients_are_autograds() {
    const VOCAB: i64 = 4096;
    const LENGTH: usize = 160;
    let [target, ..] = targets();
    let mut config = config(&target);
    config.decoder.model.vocab_size = VOCAB;
    let objective = StepObjective::new(BETA, STEPS);
    for (kind, tolerance) in [(Kind::Float, 1e-5), (Kind::BFloat16, 3e-2)] {
        let sample = TrainSample {
            input_ids: (0..LENGTH as i64).map(|i| (i * 37 + 11) % VOCAB).collect(),
            loss_mask: (0..LENGTH).map(|i| i > 8 && i % 5 != 0).collect(),
            last: noise(44, &[LENGTH as i64, WIDTH]).to_kind(kind),
            ..sample(LENGTH)
        };
        let plan = MtpPlan::new(config.clone(), objective.clone());
        let denominator = plan.loss_denominator_part(&sample.loss_mask, &[]);
        let model = fresh(config.clone(), kind);
        model.parameters().iter().for_each(|(_, parameter)| drop(parameter.set_requires_grad(true)));
        let batch = batch(&sample, &objective.step_weights);
        let sums = Vec::<f64>::try_from(model.accumulate(&batch, LossDenominator(denominator))).unwrap();
        let metrics = (plan.metric_defs().compute)(&sums, 1);
        let found = gradients(&model);

        let head = model.embed_and_head().1;
        let probabilities =
            |states: &Tensor| states.matmul(&head.tr()).to_kind(Kind::Float).softmax(-1, Kind::Float);
        let valid = LENGTH - STEPS - 1;
        let mut loss = Tensor::zeros([], (Kind::Float, Device::Cpu));
        let mut chains = Tensor::ones([valid as i64, 2], (Kind::Double, Device::Cpu));
        let mut taus = [0.0; 2];
        for (step, states) in model.step_states(&batch).iter().enumerate() {
            let slice = |from: usize| Tensor::from_slice(&sample.input_ids[from..from + valid]);
            let is_supervised: Vec<f32> =
                sample.loss_mask[step + 2..step + 2 + valid].iter().map(|&flag| f32::from(flag)).collect();
            let is_supervised = Tensor::from_slice(&is_supervised);
            let draft = probabilities(states);
            let teacher = probabilities(&sample.last.narrow(0, step as i64 + 1, valid as i64));
            let ce = -draft.log().gather(1, &slice(step + 2).unsqueeze(1), false).squeeze_dim(1);
            let ce = (ce * &is_supervised).sum(Kind::Float);
            let count = is_supervised.sum(Kind::Float).double_value(&[]);
            let agree = draft.argmax(-1, false).eq_tensor(&teacher.argmax(-1, false)).to_kind(Kind::Float);
            let overlap = draft.minimum(&teacher).sum_dim_intlist(-1, false, Kind::Float);
            let kept = Tensor::stack(&[&agree * &is_supervised, &overlap * &is_supervised], 1);
            let [accuracy, accept] =
                [0, 1].map(|at| kept.select(1, at).sum(Kind::Double).double_value(&[]) / count);
            chains = tch::no_grad(|| &chains * kept.detach().to_kind(Kind::Double));
            for (at, tau) in taus.iter_mut().enumerate() {
                *tau += chains.select(1, at as i64).sum(Kind::Double).double_value(&[]);
            }
            let of_step = |key: &str| metrics[key][step].as_f64().unwrap();
            let near = |key: &str, found: f64, expected: f64| {
                let error = (found - expected).abs();
                assert!(error <= 1e-4 * expected.abs().max(1.0), "{kind:?}, {key}: {found} for {expected}");
            };
            near("valid_tokens", of_step("valid_tokens"), count);
            near("step_loss", of_step("step_loss"), ce.double_value(&[]) / count);
            near("accuracy", of_step("accuracy"), accuracy);
            near("accept_rate", of_step("accept_rate"), accept);
            loss += ce * (objective.step_weights[step] / denominator);
        }
        loss.backward();
        let near = |key: &str, expected: f64| {
            let found = metrics[key].as_f64().unwrap();
            assert!((found - expected).abs() <= 1e-4 * expected, "{kind:?}, {key}: {found} for {expected}");
        };
        near("loss", loss.double_value(&[]));
        let positions = metrics["valid_tokens"][0].as_f64().unwrap();
        near("tau_greedy", 1.0 + taus[0] / positions);
        near("tau_probabilistic", 1.0 + taus[1] / positions);
        for (((name, _), found), expected) in model.parameters().iter().zip(found).zip(gradients(&model)) {
            let norm = |tensor: &Tensor| tensor.norm().double_value(&[]);
            let error = norm(&(found - &expected));
            assert!(error <= tolerance * norm(&expected), "{kind:?}: {name} is off by {error:e}");
        }
    }
}

/// With one denominator for the step, a sequence's gradient does not depend on the rest of the batch.
#[test]
fn gradients_add_over_sequences() {
    let [target, ..] = targets();
    let objective = StepObjective::new(BETA, STEPS);
    let short = TrainSample {
        loss_mask: (0..17).map(|i| (3..6).contains(&i) || i > 12).collect(),
        input_ids: (0..17).map(|i| (i * 5 + 1) % VOCAB).collect(),
        ..sample(17)
    };
    // Without labels, with a label of the first step only, and too short for three steps.
    let silent = TrainSample { loss_mask: vec![false; TOKENS], ..sample(TOKENS) };
    let brief = TrainSample { loss_mask: (0..TOKENS).map(|i| i == 2).collect(), ..sample(TOKENS) };
    let tiny = TrainSample { loss_mask: vec![true; 4], ..sample(4) };
    let texts = [sample(TOKENS), short, silent, brief, tiny];
    let plan = MtpPlan::new(config(&target), objective.clone());
    assert_eq!((plan.final_states(), plan.reads_last_token_state()), (FinalStates::All, false));
    let parts = texts.each_ref().map(|text| plan.loss_denominator_part(&text.loss_mask, &[]));
    assert_eq!((parts[2], parts[3], parts[4]), (0.0, objective.step_weights[0], 0.0));
    let run = |batches: &[&[TrainSample]]| {
        let model = fresh(config(&target), Kind::Float);
        model.parameters().iter().for_each(|(_, parameter)| drop(parameter.set_requires_grad(true)));
        let sums: Vec<Tensor> = batches
            .iter()
            .filter_map(|samples| StepBatch::new(samples, &objective.step_weights, Device::Cpu, Kind::Float))
            .map(|batch| model.accumulate(&batch, LossDenominator(4.0)))
            .collect();
        (gradients(&model), Tensor::stack(&sums, 0).sum_dim_intlist(0, false, Kind::Double))
    };
    let alone: Vec<&[TrainSample]> = texts.chunks(1).collect();
    let (together, apart) = (run(&[&texts]), run(&alone));
    assert_close("sums", &together.1, &apart.1, 1e-4);
    for (a, b) in together.0.iter().zip(&apart.0) {
        assert_close("gradient", a, b, 1e-5 * common::max_abs(b).max(1e-6));
    }
}
