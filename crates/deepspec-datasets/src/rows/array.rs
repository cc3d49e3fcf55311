//! Reads the elements of a JSON array one by one, without loading the array.

use std::io::{self, BufRead};
use std::path::{Path, PathBuf};

use deepspec_core::atomic::FileError;
use deepspec_core::jsonl::{self, MAX_LINE_BYTES, RawLine};

/// Splits the text of an array at the commas between its elements. It does not validate the
/// elements. A malformed element fails later in the parser.
pub struct ArrayElements {
    path: PathBuf,
    text: Box<dyn BufRead + Send>,
    number: usize,
    ended: bool,
    /// Whether the array is closed and the text after it is not read yet.
    closed: bool,
}

impl ArrayElements {
    /// Opens a file whose first non-blank character is `[`.
    ///
    /// # Errors
    /// Fails if the file cannot be opened.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let mut text = jsonl::open_text(path)?;
        text.skip_until(b'[').map_err(FileError::at("reading", path))?;
        Ok(Self { path: path.to_path_buf(), text, number: 0, ended: false, closed: false })
    }

    /// Reads up to the end of the next element; None after the last one.
    fn read_element(&mut self) -> io::Result<Option<RawLine>> {
        let (mut bytes, mut splitter) = (Vec::new(), ElementSplitter::default());
        let element_end = loop {
            let buffer = self.text.fill_buf()?;
            if buffer.is_empty() {
                break None;
            }
            let (read, element_end) = match splitter.element_end(buffer) {
                Some(at) => (at + 1, Some(buffer[at])),
                None => (buffer.len(), None),
            };
            let inside = read - usize::from(element_end.is_some());
            let room = MAX_LINE_BYTES.saturating_sub(bytes.len());
            bytes.extend_from_slice(&buffer[..inside.min(room)]);
            self.text.consume(read);
            if element_end.is_some() {
                break element_end;
            }
        };
        let blank = bytes.trim_ascii().is_empty();
        self.ended = element_end != Some(b',');
        self.closed = element_end == Some(b']');
        // `[]` has no element. Blank text without a `]` is a truncated element.
        if blank && self.closed && self.number == 0 {
            return Ok(None);
        }
        self.number += 1;
        let too_long = bytes.len() >= MAX_LINE_BYTES;
        Ok(Some(RawLine::new(self.number, bytes, too_long)))
    }

    /// Reports text after the array as one additional invalid element; ignores blanks.
    fn read_trailing_text(&mut self) -> io::Result<Option<RawLine>> {
        loop {
            let buffer = self.text.fill_buf()?;
            let read = buffer.len();
            if !buffer.trim_ascii().is_empty() {
                let problem = "there is more text behind the `]` that closes the array, and it is not read; \
                               put all rows into one array, or write one object per line";
                return Ok(Some(RawLine::skipped(self.number + 1, problem.into())));
            }
            if read == 0 {
                return Ok(None);
            }
            self.text.consume(read);
        }
    }
}

impl Iterator for ArrayElements {
    type Item = Result<RawLine, FileError>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut element = if self.ended { Ok(None) } else { self.read_element() };
        if matches!(element, Ok(None)) && std::mem::take(&mut self.closed) {
            element = self.read_trailing_text();
        }
        self.ended |= element.is_err();
        element.map_err(FileError::at("reading", &self.path)).transpose()
    }
}

/// Bracket depth and string state at the end of the text so far.
#[derive(Default)]
struct ElementSplitter {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl ElementSplitter {
    /// Index of the first comma or closing bracket at depth 0 and outside strings.
    fn element_end(&mut self, bytes: &[u8]) -> Option<usize> {
        for (at, byte) in bytes.iter().enumerate() {
            if self.in_string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => self.in_string = false,
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => self.depth += 1,
                b',' | b']' if self.depth == 0 => return Some(at),
                b'}' | b']' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use deepspec_core::jsonl::Line;

    fn elements(text: &str) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        std::fs::write(&path, text).unwrap();
        let text = |line: RawLine| match (&line.bytes, line.parse(&path)) {
            (None, Line::Bad(bad)) => format!("{} {}", bad.line, &bad.problem[..18]),
            (bytes, _) => String::from_utf8(bytes.clone().unwrap()).unwrap().trim().to_string(),
        };
        ArrayElements::open(&path).unwrap().map(|line| text(line.unwrap())).collect()
    }

    #[test]
    fn elements_end_at_their_commas() {
        assert_eq!(
            elements(" [{\"a\": \"],\\\"\"},\n [1, [2]] , 3]\n"),
            ["{\"a\": \"],\\\"\"}", "[1, [2]]", "3"]
        );
        assert!(elements("[ ]").is_empty());
        assert_eq!(elements("[{\"a\":1}, {\"b\":"), ["{\"a\":1}", "{\"b\":"]);
        // A missing end and a trailing comma give rows that no parser accepts.
        assert_eq!(elements("[1,"), ["1", ""]);
        assert_eq!(elements("[1,]"), ["1", ""]);
        // Text after the array does the same.
        assert_eq!(elements("[1, 2] \n [3]"), ["1", "2", "3 there is more text"]);
        assert_eq!(elements("[] []"), ["1 there is more text"]);
        assert_eq!(elements("\u{feff}[1]\n\n"), ["1"]);
    }

    #[test]
    fn elements_longer_than_the_buffer_are_whole() {
        let long = format!("{{\"a\":\"{}\"}}", "x,]".repeat(200_000));
        assert_eq!(elements(&format!("[{long},{long}]")), [long.clone(), long]);
    }
}
