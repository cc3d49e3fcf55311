//! How a row of a dataset becomes the turns of a prompt.

use std::fmt;

use deepspec_core::jsonl::kind_of;
use serde_json::{Map, Value};

use super::template::Template;

/// Why a row makes no prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Odd {
    /// The column at fault.
    pub column: String,
    /// A phrase that says what was found there and what was expected.
    pub problem: String,
}

impl fmt::Display for Odd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "column `{}`: {}", self.column, self.problem)
    }
}

/// A row of a dataset, asked for its columns.
#[derive(Clone, Copy)]
pub struct Row<'a>(pub &'a Map<String, Value>);

impl<'a> Row<'a> {
    /// A column's text, which may be empty.
    ///
    /// # Errors
    /// There is none.
    pub fn any_text(self, column: &str) -> Result<&'a str, Odd> {
        match self.0.get(column) {
            Some(Value::String(text)) => Ok(text),
            other => Err(odd(column, format!("expected a text, found {}", found(other)))),
        }
    }

    /// A column's text.
    ///
    /// # Errors
    /// There is none, or it is blank.
    pub fn text(self, column: &str) -> Result<&'a str, Odd> {
        let text = self.any_text(column)?;
        if text.trim().is_empty() {
            return Err(odd(column, "the text is blank"));
        }
        Ok(text)
    }

    /// A column's list of texts.
    ///
    /// # Errors
    /// There is none, it is empty, or one of its texts is none or is blank.
    pub fn texts(self, column: &str) -> Result<Vec<String>, Odd> {
        let list = match self.0.get(column) {
            Some(Value::Array(list)) if list.is_empty() => return Err(odd(column, "the list is empty")),
            Some(Value::Array(list)) => list,
            other => return Err(odd(column, format!("expected a list of texts, found {}", found(other)))),
        };
        let text = |(index, value): (usize, &Value)| match value {
            Value::String(text) if text.trim().is_empty() => {
                Err(odd(column, format!("text {} of the list is blank", index + 1)))
            }
            Value::String(text) => Ok(text.clone()),
            other => Err(odd(
                column,
                format!("expected a list of texts, item {} is {}", index + 1, kind_of(other)),
            )),
        };
        list.iter().enumerate().map(text).collect()
    }

    /// A column's text, number or boolean as text, which may be empty; None if there is nothing.
    ///
    /// # Errors
    /// It is a list or an object.
    pub fn shown(self, column: &str) -> Result<Option<String>, Odd> {
        match self.0.get(column) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(value @ (Value::Number(_) | Value::Bool(_))) => Ok(Some(value.to_string())),
            other => Err(odd(column, format!("expected a text or a number, found {}", found(other)))),
        }
    }
}

/// An [`Odd`] of this column.
pub fn odd(column: &str, problem: impl Into<String>) -> Odd {
    Odd { column: column.into(), problem: problem.into() }
}

/// Parquet rows leave nulls out, so that a missing value and a null look the same.
fn found(value: Option<&Value>) -> &'static str {
    match value {
        None | Some(Value::Null) => "nothing",
        Some(value) => kind_of(value),
    }
}

/// What turns rows into prompts.
pub enum Form {
    /// Code, for a public suite; the columns that it reads.
    Code(&'static [&'static str], fn(Row) -> Result<Vec<String>, Odd>),
    /// One template per turn.
    Templates(Vec<Template>),
    /// A column that holds a list of turns.
    List(String),
}

impl Form {
    /// The columns without which no row makes a prompt.
    pub fn required(&self) -> Vec<&str> {
        match self {
            Self::Code(columns, _) => columns.to_vec(),
            Self::Templates(templates) => templates.iter().flat_map(|one| one.columns(false)).collect(),
            Self::List(column) => vec![column],
        }
    }

    /// Columns that are read where a row has them.
    pub fn optional(&self) -> Vec<&str> {
        match self {
            Self::Templates(templates) => templates.iter().flat_map(|one| one.columns(true)).collect(),
            Self::Code(..) | Self::List(_) => vec![],
        }
    }

    /// The turns of a row, none of them blank.
    ///
    /// # Errors
    /// Which column has no value that makes a turn.
    pub fn turns(&self, row: &Map<String, Value>) -> Result<Vec<String>, Odd> {
        match self {
            Self::Code(_, turns) => turns(Row(row)),
            Self::Templates(templates) => templates.iter().map(|one| one.fill(Row(row))).collect(),
            Self::List(column) => Row(row).texts(column),
        }
    }
}
