//! `suites` on valid and invalid rows in the hub's format.

use std::fs;
use std::path::{Path, PathBuf};

use deepspec_testkit::skip::{Kind, skip};
use serde_json::{Value, json};

use crate::hub_rows::{DATASETS, dataset, invert};
use crate::process::{Ended, Row, lines, rows, run, text};

/// Lines of the published files, a few per suite; the lines of alpaca are our own.
fn published(suite: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/suites/{suite}.jsonl"))
}

fn suites(output: &Path, more: &[&str]) -> Ended {
    let output = text(output);
    run(&[&["suites", "--output-dir", &output], more].concat())
}

/// `--source` arguments for a suite's files.
fn sources(suite: &str, files: &[PathBuf]) -> Vec<String> {
    files.iter().flat_map(|file| ["--source".into(), format!("{suite}={}", file.display())]).collect()
}

fn refs(texts: &[String]) -> Vec<&str> {
    texts.iter().map(String::as_str).collect()
}

fn record(output: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(output.join("suites.json")).unwrap()).unwrap()
}

/// Writes a suite of these rows from files in the hub's format.
fn written(dir: &Path, suite: &str, data: &[Row], more: &[&str]) -> Ended {
    let files = dataset(suite).write(&dir.join("hub").join(suite), data);
    suites(&dir.join("out"), &[&refs(&sources(suite, &files))[..], more].concat())
}

#[test]
fn every_converter_gives_the_published_lines() {
    let dir = tempfile::tempdir().unwrap();
    let mut args = vec![];
    for dataset in &DATASETS {
        let data: Vec<Row> =
            rows(&published(dataset.suite)).iter().map(|line| invert(dataset.suite, line)).collect();
        let files = dataset.write(&dir.path().join("hub").join(dataset.suite), &data);
        args.extend(sources(dataset.suite, &files));
    }
    let out = dir.path().join("out");
    let ended = suites(&out, &refs(&args));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(ended.stdout.lines().last(), Some("12 suites = 12 written + 0 there already + 0 failed"));
    let record = record(&out);
    for dataset in &DATASETS {
        let (name, found) = (dataset.suite, fs::read(out.join(format!("{}.jsonl", dataset.suite))).unwrap());
        assert_eq!(found, fs::read(published(name)).unwrap(), "{name}: not the published bytes");
        let entry = &record["suites"][name];
        assert_eq!(entry["sha256"], deepspec_core::digest::sha256_of_bytes(&found));
        assert_eq!(
            entry["source"]["files"][0]["path"],
            text(&dir.path().join("hub").join(name).join(dataset.files[0]))
        );
        assert_eq!(entry["rows"], rows(&published(name)).len());
    }
    let entry = &record["suites"]["livecodebench"];
    assert_eq!(
        (&entry["domain"], &entry["cap"], &entry["converter"]),
        (&json!("code"), &json!(500), &json!("1"))
    );
    assert_eq!(record["suites"]["lbpp"]["cap"], Value::Null);
    assert!(fs::read_dir(&out).unwrap().all(|file| !text(&file.unwrap().path()).ends_with(".partial")));
}

