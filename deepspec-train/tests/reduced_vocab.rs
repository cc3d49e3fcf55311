//! The built binary with an Eagle3 whose vocabulary is reduced.

mod common;

use std::fs;
use std::path::Path;

use common::{Bench, STEPS, start_until};
use deepspec_checkpoint::{DraftVocab, Tensors};
use serde_json::{Value, json};

/// Tokens of the tiny target.
const VOCAB: usize = 1024;

/// A vocabulary without the multiples of `skipped`, written to `path`.
fn write_vocab(path: &Path, skipped: usize) -> DraftVocab {
    let counts: Vec<u64> = (0..VOCAB).map(|id| u64::from(id % skipped != 0)).collect();
    let vocab = DraftVocab::most_frequent(&counts, 512).unwrap();
    vocab.write(path).unwrap();
    vocab
}

fn recipe(vocab: &Path) -> Vec<String> {
    let drafter = format!("drafter={{eagle3: {{ttt_length: 3, draft_vocab: '{}'}}}}", vocab.display());
    vec!["--set".into(), drafter]
}

fn arguments(vocab: &Path, changes: &[&str]) -> Vec<String> {
    let changes = changes.iter().flat_map(|change| ["--set".to_string(), change.to_string()]);
    recipe(vocab).into_iter().chain(changes).collect()
}

fn strings(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

#[test]
fn it_learns_and_its_checkpoints_hold_the_vocabulary() {
    let bench = Bench::new();
    let file = bench.path("vocab.safetensors");
    let vocab = write_vocab(&file, 5);
    bench.succeeds(&strings(&recipe(&file)));
    let losses = bench.losses();
    assert!(losses[STEPS - 1] < 0.95 * losses[0], "the loss does not fall: {losses:?}");
    let saved = bench.path("out/t/step_latest");
    let config: Value = serde_json::from_slice(&fs::read(saved.join("config.json")).unwrap()).unwrap();
    assert_eq!((&config["draft_vocab_size"], &config["vocab_size"]), (&json!(512), &json!(VOCAB)));
    let tensors = Tensors::open(&saved).unwrap();
    assert_eq!(DraftVocab::of_tensors(&tensors, VOCAB).unwrap(), vocab);
    assert_eq!(tensors.get("lm_head.weight").unwrap().shape[0], 512);
}

#[test]
fn a_killed_run_resumes_with_its_vocabulary_only() {
    let [whole, killed] = [(); 2].map(|()| Bench::new());
    let [first, second] = [&whole, &killed].map(|bench| bench.path("vocab.safetensors"));
    write_vocab(&first, 5);
    write_vocab(&second, 5);
    whole.succeeds(&strings(&recipe(&first)));
    let arguments = recipe(&second);
    let mut child = start_until(&killed, 4, &strings(&arguments));
    child.kill().unwrap();
    child.wait().unwrap();
    write_vocab(&second, 7);
    killed.fails(&strings(&arguments), 2, &["trained with another draft_vocab"]);
    killed.fails(&["--set", "drafter={eagle3: {ttt_length: 3}}"], 2, &["another recipe", "draft_vocab"]);
    DraftVocab::most_frequent(&[1; VOCAB], 100).unwrap().write(&second).unwrap();
    killed.fails(&strings(&arguments), 2, &["trained with another draft_vocab"]);
    // The file may lie elsewhere.
    let moved = killed.path("moved.safetensors");
    write_vocab(&moved, 5);
    killed.succeeds(&strings(&recipe(&moved)));
    assert!(killed.result() == whole.result());
}

#[test]
fn weights_are_taken_over_for_one_vocabulary() {
    let bench = Bench::new();
    let [file, other] = ["vocab.safetensors", "other.safetensors"].map(|name| bench.path(name));
    write_vocab(&file, 5);
    write_vocab(&other, 7);
    bench.succeeds(&strings(&arguments(&file, &["train.max_train_steps=2"])));
    let (from, next) = (format!("train.init_from={}", bench.path("out/t/step_2").display()), Bench::new());
    next.fails(&strings(&arguments(&other, &[&from])), 2, &["train.init_from", "`d2t`", "draft_vocab"]);
    next.fails(
        &["--set", "drafter={eagle3: {ttt_length: 3}}", "--set", &from],
        2,
        &["draft_vocab 512 there, the target's here"],
    );
    next.succeeds(&strings(&arguments(&file, &[&from, "train.max_train_steps=2"])));
}

/// Another version may build a drafter with other layers for the same recipe.
#[test]
fn a_run_resumes_only_with_its_architecture() {
    let bench = Bench::new();
    let more = ["--set", "drafter={eagle3: {ttt_length: 3}}", "--set", "train.max_train_steps=2"];
    bench.succeeds(&more);
    let file = bench.path("out/t/step_latest/config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    config["architectures"] = json!(["LlamaEagle3Model"]);
    fs::write(&file, config.to_string()).unwrap();
    bench.fails(
        &more,
        2,
        &["another drafter than this version builds", "LlamaEagle3Model", "Qwen3Eagle3Model"],
    );
}

#[test]
fn mistakes_are_named() {
    let bench = Bench::new();
    let file = bench.path("vocab.safetensors");
    bench.fails(&strings(&recipe(&file)), 2, &["drafter.eagle3.draft_vocab", "vocab.safetensors"]);
    fs::write(&file, "no tensors").unwrap();
    bench.fails(&strings(&recipe(&file)), 2, &["drafter.eagle3.draft_vocab", "vocab.safetensors"]);
    DraftVocab::most_frequent(&[1, 2, 3], 2).unwrap().write(&file).unwrap();
    bench.fails(&strings(&recipe(&file)), 2, &["it is for 3 tokens, the target has 1024"]);
    DraftVocab::most_frequent(&[1; VOCAB], VOCAB).unwrap().write(&file).unwrap();
    bench.fails(&strings(&recipe(&file)), 2, &["all of the target's tokens", "leave draft_vocab out"]);
    // A run with the whole vocabulary does not go on with a part of it.
    bench.succeeds(&["--set", "drafter={eagle3: {ttt_length: 3}}", "--set", "train.max_train_steps=2"]);
    write_vocab(&file, 5);
    let more = ["train.max_train_steps=2"];
    bench.fails(&strings(&arguments(&file, &more)), 2, &["another recipe", "draft_vocab"]);
}
