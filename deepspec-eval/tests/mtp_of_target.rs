//! MTP layers in a target's own checkpoint: `run --draft mtp`, `checkpoint extract-mtp` and `checkpoint merge-mtp`.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::training::{Lessons, smoke, write_mtp_drafter};
use common::{Answers, answered_rows, answers, assert_refused, deepspec_eval, program, repository, results};
use deepspec_testkit::tiny;
use serde_json::{Value, json};
use tch::Tensor;

/// Answers and results of a greedy run.
fn evaluated(target: &Path, draft: &str, out: &Path) -> (Answers, Value) {
    let suites = repository("eval_datasets");
    let mut args = vec!["--quiet", "run", "--device", "cpu", "--dtype", "float32", "--temperature", "0"];
    args.extend(["--target", target.to_str().unwrap(), "--draft", draft, "--limit", "2", "--no-baseline"]);
    args.extend(["--suites-dir", suites.to_str().unwrap(), "--max-new-tokens", "32", "--max-num-seqs", "2"]);
    args.extend(["--suite", "smoke-math", "--suite", "smoke-code", "--suite", "smoke-chat"]);
    args.extend(["--output-dir", out.to_str().unwrap()]);
    let output = deepspec_eval(&args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    (answers(out), results(out))
}

/// τ of a run.
fn accepted_length(found: &Value) -> f64 {
    found["overall"]["accepted_length"].as_f64().unwrap()
}

#[test]
fn a_merged_layer_drafts_as_its_drafter_does() {
    check_merged_layer("qwen3_5", "Qwen3_5MTPModel");
}

#[test]
fn a_merged_layer_with_experts_drafts_as_its_drafter_does() {
    check_merged_layer("qwen3_5_moe", "Qwen3_5MoeMTPModel");
}

/// The drafter's tensor `name` in a merged target, in which two tensors hold all experts.
fn merged_tensor(merged: &[(String, Tensor)], name: &str) -> Tensor {
    let find = |name: &str| {
        let found = merged.iter().find(|(known, _)| known == &format!("mtp.{name}"));
        found.unwrap_or_else(|| panic!("no {name}")).1.shallow_clone()
    };
    let Some((module, expert)) = name.split_once(".experts.") else { return find(name) };
    let [expert, projection, _] = expert.split('.').collect::<Vec<_>>()[..] else { panic!("{name}") };
    let of = |stacked: &str| find(&format!("{module}.experts.{stacked}")).get(expert.parse().unwrap());
    match projection {
        "gate_proj" => of("gate_up_proj").chunk(2, 0).swap_remove(0),
        "up_proj" => of("gate_up_proj").chunk(2, 0).swap_remove(1),
        _ => of("down_proj"),
    }
}

/// Trains, merges, evaluates and trains on a drafter for a random target of this family. `class` is the drafter's.
fn check_merged_layer(family: &str, class: &str) {
    let root = tempfile::tempdir().unwrap();
    let dir = |name: &str| root.path().join(name);
    let (target, drafter, merged) = (dir("target"), dir("drafter"), dir("merged"));
    fs::create_dir(&target).unwrap();
    tiny::target(&target, family);
    let text = |path: &Path| path.display().to_string();

    // 1. The random target stores no whole MTP layer.
    let bare = deepspec_eval(&[
        "checkpoint",
        "extract-mtp",
        "--target",
        &text(&target),
        "--output-dir",
        &text(&dir("x")),
    ]);
    assert_refused(&bare, 1, &["mtp.", "missing"]);

    // 2. The drafter becomes the target's MTP layer, and nothing else changes.
    let lessons =
        Lessons { target: target.clone(), suites: smoke(), rows: 0..2, tokens: 32, thinking: false };
    write_mtp_drafter(&lessons, &drafter, 150);
    let merge = |from: &Path, into: &Path, out: &Path| {
        let [from, into, out] = [from, into, out].map(text);
        deepspec_eval(&["checkpoint", "merge-mtp", "--draft", &from, "--target", &into, "--output-dir", &out])
    };
    let output = merge(&drafter, &target, &merged);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && told.contains("\"method\": \"mtp\""), "{told}");
    let tensors = |dir: &Path| Tensor::read_safetensors(dir.join("model.safetensors")).unwrap();
    let (old, new, trained) = (tensors(&target), tensors(&merged), tensors(&drafter));
    let find = |name: &str| &new.iter().find(|(known, _)| known == name).unwrap().1;
    let others: Vec<_> = old.iter().filter(|(name, _)| !name.starts_with("mtp.")).collect();
    assert!(others.iter().all(|(name, tensor)| find(name).equal(tensor)));
    let is_end = |name: &str| name == "embed_tokens.weight" || name == "lm_head.weight";
    let of_layer: Vec<_> = trained.iter().filter(|(name, _)| !is_end(name)).collect();
    assert!(of_layer.iter().all(|(name, tensor)| merged_tensor(&new, name).equal(tensor)));
    let added: Vec<_> = new.iter().filter(|(name, _)| name.starts_with("mtp.")).collect();
    let values = |of: &[&(String, Tensor)]| of.iter().map(|(_, tensor)| tensor.numel()).sum::<usize>();
    assert_eq!(values(&added), values(&of_layer));
    assert_eq!(new.len(), others.len() + added.len());
    assert!(merged.join("tokenizer.json").is_file());
    // Engines count the layers by this key, which the target lacks.
    let config =
        |dir: &Path| serde_json::from_slice::<Value>(&fs::read(dir.join("config.json")).unwrap()).unwrap();
    let mut expected = config(&target);
    let layers = &mut expected["text_config"]["mtp_num_hidden_layers"];
    assert!(layers.is_null());
    *layers = 1.into();
    assert_eq!(config(&merged), expected);
    // A drafter of another kind is refused.
    assert_refused(&merge(&repository("assets/tiny-dspark"), &target, &merged), 2, &["DSpark", class]);

    // 3. It drafts as the drafter does, and answers are those of plain decoding.
    let (plain, _) = evaluated(&merged, "none", &dir("plain"));
    let (from_folder, folder) = evaluated(&target, &text(&drafter), &dir("folder"));
    let (from_target, own) = evaluated(&merged, "mtp", &dir("own"));
    assert_eq!(plain.len(), 6);
    assert!(plain == from_folder && plain == from_target);
    let tau = accepted_length(&own);
    assert!(tau > 1.5, "the drafter is too bad to show anything: τ {tau}");
    let counts = |found: &Value| -> Vec<Value> {
        found["suites"].as_array().unwrap().iter().map(|suite| suite["counts"].clone()).collect()
    };
    assert_eq!(counts(&own), counts(&folder));

    // 4. Training starts from the extracted layer, whose folder the run leaves, and the target takes the trained one. After so few
    // steps the layer has much left to learn.
    let [beginner, begun, again] = ["beginner", "begun", "again"].map(dir);
    write_mtp_drafter(&lessons, &beginner, 30);
    assert!(merge(&beginner, &target, &begun).status.success());
    let (_, found) = evaluated(&begun, "mtp", &dir("begun-run"));
    let before = accepted_length(&found);
    fs::write(dir("rows.jsonl"), answered_rows(&dir("plain"))).unwrap();
    let tuned = fine_tuned(root.path(), &begun, &dir("begun-run").join("mtp"));
    assert!(merge(&tuned, &begun, &again).status.success());
    let (changed, learned) = (tensors(&again), tensors(&tuned));
    for name in ["fc.weight", "layers.0.post_attention_layernorm.weight"] {
        let (_, learned) = learned.iter().find(|(known, _)| known == name).unwrap();
        assert!(merged_tensor(&changed, name).equal(learned), "{name}");
    }
    let (from_tuned, found) = evaluated(&again, "mtp", &dir("tuned-run"));
    assert_eq!(from_tuned, plain);
    let after = accepted_length(&found);
    assert!(after > before + 0.5, "training did not improve the layer: τ {before}, then {after}");
    // From random weights these steps reach about 2.7.
    assert!(after > 3.0, "training began elsewhere: τ {after}");

    // 5. The doctor finds nothing wrong.
    let [suites, target, drafter] = [&repository("eval_datasets"), &target, &tuned].map(|path| text(path));
    let output = deepspec_eval(
        &[
            &["checkpoint", "doctor", "--json", "--device", "cpu", "--temperature", "0", "--limit", "2"][..],
            &["--suites-dir", &suites, "--max-new-tokens", "32", "--target", &target, "--draft", &drafter],
        ]
        .concat(),
    );
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(report["cause"].is_null() && report["estimated"].as_f64().unwrap() > 1.5, "{report:#}");
}