/// All rows of all published files in this folder.
#[test]
fn whole_published_suites_come_back() {
    let folder = std::env::var_os("DEEPSPEC_SUITES_REFERENCE").map(PathBuf::from);
    let Some(folder) = folder else {
        return skip(Kind::Absent, "DEEPSPEC_SUITES_REFERENCE names no folder with the reference's suites");
    };
    let dir = tempfile::tempdir().unwrap();
    let mut compared = 0;
    for dataset in &DATASETS {
        let file = folder.join(format!("{}.jsonl", dataset.suite));
        if !file.is_file() {
            continue;
        }
        let data: Vec<Row> = rows(&file).iter().map(|line| invert(dataset.suite, line)).collect();
        let ended = written(dir.path(), dataset.suite, &data, &[]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let found = fs::read(dir.path().join(format!("out/{}.jsonl", dataset.suite))).unwrap();
        assert!(found == fs::read(&file).unwrap(), "{} differs", dataset.suite);
        compared += data.len();
    }
    assert!(compared > 0, "{} holds no suite", folder.display());
}

fn question(text: &str) -> Row {
    dataset("gsm8k").row(&[("question", json!(text))])
}

#[test]
fn what_is_there_is_kept_and_recognised() {
    let dir = tempfile::tempdir().unwrap();
    let (out, file) = (dir.path().join("out"), dir.path().join("out/gsm8k.jsonl"));
    assert_eq!(written(dir.path(), "gsm8k", &[question("a"), question("b")], &[]).code, Some(0));
    let first = fs::read(&file).unwrap();
    let again = written(dir.path(), "gsm8k", &[question("a"), question("b")], &[]);
    assert!(again.code == Some(0) && again.stdout.contains("gsm8k: 2 rows, there already,"), "{again:?}");

    // Other rows differ from the existing file, and only --overwrite replaces it.
    let other = [question("c")];
    written(dir.path(), "gsm8k", &other, &[]).fails_with(1, &["gsm8k.jsonl was made from", "--overwrite"]);
    assert_eq!(fs::read(&file).unwrap(), first);
    assert_eq!(written(dir.path(), "gsm8k", &other, &["--overwrite"]).code, Some(0));
    assert_eq!(rows(&file).len(), 1);

    fs::write(&file, "{\"turns\": [\"mine\"]}\n").unwrap();
    written(dir.path(), "gsm8k", &other, &[]).fails_with(1, &["gsm8k.jsonl was changed", "--overwrite"]);
    assert_eq!(rows(&file)[0]["turns"], json!(["mine"]));

    // Without a record, an equal file is accepted, and another one is not.
    fs::remove_file(out.join("suites.json")).unwrap();
    written(dir.path(), "gsm8k", &other, &[]).fails_with(1, &["not recorded", "--overwrite"]);
    assert!(!out.join("suites.json").exists());
    fs::write(&file, &first).unwrap();
    let taken = written(dir.path(), "gsm8k", &[question("a"), question("b")], &[]);
    assert!(taken.stdout.contains("there already"), "{taken:?}");
    assert_eq!(record(&out)["suites"]["gsm8k"]["rows"], 2);
}

#[test]
fn one_bad_suite_does_not_lose_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let row = |suite: &str| invert(suite, &rows(&published(suite))[0]);
    let blank = dataset("mt-bench").row(&[("prompt", json!(["Hi", " "]))]);
    let missing = dataset("aime24").row(&[("problem", Value::Null)]);
    let mut args = vec![];
    for (suite, data) in [
        ("mbpp", vec![row("mbpp")]),
        ("mt-bench", vec![row("mt-bench"), blank]),
        ("aime24", vec![row("aime24"), row("aime24"), missing]),
    ] {
        args.extend(sources(suite, &dataset(suite).write(&dir.path().join(suite), &data)));
    }
    args.extend(sources("gsm8k", &dataset("alpaca").write(&dir.path().join("alpaca"), &[row("alpaca")])));
    let ended = suites(&out, &refs(&args));
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stdout.ends_with("4 suites = 1 written + 0 there already + 3 failed\n"), "{ended:?}");
    for words in [
        "parquet:2: column `prompt`: text 2 of the list is blank",
        "parquet:3: column `problem`: expected a text, found nothing",
        "there is no column `question`; expected `question`, found `input`, `instruction`, `output`, `text`",
        "3 of 4 suites failed, as told above: gsm8k, aime24, mt-bench",
    ] {
        assert!(ended.stderr.contains(words), "{words} not in {ended:?}");
    }
    assert!(out.join("mbpp.jsonl").exists() && !out.join("aime24.jsonl").exists());
    assert_eq!(record(&out)["suites"].as_object().unwrap().len(), 1);
}

