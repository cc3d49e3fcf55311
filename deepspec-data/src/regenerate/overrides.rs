//! The `sampling` settings of a row, which override the settings of the run.

use deepspec_core::jsonl::json_type_name;
use serde_json::{Map, Value, json};

/// The request field with arguments of the chat template, such as `enable_thinking`.
pub const TEMPLATE_KWARGS: &str = "chat_template_kwargs";

/// Numeric fields that a row's `sampling` may have, in addition to `seed`, `stop` and
/// `enable_thinking`.
const NUMERIC_FIELDS: [&str; 8] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
];

/// The `sampling` object of a row; empty if the row has none.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Overrides {
    fields: Map<String, Value>,
    thinking: Option<bool>,
    /// Replaces the run's seed.
    pub seed: Option<u64>,
}

impl Overrides {
    /// Parses a row's `sampling`.
    ///
    /// # Errors
    /// If a name is unknown or a value has another type; a phrase that follows file and line.
    pub fn parse(row: &Map<String, Value>) -> Result<Self, String> {
        let fields = match row.get("sampling") {
            None | Some(Value::Null) => return Ok(Self::default()),
            Some(Value::Object(fields)) => fields,
            Some(other) => {
                return Err(format!("`sampling` must be an object, found {}", json_type_name(other)));
            }
        };
        let mut overrides = Self::default();
        for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
            let expected = |what: &str| Err(format!("`sampling.{name}` must be {what}, found {value}"));
            match name.as_str() {
                "seed" => match value.as_u64() {
                    Some(seed) => overrides.seed = Some(seed),
                    None => return expected("an integer from 0"),
                },
                "enable_thinking" => match value.as_bool() {
                    Some(thinking) => overrides.thinking = Some(thinking),
                    None => return expected("true or false"),
                },
                "stop" => {
                    let mut stops = value.clone();
                    stops.as_array_mut().into_iter().for_each(|stops| stops.retain(|stop| !stop.is_null()));
                    overrides.fields.insert(name.clone(), stops);
                }
                number if NUMERIC_FIELDS.contains(&number) => match value {
                    Value::Number(_) => drop(overrides.fields.insert(name.clone(), value.clone())),
                    _ => return expected("a number"),
                },
                _ => {
                    let known = NUMERIC_FIELDS.join(", ");
                    return Err(format!(
                        "`sampling.{name}` is unknown (known: {known}, seed, stop, enable_thinking)"
                    ));
                }
            }
        }
        Ok(overrides)
    }

    /// Whether the row has no overrides.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Writes the overrides into the fields of a request.
    pub fn apply(&self, body: &mut Map<String, Value>) {
        body.extend(self.fields.clone());
        if let Some(thinking) = self.thinking {
            body.insert(TEMPLATE_KWARGS.into(), json!({"enable_thinking": thinking}));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(sampling: Value) -> Result<Overrides, String> {
        Overrides::parse(&Map::from_iter([("sampling".to_owned(), sampling)]))
    }

    #[test]
    fn a_row_overrides_what_it_names() {
        let overrides = parse(json!({"temperature": 0.2, "seed": 3, "enable_thinking": true})).unwrap();
        let mut body =
            Map::from_iter([("temperature".to_owned(), json!(1)), ("top_p".to_owned(), json!(0.5))]);
        overrides.apply(&mut body);
        assert_eq!(
            Value::Object(body),
            json!({"temperature": 0.2, "top_p": 0.5, "chat_template_kwargs": {"enable_thinking": true}})
        );
        assert_eq!(overrides.seed, Some(3));
        assert!(parse(Value::Null).unwrap().is_empty());
    }

    #[test]
    fn odd_overrides_say_why() {
        let says = |sampling: Value, words: &str| {
            let problem = parse(sampling).unwrap_err();
            assert!(problem.contains(words), "{problem}");
        };
        says(json!("hot"), "`sampling` must be an object, found a string");
        says(json!({"temp": 1}), "`sampling.temp` is unknown");
        says(json!({"temperature": "1"}), "`sampling.temperature` must be a number, found \"1\"");
        says(json!({"seed": -1}), "`sampling.seed` must be an integer from 0");
        says(json!({"enable_thinking": 1}), "true or false");
    }
}
