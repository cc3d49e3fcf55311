//! Targets of every family with a trained drafter: runs, calibrations, the doctor, and files for vLLM.

#[path = "../common/mod.rs"]
mod common;
mod quantised;

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use common::training::{DSPARK_TAPS, GAMMA, Lessons, smoke, write_assistant, write_dspark_drafter};
use common::{answers, assert_refused, deepspec_eval, repository, results, run_on, target_dir};
use deepspec_testkit::tiny;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Evaluated rows of every suite.
const LIMIT: usize = 4;
const LEARNED: usize = 20;
const TOKENS: usize = 32;
const STEPS: usize = 300;

/// Families of targets, by the `model_type` of their configs.
const FAMILIES: [&str; 10] = [
    "gemma4",
    "qwen2",
    "mistral",
    "granite",
    "gemma3_text",
    "phi3",
    "qwen3_moe",
    "gpt_oss",
    "qwen3_5",
    "qwen3_5_moe",
];

fn mask(family: &str) -> i64 {
    // The id of `<mask>`, or of `<|mask|>`.
    if family == "gemma4" { 4 } else { 1023 }
}

/// Rows of every suite that the drafter trains on. Nothing about new answers of the other random targets can be learned, so
/// that their drafters learn the evaluated ones by heart.
fn training_rows(family: &str) -> Range<usize> {
    if family == "gemma4" { LIMIT..LEARNED } else { 0..LIMIT }
}

/// A folder with a random target in `target`, and a DSpark trained on its greedy answers in
/// `draft`.
fn bench(family: &str) -> &'static Path {
    static DIRS: [OnceLock<TempDir>; FAMILIES.len()] = [const { OnceLock::new() }; FAMILIES.len()];
    let place = FAMILIES.iter().position(|known| *known == family).unwrap();
    let dir = DIRS[place].get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let [target, draft] = ["target", "draft"].map(|name| dir.path().join(name));
        fs::create_dir(&target).unwrap();
        match family {
            "gemma4" => tiny::gemma4(&target, 512),
            other => tiny::target(&target, other),
        }
        let (suites, rows) = (smoke(), training_rows(family));
        let lessons = Lessons { target, suites, rows, tokens: TOKENS, thinking: false };
        write_dspark_drafter(&lessons, &draft, mask(family), STEPS);
        dir
    });
    dir.path()
}

fn path(family: &str, name: &str) -> String {
    bench(family).join(name).display().to_string()
}

/// Runs `deepspec-eval COMMAND` greedily with this drafter on the held-out rows.
fn evaluated(family: &str, command: &[&str], draft: &str, more: &[&str]) -> String {
    let (target, suites) = (path(family, "target"), repository("eval_datasets"));
    let (limit, tokens) = (LIMIT.to_string(), TOKENS.to_string());
    let mut all = [&["--quiet"], command].concat();
    all.extend(["--device", "cpu", "--temperature", "0", "--target", &target, "--draft", draft]);
    all.extend(["--suites-dir", suites.to_str().unwrap(), "--limit", &limit, "--max-new-tokens", &tokens]);
    all.extend(more);
    let output = deepspec_eval(&all);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Runs with one slot; returns answers and results.
fn run(family: &str, draft: &str, out: &Path) -> (common::Answers, Value) {
    let place =
        ["--dtype", "float32", "--max-num-seqs", "1", "--no-baseline", "--output-dir", out.to_str().unwrap()];
    evaluated(family, &["run"], draft, &place);
    (answers(out), results(out))
}

#[test]
fn a_run_is_lossless_and_its_confidences_are_calibrated() {
    check_run("gemma4");
}

#[test]
fn a_run_of_a_mixture_is_lossless_and_its_confidences_are_calibrated() {
    check_run("qwen3_moe");
}

/// Blocks run in many slots at once, and answers are as those of plain decoding.
#[test]
fn a_hybrid_is_lossless_in_many_slots_and_refuses_trees_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let [plain, drafted] = ["plain", "drafted"].map(|name| dir.path().join(name));
    let (expected, _) = run("qwen3_5_moe", "none", &plain);
    let draft = path("qwen3_5_moe", "draft");
    let place = ["--dtype", "float32", "--max-num-seqs", "5", "--no-baseline", "--output-dir"];
    evaluated("qwen3_5_moe", &["run"], &draft, &[&place[..], &[drafted.to_str().unwrap()]].concat());
    assert_eq!(answers(&drafted), expected);
    let tau = results(&drafted)["overall"]["accepted_length"].as_f64().unwrap();
    assert!(tau > 1.2, "{tau}");
    let (target, suites) = (path("qwen3_5_moe", "target"), repository("eval_datasets"));
    let models = ["run", "--target", &target, "--draft", &draft, "--device", "cpu", "--dtype", "float32"];
    let output = dir.path().join("trees");
    let rest =
        ["--suites-dir", suites.to_str().unwrap(), "--limit", "1", "--verify", "tree:12", "--output-dir"];
    let trees = deepspec_eval(&[&models[..], &rest, &[output.to_str().unwrap()]].concat());
    assert!(!trees.status.success());
    let told = String::from_utf8_lossy(&trees.stderr);
    assert!(told.contains("the target verifies chains only"), "{told}");
}

