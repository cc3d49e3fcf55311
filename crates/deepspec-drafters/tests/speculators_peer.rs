//! Drafters converted to speculators' layout, loaded and run by that package on the same inputs.
//!
//! Runs only if `DEEPSPEC_SPECULATORS_PYTHON` names a Python with speculators and torch.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{assert_close, noise};
use deepspec_checkpoint::{CheckpointFormat, DraftVocab, Target, convert};
use deepspec_core::recipe::LossNormalization;
use deepspec_drafters::{
    DSpark, Eagle3, Eagle3Batch, Eagle3Objective, Supervise, TrainSample, open_checkpoint,
};
use deepspec_models::{ModelConfig, Weights, save};
use deepspec_testkit::{golden, skip};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

const FORWARD: f64 = 1e-4;
const CASES: [&str; 8] = [
    "dspark_vanilla",
    "dspark_gated",
    "dspark_rnn",
    "dflash",
    "eagle3_qwen3",
    NORM_BEFORE_FC,
    NORMS,
    REDUCED_VOCAB,
];
/// The golden Eagle3 with a norm before `fc`.
const NORM_BEFORE_FC: &str = "norm before fc";
/// The golden Eagle3 with the other norms that speculators has.
const NORMS: &str = "norms";
/// The golden Eagle3 with a reduced vocabulary and a head of its own.
const REDUCED_VOCAB: &str = "reduced vocabulary";
const ANCHORS: [usize; 4] = [0, 3, 4, 11];
const TOKENS: usize = 24;

