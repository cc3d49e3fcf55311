//! The built binary with P-EAGLE, whose masked positions are sampled anew in every epoch.

mod common;

use std::fs;

use common::decoding::{greedy, loads};
use common::{Bench, STEPS, start_until, workspace};
use deepspec_checkpoint::DraftVocab;
use deepspec_models::save;
use deepspec_testkit::tiny;
use serde_json::{Value, json};
use tch::{Kind, Tensor};

const PEAGLE: &str = "drafter={peagle: {num_draft_layers: 2, num_depths: 4, mask_token_id: 1023}}";

fn set<'a>(changes: &[&'a str]) -> Vec<&'a str> {
    changes.iter().flat_map(|change| ["--set", change]).collect()
}

fn trained(changes: &[&str]) -> Bench {
    let bench = Bench::new();
    bench.succeeds(&set(changes));
    bench
}

fn config(bench: &Bench) -> Value {
    serde_json::from_slice(&fs::read(bench.path("out/t/step_latest/config.json")).unwrap()).unwrap()
}

fn tensors(bench: &Bench) -> Vec<(String, Tensor)> {
    let mut tensors = Tensor::read_safetensors(bench.path("out/t/step_latest/model.safetensors")).unwrap();
    tensors.retain(|(name, _)| name != "embed_tokens.weight" && name != "lm_head.weight");
    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    tensors
}

fn assert_near(what: &str, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (a, b) in found.iter().zip(expected) {
        assert!((a - b).abs() < 1e-5 * b.abs().max(1.0), "{what}: {a} and {b}");
    }
}

#[test]
fn it_learns_drafts_and_is_saved_for_others() {
    let bench = trained(&[PEAGLE]);
    let losses = bench.losses();
    assert!(losses[STEPS - 1] < 0.95 * losses[0], "the loss does not fall: {losses:?}");
    let metrics = bench.metrics().pop().unwrap();
    for key in ["step_loss", "accuracy", "accept_rate", "valid_tokens"] {
        assert_eq!(metrics[key].as_array().map(Vec::len), Some(4), "{key}: {metrics}");
    }
    // Every depth has fewer rows than the one before.
    let rows: Vec<f64> =
        metrics["valid_tokens"].as_array().unwrap().iter().map(|n| n.as_f64().unwrap()).collect();
    assert!(rows.windows(2).all(|pair| pair[1] < pair[0] && pair[1] > 0.5 * pair[0]), "{rows:?}");
    assert!(["tau_greedy", "tau_probabilistic"].iter().all(|key| metrics[key].as_f64().unwrap() > 1.0));
    let config = config(&bench);
    assert_eq!(config["architectures"], json!(["Qwen3PEagleModel"]));
    assert_eq!((&config["num_depths"], &config["mask_token_id"]), (&json!(4), &json!(1023)));
    let (target, drafter) = (workspace().join("assets/tiny-target"), loads(&bench));
    assert_eq!(
        (drafter.draft_len(), drafter.has_confidence_head(), drafter.reads_hidden()),
        (4, false, false)
    );
    assert_eq!(greedy(&target, None), greedy(&target, Some(drafter)));
    // Sequences share a forward or have one each, whole or in segments; processes share a step.
    for more in ["train.local_batch_size=1", "drafter.peagle.segments=3"] {
        assert_near(more, &trained(&[PEAGLE, more]).losses(), &losses);
    }
    let two = Bench::new();
    two.succeeds(&[&["--processes=2", "--set=train.local_batch_size=1"], &set(&[PEAGLE])[..]].concat());
    assert_near("two processes", &two.losses(), &losses);
}

/// A resumed run samples the same masked positions.
#[test]
fn a_killed_run_ends_with_the_same_bytes() {
    let (whole, killed) = (trained(&[PEAGLE]), Bench::new());
    let mut child = start_until(&killed, 4, &set(&[PEAGLE]));
    child.kill().unwrap();
    child.wait().unwrap();
    killed.succeeds(&set(&[PEAGLE]));
    assert!(killed.result() == whole.result());
    // Another seed samples others.
    assert_ne!(trained(&[PEAGLE, "seed=9"]).losses(), whole.losses());
}

