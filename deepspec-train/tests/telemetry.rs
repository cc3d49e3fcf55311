//! The outputs of a run: metrics, event files, and the accepted length during training.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use deepspec_capture::TargetSpec;
use deepspec_core::cli::Verbosity;
use deepspec_datasets::suites::{RequestTemplate, SuiteDir};
use deepspec_drafters::DrafterOptions;
use deepspec_engine::{AcceptanceStats, DraftSampling, Engine, EngineOptions, Sampling, VerifyRule};
use deepspec_models::{TargetModel, TargetOptions};
use serde_json::Value;
use tch::{Device, Kind};

use common::{Bench, STEPS, start_until, workspace};

/// Overrides for evaluation on two suites, so that the mean over suites is a real mean.
fn evaluating(extra: &str) -> Vec<String> {
    let dir = workspace().join("eval_datasets");
    let eval = format!(
        "eval={{suites: [smoke-math, smoke-code], suites_dir: {}, limit: 2, max_new_tokens: 12, slots: 3{extra}}}",
        dir.display()
    );
    ["--set", "logging.eval_every=8", "--set", &eval].map(String::from).to_vec()
}

fn strs(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

fn evaluations(bench: &Bench) -> Vec<Value> {
    bench.metrics().into_iter().filter(|row| row.get("eval").is_some()).collect()
}

/// The scalars of the event file by step, and its texts.
struct Events {
    scalars: BTreeMap<String, Vec<(i64, f32)>>,
    texts: BTreeMap<String, String>,
}

/// The content of the event file as read by TensorBoard in `python`.
fn events(bench: &Bench, python: &str) -> Events {
    let is_event_file = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().contains("tfevents");
    let files: Vec<PathBuf> =
        fs::read_dir(bench.path("out/t")).unwrap().map(|e| e.unwrap().path()).filter(is_event_file).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    let script = workspace().join("deepspec-train/tests/events.py");
    let output = Command::new(python).arg(script).arg(&files[0]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let read: Vec<Value> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(
        (read[0]["what"].as_str(), read[0]["version"].as_str()),
        (Some("file_version"), Some("brain.Event:2"))
    );
    assert_eq!((read[1]["what"].as_str(), read[1]["status"].as_str()), (Some("session_log"), Some("START")));
    let mut events = Events { scalars: BTreeMap::new(), texts: BTreeMap::new() };
    for event in &read[2..] {
        assert!(event["what"] == "summary" && event["time"].as_f64().unwrap() > 1.6e9, "{event}");
        for value in event["values"].as_array().unwrap() {
            let tag = value["tag"].as_str().unwrap().to_string();
            if let Some(number) = value["number"].as_f64() {
                assert_eq!(value["plugin"], "");
                let point = (event["step"].as_i64().unwrap(), number as f32);
                events.scalars.entry(tag).or_default().push(point);
            } else {
                assert_eq!(value["shaped"], true);
                let kind = (value["plugin"].as_str(), value["kind"].as_str(), value["dims"].as_u64());
                assert_eq!(kind, (Some("text"), Some("DT_STRING"), Some(0)));
                let text = value["texts"][0].as_str().unwrap().to_string();
                assert!(events.texts.insert(tag, text).is_none());
            }
        }
    }
    events
}

#[test]
fn measuring_accepted_length_leaves_every_weight_as_it_would_have_been() {
    let (plain, measured) = (Bench::new(), Bench::new());
    plain.succeeds(&[]);
    measured.succeeds(&strs(&evaluating("")));
    assert!(measured.result() == plain.result());
    let found = evaluations(&measured);
    assert_eq!(found.iter().map(|row| row["step"].as_u64().unwrap()).collect::<Vec<_>>(), [8, 16, 24]);
    for row in &found {
        let suites = row["eval"]["suites"].as_object().unwrap();
        assert_eq!(suites.keys().collect::<Vec<_>>(), ["smoke-math", "smoke-code"]);
        let taus: Vec<f64> = suites.values().map(|suite| suite["tau"].as_f64().unwrap()).collect();
        assert!((row["eval"]["tau"].as_f64().unwrap() - taus.iter().sum::<f64>() / 2.0).abs() < 1e-12);
        assert!(taus.iter().all(|tau| (1.0..=6.0).contains(tau)), "{taus:?}");
        // An evaluated step has a checkpoint.
        assert!(measured.path(&format!("out/t/step_{}/model.safetensors", row["step"])).is_file());
    }
    assert!(evaluations(&plain).is_empty());
    let taus: Vec<f64> = found.iter().map(|row| row["eval"]["tau"].as_f64().unwrap()).collect();
    let best: Value =
        serde_json::from_str(&fs::read_to_string(measured.path("out/t/best.json")).unwrap()).unwrap();
    assert_eq!(best["tau"].as_f64().unwrap(), taus.iter().copied().fold(0.0, f64::max));
}

/// In bfloat16 a checkpoint contains exactly the evaluated weights.
#[test]
fn the_accepted_length_is_that_of_the_checkpoint_of_the_step() {
    let bench = Bench::new();
    let args = [&evaluating("")[..], &["--set", "train.precision=bf16"].map(String::from)].concat();
    bench.succeeds(&strs(&args));
    let found = evaluations(&bench);

    let overrides: Vec<String> = args.chunks(2).map(|pair| pair[1].clone()).collect();
    let recipe = deepspec_drafters::load_recipe(&bench.path("recipe.yaml"), &overrides).unwrap();
    let source = TargetSpec::open(&recipe, Verbosity::Quiet).unwrap();
    let stop_ids = deepspec_models::stop_ids(&source.dir, source.tokenizer.eos_token_id()).unwrap();
    let context = source.config.max_position_embeddings;
    let asking = RequestTemplate {
        tokenizer: &source.tokenizer,
        sampling: Sampling::new(1.0, 980_406),
        max_new_tokens: 12,
        thinking: false,
        system_prompt: None,
        stop_ids: &stop_ids,
        context,
        vocab_size: source.config.vocab_size as usize,
    };
    let dir = workspace().join("eval_datasets");
    let folder = SuiteDir::open(&dir).unwrap();
    let (device, kind) = (Device::Cpu, Kind::BFloat16);
    for row in found {
        let step = bench.path(&format!("out/t/step_{}", row["step"]));
        for suite in folder.select(&["smoke-math".into(), "smoke-code".into()], &[]).unwrap() {
            let name = suite.name.to_string();
            let prepared = asking.prepare(folder.load(suite, 980_406, Some(2)).unwrap()).unwrap();
            // One slot instead of the three in training, because the result does not depend on
            // slots or batches.
            let options = TargetOptions { device, kind, slots: 1, taps: recipe.target.layer_ids.clone() };
            let target = TargetModel::load(&source.dir, &options).unwrap();
            let drafter = deepspec_drafters::load_drafter(
                &step,
                &DrafterOptions { device, kind, slots: 1, target: None },
            )
            .unwrap();
            let options = EngineOptions {
                slots: 1,
                context,
                max_draft_tokens: None,
                draft_sampling: DraftSampling::default(),
                verify_rule: VerifyRule::default(),
                counts_overrun: true,
            };
            let mut tally = AcceptanceStats::new(5);
            let mut engine = Engine::new(target, Some(drafter), options);
            engine.run(prepared.requests, |completion| tally.add(completion)).unwrap();
            let measured = &row["eval"]["suites"][&name];
            assert_eq!(measured["samples"], tally.samples, "{name}");
            assert_eq!(measured["tau"].as_f64(), tally.accepted_length(), "{name} at {}", row["step"]);
        }
    }
}

/// Killed after the save of the last step, but before it is marked as the best. The mark of an
/// earlier step is still there.
#[test]
fn the_best_checkpoint_survives_a_kill_before_its_mark() {
    let bench = Bench::new();
    let args = evaluating("");
    bench.succeeds(&strs(&args));
    let last = evaluations(&bench)[2]["eval"]["tau"].as_f64().unwrap();
    let (record, link) = (bench.path("out/t/best.json"), bench.path("out/t/step_best"));
    fs::write(&record, r#"{"step": 8, "tau": 0.5}"#).unwrap();
    fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink("step_8", &link).unwrap();
    bench.succeeds(&strs(&args));
    let best: Value = serde_json::from_str(&fs::read_to_string(&record).unwrap()).unwrap();
    assert_eq!((best["step"].as_u64(), best["tau"].as_f64()), (Some(STEPS as u64), Some(last)));
    assert_eq!(fs::read_link(&link).unwrap(), std::path::Path::new("step_24"));
}

#[test]
fn a_resumed_run_shows_every_step_once() {
    let Some(python) = deepspec_testkit::skip::python("tensorboard") else { return };
    let bench = Bench::new();
    let args = evaluating("");
    // Killed after a checkpoint, so that some steps run again.
    let mut child = start_until(&bench, 11, &strs(&args));
    child.kill().unwrap();
    child.wait().unwrap();
    bench.succeeds(&strs(&args));
    let steps = |evaluated: bool| {
        let rows = bench.metrics().into_iter().filter(move |row| row.get("eval").is_some() == evaluated);
        rows.map(|row| row["step"].as_i64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(steps(false), (1..=STEPS as i64).collect::<Vec<_>>());
    assert_eq!(steps(true), [8, 16, 24]);
    let events = events(&bench, &python);
    let shown = |tag: &str| events.scalars[tag].iter().map(|&(step, _)| step).collect::<Vec<_>>();
    assert_eq!(shown("train/loss"), steps(false));
    assert_eq!(shown("train/accept_rate/4"), steps(false));
    assert_eq!(shown("eval/tau"), steps(true));
    assert_eq!(shown("eval/suites/smoke-math/tau"), steps(true));
    let losses: Vec<f32> = events.scalars["train/loss"].iter().map(|&(_, loss)| loss).collect();
    let rows: Vec<f32> =
        bench.metrics().iter().filter_map(|row| Some(row["loss"].as_f64()? as f32)).collect();
    assert_eq!(losses, rows);
    assert!(events.texts["recipe"].contains("    name: t\n"), "{}", events.texts["recipe"]);
}

#[test]
fn the_summary_says_what_a_run_came_to() {
    let bench = Bench::new();
    let output = bench.run(&strs(&evaluating("")));
    let text = String::from_utf8(output.stderr).unwrap();
    let taus: Vec<f64> = evaluations(&bench).iter().map(|row| row["eval"]["tau"].as_f64().unwrap()).collect();
    let best = taus.iter().copied().fold(0.0, f64::max);
    let rows = bench.metrics();
    let tokens: u64 = rows.iter().filter_map(|row| row["tokens"].as_u64()).sum();
    for line in [
        format!("trained {STEPS} steps: {} samples, {tokens} tokens, ", STEPS * 4),
        format!("accepted length {:.3} at the end, {best:.3} at its best", taus[2]),
        "out/t/step_24".into(),
        "deepspec-eval run --target ".into(),
    ] {
        assert!(text.contains(&line), "{line:?} in {text}");
    }
}

#[test]
fn no_event_file_is_written_where_none_is_wanted() {
    let bench = Bench::new();
    bench.succeeds(&["--set", "logging.tensorboard=false"]);
    let names = fs::read_dir(bench.path("out/t")).unwrap().map(|e| e.unwrap().file_name());
    assert!(!names.into_iter().any(|name| name.to_string_lossy().contains("tfevents")));
}

#[test]
fn suites_that_are_not_there_are_named_before_anything_runs() {
    let bench = Bench::new();
    let every = ["--set", "logging.eval_every=8"];
    let fails = |eval: &str, hints: &[&str]| {
        bench.fails(&[&every[..], &["--set", eval]].concat(), 2, hints);
    };
    fails("eval={suites_dir: /nowhere}", &["eval.suites_dir", "/nowhere"]);
    let dir = workspace().join("eval_datasets");
    fails(&format!("eval={{suites: [smoke-maths], suites_dir: {}}}", dir.display()), &["smoke-maths"]);
    assert!(!bench.path("out/t/step_24").exists());
}

/// AutoModel#3238.
#[test]
fn mask_token_id_does_not_differ_after_resume() {
    let bench = Bench::new();
    let mut child = start_until(&bench, 4, &[]);
    child.kill().unwrap();
    child.wait().unwrap();
    bench.fails(
        &["--set", "drafter.dspark.mask_token_id=1022"],
        2,
        &["drafter.dspark.mask_token_id (was 1023, is 1022)"],
    );
    bench.succeeds(&[]);
    let mask = |step: &str| {
        let text = fs::read_to_string(bench.path("out/t").join(step).join("config.json")).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()["mask_token_id"].clone()
    };
    assert_eq!((mask("step_3"), mask("step_24")), (1023.into(), 1023.into()));
}
