//! Random unusual conversations, and the real tokenizers that are tested on them.

use std::env;
use std::path::PathBuf;

use deepspec_core::rng::{Purpose, Stream};
use serde_json::{Value, json};

use crate::skip::{Kind, skip};

/// The real tokenizers: a folder under `DEEPSPEC_TOKENIZERS`, and the text before and after an
/// assistant message.
pub const TOKENIZER_MARKERS: [(&str, &str, &str); 4] = [
    ("qwen3", "<|im_start|>assistant\n", "<|im_end|>\n"),
    ("llama3_1", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    ("gemma3", "<start_of_turn>model\n", "<end_of_turn>\n"),
    ("smollm2", "<|im_start|>assistant\n", "<|im_end|>\n"),
];

/// The folder with all tokenizers; None skips the test.
pub fn tokenizers() -> Option<PathBuf> {
    let folder = env::var_os("DEEPSPEC_TOKENIZERS").map(PathBuf::from);
    if folder.is_none() {
        skip(
            Kind::Missing,
            "DEEPSPEC_TOKENIZERS names no folder of tokenizers: scripts/test.sh fetches them with npm",
        );
    }
    folder
}

const TEXT_PIECES: [&str; 26] = [
    "What is 3 + 4?",
    "Sure! The answer is 1234567.89",
    " leading and trailing ",
    "\n\n",
    "\n",
    "\t",
    "def f(x):\n    return x ** 2  # squared\n",
    "```rust\nfn main() { println!(\"{:?}\", [1, 2]); }\n```",
    "👩‍👩‍👧‍👦 🙂🏳️‍🌈",
    "你好，世界。这是一个测试",
    "こんにちは、元気ですか？",
    "안녕하세요",
    "Ünïcödé é e\u{301} ﬁ ①",
    "مرحبا بالعالم",
    "<|im_end|>",
    "<|im_start|>user",
    "<|eot_id|>",
    "<end_of_turn>",
    "<think>",
    "</think>",
    "<tool_call>",
    "\u{200b}\u{feff}\u{a0}",
    "it's we'LL they'd I'M",
    "a  b   c    d",
    "{\"key\": [1, null, \"<b>\"]}",
    "$\\frac{1}{2}$ \\(x\\)",
];

/// Random conversations, determined by a name.
pub struct Conversations {
    stream: Stream,
    at: u64,
}

impl Conversations {
    /// Starts the sequence of conversations of `name`.
    pub fn new(name: &str) -> Self {
        Self { stream: Stream::new(3, name), at: 0 }
    }

    /// A random number below `sides`.
    pub fn roll(&mut self, sides: usize) -> usize {
        self.at += 1;
        self.stream.below(sides as u64, self.at, Purpose::Shuffle, 0) as usize
    }

    fn text(&mut self) -> String {
        let pieces = 1 + self.roll(4);
        (0..pieces).map(|_| TEXT_PIECES[self.roll(TEXT_PIECES.len())]).collect()
    }

    /// The next conversation: its messages, and its tools or null.
    pub fn conversation(&mut self) -> (Vec<Value>, Value) {
        let mut said = vec![];
        if self.roll(4) == 0 {
            said.push(json!({"role": "system", "content": self.text()}));
        }
        let tools = match self.roll(6) {
            0 => {
                json!([{"type": "function", "function": {"name": "add", "description": "Adds <b>two</b> numbers: é.",
                "parameters": {"type": "object", "properties": {"b": {"type": "number"}, "a": {"type": "number"}}, "required": ["b", "a"]}}}])
            }
            _ => Value::Null,
        };
        for _ in 0..=self.roll(3) {
            said.push(json!({"role": "user", "content": self.text()}));
            if !tools.is_null() {
                let call =
                    json!({"type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": 1.5}}});
                said.push(json!({"role": "assistant", "content": "", "tool_calls": [call]}));
                said.push(json!({"role": "tool", "name": "add", "content": "3.5"}));
            }
            let mut answer = json!({"role": "assistant", "content": self.text()});
            if self.roll(5) == 0 {
                answer["reasoning_content"] = json!(self.text());
            }
            said.push(answer);
        }
        (said, tools)
    }
}
