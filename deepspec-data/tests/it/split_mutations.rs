//! Damaged datasets: every input row is either written or reported, and the counts agree.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use deepspec_testkit::mutate::Fuzzer;
use parquet::basic::Compression;
use serde_json::{Map, Value, json};

use crate::process::{Row, rows};
use crate::split::{report, split};
use crate::split_inputs::{messages, write_parquet};

/// Names that `split` interprets.
const WORDS: [&str; 13] = [
    "human",
    "gpt",
    "tool",
    "system",
    "assistant",
    "x",
    "role",
    "from",
    "content",
    "value",
    "messages",
    "conversations",
    "id",
];

fn row(dice: &mut Fuzzer, index: usize) -> Value {
    let mut row = if dice.roll(2) == 0 {
        json!({"conversations": [
            {"from": "system", "value": "s"}, {"from": "human", "value": format!("q{}", index / 2)}, {"from": "gpt", "value": "a"}]})
    } else {
        json!({"tools": [{"name": "f"}], "messages": [
            {"role": "user", "content": [{"type": "text", "text": format!("q{}", index / 2)}]},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "function": {"name": "f"}}]},
            {"role": "tool", "content": "r", "tool_call_id": "c"}, {"role": "assistant", "content": "a"}]})
    };
    if dice.roll(3) == 0 {
        row["id"] = json!([format!("r{}", index / 2), index.to_string()][dice.roll(2)]);
    }
    row
}

/// Checks the outputs of a run against the number of input rows.
fn check(dir: &Path, count: usize, files: &[&Path]) {
    let (train, eval) = (rows(&dir.join("train.jsonl")), rows(&dir.join("eval.jsonl")));
    let rejected = match fs::exists(dir.join("train.jsonl.rejected.jsonl")).unwrap() {
        true => rows(&dir.join("train.jsonl.rejected.jsonl")),
        false => vec![],
    };
    let report = report(dir);
    let of = |name: &str| report["total"][name].as_u64().unwrap() as usize;
    assert_eq!(train.len() + eval.len() + rejected.len() + of("overlap"), count);
    assert_eq!(
        [of("rows"), of("train"), of("eval"), of("rejected")],
        [count, train.len(), eval.len(), rejected.len()]
    );
    let reasons: &Map<String, Value> = report["sources"][0]["rejected_by_reason"].as_object().unwrap();
    assert_eq!(reasons.values().map(|rows| rows.as_u64().unwrap()).sum::<u64>() as usize, rejected.len());
    for reject in &rejected {
        let (file, reason) = (reject["file"].as_str().unwrap(), reject["reason"].as_str().unwrap());
        assert!(files.iter().any(|path| path.to_str() == Some(file)), "{file}");
        let line = reject["line"].as_u64().unwrap() as usize;
        assert!(
            (1..=count).contains(&line) && reason.len() > 5 && !reason.contains('\n'),
            "{line}: {reason}"
        );
    }
    let mut ids = std::collections::HashSet::new();
    for row in train.iter().chain(&eval) {
        let id = row["id"].as_str().map_or_else(|| row["id"].to_string(), str::to_owned);
        assert!(ids.insert(id), "{row:?}");
    }
    train.iter().for_each(check_train);
}

/// Checks what every later stage expects of a row.
fn check_train(row: &Row) {
    let messages = deepspec_text::parse_messages(row).unwrap();
    deepspec_text::check_starts_with_user(&messages).unwrap();
}

#[test]
fn ten_thousand_mutated_rows_are_written_or_explained() {
    let dir = tempfile::tempdir().unwrap();
    let mut dice = Fuzzer::new(20, &WORDS);
    let count = 12_000;
    let data: Vec<Vec<u8>> = (0..count)
        .map(|index| {
            let row = row(&mut dice, index);
            dice.line(row)
        })
        .collect();
    let path = dir.path().join("data.jsonl");
    let mut file = File::create(&path).unwrap();
    data.iter().for_each(|line| file.write_all(&[&line[..], b"\n"].concat()).unwrap());
    let ended = split(&path, &[]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stdout.starts_with(&format!("{count} rows = ")), "{ended:?}");
    check(dir.path(), count, &[&path]);
    // The mutations must damage some rows, but not all.
    let good = rows(&dir.path().join("train.jsonl")).len();
    assert!((count / 5..count * 4 / 5).contains(&good), "{good} of {count}");

    // Rows that are still valid JSON give the same result as elements of an array.
    let valid = |line: &&Vec<u8>| serde_json::from_slice::<Value>(line).is_ok();
    let valid: Vec<&Vec<u8>> = data.iter().filter(valid).collect();
    let array =
        [&b"["[..], &valid.iter().map(|line| &line[..]).collect::<Vec<_>>().join(&b","[..]), b"]"].concat();
    let path = dir.path().join("data.json");
    fs::write(&path, array).unwrap();
    assert_eq!(split(&path, &["--overwrite"]).code, Some(1));
    check(dir.path(), valid.len(), &[&path]);
}

/// A parquet file that was truncated or overwritten somewhere: it yields rows, or one line names
/// the problem.
#[test]
fn damaged_parquet_files_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data.parquet");
    let conversation: &[(&str, &str)] = &[("human", "what is it?"), ("gpt", "this and that")];
    let columns = vec![("conversations", messages(["from", "value"], &vec![conversation; 500]))];
    write_parquet(&path, columns, Compression::SNAPPY, 100);
    let whole = fs::read(&path).unwrap();
    let mut dice = Fuzzer::new(21, &WORDS);
    let (mut failed, runs) = (0, 16);
    for run in 0..runs {
        let mut bytes = whole.clone();
        if run % 4 == 0 {
            bytes.truncate(dice.roll(whole.len()));
        } else {
            for _ in 0..=dice.roll(3) {
                let at = dice.roll(bytes.len());
                bytes[at] = dice.roll(256) as u8;
            }
        }
        fs::write(&path, bytes).unwrap();
        let ended = split(&path, &["--overwrite"]);
        assert!(matches!(ended.code, Some(0 | 1)), "{ended:?}");
        if !ended.stdout.is_empty() {
            continue;
        }
        failed += 1;
        ended.fails_with(1, &["data.parquet"]);
    }
    assert!(failed >= runs / 4, "{failed}");
}
