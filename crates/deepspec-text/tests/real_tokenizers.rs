//! Compares real tokenizers and their chat templates with transformers. There are more than 2,000
//! conversations with tools, thinking, emoji, CJK, code and special tokens in unexpected places.
//!
//! `scripts/test.sh` downloads the tokenizers and sets `DEEPSPEC_TOKENIZERS` to their folder.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::alike;
use deepspec_checkpoint::gguf::{Tensor, TensorType, Tokenizer, Value as Entry, Writer, unpack};
use deepspec_models::chat_formats;
use deepspec_testkit::conversations::{Conversations, TOKENIZER_MARKERS, tokenizers};
use deepspec_testkit::skip;
use deepspec_text::{
    ChatTemplate, ChatTokenizer, Conversation, MaskRule, RenderOptions, TextError, supervise,
};
use serde_json::{Map, Value, json};

/// Conversations per tokenizer; some templates refuse some of them.
const CONVERSATIONS: u64 = 760;
/// Minimum number of compared conversations, over all tokenizers.
const COMPARED: usize = 2_000;

/// A tokenizer's folder; for a GGUF it is extracted.
fn folder(all: &Path, name: &str, scratch: &Path) -> PathBuf {
    let gguf = all.join(format!("{name}.gguf"));
    if gguf.is_file() { unpack(&gguf, scratch).unwrap() } else { all.join(name) }
}

fn rendered(tokenizer: &ChatTokenizer, conversation: &Conversation) -> Result<String, TextError> {
    let options = RenderOptions { tools: conversation.tools.clone(), ..RenderOptions::default() };
    tokenizer.render(&conversation.messages, &options)
}

/// Marks around thinking, which are plain tokens in some tokenizers.
const MARKS: [&str; 2] = ["<think>", "</think>"];

/// The results of transformers for the cases.
fn transformers(python: impl AsRef<std::ffi::OsStr>, cases: &[Value], scratch: &Path) -> Vec<Value> {
    let [asked, answered] = ["cases.json", "answers.json"].map(|name| scratch.join(name));
    fs::write(&asked, json!(cases).to_string()).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/real_tokenizers.py");
    let run = Command::new(python)
        .arg(script)
        .args([&asked, &answered])
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    serde_json::from_slice(&fs::read(&answered).unwrap()).unwrap()
}

#[test]
fn real_tokenizers_do_as_in_transformers() {
    let (Some(all), Some(python)) = (tokenizers(), skip::python("transformers")) else { return };
    let scratch = tempfile::tempdir().unwrap();
    let mut cases = vec![];
    for (name, header, end) in TOKENIZER_MARKERS {
        let dir = folder(&all, name, scratch.path());
        let mut random = Conversations::new(name);
        for _ in 0..CONVERSATIONS {
            let (messages, tools) = random.conversation();
            let thinking = [json!(null), json!(true), json!(false)][random.roll(3)].clone();
            cases.push(json!({
                "dir": dir, "header": header, "end": end, "messages": messages, "tools": tools, "thinking": thinking,
            }));
        }
    }
    let answers = transformers(&python, &cases, scratch.path());
    assert_eq!(answers.len(), cases.len());

    let mut compared = 0;
    for ((name, header, end), (cases, answers)) in TOKENIZER_MARKERS
        .into_iter()
        .zip(cases.chunks(CONVERSATIONS as usize).zip(answers.chunks(CONVERSATIONS as usize)))
    {
        let tokenizer = ChatTokenizer::load(Path::new(cases[0]["dir"].as_str().unwrap())).unwrap();
        let template = template(header, end);
        // They equal the built-in rules for this tokenizer.
        let built_in = ChatTemplate::guess(&tokenizer, &chat_formats());
        let own = built_in
            .as_ref()
            .and_then(ChatTemplate::markers)
            .map(|markers| (markers.assistant_header.as_str(), markers.end_of_turn.as_str()));
        assert_eq!(own, Some((header, end)), "{name}");
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
            assert_eq!(supervised.input_ids, ids, "{name}: {case}");
            assert!(alike(&tokenizer, &ids, &supervised.loss_mask, &mask, &MARKS), "{name}: {case}");

            // Streamed token by token, the text is the same as decoded at once.
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
        compared += rendered_here;
    }
    assert!(compared >= COMPARED, "{compared} conversations were compared");
}

