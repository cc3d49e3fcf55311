//! JSON Lines: reading with line numbers, appending so that a crash costs at most the last line.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Map, Value};

use crate::atomic::FileError;

/// A line that is not a JSON object.
#[derive(Debug, thiserror::Error)]
#[error("{}:{line}: {problem}", path.display())]
pub struct BadLine {
    /// The file.
    pub path: PathBuf,
    /// 1-based line number.
    pub line: usize,
    /// What is wrong with it.
    pub problem: String,
}

/// One line of a JSONL file.
pub enum Line {
    /// A JSON object and its 1-based line number.
    Row(usize, Map<String, Value>),
    /// Anything else.
    Bad(BadLine),
}

/// Iterates over the non-empty lines of a JSONL file.
pub struct Reader {
    path: PathBuf,
    lines: BufReader<File>,
    line: usize,
}

impl Reader {
    /// Opens `path`.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let file = File::open(path).map_err(FileError::at("reading", path))?;
        Ok(Self { path: path.to_path_buf(), lines: BufReader::new(file), line: 0 })
    }
}

impl Iterator for Reader {
    type Item = Result<Line, FileError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let mut bytes = Vec::new();
            match self.lines.read_until(b'\n', &mut bytes) {
                Err(error) => return Some(Err(FileError::at("reading", &self.path)(error))),
                Ok(0) => return None,
                Ok(_) => self.line += 1,
            }
            if bytes.trim_ascii().is_empty() {
                continue;
            }
            let bad =
                |problem: String| Line::Bad(BadLine { path: self.path.clone(), line: self.line, problem });
            return Some(Ok(match serde_json::from_slice::<Value>(&bytes) {
                Ok(Value::Object(row)) => Line::Row(self.line, row),
                Ok(other) => bad(format!("expected a JSON object, found {}", kind_of(&other))),
                Err(error) => bad(format!("not valid JSON ({error})")),
            }));
        }
    }
}

/// The JSON type of a value, as a word for messages.
pub fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Appends whole lines. Opening it drops a torn last line, so that a file cut by a crash continues cleanly.
pub struct Appender {
    path: PathBuf,
    file: BufWriter<File>,
}

impl Appender {
    /// Opens or creates `path` for appending.
    ///
    /// # Errors
    /// Any I/O failure, with the path.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let open = || -> io::Result<File> {
            let mut file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
            let whole = end_of_last_whole_line(&mut file)?;
            file.set_len(whole)?;
            Ok(file)
        };
        let file = open().map_err(FileError::at("opening", path))?;
        Ok(Self { path: path.to_path_buf(), file: BufWriter::new(file) })
    }

    /// Appends `row` as one line and hands it to the operating system.
    ///
    /// # Errors
    /// Any I/O failure, with the path.
    pub fn append(&mut self, row: &impl Serialize) -> Result<(), FileError> {
        let mut write = || -> io::Result<()> {
            let mut line = serde_json::to_vec(row)?;
            line.push(b'\n');
            self.file.write_all(&line)?;
            self.file.flush()
        };
        write().map_err(FileError::at("writing", &self.path))
    }

    /// Waits until everything appended is on disk.
    ///
    /// # Errors
    /// Any I/O failure, with the path.
    pub fn sync(&mut self) -> Result<(), FileError> {
        self.file.get_ref().sync_all().map_err(FileError::at("syncing", &self.path))
    }
}

/// Byte offset just behind the last newline.
fn end_of_last_whole_line(file: &mut File) -> io::Result<u64> {
    let mut end = file.seek(SeekFrom::End(0))?;
    let mut buffer = [0; 1 << 16];
    while end > 0 {
        let start = end.saturating_sub(buffer.len() as u64);
        let window = &mut buffer[..(end - start) as usize];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(window)?;
        if let Some(newline) = window.iter().rposition(|&byte| byte == b'\n') {
            return Ok(start + newline as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    #[test]
    fn bad_lines_are_named_and_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.jsonl");
        fs::write(&path, "{\"id\":1}\n\n[1]\n{broken\n{\"id\":2}").unwrap();
        let lines: Vec<String> = Reader::open(&path)
            .unwrap()
            .map(|line| match line.unwrap() {
                Line::Row(number, row) => format!("{number} {}", row["id"]),
                Line::Bad(bad) => format!("bad {} {}", bad.line, &bad.problem[..8]),
            })
            .collect();
        assert_eq!(lines, ["1 1", "bad 3 expected", "bad 4 not vali", "5 2"]);
    }

    proptest! {
        /// However a file is cut, appending continues after the last whole line and keeps all whole lines before it.
        #[test]
        fn appending_after_a_cut_keeps_whole_lines(rows in prop::collection::vec("[a-z]{0,40}", 1..20), cut in 0.0..1.0f64) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("rows.jsonl");
            let mut appender = Appender::open(&path).unwrap();
            for row in &rows { appender.append(row).unwrap(); }
            let bytes = fs::read(&path).unwrap();
            let kept = (bytes.len() as f64 * cut) as usize;
            fs::write(&path, &bytes[..kept]).unwrap();
            let whole = bytes[..kept].iter().filter(|&&byte| byte == b'\n').count();
            Appender::open(&path).unwrap().append(&"new").unwrap();
            let text = fs::read_to_string(&path).unwrap();
            let lines: Vec<String> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            prop_assert_eq!(&lines[..whole], &rows[..whole]);
            prop_assert_eq!(&lines[whole..], &["new".to_string()]);
        }
    }
}
