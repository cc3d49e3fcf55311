//! Converts a dataset row to the turns of a prompt, from a column with the turns or by Jinja
//! templates over columns.

use std::collections::BTreeSet;
use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, PoisonError};

use deepspec_core::jsonl::json_type_name;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Object, Serde, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, UndefinedBehavior};
use serde_json::{Map, Value as Json};

/// Why a row gives no prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowError {
    /// The offending column; empty if there is none.
    pub column: String,
    /// A phrase with the value found and the value expected.
    pub problem: String,
}

impl fmt::Display for RowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.column.as_str() {
            "" => f.write_str(&self.problem),
            column => write!(f, "column `{column}`: {}", self.problem),
        }
    }
}

fn row_error(column: &str, problem: impl Into<String>) -> RowError {
    RowError { column: column.into(), problem: problem.into() }
}

/// A conversion from rows to prompts.
pub enum PromptConversion {
    /// A column with a list of turns.
    Column(String),
    /// One template per turn.
    Templates(Box<Templates>),
}

/// Templates and their columns.
pub struct Templates {
    environment: Environment<'static>,
    names: Vec<String>,
    required: Vec<String>,
    optional: Vec<String>,
}

impl PromptConversion {
    /// Columns that every row needs.
    pub fn required_columns(&self) -> &[String] {
        match self {
            Self::Column(column) => std::slice::from_ref(column),
            Self::Templates(templates) => &templates.required,
        }
    }

    /// Columns that a row may lack.
    pub fn optional_columns(&self) -> &[String] {
        match self {
            Self::Column(_) => &[],
            Self::Templates(templates) => &templates.optional,
        }
    }

    /// The turns of a row, none of them blank.
    ///
    /// # Errors
    /// Returns the column that has no valid value for a turn.
    pub fn turns(&self, row: &Map<String, Json>) -> Result<Vec<String>, RowError> {
        match self {
            Self::Column(column) => turns_of_column(row, column),
            Self::Templates(templates) => templates.turns(row),
        }
    }
}

/// A column's list of strings.
fn turns_of_column(row: &Map<String, Json>, column: &str) -> Result<Vec<String>, RowError> {
    let wrong = |problem: String| row_error(column, problem);
    let list = match row.get(column) {
        Some(Json::Array(list)) if list.is_empty() => return Err(wrong("the list is empty".into())),
        Some(Json::Array(list)) => list,
        other => {
            // Parquet rows omit nulls, so a missing value and a null give the same error.
            let found = other.filter(|value| !value.is_null()).map_or("nothing", json_type_name);
            return Err(wrong(format!("expected a list of texts, found {found}")));
        }
    };
    let text = |(index, value): (usize, &Json)| match value {
        Json::String(text) if text.trim().is_empty() => {
            Err(wrong(format!("text {} of the list is blank", index + 1)))
        }
        Json::String(text) => Ok(text.clone()),
        other => {
            Err(wrong(format!("expected a list of texts, item {} is {}", index + 1, json_type_name(other))))
        }
    };
    list.iter().enumerate().map(text).collect()
}

/// Template variable with all columns, for column names that are no identifiers:
/// `{{ row["a b"] }}`.
const ROW_VARIABLE: &str = "row";

/// A row as the context of a template. It remembers the column that was read last.
#[derive(Debug)]
struct RowContext {
    row: Map<String, Json>,
    last_read: Mutex<String>,
}

