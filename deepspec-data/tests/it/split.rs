//! `split` on JSON Lines: every row goes to one output, and its report says which.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::process::{Ended, lines, rows, run, text};

/// A conversation of two turns.
pub fn good(index: usize) -> Value {
    json!({"conversations": [
        {"from": "system", "value": "be brief"}, {"from": "human", "value": format!("question {index}")},
        {"from": "gpt", "value": "answer"}, {"from": "human", "value": "and then?"}, {"from": "bing", "value": "more"},
    ], "source": "test"})
}

/// Splits a dataset into `train.jsonl` and `eval.jsonl` in the same folder.
pub fn split(dataset: &Path, more: &[&str]) -> Ended {
    let dir = dataset.parent().unwrap();
    let (train, eval) = (text(&dir.join("train.jsonl")), text(&dir.join("eval.jsonl")));
    let dataset = text(dataset);
    let args = ["split", "--dataset", &dataset, "--train-output", &train, "--eval-output", &eval];
    run(&[&args, more].concat())
}

/// The report of `train.jsonl`.
pub fn report(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join("train.jsonl.report.json")).unwrap()).unwrap()
}

#[test]
fn every_row_lands_on_one_side() {
    let dir = tempfile::tempdir().unwrap();
    let data: Vec<String> = (0..100).map(|index| good(index).to_string()).collect();
    let dataset = lines(dir.path(), "data.jsonl", &data);
    let ended = split(&dataset, &["--test-size", "0.1"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(ended.stdout, "100 rows = 90 train + 10 eval + 0 not drawn + 0 rejected\n");
    let (train, eval) = (rows(&dir.path().join("train.jsonl")), rows(&dir.path().join("eval.jsonl")));
    let mut ids: Vec<u64> = train.iter().chain(&eval).map(|row| row["id"].as_u64().unwrap()).collect();
    ids.sort_unstable();
    assert!(ids.into_iter().eq(0..100));
    let id = train[0]["id"].as_u64().unwrap();
    assert_eq!(
        Value::Object(train[0].clone()).to_string(),
        format!(
            r#"{{"id":{id},"conversations":[{{"role":"system","content":"be brief"}},{{"role":"user","content":"question {id}"}},{{"role":"assistant","content":"answer"}},{{"role":"user","content":"and then?"}},{{"role":"assistant","content":"more"}}],"source":"test"}}"#
        )
    );
    let id = &eval[0]["id"];
    assert_eq!(
        Value::Object(eval[0].clone()),
        json!({"id": id, "turns": [format!("question {id}"), "and then?"]})
    );
    assert!(!dir.path().join("train.jsonl.rejected.jsonl").exists());
    assert!(!dir.path().join("train.jsonl.partial").exists());

    let before = fs::read(dir.path().join("train.jsonl")).unwrap();
    let again = split(&dataset, &["--test-size", "0.1"]);
    assert!(again.code == Some(0) && again.stderr.contains("nothing to do"), "{again:?}");
    split(&dataset, &["--test-size", "0.1", "--seed", "1"])
        .fails_with(2, &["train.jsonl exists", "--overwrite"]);
    assert_eq!(split(&dataset, &["--test-size", "0.1", "--overwrite"]).code, Some(0));
    assert_eq!(
        fs::read(dir.path().join("train.jsonl")).unwrap(),
        before,
        "the same seed gives the same split"
    );
    split(&dataset, &["--test-size", "0.1", "--overwrite", "--seed", "1"]);
    assert_ne!(fs::read(dir.path().join("train.jsonl")).unwrap(), before);
    let ended = split(&dataset, &["--sample-size", "20", "--overwrite"]);
    assert_eq!(ended.stdout, "100 rows = 19 train + 1 eval + 80 not drawn + 0 rejected\n");
}

#[test]
fn bad_rows_are_recorded_and_the_others_kept() {
    let dir = tempfile::tempdir().unwrap();
    let user = |id: Value| json!({"id": id, "messages": [{"role": "user", "content": "hi"}]}).to_string();
    let data = [
        good(0).to_string(),
        "{\"conversations\": [".into(),
        json!({"conversations": [{"from": "gpt", "value": "hi"}]}).to_string(),
        json!({"conversations": [{"from": "human", "value": ""}]}).to_string(),
        user(json!("a")),
        user(json!("a")),
        "[]".into(),
        user(json!(["a"])),
    ];
    let dataset = lines(dir.path(), "data.jsonl", &data);
    let ended = split(&dataset, &["--test-size", "0"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(ended.stdout, "8 rows = 3 train + 0 eval + 0 not drawn + 5 rejected\n");
    assert!(
        ended
            .stderr
            .contains(&format!("{}:3: the conversation starts with an assistant message", dataset.display()))
    );
    let kept: Vec<Value> =
        rows(&dir.path().join("train.jsonl")).iter().map(|row| row["id"].clone()).collect();
    assert_eq!(kept, [json!(0), json!("a"), json!("a~2")]);
    let report = report(dir.path());
    assert_eq!((&report["total"]["rejected"], &report["sources"][0]["renamed"]), (&json!(5), &json!(1)));
    let reasons = json!({"not_a_json_object": 2, "does_not_start_with_user": 1, "empty_message": 1,
        "malformed_id": 1});
    assert_eq!(report["sources"][0]["rejected_by_reason"], reasons);
    let rejected = rows(&dir.path().join("train.jsonl.rejected.jsonl"));
    let found: Vec<(u64, &str)> =
        rejected.iter().map(|row| (row["line"].as_u64().unwrap(), row["reason"].as_str().unwrap())).collect();
    let expected = [
        (2, "not valid JSON"),
        (3, "starts with an assistant"),
        (4, "is empty"),
        (7, "an array"),
        (8, "`id` must be"),
    ];
    for ((line, reason), (expected_line, words)) in found.iter().zip(expected) {
        assert!(*line == expected_line && reason.contains(words), "{line}: {reason}");
    }
    assert_eq!(found.len(), expected.len());

    let nothing = lines(dir.path(), "nothing.jsonl", &data[1..4]);
    let ended = split(&nothing, &["--overwrite"]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("none of the 3 rows is usable"), "{ended:?}");
}

#[test]
fn mistakes_are_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let dataset = lines(dir.path(), "data.jsonl", &[good(0).to_string()]);
    split(&dir.path().join("absent.jsonl"), &[]).fails_with(2, &["absent.jsonl", "no such file"]);
    split(&dataset, &["--revision", "main"]).fails_with(2, &["revision", "dataset of the hub"]);
    let ended = split(&dataset, &["--role", "gpt=bot"]);
    assert!(ended.code == Some(2) && ended.stderr.contains("unknown role `bot` (known: system"), "{ended:?}");
    split(&dataset, &["--decontaminate", "absent.jsonl"]).fails_with(2, &["absent.jsonl", "no such file"]);
    let empty = lines(dir.path(), "empty.jsonl", &[]);
    split(&empty, &[]).fails_with(1, &["empty.jsonl", "no rows"]);
    split(&dataset, &["--test-size", "1.5"]).fails_with(2, &["--test-size 1.5"]);
    let broken = lines(dir.path(), "broken.parquet", &["PAR1".into()]);
    split(&broken, &[]).fails_with(1, &["broken.parquet", "not a readable parquet file"]);
    let itself = text(&dataset);
    let eval = text(&dir.path().join("eval.jsonl"));
    run(&["split", "--dataset", &itself, "--train-output", &itself, "--eval-output", &eval])
        .fails_with(2, &["the dataset itself"]);
    let few = lines(dir.path(), "few.jsonl", &[good(0).to_string(), good(1).to_string()]);
    split(&few, &["--test-size", "0.95"]).fails_with(2, &["few.jsonl", "too small for --test-size 0.95"]);
    assert!(!dir.path().join("train.jsonl").exists());
}

#[test]
fn outputs_have_places_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let dataset = lines(dir.path(), "data.jsonl", &[good(0).to_string(), good(1).to_string()]);
    let suite = lines(dir.path(), "suite.jsonl", &[json!({"turns": ["x"]}).to_string()]);
    std::fs::create_dir(dir.path().join("sub")).unwrap();
    let (dataset, suite) = (text(&dataset), text(&suite));
    let path = |name: &str| format!("{}/{name}", dir.path().display());
    let refuses = |train: &str, eval: &str, words: &[&str]| {
        let (train, eval) = (path(train), path(eval));
        let args = ["split", "--dataset", &dataset, "--train-output", &train, "--eval-output", &eval];
        run(&[&args[..], &["--overwrite", "--decontaminate", &suite]].concat()).fails_with(2, words);
    };
    refuses("x.jsonl", "./x.jsonl", &["the same file"]);
    refuses("x.jsonl", "sub/../x.jsonl", &["the same file"]);
    refuses("new/x.jsonl", "new/./x.jsonl", &["the same file"]);
    refuses("x.jsonl", "x.jsonl.report.json", &["--eval-output", "report.json is written"]);
    refuses("x.jsonl", "sub/../x.jsonl.rejected.jsonl", &["--eval-output", "rejected.jsonl is written"]);
    refuses("x.jsonl", "x.jsonl.partial", &["--eval-output", "x.jsonl is written"]);
    refuses("x.jsonl", "suite.jsonl", &["--eval-output", "--decontaminate"]);
    refuses("sub/../suite.jsonl", "x.jsonl", &["--train-output", "--decontaminate"]);
    refuses("x.jsonl", "sub/../data.jsonl", &["--eval-output", "the dataset itself"]);
    refuses("sub", "x.jsonl", &["--train-output", "is a folder"]);
    refuses("x.jsonl", "new/", &["--eval-output", "is a folder"]);
    refuses("x.jsonl.gz", "y.jsonl", &["--train-output", "without .gz"]);
    refuses("x.jsonl", "y.jsonl.ZST", &["--eval-output", "without .ZST"]);
    let mut left: Vec<_> =
        fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["data.jsonl", "sub", "suite.jsonl"]);
}

#[test]
fn ids_are_unique_however_they_are_given() {
    let dir = tempfile::tempdir().unwrap();
    let row = |id: Value| match id {
        Value::Null => json!({"messages": [{"role": "user", "content": "hi"}]}).to_string(),
        id => json!({"id": id, "messages": [{"role": "user", "content": "hi"}]}).to_string(),
    };
    // Rows without an id get their index: 0, 1, 3 and 5. A row whose id is taken gets a numbered
    // one.
    let ids =
        [json!(null), json!(null), json!("5"), json!(null), json!(1), json!(null), json!("a"), json!(3)];
    let dataset = lines(dir.path(), "data.jsonl", &ids.map(row));
    let ended = split(&dataset, &["--test-size", "0"]);
    assert_eq!(ended.stdout, "8 rows = 8 train + 0 eval + 0 not drawn + 0 rejected\n");
    let kept: Vec<Value> =
        rows(&dir.path().join("train.jsonl")).iter().map(|row| row["id"].clone()).collect();
    let expected =
        [json!(0), json!(1), json!("5"), json!(3), json!("1~2"), json!("5~2"), json!("a"), json!("3~2")];
    assert_eq!(kept, expected);
    assert!(ended.stderr.contains("3 rows repeat the id of an earlier row"), "{ended:?}");
    assert_eq!(report(dir.path())["sources"][0]["renamed"], 3);
}

/// An unusable row must not change the other rows.
#[test]
fn one_pass_and_two_give_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let mut data: Vec<String> = (0..5000).map(|index| good(index).to_string()).collect();
    let clean = lines(dir.path(), "clean.jsonl", &data);
    assert_eq!(split(&clean, &["--sample-size", "1000"]).code, Some(0));
    let outputs = ["train.jsonl", "eval.jsonl"].map(|name| fs::read(dir.path().join(name)).unwrap());
    // At the end, so that the indexes of the others do not change.
    data.push("[]".into());
    let dataset = lines(dir.path(), "unclean.jsonl", &data);
    let ended = split(&dataset, &["--sample-size", "1000", "--overwrite"]);
    assert_eq!(ended.stdout, "5001 rows = 950 train + 50 eval + 4000 not drawn + 1 rejected\n");
    assert_eq!(outputs, ["train.jsonl", "eval.jsonl"].map(|name| fs::read(dir.path().join(name)).unwrap()));
    let left = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(left.into_iter().all(|name| !name.to_string_lossy().ends_with(".partial")));
}
