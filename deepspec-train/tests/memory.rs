//! The plan's memory against what the system then counts.

mod common;

use std::fs;

use serde_json::Value;

use common::Bench;

/// Steps of a measured run: the first one has the optimiser's state, the second one whatever it leaves behind.
const STEPS: &str = "train.max_train_steps=2";

/// Bytes above the program: planned and measured.
fn planned_and_measured(sizes: &[&str]) -> (f64, f64) {
    let bench = Bench::new();
    let settings = sizes.iter().copied().chain([STEPS, "logging.checkpointing_steps=1000"]);
    let args: Vec<&str> = settings.flat_map(|setting| ["--set", setting]).collect();
    let plan = bench.run(&[&args[..], &["--plan", "--json"]].concat());
    assert!(plan.status.success(), "{}", String::from_utf8_lossy(&plan.stderr));
    let plan: Value = serde_json::from_slice(&plan.stdout).unwrap();
    bench.succeeds(&args);
    let text = fs::read_to_string(bench.path("out/t/metrics.jsonl")).unwrap();
    let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    let program = plan["memory"]["program"].as_f64().unwrap();
    let planned = plan["memory_total"].as_f64().unwrap() - program;
    let measured = last["peak_memory_bytes"].as_f64().unwrap() - program;
    eprintln!(
        "{sizes:?}: planned {:.1} MB, measured {:.1} MB above a program of {:.1} MB; {}",
        planned / 1e6,
        measured / 1e6,
        program / 1e6,
        plan["memory"]
    );
    (planned, measured)
}

#[test]
fn the_plan_is_within_ten_percent_of_what_is_measured() {
    // Weights and optimiser; activations of many slots; both, in each precision.
    let deep =
        ["drafter.dspark.num_draft_layers=24", "train.local_batch_size=1", "train.global_batch_size=2"];
    let wide = [
        "drafter.dspark.num_draft_layers=4",
        "drafter.dspark.num_anchors=64",
        "drafter.dspark.block_size=16",
        "train.local_batch_size=8",
        "train.global_batch_size=8",
    ];
    let both = [
        "drafter.dspark.num_draft_layers=12",
        "drafter.dspark.num_anchors=48",
        "drafter.dspark.markov={type: vanilla, rank: 1024}",
        "train.local_batch_size=4",
        "train.global_batch_size=8",
    ];
    let mut off = vec![];
    for sizes in [&deep[..], &wide, &both] {
        for precision in ["train.precision=fp32", "train.precision=bf16"] {
            let sizes = [sizes, &[precision]].concat();
            let (planned, measured) = planned_and_measured(&sizes);
            if (planned / measured - 1.0).abs() > 0.1 {
                off.push(format!("{sizes:?}: planned {planned:.0}, measured {measured:.0}"));
            }
        }
    }
    assert!(off.is_empty(), "{}", off.join("\n"));
}
