//! `transfer`: the toy drafter with its target and with a perturbed copy of it.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use common::{
    assert_refused, deepspec_eval, repository, results, target_dir, write_eagle3_with_vocab, write_peagle,
};
use deepspec_checkpoint::DraftVocab;
use deepspec_testkit::noise;
use serde_json::{Value, json};
use tch::{Kind, Tensor};

/// Writes a copy of the toy target whose tensors `edit` changes.
fn copy_of_target(dir: &Path, edit: impl Fn(&str, &Tensor) -> Tensor) {
    fs::create_dir_all(dir).unwrap();
    for entry in fs::read_dir(target_dir()).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.join(path.file_name().unwrap())).unwrap();
    }
    edit_tensors(dir, edit);
}

/// Changes the tensors of a checkpoint.
fn edit_tensors(dir: &Path, edit: impl Fn(&str, &Tensor) -> Tensor) {
    let file = dir.join("model.safetensors");
    let weights = Tensor::read_safetensors(&file).unwrap();
    // Copies, for the tensors that were read may map the file.
    let edited: Vec<(String, Tensor)> =
        weights.iter().map(|(name, tensor)| (name.clone(), edit(name, tensor).copy())).collect();
    Tensor::write_safetensors(&edited, &file).unwrap();
}

/// Writes a copy of the toy target whose token `id` is `token`.
fn with_token(dir: &Path, id: i64, token: &str) {
    copy_of_target(dir, |_, tensor| tensor.shallow_clone());
    let file = dir.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    added.iter_mut().find(|token| token["id"] == id).unwrap()["content"] = json!(token);
    fs::write(file, tokenizer.to_string()).unwrap();
}

/// As after fine-tuning: seeded noise of `share` of the norm in the MLPs of all layers, and in the first 64 rows of the embedding.
fn fine_tuned(dir: &Path, share: f64) {
    copy_of_target(dir, |name, tensor| {
        if !name.contains("mlp.") && !name.contains("embed_tokens") {
            return tensor.shallow_clone();
        }
        let wide = tensor.to_kind(Kind::Float);
        let added = Tensor::from_slice(&noise(name.len() as u64, wide.numel())).view(wide.size().as_slice());
        let added = if name.contains("embed_tokens") {
            let rows = Tensor::arange(wide.size()[0], (Kind::Int64, tch::Device::Cpu)).lt(64).unsqueeze(1);
            added * rows
        } else {
            added
        };
        let scale = share * wide.norm().double_value(&[]) / added.norm().double_value(&[]);
        (wide + added * scale).to_kind(tensor.kind())
    });
}

fn transfer(target: &Path, base: Option<&Path>, output_dir: &Path, more: &[&str]) -> Output {
    transfer_of(&repository("assets/tiny-dspark"), target, base, output_dir, more)
}

fn transfer_of(draft: &Path, target: &Path, base: Option<&Path>, output_dir: &Path, more: &[&str]) -> Output {
    let suites = repository("eval_datasets");
    let mut args = vec!["transfer", "--quiet", "--device", "cpu", "--dtype", "float32", "--temperature", "0"];
    args.extend(["--draft", draft.to_str().unwrap(), "--target", target.to_str().unwrap()]);
    args.extend(base.iter().flat_map(|base| ["--base", base.to_str().unwrap()]));
    args.extend(["--suites-dir", suites.to_str().unwrap(), "--output-dir", output_dir.to_str().unwrap()]);
    args.extend(["smoke-math", "smoke-code"]);
    for (flag, value) in [("--limit", "4"), ("--max-new-tokens", "48")] {
        args.extend([flag, value].iter().filter(|_| !more.contains(&flag)));
    }
    args.extend(more);
    deepspec_eval(&args)
}

