//! The draft sampling rules: the default of each kind of drafter, and both rules side by side.

mod common;

use std::fs;
use std::path::Path;

use common::{
    assert_refused, deepspec_eval, drafter_config, repository, results, run, run_ok, target_dir,
    write_drafter,
};
use serde_json::{Value, json};

const SMALL: [&str; 9] = [
    "--limit",
    "3",
    "--max-new-tokens",
    "24",
    "--max-num-seqs",
    "1",
    "--no-baseline",
    "--suite",
    "smoke-math",
];

/// Checks that a report, whose long sentences are wrapped, says which engines draft and verify in the same way.
fn assert_says(table: &str, sentence: &str) {
    let table = table.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(table.contains(sentence), "{sentence} not in {table}");
}

/// At this temperature the rules of verification part within few tokens.
const HOT: [&str; 6] = ["--temperature", "2", "--seed", "1,2,3", "--other-rule", "off"];

fn tiny(name: &str) -> String {
    repository(&format!("assets/{name}")).display().to_string()
}

fn evaluated(draft: &str, out: &Path, more: &[&str]) -> (Value, String) {
    let table = run_ok(draft, out, &[&SMALL[..], &["--overwrite"], more].concat());
    (results(out), table)
}

#[test]
fn a_run_reports_both_rules_as_two_runs_would() {
    let dir = tempfile::tempdir().unwrap();
    let draft = tiny("tiny-dspark");
    let (found, table) = evaluated(&draft, dir.path(), &[]);
    assert_eq!(found["settings"]["draft_sampling"], "probabilistic", "DSpark with its Markov head draws");
    let other = &found["other_rule"];
    assert_eq!(
        (&other["draft_sampling"], &other["suites"][0]["suite"]),
        (&json!("greedy"), &json!("smoke-math"))
    );
    // Long sentences are wrapped.
    let table = table.replace('\n', " ");
    for words in ["τ probabilistic", "τ greedy", "--draft-sampling probabilistic"] {
        assert!(table.contains(words), "{words} not in {table}");
    }
    assert_says(
        &table,
        "vLLM does so with `draft_sample_method: probabilistic`. SGLang does so by default. Drafted tokens of τ greedy are the \
         drafter's likeliest. vLLM does so by default. SGLang does so with `SGLANG_DSPARK_USE_GREEDY_DRAFT=1`. llama.cpp does \
         so by default.",
    );
    let sglang =
        json!({"engine": "SGLang", "draft_sampling": "probabilistic", "verify": "token", "settings": []});
    assert!(found["engine_rules"].as_array().unwrap().contains(&sglang), "{}", found["engine_rules"]);
    let report = fs::read_to_string(dir.path().join("report.md")).unwrap();
    assert!(report.contains("Accepted length by draft rule") && report.contains("τ greedy"), "{report}");

    let (flipped, table) = evaluated(&draft, dir.path(), &["--draft-sampling", "greedy"]);
    assert_says(&table, "llama.cpp does so by default. Drafted tokens of τ probabilistic are drawn from");
    let lengths =
        |metrics: &Value| ["accepted_length", "accepted_length_interval"].map(|key| metrics[key].clone());
    assert_eq!(lengths(other), lengths(&flipped["overall"]));
    assert_eq!(lengths(&other["suites"][0]), lengths(&flipped["suites"][0]["metrics"]));
    assert_eq!(lengths(&flipped["other_rule"]), lengths(&found["overall"]));
    assert_eq!(flipped["other_rule"]["draft_sampling"], "probabilistic");
    // The other rule's pass changes neither the output distribution nor the first pass.
    let (alone, table) = evaluated(&draft, dir.path(), &["--other-rule", "off"]);
    assert_eq!((lengths(&alone["overall"]), alone.get("other_rule")), (lengths(&found["overall"]), None));
    assert!(!table.contains("τ greedy"), "{table}");
    assert_says(&table, "SGLang does so by default.");
    // At temperature 0 both rules are the same.
    let (greedy, _) = evaluated(&draft, dir.path(), &["--temperature", "0"]);
    assert_eq!(greedy.get("other_rule"), None);
}

