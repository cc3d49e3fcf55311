//! Checks the columns of a dataset.

use arrow_schema::{DataType, FieldRef};
use deepspec_datasets::rows::Table;
use deepspec_text::is_record_key;

/// Checks that a table has messages in a known form.
///
/// # Errors
/// If it has none. The error names the columns found and the expected ones.
pub fn check(table: &Table) -> anyhow::Result<()> {
    let (path, schema) = (table.path().display(), table.schema());
    let found: Vec<_> = schema.fields().iter().filter(|field| is_record_key(field.name())).collect();
    anyhow::ensure!(
        !found.is_empty(),
        "{path}: no column holds conversations: `conversations` or `messages`, `prompt` with `response`, `instruction` with `output`, or \
         `turns`; the columns are {}",
        table.columns()
    );
    let has = |data_type: &DataType, keys: [&str; 2]| match data_type {
        DataType::Struct(fields) => keys.iter().all(|key| fields.iter().any(|field| field.name() == key)),
        _ => false,
    };
    let known = |data_type: &DataType| match data_type {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
            has(item.data_type(), ["from", "value"]) || has(item.data_type(), ["role", "content"])
        }
        // A string column may hold JSON, or the text of a prompt.
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        _ => false,
    };
    let is_turns = |field: &FieldRef| {
        field.name() == "turns"
            && matches!(field.data_type(), DataType::List(item) if item.data_type().is_string())
    };
    if found.iter().any(|field| known(field.data_type()) || is_turns(field)) {
        return Ok(());
    }
    let names: Vec<String> = found.iter().map(|field| format!("`{}`", field.name())).collect();
    anyhow::bail!(
        "{path}: {} must be a list of struct<from, value> or of struct<role, content>, or its JSON text; the columns are {}",
        names.join(" or "),
        table.columns()
    )
}
