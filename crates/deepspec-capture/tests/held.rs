//! The memory that a training process holds of its corpus does not grow with the number of tokens.

mod common;

use std::env::{current_exe, var_os};
use std::fs;
use std::path::Path;
use std::process::Command;

use common::Bench;
use deepspec_capture::{Dataset, TargetSpec};
use deepspec_core::cli::Verbosity;
use serde_json::json;

const ROWS: usize = 1500;
/// The corpus has at least this many tokens.
const TOKENS: u64 = 2_500_000;
/// Limits of the process's anonymous memory and of its file mappings: the index, the last pages
/// read and some of its own.
const HELD: u64 = 2 << 20;
const MAPPED: u64 = 6 << 20;
/// Passes the folder to the measured process.
const MEASURE: &str = "DEEPSPEC_TEST_HELD";

/// Resident bytes of this process: anonymous memory, and file mappings.
fn resident() -> [u64; 2] {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    ["RssAnon:", "RssFile:"].map(|key| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() << 10
    })
}

/// Opens the data set and visits every sample.
fn measure(dir: &Path) {
    let recipe = deepspec_drafters::load_recipe(&dir.join("recipe.yaml"), &[]).unwrap();
    let source = TargetSpec::open(&recipe, Verbosity::Quiet).unwrap();
    let before = resident();
    let dataset = Dataset::open(&recipe, &source, Some(dir), |_| vec![]).unwrap();
    let visited: u64 = (0..dataset.len()).map(|index| dataset.meta(index).input_ids.len() as u64).sum();
    assert!(visited >= TOKENS, "{visited}");
    let after = resident();
    let grown = [0, 1].map(|part| after[part].saturating_sub(before[part]));
    eprintln!("grown by {grown:?}");
    assert!(grown[0] < HELD, "{} bytes of its own for {visited} tokens", grown[0]);
    assert!(grown[1] < MAPPED, "{} bytes of files for {visited} tokens", grown[1]);
    assert!(dataset.sample_bytes() < MAPPED);
}

#[test]
fn a_corpus_takes_no_memory_of_the_processes_that_read_it() {
    if let Some(dir) = var_os(MEASURE) {
        return measure(Path::new(&dir));
    }
    let bench = Bench::new();
    let answer = "Tom has 3 apples and buys 4 more, then he eats one of them. ".repeat(120);
    let row = |index: usize| {
        let turns = [
            json!({"role": "user", "content": format!("Row {index}?")}),
            json!({"role": "assistant", "content": answer}),
        ];
        json!({"id": index, "conversations": turns}).to_string()
    };
    let rows = bench.write("rows.jsonl", &(0..ROWS).map(row).collect::<Vec<_>>().join("\n"));
    let input = format!("data.input=['{}']", rows.display());
    let recipe = bench.recipe(&["data.states=online", &input, "data.max_length=2048"]);
    let dir = bench.path("");
    fs::write(dir.join("recipe.yaml"), deepspec_core::config::to_yaml(&recipe).unwrap()).unwrap();
    let source = TargetSpec::open(&recipe, Verbosity::Quiet).unwrap();
    let dataset = Dataset::open(&recipe, &source, Some(&dir), |_| vec![]).unwrap();
    assert!(dataset.counts().tokens >= TOKENS, "{:?}", dataset.counts());
    // Measured in a second process, which finds the tokenised samples: memory that tokenising
    // leaves in the allocator does not count.
    let own = current_exe().unwrap();
    let mut process = Command::new(own);
    process.args(["--nocapture", "--exact", "a_corpus_takes_no_memory_of_the_processes_that_read_it"]);
    let output = process.env(MEASURE, &dir).output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("grown by"), "{text}");
}