/// Its package has no template. The one here writes every message between Harmony's marks.
#[test]
fn the_tokenizer_of_gpt_oss_does_as_in_transformers() {
    let (Some(all), Some(python)) = (tokenizers(), skip::python("transformers")) else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = "tokenizer_config.json";
    let mut config: Value =
        serde_json::from_slice(&fs::read(all.join("gptoss").join(file)).unwrap()).unwrap();
    config["chat_template"] = json!(
        "{%- for m in messages -%}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endfor -%}"
    );
    fs::write(dir.path().join(file), config.to_string()).unwrap();
    fs::copy(all.join("gptoss/tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    let mut random = Conversations::new("gptoss");
    let case = |messages: Vec<Value>| {
        json!({
            "dir": dir.path(), "header": "<|start|>assistant<|message|>", "end": "<|end|>", "messages": messages,
            "tools": null, "thinking": null,
        })
    };
    let cases: Vec<Value> = (0..300).map(|_| case(random.conversation().0)).collect();
    let answers = transformers(&python, &cases, dir.path());
    let tokenizer = ChatTokenizer::load(dir.path()).unwrap();
    let mut compared = 0;
    // Messages without text are refused by both.
    for (case, answer) in cases.iter().zip(&answers).filter(|(_, answer)| !answer.is_null()) {
        let row = Map::from_iter([("conversations".to_string(), case["messages"].clone())]);
        let text = rendered(&tokenizer, &Conversation::from_row(&row).unwrap()).unwrap();
        assert_eq!(text, answer["text"], "{case}");
        let ids: Vec<i64> = serde_json::from_value(answer["ids"].clone()).unwrap();
        assert_eq!(tokenizer.encode(&text).unwrap(), ids, "{case}");
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), answer["again"], "{case}");
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), answer["bare"], "{case}");
        compared += 1;
    }
    assert!(compared > 50, "{compared} of 300 were compared");
}

/// A tokenizer that was written into a GGUF is restored from it: the name of its pre-tokenizer
/// stands for the same pattern.
#[test]
fn real_tokenizers_come_back_from_a_gguf() {
    let Some(all) = tokenizers() else { return };
    for name in ["qwen3", "llama3_1"] {
        let scratch = tempfile::tempdir().unwrap();
        let own = ChatTokenizer::load(&all.join(name)).unwrap();
        let file = scratch.path().join("model.gguf");
        write_gguf(&all.join(name), own.vocab_size(), &file);
        let back = ChatTokenizer::load(&unpack(&file, scratch.path()).unwrap()).unwrap();
        let mut random = Conversations::new(name);
        let mut texts = 0;
        for message in (0..200).flat_map(|_| random.conversation().0) {
            let Some(text) = message["content"].as_str() else { continue };
            assert_eq!(back.encode(text).unwrap(), own.encode(text).unwrap(), "{name}: {text:?}");
            texts += 1;
        }
        assert!(texts > 200, "{name}: {texts} texts");
    }
}

