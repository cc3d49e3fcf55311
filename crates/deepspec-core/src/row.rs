//! The id that a data row keeps through every stage.

use serde_json::{Map, Value};

/// The row's `id` as text, or why it has none. Numbers and strings are ids; `1` and `"1"` are the same one.
///
/// # Errors
/// A phrase to follow the file and line: the id is missing, null or of another type.
pub fn id_of(row: &Map<String, Value>) -> Result<String, String> {
    match row.get("id") {
        Some(Value::String(id)) if !id.is_empty() => Ok(id.clone()),
        Some(Value::Number(id)) => Ok(id.to_string()),
        Some(other) => Err(format!(
            "`id` must be a non-empty string or a number, found {}",
            crate::jsonl::kind_of(other)
        )),
        None => Err("the row has no `id`".into()),
    }
}
