//! Damaged Parquet files.

use std::fs::{self, File};
use std::sync::Arc;

use arrow_array::builder::{Int64Builder, LargeListBuilder, ListBuilder, StringBuilder, StructBuilder};
use arrow_array::{ArrayRef, Float64Array, RecordBatch, StringViewArray};
use arrow_schema::{DataType, Field};
use deepspec_datasets::rows::DatasetFiles;
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;
use proptest::prelude::*;

/// A message's role, text, weight and tool calls; None if the message itself is null.
type Said = Option<(Option<&'static str>, Option<String>, Option<i64>, Option<Vec<String>>)>;

/// A column of messages as [`Said`], with the given names of the role and text fields.
fn column(names: [&str; 2], large: bool, rows: &[Option<Vec<Said>>]) -> ArrayRef {
    let text = |name| Field::new(name, DataType::Utf8, true);
    let calls = Field::new("tool_calls", DataType::new_list(DataType::Utf8, true), true);
    let fields = vec![text(names[0]), text(names[1]), Field::new("weight", DataType::Int64, true), calls];
    let messages = StructBuilder::new(
        fields,
        vec![
            Box::new(StringBuilder::new()),
            Box::new(StringBuilder::new()),
            Box::new(Int64Builder::new()),
            Box::new(ListBuilder::new(StringBuilder::new())),
        ],
    );
    fn add(message: &mut StructBuilder, said: &Said) {
        let (speaker, text, weight, calls) = said.clone().unwrap_or_default();
        message.field_builder::<StringBuilder>(0).unwrap().append_option(speaker);
        message.field_builder::<StringBuilder>(1).unwrap().append_option(text);
        message.field_builder::<Int64Builder>(2).unwrap().append_option(weight);
        let column = message.field_builder::<ListBuilder<StringBuilder>>(3).unwrap();
        calls.iter().flatten().for_each(|call| column.values().append_value(call));
        column.append(calls.is_some());
        message.append(said.is_some());
    }
    if large {
        let mut list = LargeListBuilder::new(messages);
        for row in rows {
            row.iter().flatten().for_each(|said| add(list.values(), said));
            list.append(row.is_some());
        }
        Arc::new(list.finish())
    } else {
        let mut list = ListBuilder::new(messages);
        for row in rows {
            row.iter().flatten().for_each(|said| add(list.values(), said));
            list.append(row.is_some());
        }
        Arc::new(list.finish())
    }
}

fn said() -> impl Strategy<Value = Said> {
    let speakers = vec!["human", "gpt", "user", "assistant", "system", "tool", "x", ""];
    let speaker = prop::option::weighted(0.95, prop::sample::select(speakers));
    let text = prop::option::weighted(
        0.95,
        prop_oneof![4 => "[a-z \"\\\\\u{0}-\u{1f}é\u{2028}]{0,8}", 1 => Just(" ".to_string())],
    );
    let calls = prop::option::weighted(0.2, prop::collection::vec("[a-z]{0,3}", 0..2));
    prop::option::weighted(0.98, (speaker, text, prop::option::of(any::<i64>()), calls))
}

/// A batch with many edge cases, sliced out of a larger one.
fn batch() -> impl Strategy<Value = RecordBatch> {
    let row = prop::option::weighted(0.95, prop::collection::vec(said(), 0..5));
    let row = (
        row,
        prop::option::of("[a-c]{0,2}"),
        prop::option::of(any::<i32>().prop_map(|n| f64::from(n) / 8.0)),
    );
    let names = prop::sample::select(vec![["from", "value"], ["role", "content"], ["from", "content"]]);
    let key = prop::sample::select(vec!["conversations", "messages"]);
    (prop::collection::vec(row, 1..8), names, key, any::<bool>(), any::<bool>()).prop_flat_map(
        |(rows, names, key, large, text_ids)| {
            let conversations: Vec<_> = rows.iter().map(|row| row.0.clone()).collect();
            let texts: ArrayRef =
                Arc::new(StringViewArray::from_iter(rows.iter().map(|row| row.1.as_deref())));
            let numbers: ArrayRef = Arc::new(Float64Array::from_iter(rows.iter().map(|row| row.2)));
            let (id, other) = if text_ids { (texts, numbers) } else { (numbers, texts) };
            let columns = [(key, column(names, large, &conversations)), ("other", other), ("id", id)];
            let batch = RecordBatch::try_from_iter_with_nullable(columns.map(|(n, a)| (n, a, true))).unwrap();
            let count = rows.len();
            (0..count)
                .prop_flat_map(move |from| (Just(from), 1..=count - from))
                .prop_map(move |(from, rows)| batch.slice(from, rows))
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Reading a file always ends in rows or in an error that names the file, whatever it contains.
    #[test]
    fn damaged_files_are_errors(batch in batch(), cut in 0.0f64..1.5, damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6)) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data.parquet");
        let properties = WriterProperties::builder().set_max_row_group_row_count(Some(3)).build();
        let mut writer = ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), Some(properties)).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        let mut bytes = fs::read(&path).unwrap();
        damage.iter().for_each(|(at, byte)| { let at = at.index(bytes.len()); bytes[at] = *byte; });
        let kept = (bytes.len() as f64 * cut) as usize;
        bytes.truncate(kept);
        fs::write(&path, bytes).unwrap();
        let source = DatasetFiles::open(path.to_str().unwrap()).unwrap();
        let errors = match source.rows() {
            Ok(rows) => rows.filter_map(Result::err).collect(),
            Err(error) => vec![error],
        };
        for error in errors {
            prop_assert!(error.to_string().contains("data.parquet"), "{}", error);
        }
    }
}
