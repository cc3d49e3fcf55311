//! The id that a data row keeps through every stage.

use serde_json::{Map, Number, Value};

/// The row's `id` as text, or why it has none. Integers and strings are ids; `1` and `"1"` are the same one.
///
/// # Errors
/// A phrase to follow the file and line: the id is missing, null or of another type.
pub fn id_of(row: &Map<String, Value>) -> Result<String, String> {
    match row.get("id") {
        Some(Value::String(id)) if !id.is_empty() => Ok(id.clone()),
        Some(Value::Number(id)) => id_of_number(id),
        Some(other) => Err(format!(
            "`id` must be a non-empty string or an integer, found {}",
            crate::jsonl::kind_of(other)
        )),
        None => Err("the row has no `id`".into()),
    }
}

/// A number as an id. Beyond 64 bits, and with a fraction, different numbers would be read as the same one.
///
/// # Errors
/// A phrase that says what to do: it is no integer, or too large a one.
pub fn id_of_number(id: &Number) -> Result<String, String> {
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
        let id = |text: &str| id_of(&serde_json::from_str(&format!("{{\"id\": {text}}}")).unwrap());
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
        for text in ["null", "\"\"", "[1]"] {
            assert!(id(text).unwrap_err().contains("`id` must be"), "{text}");
        }
    }
}
