//! The built binary with options of DSpark: attention sinks and the loss of block verification.

mod common;

use std::fs;

use common::decoding::{greedy, loads};
use common::{Bench, STEPS, start_until, workspace};
use serde_json::{Value, json};
use tch::Tensor;

const SINKS: [&str; 2] = ["--set", "drafter.dspark.attention_sinks=true"];

#[test]
fn sinks_are_learned_saved_and_lossless() {
    let bench = Bench::new();
    bench.succeeds(&SINKS);
    let losses = bench.losses();
    assert!(losses[STEPS - 1] < losses[0], "the loss does not fall: {losses:?}");
    let saved = bench.path("out/t/step_latest");
    let config: Value = serde_json::from_slice(&fs::read(saved.join("config.json")).unwrap()).unwrap();
    assert_eq!(
        [&config["attention_sink_bias"], &config["add_swa_attention_sink_bias"]],
        [&json!(true), &json!(true)]
    );
    let tensors = Tensor::read_safetensors(saved.join("model.safetensors")).unwrap();
    let (_, sinks) =
        tensors.iter().find(|(name, _)| name == "layers.0.self_attn.attention_sink_bias").unwrap();
    assert!(sinks.abs().max().double_value(&[]) > 0.0, "the sinks were not trained");
    let target = workspace().join("assets/tiny-target");
    assert_eq!(greedy(&target, None), greedy(&target, Some(loads(&bench))));
}

#[test]
fn a_killed_run_resumes_with_its_sinks() {
    let [whole, killed] = [(); 2].map(|()| Bench::new());
    whole.succeeds(&SINKS);
    let mut child = start_until(&killed, STEPS / 2, &SINKS);
    child.kill().unwrap();
    child.wait().unwrap();
    killed.succeeds(&SINKS);
    assert_eq!(whole.result(), killed.result());
    killed.fails(
        &["--set", "drafter.dspark.attention_sinks=false"],
        2,
        &["another recipe", "attention_sinks"],
    );
}

/// β grows with the progress of training, so a resumed run must know how far it is.
#[test]
fn a_killed_run_resumes_with_the_loss_of_block_verification() {
    let annealed = ["--set", "drafter.dspark.loss={ce_alpha: 0.1, block_verification: {alpha: 0.9}}"];
    let fixed = ["--set", "drafter.dspark.loss={ce_alpha: 0.1, block_verification: {alpha: 0.9, beta: 0}}"];
    let [whole, killed, other] = [(); 3].map(|()| Bench::new());
    whole.succeeds(&annealed);
    let reported = |bench: &Bench| {
        let losses = bench.metrics().into_iter().filter_map(|row| row["block_verification_loss"].as_f64());
        losses.collect::<Vec<_>>()
    };
    let losses = reported(&whole);
    assert!(losses.len() > 1 && losses[losses.len() - 1] < losses[0], "{losses:?}");
    let mut child = start_until(&killed, STEPS / 2, &annealed);
    child.kill().unwrap();
    child.wait().unwrap();
    killed.succeeds(&annealed);
    assert_eq!(whole.result(), killed.result());
    other.succeeds(&fixed);
    assert_ne!(reported(&other), losses, "β is not annealed");
}
