//! Compares rendering and `{% generation %}` masks with transformers' `apply_chat_template`.
//!
//! Runs only if `DEEPSPEC_TEST_PYTHON` names a Python with transformers.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::alike;
use deepspec_models::chat_formats;
use deepspec_testkit::{golden, skip};
use deepspec_text::{ChatTemplate, ChatTokenizer, Conversation, supervise};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

const SCRIPT: &str = r#"
import json, sys
from transformers import AutoTokenizer

answers = []
for case in json.load(open(sys.argv[1])):
    tokenizer = AutoTokenizer.from_pretrained(case["dir"])
    messages, tools = case["messages"], case["tools"]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    out = tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
                                        truncation=True, max_length=case["max_length"])
    answers.append({"text": text, "ids": out["input_ids"], "mask": out["assistant_masks"]})
json.dump(answers, open(sys.argv[2], "w"))
"#;

/// Templates with tags in all positions and all forms of whitespace control.
const TEMPLATES: [&str; 5] = [
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}",
    "{% for m in messages %}\n  {% if m.role == 'assistant' %}\n<|im_start|>assistant\n    {%- generation -%}\n      {{ m.content }}\n    {% endgeneration -%}\n  <|im_end|>\n  {% else %}\n{{ m.role }}: {{ m.content }}\n  {% endif %}\n{% endfor %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}\n  {% generation %}\n{{ m.content | trim }}\n  {% endgeneration %}\n!{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "{% for m in messages %}{%+ if m.role == 'assistant' +%}  {%+ generation +%}  {{ m.content }}  {%+ endgeneration +%}  {%+ else +%}{{ m.content }} {%+ endif +%}{% endfor %}",
    TOOLS,
];

/// Tools, calls, results and thinking, as in current models.
const TOOLS: &str = r#"{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}{%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}{%- generation %}
{%- if m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}{{- m.content }}
{%- for call in m.tool_calls %}{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>' }}
{%- endgeneration %}{{- '\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}"#;

fn conversations() -> Vec<(Value, Value)> {
    let tools = json!([{"type": "function", "function": {"name": "add", "description": "Adds <b>two</b> numbers.",
        "parameters": {"type": "object", "properties": {"b": {"type": "number"}, "a": {"type": "number"}}, "required": ["b", "a"]}}}]);
    vec![
        (
            json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]),
            json!(null),
        ),
        (
            json!([{"role": "user", "content": " What is 3 + 4?\n"}, {"role": "assistant", "content": "\n It is 7, é 🙂! "},
                {"role": "user", "content": "Sure 👩‍👩‍👧?"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "?"},
                {"role": "assistant", "content": "Sure 🙂"}]),
            json!(null),
        ),
        (
            json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2?"},
                {"role": "assistant", "content": "Let me see.", "reasoning_content": "A tool!", "tool_calls": [
                    {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"b": 2, "a": 1.5, "note": "it's <é>"}}}]},
                {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "3"}, {"role": "assistant", "content": "3."}]),
            tools,
        ),
    ]
}

/// A tokenizer with one of the templates.
fn tokenizer(original: &Path, template: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::write(dir.path().join(file), fs::read(original.join(file)).unwrap()).unwrap();
    }
    fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    dir
}

/// These messages as other programs write them: arguments as JSON text, and a note on how the
/// answer ended.
fn as_recorded(messages: &Value) -> Value {
    let mut messages = messages.clone();
    for message in messages.as_array_mut().unwrap() {
        if message["role"] == "assistant" {
            message["finish_reason"] = json!("stop");
        }
        for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            call["function"]["arguments"] = json!(call["function"]["arguments"].to_string());
        }
    }
    messages
}

/// Marks around thinking and at the ends of turns, which some templates write within their tags.
const MARKS: [&str; 4] = ["<think>", "</think>", "<|im_end|>", "<turn|>"];

#[test]
fn generation_masks_are_those_of_transformers() {
    let Some(python) = skip::python("transformers") else { return };
    let tiny: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-target");
    let originals = [tiny, golden::dir("templates_qwen"), golden::dir("templates_gemma4")];
    let (mut dirs, mut cases) = (Vec::new(), Vec::new());
    for original in &originals {
        for template in TEMPLATES {
            let dir = tokenizer(original, template);
            for (messages, tools) in conversations() {
                for max_length in [400, 23] {
                    cases.push(json!({"dir": dir.path(), "messages": messages, "tools": tools, "max_length": max_length}));
                }
            }
            dirs.push(dir);
        }
    }
    let scratch = tempfile::tempdir().unwrap();
    let (asked, answered) = (scratch.path().join("cases.json"), scratch.path().join("answers.json"));
    fs::write(&asked, json!(cases).to_string()).unwrap();
    let output = Command::new(python)
        .args(["-c", SCRIPT])
        .args([&asked, &answered])
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let answers: Vec<Value> = serde_json::from_slice(&fs::read(&answered).unwrap()).unwrap();

    let template = ChatTemplate::from_name("generation", &chat_formats()).unwrap();
    let (mut tokens, mut supervised) = (0, 0);
    for (case, answer) in cases.iter().zip(&answers) {
        let tokenizer = ChatTokenizer::load(Path::new(case["dir"].as_str().unwrap())).unwrap();
        let row =
            json!({"conversations": as_recorded(&case["messages"]), "tools": case["tools"].to_string()});
        let row: Map<String, Value> = row.as_object().unwrap().clone();
        let conversation = Conversation::from_row(&row).unwrap();
        let max_length = case["max_length"].as_u64().unwrap() as usize;
        let found = supervise(&tokenizer, &template, &conversation, max_length).unwrap();
        assert_eq!(found.text, answer["text"], "{case}");
        assert_eq!(json!(found.input_ids), answer["ids"], "{case}");
        let mask: Vec<bool> = answer["mask"].as_array().unwrap().iter().map(|bit| *bit == 1).collect();
        assert!(
            alike(&tokenizer, &found.input_ids, &found.loss_mask, &mask, &MARKS),
            "{case}\n{}",
            found.text
        );
        tokens += mask.len();
        supervised += found.supervised_count();
    }
    eprintln!("{} renderings alike: {tokens} tokens, {supervised} supervised", answers.len());
}