/// A language model drafts as many tokens as it is told, and a hybrid rolls back 63. Two engines and two
/// passes warn once.
#[test]
fn a_hybrid_says_how_many_of_longer_drafts_it_verifies() {
    let dir = tempfile::tempdir().unwrap();
    let (target, draft) = (dir.path().join("target"), target_dir());
    fs::create_dir(&target).unwrap();
    tiny::target(&target, "qwen3_5");
    for (drafts, warnings) in [("64", 1), ("62", 0)] {
        let mut args = vec!["--max-draft-tokens", drafts, "--max-new-tokens", "2", "--suite", "smoke-math"];
        args.extend(["--limit", "2", "--replicas", "2", "--max-num-seqs", "2", "--no-baseline"]);
        args.extend(["--other-rule", "on"]);
        let output = run_on(&target, draft.to_str().unwrap(), &dir.path().join(drafts), &args);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{told}");
        let words = "drafts 64 tokens per step, and 62 of them are verified";
        assert_eq!(told.matches(words).count(), warnings, "{told}");
    }
}

fn check_run(family: &str) {
    let dir = tempfile::tempdir().unwrap();
    let [plain, drafted] = ["plain", "drafted"].map(|name| dir.path().join(name));
    let (expected, _) = run(family, "none", &plain);
    let (found, results) = run(family, &path(family, "draft"), &drafted);
    assert_eq!(found, expected);
    let tau = results["overall"]["accepted_length"].as_f64().unwrap();
    assert!(tau > 1.2, "{tau}");
    assert!(results["target"]["stop_ids"].as_array().unwrap().len() > 1, "{}", results["target"]);
    assert_eq!(results["drafter"]["taps"], json!(DSPARK_TAPS));
    let summary = &results["confidence"]["reliability"]["summary"];
    assert!(summary["ece"].as_f64().unwrap() < 0.5, "{summary}");

    let file = dir.path().join("calibration.json");
    let [run_dir, output] = [&drafted, &file].map(|path| path.to_str().unwrap());
    let told = deepspec_eval(&["calibrate", run_dir, "--output", output]);
    let told = (told.status.success(), String::from_utf8(told.stdout).unwrap());
    assert!(told.0 && told.1.contains("after less before"), "{}", told.1);
    let found: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(found["temperatures"].as_array().unwrap().len(), GAMMA);
    assert_eq!((&found["fit_prompts"], &found["held_out"]["prompts"]), (&json!(6), &json!(6)));
    let used = dir.path().join("used");
    let args = ["--dtype", "float32", "--max-num-seqs", "1", "--no-baseline", "--calibration", output];
    let place = ["--output-dir", used.to_str().unwrap()];
    evaluated(family, &["run"], &path(family, "draft"), &[&args[..], &place].concat());
    assert_eq!(answers(&used), expected, "a calibration decides about confidences alone");
}

/// An assistant that has learned the target's answers to the evaluated prompts.
fn assistant() -> &'static Path {
    static DIR: OnceLock<TempDir> = OnceLock::new();
    let dir = DIR.get_or_init(|| {
        let (dir, target) = (tempfile::tempdir().unwrap(), bench("gemma4").join("target"));
        let lessons = Lessons { target, suites: smoke(), rows: 0..LIMIT, tokens: TOKENS, thinking: false };
        write_assistant(&lessons, &dir.path().join("assistant"), STEPS / 2);
        dir
    });
    dir.path()
}

