//! `run --verify tree:N`: answers, figures, reports and refusals.

mod common;

use std::fs;
use std::path::Path;

use common::greedy::changes_no_token;
use common::{
    answers, assert_refused, deepspec_eval, repository, results, run, run_ok, target_dir,
    write_bigram_drafter, write_domino, write_dspark_v4, write_eagle3, write_mtp, write_peagle,
};
use serde_json::{Value, json};

const SMALL: [&str; 9] = [
    "--limit",
    "4",
    "--max-new-tokens",
    "32",
    "--max-num-seqs",
    "2",
    "--no-baseline",
    "--suite",
    "smoke-math",
];

fn tiny(name: &str) -> String {
    repository(&format!("assets/{name}")).display().to_string()
}

/// Results and terminal output of a small run; long sentences are not wrapped.
fn evaluated(draft: &str, out: &Path, more: &[&str]) -> (Value, String) {
    let table = run_ok(draft, out, &[&SMALL[..], more].concat());
    (results(out), table.replace('\n', " "))
}

#[test]
fn at_temperature_0_trees_change_no_token() {
    let dir = tempfile::tempdir().unwrap();
    let [corpus, bigrams, domino, dspark_v4, peagle] =
        ["corpus", "bigrams", "domino", "dspark_v4", "peagle"].map(|name| dir.path().join(name));
    run_ok("none", &corpus, &["--seed", "7", "--limit", "8"]);
    write_bigram_drafter(&bigrams, answers(&corpus).values());
    write_domino(&domino);
    write_dspark_v4(&dspark_v4);
    write_peagle(&peagle);
    changes_no_token(&bigrams, &[(3, &["--verify", "tree:12"])]);
    for drafter in [&domino, &dspark_v4, &peagle] {
        changes_no_token(drafter, &[(16, &["--verify", "tree:10:3"])]);
    }
}

#[test]
fn a_tree_of_width_1_has_the_figures_of_a_chain_and_wider_trees_accept_more() {
    let dir = tempfile::tempdir().unwrap();
    let greedy = |name: &str, rule: &str| {
        let out = dir.path().join(name);
        evaluated(&tiny("tiny-dspark"), &out, &["--temperature", "0", "--verify", rule]).0
    };
    let [chain, narrow, wide] =
        [greedy("chain", "token"), greedy("narrow", "tree:7:1"), greedy("wide", "tree:48")];
    let counts = |found: &Value| {
        let mut counts = found["suites"][0]["counts"].clone();
        counts.as_object_mut().unwrap().remove("nodes");
        counts
    };
    assert_eq!(counts(&chain), counts(&narrow));
    assert_eq!(chain["overall"]["verify_rate"], narrow["overall"]["verify_rate"]);
    let nodes = |found: &Value| found["suites"][0]["counts"]["nodes"].clone();
    assert_eq!(
        (nodes(&chain), nodes(&narrow)),
        (Value::Null, chain["suites"][0]["counts"]["proposed"].clone())
    );
    let tau = |found: &Value| found["overall"]["accepted_length"].as_f64().unwrap();
    assert!(tau(&wide) > tau(&chain), "τ {} with trees, {} with chains", tau(&wide), tau(&chain));
    let cycles = wide["suites"][0]["counts"]["cycles"].as_u64().unwrap();
    assert!(nodes(&wide).as_u64().unwrap() > 40 * cycles, "{} nodes in {cycles} cycles", nodes(&wide));
}

#[test]
fn results_reports_and_comparisons_name_the_rule() {
    let dir = tempfile::tempdir().unwrap();
    let (chain, tree) = (dir.path().join("chain"), dir.path().join("tree"));
    let draft = tiny("tiny-dspark");
    evaluated(&draft, &chain, &["--temperature", "0"]);
    let (found, table) = evaluated(&draft, &tree, &["--temperature", "0", "--verify", "tree:20:3"]);
    assert_eq!(found["settings"]["verify"], json!("tree:20:3"));
    let report = fs::read_to_string(tree.join("report.md")).unwrap();
    for text in [&table, &report] {
        for words in [
            "--verify tree:20:3",
            "nodes per cycle",
            "a branch that ends counts as rejected there",
            "No release of vLLM, SGLang or llama.cpp verifies trees of block drafters",
            "speeds are those of an unoptimised path",
        ] {
            assert!(text.contains(words), "{words} not in {text}");
        }
    }
    let folders = [&chain, &tree].map(|folder| folder.display().to_string());
    let compared = deepspec_eval(&["compare", &folders[0], &folders[1]]);
    let told = String::from_utf8([compared.stdout, compared.stderr].concat()).unwrap().replace('\n', " ");
    assert!(told.contains("verify differs: \"token\"") && told.contains("\"tree:20:3\""), "{told}");
    // A folder holds the results of one rule.
    let other = run(&draft, &tree, &[&SMALL[..], &["--temperature", "0", "--verify", "tree:20"]].concat());
    assert_refused(&other, 2, &["verify", "tree:20:3"]);
    let file = dir.path().join("calibration.json").display().to_string();
    let refused = deepspec_eval(&["calibrate", &folders[1], "--output", &file]);
    assert_refused(&refused, 2, &["--verify tree:20:3"]);
}

