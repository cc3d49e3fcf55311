//! Whole evaluations: the same results with any interruption or division, conversations of several
//! turns, and several seeds.

mod common;

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use common::{
    answers, assert_refused, deepspec_eval, repository, results, run, run_ok, target_dir,
    write_bigram_drafter,
};
use deepspec_text::{ChatTokenizer, Message, Role, generation_prompt};
use serde_json::{Value, json};
use tempfile::TempDir;

fn drafter() -> String {
    static DIR: OnceLock<TempDir> = OnceLock::new();
    let dir = DIR.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let corpus = dir.path().join("corpus");
        run_ok("none", &corpus, &["--seed", "7", "--limit", "12", "--max-new-tokens", "200"]);
        write_bigram_drafter(&dir.path().join("draft"), answers(&corpus).values());
        dir
    });
    dir.path().join("draft").display().to_string()
}

/// With one slot, every forward has the same shape in every run, so answers are equal bit by bit.
const SMALL: [&str; 10] =
    ["--limit", "4", "--max-new-tokens", "32", "--max-num-seqs", "1", "--domain", "math", "--domain", "chat"];

/// The results that must not depend on how an evaluation ran: everything but times.
fn timeless(dir: &Path) -> (Value, String, Value) {
    fn strip(value: &mut Value) {
        match value {
            Value::Object(map) => {
                for key in ["timing", "tokens_per_s", "speed_up"] {
                    map.remove(key);
                }
                map.values_mut().for_each(strip);
            }
            Value::Array(items) => items.iter_mut().for_each(strip),
            _ => {}
        }
    }
    let mut found = results(dir);
    strip(&mut found);
    let traces = deepspec_eval(&["compare", dir.to_str().unwrap(), "--json", "--label", "a"]);
    let mut compared: Value = serde_json::from_slice(&traces.stdout).unwrap();
    compared["columns"][0]["results"] = Value::Null;
    strip(&mut compared);
    (found, fs::read_to_string(dir.join("outputs.jsonl")).unwrap(), compared)
}

fn journals(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().map(|entry| entry.unwrap().path());
    entries
        .filter(|path| {
            path.extension().is_some_and(|ending| ending == "jsonl")
                && path.to_str().unwrap().contains("journal")
        })
        .collect()
}

fn lines(file: &Path) -> usize {
    fs::read_to_string(file).map_or(0, |text| text.lines().count())
}

/// Starts a run and kills it when its journal has this many lines.
fn killed_at(out: &Path, args: &[&str], wanted: usize) {
    let (target, suites, draft) = (target_dir(), repository("eval_datasets"), drafter());
    let mut command = Command::new(env!("CARGO_BIN_EXE_deepspec-eval"));
    command.args(["run", "--quiet", "--device", "cpu", "--dtype", "float32", "--draft", &draft]);
    command
        .arg("--target")
        .arg(target)
        .arg("--suites-dir")
        .arg(suites)
        .arg("--output-dir")
        .arg(out)
        .args(args);
    let command = command.env("OMP_NUM_THREADS", "1").stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let started = Instant::now();
    while lines(&out.join("journal.jsonl")) < wanted {
        assert!(started.elapsed() < Duration::from_secs(120), "no answer in two minutes");
        assert!(child.try_wait().unwrap().is_none(), "it ended before it could be killed");
        thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_killed_evaluation_goes_on_where_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
    run_ok(&drafter(), &whole, &SMALL);
    for wanted in [3, 7, 11] {
        killed_at(&broken, &SMALL, wanted);
        assert!(!broken.join("results.json").exists());
    }
    // The last line may be torn, and a line in the middle may be damaged: both answers are decoded
    // again.
    let journal = broken.join("journal.jsonl");
    let mut text = fs::read_to_string(&journal).unwrap();
    let second = text.match_indices('\n').nth(1).unwrap().0;
    text.replace_range(second + 1..second + 4, "???");
    // So is an answer that this run cannot have produced.
    let third = text.match_indices('\n').nth(2).unwrap().0;
    let count = third + text[third..].find("\"proposed\":").unwrap() + "\"proposed\":".len();
    text.insert_str(count, "400000000");
    text.push_str("{\"key\":{\"arm\":\"main\"");
    fs::write(&journal, text).unwrap();
    let output = run(&drafter(), &broken, &[&SMALL[..], &["--seed", "5"]].concat());
    assert_refused(&output, 2, &["journal.jsonl", "its seed is 980406, now it is 5", "--overwrite"]);
    let kept: HashSet<String> = fs::read_to_string(&journal).unwrap().lines().map(String::from).collect();
    let output = run(&drafter(), &broken, &SMALL);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && told.contains("1 lines are no answers"), "{told}");
    let named = ["journal.jsonl:4: no answer, for `cycles[0]` has proposed 400000000", "it is decoded again"];
    assert!(named.iter().all(|words| told.contains(words)), "{told}");
    assert!(kept.len() >= 11);
    assert_eq!(timeless(&broken), timeless(&whole));
    assert_eq!(journals(&broken), Vec::<PathBuf>::new());
}

