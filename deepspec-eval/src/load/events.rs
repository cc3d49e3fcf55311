//! Parser of server-sent events from a byte stream.

/// Collects lines into events as the HTML standard defines them: the data of an event is its `data`
/// lines, and a blank line ends it. Comments, other fields and events without data are dropped.
#[derive(Default)]
pub struct SseParser {
    /// Bytes of the unfinished line.
    line: Vec<u8>,
    /// Data lines of the unfinished event.
    data: Vec<String>,
    /// Whether the last byte was a carriage return; a line feed after it belongs to the same line
    /// end.
    returned: bool,
    /// Whether the first line has ended, which may begin with a byte order mark.
    begun: bool,
}

impl SseParser {
    /// Parses the next bytes, and returns the data of each event that is now complete.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut complete = vec![];
        for &byte in bytes {
            match byte {
                b'\n' if self.returned => self.returned = false,
                b'\n' | b'\r' => {
                    self.returned = byte == b'\r';
                    complete.extend(self.end_line());
                }
                _ => {
                    self.returned = false;
                    self.line.push(byte);
                }
            }
        }
        complete
    }

    /// The data of an event that the stream ended without a blank line.
    pub fn finish(mut self) -> Option<String> {
        let complete = if self.line.is_empty() { None } else { self.end_line() };
        complete.or_else(|| self.end_line())
    }

    fn end_line(&mut self) -> Option<String> {
        let mut line = String::from_utf8_lossy(&std::mem::take(&mut self.line)).into_owned();
        if !std::mem::replace(&mut self.begun, true) && line.starts_with('\u{feff}') {
            line.remove(0);
        }
        if line.is_empty() {
            let data = std::mem::take(&mut self.data).join("\n");
            return Some(data).filter(|data| !data.trim().is_empty());
        }
        if let Some(value) = line.strip_prefix("data:") {
            self.data.push(value.strip_prefix(' ').unwrap_or(value).to_string());
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use deepspec_testkit::mutate::Fuzzer;

    fn read(pieces: &[&[u8]]) -> Vec<String> {
        let mut events = SseParser::default();
        let mut found: Vec<String> = pieces.iter().flat_map(|piece| events.push(piece)).collect();
        found.extend(events.finish());
        found
    }

    #[test]
    fn events_are_data_between_blank_lines() {
        assert_eq!(read(&[b"data: a\n\ndata:b\n\n"]), ["a", "b"]);
        assert_eq!(read(&[b": ping\n\ndata:\n\nevent: x\nid: 1\ndata: a\n\n"]), ["a"]);
        assert_eq!(read(&[b"data: a\r\n\r\ndata: b\r\rdata: [DONE]"]), ["a", "b", "[DONE]"]);
        assert_eq!(read(&[b"data: {\ndata: }\n\n"]), ["{\n}"]);
        assert_eq!(read(&[b"data: a\n"]), ["a"]);
        assert_eq!(read(&[]), [""; 0]);
    }

    #[test]
    fn pieces_do_not_matter() {
        let mut dice = Fuzzer::new(5, &["x"]);
        for _ in 0..20_000 {
            let lines = ["data: a", "data:b", "data:", ": c", "event: x", ""];
            let text: String = (0..dice.roll(12))
                .map(|_| [lines[dice.roll(lines.len())], ["\r\n", "\n", "\r"][dice.roll(3)]].concat())
                .collect();
            let whole = read(&[text.as_bytes()]);
            let (front, back) = text.as_bytes().split_at(dice.roll(text.len() + 1));
            assert_eq!(read(&[front, back]), whole, "{text:?}");
        }
    }
}
