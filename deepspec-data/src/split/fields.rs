//! Fields of a row or a message. Values in columns are read only when needed, and are written
//! directly from the column. Decimals thus keep all digits, which JSON parsers would round.

use std::borrow::Cow;

use deepspec_datasets::rows::Cell;
use deepspec_text::is_message;
use serde_json::{Map, Value};

use super::conversation::{Problem, ProblemKind};

/// An object's fields, in order.
pub struct Fields<'a>(Vec<(Cow<'a, str>, Field<'a>)>);

/// A field's value.
#[derive(Clone)]
pub enum Field<'a> {
    /// A parsed JSON value.
    Value(Value),
    /// A cell of a column.
    Cell(Cell<'a>),
}

impl From<Map<String, Value>> for Fields<'_> {
    fn from(map: Map<String, Value>) -> Self {
        Self(map.into_iter().map(|(key, value)| (Cow::Owned(key), Field::Value(value))).collect())
    }
}

impl<'a> Fields<'a> {
    /// The fields of a row of columns, or of a struct. Nulls are dropped; if a name occurs twice,
    /// the last field counts.
    pub fn of_cells(cells: impl Iterator<Item = (&'a str, Cell<'a>)>) -> Self {
        let mut fields = Self(vec![]);
        for (name, cell) in cells.filter(|(_, cell)| !cell.is_null()) {
            match fields.place(name) {
                Some(at) => fields.0[at].1 = Field::Cell(cell),
                None => fields.0.push((Cow::Borrowed(name), Field::Cell(cell))),
            }
        }
        fields
    }

    /// The names of the fields.
    pub fn names(&self) -> Vec<String> {
        self.0.iter().map(|(name, _)| name.to_string()).collect()
    }

    fn place(&self, key: &str) -> Option<usize> {
        self.0.iter().position(|(name, _)| name == key)
    }

    /// Whether the field exists.
    pub fn has(&self, key: &str) -> bool {
        self.place(key).is_some()
    }

    /// Removes and returns a field, unparsed.
    pub fn take(&mut self, key: &str) -> Option<Field<'a>> {
        self.place(key).map(|at| self.0.remove(at).1)
    }

    /// Removes a field and returns its value.
    pub fn take_value(&mut self, key: &str) -> Result<Option<Value>, Problem> {
        self.take(key).map(Field::into_value).transpose()
    }

    /// Returns a field's value without removing it.
    pub fn value(&self, key: &str) -> Result<Option<Value>, Problem> {
        let field = self.place(key).map(|at| match &self.0[at].1 {
            Field::Value(value) => Field::Value(value.clone()),
            Field::Cell(cell) => Field::Cell(*cell),
        });
        field.map(Field::into_value).transpose()
    }

    /// The object as JSON members without the braces, without null fields.
    pub fn into_json_members(self) -> Vec<u8> {
        let mut out = vec![];
        for (key, field) in self.0 {
            let before = out.len();
            if before > 0 {
                out.push(b',');
            }
            // Writing to memory cannot fail.
            let _ = serde_json::to_writer(&mut out, &key);
            out.push(b':');
            let value = out.len();
            match field {
                Field::Value(value) => drop(serde_json::to_writer(&mut out, &value)),
                Field::Cell(cell) => cell.write(&mut out),
            }
            if &out[value..] == b"null" {
                out.truncate(before);
            }
        }
        out
    }
}

impl<'a> Field<'a> {
    /// Whether the value is null.
    pub fn is_null(&self) -> bool {
        match self {
            Self::Value(value) => value.is_null(),
            Self::Cell(cell) => cell.is_null(),
        }
    }

    /// Whether the value is an object with a role.
    pub fn is_message(&self) -> bool {
        match self {
            Self::Value(value) => is_message(value),
            Self::Cell(cell) => cell
                .fields()
                .is_some_and(|mut fields| fields.any(|(name, _)| name == "role" || name == "from")),
        }
    }

    /// Whether the value is an object.
    pub fn is_object(&self) -> bool {
        match self {
            Self::Value(value) => value.is_object(),
            Self::Cell(cell) => cell.fields().is_some(),
        }
    }

    /// The parsed value.
    ///
    /// # Errors
    /// If the value cannot be parsed, such as a number out of range.
    pub fn into_value(self) -> Result<Value, Problem> {
        let cell = match self {
            Self::Value(value) => return Ok(value),
            Self::Cell(cell) => cell,
        };
        if let Some(text) = cell.text() {
            return Ok(Value::String(text.to_owned()));
        }
        let mut text = vec![];
        cell.write(&mut text);
        serde_json::from_slice(&text).map_err(|error| ProblemKind::NotAnObject.with_text(error.to_string()))
    }

    /// The items of a list; the value itself if it is not a list.
    pub fn into_list(self) -> Result<Result<Vec<Self>, Value>, Problem> {
        if let Self::Cell(cell) = self
            && let Some(items) = cell.items()
        {
            return Ok(Ok(items.map(Self::Cell).collect()));
        }
        Ok(match self.into_value()? {
            Value::Array(items) => Ok(items.into_iter().map(Self::Value).collect()),
            other => Err(other),
        })
    }

    /// The fields of an object; the value itself if it is not an object.
    pub fn into_object(self) -> Result<Result<Fields<'a>, Value>, Problem> {
        if let Self::Cell(cell) = self
            && let Some(fields) = cell.fields()
        {
            return Ok(Ok(Fields::of_cells(fields)));
        }
        Ok(match self.into_value()? {
            Value::Object(map) => Ok(map.into()),
            other => Err(other),
        })
    }
}
