//! A small random Qwen3, the package's computations, and greedy drafts.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use deepspec_checkpoint::Target;
use deepspec_drafters::TrainSample;
use deepspec_engine::{Context, DraftRequest, Proposer, Sampling, SamplingBatch};
use deepspec_models::save;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::common::noise;

pub const VOCAB: i64 = 96;
pub const WIDTH: i64 = 32;
pub const FORWARD: f64 = 1e-4;

pub fn target() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": WIDTH, "intermediate_size": 48,
        "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": VOCAB, "initializer_range": 0.3, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "hidden_act": "silu", "attention_bias": false, "tie_word_embeddings": false,
    })
}

/// Embedding and LM head.
pub fn ends() -> [Tensor; 2] {
    [1, 2].map(|seed| noise(seed, &[VOCAB, WIDTH]) * 0.3)
}

/// Writes the target to `root/target`, and opens it.
pub fn write_target(root: &Path) -> Target {
    let (dir, [embed, head]) = (root.join("target"), ends());
    fs::create_dir_all(&dir).unwrap();
    let own = [("model.embed_tokens.weight".to_string(), embed), ("lm_head.weight".into(), head)];
    save(&dir.join("model.safetensors"), &own, Kind::Float).unwrap();
    fs::write(dir.join("config.json"), target().to_string()).unwrap();
    Target::open(&dir, "target").unwrap()
}

/// Runs the package on each of these folders with a drafter of this kind, and reads its outputs.
pub fn compute(python: &str, folders: &[(&str, &PathBuf)]) -> Vec<BTreeMap<String, Tensor>> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/specforge/compute.py");
    let mut command = Command::new(python);
    command.arg(script).env("HF_HUB_OFFLINE", "1").env("TORCH_COMPILE_DISABLE", "1");
    for (kind, folder) in folders {
        command.arg(kind).arg(folder);
    }
    let run = command.output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let read = |(_, folder): &(&str, &PathBuf)| {
        Tensor::read_safetensors(folder.join("out.safetensors")).unwrap().into_iter().collect()
    };
    folders.iter().map(read).collect()
}

/// Greedy drafts after each anchor of the sample. Anchors increase.
pub fn drafts(mut proposer: impl Proposer, sample: &TrainSample) -> Vec<Vec<i64>> {
    let _no_grad = tch::no_grad_guard();
    let (gamma, mut seen) = (proposer.draft_len() as i64, 0);
    let propose = |&anchor: &usize| {
        let rows = anchor - seen;
        let context = Context {
            captured_states: sample.taps.narrow(0, seen as i64, rows as i64),
            hidden: None,
            tokens: Tensor::from_slice(&sample.input_ids[seen..anchor]),
            next: Tensor::from_slice(&sample.input_ids[seen + 1..=anchor]),
            chunks: vec![(0, rows)],
        };
        seen = anchor;
        let proposal = proposer.propose(&DraftRequest {
            context: &context,
            slots: &[0],
            anchors: &Tensor::from_slice(&sample.input_ids[anchor..=anchor]),
            uniforms: &Tensor::zeros([1, gamma], (Kind::Double, Device::Cpu)),
            sampling: &SamplingBatch::new(vec![Sampling::new(0.0, 0)], Device::Cpu),
        });
        Vec::try_from(proposal.tokens.get(0)).unwrap()
    };
    sample.anchors.iter().map(propose).collect()
}