/// Writes a Llama of one layer with this folder's tokenizer.
fn write_gguf(folder: &Path, vocab: usize, file: &Path) {
    let tokenizer = Tokenizer::read(folder, vocab).unwrap();
    assert!(tokenizer.has_known_pre_tokenizer(), "{}", folder.display());
    let mut writer = Writer::default();
    writer.put("general.architecture", Entry::Text("llama".into()));
    let sizes =
        ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"];
    for (key, size) in sizes.into_iter().zip([1, 64, 8, 16, 2]) {
        writer.put(&format!("llama.{key}"), Entry::U32(size));
    }
    writer.put("llama.attention.layer_norm_rms_epsilon", Entry::F32(1e-5));
    writer.put("llama.rope.freq_base", Entry::F32(10_000.0));
    writer.extend(tokenizer.into_entries());
    writer.put("tokenizer.ggml.eos_token_id", Entry::U32(0));
    writer.put("tokenizer.chat_template", Entry::Text("{{ messages[0].content }}".into()));
    let square = |name: &str| (format!("blk.0.{name}.weight"), vec![8, 8]);
    let mut tensors = vec![
        ("token_embd.weight".to_string(), vec![vocab, 8]),
        ("output_norm.weight".into(), vec![8]),
        ("blk.0.attn_norm.weight".into(), vec![8]),
        ("blk.0.ffn_norm.weight".into(), vec![8]),
        ("blk.0.ffn_gate.weight".into(), vec![16, 8]),
        ("blk.0.ffn_up.weight".into(), vec![16, 8]),
        ("blk.0.ffn_down.weight".into(), vec![8, 16]),
    ];
    tensors.extend(["attn_q", "attn_k", "attn_v", "attn_output"].map(square));
    for (name, shape) in tensors {
        writer.tensor(Tensor { name, kind: TensorType::F32, shape });
    }
    let mut out = std::io::BufWriter::new(fs::File::create(file).unwrap());
    writer.write(&mut out, |_, tensor: &Tensor| Ok(vec![0; tensor.bytes()])).unwrap();
}

/// Llama 3.1's template has no `{% generation %}` tags, so the test adds them around the
/// assistant's texts. The supervised ids must be the ones that transformers marks.
#[test]
fn a_llamas_own_marks_are_those_of_transformers() {
    let (Some(all), Some(python)) = (tokenizers(), skip::python("transformers")) else { return };
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path().join("llama3_1");
    fs::create_dir(&dir).unwrap();
    fs::copy(all.join("llama3_1/tokenizer.json"), dir.join("tokenizer.json")).unwrap();
    let config = fs::read(all.join("llama3_1/tokenizer_config.json")).unwrap();
    let mut config: Map<String, Value> = serde_json::from_slice(&config).unwrap();
    config.remove("chat_template");
    fs::write(dir.join("tokenizer_config.json"), json!(config).to_string()).unwrap();
    let tagged = "{{- bos_token }}{%- for message in messages %}\
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}{%- if message.role == 'assistant' %}\
        {%- generation %}{{- message.content | trim + '<|eot_id|>' }}{%- endgeneration %}{%- else %}\
        {{- message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}";
    fs::write(dir.join("chat_template.jinja"), tagged).unwrap();
    let mut random = Conversations::new("llama3_1");
    // Answers that only call a tool have no text to trim.
    let spoken = |messages: &Vec<Value>| messages.iter().all(|one| one["content"].is_string());
    let conversations = std::iter::repeat_with(|| random.conversation().0).filter(spoken).take(100);
    let cases: Vec<Value> =
        conversations.map(|messages| json!({"dir": dir, "header": null, "messages": messages})).collect();
    let answers = transformers(&python, &cases, scratch.path());
    let tokenizer = ChatTokenizer::load(&dir).unwrap();
    let generation = ChatTemplate::from_name("generation", &chat_formats()).unwrap();
    for (case, answer) in cases.iter().zip(&answers) {
        let row = Map::from_iter([("conversations".to_string(), case["messages"].clone())]);
        let conversation = Conversation::from_row(&row).unwrap();
        let supervised = supervise(&tokenizer, &generation, &conversation, usize::MAX).unwrap();
        assert_eq!(json!(supervised.input_ids), answer["ids"], "{case}");
        let mask: Vec<bool> = answer["mask"].as_array().unwrap().iter().map(|bit| *bit == 1).collect();
        assert!(alike(&tokenizer, &supervised.input_ids, &supervised.loss_mask, &mask, &MARKS), "{case}");
    }
    let marked = |answer: &Value| answer["mask"].as_array().unwrap().contains(&json!(1));
    assert!(answers.iter().filter(|answer| marked(answer)).count() > 50);
}

fn template(header: &str, end: &str) -> ChatTemplate {
    let mut template = ChatTemplate::from_name("qwen", &chat_formats()).unwrap();
    template.default_system = None;
    if let MaskRule::Markers(markers) = &mut template.rule {
        (markers.assistant_header, markers.end_of_turn) = (header.into(), end.into());
    }
    template
}