#[test]
fn targets_without_an_mtp_layer_of_their_own_are_refused() {
    let out = tempfile::tempdir().unwrap();
    let [target, draft] = ["assets/tiny-target", "assets/tiny-dspark"].map(repository);
    let [target, draft] = [&target, &draft].map(|path| path.to_str().unwrap());
    let out = out.path().join("refused");
    let places = ["--target", target, "--output-dir", out.to_str().unwrap()];
    for command in [
        &["checkpoint", "merge-mtp", "--draft", draft][..],
        &["checkpoint", "extract-mtp"],
        &["run", "--draft", "mtp", "--suite", "smoke-math"],
    ] {
        let refused = deepspec_eval(&[command, &places].concat());
        assert_refused(&refused, 2, &["Qwen3 hold no MTP layer that is read", "Qwen3.5-MoE do"]);
    }
}

/// Trains the MTP layer in `from` on the rows in `root`, with states that `target` computes. Returns the checkpoint.
fn fine_tuned(root: &Path, target: &Path, from: &Path) -> PathBuf {
    let recipe = json!({
        "name": "tuned",
        "target": {"model": target},
        "drafter": {"mtp": {"num_speculative_steps": 3}},
        "data": {"states": "online", "input": [root.join("rows.jsonl")], "chat_template": "qwen", "max_length": 256},
        "train": {
            "lr": 6e-3, "precision": "fp32", "local_batch_size": 3, "global_batch_size": 3, "max_train_steps": 40,
            "init_from": from,
        },
        "logging": {"logging_steps": 10, "checkpointing_steps": 40, "output_dir": root.join("runs")},
    });
    let file = root.join("recipe.yaml");
    fs::write(&file, recipe.to_string()).unwrap();
    let mut training = program("deepspec-train");
    training.env("OMP_NUM_THREADS", "1").arg("--config").arg(&file).args(["--device", "cpu"]);
    let output = training.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    root.join("runs/tuned/step_latest")
}
