//! The fields of a row or of a message. Those of columns are text until someone reads them, so that what travels along stays as it was
//! written: a decimal has more digits than a number of JSON's readers.

use indexmap::IndexMap;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::conversation::{Kind, Problem};

/// An object's fields, in order.
pub struct Fields<'a>(IndexMap<String, Field<'a>>);

/// A field's value.
pub enum Field<'a> {
    /// As it was read.
    Value(Value),
    /// As it stands in the text.
    Text(&'a RawValue),
}

impl From<Map<String, Value>> for Fields<'_> {
    fn from(map: Map<String, Value>) -> Self {
        Self(map.into_iter().map(|(key, value)| (key, Field::Value(value))).collect())
    }
}

impl<'a> Fields<'a> {
    /// Those of an object's text.
    pub fn of_text(text: &'a str) -> serde_json::Result<Self> {
        let fields: IndexMap<String, &RawValue> = serde_json::from_str(text)?;
        Ok(Self(fields.into_iter().map(|(key, value)| (key, Field::Text(value))).collect()))
    }

    /// Whether there is such a field.
    pub fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    /// A field as it is.
    pub fn take(&mut self, key: &str) -> Option<Field<'a>> {
        self.0.shift_remove(key)
    }

    /// A field's value.
    pub fn take_value(&mut self, key: &str) -> Result<Option<Value>, Problem> {
        self.take(key).map(Field::value).transpose()
    }

    /// A field's value, which stays.
    pub fn value(&self, key: &str) -> Result<Option<Value>, Problem> {
        let field = self.0.get(key).map(|field| match field {
            Field::Value(value) => Field::Value(value.clone()),
            Field::Text(text) => Field::Text(text),
        });
        field.map(Field::value).transpose()
    }

    /// The inside of the object's text, without fields that are null.
    pub fn inside(self) -> Vec<u8> {
        let mut out = String::new();
        for (key, field) in self.0 {
            let text = match &field {
                field if field.is_null() => continue,
                Field::Value(value) => value.to_string(),
                Field::Text(text) => text.get().to_string(),
            };
            let comma = if out.is_empty() { "" } else { "," };
            out += &format!("{comma}{}:{text}", Value::from(key));
        }
        out.into_bytes()
    }
}

impl<'a> Field<'a> {
    /// Whether it is null.
    pub fn is_null(&self) -> bool {
        match self {
            Self::Value(value) => value.is_null(),
            Self::Text(text) => text.get() == "null",
        }
    }

    /// Its value.
    ///
    /// # Errors
    /// If it cannot be read, such as a number beyond all that JSON's readers hold.
    pub fn value(self) -> Result<Value, Problem> {
        match self {
            Self::Value(value) => Ok(value),
            Self::Text(text) => {
                serde_json::from_str(text.get()).map_err(|error| Kind::NotAnObject.because(error.to_string()))
            }
        }
    }

    /// The items of a list; anything else as its value.
    pub fn list(self) -> Result<Result<Vec<Self>, Value>, Problem> {
        if let Self::Text(text) = self
            && let Ok(items) = serde_json::from_str::<Vec<&'a RawValue>>(text.get())
        {
            return Ok(Ok(items.into_iter().map(Self::Text).collect()));
        }
        Ok(match self.value()? {
            Value::Array(items) => Ok(items.into_iter().map(Self::Value).collect()),
            other => Err(other),
        })
    }

    /// The fields of an object; anything else as its value.
    pub fn object(self) -> Result<Result<Fields<'a>, Value>, Problem> {
        if let Self::Text(text) = self
            && let Ok(fields) = Fields::of_text(text.get())
        {
            return Ok(Ok(fields));
        }
        Ok(match self.value()? {
            Value::Object(map) => Ok(map.into()),
            other => Err(other),
        })
    }
}
