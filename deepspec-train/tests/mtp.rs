//! The built binary with MTP-1: states from any cache with all final states, and beside a target.

mod common;

use std::fs;

use common::decoding::{greedy, loads};
use common::{Bench, STEPS, start_until, workspace};
use deepspec_testkit::tiny;
use serde_json::{Value, json};

const MTP: [&str; 4] = ["--set", "drafter={mtp: {}}", "--set", "target.layer_ids=[]"];

fn with<'a>(changes: &[&'a str]) -> Vec<&'a str> {
    MTP.into_iter().chain(changes.iter().flat_map(|change| ["--set", change])).collect()
}

fn trained(changes: &[&str]) -> Bench {
    let bench = Bench::with_all_final_states();
    bench.succeeds(&with(changes));
    bench
}

fn config(bench: &Bench) -> Value {
    serde_json::from_slice(&fs::read(bench.path("out/t/step_latest/config.json")).unwrap()).unwrap()
}

#[test]
fn it_learns_drafts_and_is_saved_for_others() {
    let bench = trained(&[]);
    let losses = bench.losses();
    assert!(losses[STEPS - 1] < 0.95 * losses[0], "the loss does not fall: {losses:?}");
    let metrics = bench.metrics().pop().unwrap();
    for key in ["step_loss", "accuracy", "accept_rate", "valid_tokens"] {
        assert_eq!(metrics[key].as_array().map(Vec::len), Some(3), "{key}: {metrics}");
    }
    assert!(["tau_greedy", "tau_probabilistic"].iter().all(|key| metrics[key].as_f64().unwrap() > 1.0));
    let config = config(&bench);
    assert_eq!(
        (&config["architectures"], &config["target_layer_ids"]),
        (&json!(["Qwen3MTPModel"]), &json!([]))
    );
    assert_eq!((&config["num_speculative_steps"], &config["step_weight_beta"]), (&json!(3), &json!(0.6)));
    let (target, drafter) = (workspace().join("assets/tiny-target"), loads(&bench));
    assert_eq!((drafter.taps(), drafter.draft_len(), drafter.reads_hidden()), (&[][..], 3, true));
    assert_eq!(greedy(&target, None), greedy(&target, Some(drafter)));
    // Sequences share a forward, or have one each.
    let split = trained(&["train.local_batch_size=1"]);
    for (a, b) in losses.iter().zip(split.losses()) {
        assert!((a - b).abs() < 1e-5 * a.abs().max(1.0), "{a} and {b}");
    }
}

#[test]
fn a_killed_run_ends_with_the_same_bytes() {
    let (whole, killed) = (trained(&[]), Bench::with_all_final_states());
    let mut child = start_until(&killed, 4, &with(&[]));
    child.kill().unwrap();
    child.wait().unwrap();
    killed.succeeds(&with(&[]));
    assert!(killed.result() == whole.result());
}

/// The taps of a cache are not read. States that are computed while training, or stored without
/// taps, are the same ones.
#[test]
fn states_from_anywhere_train_alike() {
    let cached = trained(&[]);
    for states in ["online", "hybrid"] {
        let bench = Bench::new();
        let written = bench.path("written");
        let storage =
            if states == "online" { states.into() } else { format!("{{hybrid: '{}'}}", written.display()) };
        let (storage, input) = (
            format!("data.states={storage}"),
            format!("data.input=['{}']", bench.path("rows.jsonl").display()),
        );
        // Several epochs; a hybrid reads the later ones from its folder.
        bench.succeeds(&with(&[&storage, &input]));
        for (a, b) in cached.losses().iter().zip(bench.losses()) {
            assert!((a - b).abs() < 1e-4 * a, "{states}: {a} and {b}");
        }
        assert_eq!(written.exists(), states == "hybrid");
        if written.exists() {
            let manifest: Value =
                serde_json::from_slice(&fs::read(written.join("manifest.json")).unwrap()).unwrap();
            assert_eq!((&manifest["identity"]["taps"], &manifest["last"]), (&json!([]), &json!("all")));
            let stored = format!("data.states={{cache: '{}'}}", written.display());
            let again = Bench::new();
            again.succeeds(&with(&[&stored]));
            assert!(again.losses().len() == STEPS);
        }
    }
}

#[test]
fn mistakes_are_named() {
    let bench = Bench::new();
    bench.fails(&with(&[]), 2, &["cache", "supervised", "all"]);
    bench.fails(&["--set", "drafter={mtp: {}}"], 2, &["`target.layer_ids`", "no layers; leave it out"]);
    let bench = Bench::with_all_final_states();
    bench.fails(&["--set", "target.layer_ids=[]"], 2, &["`target.layer_ids`", "DSpark reads layers"]);
    bench.fails(
        &with(&["drafter.mtp.num_speculative_steps=65"]),
        2,
        &["drafter.mtp.num_speculative_steps", "64"],
    );
    let from = trained(&["train.max_train_steps=3"]);
    let init = format!("train.init_from={}", from.path("out/t/step_3").display());
    let frozen = |part: &str| format!("train.freeze=[{part}]");
    bench.fails(&with(&[&init, &frozen("backbone")]), 2, &["MTP-1 has no part `backbone`", "`fusion`"]);
    bench.succeeds(&with(&[&init, &frozen("fusion, layers"), "train.max_train_steps=2"]));
}

/// A Gemma 4, a Llama and a Granite target that compute their states while their drafters train.
#[test]
fn other_families_have_drafters() {
    for family in ["gemma4", "llama", "granite"] {
        let bench = Bench::new();
        let dir = bench.path(family);
        fs::create_dir(&dir).unwrap();
        match family {
            "llama" => tiny::llama(&dir),
            "granite" => tiny::target(&dir, family),
            _ => tiny::gemma4(&dir, 512),
        }
        let target = format!("target={{model: {}}}", dir.display());
        let input = format!("data.input=['{}']", bench.path("rows.jsonl").display());
        let marks = "data.chat_template={name: mine, assistant_header: \"<|im_start|>assistant\\n\", end_of_turn: \"<|im_end|>\\n\"}";
        let template = if family == "gemma4" { "data.chat_template=gemma4" } else { marks };
        let changes = [
            &target,
            "drafter={mtp: {}}",
            &input,
            template,
            "data.states=online",
            "data.max_length=512",
            "train.max_train_steps=4",
        ];
        bench.succeeds(&changes.iter().flat_map(|change| ["--set", change]).collect::<Vec<_>>());
        let class = if family == "gemma4" { "Gemma4MTPModel" } else { "LlamaMTPModel" };
        assert_eq!(config(&bench)["architectures"], json!([class]));
        assert_eq!(greedy(&dir, None), greedy(&dir, Some(loads(&bench))), "{family}");
    }
}
