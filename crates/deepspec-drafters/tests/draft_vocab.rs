//! Eagle3 with a reduced vocabulary: logits, losses, checkpoints and recipes.

mod common;

use std::path::Path;

use common::{assert_close, noise};
use deepspec_checkpoint::DraftVocab;
use deepspec_core::Tap;
use deepspec_core::recipe::LossNormalization;
use deepspec_drafters::{
    DraftDecoder, DrafterPlan, Eagle3, Eagle3Batch, Eagle3Config, Eagle3Objective, Eagle3Plan,
    Eagle3Settings, LossDenominator, Supervise, TrainSample,
};
use deepspec_models::ModelConfig;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

const VOCAB: i64 = 64;
const WIDTH: i64 = 32;
const TOKENS: usize = 24;
const STEPS: usize = 3;
const DECAY: f64 = 0.8;

fn target() -> ModelConfig {
    let raw = json!({
        "model_type": "qwen3", "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB,
        "initializer_range": 0.3, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e5,
    });
    ModelConfig::parse(Path::new("config.json"), raw.as_object().cloned().unwrap()).unwrap()
}

/// Every third token and the last one.
fn vocab() -> DraftVocab {
    let counts: Vec<u64> = (0..VOCAB).map(|id| u64::from(id % 3 == 0 || id == VOCAB - 1)).collect();
    DraftVocab::most_frequent(&counts, counts.iter().sum::<u64>() as usize).unwrap()
}

fn config(draft_vocab_size: Option<i64>) -> Eagle3Config {
    let target = target();
    Eagle3Config {
        decoder: DraftDecoder {
            model: target.draft_decoder(&[None]).unwrap(),
            taps: Tap::from_layer_ids([0, 1, 2]).unwrap(),
            num_target_layers: target.layers.len(),
        },
        settings: Eagle3Settings {
            ttt_length: STEPS,
            step_loss_decay: DECAY,
            draft_vocab_size,
            ..Eagle3Settings::default()
        },
    }
}

fn ends() -> [Tensor; 2] {
    [3, 4].map(|seed| noise(seed, &[VOCAB, WIDTH]) * 0.3)
}

fn reduced() -> Eagle3 {
    let ([embed, head], vocab) = (ends(), vocab());
    let config = config(Some(vocab.tokens().len() as i64));
    Eagle3::fresh_with_draft_vocab(config, (&embed, &head), Some(&vocab), 11, Kind::Float)
}

fn objective() -> Eagle3Objective {
    Eagle3Objective {
        supervise: Supervise::Labels,
        step_loss_decay: DECAY,
        normalization: LossNormalization::Global,
    }
}

fn sample() -> TrainSample {
    TrainSample {
        input_ids: (0..TOKENS as i64).map(|i| (i * i + 3 * i) % VOCAB).collect(),
        loss_mask: (0..TOKENS).map(|i| i > 4).collect(),
        taps: noise(5, &[TOKENS as i64, 3 * WIDTH]),
        last: noise(6, &[TOKENS as i64, WIDTH]),
        last_positions: (0..TOKENS as u32).collect(),
        anchors: vec![],
    }
}

fn batch(steps: usize) -> Eagle3Batch {
    Eagle3Batch::new(&[sample()], &objective(), steps, Device::Cpu, Kind::Float).unwrap()
}

/// Equal seeds draw equal weights, so the reduced drafter differs from the whole one in its head only.
#[test]
fn logits_are_the_whole_drafters_at_its_tokens_and_minus_infinity_elsewhere() {
    let _guard = tch::no_grad_guard();
    let ([embed, head], vocab) = (ends(), vocab());
    let whole = Eagle3::fresh(config(None), &embed, &head, 11, Kind::Float);
    let states = |model: &Eagle3| model.draft_logits(&model.step_states(&batch(1))[0]);
    let (own, other) = (states(&reduced()), states(&whole));
    assert_eq!(own.size(), other.size());
    let tokens = Tensor::from_slice(vocab.tokens());
    assert_close("kept tokens", &own.index_select(1, &tokens), &other.index_select(1, &tokens), 1e-6);
    let rest: Vec<i64> = (0..VOCAB).filter(|id| !vocab.tokens().contains(id)).collect();
    assert_eq!(rest.len() + vocab.tokens().len(), VOCAB as usize);
    let rest = own.index_select(1, &Tensor::from_slice(&rest));
    assert!(bool::try_from(rest.eq(f64::NEG_INFINITY).all()).unwrap());
}