#[test]
fn parts_are_frozen_and_mistakes_are_named() {
    let from = trained(&[PEAGLE, "train.max_train_steps=3"]);
    let init = format!("train.init_from={}", from.path("out/t/step_3").display());
    for part in ["fusion", "mask_hidden", "layers", "norm"] {
        let bench = Bench::new();
        bench.succeeds(&set(&[PEAGLE, &init, &format!("train.freeze=[{part}]"), "train.max_train_steps=6"]));
        for ((name, before), (_, after)) in tensors(&from).iter().zip(tensors(&bench)) {
            let of = if name.starts_with("fc.") { "fusion" } else { name.split('.').next().unwrap() };
            // Weights of norms may change by less than bfloat16 tells.
            if of == part || before.dim() > 1 {
                assert_eq!(before.equal(&after), of == part, "{part} frozen: {name}");
            }
        }
    }
    let bench = Bench::new();
    let wrong = |changes: &[&str], hints: &[&str]| {
        bench.fails(&set(&[&[PEAGLE], changes].concat()), 2, hints);
    };
    wrong(&[&init, "train.freeze=[heads]"], &["P-EAGLE has no part `heads`", "`mask_hidden`"]);
    wrong(
        &[&init, "drafter.peagle.mask_token_id=5"],
        &["train.init_from", "mask_token_id 1023 there, 5 here"],
    );
    wrong(
        &[&init, "drafter.peagle.num_draft_layers=3"],
        &["train.init_from", "num_draft_layers 2 there, 3 here"],
    );
    wrong(&["drafter.peagle.num_depths=65"], &["drafter.peagle.num_depths", "64"]);
    wrong(
        &["drafter.peagle.mask_token_id=5000"],
        &["drafter.peagle.mask_token_id", "no token of the target"],
    );
    wrong(&["drafter.peagle.norms={output: true}"], &["drafter.peagle.norms.output", "one pass"]);
    wrong(
        &["drafter.peagle.norms={before_fc: true, fc: true}"],
        &["drafter.peagle.norms.fc", "only one of them"],
    );
    wrong(&["train.recompute=true"], &["train.recompute", "P-EAGLE keeps what its layers make"]);
    // An embedding of its own, as speculators trains it.
    let own = bench.path("own");
    fs::create_dir(&own).unwrap();
    let saved = from.path("out/t/step_3");
    fs::copy(saved.join("config.json"), own.join("config.json")).unwrap();
    let mut all = Tensor::read_safetensors(saved.join("model.safetensors")).unwrap();
    let embed = all.iter_mut().find(|(name, _)| name == "embed_tokens.weight").unwrap();
    embed.1 = &embed.1 * 2.0;
    save(&own.join("model.safetensors"), &all, Kind::BFloat16).unwrap();
    let own = format!("train.init_from={}", own.display());
    wrong(&[&own], &["train.init_from", "`embed_tokens.weight` is another than that of"]);
    // The number of depths may change.
    Bench::new().succeeds(&set(&[PEAGLE, &init, "drafter.peagle.num_depths=6", "train.max_train_steps=2"]));
}

/// A Gemma 4 and a Llama target that compute their states while their drafters train, and a reduced vocabulary.
#[test]
fn other_families_and_reduced_vocabularies_have_drafters() {
    for family in ["gemma4", "llama"] {
        let bench = Bench::new();
        let dir = bench.path(family);
        fs::create_dir(&dir).unwrap();
        if family == "llama" {
            tiny::llama(&dir)
        } else {
            tiny::gemma4(&dir, 512)
        }
        let target = format!("target={{model: {}, layer_ids: [0, 1]}}", dir.display());
        let input = format!("data.input=['{}']", bench.path("rows.jsonl").display());
        let marks = "data.chat_template={name: mine, assistant_header: \"<|im_start|>assistant\\n\", end_of_turn: \"<|im_end|>\\n\"}";
        let changes = [
            target.as_str(),
            PEAGLE,
            "drafter.peagle.mask_token_id=4",
            &input,
            if family == "llama" { marks } else { "data.chat_template=gemma4" },
            "data.states=online",
            "data.max_length=512",
            "train.max_train_steps=4",
        ];
        bench.succeeds(&set(&changes));
        let class = if family == "llama" { "LlamaPEagleModel" } else { "Gemma4PEagleModel" };
        assert_eq!(config(&bench)["architectures"], json!([class]));
        assert_eq!(greedy(&dir, None), greedy(&dir, Some(loads(&bench))), "{family}");
    }
    let bench = Bench::new();
    let file = bench.path("vocab.safetensors");
    let counts: Vec<u64> = (0..1024).map(|id| u64::from(id % 5 != 0)).collect();
    DraftVocab::most_frequent(&counts, 512).unwrap().write(&file).unwrap();
    bench.succeeds(&set(&[PEAGLE, &format!("drafter.peagle.draft_vocab='{}'", file.display())]));
    let losses = bench.losses();
    assert!(losses[STEPS - 1] < 0.95 * losses[0], "the loss does not fall: {losses:?}");
    let target = workspace().join("assets/tiny-target");
    assert_eq!(greedy(&target, None), greedy(&target, Some(loads(&bench))));
}
