//! SGLang's own code reads the files that are written for SGLang.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::{deepspec_eval, drafter_config, repository, run_ok, target_dir, write_domino, write_drafter};
use deepspec_core::{SlotTarget, Tap};
use deepspec_models::{ModelConfig, load_embed_and_head};
use deepspec_testkit::skip;
use serde_json::{Value, json};
use tch::{Device, Kind};
use tempfile::tempdir;

/// The output of `sglang.py`.
fn sglang(python: &str, arguments: &[&str]) -> Value {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sglang.py");
    let output = Command::new(python).arg(script).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn ok(args: &[&str]) {
    let output = deepspec_eval(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn its_reader_of_costs_and_temperatures_takes_ours_and_ours_takes_its() {
    let Some(python) = skip::speculators_python("sglang") else { return };
    let dir = tempdir().unwrap();
    let [recorded, costs, out, probes, table] =
        ["run", "costs.csv", "out", "probes.json", "table.json"].map(|name| dir.path().join(name));
    let drafter = repository("assets/tiny-dspark");
    run_ok(
        drafter.to_str().unwrap(),
        &recorded,
        &["--no-baseline", "--temperature", "0", "--limit", "4", "--json"],
    );
    // Seconds 1 + tokens/64, in ms: linear interpolation between the measured points is exact.
    fs::write(&costs, "batch_tokens,seconds\n1,0.001015625\n64,0.002\n128,0.003\n").unwrap();
    let simulate = |costs: &Path, out: &Path, more: &[&str]| {
        let [from, costs, out] = [&recorded, costs, out].map(|path| path.to_str().unwrap());
        let args =
            ["simulate", "--quiet", from, "--cost", costs, "--output-dir", out, "--concurrency", "1,4"];
        ok(&[&args[..], &["--cycles", "500"], more].concat());
    };
    simulate(&costs, &out, &["--emit"]);
    let [cost, temperatures] = ["sglang-cost.json", "sglang-sts.json"].map(|name| out.join(name));
    let files = [cost.to_str().unwrap(), temperatures.to_str().unwrap()];
    let steps = [(1, 0), (1, 7), (4, 20), (16, 100)];
    let asked = steps.map(|(requests, budget)| format!("{requests}:{budget}"));
    let asked: Vec<&str> = asked.iter().map(String::as_str).collect();
    let found = sglang(&python, &[&["costs"][..], &files, &asked].concat());
    for ((requests, budget), seconds) in steps.iter().zip(found["seconds"].as_array().unwrap()) {
        let expected = 1e-3 * (1.0 + f64::from(requests + budget) / 64.0);
        let seconds = seconds.as_f64().unwrap();
        assert!((seconds / expected - 1.0).abs() < 1e-6, "{requests} + {budget}: {seconds} for {expected}");
    }
    assert_eq!(found["temperatures"], json!(vec![1.0; 7]));

    fs::write(&probes, json!([[8, 900.0], [1, 1000.0], [64, 500.0]]).to_string()).unwrap();
    let its = sglang(&python, &["table", probes.to_str().unwrap()]);
    fs::write(&table, its.to_string()).unwrap();
    simulate(&table, &dir.path().join("by-its-table"), &[]);
}

#[test]
fn its_reader_of_drafters_finds_what_was_converted() {
    let Some(python) = skip::speculators_python("sglang") else { return };
    let dir = tempdir().unwrap();
    let own = repository("assets/tiny-dspark");
    let out = dir.path().join("dspark");
    let target = target_dir();
    let [from, target, to] = [&own, &target, &out].map(|path| path.to_str().unwrap());
    ok(&["checkpoint", "convert", "--from", from, "--to", "sglang", "--target", target, "--output-dir", to]);
    let ours: Value = serde_json::from_slice(&fs::read(own.join("config.json")).unwrap()).unwrap();
    let found = sglang(&python, &["draft", out.join("config.json").to_str().unwrap()]);
    for (its, key) in [
        ("gamma", "block_size"),
        ("target_layer_ids", "target_layer_ids"),
        ("mask_token_id", "mask_token_id"),
        ("markov_rank", "markov_rank"),
        ("markov_head_type", "markov_head_type"),
        ("layers", "num_hidden_layers"),
        ("target_layers", "num_target_layers"),
    ] {
        assert_eq!(found[its], ours[key], "{key}: {found}");
    }
    assert_eq!(found["sample_from_anchor"], true, "{found}");
}

#[test]
fn its_reader_of_block_drafters_finds_a_converted_domino() {
    let Some(python) = skip::speculators_python("sglang") else { return };
    let dir = tempdir().unwrap();
    let [own, out] = ["own", "out"].map(|name| dir.path().join(name));
    write_domino(&own);
    let mut ours: Value = serde_json::from_slice(&fs::read(own.join("config.json")).unwrap()).unwrap();
    ours["target_layer_ids"] = json!([0, 2, 4]);
    fs::write(own.join("config.json"), ours.to_string()).unwrap();
    let target = target_dir();
    let [from, target, to] = [&own, &target, &out].map(|path| path.to_str().unwrap());
    ok(&["checkpoint", "convert", "--from", from, "--to", "sglang", "--target", target, "--output-dir", to]);
    let found = sglang(&python, &["block", out.join("config.json").to_str().unwrap()])[0].clone();
    for (its, key) in [
        ("block_size", "block_size"),
        ("target_layer_ids", "target_layer_ids"),
        ("mask_token_id", "mask_token_id"),
        ("gru_hidden_dim", "gru_hidden_dim"),
        ("emb_dim", "emb_dim"),
        ("layers", "num_hidden_layers"),
        ("target_layers", "num_target_layers"),
    ] {
        assert_eq!(found[its], ours[key], "{key}: {found}");
    }
    assert_eq!((&found["domino"], &found["shift_label"]), (&json!(true), &json!(true)), "{found}");
}

/// A DSpark is written in the reference's layout, and a DFlash whose slots fill in in z-lab's.
#[test]
fn its_readers_of_layers_find_converted_causal_blocks_and_attention_sinks() {
    let Some(python) = skip::speculators_python("sglang") else { return };
    let dir = tempdir().unwrap();
    let target = target_dir();
    let model = ModelConfig::load(&target).unwrap();
    let (embed, head) = load_embed_and_head(&target, &model, Device::Cpu, Kind::Float).unwrap();
    let written = |name: &str, slots: SlotTarget, has_options: bool| {
        let mut config = drafter_config();
        config.decoder.taps = Tap::from_layer_ids([0, 2, 4]).unwrap();
        (config.settings.blocks.slots, config.settings.blocks.causal) = (slots, has_options);
        if slots == SlotTarget::FillIn {
            (config.settings.markov, config.settings.confidence) = (None, None);
        }
        if has_options {
            config.decoder.model = config.decoder.model.with_attention_sinks().unwrap();
        }
        let [own, out] = ["own", "out"].map(|part| dir.path().join(format!("{name}-{part}")));
        write_drafter(&own, config, |name, tensor| match name {
            "embed_tokens.weight" => embed.shallow_clone(),
            "lm_head.weight" => head.shallow_clone(),
            _ => tensor,
        });
        let [from, target, to] = [&own, &target, &out].map(|path| path.to_str().unwrap());
        ok(&[
            "checkpoint",
            "convert",
            "--from",
            from,
            "--to",
            "sglang",
            "--target",
            target,
            "--output-dir",
            to,
        ]);
        out.join("config.json").to_str().unwrap().to_string()
    };
    let configs = [
        written("dspark", SlotTarget::AnchorPredicts, true),
        written("dflash", SlotTarget::FillIn, true),
        written("plain", SlotTarget::AnchorPredicts, false),
    ];
    let arguments: Vec<&str> = std::iter::once("block").chain(configs.iter().map(String::as_str)).collect();
    let found = sglang(&python, &arguments);
    for (found, expected) in found.as_array().unwrap().iter().zip([true, true, false]) {
        assert_eq!((&found["sinks"], &found["causal"]), (&json!(expected), &json!([expected])), "{found}");
    }
}
