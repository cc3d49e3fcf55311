//! Damages JSON: replaces, removes, duplicates and renames values, and truncates or overwrites
//! lines and files.

use deepspec_core::rng::{Purpose, Stream};
use serde_json::{Value, json};

/// A sequence of random numbers.
pub struct Fuzzer {
    stream: Stream,
    rolls: u64,
    words: Vec<String>,
}

impl Fuzzer {
    /// Random numbers from a seed. `words` are names and texts that matter to the reader under
    /// test.
    pub fn new(seed: u64, words: &[&str]) -> Self {
        let words = words.iter().map(ToString::to_string).collect();
        Self { stream: Stream::new(seed, "mutate"), rolls: 0, words }
    }

    /// A random number below `sides`.
    pub fn roll(&mut self, sides: usize) -> usize {
        self.rolls += 1;
        self.stream.below(sides as u64, self.rolls, Purpose::Shuffle, 0) as usize
    }

    fn random_word(&mut self) -> String {
        let place = self.roll(self.words.len());
        self.words[place].clone()
    }

    /// An unusual value.
    pub fn value(&mut self) -> Value {
        match self.roll(12) {
            0 => Value::Null,
            1 => json!(true),
            2 => json!(-7),
            3 => json!(1e300),
            4 => json!(""),
            5 => json!(" \n\u{3000}"),
            6 => json!("\u{0}\u{2028}\"\\"),
            7 => json!([]),
            8 => json!({}),
            9 => json!([[null, {"type": "text", "text": "x"}]]),
            10 => json!({"role": "user", "content": "hi", "from": 1}),
            _ => json!(self.random_word()),
        }
    }

    /// Replaces, removes, duplicates or renames a random part.
    pub fn mutate(&mut self, value: &mut Value) {
        if self.roll(3) == 0 {
            *value = self.value();
            return;
        }
        match value {
            Value::Array(items) if !items.is_empty() => {
                let at = self.roll(items.len());
                match self.roll(6) {
                    0 => drop(items.remove(at)),
                    1 => items.insert(at, items[at].clone()),
                    2 => items.reverse(),
                    _ => self.mutate(&mut items[at]),
                }
            }
            Value::Object(fields) if !fields.is_empty() => {
                let place = self.roll(fields.len());
                let Some(key) = fields.keys().nth(place).cloned() else { return };
                match self.roll(6) {
                    0 => drop(fields.shift_remove(&key)),
                    1 => {
                        let value = fields.shift_remove(&key).unwrap_or_default();
                        fields.insert(self.random_word(), value);
                    }
                    _ => self.mutate(&mut fields[&key]),
                }
            }
            other => *other = self.value(),
        }
    }

    /// A damaged line of a file, without a newline and never blank.
    pub fn line(&mut self, mut value: Value) -> Vec<u8> {
        for _ in 0..self.roll(3) {
            self.mutate(&mut value);
        }
        let mut bytes = value.to_string().into_bytes();
        match self.roll(8) {
            0 => {
                for _ in 0..=self.roll(4) {
                    let at = self.roll(bytes.len());
                    bytes[at] = self.roll(256) as u8;
                }
            }
            1 => bytes.truncate(1 + self.roll(bytes.len())),
            2 if self.roll(4) == 0 => bytes = (0..=self.roll(200)).map(|_| self.roll(256) as u8).collect(),
            _ => {}
        }
        bytes.retain(|&byte| byte != b'\n');
        if bytes.trim_ascii().is_empty() { b"?".to_vec() } else { bytes }
    }

    /// A damaged file with one JSON value, or with one per line.
    pub fn file(&mut self, sound: &[u8]) -> Vec<u8> {
        let mut lines: Vec<Vec<u8>> =
            sound.split_inclusive(|&byte| byte == b'\n').map(<[u8]>::to_vec).collect();
        let at = self.roll(lines.len());
        match self.roll(20) {
            0 if self.roll(3) == 0 => return vec![],
            0 => return [b"\xef\xbb\xbf", sound].concat(),
            1 => return sound[..self.roll(sound.len())].to_vec(),
            2 => return (0..=self.roll(200)).map(|_| self.roll(256) as u8).collect(),
            3 => drop(lines.remove(at)),
            4 => lines.insert(at, lines[at].clone()),
            5 => lines.reverse(),
            6 => {
                let kept = self.roll(lines[at].len());
                lines[at].truncate(kept);
            }
            7 => lines[at] = [&b"[".repeat(10_000), &b"\n"[..]].concat(),
            8 => lines[at].splice(0..0, *b"\xff\xfe\x00").for_each(drop),
            9 | 10 => {
                for _ in 0..=self.roll(4) {
                    let place = self.roll(lines[at].len());
                    lines[at][place] = self.roll(256) as u8;
                }
            }
            11..=15 => self.replace_number(&mut lines[at]),
            _ => match serde_json::from_slice::<Value>(sound) {
                Ok(whole) => return self.mutate_to_bytes(whole),
                Err(_) => {
                    let value = serde_json::from_slice(&lines[at]).unwrap_or_default();
                    lines[at] = [self.mutate_to_bytes(value), b"\n".to_vec()].concat();
                }
            },
        }
        lines.concat()
    }

    fn mutate_to_bytes(&mut self, mut value: Value) -> Vec<u8> {
        for _ in 0..=self.roll(2) {
            self.mutate(&mut value);
        }
        value.to_string().into_bytes()
    }

    /// Replaces a number in the text by an unusual or invalid one.
    fn replace_number(&mut self, text: &mut Vec<u8>) {
        const NUMBERS: [&str; 15] = [
            "-1",
            "0",
            "1",
            "0.5",
            "-0.0",
            "4294967295",
            "4294967296",
            "9223372036854775807",
            "18446744073709551615",
            "18446744073709551616",
            "1e-300",
            "1e308",
            "1e999",
            "NaN",
            "\"7\"",
        ];
        let inside = |at: usize| matches!(text.get(at), Some(b'0'..=b'9' | b'.' | b'-'));
        let starts: Vec<usize> =
            (0..text.len()).filter(|&at| inside(at) && (at == 0 || !inside(at - 1))).collect();
        if !starts.is_empty() {
            let start = starts[self.roll(starts.len())];
            let end = (start..text.len()).find(|&at| !inside(at)).unwrap_or(text.len());
            text.splice(start..end, NUMBERS[self.roll(NUMBERS.len())].bytes()).for_each(drop);
        }
    }
}
