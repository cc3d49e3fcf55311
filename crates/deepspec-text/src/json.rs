//! The `tojson` filter of transformers: Python's `json.dumps(value, ensure_ascii=False)`.
//!
//! The filter of the template engine escapes HTML characters, which would change tool descriptions.

use std::io::{self, Write};

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::Formatter;

use crate::rendering::{MAX_WIDTH, too_wide_error};

/// `{{ value | tojson }}` or `{{ value | tojson(indent=2) }}`; keys keep their order.
pub fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    if let Some(width) = indent.filter(|&width| width > MAX_WIDTH as usize) {
        return Err(too_wide_error(width as i64));
    }
    if options.get::<Option<bool>>("ensure_ascii")? == Some(true) {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson(ensure_ascii=True) is not supported"));
    }
    options.assert_all_used()?;
    let failed = |source| {
        Error::new(ErrorKind::BadSerialization, "cannot write the value as JSON").with_source(source)
    };
    dumps(value, indent).map_err(failed)
}

/// Writes `value` as Python's `json` module does.
fn dumps(value: &impl Serialize, indent: Option<usize>) -> serde_json::Result<String> {
    let mut bytes = Vec::new();
    value.serialize(&mut Serializer::with_formatter(
        &mut bytes,
        PythonFormatter { indent, depth: 0, filled: false },
    ))?;
    String::from_utf8(bytes).map_err(serde::ser::Error::custom)
}

/// `{"a": 1, "b": [2, 3]}`, or with an indent one value per line.
struct PythonFormatter {
    indent: Option<usize>,
    depth: usize,
    /// Whether the innermost container has a value yet; empty containers stay on one line.
    filled: bool,
}

impl PythonFormatter {
    fn open<W: Write + ?Sized>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.filled = false;
        out.write_all(bracket)
    }

    fn close<W: Write + ?Sized>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.filled {
            self.start_line(out)?;
        }
        self.filled = true;
        out.write_all(bracket)
    }

    fn write_separator<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        match (first, self.indent) {
            (true, _) => {}
            (false, None) => out.write_all(b", ")?,
            (false, Some(_)) => out.write_all(b",")?,
        }
        self.filled = true;
        self.start_line(out)
    }

    fn start_line<W: Write + ?Sized>(&self, out: &mut W) -> io::Result<()> {
        match self.indent {
            Some(width) => write!(out, "\n{:1$}", "", width * self.depth),
            None => Ok(()),
        }
    }
}

impl Formatter for PythonFormatter {
    fn write_f64<W: Write + ?Sized>(&mut self, out: &mut W, value: f64) -> io::Result<()> {
        out.write_all(format_python_float(value).as_bytes())
    }

    fn begin_array<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"[")
    }

    fn end_array<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"]")
    }

    fn begin_array_value<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.write_separator(out, first)
    }

    fn begin_object<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"{")
    }

    fn end_object<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"}")
    }

    fn begin_object_key<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.write_separator(out, first)
    }

    fn begin_object_value<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

/// Python's `repr(float)`: plain between 1e-4 and 1e16, else with an exponent of at least two
/// digits.
fn format_python_float(value: f64) -> String {
    let scientific = format!("{value:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(exponent) if !(-4..16).contains(&exponent) => {
            format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
        }
        _ => format!("{value:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::value::Serde;
    use serde_json::json;

    /// Expected values: `json.dumps(v, ensure_ascii=False)`, also with `indent=2`, of Python 3.11.
    #[test]
    fn tojson_is_pythons() {
        let value = json!({"z": [1, 2.0, 1e16, 1.5e-7, 1e-4, 123456789.125], "a": {"<b>": "é\"\n\u{1}'&", "c": null}, "e": [], "f": {}});
        let value = Value::from(Serde(value));
        assert_eq!(
            dumps(&value, None).unwrap(),
            r#"{"z": [1, 2.0, 1e+16, 1.5e-07, 0.0001, 123456789.125], "a": {"<b>": "é\"\n\u0001'&", "c": null}, "e": [], "f": {}}"#
        );
        let value = Value::from(Serde(json!({"b": [1, true], "a": {}, "c": []})));
        assert_eq!(
            dumps(&value, Some(2)).unwrap(),
            "{\n  \"b\": [\n    1,\n    true\n  ],\n  \"a\": {},\n  \"c\": []\n}"
        );
    }
}
