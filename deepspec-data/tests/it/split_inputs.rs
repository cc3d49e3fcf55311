//! `split` on every kind of input: parquet of both layouts, JSON, compressed text, folders, the
//! hub.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use arrow_array::builder::{LargeListBuilder, ListBuilder, StringBuilder, StructBuilder};
use arrow_array::{ArrayRef, Decimal128Array, Float64Array, Int64Array, RecordBatch, StringArray};
use arrow_schema::{DataType, Field};
use deepspec_testkit::hub::{FakeHub, FakeRepo};
use flate2::Compression;
use flate2::write::GzEncoder;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression as Codec, GzipLevel};
use parquet::file::properties::WriterProperties;
use serde_json::{Value, json};

use crate::process::{command, ended, lines, rows, text};
use crate::split::{good, report, split};

/// Writes columns as a parquet file.
pub fn write_parquet(path: &Path, columns: Vec<(&str, ArrayRef)>, codec: Codec, group: usize) {
    let batch =
        RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(n, a)| (n, a, true))).unwrap();
    let properties =
        WriterProperties::builder().set_compression(codec).set_max_row_group_row_count(Some(group)).build();
    let file = File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

/// A column of `list<struct<…>>` conversations as on the hub.
pub fn messages(fields: [&str; 2], data: &[&[(&str, &str)]]) -> ArrayRef {
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
    Arc::new(list.finish())
}

fn train(dir: &Path) -> Vec<String> {
    rows(&dir.join("train.jsonl")).into_iter().map(|row| Value::Object(row).to_string()).collect()
}

