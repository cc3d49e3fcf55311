//! Typed access to the keys of a config.json, with errors that name the file and the key.

use std::path::Path;

use deepspec_core::atomic;
use serde_json::{Map, Value};

use crate::CheckpointError;

/// A JSON object of the file, with the path of its parent keys.
pub struct Fields<'a> {
    /// The file, for errors.
    pub path: &'a Path,
    /// Keys and values of the object.
    pub map: &'a Map<String, Value>,
    within: String,
}

impl<'a> Fields<'a> {
    /// The top-level object of the file at `path`.
    pub fn new(path: &'a Path, map: &'a Map<String, Value>) -> Self {
        Self { path, map, within: String::new() }
    }

    /// An error about `key`.
    pub fn error(&self, key: &str, problem: impl Into<String>) -> CheckpointError {
        let key = format!("{}{key}", self.within);
        CheckpointError::Key { path: self.path.to_path_buf(), key, problem: problem.into() }
    }

    fn read_typed<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => read(value)
                .map(Some)
                .ok_or_else(|| self.error(key, format!("expected {expected}, found {value}"))),
        }
    }

    /// An integer from 0, below 2³¹.
    ///
    /// # Errors
    /// Fails if the value is something else.
    pub fn count(&self, key: &str) -> Result<Option<u64>, CheckpointError> {
        self.read_typed(key, "a whole number from 0 to 2147483647", |value| {
            value.as_u64().filter(|&count| count < 1 << 31)
        })
    }

    /// An integer from 1, below 2³¹.
    ///
    /// # Errors
    /// Fails if the value is something else.
    pub fn size<T: From<u32>>(&self, key: &str) -> Result<Option<T>, CheckpointError> {
        let size = |value: &Value| value.as_u64().and_then(|size| u32::try_from(size).ok());
        self.read_typed(key, "a whole number from 1 to 2147483647", |value| {
            size(value).filter(|size| (1..1 << 31).contains(size)).map(T::from)
        })
    }

    /// A number.
    ///
    /// # Errors
    /// Fails if the value is something else.
    pub fn number(&self, key: &str) -> Result<Option<f64>, CheckpointError> {
        self.read_typed(key, "a number", Value::as_f64)
    }

    /// A boolean.
    ///
    /// # Errors
    /// Fails if the value is something else.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, CheckpointError> {
        self.read_typed(key, "true or false", Value::as_bool)
    }

    /// A string.
    ///
    /// # Errors
    /// Fails if the value is something else.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>, CheckpointError> {
        self.read_typed(key, "a string", Value::as_str)
    }

    /// A list of integers, each below 2³¹ in magnitude.
    ///
    /// # Errors
    /// Fails if an element is something else.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<i64>>, CheckpointError> {
        let small = |value: &Value| value.as_i64().filter(|id| id.unsigned_abs() < 1 << 31);
        self.read_typed(key, "a list of integers", |value| value.as_array()?.iter().map(small).collect())
    }

    /// A list of strings.
    ///
    /// # Errors
    /// Fails if an element is something else.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, CheckpointError> {
        self.read_typed(key, "a list of strings", |value| {
            value.as_array()?.iter().map(Value::as_str).collect()
        })
    }

    /// A nested object.
    ///
    /// # Errors
    /// Fails if the value is something else.
    pub fn object(&self, key: &str) -> Result<Option<Self>, CheckpointError> {
        let map = self.read_typed(key, "an object", Value::as_object)?;
        let within = format!("{}{key}.", self.within);
        Ok(map.map(|map| Self { path: self.path, map, within }))
    }

    /// Returns the fields of `map`, with the path of this object in errors.
    pub fn with_map<'b>(&self, map: &'b Map<String, Value>) -> Fields<'b>
    where
        'a: 'b,
    {
        Fields { path: self.path, map, within: self.within.clone() }
    }

    /// Unwraps the value of a required key.
    ///
    /// # Errors
    /// Fails if the value is None.
    pub fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, CheckpointError> {
        value.ok_or_else(|| self.error(key, "missing"))
    }

    /// A required integer from 1, below 2³¹.
    ///
    /// # Errors
    /// Fails if the key is missing or the value is something else.
    pub fn required_size<T: From<u32>>(&self, key: &str) -> Result<T, CheckpointError> {
        self.required(key, self.size(key)?)
    }

    /// A required nested object.
    ///
    /// # Errors
    /// Fails if the key is missing or the value is something else.
    pub fn required_object(&self, key: &str) -> Result<Self, CheckpointError> {
        self.required(key, self.object(key)?)
    }

    /// Checks that the string `key` is absent or equal to `expected`.
    ///
    /// # Errors
    /// Fails if it has another value.
    pub fn require_text_if_present(&self, key: &str, expected: &str) -> Result<(), CheckpointError> {
        match self.text(key)?.filter(|&found| found != expected) {
            None => Ok(()),
            Some(found) => {
                Err(self.error(key, format!("\"{found}\" is not supported; expected \"{expected}\"")))
            }
        }
    }

    /// Checks that the boolean `key` of an unsupported feature is false or absent.
    ///
    /// # Errors
    /// Fails with `problem` if it is on.
    pub fn refuse_if_on(&self, key: &str, problem: &str) -> Result<(), CheckpointError> {
        if self.flag(key)?.unwrap_or(false) { Err(self.error(key, problem)) } else { Ok(()) }
    }

    /// The first of `architectures`.
    ///
    /// # Errors
    /// Fails if `architectures` is no list of strings.
    pub fn architecture(&self) -> Result<Option<&'a str>, CheckpointError> {
        Ok(self.texts("architectures")?.and_then(|names| names.first().copied()))
    }
}

/// Reads a JSON object.
pub fn read_object(path: &Path) -> Result<Map<String, Value>, CheckpointError> {
    let bad = |problem: String| CheckpointError::NotADrafter { path: path.to_path_buf(), problem };
    if !path.is_file() {
        return Err(bad("no such file; a checkpoint is a folder with config.json and safetensors".into()));
    }
    match serde_json::from_str(&atomic::read_text(path)?) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(bad("expected a JSON object".into())),
        Err(error) => Err(bad(format!("not valid JSON: {error}"))),
    }
}
