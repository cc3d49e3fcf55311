//! Training without a cache, and training that writes one, with the built binary on the tiny
//! target.

mod common;

use std::fs;
use std::os::unix::process::ExitStatusExt;

use common::{Bench, STEPS, start_until};
use deepspec_capture::cache::verify;
use deepspec_testkit::folder::files;
use deepspec_testkit::signal;

/// Overrides for hidden states that the target computes; `source` is `online` or a hybrid's folder.
fn live(bench: &Bench, states: &str) -> Vec<String> {
    let input = format!("data.input=['{}']", bench.path("rows.jsonl").display());
    [format!("--set=data.states={states}"), format!("--set={input}")].to_vec()
}

fn online(bench: &Bench) -> Vec<String> {
    live(bench, "online")
}

fn hybrid(bench: &Bench) -> Vec<String> {
    live(bench, &format!("{{hybrid: '{}'}}", bench.path("written").display()))
}

fn with<'a>(own: &'a [String], more: &[&'a str]) -> Vec<&'a str> {
    own.iter().map(String::as_str).chain(more.iter().copied()).collect()
}

/// A whole run with hidden states from the target.
fn undisturbed() -> Bench {
    let bench = Bench::new();
    bench.succeeds(&with(&online(&bench), &[]));
    bench
}

#[track_caller]
fn kill_at(bench: &Bench, step: usize, args: &[&str]) {
    let mut child = start_until(bench, step, args);
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(9), "it ended before it was killed");
}

#[track_caller]
fn assert_same_curve(a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len());
    for (step, (a, b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() <= 1e-3 * b.abs(), "step {}: {a} and {b}", step + 1);
    }
}

#[test]
fn online_training_is_training_from_the_cache() {
    let full = std::env::var_os("DEEPSPEC_TEST_FULL").is_some();
    let steps = if full { 200 } else { STEPS };
    let length = format!("--set=train.max_train_steps={steps}");
    let (cache, target) = (Bench::new(), Bench::new());
    cache.succeeds(&[&length]);
    target.succeeds(&with(&online(&target), &[&length]));
    assert_same_curve(&target.losses(), &cache.losses());
    assert!(target.result_of(steps) == cache.result_of(steps), "other weights");
}

#[test]
fn a_killed_online_run_resumes_to_the_same_bytes() {
    let whole = undisturbed();
    let full = std::env::var_os("DEEPSPEC_TEST_FULL").is_some();
    let steps: Vec<usize> = if full { (1..STEPS).collect() } else { vec![2, 8] };
    for step in steps {
        let bench = Bench::new();
        let args = online(&bench);
        kill_at(&bench, step, &with(&args, &[]));
        bench.succeeds(&with(&args, &[]));
        assert!(bench.result() == whole.result(), "killed at step {step}: other weights");
        assert_eq!(bench.losses(), whole.losses(), "killed at step {step}");
    }
}

#[test]
fn a_run_may_go_on_from_another_source_of_the_same_states() {
    let whole = undisturbed();
    let bench = Bench::new();
    kill_at(&bench, 4, &[]);
    kill_at(&bench, 8, &with(&online(&bench), &["--set=data.target_device=cpu"]));
    kill_at(&bench, 14, &with(&hybrid(&bench), &[]));
    bench.succeeds(&[]);
    assert_same_curve(&bench.losses(), &whole.losses());

    bench.fails(
        &with(&online(&bench), &["--set=train.lr=2e-3"]),
        2,
        &["train.lr (was 0.001, is 0.002)", "--overwrite"],
    );
    let rows = fs::read_to_string(bench.path("rows.jsonl")).unwrap();
    let fewer: Vec<&str> = rows.lines().skip(1).collect();
    fs::write(bench.path("rows.jsonl"), fewer.join("\n")).unwrap();
    bench.fails(&with(&online(&bench), &[]), 2, &["other samples", "--overwrite"]);
}