#[test]
fn parquet_of_both_shapes_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let dataset = dir.path().join("data.parquet");
    let data: [&[(&str, &str)]; 3] =
        [&[("human", "hi"), ("gpt", "ho")], &[("gpt", "ho")], &[("human", "ça va?")]];
    let sources: ArrayRef = Arc::new(StringArray::from(vec![None, Some("web"), Some("web")]));
    let columns = vec![("conversations", messages(["from", "value"], &data)), ("source", sources)];
    // One row per group, so that rows and groups are distinguished.
    write_parquet(&dataset, columns, Codec::SNAPPY, 1);
    let ended = split(&dataset, &["--test-size", "0"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("data.parquet:2: the conversation starts with an assistant"), "{ended:?}");
    let expected = [
        r#"{"id":0,"conversations":[{"role":"user","content":"hi"},{"role":"assistant","content":"ho"}]}"#,
        r#"{"id":2,"conversations":[{"role":"user","content":"ça va?"}],"source":"web"}"#,
    ];
    assert_eq!(train(dir.path()), expected);

    let ids: ArrayRef = Arc::new(Int64Array::from(vec![70]));
    let data: [&[(&str, &str)]; 1] = [&[("user", "hi"), ("critic", "x"), ("tool", "y")]];
    let columns = vec![("messages", messages(["role", "content"], &data)), ("id", ids)];
    write_parquet(&dataset, columns, Codec::GZIP(GzipLevel::default()), 10);
    let ended = split(&dataset, &["--test-size", "0", "--overwrite"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("messages dropped, by speaker: 1 critic;"), "{ended:?}");
    let expected =
        r#"{"id":70,"conversations":[{"role":"user","content":"hi"},{"role":"tool","content":"y"}]}"#;
    assert_eq!(train(dir.path()), [expected]);
}

/// Tool calls in a separate column, null if there are none, in lists with 64-bit offsets.
#[test]
fn tool_calls_travel_through_columns() {
    let dir = tempfile::tempdir().unwrap();
    let dataset = dir.path().join("data.parquet");
    let calls = Field::new("tool_calls", DataType::new_list(DataType::Utf8, true), true);
    let text = |name| Field::new(name, DataType::Utf8, true);
    let fields = vec![text("role"), text("content"), calls];
    let make = || {
        StructBuilder::new(
            fields.clone(),
            vec![
                Box::new(StringBuilder::new()),
                Box::new(StringBuilder::new()),
                Box::new(ListBuilder::new(StringBuilder::new())),
            ],
        )
    };
    let mut list = LargeListBuilder::new(make());
    for (role, content, call) in
        [("user", Some("1+1?"), None), ("assistant", None, Some("add")), ("tool", Some("2"), None)]
    {
        let message = list.values();
        message.field_builder::<StringBuilder>(0).unwrap().append_value(role);
        message.field_builder::<StringBuilder>(1).unwrap().append_option(content);
        let calls = message.field_builder::<ListBuilder<StringBuilder>>(2).unwrap();
        call.inspect(|call| calls.values().append_value(call));
        calls.append(call.is_some());
        message.append(true);
    }
    list.append(true);
    let tools: ArrayRef = Arc::new(StringArray::from(vec!["[]"]));
    write_parquet(
        &dataset,
        vec![("messages", Arc::new(list.finish())), ("tools", tools)],
        Codec::UNCOMPRESSED,
        10,
    );
    assert_eq!(split(&dataset, &["--test-size", "0"]).code, Some(0));
    let expected = r#"{"id":0,"conversations":[{"role":"user","content":"1+1?"},{"role":"assistant","content":"","tool_calls":["add"]},{"role":"tool","content":"2"}],"tools":"[]"}"#;
    assert_eq!(train(dir.path()), [expected]);
}

/// Decimals and large integers keep their digits, because they are never converted to floats.
#[test]
fn typed_columns_travel_along_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let dataset = dir.path().join("data.parquet");
    let price = Decimal128Array::from(vec![12_345_678_901_234_567_890_123, 100]);
    let price: ArrayRef = Arc::new(price.with_precision_and_scale(30, 3).unwrap());
    let count: ArrayRef = Arc::new(Int64Array::from(vec![Some(i64::MAX), None]));
    let rate: ArrayRef = Arc::new(Float64Array::from(vec![0.1, 1e10]));
    let data: [&[(&str, &str)]; 2] = [&[("user", "hi")], &[("user", "ho")]];
    let columns = vec![
        ("messages", messages(["role", "content"], &data)),
        ("price", price),
        ("count", count),
        ("rate", rate),
    ];
    write_parquet(&dataset, columns, Codec::SNAPPY, 2);
    let ended = split(&dataset, &["--test-size", "0"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let expected = concat!(
        r#"{"id":0,"conversations":[{"role":"user","content":"hi"}],"price":12345678901234567890.123,"#,
        r#""count":9223372036854775807,"rate":0.1}"#,
        "\n",
        r#"{"id":1,"conversations":[{"role":"user","content":"ho"}],"price":0.100,"rate":1.0e10}"#,
        "\n"
    );
    assert_eq!(fs::read_to_string(dir.path().join("train.jsonl")).unwrap(), expected);
}

#[test]
fn an_unknown_schema_shows_its_columns() {
    let dir = tempfile::tempdir().unwrap();
    let dataset = dir.path().join("data.parquet");
    let texts = || -> ArrayRef { Arc::new(StringArray::from(vec!["a"])) };
    write_parquet(&dataset, vec![("title", texts()), ("text", texts())], Codec::SNAPPY, 10);
    let columns = "the columns are `title` (string), `text` (string)";
    split(&dataset, &[]).fails_with(1, &["data.parquet: no column holds conversations", "`prompt`", columns]);
    write_parquet(&dataset, vec![("messages", texts())], Codec::SNAPPY, 10);
    let ended = split(&dataset, &["--test-size", "0"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let reason = "data.parquet:1: `messages` must be a non-empty array of messages, found a string";
    assert!(ended.stderr.contains(reason), "{ended:?}");
    let other = messages(["speaker", "text"], &[&[("a", "b")]]);
    write_parquet(&dataset, vec![("messages", other)], Codec::SNAPPY, 10);
    split(&dataset, &[]).fails_with(1, &["`messages` (list<struct<speaker: string, text: string>>)"]);
}

#[test]
fn text_of_every_kind_is_the_same_rows() {
    let dir = tempfile::tempdir().unwrap();
    let data: Vec<String> = (0..300).map(|index| good(index).to_string()).collect();
    let plain = lines(dir.path(), "plain.jsonl", &data);
    assert_eq!(split(&plain, &[]).code, Some(0));
    let expected = train(dir.path());
    let bytes = fs::read(&plain).unwrap();
    let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
    gz.write_all(&bytes).unwrap();
    let array = format!("[\n{}\n]\n", data.join(",\n"));
    let others = [
        ("lines.jsonl.gz", gz.finish().unwrap()),
        ("lines.ndjson.zst", zstd::encode_all(&bytes[..], 1).unwrap()),
        ("lines.json", bytes),
        ("array.json", array.clone().into_bytes()),
        ("marked.json", format!("\u{feff}{array}").into_bytes()),
        ("array.json.zst", zstd::encode_all(array.as_bytes(), 1).unwrap()),
    ];
    for (name, bytes) in others {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        assert_eq!(split(&path, &["--overwrite"]).code, Some(0), "{name}");
        assert_eq!(train(dir.path()), expected, "{name}");
    }

    fs::write(dir.path().join("cut.json"), &array[..array.len() / 2]).unwrap();
    let ended = split(&dir.path().join("cut.json"), &["--overwrite"]);
    assert!(ended.code == Some(1) && ended.stderr.contains("not valid JSON (EOF"), "{ended:?}");
    assert!(ended.stdout.contains("+ 1 rejected"), "{ended:?}");

    fs::write(dir.path().join("two.json"), array.repeat(2)).unwrap();
    let ended = split(&dir.path().join("two.json"), &["--overwrite"]);
    assert!(ended.stdout.starts_with("301 rows") && ended.stdout.contains("+ 1 rejected"), "{ended:?}");
    assert!(ended.stderr.contains("two.json:301: there is more text behind the `]`"), "{ended:?}");
}

#[test]
fn a_folder_is_one_dataset() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    fs::create_dir(&data).unwrap();
    fs::write(data.join("README.md"), "---").unwrap();
    lines(&data, "b.jsonl", &[good(2).to_string(), "x".into()]);
    let conversation: &[(&str, &str)] = &[("human", "hi"), ("gpt", "ho")];
    let columns = vec![("conversations", messages(["from", "value"], &[conversation; 2]))];
    write_parquet(&data.join("a.parquet"), columns, Codec::SNAPPY, 10);
    let ended = split(&data, &["--test-size", "0"]);
    assert_eq!(ended.stdout, "4 rows = 3 train + 0 eval + 0 not drawn + 1 rejected\n");
    assert!(ended.stderr.contains("b.jsonl:2: not valid JSON"), "{ended:?}");
    let ids: Vec<Value> = rows(&dir.path().join("train.jsonl")).iter().map(|row| row["id"].clone()).collect();
    assert_eq!(ids, [json!(0), json!(1), json!(2)]);
    let report = report(dir.path());
    let files = report["sources"][0]["files"].as_array().unwrap();
    assert_eq!(files.len(), 2);
    assert!(files.iter().all(|file| file["sha256"].as_str().unwrap().len() == 64));
}

#[test]
fn a_dataset_of_the_hub_is_fetched_and_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let texts =
        |from: usize| (from..from + 10).map(|index| good(index).to_string() + "\n").collect::<String>();
    let repo =
        FakeRepo::dataset("owner/chats").at("v1").file("train.jsonl", texts(0)).file("test.jsonl", texts(10));
    let commit = repo.commit();
    let hub = FakeHub::start([repo]);
    let split = |more: &[&str]| {
        let (train, eval) = (text(&dir.path().join("train.jsonl")), text(&dir.path().join("eval.jsonl")));
        let args = ["split", "--dataset", "owner/chats", "--train-output", &train, "--eval-output", &eval];
        let mut command = command(&[&args, more].concat());
        command
            .env("HF_ENDPOINT", hub.url())
            .env("HF_HOME", dir.path().join("cache"))
            .env_remove("HF_HUB_OFFLINE");
        ended(command)
    };
    let first = split(&["--revision", "v1", "--split", "test"]);
    assert_eq!(first.code, Some(0), "{first:?}");
    assert!(train(dir.path())[0].contains("question 10"));
    let report = report(dir.path());
    let source = &report["sources"][0];
    let named = [&source["dataset"], &source["revision"], &source["split"], &source["commit"]];
    assert_eq!(named, [&json!("owner/chats"), &json!("v1"), &json!("test"), &json!(commit)]);
    split(&["--revision", "v1", "--split", "dev", "--overwrite"])
        .fails_with(2, &["owner/chats", "dev", "train"]);
}
