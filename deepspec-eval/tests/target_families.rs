//! Targets of a Gemma 4, of a mixture of experts and of a hybrid: a run, a calibration, and the doctor.

mod common;

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use common::training::{GAMMA, Lessons, smoke, train};
use common::{answers, assert_refused, deepspec_eval, repository, results};
use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockSpec, ConfidenceSettings, DSparkConfig, DSparkObjective, DSparkPlan, DSparkSettings, DraftDecoder,
    LossRecipe,
};
use deepspec_models::{ModelConfig, save};
use deepspec_testkit::tiny;
use serde_json::{Value, json};
use tch::Kind;
use tempfile::TempDir;

/// Evaluated rows of every suite.
const LIMIT: usize = 4;
const LEARNED: usize = 20;
const TOKENS: usize = 32;
const STEPS: usize = 300;
const TAPS: [i64; 2] = [0, 2];

/// A family of targets.
#[derive(Clone, Copy)]
enum Family {
    Gemma4,
    Experts,
    Hybrid,
}

impl Family {
    fn mask(self) -> i64 {
        match self {
            // The id of `<mask>`.
            Self::Gemma4 => 4,
            Self::Experts | Self::Hybrid => 1023,
        }
    }

    /// Rows of every suite that the drafter trains on. Nothing about new answers of the other random targets can be learned, so
    /// that their drafters learn the evaluated ones by heart.
    fn rows(self) -> Range<usize> {
        match self {
            Self::Gemma4 => LIMIT..LEARNED,
            Self::Experts | Self::Hybrid => 0..LIMIT,
        }
    }
}

/// A folder with a random target in `target`, and a DSpark trained on its greedy answers in
/// `draft`.
fn bench(family: Family) -> &'static Path {
    static DIRS: [OnceLock<TempDir>; 3] = [const { OnceLock::new() }; 3];
    let dir = DIRS[family as usize].get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let [target, draft] = ["target", "draft"].map(|name| dir.path().join(name));
        for dir in [&target, &draft] {
            fs::create_dir(dir).unwrap();
        }
        match family {
            Family::Gemma4 => tiny::gemma4(&target, 512),
            Family::Experts => tiny::target(&target, "qwen3_moe"),
            // With experts: the dense one drafts in `mtp_of_target`.
            Family::Hybrid => tiny::target(&target, "qwen3_5_moe"),
        }
        let model = ModelConfig::load(&target).unwrap();
        let taps = Tap::from_layer_ids(TAPS).unwrap();
        let config = DSparkConfig {
            decoder: DraftDecoder {
                model: model.anchored_decoder(&[None]).unwrap(),
                taps: taps.clone(),
                num_target_layers: model.layers.len(),
            },
            settings: DSparkSettings {
                blocks: BlockSpec {
                    block_size: GAMMA,
                    slots: SlotTarget::AnchorPredicts,
                    mask_token_id: family.mask(),
                    causal: false,
                    num_anchors: 8,
                },
                markov: None,
                confidence: Some(ConfidenceSettings { with_markov: false }),
            },
        };
        let loss = LossRecipe { ce_alpha: 1.0, soft_ce_alpha: 1.0, decay_gamma: 8.0, ..LossRecipe::NONE };
        let plan = DSparkPlan::new(config, DSparkObjective { loss, confidence_alpha: 1.0 });
        let (suites, rows) = (smoke(), family.rows());
        let lessons = Lessons { target: target.clone(), suites, rows, tokens: TOKENS, thinking: false };
        let samples = lessons.samples(&taps, |out| (out.captured_states, out.hidden));
        let trainee = train(&plan, &target, STEPS, samples);
        save(&draft.join("model.safetensors"), &trainee.checkpoint(), Kind::BFloat16).unwrap();
        fs::write(draft.join("config.json"), Value::Object(trainee.config_json()).to_string()).unwrap();
        dir
    });
    dir.path()
}

fn path(family: Family, name: &str) -> String {
    bench(family).join(name).display().to_string()
}