/// Google's own drafter reads the target's keys and values. It is compared with a DSpark for the same target.
#[test]
fn a_run_with_an_assistant_is_lossless_and_compared_and_other_commands_refuse_it_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let [plain, drafted, dspark] = ["plain", "assistant", "dspark"].map(|name| dir.path().join(name));
    let assistant = assistant().join("assistant").display().to_string();
    let assistant = assistant.as_str();
    let (expected, _) = run("gemma4", "none", &plain);
    let (found, results) = run("gemma4", assistant, &drafted);
    assert_eq!(found, expected);
    assert_eq!((&results["drafter"]["block_size"], &results["drafter"]["taps"]), (&json!(7), &json!([1, 2])));
    let target = path("gemma4", "target");
    let both = ["--target", &target, "--draft", assistant, "--device", "cpu"];
    let traced = deepspec_eval(&[&["trace", "2 + 3?", "--max-new-tokens", "8"], &both[..]].concat());
    let told = String::from_utf8_lossy(&traced.stdout);
    assert!(traced.status.success() && told.contains("/7"), "{told}");
    let (_, other) = run("gemma4", &path("gemma4", "draft"), &dspark);
    let compared = deepspec_eval(&["compare", "--json", drafted.to_str().unwrap(), dspark.to_str().unwrap()]);
    assert!(compared.status.success(), "{}", String::from_utf8_lossy(&compared.stderr));
    let compared: Value = serde_json::from_slice(&compared.stdout).unwrap();
    assert_eq!(compared["suites"], json!(smoke()), "{compared:#}");
    let columns = compared["columns"].as_array().unwrap();
    for (column, (label, results)) in columns.iter().zip([("assistant", &results), ("dspark", &other)]) {
        let [shown, tau] = [column, results].map(|one| one["overall"]["accepted_length"].as_f64().unwrap());
        assert_eq!(column["label"], label);
        assert!((shown - tau).abs() < 1e-9 && tau > 1.2, "{label}: {shown} and {tau}");
    }
    let [suites, out] = [repository("eval_datasets"), dir.path().join("transfer")];
    let place = ["--suites-dir", suites.to_str().unwrap(), "--output-dir", out.to_str().unwrap(), "--json"];
    let few = ["transfer", "--quiet", "smoke-math", "--limit", "1", "--max-new-tokens", "4"];
    let moved = deepspec_eval(&[&few[..], &place, &both].concat());
    assert!(moved.status.success(), "{}", String::from_utf8_lossy(&moved.stderr));
    let moved: Value = serde_json::from_slice(&moved.stdout).unwrap();
    assert_eq!((&moved["fit"]["init_from"], &moved["fit"]["embedding"]), (&json!("possible"), &Value::Null));
    let inspect = ["checkpoint", "inspect", assistant];
    assert_refused(
        &deepspec_eval(&inspect),
        1,
        &["an assistant of Gemma 4; `deepspec-eval run` evaluates it"],
    );
}

/// The doctor's report on a drafter with a change of its config.json.
fn examined(family: &str, from: &Path, edit: impl Fn(&mut Value)) -> Value {
    let root = tempfile::tempdir().unwrap();
    let [file, weights] = ["config.json", "model.safetensors"].map(PathBuf::from);
    let mut config: Value = serde_json::from_str(&fs::read_to_string(from.join(&file)).unwrap()).unwrap();
    edit(&mut config);
    fs::write(root.path().join(&file), config.to_string()).unwrap();
    fs::copy(from.join(&weights), root.path().join(&weights)).unwrap();
    let told = evaluated(family, &["checkpoint", "doctor", "--json"], root.path().to_str().unwrap(), &[]);
    serde_json::from_str(&told).unwrap()
}

/// The doctor's report with this mask token in the drafter's config.json.
fn doctor(family: &str, mask: i64) -> Value {
    examined(family, &bench(family).join("draft"), |config| config["mask_token_id"] = json!(mask))
}

/// Other causes do not apply to an assistant, and the report says why. With the target's RoPE settings again, its predictions on the same
/// answers are as before.
#[test]
fn the_doctor_judges_an_assistant_and_tries_the_causes_that_apply() {
    let assistant = assistant().join("assistant");
    let report = examined("gemma4", &assistant, |_| {});
    assert_eq!(report["cause"], Value::Null, "{report:#}");
    let [length, estimated] = ["accepted_length", "estimated"].map(|key| report[key].as_f64().unwrap());
    assert!(length > 1.2 && estimated > 1.2, "{length} and {estimated}");
    let notes = report["notes"].to_string();
    for untried in
        ["target layers (its config names none)", "mask token", "slot convention", "embedding and head"]
    {
        assert!(notes.contains(untried), "{untried} not in: {notes}");
    }
    let report = examined("gemma4", &assistant, |config| {
        let layers = |theta: f64| json!({"rope_type": "default", "rope_theta": theta});
        config["text_config"]["rope_parameters"] =
            json!({"sliding_attention": layers(3.0), "full_attention": layers(5.0)});
    });
    let trials = report["trials"].as_array().unwrap();
    let rope = trials.iter().find(|trial| trial["cause"] == "rope").unwrap_or_else(|| panic!("{report:#}"));
    let after = rope["after"].as_f64().unwrap();
    assert!((after - estimated).abs() < 1e-3, "{after} and {estimated}: {report:#}");
    assert!(report["findings"].to_string().contains("rope_theta 3"), "{report:#}");
    let report = examined("gemma4", &assistant, |config| config["backbone_hidden_size"] = json!(64));
    assert_eq!(
        (&report["cause"], &report["accepted_length"]),
        (&json!("target"), &Value::Null),
        "{report:#}"
    );
}