#[test]
fn any_number_of_processes_gives_the_same_results() {
    let dir = tempfile::tempdir().unwrap();
    let whole = dir.path().join("whole");
    let args = [
        "--limit",
        "5",
        "--max-new-tokens",
        "32",
        "--max-num-seqs",
        "1",
        "--domain",
        "math",
        "--no-baseline",
    ];
    let args = [&args[..], &["--seed", "1,2"]].concat();
    run_ok(&drafter(), &whole, &args);
    for count in [2, 3] {
        let out = dir.path().join(count.to_string());
        thread::scope(|scope| {
            for index in 1..=count {
                let (out, args) = (&out, &args);
                scope.spawn(move || {
                    let worker = format!("{}/{count}", index - 1);
                    let printed = run_ok(&drafter(), out, &[&args[..], &["--worker", &worker]].concat());
                    assert_eq!(printed, "", "a worker has no results to show");
                });
            }
        });
        assert_eq!(journals(&out).len(), count);
        // Samples that a failed worker did not decode are decoded when the answers are merged.
        fs::remove_file(out.join(format!("journal-{count}-of-{count}.jsonl"))).unwrap();
        run_ok(&drafter(), &out, &args);
        assert_eq!(timeless(&out), timeless(&whole), "{count} processes");
    }
    let none = |more: &[&str]| run("none", &dir.path().join("none"), &[&args[..], more].concat());
    assert_refused(&none(&["--worker", "1/2", "--overwrite"]), 2, &["other workers"]);
    assert_refused(&none(&["--shard", "1/2"]), 2, &["--shard 1/4 is --worker 0/4"]);
    let output = none(&["--worker", "2/2"]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && told.contains("from 0 to N-1"), "{told}");
}

#[test]
fn where_the_time_of_some_steps_goes_can_be_seen() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.json");
    let args = [&SMALL[..], &["--torch-profile", trace.to_str().unwrap()]].concat();
    run_ok(&drafter(), &dir.path().join("out"), &args);
    let text: Value = serde_json::from_slice(&fs::read(&trace).unwrap()).unwrap();
    let events = text["traceEvents"].as_array().unwrap();
    for name in ["draft", "verify", "commit"] {
        let count = events.iter().filter(|event| event["name"] == name).count();
        assert_eq!(count, 5, "{name}");
    }
    let nowhere = [&SMALL[..], &["--overwrite", "--torch-profile", "nowhere/trace.json"]].concat();
    assert_refused(&run(&drafter(), &dir.path().join("out"), &nowhere), 2, &["--torch-profile", "nowhere"]);
    assert!(dir.path().join("out/results.json").exists(), "results are gone, though nothing could run");
}