#[test]
fn suites_of_ones_own_are_described() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let data = [
        json!({"q": "Why?", "hint": "", "n": 1}).to_string(),
        json!({"q": "How?", "hint": "So.", "n": 2}).to_string(),
    ];
    let data = lines(dir.path(), "mine-data.jsonl", &data);
    let describe = |turns: &str, limit: usize| {
        let dataset = data.display();
        let said = [
            "name: mine".into(),
            "domain: code".into(),
            format!("dataset: {dataset}"),
            format!("turns: {turns}"),
            format!("limit: {limit}"),
        ];
        text(&lines(dir.path(), "mine.yaml", &said))
    };
    let description = describe("[\"{{ n }}. {{ q }} {{ hint|optional }}\", \"Sure {yes}?\"]", 1);
    let ended = suites(&out, &["--description", &description]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.starts_with("mine: 2 rows from "), "only what is described is written: {ended:?}");
    assert_eq!(
        fs::read_to_string(out.join("mine.jsonl")).unwrap(),
        "{\"turns\": [\"1. Why? \", \"Sure {yes}?\"]}\n{\"turns\": [\"2. How? So.\", \"Sure {yes}?\"]}\n"
    );
    let entry = &record(&out)["suites"]["mine"];
    assert_eq!((&entry["domain"], &entry["cap"], &entry["rows"]), (&json!("code"), &json!(1), &json!(2)));

    let list = suites(&out, &["--list"]);
    let line = list.stdout.lines().find(|line| line.starts_with("mine ")).unwrap();
    assert!(["code", "2", "1", "present"].iter().all(|word| line.contains(word)), "{line}");

    let changed = describe("[\"{{ q }}\"]", 1);
    suites(&out, &["--description", &changed]).fails_with(1, &["mine.jsonl was made by another conversion"]);
    assert_eq!(suites(&out, &["--description", &changed, "--overwrite"]).code, Some(0));
    assert_eq!(rows(&out.join("mine.jsonl"))[1]["turns"], json!(["How?"]));
    let column = describe("q", 1);
    suites(&out, &["--description", &column, "--overwrite"])
        .fails_with(1, &["mine-data.jsonl:1: column `q`", "expected a list of texts, found a string"]);
    assert_eq!(rows(&out.join("mine.jsonl")).len(), 2, "a failed suite leaves what was there");
}

#[test]
fn the_list_shows_what_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    assert_eq!(written(dir.path(), "gsm8k", &[question("a")], &[]).code, Some(0));
    assert_eq!(
        written(dir.path(), "mbpp", &[invert("mbpp", &rows(&published("mbpp"))[0])], &[]).code,
        Some(0)
    );
    fs::write(out.join("mbpp.jsonl"), "{\"turns\": [\"a\"]}\n{\"turns\": [\"b\"]}").unwrap();
    for loose in ["lbpp", "smoke-math"] {
        fs::write(out.join(format!("{loose}.jsonl")), "{\"turns\": [\"a\"]}\n").unwrap();
    }
    let table = suites(&out, &["--list"]);
    assert_eq!((table.code, table.stdout.lines().count()), (Some(0), 16), "{table:?}");
    assert!(
        table.stdout.lines().any(|line| line.starts_with("mbpp ") && line.contains("changed since recorded"))
    );
    let list: Value = serde_json::from_str(&suites(&out, &["--list", "--json"]).stdout).unwrap();
    let find = |name: &str| list.as_array().unwrap().iter().find(|one| one["name"] == name).unwrap();
    let states = [
        ("gsm8k", "present", json!(1)),
        ("mbpp", "changed-since-recorded", json!(2)),
        ("lbpp", "unrecorded", json!(1)),
        ("smoke-math", "present", json!(1)),
        ("alpaca", "absent", Value::Null),
    ];
    for (name, state, rows) in states {
        assert_eq!((&find(name)["state"], &find(name)["rows"]), (&json!(state), &rows), "{name}");
    }
    assert_eq!(find("alpaca")["source"], "tatsu-lab/alpaca");
    assert_eq!(find("gsm8k")["cap"], 500);
    assert_eq!(find("gsm8k")["sha256"], record(&out)["suites"]["gsm8k"]["sha256"]);
}

#[test]
fn mistakes_are_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let fails = |args: &[&str], words: &[&str]| suites(&out, args).fails_with(2, words);
    fails(&["--suite", "gsm9k"], &["`gsm9k` is no public suite", "swe-bench", "--description"]);
    fails(&["--source", "gsm8k"], &["--source gsm8k: expected NAME=FILE"]);
    fails(&["--source", "gsm8k=absent.parquet"], &["absent.parquet is no file"]);
    fails(&["--description", "absent.yaml"], &["absent.yaml"]);
    assert!(!out.exists());
    let odd = lines(dir.path(), "rows.csv", &["a".into()]);
    let source = format!("gsm8k={}", odd.display());
    suites(&out, &["--source", &source])
        .fails_with(1, &["gsm8k", "rows.csv", "expected a .parquet or .jsonl file"]);
    let broken = lines(dir.path(), "rows.parquet", &["PAR1".into()]);
    let source = format!("gsm8k={}", broken.display());
    suites(&out, &["--source", &source]).fails_with(1, &["rows.parquet", "not a readable parquet file"]);
    fs::write(out.join("suites.json"), "{").unwrap();
    fails(&["--source", &source], &["suites.json: not a record of suites"]);
    fails(&["--list"], &["suites.json: not a record of suites"]);
}
