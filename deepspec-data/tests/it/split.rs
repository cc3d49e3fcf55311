//! `split` on files of both kinds, good and bad.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, ListBuilder, RecordBatch, StringArray, StringBuilder, StructBuilder};
use arrow::datatypes::{DataType, Field};
use parquet::arrow::ArrowWriter;
use serde_json::{Value, json};

use crate::process::{Ended, lines, rows, run, text};

/// A conversation of two turns.
fn good(index: usize) -> Value {
    json!({"conversations": [
        {"from": "system", "value": "be brief"}, {"from": "human", "value": format!("question {index}")},
        {"from": "gpt", "value": "answer"}, {"from": "human", "value": "and then?"}, {"from": "bing", "value": "more"},
    ], "source": "test"})
}

fn split(dataset: &Path, more: &[&str]) -> Ended {
    let dir = dataset.parent().unwrap();
    let (train, eval) = (text(&dir.join("train.jsonl")), text(&dir.join("eval.jsonl")));
    let dataset = text(dataset);
    let args = ["split", "--dataset", &dataset, "--train-output", &train, "--eval-output", &eval];
    run(&[&args, more].concat())
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
    split(&dataset, &["--test-size", "0.1"]).fails_with(2, &["train.jsonl exists", "--overwrite"]);
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
    assert_eq!(ended.stdout, "8 rows = 2 train + 0 eval + 0 not drawn + 6 rejected\n");
    assert!(
        ended
            .stderr
            .contains(&format!("{}:3: the conversation starts with an assistant message", dataset.display()))
    );
    assert_eq!(rows(&dir.path().join("train.jsonl")).len(), 2);
    let rejected = rows(&dir.path().join("train.jsonl.rejected.jsonl"));
    let found: Vec<(u64, &str)> =
        rejected.iter().map(|row| (row["line"].as_u64().unwrap(), row["reason"].as_str().unwrap())).collect();
    let expected = [
        (2, "not valid JSON"),
        (3, "starts with an assistant"),
        (4, "is empty"),
        (6, "`a` was used"),
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

/// A parquet file of `list<struct<…>>` conversations, as the hub has them.
fn parquet(path: &Path, column: &str, fields: [&str; 2], data: &[&[(&str, &str)]]) {
    let schema: Vec<Field> = fields.iter().map(|name| Field::new(*name, DataType::Utf8, true)).collect();
    let mut list = ListBuilder::new(StructBuilder::from_fields(schema, 0));
    for messages in data {
        for (speaker, said) in *messages {
            let message = list.values();
            message.field_builder::<StringBuilder>(0).unwrap().append_value(speaker);
            message.field_builder::<StringBuilder>(1).unwrap().append_value(said);
            message.append(true);
        }
        list.append(true);
    }
    let sources: ArrayRef =
        Arc::new(StringArray::from_iter((0..data.len()).map(|i| (i > 0).then_some("web"))));
    let columns = [(column, Arc::new(list.finish()) as ArrayRef), ("source", sources)];
    let batch = RecordBatch::try_from_iter(
        columns.map(|(name, array)| (name.to_string(), array, true)).map(|(n, a, _)| (n, a)),
    )
    .unwrap();
    let mut writer = ArrowWriter::try_new(File::create(path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

#[test]
fn parquet_of_both_shapes_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let dataset = dir.path().join("data.parquet");
    let data: [&[(&str, &str)]; 3] =
        [&[("human", "hi"), ("gpt", "ho")], &[("gpt", "ho")], &[("human", "ça va?")]];
    parquet(&dataset, "conversations", ["from", "value"], &data);
    let ended = split(&dataset, &["--test-size", "0"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("data.parquet:2: "), "{ended:?}");
    let train = rows(&dir.path().join("train.jsonl"));
    assert_eq!(
        Value::Object(train[0].clone()).to_string(),
        r#"{"id":0,"conversations":[{"role":"user","content":"hi"},{"role":"assistant","content":"ho"}]}"#
    );
    assert_eq!(
        Value::Object(train[1].clone()).to_string(),
        r#"{"id":2,"conversations":[{"role":"user","content":"ça va?"}],"source":"web"}"#
    );

    parquet(&dataset, "messages", ["role", "content"], &[&[("user", "hi"), ("tool", "x")]]);
    assert_eq!(split(&dataset, &["--test-size", "0", "--overwrite"]).code, Some(0));
    let train = rows(&dir.path().join("train.jsonl"));
    assert_eq!(
        Value::Object(train[0].clone()).to_string(),
        r#"{"id":0,"conversations":[{"role":"user","content":"hi"}]}"#
    );
}

#[test]
fn mistakes_are_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let dataset = lines(dir.path(), "data.jsonl", &[good(0).to_string()]);
    split(&dir.path().join("absent.jsonl"), &[]).fails_with(2, &["absent.jsonl", "no such file"]);
    let hub = ["split", "--dataset", "owner/name", "--train-output", "a", "--eval-output", "b"];
    run(&hub).fails_with(2, &["owner/name", "hub is not there yet", "FILE.parquet"]);
    split(&dataset, &["--test-size", "1.5"]).fails_with(2, &["--test-size 1.5"]);
    let broken = lines(dir.path(), "broken.parquet", &["PAR1".into()]);
    split(&broken, &[]).fails_with(1, &["broken.parquet", "not a readable parquet file"]);
    let itself = text(&dataset);
    let eval = text(&dir.path().join("eval.jsonl"));
    run(&["split", "--dataset", &itself, "--train-output", &itself, "--eval-output", &eval])
        .fails_with(2, &["the dataset itself"]);
    assert!(!dir.path().join("train.jsonl").exists());
}
