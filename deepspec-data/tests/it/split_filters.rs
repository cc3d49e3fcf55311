//! Rows that `split` drops, keeps and mixes by its options.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::process::{lines, rows, text};
use crate::split::{good, report, split};

fn asks(prompt: &str) -> String {
    let says = |from, value| json!({"from": from, "value": value});
    json!({"conversations": [says("human", prompt), says("gpt", "answer")]}).to_string()
}

fn ids(dir: &Path, name: &str) -> Vec<Value> {
    rows(&dir.join(name)).iter().map(|row| row["id"].clone()).collect()
}

#[test]
fn speakers_are_mapped_kept_or_counted() {
    let dir = tempfile::tempdir().unwrap();
    let row = json!({"conversations": [
        {"from": "system", "value": "be brief"}, {"from": "human", "value": "1+1?"},
        {"from": "function_call", "value": "add(1, 1)"}, {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "2"}]});
    let dataset = lines(dir.path(), "data.jsonl", &[row.to_string(), row.to_string()]);
    let roles = |dir: &Path| -> Vec<String> {
        let row = &rows(&dir.join("train.jsonl"))[0];
        let messages = row["conversations"].as_array().unwrap();
        messages.iter().map(|message| message["role"].as_str().unwrap().to_string()).collect()
    };
    let ended = split(&dataset, &["--test-size", "0"]);
    assert_eq!(
        ended.stdout,
        "2 rows = 2 train + 0 eval + 0 not drawn + 0 rejected\n\
         messages dropped, by speaker: 2 function_call, 2 observation; --role SPEAKER=ROLE keeps them\n"
    );
    assert_eq!(roles(dir.path()), ["system", "user", "assistant"]);
    let dropped = json!({"function_call": 2, "observation": 2});
    assert_eq!(report(dir.path())["sources"][0]["dropped_messages"], dropped);

    let more = ["--role", "function_call=assistant", "--role", "observation=tool", "--drop-system"];
    let ended = split(&dataset, &[&["--test-size", "0", "--overwrite"], &more[..]].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(roles(dir.path()), ["user", "assistant", "tool", "assistant"]);
}

#[test]
fn prompts_that_occurred_before_are_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let system = |text: &str| {
        let turns = json!([{"role": "system", "content": text}, {"role": "user", "content": "a"}]);
        json!({"messages": turns}).to_string()
    };
    let data =
        [asks("a"), asks("b"), asks("  a\n"), asks("a b"), asks("a  b"), system("a"), system("x"), asks("b")];
    let dataset = lines(dir.path(), "data.jsonl", &data);
    let ended = split(&dataset, &["--test-size", "0", "--dedup"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(ended.stdout, "8 rows = 5 train + 0 eval + 0 not drawn + 3 duplicates + 0 rejected\n");
    assert_eq!(ids(dir.path(), "train.jsonl"), [0, 1, 3, 5, 6].map(|id| json!(id)));
}

#[test]
fn prompts_of_suites_are_dropped_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let question =
        "Esmeralda has 4 blueberries and collects 9 more at the market. How many blueberries has she?";
    let suite = |name: &str, turns: &[&str]| {
        let rows = turns.iter().map(|turn| json!({"turns": [turn]}).to_string());
        text(&lines(dir.path(), name, &rows.collect::<Vec<_>>()))
    };
    let (math, chat) = (suite("math.jsonl", &["1+1?", question]), suite("chat.jsonl", &["hello there"]));
    let edited = format!("Please: {}", question.to_lowercase().replace('.', ";"));
    let data =
        [asks("what is 1+1?"), asks(" 1+1?"), asks(&edited), asks("hello  there"), asks("x"), asks("x")];
    let dataset = lines(dir.path(), "data.jsonl", &data);
    let ended = split(&dataset, &["--test-size", "0", "--dedup", "--decontaminate", &math, &chat]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(
        ended.stdout,
        format!(
            "6 rows = 2 train + 0 eval + 0 not drawn + 1 duplicates + 3 contaminated + 0 rejected\ncontaminated: 1 {chat}, 2 {math}\n"
        )
    );
    assert_eq!(ids(dir.path(), "train.jsonl"), [json!(0), json!(4)]);
    let report = report(dir.path());
    let suites = &report["suites"];
    assert_eq!((&suites[0]["contaminated"], &suites[1]["contaminated"]), (&json!(2), &json!(1)));
    let examples = json!([
        {"file": dataset, "line": 2, "suite_line": 1, "shared": "turn"},
        {"file": dataset, "line": 3, "suite_line": 2, "shared": "13_words"}]);
    assert_eq!(suites[0]["examples"], examples);
    assert_eq!(suites[0]["sha256"].as_str().unwrap().len(), 64);

    split(&dataset, &["--overwrite", "--decontaminate", &text(&dataset)])
        .fails_with(1, &["data.jsonl:1: `turns` must be a list of texts"]);
}

fn mix(dir: &Path, sources: &str) -> PathBuf {
    let path = dir.join("mix.yaml");
    fs::write(&path, format!("sources:\n{sources}")).unwrap();
    path
}

#[test]
fn a_mix_has_its_sources_in_proportion() {
    let dir = tempfile::tempdir().unwrap();
    let many: Vec<String> = (0..900).map(|index| good(index).to_string()).collect();
    let few: Vec<String> = (0..100)
        .map(|index| json!({"id": format!("r{index}"), "messages": [{"role": "user", "content": format!("q {index}")}, {"role": "poet", "content": "a"}]}).to_string())
        .collect();
    let (many, few) =
        (text(&lines(dir.path(), "many.jsonl", &many)), text(&lines(dir.path(), "few.jsonl", &few)));
    let sources = format!(
        "  - {{name: big, dataset: {many}, weight: 3}}\n  - {{name: small, dataset: {few}, weight: 1, roles: {{poet: assistant}}}}\n"
    );
    let config = mix(dir.path(), &sources);
    let ended = split(&config, &["--test-size", "0.1"]);
    assert_eq!(
        ended.stdout,
        "1000 rows = 361 train + 41 eval + 598 not drawn + 0 rejected\n\
         big: 900 rows = 271 train + 31 eval + 598 not drawn + 0 rejected\n\
         small: 100 rows = 90 train + 10 eval + 0 not drawn + 0 rejected\n"
    );
    let (train, eval) = (ids(dir.path(), "train.jsonl"), ids(dir.path(), "eval.jsonl"));
    let mut counts = BTreeMap::new();
    let mut unique = std::collections::HashSet::new();
    for id in train.iter().chain(&eval) {
        let id = id.as_str().unwrap();
        assert!(unique.insert(id.to_string()));
        *counts.entry(id.split('/').next().unwrap().to_string()).or_insert(0) += 1;
    }
    assert_eq!(counts, BTreeMap::from([("big".into(), 302), ("small".into(), 100)]));
    assert!(unique.iter().any(|id| id.starts_with("small/r")));
    let last = rows(&dir.path().join("train.jsonl")).pop().unwrap();
    assert_eq!(last["conversations"][1]["role"], "assistant");
    assert_eq!(report(dir.path())["sources"][1]["weight"], 1.0);

    let ended = split(&config, &["--test-size", "0", "--sample-size", "8", "--overwrite"]);
    assert!(
        ended.stdout.contains("big: 900 rows = 6 train")
            && ended.stdout.contains("small: 100 rows = 2 train")
    );
    split(&config, &["--sample-size", "800", "--overwrite"])
        .fails_with(2, &["source `small` has 100 of the 200 rows", "the mix has 402 rows"]);
}

#[test]
fn a_wrong_mix_says_where() {
    let dir = tempfile::tempdir().unwrap();
    let data = text(&lines(dir.path(), "data.jsonl", &[good(0).to_string()]));
    let fails = |sources: &str, words: &[&str]| split(&mix(dir.path(), sources), &[]).fails_with(2, words);
    fails(
        &format!("  - {{name: a, dataset: {data}, wieght: 1}}\n"),
        &["mix.yaml:2", "did you mean `weight`"],
    );
    fails(&format!("  - {{name: a, dataset: {data}, weight: 0}}\n"), &["sources[0].weight", "above 0"]);
    fails(&format!("  - {{name: a/b, dataset: {data}, weight: 1}}\n"), &["sources[0].name", "a/b"]);
    let one = format!("  - {{name: a, dataset: {data}, weight: 1}}\n");
    fails(&one.repeat(2), &["sources[1].name", "used before"]);
    fails("  - {name: a, dataset: absent.jsonl, weight: 1}\n", &["absent.jsonl", "no such file"]);
    fails(&format!("  - {{name: a, dataset: {data}, weight: 1, roles: {{gpt: bot}}}}\n"), &["roles", "bot"]);
    fails("  []\n", &["no sources"]);
    split(&mix(dir.path(), &one), &["--split", "train"]).fails_with(2, &["--split", "write it into"]);
}
