//! The id of a data row, which all processing stages keep.

use std::collections::HashMap;

use serde_json::{Map, Number, Value};

use crate::digest;

/// The row's `id` as text; `None` if it is absent, null or empty. Integers and strings are valid
/// ids; `1` and `"1"` are equal.
///
/// # Errors
/// Fails if the id has another type. The message is a phrase that follows file and line.
pub fn optional_id(row: &Map<String, Value>) -> Result<Option<String>, String> {
    match row.get("id") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(id)) if id.is_empty() => Ok(None),
        Some(Value::String(id)) => Ok(Some(id.clone())),
        Some(Value::Number(id)) => id_from_number(id).map(Some),
        Some(other) => {
            Err(format!("`id` must be a string or an integer, found {}", crate::jsonl::json_type_name(other)))
        }
    }
}

/// The required `id` of a row as text.
///
/// # Errors
/// Fails if the id is missing or has another type. The message is a phrase that follows file and
/// line.
pub fn required_id(row: &Map<String, Value>) -> Result<String, String> {
    optional_id(row)?.ok_or_else(|| "the row has no `id`".into())
}

/// Assigns a unique id to every row of a dataset.
///
/// A row without an id gets its index, counted from 0 over all files. The second row with an id
/// becomes `ID~2`, the third `ID~3`. Equal rows in equal order always get equal ids.
#[derive(Debug, Default)]
pub struct UniqueIds {
    /// Suffix number for the next row with an equal id, by the id's fingerprint.
    next: HashMap<u128, u32>,
    renamed: usize,
}

impl UniqueIds {
    /// Assigns and returns a unique id. `own` is the id that the row has in its file, if any.
    /// `place` is the row's index.
    pub fn assign_id(&mut self, own: Option<&str>, place: usize) -> String {
        let id = own.map_or_else(|| place.to_string(), str::to_owned);
        let key = digest::fingerprint(id.as_bytes());
        let Some(&first) = self.next.get(&key) else {
            self.next.insert(key, 2);
            return id;
        };
        self.renamed += 1;
        let mut number = first;
        loop {
            let name = format!("{id}~{number}");
            let taken = digest::fingerprint(name.as_bytes());
            number += 1;
            if let std::collections::hash_map::Entry::Vacant(free) = self.next.entry(taken) {
                free.insert(2);
                self.next.insert(key, number);
                return name;
            }
        }
    }

    /// Number of rows that were renamed because an earlier row has their id.
    pub fn renamed_count(&self) -> usize {
        self.renamed
    }

    /// Warns about renamed rows, if there are any.
    pub fn report(&self) {
        if self.renamed > 0 {
            tracing::warn!(
                "{} rows repeat the id of an earlier row; they are called ID~2, ID~3, …",
                self.renamed
            );
        }
    }
}

/// Converts a JSON number to an id. Floats and integers beyond 64 bits are refused, because
/// different numbers would be read as equal.
///
/// # Errors
/// Fails if the number is no integer or too large, with a phrase that suggests a string.
pub fn id_from_number(id: &Number) -> Result<String, String> {
    if id.is_f64() {
        return Err(format!(
            "`id` must be a non-empty string or an integer of 64 bits, found {id}; use a string"
        ));
    }
    Ok(id.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_strings_and_whole_numbers() {
        let id = |text: &str| required_id(&serde_json::from_str(&format!("{{\"id\": {text}}}")).unwrap());
        for (text, expected) in [
            ("\"a\"", "a"),
            ("-7", "-7"),
            ("18446744073709551615", "18446744073709551615"),
            ("\"1.5\"", "1.5"),
        ] {
            assert_eq!(id(text).unwrap(), expected);
        }
        for text in ["18446744073709551616", "-9223372036854775809", "1.5", "1.0", "1e3"] {
            assert!(id(text).unwrap_err().contains("use a string"), "{text}");
        }
        assert!(id("[1]").unwrap_err().contains("`id` must be"));
        for text in ["null", "\"\""] {
            assert!(id(text).unwrap_err().contains("no `id`"), "{text}");
        }
    }

    #[test]
    fn repeated_and_missing_ids_become_unique() {
        let mut ids = UniqueIds::default();
        let rows = [Some("a"), None, Some("a"), Some("a~2"), Some("a"), Some("1"), None];
        let named: Vec<String> =
            rows.iter().enumerate().map(|(place, own)| ids.assign_id(*own, place)).collect();
        assert_eq!(named, ["a", "1", "a~2", "a~2~2", "a~3", "1~2", "6"]);
        assert_eq!(ids.renamed_count(), 4);
    }
}
