//! `transfer`: the toy drafter with its target and with a perturbed copy of it.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use common::{assert_refused, deepspec_eval, repository, results, target_dir};
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
    let weights = Tensor::read_safetensors(target_dir().join("model.safetensors")).unwrap();
    let edited: Vec<(String, Tensor)> =
        weights.iter().map(|(name, tensor)| (name.clone(), edit(name, tensor))).collect();
    Tensor::write_safetensors(&edited, dir.join("model.safetensors")).unwrap();
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
    let (draft, suites) = (repository("assets/tiny-dspark"), repository("eval_datasets"));
    let mut args = vec!["transfer", "--quiet", "--device", "cpu", "--dtype", "float32", "--temperature", "0"];
    args.extend(["--draft", draft.to_str().unwrap(), "--target", target.to_str().unwrap()]);
    args.extend(base.iter().flat_map(|base| ["--base", base.to_str().unwrap()]));
    args.extend(["--suites-dir", suites.to_str().unwrap(), "--output-dir", output_dir.to_str().unwrap()]);
    args.extend(["smoke-math", "smoke-code", "--max-new-tokens", "48"]);
    if !more.contains(&"--limit") {
        args.extend(["--limit", "4"]);
    }
    args.extend(more);
    deepspec_eval(&args)
}

fn succeeds(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
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
    assert!(table.contains("in 64 of 1024 rows") && table.contains("train"), "{table}");

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
    assert!(table.contains("serve it as it is"), "{table}");
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
    assert_refused(&transfer(&wide, None, &out, &[]), 2, &["hidden_size 256", "trained for 192"]);
    let shallow = copy("shallow", "config.json", &|config| {
        config["num_hidden_layers"] = json!(5);
        config["layer_types"].as_array_mut().unwrap().pop();
    });
    assert_refused(&transfer(&shallow, None, &out, &[]), 2, &["number of target layers 5", "trained for 6"]);
    let renamed = copy("renamed", "tokenizer.json", &|tokenizer| {
        let think = tokenizer["added_tokens"].as_array_mut().unwrap();
        let token = think.iter_mut().find(|token| token["id"] == 1021).unwrap();
        token["content"] = json!("<plan>");
    });
    assert_refused(
        &transfer(&renamed, Some(&base), &out, &[]),
        2,
        &["--target", "1021", "<plan>", "<think>"],
    );
    assert_refused(&transfer(&base, Some(&wide), &out, &[]), 2, &["hidden_size 256"]);
    assert_refused(&transfer(&base, None, &out, &["--limit", "0"]), 2, &["--limit must be at least 1"]);
    assert!(!out.exists(), "something was written");
}

#[test]
fn without_a_base_there_is_no_advice() {
    let root = tempfile::tempdir().unwrap();
    let table = succeeds(transfer(&target_dir(), None, root.path(), &["--limit", "1"]));
    assert!(table.contains("τ new") && !table.contains("kept") && table.contains("--base"), "{table}");
}