/// Runs `deepspec-eval COMMAND` greedily with this drafter on the held-out rows.
fn evaluated(family: Family, command: &[&str], draft: &str, more: &[&str]) -> String {
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
fn run(family: Family, draft: &str, out: &Path) -> (common::Answers, Value) {
    let place =
        ["--dtype", "float32", "--max-num-seqs", "1", "--no-baseline", "--output-dir", out.to_str().unwrap()];
    evaluated(family, &["run"], draft, &place);
    (answers(out), results(out))
}

#[test]
fn a_run_is_lossless_and_its_confidences_are_calibrated() {
    check_run(Family::Gemma4);
}

#[test]
fn a_run_of_a_mixture_is_lossless_and_its_confidences_are_calibrated() {
    check_run(Family::Experts);
}

/// Blocks run in many slots at once, and answers are as those of plain decoding.
#[test]
fn a_hybrid_is_lossless_in_many_slots_and_refuses_trees_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let [plain, drafted] = ["plain", "drafted"].map(|name| dir.path().join(name));
    let (expected, _) = run(Family::Hybrid, "none", &plain);
    let draft = path(Family::Hybrid, "draft");
    let place = ["--dtype", "float32", "--max-num-seqs", "5", "--no-baseline", "--output-dir"];
    evaluated(Family::Hybrid, &["run"], &draft, &[&place[..], &[drafted.to_str().unwrap()]].concat());
    assert_eq!(answers(&drafted), expected);
    let tau = results(&drafted)["overall"]["accepted_length"].as_f64().unwrap();
    assert!(tau > 1.2, "{tau}");
    let (target, suites) = (path(Family::Hybrid, "target"), repository("eval_datasets"));
    let models = ["run", "--target", &target, "--draft", &draft, "--device", "cpu", "--dtype", "float32"];
    let output = dir.path().join("trees");
    let rest =
        ["--suites-dir", suites.to_str().unwrap(), "--limit", "1", "--verify", "tree:12", "--output-dir"];
    let trees = deepspec_eval(&[&models[..], &rest, &[output.to_str().unwrap()]].concat());
    assert!(!trees.status.success());
    let told = String::from_utf8_lossy(&trees.stderr);
    assert!(told.contains("the target verifies chains only"), "{told}");
}

fn check_run(family: Family) {
    let dir = tempfile::tempdir().unwrap();
    let [plain, drafted] = ["plain", "drafted"].map(|name| dir.path().join(name));
    let (expected, _) = run(family, "none", &plain);
    let (found, results) = run(family, &path(family, "draft"), &drafted);
    assert_eq!(found, expected);
    let tau = results["overall"]["accepted_length"].as_f64().unwrap();
    assert!(tau > 1.2, "{tau}");
    assert!(results["target"]["stop_ids"].as_array().unwrap().len() > 1, "{}", results["target"]);
    assert_eq!(results["drafter"]["taps"], json!(TAPS));
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

/// Google's own drafter reads the target's keys and values. Random weights draft badly.
#[test]
fn a_run_with_an_assistant_is_lossless_and_other_commands_refuse_it_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let [plain, drafted, assistant] = ["plain", "drafted", "assistant"].map(|name| dir.path().join(name));
    fs::create_dir(&assistant).unwrap();
    tiny::gemma4_assistant(&assistant, 512);
    let assistant = assistant.to_str().unwrap();
    let (expected, _) = run(Family::Gemma4, "none", &plain);
    let (found, results) = run(Family::Gemma4, assistant, &drafted);
    assert_eq!(found, expected);
    assert_eq!((&results["drafter"]["block_size"], &results["drafter"]["taps"]), (&json!(7), &json!([1, 2])));
    let target = path(Family::Gemma4, "target");
    let both = ["--target", &target, "--draft", assistant, "--device", "cpu"];
    let traced = deepspec_eval(&[&["trace", "2 + 3?", "--max-new-tokens", "8"], &both[..]].concat());
    let told = String::from_utf8_lossy(&traced.stdout);
    assert!(traced.status.success() && told.contains("/7"), "{told}");
    let doctor = deepspec_eval(&[&["checkpoint", "doctor"], &both[..]].concat());
    assert_refused(&doctor, 2, &["an assistant of Gemma 4 is read beside its target by `run`"]);
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

/// The doctor's report with this mask token in the drafter's config.json.
fn doctor(family: Family, mask: i64) -> Value {
    let root = tempfile::tempdir().unwrap();
    let [file, weights] = ["config.json", "model.safetensors"].map(PathBuf::from);
    let from = bench(family).join("draft");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(from.join(&file)).unwrap()).unwrap();
    config["mask_token_id"] = json!(mask);
    fs::write(root.path().join(&file), config.to_string()).unwrap();
    fs::copy(from.join(&weights), root.path().join(&weights)).unwrap();
    let told = evaluated(family, &["checkpoint", "doctor", "--json"], root.path().to_str().unwrap(), &[]);
    serde_json::from_str(&told).unwrap()
}

#[test]
fn the_doctor_names_a_wrong_mask_token_and_nothing_else() {
    assert_eq!(doctor(Family::Gemma4, Family::Gemma4.mask())["cause"], Value::Null);
    let report = doctor(Family::Gemma4, 300);
    assert_eq!(report["cause"], "mask_token", "{report:#}");
    assert!(report["verdict"].as_str().unwrap().contains("mask_token_id 4 instead of 300"), "{report:#}");
}

/// Its own mask token is the best: the doctor estimates more accepted tokens with it than with another one.
#[test]
fn the_doctor_judges_a_drafter_of_a_mixture() {
    let estimated = |mask: i64| doctor(Family::Experts, mask)["estimated"].as_f64().unwrap();
    let (own, other) = (estimated(Family::Experts.mask()), estimated(300));
    assert!(own > 1.2 && own > other + 0.1, "{own} beside {other}");
}
