//! What columns a dataset must have.

use arrow_schema::DataType;
use deepspec_rows::{MESSAGE_KEYS, Table};

/// Checks that a table has messages in a form that we know.
///
/// # Errors
/// With the columns found and what was expected.
pub fn check(table: &Table) -> anyhow::Result<()> {
    let (path, schema) = (table.path().display(), table.schema());
    let found: Vec<_> = MESSAGE_KEYS.iter().filter_map(|key| schema.field_with_name(key).ok()).collect();
    anyhow::ensure!(
        !found.is_empty(),
        "{path}: no column `conversations` or `messages`; the columns are {}",
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
        _ => false,
    };
    anyhow::ensure!(
        found.iter().any(|field| known(field.data_type())),
        "{path}: messages must be a list of struct<from, value> or of struct<role, content>; the columns are {}",
        table.columns()
    );
    Ok(())
}
