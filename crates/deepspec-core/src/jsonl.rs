//! JSON Lines: reads plain or compressed files with line numbers, and appends so that a crash loses
//! at most the last line.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
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
    /// The problem.
    pub problem: String,
}

/// One line of a JSONL file.
pub enum Line {
    /// A JSON object and its 1-based line number.
    Row(usize, Map<String, Value>),
    /// A line that is not a JSON object.
    Bad(BadLine),
}

/// Maximum length of a line in bytes, which bounds memory for a file without line ends.
pub const MAX_LINE_BYTES: usize = 1 << 28;

/// Opens the text of a file. Decompresses `.gz` and `.zst` files, detected by name, and skips a
/// byte order mark.
///
/// # Errors
/// Fails if the file cannot be opened.
pub fn open_text(path: &Path) -> Result<Box<dyn BufRead + Send>, FileError> {
    let file = File::open(path).map_err(FileError::at("reading", path))?;
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    Ok(match extension.to_ascii_lowercase().as_str() {
        "gz" => Box::new(BomSkippingReader::new(MultiGzDecoder::new(file))),
        "zst" => {
            let decoder = zstd::Decoder::new(file).map_err(FileError::at("decompressing", path))?;
            Box::new(BomSkippingReader::new(decoder))
        }
        _ => Box::new(BomSkippingReader::new(file)),
    })
}

/// The UTF-8 byte order mark that some editors write.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// A reader that skips a leading UTF-8 byte order mark.
struct BomSkippingReader<R> {
    text: BufReader<R>,
    /// Whether the reader has already looked for a byte order mark.
    bom_checked: bool,
    /// The first bytes of the text that the caller has not consumed yet.
    head: Vec<u8>,
}

impl<R: Read> BomSkippingReader<R> {
    fn new(text: R) -> Self {
        Self { text: BufReader::with_capacity(BUFFER_BYTES, text), bom_checked: false, head: vec![] }
    }

    /// Reads the first bytes and drops them if they are a byte order mark. A stream may return them
    /// one by one.
    fn skip_byte_order_mark(&mut self) -> io::Result<()> {
        while self.head.len() < BYTE_ORDER_MARK.len() && BYTE_ORDER_MARK.starts_with(&self.head) {
            let bytes = self.text.fill_buf()?;
            let taken = bytes.len().min(BYTE_ORDER_MARK.len() - self.head.len());
            if taken == 0 {
                break;
            }
            self.head.extend_from_slice(&bytes[..taken]);
            self.text.consume(taken);
        }
        if self.head == BYTE_ORDER_MARK {
            self.head.clear();
        }
        self.bom_checked = true;
        Ok(())
    }
}

impl<R: Read> BufRead for BomSkippingReader<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if !self.bom_checked {
            self.skip_byte_order_mark()?;
        }
        if self.head.is_empty() { self.text.fill_buf() } else { Ok(&self.head) }
    }

    fn consume(&mut self, count: usize) {
        if self.head.is_empty() {
            self.text.consume(count);
        } else {
            self.head.drain(..count);
        }
    }
}

impl<R: Read> Read for BomSkippingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.fill_buf()?.read(buffer)?;
        self.consume(read);
        Ok(read)
    }
}

/// Buffer size in bytes.
const BUFFER_BYTES: usize = 1 << 18;

/// An unparsed line. Parsing is the slow part, so readers of large files collect lines and parse
/// them in parallel.
#[derive(Debug)]
pub struct RawLine {
    /// 1-based line number.
    pub number: usize,
    /// The text with its line end; None for a skipped line.
    pub bytes: Option<Vec<u8>>,
    /// A phrase that says why the line is skipped.
    problem: String,
}

impl RawLine {
    /// A line, which is skipped if it is `too_long`.
    pub fn new(number: usize, bytes: Vec<u8>, too_long: bool) -> Self {
        if too_long {
            return Self::skipped(number, format!("the line is longer than {} MB", MAX_LINE_BYTES >> 20));
        }
        Self { number, bytes: Some(bytes), problem: String::new() }
    }

    /// A skipped line with the reason as a phrase.
    pub fn skipped(number: usize, problem: String) -> Self {
        Self { number, bytes: None, problem }
    }