/// The teacher is the target's distribution over the draft tokens, renormalised, as speculators trains it. The gradients are autograd's through plain operators.
#[test]
fn the_loss_is_the_cross_entropy_with_the_target_over_the_draft_tokens() {
    let model = reduced();
    model.parameters().iter().for_each(|(_, tensor)| drop(tensor.set_requires_grad(true)));
    let head = ends()[1].index_select(0, &Tensor::from_slice(vocab().tokens()));
    let gradients = || -> Vec<Tensor> {
        let parameters = model.parameters().iter();
        parameters
            .map(|(_, tensor)| {
                let gradient = tensor.grad().copy();
                let _ = tensor.grad().zero_();
                gradient
            })
            .collect()
    };
    let sums = model.accumulate(Some(&batch(STEPS)), LossDenominator(1.0), 1);
    let own = gradients();

    let (batch, weight) = (batch(STEPS), 1.0 / TOKENS as f64);
    let mut total = Tensor::zeros([], (Kind::Float, Device::Cpu));
    for (step, states) in model.step_states(&batch).iter().enumerate() {
        let rows = states.index_select(0, &batch.supervised_indices(step));
        let draft = model.draft_logits(&rows).index_select(1, &Tensor::from_slice(vocab().tokens()));
        let teacher = batch.teacher_states(step).matmul(&head.tr()).softmax(-1, Kind::Float);
        let loss = -(teacher * draft.log_softmax(-1, Kind::Float)).sum(Kind::Float) * weight;
        let seen = sums.double_value(&[step as i64 * 4]);
        assert!((seen - loss.double_value(&[])).abs() < 1e-4 * seen, "step {step}: {seen} and {loss:?}");
        total += loss * DECAY.powi(step as i32);
    }
    total.backward();
    for ((name, _), (own, other)) in model.parameters().iter().zip(own.iter().zip(&gradients())) {
        assert_close(name, own, other, 1e-4);
    }
}

#[test]
fn checkpoints_keep_the_vocabulary_and_recipes_name_its_file() {
    let _guard = tch::no_grad_guard();
    let dir = tempfile::tempdir().unwrap();
    let (vocab, target, [embed, head]) = (vocab(), target(), ends());
    let size = vocab.tokens().len() as i64;
    let plan = Eagle3Plan::new(config(Some(size)), objective()).with_draft_vocab(Some(vocab));
    let trained = plan.build(&embed, &head, 11, Kind::Float);
    let map = trained.config_json();
    assert_eq!(map["draft_vocab_size"], json!(size));
    let put = |map: &Value| std::fs::write(dir.path().join("config.json"), map.to_string()).unwrap();
    put(&json!(map));
    deepspec_models::save(&dir.path().join("model.safetensors"), &trained.checkpoint(), Kind::Float).unwrap();
    let loaded = Eagle3::load(dir.path(), Device::Cpu, Kind::Float).unwrap();
    let logits = |model: &Eagle3| model.draft_logits(&model.step_states(&batch(1))[0]);
    assert!(logits(&loaded).equal(&logits(&reduced())));
    assert!(loaded.config().decoder.check_fits(&target).is_ok());
    // Most public drafters have Llama's layers, also for other targets.
    let mut raw = target.raw.clone();
    raw.insert("model_type".into(), json!("llama"));
    let llama = ModelConfig::parse(Path::new("config.json"), raw).unwrap();
    let llama = DraftDecoder { model: llama.draft_decoder(&[None]).unwrap(), ..config(None).decoder };
    assert!(llama.check_fits(&target).is_ok());

    for (value, told) in [
        (json!(null), "lm_head.weight"),
        (json!(size - 1), "lm_head.weight"),
        (json!(VOCAB + 1), "draft_vocab_size"),
    ] {
        let mut wrong = map.clone();
        wrong.insert("draft_vocab_size".into(), value);
        put(&json!(wrong));
        let error = Eagle3::load(dir.path(), Device::Cpu, Kind::Float).err().unwrap().to_string();
        assert!(error.contains(told), "{error}");
    }
    put(&json!(map));
    let mut tensors = trained.checkpoint();
    let d2t = tensors.iter().position(|(name, _)| name == "d2t").unwrap();
    tensors[d2t].1 = &tensors[d2t].1 + 100;
    deepspec_models::save(&dir.path().join("model.safetensors"), &tensors, Kind::Float).unwrap();
    let error = Eagle3::load(dir.path(), Device::Cpu, Kind::Float).err().unwrap().to_string();
    assert!(error.contains("d2t") && error.contains("draft id 0 stands for token 100"), "{error}");
}