impl RowContext {
    /// Returns and clears the name of the column that was read last; empty if no column was read.
    fn take_last_read_column(&self) -> String {
        mem::take(&mut self.last_read.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Object for RowContext {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let key = key.as_str()?;
        let column = self.row.get(key).map(|value| Value::from(Serde(value)));
        if column.is_none() && key == ROW_VARIABLE {
            return Some(Value::from_dyn_object(Arc::clone(self)));
        }
        *self.last_read.lock().unwrap_or_else(PoisonError::into_inner) = key.into();
        column
    }
}

impl Templates {
    /// Parses Jinja templates. `{{ column }}` requires a string or a number.
    /// `{{ column|optional }}` may be missing or blank. `column|text` requires a string in every
    /// row, and `if` tests accept an empty one.
    ///
    /// # Errors
    /// Returns a phrase that names the invalid template. Fails if no template uses a column.
    pub fn new(texts: &[String]) -> Result<Self, String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().keep_trailing_newline(true).build();
        environment.set_syntax(syntax.map_err(|error| error.to_string())?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_undefined_behavior(UndefinedBehavior::SemiStrict);
        environment.set_formatter(|out, state, value| write_value(out, state, value));
        environment.add_filter("optional", optional);
        environment.add_filter("text", require_text);
        // Prompts are not escaped. These filters mark values as safe, which would skip the checks
        // of [`write_value`].
        ["safe", "escape", "e"].into_iter().for_each(|filter| environment.remove_filter(filter));
        environment.set_fuel(Some(MAX_STEPS));
        // Debug mode would read columns again before the error is reported.
        environment.set_debug(false);
        let mut columns = BTreeSet::new();
        let names: Vec<String> = (1..=texts.len()).map(|turn| format!("turn {turn}")).collect();
        for (name, text) in names.iter().zip(texts) {
            let added = environment.add_template_owned(name.clone(), text.clone());
            added.map_err(|error| format!("{text:?} is no Jinja template: {error:#}"))?;
            let template = environment.get_template(name).map_err(|error| error.to_string())?;
            columns.extend(template.undeclared_variables(false));
        }
        environment.globals().for_each(|(global, _)| {
            columns.remove(global);
        });
        if !columns.remove(ROW_VARIABLE) && columns.is_empty() {
            let problem = "no template names a column, so that all rows would be the same prompt; a column is named by {{ column }}";
            return Err(problem.into());
        }
        let mut templates = Self { environment, names, required: vec![], optional: vec![] };
        let fills = |without: Option<&String>| {
            let present = columns.iter().filter(|&column| Some(column) != without);
            templates.turns(&present.map(|column| (column.clone(), Json::from("x"))).collect()).is_ok()
        };
        let whole = fills(None);
        let (required, optional) = columns.iter().cloned().partition(|column| whole && !fills(Some(column)));
        (templates.required, templates.optional) = (required, optional);
        Ok(templates)
    }

    fn turns(&self, row: &Map<String, Json>) -> Result<Vec<String>, RowError> {
        let asked = Arc::new(RowContext { row: row.clone(), last_read: Mutex::default() });
        let turn = |name: &String| {
            let template = self.environment.get_template(name);
            let filled = template.and_then(|one| one.render(Value::from_dyn_object(Arc::clone(&asked))));
            match filled {
                Ok(turn) if turn.trim().is_empty() => {
                    Err(row_error(&asked.take_last_read_column(), "the turn is blank"))
                }
                Ok(turn) => {
                    asked.take_last_read_column();
                    Ok(turn)
                }
                Err(error) => {
                    let problem = match error.kind() {
                        ErrorKind::UndefinedError => MISSING_VALUE.into(),
                        _ => error.detail().map_or_else(|| error.kind().to_string(), String::from),
                    };
                    Err(row_error(&asked.take_last_read_column(), problem))
                }
            }
        };
        self.names.iter().map(turn).collect()
    }
}

/// Maximum number of steps of a template, so that rendering always ends.
const MAX_STEPS: u64 = 10_000_000;

const MISSING_VALUE: &str = "expected a text or a number, found nothing";

fn value_error(problem: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem.into())
}

/// Checks that a value is a string, number or boolean; the error names its type.
fn check_scalar(value: &Value) -> Result<(), Error> {
    let found = match value.kind() {
        ValueKind::String | ValueKind::Number | ValueKind::Bool => return Ok(()),
        ValueKind::Undefined | ValueKind::None => return Err(value_error(MISSING_VALUE)),
        ValueKind::Seq | ValueKind::Iterable => "an array",
        _ => "an object",
    };
    Err(value_error(format!("expected a text or a number, found {found}")))
}

/// Formats the value of `{{ … }}`. Values from [`optional`] are checked already.
fn write_value(out: &mut minijinja::Output, _: &State, value: &Value) -> Result<(), Error> {
    if !value.is_safe() {
        check_scalar(value)?;
        if value.as_str().is_some_and(|text| text.trim().is_empty()) {
            return Err(value_error("the text is blank"));
        }
    }
    let written = write!(out, "{}", value_text(value)?);
    written.map_err(|error| value_error(error.to_string()))
}

/// A value's text; numbers and booleans are formatted as in JSON.
fn value_text(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Number | ValueKind::Bool => {
            serde_json::to_string(value).map_err(|error| value_error(error.to_string()))
        }
        _ => Ok(value.to_string()),
    }
}