    /// Parses the line; `path` labels errors.
    pub fn parse(&self, path: &Path) -> Line {
        let bad = |problem| Line::Bad(BadLine { path: path.to_path_buf(), line: self.number, problem });
        let Some(bytes) = &self.bytes else { return bad(self.problem.clone()) };
        let parsed = serde_json::from_slice::<Value>(bytes);
        let parsed = parsed.or_else(|error| parse_nan_as_null(bytes).ok_or(error));
        match parsed {
            Ok(Value::Object(row)) => Line::Row(self.number, row),
            Ok(other) => bad(format!("expected a JSON object, found {}", json_type_name(&other))),
            Err(error) => bad(format!("not valid JSON ({error})")),
        }
    }
}

/// Parses `NaN`, `Infinity` and `-Infinity` as null. Python's `json.dumps` writes these for floats
/// that JSON cannot represent. `None` if the text has none of them or is invalid for another
/// reason.
fn parse_nan_as_null(bytes: &[u8]) -> Option<Value> {
    const WORDS: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];
    let (mut text, mut found) = (Vec::with_capacity(bytes.len()), false);
    let (mut rest, mut in_string) = (bytes, false);
    while let Some(&byte) = rest.first() {
        if !in_string && let Some(word) = WORDS.iter().find(|word| rest.starts_with(word)) {
            text.extend_from_slice(b"null");
            (rest, found) = (&rest[word.len()..], true);
            continue;
        }
        let length = if in_string && byte == b'\\' { rest.len().min(2) } else { 1 };
        in_string ^= byte == b'"';
        text.extend_from_slice(&rest[..length]);
        rest = &rest[length..];
    }
    if found { serde_json::from_slice(&text).ok() } else { None }
}

/// Checks by its first bytes that a file has one JSON object per line.
///
/// # Errors
/// Fails if the file cannot be read or has another format, with the command that converts it.
pub fn check_is_json_lines(path: &Path) -> Result<(), String> {
    let text = open_text(path).map_err(|error| error.to_string())?;
    let mut bytes = vec![];
    let read = text.take(64).read_to_end(&mut bytes);
    read.map_err(|error| FileError::at("reading", path)(error).to_string())?;
    let kind = match bytes.trim_ascii_start() {
        [b'P', b'A', b'R', b'1', ..] => "a parquet file",
        [0x1f, 0x8b, ..] => "a gzip file without .gz in its name",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "a zstd file without .zst in its name",
        [b'[', ..] => "a JSON array",
        _ => return Ok(()),
    };
    Err(format!(
        "{} is {kind}, expected JSON Lines; run `deepspec-data split --dataset {} --test-size 0 --train-output rows.jsonl --eval-output none.jsonl` first",
        path.display(),
        path.display()
    ))
}

/// Iterates over the non-empty lines of a JSONL file, plain or compressed, without parsing them.
pub struct RawLines {
    path: PathBuf,
    text: Box<dyn BufRead + Send>,
    number: usize,
    ended: bool,
}

impl RawLines {
    /// Opens `path`.
    ///
    /// # Errors
    /// Fails if the file cannot be opened.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        Ok(Self { path: path.to_path_buf(), text: open_text(path)?, number: 0, ended: false })
    }

    /// The next line; None at the end of the file.
    fn read_line(&mut self) -> io::Result<Option<RawLine>> {
        let mut bytes = Vec::new();
        if self.text.by_ref().take(MAX_LINE_BYTES as u64).read_until(b'\n', &mut bytes)? == 0 {
            return Ok(None);
        }
        self.number += 1;
        let whole = bytes.len() < MAX_LINE_BYTES || bytes.ends_with(b"\n");
        if !whole {
            self.text.skip_until(b'\n')?;
        }
        Ok(Some(RawLine::new(self.number, bytes, !whole)))
    }
}

impl Iterator for RawLines {
    type Item = Result<RawLine, FileError>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.ended {
            match self.read_line() {
                Ok(Some(line)) if line.bytes.as_ref().is_some_and(|bytes| bytes.trim_ascii().is_empty()) => {}
                Ok(Some(line)) => return Some(Ok(line)),
                Ok(None) => self.ended = true,
                Err(error) => {
                    // A broken stream would repeat the same error forever.
                    self.ended = true;
                    return Some(Err(FileError::at("reading", &self.path)(error)));
                }
            }
        }
        None
    }
}

/// Number of non-empty lines of the files.
///
/// # Errors
/// Fails if a file cannot be read.
pub fn count_lines(files: &[PathBuf]) -> Result<u64, FileError> {
    let mut total = 0;
    for file in files {
        for line in RawLines::open(file)? {
            line?;
            total += 1;
        }
    }
    Ok(total)
}

