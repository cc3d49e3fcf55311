//! MTP layers in a target's own checkpoint: `run --draft mtp`, `checkpoint extract-mtp` and `checkpoint merge-mtp`.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::training::{Lessons, smoke, write_mtp_drafter};
use common::{
    Answers, answers, assert_refused, conversation_rows, deepspec_eval, program, repository, results,
};
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

#[test]
fn a_merged_layer_drafts_as_its_drafter_does() {
    let root = tempfile::tempdir().unwrap();
    let dir = |name: &str| root.path().join(name);
    let (target, drafter, merged) = (dir("target"), dir("drafter"), dir("merged"));
    fs::create_dir(&target).unwrap();
    tiny::target(&target, "qwen3_5");
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
    let merge = |from: &Path| {
        let [from, target, out] = [from, &target, &merged].map(text);
        deepspec_eval(&[
            "checkpoint",
            "merge-mtp",
            "--draft",
            &from,
            "--target",
            &target,
            "--output-dir",
            &out,
        ])
    };
    let output = merge(&drafter);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && told.contains("\"method\": \"mtp\""), "{told}");
    let tensors = |dir: &Path| Tensor::read_safetensors(dir.join("model.safetensors")).unwrap();
    let (old, new, own) = (tensors(&target), tensors(&merged), tensors(&drafter));
    let find = |name: &str| &new.iter().find(|(known, _)| known == name).unwrap().1;
    let others: Vec<_> = old.iter().filter(|(name, _)| !name.starts_with("mtp.")).collect();
    assert!(others.iter().all(|(name, tensor)| find(name).equal(tensor)));
    let of_layer = own.iter().filter(|(name, _)| name != "embed_tokens.weight" && name != "lm_head.weight");
    assert!(of_layer.clone().all(|(name, tensor)| find(&format!("mtp.{name}")).equal(tensor)));
    assert_eq!(new.len(), others.len() + of_layer.count());
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
    assert_refused(&merge(&repository("assets/tiny-dspark")), 2, &["DSpark", "Qwen3_5MTPModel"]);

    // 3. It drafts as the drafter does, and answers are those of plain decoding.
    let (plain, _) = evaluated(&merged, "none", &dir("plain"));
    let (from_folder, folder) = evaluated(&target, &text(&drafter), &dir("folder"));
    let (from_target, own) = evaluated(&merged, "mtp", &dir("own"));
    assert_eq!(plain.len(), 6);
    assert!(plain == from_folder && plain == from_target);
    let tau = own["overall"]["accepted_length"].as_f64().unwrap();
    assert!(tau > 1.5, "the drafter is too bad to show anything: τ {tau}");
    let counts = |found: &Value| -> Vec<Value> {
        found["suites"].as_array().unwrap().iter().map(|suite| suite["counts"].clone()).collect()
    };
    assert_eq!(counts(&own), counts(&folder));

    // 4. Training starts from the extracted layer, whose folder the run leaves, and the target takes the trained one.
    let tuned = fine_tuned(root.path(), &merged, &dir("own").join("mtp"));
    let again = dir("again");
    let [from, into, out] = [&tuned, &merged, &again].map(|path| text(path));
    let output = deepspec_eval(&[
        "checkpoint",
        "merge-mtp",
        "--draft",
        &from,
        "--target",
        &into,
        "--output-dir",
        &out,
    ]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (changed, learned) = (tensors(&again), tensors(&tuned));
    let fusion = |of: &[(String, Tensor)], name: &str| {
        of.iter().find(|(known, _)| known == name).unwrap().1.shallow_clone()
    };
    assert!(fusion(&changed, "mtp.fc.weight").equal(&fusion(&learned, "fc.weight")));
    assert!(!fusion(&changed, "mtp.fc.weight").equal(find("mtp.fc.weight")));
    let (from_tuned, found) = evaluated(&again, "mtp", &dir("tuned-run"));
    assert_eq!(from_tuned, plain);
    let after = found["overall"]["accepted_length"].as_f64().unwrap();
    assert!(after > 1.5, "training began elsewhere: τ {after}");

    // 5. MTP layers with experts are not read.
    let mixture = dir("mixture");
    fs::create_dir(&mixture).unwrap();
    tiny::target(&mixture, "qwen3_5_moe");
    let [mixture, drafter, out] = [&mixture, &drafter, &dir("refused")].map(|path| text(path));
    let into_mixture = ["--target", &mixture, "--output-dir", &out];
    for command in [
        &["checkpoint", "merge-mtp", "--draft", &drafter][..],
        &["checkpoint", "extract-mtp"],
        &["run", "--draft", "mtp", "--suite", "smoke-math"],
    ] {
        let refused = deepspec_eval(&[command, &into_mixture].concat());
        assert_refused(&refused, 2, &["Qwen3.5-MoE hold no MTP layer that is read"]);
    }
}

/// Trains the MTP layer in `from` for a few steps, with states that `target` computes. Returns the checkpoint.
fn fine_tuned(root: &Path, target: &Path, from: &Path) -> PathBuf {
    fs::write(root.join("rows.jsonl"), conversation_rows(4)).unwrap();
    let recipe = json!({
        "name": "tuned",
        "target": {"model": target},
        "drafter": {"mtp": {"num_speculative_steps": 3}},
        "data": {"states": "online", "input": [root.join("rows.jsonl")], "chat_template": "qwen", "max_length": 256},
        "train": {
            "lr": 1e-5, "precision": "fp32", "local_batch_size": 2, "global_batch_size": 2, "max_train_steps": 2,
            "init_from": from,
        },
        "logging": {"logging_steps": 1, "checkpointing_steps": 2, "output_dir": root.join("runs")},
    });
    let file = root.join("recipe.yaml");
    fs::write(&file, recipe.to_string()).unwrap();
    let output =
        program("deepspec-train").arg("--config").arg(&file).args(["--device", "cpu"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    root.join("runs/tuned/step_latest")
}