/// Filter for a column with a string in every row, which may be empty.
fn require_text(value: &Value) -> Result<Value, Error> {
    let found = match value.kind() {
        ValueKind::String => return Ok(value.clone()),
        ValueKind::Undefined | ValueKind::None => "nothing",
        ValueKind::Number => "a number",
        ValueKind::Bool => "true or false",
        ValueKind::Seq | ValueKind::Iterable => "an array",
        _ => "an object",
    };
    Err(value_error(format!("expected a text, found {found}")))
}

/// Filter for a column that may be missing or blank.
fn optional(value: &Value) -> Result<Value, Error> {
    if value.is_undefined() || value.is_none() {
        return Ok(Value::from_safe_string(String::new()));
    }
    check_scalar(value)?;
    Ok(Value::from_safe_string(value_text(value)?))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fill(template: &str) -> Result<String, String> {
        let row = json!({"q": "Why?", "n": 3, "empty": " ", "list": [], "a b": "x", "void": null, "some": "y",
                   "yes": true, "large": 1e20});
        let conversion = PromptConversion::Templates(Box::new(Templates::new(&[template.to_string()])?));
        let turns = conversion.turns(row.as_object().unwrap()).map_err(|error| error.to_string())?;
        Ok(turns.concat())
    }

    #[test]
    fn columns_are_filled_in_and_braces_kept() {
        assert_eq!(fill("{{ q }}").unwrap(), "Why?");
        assert_eq!(fill("{{ n }}. {{ q }}\n\\boxed{} {q}\n").unwrap(), "3. Why?\n\\boxed{} {q}\n");
        assert_eq!(fill("{{ row[\"a b\"] }}{{ row.q }}").unwrap(), "xWhy?");
        assert_eq!(
            fill("{{ q }}{{ empty|optional }}{{ void|optional }}{{ absent|optional }}!").unwrap(),
            "Why? !"
        );
        assert_eq!(
            fill("{{ q }}{% if absent %} {{ absent }}{% endif %}{% if some %} <y>{% endif %}").unwrap(),
            "Why? <y>"
        );
        assert_eq!(fill("{% for i in range(2) %}{{ q }}{% endfor %}").unwrap(), "Why?Why?");
        assert_eq!(fill("{{ q }}{% if empty|text %}{{ empty|optional }}{% endif %}!").unwrap(), "Why? !");
        assert_eq!(fill("{{ yes }} {{ large }}").unwrap(), "true 1e+20");
    }

    #[test]
    fn what_cannot_be_filled_names_its_column() {
        let says = |template: &str, words: &str| assert_eq!(fill(template).unwrap_err(), words);
        says("{{ absent }}", "column `absent`: expected a text or a number, found nothing");
        says("Q: {{ empty }}", "column `empty`: the text is blank");
        says("{{ empty|optional }}", "column `empty`: the turn is blank");
        says("{{ list|optional }}", "column `list`: expected a text or a number, found an array");
        says("{{ n|text }}", "column `n`: expected a text, found a number");
        says("{{ q }}{% if void|text %}!{% endif %}", "column `void`: expected a text, found nothing");
        says("{{ row[\"no column\"] }}", "column `no column`: expected a text or a number, found nothing");
        says(
            "{% for i in range(9999) %}{% for j in range(9999) %}{{ q }}{% endfor %}{% endfor %}",
            "column `q`: engine ran out of fuel",
        );
        assert!(fill("{{ list|safe }}").unwrap_err().contains("safe"));
    }

    #[test]
    fn columns_that_a_row_must_have_are_told_from_the_others() {
        let of = |templates: &[&str]| {
            let texts: Vec<String> = templates.iter().map(ToString::to_string).collect();
            let conversion = PromptConversion::Templates(Box::new(Templates::new(&texts).unwrap()));
            (conversion.required_columns().join(" "), conversion.optional_columns().join(" "))
        };
        let found = of(&["{{ a }}{{ b|optional }}{% if c %}{{ c }}{% endif %}", "{{ d }}"]);
        assert_eq!(found, ("a d".into(), "b c".into()));
        assert_eq!(of(&["{% for turn in history %}{{ turn.text }}{% endfor %}"]).1, "history");
    }

    #[test]
    fn what_is_no_template_is_refused() {
        assert!(fill("{{ q").unwrap_err().contains("is no Jinja template"));
        assert!(fill("{% if q %}").unwrap_err().contains("is no Jinja template"));
        assert!(fill("{q}").unwrap_err().contains("named by {{ column }}"));
    }
}
