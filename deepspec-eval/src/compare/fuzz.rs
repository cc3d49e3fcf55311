//! Fuzz test: damaged results and traces are compared, or refused with the file and the key.

use std::fs;
use std::path::Path;

use deepspec_core::cli::one_line;
use deepspec_testkit::mutate::Fuzzer;
use serde_json::Value;

use super::{Args, Comparison};
use crate::results::{self, sample};
use crate::traces::{self, Trace};

/// Writes an output folder of a run.
fn folder(dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    let found = sample::results();
    found.write(dir).unwrap();
    let rows = found.suites.iter().flat_map(|suite| {
        let cycles = suite.counts.cycles;
        (0..cycles).map(|cycle| Trace {
            suite: &suite.name,
            sample: if cycle == 0 { "0" } else { "1" },
            seed: 1,
            turn: 0,
            cycle: cycle as u32,
            proposed: 2,
            usable: Some(2),
            accepted: 1,
            committed: 2,
            confidences: vec![0.5; 2],
            logits: &[0.0; 2],
        })
    });
    traces::write(dir, rows).unwrap();
}

/// Compares two folders; fails with the message that would be printed.
fn compare(dirs: [&Path; 2]) -> Result<Value, String> {
    let args = Args { results: dirs.map(Path::to_path_buf).to_vec(), labels: vec![], json: false };
    let comparison = Comparison::read(&args).map_err(|error| one_line(&error))?;
    assert!(comparison.render().contains("overall"));
    Ok(serde_json::to_value(&comparison).unwrap())
}

/// Damages a file of the second folder `times` times. Returns how often that was refused, with one
/// line that names the file.
fn provoke(file: &str, seed: u64, times: usize) -> usize {
    let dir = tempfile::tempdir().unwrap();
    let dirs = [dir.path().join("one"), dir.path().join("two")];
    dirs.iter().for_each(|dir| folder(dir));
    let path = dirs[1].join(file);
    let sound = fs::read(&path).unwrap();
    assert_eq!(compare([&dirs[0], &dirs[1]]).unwrap()["deltas"][0]["overall"]["delta"], 0.0);
    let words = ["suites", "metrics", "counts", "math", "code", "first", "drafter", "confidence"];
    let (mut dice, mut refused) = (Fuzzer::new(seed, &words), 0);
    for _ in 0..times {
        fs::write(&path, dice.file(&sound)).unwrap();
        for order in [[0, 1], [1, 0]] {
            let Err(told) = compare(order.map(|at| dirs[at].as_path())) else { continue };
            assert!(told.contains(dirs[1].to_str().unwrap()), "no file is named: {told}");
            assert!(!told.contains(char::is_control), "{told:?}");
            refused += order[0];
        }
    }
    refused
}

#[test]
fn damaged_results_are_compared_or_refused_by_key() {
    let refused = provoke(results::RESULTS_FILE, 14, 400);
    assert!(refused > 150, "only {refused} of 400 were refused");
}

#[test]
fn damaged_traces_only_cost_the_intervals() {
    assert_eq!(provoke(traces::TRACES_FILE, 15, 150), 0);
}

#[test]
fn a_suite_that_changed_its_domain_stays_in_its_row() {
    let dir = tempfile::tempdir().unwrap();
    let dirs = [dir.path().join("one"), dir.path().join("two")];
    dirs.iter().for_each(|dir| folder(dir));
    let mut found = serde_json::to_value(sample::results()).unwrap();
    found["suites"][0]["domain"] = "code".into();
    fs::write(dirs[1].join(results::RESULTS_FILE), found.to_string()).unwrap();
    let compared = compare([&dirs[0], &dirs[1]]).unwrap();
    assert_eq!(compared["columns"][0]["domains"], compared["columns"][1]["domains"]);
    let told =
        "a domain differs: \"math\" in one, \"code\" in two; it is averaged with the suites of the first";
    assert_eq!(compared["differences"][0], told);
}

#[test]
fn a_wrong_value_is_told_with_its_key() {
    let dir = tempfile::tempdir().unwrap();
    folder(dir.path());
    let mut found = serde_json::to_value(sample::results()).unwrap();
    found["suites"][1]["counts"]["cycles"] = (-3).into();
    fs::write(dir.path().join(results::RESULTS_FILE), found.to_string()).unwrap();
    let told = compare([dir.path(), dir.path()]).unwrap_err();
    assert!(
        told.ends_with("results.json: `suites[1].counts.cycles`: invalid value: integer `-3`, expected u64"),
        "{told}"
    );
}