/// A batch with this many bytes is full. A compressed file can expand a thousandfold, so a number
/// of lines alone does not bound memory.
pub const BATCH_BYTES: usize = 1 << 26;

/// Reads a file as batches of unparsed lines, which callers parse in parallel. A batch has 1 to
/// `size` lines and ends once it exceeds [`BATCH_BYTES`].
///
/// # Errors
/// Fails if the file cannot be opened. Read errors later replace a batch.
pub fn line_batches(
    path: &Path,
    size: usize,
) -> Result<impl Iterator<Item = Result<Vec<RawLine>, FileError>> + use<>, FileError> {
    let mut lines = RawLines::open(path)?;
    Ok(std::iter::from_fn(move || {
        let (mut batch, mut bytes) = (vec![], 0);
        while batch.len() < size && bytes < BATCH_BYTES {
            match lines.next() {
                Some(Ok(line)) => {
                    bytes += line.bytes.as_ref().map_or(0, Vec::len);
                    batch.push(line);
                }
                Some(Err(error)) => return Some(Err(error)),
                None => break,
            }
        }
        (!batch.is_empty()).then_some(Ok(batch))
    }))
}

/// The [`line_batches`] of several files, each with its file path.
pub fn line_batches_of_files(
    files: &[PathBuf],
    size: usize,
) -> impl Iterator<Item = Result<(&Path, Vec<RawLine>), FileError>> {
    files.iter().flat_map(move |file| {
        let (batches, error) = match line_batches(file, size) {
            Ok(batches) => (Some(batches), None),
            Err(error) => (None, Some(Err(error))),
        };
        error.into_iter().chain(batches.into_iter().flatten().map(move |batch| Ok((file.as_path(), batch?))))
    })
}

/// Iterates over the parsed non-empty lines of a JSONL file, plain or compressed.
pub struct Reader(RawLines);

impl Reader {
    /// Opens `path`.
    ///
    /// # Errors
    /// Fails if the file cannot be opened.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        RawLines::open(path).map(Self)
    }
}

impl Iterator for Reader {
    type Item = Result<Line, FileError>;

    fn next(&mut self) -> Option<Self::Item> {
        let line = self.0.next()?;
        Some(line.map(|line| line.parse(&self.0.path)))
    }
}

/// Name of a value's JSON type, for messages.
pub fn json_type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Appends complete lines. Opening the file removes an incomplete last line, so that writing
/// continues cleanly after a crash.
pub struct Appender {
    path: PathBuf,
    file: BufWriter<File>,
}

impl Appender {
    /// Opens or creates `path` for appending.
    ///
    /// # Errors
    /// Fails on any I/O error, with the path.
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

    /// Appends `row` as one line and flushes it to the operating system.
    ///
    /// # Errors
    /// Fails on any I/O error, with the path.
    pub fn append(&mut self, row: &impl Serialize) -> Result<(), FileError> {
        let mut write = || -> io::Result<()> {
            let mut line = serde_json::to_vec(row)?;
            line.push(b'\n');
            self.file.write_all(&line)?;
            self.file.flush()
        };
        write().map_err(FileError::at("writing", &self.path))
    }

    /// Syncs everything appended to disk.
    ///
    /// # Errors
    /// Fails on any I/O error, with the path.
    pub fn sync(&mut self) -> Result<(), FileError> {
        self.file.get_ref().sync_all().map_err(FileError::at("syncing", &self.path))
    }
}