#[test]
fn every_seed_answers_every_sample() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let with = |seeds: &str| {
        let out = path(seeds);
        run_ok(&drafter(), &out, &[&SMALL[..], &["--no-baseline", "--seed", seeds]].concat());
        results(&out)
    };
    let (both, first, second) = (with("3,4"), with("3"), with("4"));
    assert_eq!(both["settings"]["seeds"], json!([3, 4]));
    for (i, suite) in both["suites"].as_array().unwrap().iter().enumerate() {
        for count in ["samples", "cycles", "committed", "output_tokens"] {
            let of = |results: &Value| results["suites"][i]["counts"][count].as_u64().unwrap();
            assert_eq!(suite["counts"][count].as_u64().unwrap(), of(&first) + of(&second), "{count}");
        }
        let metrics = &suite["metrics"];
        let number = |value: &Value| value.as_f64().unwrap();
        let (interval, tau) = (&metrics["accepted_length_interval"], number(&metrics["accepted_length"]));
        assert!(number(&interval["low"]) < tau && tau < number(&interval["high"]), "{metrics}");
    }
    let rows = fs::read_to_string(path("3,4").join("outputs.jsonl")).unwrap();
    let ids: HashSet<(String, u64)> = (rows.lines())
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .map(|row| (format!("{}/{}", row["suite"], row["id"]), row["seed"].as_u64().unwrap()))
        .collect();
    assert_eq!(ids.len(), 16, "4 samples of 2 suites with 2 seeds");
    assert_refused(
        &run("none", &path("x"), &["--seed", "3", "--seed", "3"]),
        2,
        &["--seed 3 is given twice"],
    );
}

#[test]
fn later_turns_follow_the_models_own_answers() {
    let dir = tempfile::tempdir().unwrap();
    let questions =
        ["Tom has 3 apples and buys 4 more. How many apples does he have?", "And if he eats 2 of them?"];
    let rows = [json!({"turns": questions}), json!({"turns": [questions[0]]})].map(|row| row.to_string());
    fs::write(dir.path().join("mt-bench.jsonl"), rows.join("\n")).unwrap();
    let target = target_dir();
    let out = |name: &str| dir.path().join(name);
    let decode = |name: &str, draft: &str, more: &[&str]| {
        let out = out(name);
        let fixed = [
            "run",
            "--quiet",
            "--device",
            "cpu",
            "--dtype",
            "float32",
            "--no-baseline",
            "--temperature",
            "0",
        ];
        let places = ["--target", target.to_str().unwrap(), "--suites-dir", dir.path().to_str().unwrap()];
        let rest = ["--output-dir", out.to_str().unwrap(), "--suite", "mt-bench", "--draft", draft];
        let output = deepspec_eval(&[&fixed[..], &places, &rest, more].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let rows = fs::read_to_string(out.join("outputs.jsonl")).unwrap();
        rows.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).collect::<Vec<_>>()
    };
    let rows = decode("all", &drafter(), &["--turns", "all"]);
    let places: Vec<_> =
        rows.iter().map(|row| (row["id"].as_str().unwrap(), row["turn"].as_u64().unwrap())).collect();
    assert_eq!(places, [("0", 0), ("0", 1), ("1", 0)]);
    assert_eq!(rows[0]["token_ids"], rows[2]["token_ids"], "the first turn is as without the second");
    // The second answer must equal the target's answer to the whole conversation in a single
    // request.
    let tokenizer = ChatTokenizer::load(&target).unwrap();
    let messages = [
        Message::new(Role::User, questions[0]),
        Message::new(Role::Assistant, rows[0]["text"].as_str().unwrap()),
        Message::new(Role::User, questions[1]),
    ];
    let prompt = generation_prompt(&tokenizer, &messages, None, Some(false)).unwrap();
    let mut engine = deepspec_engine::Engine::new(
        common::target(1, &[]),
        None::<Box<dyn deepspec_drafters::Drafter>>,
        deepspec_engine::EngineOptions {
            slots: 1,
            context: 2048,
            max_draft_tokens: None,
            draft_sampling: deepspec_engine::DraftSampling::default(),
            verify_rule: deepspec_engine::VerifyRule::default(),
            counts_overrun: true,
        },
    );
    let request = deepspec_engine::Request {
        id: "x".into(),
        max_new_tokens: 2048 - prompt.len(),
        sampling: deepspec_engine::Sampling::new(0.0, 1),
        stop_ids: deepspec_models::stop_ids(&target, None).unwrap(),
        prompt,
    };
    let prompt_tokens = request.prompt.len() as u64;
    let expected = engine.run(vec![request], |_| {}).unwrap().remove(0);
    assert_eq!(rows[1]["token_ids"], json!(expected.tokens));
    let found = results(&out("all"));
    assert_eq!(
        (&found["settings"]["turns"], &found["suites"][0]["counts"]["samples"]),
        (&json!("all"), &json!(3))
    );
    let first = results(&{
        assert_eq!(decode("first", &drafter(), &[]).len(), 2);
        out("first")
    });
    let tokens = |results: &Value| results["suites"][0]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(tokens(&found), tokens(&first) + prompt_tokens);
    // A truncated answer cannot be continued by a next turn.
    assert_eq!(decode("cut", "none", &["--turns", "all", "--max-new-tokens", "2"]).len(), 2);
    assert_eq!(results(&out("cut"))["suites"][0]["unasked"], 1);
}