#[test]
fn the_doctor_names_a_wrong_mask_token_and_nothing_else() {
    assert_eq!(doctor("gemma4", mask("gemma4"))["cause"], Value::Null);
    let report = doctor("gemma4", 300);
    assert_eq!(report["cause"], "mask_token", "{report:#}");
    assert!(report["verdict"].as_str().unwrap().contains("mask_token_id 4 instead of 300"), "{report:#}");
}

#[test]
fn the_doctor_judges_drafters_of_mixtures() {
    ["qwen3_moe", "qwen3_5_moe"].iter().for_each(|family| check_doctor(family));
}

#[test]
fn drafters_of_dense_targets_are_lossless_judged_and_converted() {
    ["qwen2", "mistral", "granite"].iter().for_each(|family| check_whole(family));
}

#[test]
fn drafters_of_targets_with_windows_or_fused_weights_are_lossless_judged_and_converted() {
    ["gemma3_text", "phi3"].iter().for_each(|family| check_whole(family));
}

#[test]
fn drafters_of_gpt_oss_and_of_a_dense_hybrid_are_lossless_judged_and_converted() {
    ["gpt_oss", "qwen3_5"].iter().for_each(|family| check_whole(family));
}

#[test]
fn drafters_of_mixtures_are_converted() {
    for family in ["qwen3_moe", "qwen3_5_moe"] {
        let dir = tempfile::tempdir().unwrap();
        let [draft, target] = ["draft", "target"].map(|name| path(family, name));
        let (expected, results) = run(family, &draft, &dir.path().join("drafted"));
        let back = convert_to_vllm_and_back(Path::new(&draft), Path::new(&target), dir.path());
        let (found, converted) = run(family, back.to_str().unwrap(), &dir.path().join("converted"));
        assert_eq!((found, counts(&converted)), (expected, counts(&results)), "{family}");
    }
}

/// The doctor estimates more accepted tokens with the drafter's own mask token than with another one. The random gpt-oss
/// repeats itself so much that any layers and any mask token will do.
fn check_doctor(family: &str) {
    let report = doctor(family, mask(family));
    let own = report["estimated"].as_f64().unwrap();
    assert!(own > 1.2, "{family}: {own}");
    if family != "gpt_oss" {
        // A drafter that has learned its answers by heart may underestimate itself.
        assert!(report["cause"].is_null() || report["cause"] == "confidence", "{family}: {report:#}");
        let other = doctor(family, 300)["estimated"].as_f64().unwrap();
        assert!(own > other + 0.1, "{family}: {own} beside {other}");
    }
}

fn check_whole(family: &str) {
    let dir = tempfile::tempdir().unwrap();
    let [plain, drafted] = ["plain", "drafted"].map(|name| dir.path().join(name));
    let (expected, _) = run(family, "none", &plain);
    let (found, results) = run(family, &path(family, "draft"), &drafted);
    assert_eq!(found, expected, "{family}");
    let tau = results["overall"]["accepted_length"].as_f64().unwrap();
    assert!(tau > 1.2, "{family}: {tau}");
    check_doctor(family);

    let back = convert_to_vllm_and_back(
        Path::new(&path(family, "draft")),
        Path::new(&path(family, "target")),
        dir.path(),
    );
    let (found, converted) = run(family, back.to_str().unwrap(), &dir.path().join("converted"));
    assert_eq!((found, counts(&converted)), (expected, counts(&results)), "{family}");
}

/// Cycles and accepted tokens of every suite.
fn counts(results: &Value) -> Vec<Value> {
    results["suites"].as_array().unwrap().iter().map(|suite| suite["counts"].clone()).collect()
}

/// Converts a drafter for vLLM and back, into folders in `dir`. Returns the last folder.
fn convert_to_vllm_and_back(draft: &Path, target: &Path, dir: &Path) -> PathBuf {
    let [there, back] = ["vllm", "back"].map(|name| dir.join(name));
    for (from, to, out) in [(draft, "vllm", &there), (&there, "reference", &back)] {
        let [from, target, out] = [from, target, out].map(|path| path.to_str().unwrap());
        let models = ["--from", from, "--target", target, "--output-dir", out];
        let told = deepspec_eval(&[&["checkpoint", "convert", "--to", to], &models[..]].concat());
        assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
    }
    let inspected = deepspec_eval(&["checkpoint", "inspect", there.to_str().unwrap()]);
    let text = String::from_utf8(inspected.stdout).unwrap();
    let loads = |line: &str| line.contains("vLLM") && line.contains("loads it");
    assert!(text.lines().any(loads) && !text.contains("problem"), "{text}");
    back
}