/// Byte offset just after the last newline.
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

    #[test]
    fn pythons_numbers_without_a_form_in_json_are_null() {
        let read = |text: &str| match RawLine::new(1, text.into(), false).parse(Path::new("x")) {
            Line::Row(_, row) => Value::Object(row).to_string(),
            Line::Bad(bad) => bad.problem,
        };
        assert_eq!(
            read(r#"{"a":NaN,"b":[-Infinity,Infinity],"NaN":"NaN \" Infinity"}"#),
            r#"{"a":null,"b":[null,null],"NaN":"NaN \" Infinity"}"#
        );
        assert!(read(r#"{"a":NaN"#).contains("not valid JSON"));
        assert!(read(r#"{"a":nan}"#).contains("not valid JSON"));
    }

    #[test]
    fn files_of_another_kind_are_named_with_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.jsonl");
        for (bytes, kind) in [
            (&b"PAR1\x15"[..], "a parquet file"),
            (b" [{\"id\": 1}]", "a JSON array"),
            (b"\x1f\x8b\x08", "a gzip file"),
        ] {
            fs::write(&path, bytes).unwrap();
            let problem = check_is_json_lines(&path).unwrap_err();
            assert!(problem.contains(kind) && problem.contains("deepspec-data split"), "{problem}");
        }
        fs::write(&path, "{\"id\": 1}\n").unwrap();
        assert_eq!(check_is_json_lines(&path), Ok(()));
    }

    #[test]
    fn compressed_and_marked_files_are_read_and_broken_ones_end() {
        let dir = tempfile::tempdir().unwrap();
        let text = b"{\"id\":1}\n{\"id\":2}\n";
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(text).unwrap();
        let gz = gz.finish().unwrap();
        // Concatenated members, as parallel compressors write them, form one text.
        fs::write(dir.path().join("a.jsonl.gz"), [&gz[..], &gz[..]].concat()).unwrap();
        fs::write(dir.path().join("b.jsonl.zst"), zstd::encode_all(&text[..], 1).unwrap()).unwrap();
        let count = |name: &str| Reader::open(&dir.path().join(name)).unwrap().filter(Result::is_ok).count();
        assert_eq!((count("a.jsonl.gz"), count("b.jsonl.zst")), (4, 2));

        let marked = [b"\xef\xbb\xbf", &text[..]].concat();
        fs::write(dir.path().join("m.jsonl"), &marked).unwrap();
        fs::write(dir.path().join("m.jsonl.zst"), zstd::encode_all(&marked[..], 1).unwrap()).unwrap();
        // A byte order mark is skipped once. Text that only begins like one is kept.
        fs::write(dir.path().join("n.jsonl"), [b"\xef\xbb\xbf", &marked[..]].concat()).unwrap();
        fs::write(dir.path().join("o.jsonl"), b"\xef\xbb").unwrap();
        let good = |name: &str| {
            let lines = Reader::open(&dir.path().join(name)).unwrap();
            lines.map(|line| matches!(line, Ok(Line::Row(..)))).collect::<Vec<_>>()
        };
        assert_eq!((good("m.jsonl"), good("m.jsonl.zst")), (vec![true, true], vec![true, true]));
        assert_eq!((good("n.jsonl"), good("o.jsonl")), (vec![false, true], vec![false]));

        fs::write(dir.path().join("cut.gz"), &gz[..gz.len() - 9]).unwrap();
        let last = Reader::open(&dir.path().join("cut.gz")).unwrap().last().unwrap();
        assert!(last.err().unwrap().to_string().contains("cut.gz"));
    }

    #[test]
    fn batches_of_a_small_file_with_huge_lines_are_small() {
        const LINE: usize = 24 << 20;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bomb.jsonl.zst");
        let line = ["{\"a\":\"", &" ".repeat(LINE), "\"}\n"].concat();
        let mut bomb = zstd::Encoder::new(File::create(&path).unwrap(), 1).unwrap();
        (0..10).for_each(|_| bomb.write_all(line.as_bytes()).unwrap());
        bomb.write_all(b"{}\n{}\n{}").unwrap();
        bomb.finish().unwrap();
        assert!(fs::metadata(&path).unwrap().len() < 1 << 18, "it is no bomb");
        let (mut sizes, mut numbers) = (vec![], vec![]);
        for batch in line_batches(&path, 100).unwrap() {
            let batch = batch.unwrap();
            sizes.push(batch.iter().map(|line| line.bytes.as_ref().unwrap().len()).sum::<usize>());
            numbers.extend(batch.iter().map(|line| line.number));
        }
        assert_eq!(numbers, (1..=13).collect::<Vec<_>>());
        assert!(sizes.iter().all(|&size| size < BATCH_BYTES + line.len()), "{sizes:?}");
        // Small lines: the batch has the requested number of lines.
        let text = "{}\n".repeat(7);
        fs::write(dir.path().join("small.jsonl"), text).unwrap();
        let counts =
            line_batches(&dir.path().join("small.jsonl"), 3).unwrap().map(|batch| batch.unwrap().len());
        assert_eq!(counts.collect::<Vec<_>>(), [3, 3, 1]);
    }

    proptest! {
        /// After a cut at any byte, appending continues after the last complete line and keeps all
        /// complete lines.
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