#[test]
fn the_default_is_by_kind_and_said() {
    let dir = tempfile::tempdir().unwrap();
    let kinds = [
        ("tiny-dspark", &[][..], "probabilistic"),
        ("tiny-dspark", &["--no-markov"], "greedy"),
        ("tiny-dflash2", &[], "greedy"),
        ("tiny-dflash2", &["--draft-sampling", "probabilistic"], "probabilistic"),
    ];
    for (draft, more, rule) in kinds {
        let (found, _) = evaluated(&tiny(draft), dir.path(), &[more, &["--other-rule", "off"]].concat());
        assert_eq!(found["settings"]["draft_sampling"], rule, "{draft} {more:?}");
    }
    let mut dflash = drafter_config();
    (dflash.settings.markov, dflash.settings.confidence) = (None, None);
    let folder = dir.path().join("dflash");
    write_drafter(&folder, dflash, |_, tensor| tensor);
    let (target, out) = (target_dir().display().to_string(), dir.path().join("out").display().to_string());
    let suites = repository("eval_datasets").display().to_string();
    let args = [
        "run",
        "--target",
        &target,
        "--draft",
        folder.to_str().unwrap(),
        "--output-dir",
        &out,
        "--suites-dir",
        &suites,
    ];
    let output =
        deepspec_eval(&[&args[..], &SMALL[..], &["--device", "cpu", "--other-rule", "off"]].concat());
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && told.contains("drafted tokens: the drafter's likeliest"), "{told}");
    assert_refused(
        &run("none", dir.path(), &["--draft-sampling", "greedy"]),
        2,
        &["--draft-sampling needs a drafter"],
    );

    let help = String::from_utf8(deepspec_eval(&["run", "--help"]).stdout).unwrap();
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(!help.contains("accepts most"), "{help}");
    assert!(help.contains("Auto is by kind: probabilistic for DSpark with its Markov head"), "{help}");
}

#[test]
fn blocks_are_verified_by_the_rule_that_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let draft = tiny("tiny-dspark");
    let engines = [
        ("token", "SGLang does so by default."),
        ("block", "SGLang does so with `--speculative-use-block-verification`."),
    ];
    let [token, block] = engines.map(|(rule, engines)| {
        let out = dir.path().join(rule);
        let (found, table) = evaluated(&draft, &out, &[&HOT[..], &["--verify", rule]].concat());
        assert_says(&table, &format!("--verify {rule}"));
        assert_says(&table, engines);
        found
    });
    let greedy = ["--verify", "block", "--draft-sampling", "greedy"];
    let (_, table) = evaluated(&draft, &dir.path().join("greedy"), &[&HOT[..], &greedy].concat());
    assert_says(
        &table,
        "`SGLANG_DSPARK_USE_GREEDY_DRAFT=1`. Greedy drafts gain nothing by verification as a block.",
    );
    assert_eq!((token["settings"].get("verify"), &block["settings"]["verify"]), (None, &json!("block")));
    let cycles = |found: &Value| found["suites"][0]["counts"]["accepted_at"].clone();
    assert_ne!(cycles(&token), cycles(&block), "the answers do not tell the rules apart");
    // A folder holds the results of one rule, and the one without a name is that of earlier versions.
    let folder = dir.path().join("token");
    let other = run(&draft, &folder, &[&SMALL[..], &HOT, &["--verify", "block"]].concat());
    assert_refused(&other, 2, &["verify", "is \"block\""]);
    run_ok(&draft, &folder, &[&SMALL[..], &HOT].concat());
    // Confidences are about tokens that are verified one by one.
    let [whole, file] = ["block", "calibration.json"].map(|name| dir.path().join(name).display().to_string());
    assert_refused(&deepspec_eval(&["calibrate", &whole, "--output", &file]), 2, &["--verify block"]);
    assert_refused(&run("none", dir.path(), &["--verify", "block"]), 2, &["--verify needs a drafter"]);
}

/// An interrupted second pass is resumed, as the first one is.
#[test]
fn shards_hold_the_other_rule_too() {
    let dir = tempfile::tempdir().unwrap();
    let draft = tiny("tiny-dspark");
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    let (expected, _) = evaluated(&draft, &whole, &[]);
    for worker in ["0/2", "1/2"] {
        run_ok(&draft, &parts, &[&SMALL[..], &["--worker", worker]].concat());
    }
    run_ok(&draft, &parts, &SMALL[..]);
    assert_eq!(results(&parts)["other_rule"], expected["other_rule"]);
}