#[test]
fn later_turns_do_not_see_thoughts_between_special_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let questions =
        ["Tom has 3 apples and buys 4 more. How many apples does he have?", "And if he eats 2 of them?"];
    fs::write(dir.path().join("mt-bench.jsonl"), json!({"turns": questions}).to_string()).unwrap();
    let special = dir.path().join("special");
    fs::create_dir(&special).unwrap();
    deepspec_testkit::tiny::with_special_think_tags(&target_dir(), &special);
    let rows = [target_dir(), special].map(|target| {
        let out = dir.path().join("out");
        let places = ["--target", target.to_str().unwrap(), "--suites-dir", dir.path().to_str().unwrap()];
        let fixed =
            ["run", "--quiet", "--device", "cpu", "--dtype", "float32", "--draft", "none", "--overwrite"];
        let rest = ["--suite", "mt-bench", "--turns", "all", "--temperature", "0", "--thinking", "on"];
        let output =
            deepspec_eval(&[&fixed[..], &places, &rest, &["--output-dir", out.to_str().unwrap()]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let rows = fs::read_to_string(out.join("outputs.jsonl")).unwrap();
        rows.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(rows[0].len(), 2);
    assert!(rows[0][0]["text"].as_str().unwrap().contains("</think>"), "{:?}", rows[0]);
    assert_eq!(rows[0], rows[1]);
}

#[test]
fn accepted_lengths_are_told_by_the_length_of_the_context() {
    let dir = tempfile::tempdir().unwrap();
    let (file, out) = (dir.path().join("mixed.jsonl"), dir.path().join("out"));
    let sentence = "Tom has 3 apples and buys 4 more. ";
    let row = |sentences: usize| json!({"turns": [sentence.repeat(sentences)]}).to_string() + "\n";
    fs::write(&file, [1, 2, 60, 61].map(row).concat()).unwrap();
    let args = ["--suite", file.to_str().unwrap(), "--max-new-tokens", "24"];
    let output = run(&drafter(), &out, &args);
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(told.contains("tokens before a cycle") && told.contains("0 to 511"), "{told}");
    let found = results(&out);
    let ranges = found["suites"][0]["context_lengths"].as_array().unwrap();
    assert!(ranges.len() >= 2 && ranges[0]["until"] == 512, "{ranges:?}");
    let cycles: u64 = ranges.iter().map(|range| range["cycles"].as_u64().unwrap()).sum();
    assert_eq!(found["suites"][0]["counts"]["cycles"], cycles);
    assert!(ranges.iter().all(|range| range["accepted_length"].as_f64().unwrap() >= 1.0), "{ranges:?}");
    let report = fs::read_to_string(out.join("report.html")).unwrap();
    assert!(report.contains("Accepted length by length of the context"));
}
