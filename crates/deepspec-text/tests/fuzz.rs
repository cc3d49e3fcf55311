//! Rows from real data: whatever they contain, they are masked or refused with a reason.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use deepspec_models::chat_formats;
use deepspec_testkit::golden;
use deepspec_testkit::mutate::Fuzzer;
use deepspec_text::{
    ChatTemplate, ChatTokenizer, Conversation, FinishReason, Message, RenderOptions, Role, Supervised,
    check_loss_mask, supervise,
};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde_json::{Value, json};

/// Tokenizers with the rules of their templates, shared by all threads as in the stages.
static BENCHES: LazyLock<Vec<(ChatTokenizer, ChatTemplate)>> = LazyLock::new(|| {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-target");
    [(tiny, "qwen"), (golden::dir("templates_qwen"), "qwen"), (golden::dir("templates_gemma4"), "gemma4")]
        .map(|(dir, name)| {
            (ChatTokenizer::load(&dir).unwrap(), ChatTemplate::from_name(name, &chat_formats()).unwrap())
        })
        .into()
});

/// Difficult texts: marks, halves of marks, blanks, broken and private-use characters.
fn piece() -> impl Strategy<Value = String> {
    let odd = select(vec![
        "<|im_start|>assistant\n",
        "<|im_end|>\n",
        "<|im_end|>",
        "<|turn>model\n",
        "<turn|>\n",
        "<|channel>thought\n<channel|>",
        "<think>",
        "</think>",
        "\n",
        "\n\n",
        " ",
        "",
        "{{ 7 }}",
        "{% generation %}",
        "\u{0}",
        "\u{F0000}",
        "\u{F0001}",
        "\u{FEFF}",
        "e\u{301}",
        "👩‍👩‍👧",
        "assistant",
        "<|im_",
        "ﷺ",
    ]);
    prop_oneof![odd.prop_map(str::to_owned), "[a-zA-Z ,.?0-9]{0,12}", any::<String>()]
}

fn content() -> impl Strategy<Value = Value> {
    prop::collection::vec(piece(), 0..5).prop_map(|pieces| json!(pieces.concat()))
}

fn wrong() -> impl Strategy<Value = Value> {
    select(vec![
        json!(null),
        json!(1),
        json!(true),
        json!([]),
        json!({}),
        json!(""),
        json!([1]),
        json!("length"),
        json!([{"type": "text", "text": "t"}]),
        json!([{"type": "image"}]),
        json!({"role": "user"}),
        json!([{"function": {"name": "f", "arguments": "{\"a\": 1}"}}]),
        json!([{"function": 3}]),
        json!("[{}]"),
        json!(1e300),
        json!([[[[[]]]]]),
    ])
}

fn message() -> impl Strategy<Value = Value> {
    let role = select(vec!["system", "user", "assistant", "tool"]);
    (role, content(), prop::option::of(content()), prop::option::weighted(0.2, wrong())).prop_map(
        |(role, content, reasoning, calls)| {
            let mut message = json!({"role": role, "content": content});
            if let Some(reasoning) = reasoning {
                message["reasoning_content"] = reasoning;
            }
            if let Some(calls) = calls {
                message["tool_calls"] = calls;
            }
            message
        },
    )
}

/// Replaces or removes something at a random place in `value`.
fn mutate(value: &mut Value, place: &mut impl FnMut(usize) -> usize, with: &Value) {
    let length = match value {
        Value::Array(items) => items.len(),
        Value::Object(fields) => fields.len(),
        _ => 0,
    };
    let at = place(length + 1);
    match value {
        Value::Array(items) if at < length => mutate(&mut items[at], place, with),
        Value::Object(fields) if at < length => {
            let key = fields.keys().nth(at).unwrap().clone();
            if place(4) == 0 {
                fields.remove(&key);
            } else {
                mutate(&mut fields[&key], place, with);
            }
        }
        value => *value = with.clone(),
    }
}

