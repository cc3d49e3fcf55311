//! A small random Qwen3, and the inputs and outputs of the package that trains drafters for it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use deepspec_checkpoint::{CheckpointFormat, Target, convert};
use deepspec_core::Tap;
use deepspec_drafters::{DraftDecoder, TrainSample, open_checkpoint};
use deepspec_models::{ModelConfig, save};
use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};

use crate::common::{assert_close, max_abs, noise};

pub const VOCAB: i64 = 96;
const WIDTH: i64 = 32;
pub const TOKENS: usize = 26;
const SUPERVISED: usize = 20;
pub const FORWARD: f64 = 1e-4;
const TARGET_LAYERS: usize = 6;
const EPS: f64 = 1e-6;
/// Largest difference of a gradient, relative to its largest value.
const GRADIENT: f64 = 5e-4;

fn target() -> Map<String, Value> {
    let target = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": WIDTH, "intermediate_size": 48,
        "num_hidden_layers": TARGET_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": VOCAB, "initializer_range": 0.2, "max_position_embeddings": 256, "rms_norm_eps": EPS,
        "rope_theta": 1e4, "hidden_act": "silu", "attention_bias": false, "tie_word_embeddings": false,
    });
    target.as_object().unwrap().clone()
}

/// Draft layers that read two taps.
pub fn decoder(layers: usize) -> DraftDecoder {
    let target = ModelConfig::parse(Path::new("config.json"), target()).unwrap();
    DraftDecoder {
        model: target.draft_decoder(&vec![None; layers]).unwrap(),
        taps: Tap::from_layer_ids([1, 3]).unwrap(),
        num_target_layers: TARGET_LAYERS,
    }
}

/// Embedding and LM head.
pub fn ends() -> [Tensor; 2] {
    [1, 2].map(|seed| noise(seed, &[VOCAB, WIDTH]) * 0.3)
}

fn final_norm() -> Tensor {
    noise(3, &[WIDTH])
}

/// Writes target and drafter under `root`, and the drafter in speculators' layout in `root/speculators`.
pub fn write(root: &Path, checkpoint: &[(String, Tensor)], config: Map<String, Value>) {
    let folder = |name: &str| {
        fs::create_dir_all(root.join(name)).unwrap();
        root.join(name)
    };
    let (drafter, target_dir) = (folder("drafter"), folder("target"));
    save(&drafter.join("model.safetensors"), checkpoint, Kind::Float).unwrap();
    fs::write(drafter.join("config.json"), Value::Object(config).to_string()).unwrap();
    let [embed, head] = ends();
    let own = [
        ("model.embed_tokens.weight".to_string(), embed),
        ("lm_head.weight".into(), head),
        ("model.norm.weight".into(), final_norm()),
    ];
    save(&target_dir.join("model.safetensors"), &own, Kind::Float).unwrap();
    fs::write(target_dir.join("config.json"), Value::Object(target()).to_string()).unwrap();
    let target = Target::open(&target_dir, target_dir.to_str().unwrap()).unwrap();
    let source = open_checkpoint(&drafter).unwrap();
    let converted = convert(&source, CheckpointFormat::Speculators, Some(&target)).unwrap();
    converted.write(&root.join("speculators"), false).unwrap();
}

/// A sample whose final states are before the target's final norm, as speculators takes them.
pub fn sample(anchors: &[usize]) -> TrainSample {
    let ids = (noise(5, &[TOKENS as i64]) * 1e4).abs().to_kind(Kind::Int64).remainder(VOCAB);
    TrainSample {
        input_ids: Vec::try_from(ids).unwrap(),
        loss_mask: (0..TOKENS).map(|at| at < SUPERVISED).collect(),
        taps: noise(6, &[TOKENS as i64, 2 * WIDTH]),
        last: noise(7, &[TOKENS as i64, WIDTH]) * 3.0,
        last_positions: (0..TOKENS as u32).collect(),
        anchors: anchors.to_vec(),
    }
}

/// The sample with final states behind the target's final norm.
pub fn normed(sample: TrainSample) -> TrainSample {
    let squares = sample.last.square().mean_dim(-1, true, Kind::Float);
    TrainSample { last: &sample.last * (squares + EPS).rsqrt() * final_norm(), ..sample }
}

/// Writes the sample for the package, with these tensors.
pub fn write_inputs(path: &Path, sample: &TrainSample, further: &[(&str, Tensor)]) {
    let anchors: Vec<i64> = sample.anchors.iter().map(|&anchor| anchor as i64).collect();
    let mut tensors = vec![
        ("input_ids", Tensor::from_slice(&sample.input_ids).unsqueeze(0)),
        ("loss_mask", Tensor::from_slice(&sample.loss_mask).to_kind(Kind::Float).unsqueeze(0)),
        ("taps", sample.taps.unsqueeze(0)),
        ("last", sample.last.unsqueeze(0)),
        ("anchors", Tensor::from_slice(&anchors)),
    ];
    tensors.extend(further.iter().map(|(name, tensor)| (*name, tensor.shallow_clone())));
    Tensor::write_safetensors(&tensors, path).unwrap();
}

/// Trains the drafters in `speculators` on `given.safetensors` of each of these folders, and reads the outputs.
pub fn train<'a>(python: &str, folders: impl Iterator<Item = &'a PathBuf>) -> Vec<BTreeMap<String, Tensor>> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/speculators_training/train.py");
    let mut command = Command::new(python);
    command.arg(script).env("HF_HUB_OFFLINE", "1");
    let mut outputs = vec![];
    for folder in folders {
        command.args(["speculators", "given.safetensors", "out.safetensors"].map(|file| folder.join(file)));
        outputs.push(folder.join("out.safetensors"));
    }
    let run = command.output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    outputs.iter().map(|path| Tensor::read_safetensors(path).unwrap().into_iter().collect()).collect()
}

/// Compares the gradients of all parameters, and of no others, with the package's, whose names `theirs` gives.
pub fn assert_gradients(
    parameters: &[(String, Tensor)],
    out: &BTreeMap<String, Tensor>,
    theirs: impl Fn(&str) -> String,
) {
    let compared = out.keys().filter(|key| key.starts_with("grad.")).count();
    assert_eq!(compared, parameters.len());
    for (name, parameter) in parameters {
        let expected = &out[&format!("grad.{}", theirs(name))];
        assert!(max_abs(expected) > 0.0, "{name} learns nothing");
        assert_close(name, &parameter.grad(), expected, GRADIENT * max_abs(expected));
    }
}
