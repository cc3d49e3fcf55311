//! Plans of the recipes at full size, without their targets.

use std::fs;
use std::process::Command;

use deepspec_checkpoint::DraftVocab;
use serde_json::Value;

use crate::common::workspace;
use crate::{parsed, recipes};

/// Further recipes, which differ from one of [`recipes`] in one setting.
const VARIANTS: [&str; 4] = [
    "dspark_sinks/qwen3_4b",
    "xpress/qwen3_4b_dflash2",
    "eagle3/qwen3_4b_draft_vocab",
    "peagle/qwen3_4b_draft_vocab",
];

/// Plans of [`recipes`] and [`VARIANTS`] at full size. Nothing is downloaded: the sizes are built in.
fn full_size_plans(args: &[&str]) -> Vec<(String, Value)> {
    let dir = tempfile::tempdir().unwrap();
    let vocab = dir.path().join("draft_vocab.safetensors");
    DraftVocab::most_frequent(&[1; 151_936], 32_000).unwrap().write(&vocab).unwrap();
    let plan = |what: String| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_deepspec-train"));
        command.arg("--config").arg(workspace().join(format!("configs/{what}.yaml")));
        command.args(["--plan", "--json"]).args(args).env("HF_HUB_OFFLINE", "1");
        command.env("HF_HUB_CACHE", dir.path()).env("HOME", dir.path());
        if let Some((kind, _)) = what.split_once("/qwen3_4b_draft_vocab") {
            command.arg("--set").arg(format!("drafter.{kind}.draft_vocab={}", vocab.display()));
        }
        let plan = parsed(&command.output().unwrap(), &what);
        (what, plan)
    };
    let plain = recipes().into_iter().map(|(algorithm, target, _)| format!("{algorithm}/{target}"));
    plain.chain(VARIANTS.map(String::from)).map(plan).collect()
}

#[test]
fn each_plans_at_full_size_without_its_target() {
    for (what, plan) in full_size_plans(&[]) {
        assert!(plan["data_missing"].as_str().is_some_and(|missing| missing.contains("not on this machine")));
        assert!(plan["trainable_weights"].as_u64().unwrap() > 100_000_000, "{what}: {plan}");
        assert!(plan["memory_total"].as_u64().unwrap() > 1 << 30, "{what}: {plan}");
        if what == "dspark/qwen3_4b" {
            // docs/architecture.md, Cost of a cache: about 38 TB for the published rows.
            assert_eq!(plan["cache_bytes_per_token"], 30_720);
        }
    }
}

/// docs/training.md tells the sizes of some recipes, in its rounding.
#[test]
fn the_sizes_of_recipes_in_the_docs_are_those_of_their_plans() {
    let docs = fs::read_to_string(workspace().join("docs/training.md")).unwrap();
    let (_, table) =
        docs.split_once("| recipe | trained weights | states of a token | memory of a process |").unwrap();
    let rows: Vec<&str> = table.lines().skip(2).take_while(|line| line.starts_with('|')).collect();
    assert!(rows.len() > 5, "{rows:?}");
    for row in rows {
        let [recipe, weights, states, memory] =
            row.trim_matches('|').split('|').map(str::trim).collect::<Vec<_>>()[..]
        else {
            panic!("{row}");
        };
        let cache = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_deepspec-train"));
        command.arg("--config").arg(workspace().join(recipe.trim_matches('`'))).args(["--plan", "--json"]);
        command.args(["--device", "cpu"]).env("HF_HUB_OFFLINE", "1");
        command.env("HF_HUB_CACHE", cache.path()).env("HOME", cache.path());
        let plan = parsed(&command.output().unwrap(), recipe);
        let number = |found: &Value| found.as_f64().unwrap();
        assert_rounded(weights, number(&plan["trainable_weights"]), row);
        assert_rounded(states, number(&plan["cache_bytes_per_token"]), row);
        // The program's own memory differs between machines: from nothing to 0.8 GB.
        let tensors = number(&plan["memory_total"]) - number(&plan["memory"]["program"]);
        let (told, last) = rounded(memory, row);
        assert!((-last..0.8e9 + last).contains(&(told - tensors)), "{row}: {told} beside {tensors}");
    }
}

/// Asserts that `told` is the rounded `value`.
fn assert_rounded(told: &str, value: f64, row: &str) {
    let (found, last) = rounded(told, row);
    assert!((found - value).abs() <= 0.5001 * last, "{row}: {told} beside {value}");
}

/// A number with its unit, and what a unit of its last digit is worth.
fn rounded(told: &str, row: &str) -> (f64, f64) {
    let (number, unit) = told.split_once(' ').unwrap();
    let unit = match unit {
        "kB" => 1e3,
        "M" => 1e6,
        "B" | "GB" => 1e9,
        other => panic!("{other}: {row}"),
    };
    let last = 0.1f64.powi(number.split_once('.').map_or(0, |(_, decimals)| decimals.len() as i32));
    (number.parse::<f64>().unwrap() * unit, last * unit)
}

/// The estimates use manufacturers' figures for accelerators. The values here are shares of these
/// figures and not measurements.
#[test]
fn all_stages_are_foretold_at_full_size() {
    let args = ["--hardware", "h100", "--price", "2", "--rows", "1200000", "--devices", "1,8,64"];
    for (what, plan) in full_size_plans(&args) {
        let pipeline = &plan["pipeline"];
        let estimates = pipeline["estimates"].as_array().unwrap();
        assert_eq!(estimates.len(), 3, "{what}: {pipeline}");
        for stage in ["answers", "states", "training", "evaluation"] {
            let seconds: Vec<f64> =
                estimates.iter().map(|one| one["stages"][stage].as_f64().unwrap()).collect();
            assert!(seconds.windows(2).all(|pair| pair[1] < pair[0]), "{what}: {stage}: {seconds:?}");
            // At most as fast as the number of accelerators allows, and at least half as fast. Of the experts a token takes few, and
            // the gradients of all travel between accelerators.
            let has_experts = ["dspark_v4/deepseek_v4_flash", "mtp/qwen3_5_35b_a3b"].contains(&what.as_str());
            let least = if has_experts { 0.3 } else { 0.5 };
            assert!(
                (least..1.0 + 1e-9).contains(&(seconds[0] / seconds[2] / 64.0)),
                "{what}: {stage}: {seconds:?}"
            );
        }
        for one in estimates {
            let of = |key: &str| one[key].as_f64().unwrap();
            assert!((of("device_hours") * 2.0 / of("price") - 1.0).abs() < 1e-9);
            assert!((of("seconds") * of("devices") / 3600.0 / of("device_hours") - 1.0).abs() < 1e-9);
        }
        if what == "dspark/qwen3_4b" {
            // 1,200 tokens per row, 1,000 of them supervised: 5 taps of all tokens, and the last
            // states of 1,001 tokens.
            let states = pipeline["work"]["bytes"]["states"].as_f64().unwrap();
            assert_eq!(states, 1.2e6 * (5.0 * 1200.0 + 1001.0) * 2560.0 * 2.0);
            assert_eq!(pipeline["work"]["training"]["steps"], 23_430.0);
        }
    }
}
