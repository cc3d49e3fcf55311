//! Fuzzes dataset rows: any content gives a complete suite or an error that names file, row and
//! column.

use std::path::Path;

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::suites::convert::convert;
use crate::suites::description::public_suites;
use crate::suites::prompt_conversion::{PromptConversion, Templates};

/// The conversions of the public suites and of described ones.
fn conversions() -> Vec<PromptConversion> {
    let templates = |texts: &[&str]| {
        let texts: Vec<String> = texts.iter().map(ToString::to_string).collect();
        PromptConversion::Templates(Box::new(Templates::new(&texts).unwrap()))
    };
    let mut conversions: Vec<PromptConversion> =
        public_suites().iter().map(|suite| suite.turns.conversion().unwrap()).collect();
    conversions.extend([
        templates(&["{{ a }}: {{ b }}", "{{ b }} {{ c|optional }}"]),
        templates(&["{{ c|optional }}{{ a|optional }}"]),
        PromptConversion::Column("turns".into()),
    ]);
    conversions
}

/// Valid and invalid values of a column.
fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(|number| json!(number)),
        Just(json!("")),
        "[ \t\n]{1,3}".prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 8, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::vec(("[a-c]", inner), 0..3)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

/// A change to a row.
#[derive(Debug, Clone)]
enum Mutation {
    /// Replaces the value of a column, which is picked by a fraction.
    Set(f64, Value),
    /// Removes a column.
    Remove(f64),
    /// Truncates the line.
    Cut(f64),
    /// Replaces the line by any JSON value.
    Replace(Value),
}

fn any_mutation() -> impl Strategy<Value = Mutation> {
    prop_oneof![
        4 => (0.0..1.0, any_value()).prop_map(|(column, value)| Mutation::Set(column, value)),
        1 => (0.0..1.0).prop_map(Mutation::Remove),
        1 => (0.0..1.0).prop_map(Mutation::Cut),
        1 => any_value().prop_map(Mutation::Replace),
    ]
}

/// A valid row.
fn valid_row(conversion: &PromptConversion, number: usize) -> Map<String, Value> {
    let value = match conversion {
        PromptConversion::Column(_) => json!(["one", "two"]),
        PromptConversion::Templates(_) => json!(format!("text {number}")),
    };
    conversion
        .required_columns()
        .iter()
        .chain(conversion.optional_columns())
        .map(|name| (name.clone(), value.clone()))
        .collect()
}

fn mutate(row: &Map<String, Value>, mutation: &Mutation) -> String {
    let mut row = row.clone();
    let pick = |row: &Map<String, Value>, fraction: f64| {
        row.keys().nth((fraction * row.len() as f64) as usize).cloned().unwrap_or_default()
    };
    match mutation {
        Mutation::Set(column, value) => {
            let column = pick(&row, *column);
            row.insert(column, value.clone());
        }
        Mutation::Remove(column) => {
            let column = pick(&row, *column);
            row.shift_remove(&column);
        }
        Mutation::Cut(fraction) => {
            let text = Value::Object(row).to_string();
            let end = text.floor_char_boundary((fraction * text.len() as f64) as usize);
            return text[..end].to_string();
        }
        Mutation::Replace(value) => return value.to_string(),
    }
    Value::Object(row).to_string()
}

fn check_conversion(conversion: &PromptConversion, path: &Path, line: usize) -> Result<(), TestCaseError> {
    let converted = match convert(conversion, &[path.to_path_buf()]) {
        Ok(converted) => converted,
        Err(error) => {
            let told = deepspec_core::cli::one_line(&error);
            let place = format!("{}:{line}: ", path.display());
            prop_assert!(told.starts_with(&place), "{told} does not begin with {place}");
            let named = conversion
                .required_columns()
                .iter()
                .chain(conversion.optional_columns())
                .any(|name| told.contains(&format!("column `{name}`")));
            prop_assert!(
                named || told.contains("not valid JSON") || told.contains("expected a JSON object"),
                "{told}"
            );
            return Ok(());
        }
    };
    prop_assert_eq!(converted.text.lines().count(), converted.rows);
    for line in converted.text.lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        let turns = row["turns"].as_array().unwrap();
        prop_assert!(
            !turns.is_empty() && turns.iter().all(|turn| !turn.as_str().unwrap().trim().is_empty()),
            "{line}"
        );
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn damaged_rows_are_refused_by_file_row_and_column(
        conversion in 0..15_usize, rows in 2..6_usize, place in 0.0..1.0, mutation in any_mutation()
    ) {
        let conversion = &conversions()[conversion];
        let mut lines: Vec<Map<String, Value>> = (0..rows).map(|number| valid_row(conversion, number)).collect();
        let at = (place * rows as f64) as usize;
        let damaged = lines.remove(at);
        let mut texts: Vec<String> = lines.into_iter().map(|row| Value::Object(row).to_string()).collect();
        texts.insert(at, mutate(&damaged, &mutation));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.jsonl");
        std::fs::write(&path, texts.join("\n")).unwrap();
        check_conversion(conversion, &path, at + 1)?;
    }
}
