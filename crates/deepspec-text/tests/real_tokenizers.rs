//! Real tokenizers and their chat templates against transformers: 2,080 conversations with tools, thoughts, emoji, CJK, code and special tokens
//! where nobody expects them.
//!
//! `scripts/test.sh` fetches the tokenizers and says where they are in `DEEPSPEC_TOKENIZERS`.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use deepspec_core::rng::{Purpose, Stream};
use deepspec_gguf::unpack;
use deepspec_testkit::skip::{self, Kind};
use deepspec_text::{
    ChatTemplate, ChatTokenizer, Conversation, MaskRule, RenderOptions, TextError, supervise,
};
use serde_json::{Map, Value, json};

/// Conversations of each tokenizer.
const CONVERSATIONS: u64 = 520;

/// A folder under `DEEPSPEC_TOKENIZERS`, and the marks around what its model says.
const TOKENIZERS: [(&str, &str, &str); 4] = [
    ("qwen3", "<|im_start|>assistant\n", "<|im_end|>\n"),
    ("llama3_1", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    ("gemma3", "<start_of_turn>model\n", "<end_of_turn>\n"),
    ("smollm2", "<|im_start|>assistant\n", "<|im_end|>\n"),
];

const PIECES: [&str; 26] = [
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

struct Writer {
    stream: Stream,
    at: u64,
}

impl Writer {
    fn roll(&mut self, sides: usize) -> usize {
        self.at += 1;
        self.stream.below(sides as u64, self.at, Purpose::Shuffle, 0) as usize
    }

    fn text(&mut self) -> String {
        let pieces = 1 + self.roll(4);
        (0..pieces).map(|_| PIECES[self.roll(PIECES.len())]).collect()
    }

    fn conversation(&mut self) -> (Vec<Value>, Value) {
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

/// The tokenizers' folders; None leaves the test out.
fn folders() -> Option<PathBuf> {
    let folder = env::var_os("DEEPSPEC_TOKENIZERS").map(PathBuf::from);
    if folder.is_none() {
        skip::skip(
            Kind::Absent,
            "DEEPSPEC_TOKENIZERS names no folder of tokenizers: scripts/test.sh fetches them with npm",
        );
    }
    folder
}

/// A tokenizer's folder; that of a GGUF is made.
fn folder(all: &Path, name: &str, scratch: &Path) -> PathBuf {
    let gguf = all.join(format!("{name}.gguf"));
    if gguf.is_file() { unpack(&gguf, scratch).unwrap() } else { all.join(name) }
}

fn rendered(tokenizer: &ChatTokenizer, conversation: &Conversation) -> Result<String, TextError> {
    let options = RenderOptions { tools: conversation.tools.clone(), ..RenderOptions::default() };
    tokenizer.render(&conversation.messages, &options)
}

#[test]
fn real_tokenizers_do_as_in_transformers() {
    let (Some(all), Some(python)) = (folders(), skip::python("transformers")) else { return };
    let scratch = tempfile::tempdir().unwrap();
    let mut cases = vec![];
    for (name, header, end) in TOKENIZERS {
        let dir = folder(&all, name, scratch.path());
        let mut writer = Writer { stream: Stream::new(3, name), at: 0 };
        for _ in 0..CONVERSATIONS {
            let (messages, tools) = writer.conversation();
            let thinking = [json!(null), json!(true), json!(false)][writer.roll(3)].clone();
            cases.push(json!({
                "dir": dir, "header": header, "end": end, "messages": messages, "tools": tools, "thinking": thinking,
            }));
        }
    }
    let [asked, answered] = ["cases.json", "answers.json"].map(|name| scratch.path().join(name));
    fs::write(&asked, json!(cases).to_string()).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/real_tokenizers.py");
    let run = Command::new(python)
        .arg(script)
        .args([&asked, &answered])
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let answers: Vec<Value> = serde_json::from_slice(&fs::read(&answered).unwrap()).unwrap();
    assert_eq!(answers.len(), cases.len());

    for ((name, header, end), (cases, answers)) in TOKENIZERS
        .into_iter()
        .zip(cases.chunks(CONVERSATIONS as usize).zip(answers.chunks(CONVERSATIONS as usize)))
    {
        let tokenizer = ChatTokenizer::load(Path::new(cases[0]["dir"].as_str().unwrap())).unwrap();
        let template = template(header, end);
        let mut rendered_here = 0;
        for (case, answer) in cases.iter().zip(answers) {
            let row = Map::from_iter([
                ("conversations".to_string(), case["messages"].clone()),
                ("tools".into(), case["tools"].clone()),
            ]);
            let conversation = Conversation::from_row(&row).unwrap();
            let text = rendered(&tokenizer, &conversation);
            if answer.is_null() {
                assert!(text.is_err(), "{name}: transformers refuses {case}");
                continue;
            }
            rendered_here += 1;
            let text = text.unwrap_or_else(|error| panic!("{name}: {error}: {case}"));
            assert_eq!(text, answer["text"], "{name}: {case}");
            let ids: Vec<i64> = serde_json::from_value(answer["ids"].clone()).unwrap();
            assert_eq!(tokenizer.encode(&text).unwrap(), ids, "{name}: {case}");
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), answer["again"], "{name}: {case}");
            assert_eq!(tokenizer.decode(&ids, true).unwrap(), answer["bare"], "{name}: {case}");

            let kwargs = match &case["thinking"] {
                Value::Null => Map::new(),
                thinking => Map::from_iter([("enable_thinking".to_string(), thinking.clone())]),
            };
            let options =
                RenderOptions { add_generation_prompt: true, kwargs, tools: conversation.tools.clone() };
            assert_eq!(
                tokenizer.render(&conversation.messages[..1], &options).unwrap(),
                answer["prompt"],
                "{name}: {case}"
            );

            let supervised = supervise(&tokenizer, &template, &conversation, usize::MAX).unwrap();
            let mask: Vec<bool> = answer["mask"].as_array().unwrap().iter().map(|bit| *bit == 1).collect();
            assert_eq!((supervised.input_ids, supervised.loss_mask), (ids.clone(), mask), "{name}: {case}");

            // Token by token it is the same text as at once.
            let mut stream = tokenizer.stream("");
            let mut streamed = String::new();
            for &id in &ids {
                streamed.extend(stream.push(id).unwrap());
            }
            streamed += &stream.finish().unwrap();
            assert_eq!(streamed, tokenizer.decode_answer(&ids).unwrap(), "{name}: {case}");
        }
        assert!(
            rendered_here as u64 > CONVERSATIONS / 4,
            "{name}: {rendered_here} of {CONVERSATIONS} rendered"
        );
    }
}

fn template(header: &str, end: &str) -> ChatTemplate {
    let mut template = ChatTemplate::named("qwen").unwrap();
    template.default_system = None;
    if let MaskRule::Marks(marks) = &mut template.rule {
        (marks.assistant_header, marks.end_of_turn) = (header.into(), end.into());
    }
    template
}