/// Trees have no second draft rule, and workers and replicas answer as one engine does.
#[test]
fn above_temperature_0_workers_and_replicas_share_trees() {
    let dir = tempfile::tempdir().unwrap();
    let [whole, parts, replicas] = ["whole", "parts", "replicas"].map(|name| dir.path().join(name));
    let draft = tiny("tiny-dflash2");
    // One sequence per engine, so that all engines run batches of one.
    let asked = ["--temperature", "1", "--verify", "tree:12", "--max-num-seqs"];
    let with = |count, more: &[&'static str]| {
        let small = SMALL.iter().filter(|arg| !["--max-num-seqs", "2"].contains(arg)).copied();
        small.chain(asked).chain([count]).chain(more.iter().copied()).collect::<Vec<_>>()
    };
    run_ok(&draft, &whole, &with("1", &[]));
    for worker in ["0/2", "1/2"] {
        run_ok(&draft, &parts, &[with("1", &[]), vec!["--worker", worker]].concat());
    }
    run_ok(&draft, &parts, &with("1", &[]));
    run_ok(&draft, &replicas, &with("2", &["--replicas", "2"]));
    let found = results(&whole);
    assert_eq!((found.get("other_rule"), &found["settings"]["draft_sampling"]), (None, &json!("greedy")));
    for other in [&parts, &replicas] {
        assert_eq!(answers(other), answers(&whole));
        assert_eq!(results(other)["suites"][0]["counts"], found["suites"][0]["counts"]);
    }
}

#[test]
fn what_knows_no_trees_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let draft = tiny("tiny-dspark");
    let refused = |draft: &str, more: &[&str], words: &[&str]| {
        assert_refused(&run(draft, &out, &[&SMALL[..], more].concat()), 2, words);
        assert!(!out.exists(), "{more:?} wrote something");
    };
    let cases: [(&[&str], &str); 7] = [
        (&["--schedule", "fixed:2"], "--schedule"),
        (&["--schedule", "threshold:0.5"], "--schedule"),
        (&["--schedule", "prefix", "--cost", "c.json"], "--schedule"),
        (&["--confidence-threshold", "0.5"], "--confidence-threshold"),
        (&["--calibration", "c.json"], "--calibration"),
        (&["--draft-sampling", "probabilistic"], "--draft-sampling probabilistic"),
        (&["--cost", "c.json"], "--cost"),
    ];
    for (more, flag) in cases {
        let words = format!("{flag} is not for --verify tree:9");
        refused(&draft, &[&["--verify", "tree:9"], more].concat(), &[&words]);
    }
    for (rule, words) in [
        ("tree:0", "N from 1 to 1024"),
        ("tree:2000", "N from 1 to 1024"),
        ("tree:8:0", "W from 1"),
        ("tree", "expected token, block, tree:N"),
        ("trees:4", "expected token, block, tree:N"),
    ] {
        // The parser's own refusals have several lines.
        let output = run(&draft, &out, &["--verify", rule]);
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && told.contains(words), "{told}");
    }
    refused("none", &["--verify", "tree:9"], &["--verify needs a drafter"]);
    let [eagle3, mtp] = ["eagle3", "mtp"].map(|name| dir.path().join(name));
    write_eagle3(&eagle3);
    write_mtp(&mtp);
    for drafter in [&eagle3, &mtp, &target_dir()] {
        let name = drafter.display().to_string();
        let reason = "one token after the other";
        refused(&name, &["--verify", "tree:9"], &["--verify tree:9", &name, reason]);
    }
}