fn row() -> impl Strategy<Value = Value> {
    let messages = prop::collection::vec(message(), 0..6);
    let mutation = (prop::collection::vec(any::<Index>(), 12), wrong());
    let mutations = prop::collection::vec(mutation, 0..3);
    (messages, any::<bool>(), prop::option::weighted(0.2, wrong()), mutations).prop_map(
        |(mut messages, asked, tools, mutations)| {
            if asked {
                messages.insert(0, json!({"role": "user", "content": "Hi"}));
            }
            let mut row = json!({"id": 1, "conversations": messages});
            if let Some(tools) = tools {
                row["tools"] = tools;
            }
            for (indices, with) in mutations {
                let mut indices = indices.into_iter();
                mutate(&mut row, &mut |length| indices.next().map_or(0, |index| index.index(length)), &with);
            }
            row
        },
    )
}

fn look(bench: &(ChatTokenizer, ChatTemplate), row: &Value, max_length: usize) -> Result<Supervised, String> {
    let (tokenizer, template) = bench;
    let row = row.as_object().ok_or("no object")?;
    let conversation = Conversation::from_row(row).map_err(|error| error.to_string())?;
    let supervised =
        supervise(tokenizer, template, &conversation, max_length).map_err(|error| error.to_string())?;
    let checked = check_loss_mask(tokenizer, template, &conversation, &supervised)
        .map_err(|error| error.to_string())?;
    for problem in &checked.problems {
        assert!(!problem.to_string().contains('\n'), "{problem}");
    }
    assert!(supervised.supervised_count() > 0 || !checked.problems.is_empty(), "an empty mask is a problem");
    Ok(supervised)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12_000))]

    #[test]
    fn every_row_is_masked_or_refused_with_a_reason(row in row(), bench in 0..3usize) {
        match look(&BENCHES[bench], &row, 64) {
            Ok(found) => {
                prop_assert_eq!(found.input_ids.len(), found.loss_mask.len());
                prop_assert!(found.input_ids.len() <= 64 && found.input_ids.len() <= found.untruncated_len);
                prop_assert!(found.text_ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            }
            Err(reason) => prop_assert!(!reason.is_empty()),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    /// A longer limit only adds tokens.
    #[test]
    fn a_longer_limit_keeps_what_a_shorter_one_has(row in row(), bench in 0..3usize, short in 1..80usize, more in 0..80usize) {
        let found = [short, short + more].map(|limit| look(&BENCHES[bench], &row, limit));
        if let [Ok(short), Ok(long)] = found {
            prop_assert!(long.input_ids.starts_with(&short.input_ids));
            prop_assert!(long.loss_mask.starts_with(&short.loss_mask));
            prop_assert_eq!((short.text, short.text_ranges), (long.text, long.text_ranges));
        }
    }

    /// For plain words, exactly the assistant's texts are supervised, each with its end of turn, in
    /// tokens as in text.
    #[test]
    fn plain_answers_are_supervised_word_for_word(turns in prop::collection::vec(("[a-z][a-z ,.?]{0,30}[a-z]", "[A-Z][a-z ,.0-9]{0,60}[.!?]"), 1..4), bench in 0..3usize) {
        let (tokenizer, template) = &BENCHES[bench];
        let messages: Vec<Value> = turns.iter().flat_map(|(question, answer)| [json!({"role": "user", "content": question}), json!({"role": "assistant", "content": answer})]).collect();
        let found = look(&BENCHES[bench], &json!({"conversations": messages}), 4096).unwrap();
        let end = &template.markers().unwrap().end_of_turn;
        let expected: Vec<String> = turns.iter().map(|(_, answer)| format!("{answer}{end}")).collect();
        let said: Vec<&str> = found.text_ranges.iter().map(|&(start, end)| found.text[start..end].trim_start_matches("<think>\n\n</think>\n\n")).collect();
        prop_assert_eq!(said, expected);
        for ((start, end), &(from, to)) in found.spans().into_iter().zip(&found.text_ranges) {
            let tokens = tokenizer.decode(&found.input_ids[start as usize..end as usize], false).unwrap();
            prop_assert_eq!(tokens, &found.text[from..to]);
        }
    }
}

/// Field names of rows and messages of other tools, and values that have a meaning in some of them.
const WORDS: [&str; 30] = [
    "conversations",
    "messages",
    "role",
    "content",
    "from",
    "value",
    "prompt",
    "response",
    "instruction",
    "input",
    "output",
    "turns",
    "tools",
    "tool_calls",
    "function_call",
    "reasoning",
    "reasoning_content",
    "thinking",
    "refusal",
    "finish_reason",
    "token_ids",
    "prompt_token_ids",
    "name",
    "developer",
    "model",
    "FUNCTION",
    "length",
    "abort",
    "[]",
    "{}",
];

fn sound_rows() -> Vec<Value> {
    let call =
        json!([{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 3}"}}]);
    vec![
        json!({"id": "a", "conversations": [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "Hello.", "reasoning_content": "Well.", "finish_reason": "stop"}]}),
        json!({"id": 7, "messages": [
            {"role": "user", "content": "3+4?"}, {"role": "assistant", "content": null, "tool_calls": call},
            {"role": "tool", "content": "7", "tool_call_id": "c1"}, {"role": "assistant", "content": "It is 7."}],
            "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]}),
        json!({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}], "finish_reason": "length"}),
        json!({"prompt": "Hi", "response": "Hello."}),
        json!({"instruction": "Add.", "input": "3 and 4", "output": "7"}),
        json!({"turns": ["Hi", "And?"]}),
    ]
}

/// Adds a null under an unused name, in the row or in a message.
fn with_nulls(dice: &mut Fuzzer, row: &mut Value) {
    // A null in a tool's schema may be a value.
    let places: Vec<String> =
        row.as_object().unwrap().keys().filter(|key| *key != "tools").cloned().collect();
    for _ in 0..=dice.roll(3) {
        let word = WORDS[dice.roll(WORDS.len())];
        let key = &places[dice.roll(places.len())];
        let place = match dice.roll(2) {
            0 => row[key].as_array_mut().and_then(|list| {
                let at = dice.roll(list.len().max(1));
                list.get_mut(at).and_then(Value::as_object_mut)
            }),
            _ => row.as_object_mut(),
        };
        if let Some(fields) = place {
            fields.entry(word).or_insert(Value::Null);
        }
    }
}

#[test]
fn nulls_of_python_tools_change_nothing() {
    let mut dice = Fuzzer::new(46, &WORDS);
    for run in 0..3000 {
        let row = sound_rows()[run % 6].clone();
        let mut dumped = row.clone();
        with_nulls(&mut dice, &mut dumped);
        let [expected, found] =
            [&row, &dumped].map(|row| Conversation::from_row(row.as_object().unwrap()).unwrap());
        assert_eq!(found, expected, "{dumped}");
    }
}

/// A row is used with all its messages, or refused with the name of a field that is wrong or
/// missing.
#[test]
fn foreign_rows_are_used_whole_or_refused_by_name() {
    let mut dice = Fuzzer::new(47, &WORDS);
    let (mut used, mut refused) = (0, 0);
    for run in 0..6000 {
        let mut row = sound_rows()[run % 6].clone();
        match run % 3 {
            0 => row[WORDS[dice.roll(WORDS.len())]] = dice.value(),
            _ => (0..=dice.roll(2)).for_each(|_| dice.mutate(&mut row)),
        }
        let Some(fields) = row.as_object() else { continue };
        match Conversation::from_row(fields) {
            Ok(conversation) => {
                used += 1;
                let said: Vec<&str> =
                    conversation.messages.iter().map(|message| message.content.as_str()).collect();
                let lists =
                    ["conversations", "messages"].iter().filter_map(|key| fields.get(*key)?.as_array());
                let is_list = |list: &&Vec<Value>| list.iter().any(|message| message.get("role").is_some());
                let lists: Vec<_> = lists.filter(is_list).collect();
                if let ([list], None) = (lists.as_slice(), fields.get("system")) {
                    let list: Vec<&Value> = list.iter().filter(|message| !message.is_null()).collect();
                    assert_eq!(said.len(), list.len(), "{row}");
                    // No text is lost, whatever its field is called.
                    for (said, message) in said.iter().zip(list) {
                        let text = ["content", "value", "text"].iter().find_map(|key| message[*key].as_str());
                        assert!(text.is_none_or(|text| said.contains(text)), "{row}");
                    }
                }
                // A parsed message survives serialisation.
                for message in &conversation.messages {
                    let again: Message = serde_json::from_value(json!(message)).unwrap();
                    assert_eq!(again, *message, "{row}");
                }
                for (tokenizer, template) in BENCHES.iter() {
                    if let Err(error) = supervise(tokenizer, template, &conversation, 64) {
                        assert!(!error.to_string().is_empty(), "{row}");
                    }
                }
            }
            Err(error) => {
                refused += 1;
                let told = error.to_string();
                assert!(
                    told.contains('`') || told.contains('[') || told.contains("start with user"),
                    "{told}: {row}"
                );
                assert!(!told.contains("Some("), "{told}: {row}");
            }
        }
    }
    assert!(used > 1000 && refused > 1000, "{used} used, {refused} refused");
}

/// Choices as servers send them: each has a finish reason, and an aborted or truncated one never
/// counts as complete.
#[test]
fn choices_of_any_kind_have_a_reason() {
    let words = [
        "stop",
        "length",
        "abort",
        "error",
        "tool_calls",
        "content_filter",
        "finish_reason",
        "stop_reason",
        "matched_stop",
        "message",
    ];
    let mut dice = Fuzzer::new(48, &words);
    let sound = json!({"index": 0, "finish_reason": "stop", "stop_reason": null, "message": {"role": "assistant", "content": "a",
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}});
    for _ in 0..4000 {
        let mut choice = sound.clone();
        (0..=dice.roll(2)).for_each(|_| dice.mutate(&mut choice));
        for stops in [&[][..], &["END"]] {
            let reason = FinishReason::from_choice(&choice, stops);
            assert_eq!(FinishReason::parse(reason.name()), reason);
            let said = choice["finish_reason"].as_str().map(FinishReason::parse).unwrap_or_default();
            assert!(!reason.is_whole() || said.is_whole() || choice["finish_reason"].is_object(), "{choice}");
        }
    }
}

/// Nulls, other types and unknown keys in tokenizer_config.json and templates. The tokenizer is
/// loaded, or the error names the file.
#[test]
fn damaged_tokenizer_configs_are_used_or_refused_by_name() {
    let (dir, from) = (tempfile::tempdir().unwrap(), golden::dir("templates_qwen"));
    fs::copy(from.join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    let sound: Value =
        serde_json::from_slice(&fs::read(from.join("tokenizer_config.json")).unwrap()).unwrap();
    let words = [
        "chat_template",
        "eos_token",
        "bos_token",
        "pad_token",
        "default",
        "tool_use",
        "name",
        "template",
        "{{ messages[0].content }}",
        "{% for",
        "content",
        "added_tokens_decoder",
    ];
    let mut dice = Fuzzer::new(49, &words);
    let (mut used, mut refused) = (0, 0);
    for run in 0..300 {
        let mut damaged = sound.clone();
        match run % 3 {
            0 => damaged[words[dice.roll(8)]] = dice.value(),
            1 => {
                let named = json!([{"name": "default", "template": "{{ messages[0].content }}"}, {"name": "tool_use", "template": "x"}]);
                damaged["chat_template"] = named;
                dice.mutate(&mut damaged["chat_template"]);
            }
            _ => dice.mutate(&mut damaged),
        }
        fs::write(dir.path().join("tokenizer_config.json"), damaged.to_string()).unwrap();
        let told = match ChatTokenizer::load(dir.path()) {
            Ok(tokenizer) => {
                let written = tokenizer.render(&[Message::new(Role::User, "Hi")], &RenderOptions::default());
                used += usize::from(written.is_ok());
                written.err()
            }
            Err(error) => Some(error),
        };
        if let Some(error) = told {
            refused += 1;
            let told = error.to_string();
            assert!(
                told.contains(dir.path().to_str().unwrap()),
                "no file is named: {told}: {}",
                damaged["chat_template"]
            );
        }
    }
    assert!(used > 50 && refused > 50, "{used} used, {refused} refused");
}