#[test]
fn hybrid_trains_as_online_does_in_its_first_epoch_and_leaves_a_cache() {
    // 24 samples in steps of 4 make an epoch of 6 steps.
    let (first, whole) = (Bench::new(), Bench::new());
    let epoch = ["--set=train.max_train_steps=6"];
    first.succeeds(&with(&online(&first), &epoch));
    let short = Bench::new();
    short.succeeds(&with(&hybrid(&short), &epoch));
    assert!(short.result_of(6) == first.result_of(6));
    assert!(verify(&short.path("written"), |_| ()).unwrap().is_empty());

    whole.succeeds(&with(&hybrid(&whole), &[]));
    assert_same_curve(&whole.losses(), &undisturbed().losses());
    assert!(files(&whole.path("written")) == files(&short.path("written")));
    for step in [2, 5, 8] {
        let bench = Bench::new();
        let args = hybrid(&bench);
        kill_at(&bench, step, &with(&args, &[]));
        bench.succeeds(&with(&args, &[]));
        assert!(bench.result() == whole.result(), "killed at step {step}: other weights");
        assert!(files(&bench.path("written")) == files(&whole.path("written")), "killed at step {step}");
    }
    // The written cache can be used like any other.
    let cache = format!("--set=data.states={{cache: '{}'}}", whole.path("written").display());
    whole.succeeds(&[&cache, "--overwrite"]);
}

#[test]
fn sigterm_saves_online_training_too() {
    let bench = Bench::new();
    let args = online(&bench);
    let mut child = start_until(&bench, 2, &with(&args, &[]));
    assert!(signal::send("TERM", child.id().into()));
    assert_eq!(child.wait().unwrap().code(), Some(75));
    bench.succeeds(&with(&args, &[]));
    assert!(bench.result() == undisturbed().result());
}

#[test]
fn a_plan_says_what_the_target_has_to_do() {
    let bench = Bench::new();
    let plan = |args: &[String]| {
        let output = bench.run(&with(args, &["--plan", "--quiet"]));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let text = plan(&online(&bench));
    for words in ["24 samples", "nothing on disk", "tokens per epoch", "per step", "MB of weights, "] {
        assert!(text.contains(words), "{words} in {text}");
    }
    let text = plan(&[online(&bench), vec!["--set=data.input=[later.jsonl]".to_string()]].concat());
    for words in ["none yet: no answers in later.jsonl", "target on cpu in float32: ", "MB of weights, "] {
        assert!(text.contains(words), "{words} in {text}");
    }
    let text = plan(&hybrid(&bench));
    assert!(text.contains("tokens per epoch") && text.contains("which writes"), "{text}");
    assert!(!bench.path("out").exists() && !bench.path("written").exists());
    bench.succeeds(&with(&hybrid(&bench), &["--set=train.max_train_steps=6"]));
    let text = plan(&hybrid(&bench));
    assert!(!text.contains("tokens per epoch") && text.contains("an earlier run has finished"), "{text}");
}

#[test]
fn mistakes_are_named_before_anything_runs() {
    let bench = Bench::new();
    let online = online(&bench);
    bench.fails(&["--set=data.states=online"], 2, &["data.input", "list of JSONL files"]);
    bench.fails(&["--set=data.input=[a.jsonl]"], 2, &["data.input", "a cache has its samples"]);
    bench.fails(&["--set=data.target_device=cpu"], 2, &["data.target_device"]);
    bench.fails(&["--set=data.states=onlin"], 2, &["did you mean `online`?"]);
    bench.fails(&["--set=data.states=hybrid"], 2, &["{hybrid: DIR}"]);
    bench.fails(&with(&online, &["--set=data.inputs=[a]"]), 2, &["did you mean `input`?"]);
    bench.fails(&with(&online, &["--set=data.input=a.jsonl"]), 2, &["data.input"]);
    bench.fails(&with(&online, &["--set=data.input=[nowhere.jsonl]"]), 2, &["nowhere.jsonl", "no such file"]);
    bench.fails(&with(&online, &["--set=data.target_device=tpu"]), 2, &["data.target_device", "tpu"]);
    let place = "--set=data.target_device=cuda:{local_rank*2}";
    bench.fails(&with(&online, &[place]), 2, &["data.target_device", "cuda:{local_rank+N}"]);
    bench.fails(&with(&online, &["--set=train.global_batch_size=400"]), 2, &["24 samples"]);
    fs::write(bench.path("rows.jsonl"), "").unwrap();
    bench.fails(&with(&online, &[]), 2, &["data.input", "rows.jsonl", "0 rows"]);
    assert!(!bench.path("out").exists());
}

#[test]
fn rows_that_cannot_be_used_are_named_and_left_out() {
    let bench = Bench::new();
    let mut rows = fs::read_to_string(bench.path("rows.jsonl")).unwrap();
    rows.push_str("\nnonsense\n");
    fs::write(bench.path("rows.jsonl"), rows).unwrap();
    let output = bench.run(&with(&online(&bench), &["--plan"]));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    assert!(text.contains("rows.jsonl:25: ") && text.contains("25 rows = 24 kept"), "{text}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("24 samples"));
}