fn succeeds(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The text with one space between words, for it is wrapped.
fn unwrapped(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn a_fine_tuned_target_keeps_a_share_and_its_own_base_keeps_all() {
    let root = tempfile::tempdir().unwrap();
    let (tuned, base): (PathBuf, PathBuf) = (root.path().join("tuned"), target_dir());
    fine_tuned(&tuned, 0.35);
    let out = root.path().join("out");
    let table = succeeds(transfer(&tuned, Some(&base), &out, &[]));
    let found: Value = serde_json::from_slice(&fs::read(out.join("transfer.json")).unwrap()).unwrap();
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
    let number = |value: &Value| value.as_f64().unwrap();
    for (folder, column) in [("base", "base"), ("target", "target")] {
        let run = results(&out.join(folder));
        let tau = |row: &Value| number(&row["metrics"]["accepted_length"]);
        for (row, suite) in found["suites"].as_array().unwrap().iter().zip(run["suites"].as_array().unwrap())
        {
            assert_eq!(row["name"], suite["name"]);
            assert_eq!(number(&row[column]["value"]), tau(suite));
            assert_eq!(row[column]["interval"], suite["metrics"]["accepted_length_interval"]);
        }
        assert_eq!(number(&found["overall"][column]["value"]), number(&run["overall"]["accepted_length"]));
    }
    for row in found["suites"].as_array().unwrap().iter().chain([&found["overall"]]) {
        let (old, new) = (number(&row["base"]["value"]), number(&row["target"]["value"]));
        let kept = number(&row["kept"]["value"]);
        assert!((kept - (new - 1.0) / (old - 1.0)).abs() < 1e-9 && kept < 0.9 && new < old, "{row}");
        let (low, high) = (number(&row["kept"]["interval"]["low"]), number(&row["kept"]["interval"]["high"]));
        assert!(low < high && low <= kept && kept <= high, "{row}");
        assert_eq!(row["advice"], if kept < 0.5 { "train_anew" } else { "lora" });
    }
    let domains = found["domains"].as_array().unwrap();
    assert_eq!(domains.iter().map(|row| &row["name"]).collect::<Vec<_>>(), ["math", "code"]);
    let moved = &found["fit"]["embedding"];
    assert_eq!((&moved["rows_moved"], &moved["rows"]), (&json!(64), &json!(1024)));
    assert!((number(&moved["relative"]) - 0.35).abs() < 0.01, "{moved}");
    let words = unwrapped(&table);
    assert!(words.contains("in 64 of 1024 rows") && words.contains("train"), "{table}");
    assert!(words.contains("! Engines use the embedding and LM head of the target"), "{table}");
    assert_eq!(
        (&found["fit"]["copies_differ_from_base"], &found["fit"]["copies_differ_from_target"]),
        (&json!(false), &json!(true))
    );

    // Finished evaluations are kept; with --json the same findings are printed.
    let before = fs::metadata(out.join("target/results.json")).unwrap().modified().unwrap();
    let printed: Value =
        serde_json::from_str(&succeeds(transfer(&tuned, Some(&base), &out, &["--json"]))).unwrap();
    assert_eq!(printed, found);
    assert_eq!(fs::metadata(out.join("target/results.json")).unwrap().modified().unwrap(), before);

    // The base itself: nothing is lost, in every resample.
    let table = succeeds(transfer(&base, Some(&base), &root.path().join("same"), &[]));
    let same: Value =
        serde_json::from_slice(&fs::read(root.path().join("same/transfer.json")).unwrap()).unwrap();
    assert_eq!(
        (&same["overall"]["kept"]["value"], &same["overall"]["advice"]),
        (&json!(1.0), &json!("serve"))
    );
    assert_eq!(same["overall"]["kept"]["interval"], json!({"low": 1.0, "high": 1.0}));
    assert_eq!(
        (&same["fit"]["lm_head"]["rows_moved"], &same["fit"]["same_template"]),
        (&json!(0), &json!(true))
    );
    assert!(table.contains("serve it as it is") && !table.contains('!'), "{table}");
}

#[test]
fn targets_that_do_not_fit_are_refused_before_anything_is_decoded() {
    let root = tempfile::tempdir().unwrap();
    let (out, base) = (root.path().join("out"), target_dir());
    let copy = |name: &str, file: &str, edit: &dyn Fn(&mut Value)| {
        let dir = root.path().join(name);
        copy_of_target(&dir, |_, tensor| tensor.shallow_clone());
        let mut json: Value = serde_json::from_slice(&fs::read(dir.join(file)).unwrap()).unwrap();
        edit(&mut json);
        fs::write(dir.join(file), json.to_string()).unwrap();
        dir
    };
    let wide = copy("wide", "config.json", &|config| config["hidden_size"] = json!(256));
    assert_refused(
        &transfer(&wide, None, &out, &[]),
        2,
        &["--target: ", "hidden_size 256", "trained for 192"],
    );
    let shallow = copy("shallow", "config.json", &|config| {
        config["num_hidden_layers"] = json!(5);
        config["layer_types"].as_array_mut().unwrap().pop();
    });
    assert_refused(&transfer(&shallow, None, &out, &[]), 2, &["number of target layers 5", "trained for 6"]);
    let renamed = root.path().join("renamed");
    with_token(&renamed, 1021, "<plan>");
    assert_refused(
        &transfer(&renamed, Some(&base), &out, &[]),
        2,
        &["--target: token 1021 is `<plan>`, with --base it is `<think>`"],
    );
    assert_refused(&transfer(&base, Some(&wide), &out, &[]), 2, &["--base: ", "hidden_size 256"]);
    assert_refused(
        &transfer_of(Path::new("mtp"), &base, None, &out, &[]),
        2,
        &["--draft mtp", "extract-mtp"],
    );
    assert_refused(&transfer(&base, None, &out, &["--limit", "0"]), 2, &["--limit must be at least 1"]);
    assert!(!out.exists(), "something was written");
}

/// Also of a base that the drafter was not trained for, and of too few prompts.
#[test]
fn other_special_tokens_are_reported() {
    let root = tempfile::tempdir().unwrap();
    let [renamed, tuned, out] = ["renamed", "tuned", "out"].map(|name| root.path().join(name));
    with_token(&renamed, 1023, "<|hole|>");
    fine_tuned(&tuned, 0.35);
    let table = succeeds(transfer(&renamed, Some(&tuned), &out, &["--limit", "1", "--max-new-tokens", "24"]));
    let words = unwrapped(&table);
    assert!(words.contains("those of --base: 1023 is `<|hole|>`, not `<|mask|>`."), "{table}");
    assert!(words.contains("--base may not be the model that the drafter was trained for"), "{table}");
    assert!(words.contains("too few prompts") && !words.contains("Engines use"), "{table}");
}

#[test]
fn the_head_of_a_reduced_vocabulary_is_not_compared_with_the_targets() {
    let root = tempfile::tempdir().unwrap();
    let [draft, out, alone] = ["draft", "out", "alone"].map(|name| root.path().join(name));
    let counts: Vec<u64> = (0..1024).map(|id| 2000 - id).collect();
    write_eagle3_with_vocab(&draft, DraftVocab::most_frequent(&counts, 500).as_ref());
    // As after the training of the head.
    edit_tensors(
        &draft,
        |name, tensor| if name == "lm_head.weight" { tensor * 0.5 } else { tensor.shallow_clone() },
    );
    let short = ["--limit", "1", "--max-new-tokens", "8"];
    let table = unwrapped(&succeeds(transfer_of(&draft, &target_dir(), Some(&target_dir()), &out, &short)));
    let found: Value = serde_json::from_slice(&fs::read(out.join("transfer.json")).unwrap()).unwrap();
    for matrix in ["embedding", "lm_head"] {
        assert_eq!(found["fit"][matrix], json!({"relative": 0.0, "rows_moved": 0, "rows": 1024}));
    }
    assert_eq!(found["fit"]["copies_differ_from_target"], json!(false));
    assert_eq!(found["fit"]["init_from"], "own_matrices");
    // The drafter is not trained, and no draft of it is accepted.
    assert_eq!(found["overall"]["advice"], Value::Null);
    assert!(table.contains("hardly drafts for --base") && !table.contains("LoRA"), "{table}");

    // Without a base.
    let table = unwrapped(&succeeds(transfer_of(&draft, &target_dir(), None, &alone, &short)));
    assert!(
        table.contains("τ new") && !table.contains("It keeps") && table.contains("trained for: --base"),
        "{table}"
    );
    assert!(table.contains("Its LM head may be the drafter's own"), "{table}");
    assert!(table.contains("The target's embedding: as the drafter's copy."), "{table}");
}

#[test]
fn both_matrices_of_peagle_may_be_its_own() {
    let root = tempfile::tempdir().unwrap();
    let [draft, out] = ["draft", "out"].map(|name| root.path().join(name));
    write_peagle(&draft);
    edit_tensors(
        &draft,
        |name, tensor| if name == "embed_tokens.weight" { tensor * 0.5 } else { tensor.shallow_clone() },
    );
    let more = ["--limit", "1", "--max-new-tokens", "4", "--json"];
    let found: Value =
        serde_json::from_str(&succeeds(transfer_of(&draft, &target_dir(), None, &out, &more))).unwrap();
    assert_eq!(
        found["fit"],
        json!({
            "embedding": null, "lm_head": null, "copies_differ_from_base": null, "copies_differ_from_target": null,
            "may_own_matrices": true, "init_from": "own_matrices", "other_special_tokens": [], "same_template": null,
        })
    );
}