/// Writes a golden drafter with taps that speculators supports, and a target around its embedding
/// and head, under `root`.
fn models(root: &Path, case: &str) -> (PathBuf, PathBuf) {
    let from = match case {
        NORM_BEFORE_FC | NORMS | REDUCED_VOCAB => golden::dir("eagle3_qwen3"),
        _ => golden::dir(case),
    };
    let (drafter, target) = (root.join("drafter"), root.join("target"));
    fs::create_dir_all(&drafter).unwrap();
    fs::create_dir_all(&target).unwrap();
    fs::copy(from.join("model.safetensors"), drafter.join("model.safetensors")).unwrap();
    let text = fs::read_to_string(from.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    if config["target_layer_ids"][0] == -1 {
        config["target_layer_ids"][0] = json!(0);
    }
    fs::write(drafter.join("config.json"), config.to_string()).unwrap();

    let model = ModelConfig::load(&drafter).unwrap();
    let weights = Weights::open(&drafter, "drafter", Device::Cpu, Kind::Float).unwrap();
    let ends = [model.vocab_size, model.hidden_size];
    let own = [
        ("model.embed_tokens.weight".to_string(), weights.get("embed_tokens.weight", &ends).unwrap()),
        ("lm_head.weight".into(), weights.get("lm_head.weight", &ends).unwrap()),
        ("model.norm.weight".into(), noise(3, &[model.hidden_size])),
    ];
    save(&target.join("model.safetensors"), &own, Kind::Float).unwrap();
    if case == REDUCED_VOCAB {
        reduce_vocab(&drafter, &mut config);
    }
    let keys: &[&str] = match case {
        NORM_BEFORE_FC => &["norm_before_fc"],
        NORMS => &["norm_before_residual", "fc_norm", "norm_output"],
        _ => &[],
    };
    add_norms(&drafter, &mut config, keys);
    config["architectures"] = json!(["Qwen3ForCausalLM"]);
    config["num_hidden_layers"] = config["num_target_layers"].clone();
    config.as_object_mut().unwrap().remove("layer_types");
    fs::write(target.join("config.json"), config.to_string()).unwrap();
    (drafter, target)
}

/// Sets these flags, and adds random norms before `fc`.
fn add_norms(drafter: &Path, config: &mut Value, keys: &[&str]) {
    let file = drafter.join("model.safetensors");
    let mut tensors = Tensor::read_safetensors(&file).unwrap();
    let (width, taps) = (
        config["hidden_size"].as_i64().unwrap(),
        config["target_layer_ids"].as_array().unwrap().len() as i64,
    );
    for &key in keys {
        config[key] = json!(true);
        match key {
            "norm_before_fc" => tensors.push(("input_norm.weight".into(), noise(9, &[taps * width]) + 1.0)),
            "fc_norm" => tensors.extend(
                (0..taps).map(|i| (format!("fc_norm.{i}.weight"), noise(10 + i as u64, &[width]) + 1.0)),
            ),
            _ => {}
        }
    }
    save(&file, &tensors, Kind::Float).unwrap();
    fs::write(drafter.join("config.json"), config.to_string()).unwrap();
}

/// Reduces the drafter's vocabulary to every fourth token, with a random head.
fn reduce_vocab(drafter: &Path, config: &mut Value) {
    let file = drafter.join("model.safetensors");
    let mut tensors = Tensor::read_safetensors(&file).unwrap();
    let vocab = config["vocab_size"].as_i64().unwrap();
    let counts: Vec<u64> = (0..vocab).map(|id| u64::from(id % 4 == 1)).collect();
    let kept = DraftVocab::most_frequent(&counts, vocab as usize / 4).unwrap();
    for (name, tensor) in &mut tensors {
        if name == "lm_head.weight" {
            *tensor = noise(8, &[vocab / 4, tensor.size()[1]]);
        }
    }
    tensors.push(("d2t".into(), Tensor::from_slice(&kept.offsets())));
    save(&file, &tensors, Kind::Float).unwrap();
    config["draft_vocab_size"] = json!(vocab / 4);
    fs::write(drafter.join("config.json"), config.to_string()).unwrap();
}

/// Random states for a random text; every position is a training example.
fn sample(model: &ModelConfig, taps: usize) -> TrainSample {
    let ids = noise(5, &[TOKENS as i64]) * 1e4;
    let ids = ids.abs().to_kind(Kind::Int64).remainder(model.vocab_size);
    TrainSample {
        input_ids: Vec::try_from(ids).unwrap(),
        loss_mask: vec![true; TOKENS],
        taps: noise(6, &[TOKENS as i64, taps as i64 * model.hidden_size]),
        last: noise(7, &[TOKENS as i64, model.hidden_size]),
        last_positions: (0..TOKENS as u32).collect(),
        anchors: ANCHORS.to_vec(),
    }
}

fn given(sample: &TrainSample, path: &Path) {
    let anchors: Vec<i64> = sample.anchors.iter().map(|&anchor| anchor as i64).collect();
    let tensors = [
        ("input_ids", Tensor::from_slice(&sample.input_ids).unsqueeze(0)),
        ("taps", sample.taps.unsqueeze(0)),
        ("last", sample.last.unsqueeze(0)),
        ("anchors", Tensor::from_slice(&anchors)),
    ];
    Tensor::write_safetensors(&tensors, path).unwrap();
}

/// The values that our drafter computes, by the names in the script.
fn ours(dir: &Path, sample: TrainSample) -> Vec<(&'static str, Tensor)> {
    let samples = [sample];
    if let Ok(model) = Eagle3::load(dir, Device::Cpu, Kind::Float) {
        let objective = Eagle3Objective {
            supervise: Supervise::Labels,
            step_loss_decay: 1.0,
            normalization: LossNormalization::Global,
        };
        let batch = Eagle3Batch::new(&samples, &objective, 3, Device::Cpu, Kind::Float).unwrap();
        let step_logits = |states: &Tensor| {
            let logits = model.draft_logits(states);
            // Speculators returns the logits of draft ids.
            let of_drafts = model.draft_tokens().map(|tokens| logits.index_select(1, tokens));
            of_drafts.unwrap_or(logits)
        };
        let names = ["logits of step 0", "logits of step 1", "logits of step 2"];
        return names.into_iter().zip(model.step_states(&batch).iter().map(step_logits)).collect();
    }
    let block = DSpark::load(dir, Device::Cpu, Kind::Float).unwrap();
    let batch = block.config().batch(&samples, 1.0, Device::Cpu, Kind::Float).unwrap();
    let hidden = block.hidden_states(&batch);
    let heads = block.teacher_forced_features(&hidden, &batch.previous);
    let (e, features) = (heads.as_ref().map(|(e, _)| e), heads.as_ref().map(|(_, features)| features));
    let mut found = vec![("logits", block.teacher_forced_logits(&hidden, features))];
    found.extend(block.confidence_logits(&hidden, e).map(|logits| ("confidence", logits)));
    found.push(("hidden", hidden));
    found
}

#[test]
fn speculators_loads_converted_drafters_and_computes_the_same() {
    let Some(python) = skip::speculators_python("speculators and torch") else { return };
    let _no_grad = tch::no_grad_guard();
    let root = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/speculators_forward.py");
    let mut command = Command::new(python);
    command.arg(script).env("HF_HUB_OFFLINE", "1");
    for case in CASES {
        let place = root.path().join(case);
        let (drafter, target) = models(&place, case);
        let source = open_checkpoint(&drafter).unwrap();
        let target = Target::open(&target, target.to_str().unwrap()).unwrap();
        let converted = convert(&source, CheckpointFormat::Speculators, Some(&target)).unwrap();
        converted.write(&place.join("speculators"), false).unwrap();
        given(
            &sample(&ModelConfig::load(&drafter).unwrap(), source.drafter().taps.len()),
            &place.join("given.safetensors"),
        );
        for file in ["speculators", "given.safetensors", "out.safetensors"] {
            command.arg(place.join(file));
        }
    }
    let run = command.output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    for case in CASES {
        let place = root.path().join(case);
        let theirs = Tensor::read_safetensors(place.join("out.safetensors")).unwrap();
        let drafter = place.join("drafter");
        let taps = open_checkpoint(&drafter).unwrap().drafter().taps.len();
        let found = ours(&drafter, sample(&ModelConfig::load(&drafter).unwrap(), taps));
        assert_eq!(found.len(), theirs.len(), "{case}");
        for (name, own) in found {
            let (_, other) = theirs.iter().find(|(other, _)| other == name).unwrap();
            // Eagle3 does not compute positions without supervised tokens: the last ones.
            let other = if own.dim() == 2 {
                other.squeeze_dim(0).narrow(0, 0, own.size()[0])
            } else {
                other.shallow_clone()
            };
            assert_close(&format!("{case}: {name}"), &own, &other, FORWARD);
        }
    }
}
