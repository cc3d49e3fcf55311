//! Built-in chat formats on conversations as the families' templates write them. The templates here are written for this
//! test in the form that the models document; the published files are not part of it.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use deepspec_models::chat_formats;
use deepspec_testkit::conversations::tokenizers;
use deepspec_text::{
    ChatTemplate, ChatTokenizer, Conversation, Message, Problem, RenderOptions, RowFindings, TextError,
    check_loss_mask, supervise,
};
use serde_json::json;

const TINY: &str = "../../assets/tiny-target";

/// Name of the format, a template, and the supervised text of the answers "Hello." and "Two.".
const FORMATS: [(&str, &str, [&str; 2]); 6] = [
    (
        "qwen2.5",
        "{%- if messages[0].role != 'system' -%}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- endif -%}\
         {%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor -%}\
         {%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}",
        ["Hello.<|im_end|>\n", "Two.<|im_end|>\n"],
    ),
    (
        "mistral",
        "{{- '<s>' -}}{%- for m in messages -%}\
         {%- if m.role == 'user' -%}{{ '[INST] ' + m.content + '[/INST]' }}\
         {%- elif m.role == 'assistant' -%}{{ ' ' + m.content + '</s>' }}{%- endif -%}{%- endfor -%}",
        [" Hello.</s>", " Two.</s>"],
    ),
    (
        "granite",
        "{%- for m in messages -%}\
         {{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\\n' }}{%- endfor -%}\
         {%- if add_generation_prompt -%}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif -%}",
        ["Hello.<|end_of_text|>", "Two.<|end_of_text|>"],
    ),
    (
        "gemma3",
        "{{- '<bos>' -}}{%- for m in messages -%}\
         {%- set role = 'model' if m.role == 'assistant' else m.role -%}\
         {{ '<start_of_turn>' + role + '\\n' + m.content + '<end_of_turn>\\n' }}{%- endfor -%}\
         {%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}",
        ["Hello.<end_of_turn>\n", "Two.<end_of_turn>\n"],
    ),
    (
        "phi4",
        "{%- for m in messages -%}\
         {{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{%- endfor -%}\
         {%- if add_generation_prompt -%}{{ '<|im_start|>assistant<|im_sep|>' }}{%- endif -%}",
        ["Hello.<|im_end|>", "Two.<|im_end|>"],
    ),
    (
        "harmony",
        HARMONY,
        ["<|channel|>final<|message|>Hello.<|end|>", "<|channel|>final<|message|>Two.<|return|>"],
    ),
];

/// Harmony as gpt-oss's template writes it. The last answer has its reasoning and the end of turn behind it. A tool call
/// has its reasoning, or its content in place of it, unless an answer follows anywhere later. Both are refused.
const HARMONY: &str = "\
    {{- '<|start|>system<|message|>Reasoning: medium\n\n# Valid channels: analysis, commentary, final.<|end|>' -}}\
    {%- macro write(author, text, end='<|end|>') -%}{{ '<|start|>' + author + '<|message|>' + text + end }}{%- endmacro -%}\
    {%- set called = namespace(name='') -%}\
    {%- for message in messages -%}{%- set is_last = loop.last and not add_generation_prompt -%}\
    {%- if message.role == 'system' -%}{{ write('developer', '# Instructions\n\n' + message.content) }}\
    {%- elif message.role == 'user' -%}{{ write('user', message.content) }}\
    {%- elif message.role == 'tool' -%}\
    {%- if not called.name -%}{{ raise_exception('A result without a call.') }}{%- endif -%}\
    {{ write('functions.' + called.name + ' to=assistant<|channel|>commentary', message.content | tojson) }}\
    {%- elif 'tool_calls' in message -%}\
    {%- set answers = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') | rejectattr('tool_calls') -%}\
    {%- if message.content and message.thinking -%}{{ raise_exception('Content or thinking, not both.') }}{%- endif -%}\
    {%- set thought = message.content or message.thinking -%}\
    {%- if thought and not answers | list -%}{{ write('assistant<|channel|>analysis', thought) }}{%- endif -%}\
    {%- set call = message.tool_calls[0].function -%}{%- set called.name = call.name -%}\
    {{ write('assistant to=functions.' + call.name + '<|channel|>commentary json', call.arguments | tojson, '<|call|>') }}\
    {%- else -%}{%- set called.name = '' -%}\
    {%- if is_last and message.thinking -%}{{ write('assistant<|channel|>analysis', message.thinking) }}{%- endif -%}\
    {{ write('assistant<|channel|>final', message.content, '<|return|>' if is_last else '<|end|>') }}\
    {%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}";

/// The tiny target's tokenizer with another template, or with a list of named ones.
fn tokenizer(template: impl Into<serde_json::Value>) -> ChatTokenizer {
    with_template(&Path::new(env!("CARGO_MANIFEST_DIR")).join(TINY), template)
}

/// The tokenizer of a folder with another template.
fn with_template(from: &Path, template: impl Into<serde_json::Value>) -> ChatTokenizer {
    let dir = tempfile::tempdir().unwrap();
    let mut config: serde_json::Value =
        serde_json::from_slice(&fs::read(from.join("tokenizer_config.json")).unwrap()).unwrap();
    config["chat_template"] = template.into();
    fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    fs::copy(from.join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    ChatTokenizer::load(dir.path()).unwrap()
}

/// A call of the function `add`, in Harmony.
const ADD: &str =
    "assistant to=functions.add<|channel|>commentary json<|message|>{\"a\": 1, \"b\": 1}<|call|>";

/// A conversation with an answer and a call, which has the given texts and a result.
fn row_with_call(content: &str, reasoning: &str) -> serde_json::Value {
    json!({"conversations": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello.", "thinking": "Dropped."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}]},
        {"role": "tool", "name": "add", "content": "2"},
    ]})
}

/// Adds a message to a row.
fn push(row: &mut serde_json::Value, message: serde_json::Value) {
    row["conversations"].as_array_mut().unwrap().push(message);
}

/// The supervised text of a row under the format `harmony`, and what the check finds. Spans follow each other. The
/// tokenizer of gpt-oss, in which the marks are tokens, gives the same.
fn taught_by_harmony(row: &serde_json::Value) -> Result<(String, RowFindings), TextError> {
    let found = taught_with(&tokenizer(HARMONY), row);
    if let Some(all) = tokenizers() {
        // It is read once, since it is large.
        static REAL: OnceLock<ChatTokenizer> = OnceLock::new();
        let real = REAL.get_or_init(|| with_template(&all.join("gptoss"), HARMONY));
        match (taught_with(real, row), &found) {
            (Ok((text, findings)), Ok((same, expected))) => {
                assert_eq!((&text, findings.reasoning_left_out), (same, expected.reasoning_left_out));
                assert_eq!(findings.problems.len(), expected.problems.len());
            }
            (real, found) => assert_eq!(real.is_err(), found.is_err(), "{row}"),
        }
    }
    found
}

fn taught_with(
    tokenizer: &ChatTokenizer,
    row: &serde_json::Value,
) -> Result<(String, RowFindings), TextError> {
    let harmony = ChatTemplate::from_name("harmony", &chat_formats()).unwrap();
    let conversation = Conversation::from_row(row.as_object().unwrap()).unwrap();
    let supervised = supervise(tokenizer, &harmony, &conversation, 512)?;
    let ids = supervised.input_ids.iter().zip(&supervised.loss_mask);
    let ids: Vec<i64> = ids.filter_map(|(id, taught)| taught.then_some(*id)).collect();
    let checked = check_loss_mask(tokenizer, &harmony, &conversation, &supervised)?;
    Ok((tokenizer.decode(&ids, false).unwrap(), checked))
}

/// All channels of the assistant are learned, with the marks that the model generates between them. Instructions, the
/// user's words and results of tools are not.
#[test]
fn all_channels_of_harmony_are_learned() {
    let hello = "<|channel|>final<|message|>Hello.<|end|>";
    let add = ADD.strip_prefix("assistant").unwrap();
    let says = "<|channel|>analysis<|message|>It says 2.<|end|><|start|>assistant<|channel|>final<|message|>";
    let mut row = row_with_call("", "");
    push(&mut row, json!({"role": "assistant", "content": "Two.", "reasoning_content": "It says 2."}));
    let (taught, checked) = taught_by_harmony(&row).unwrap();
    assert_eq!(taught, format!("{hello}{add}{says}Two.<|return|>"));
    // The template drops the first answer's reasoning.
    assert_eq!((checked.problems, checked.reasoning_left_out), (vec![], 1));
    // A cut answer is learned up to its last word, and an empty one is not.
    row["conversations"][6]["finish_reason"] = json!("length");
    assert_eq!(taught_by_harmony(&row).unwrap().0, format!("{hello}{add}{says}Two."));
    row["conversations"][2]["content"] = json!("");
    assert_eq!(taught_by_harmony(&row).unwrap().0, format!("{add}{says}Two."));
}

/// The template writes the reasoning of calls up to the next answer. Once that answer is there, the training text lacks
/// the reasoning that its served prompt has, and the check says so.
#[test]
fn reasoning_of_harmony_calls_is_learned_until_an_answer_follows() {
    let hello = "<|channel|>final<|message|>Hello.<|end|>";
    let call_after = |thought: &str| format!("<|channel|>analysis<|message|>{thought}<|end|><|start|>{ADD}");
    let mut row = row_with_call("", "Add them.");
    let again = row_with_call("", "Once more.")["conversations"][4].take();
    push(&mut row, again);
    let (taught, checked) = taught_by_harmony(&row).unwrap();
    assert_eq!(taught, format!("{hello}{}{}", call_after("Add them."), call_after("Once more.")));
    assert_eq!((checked.problems, checked.reasoning_left_out), (vec![], 1));

    let mut row = row_with_call("", "Add them.");
    push(&mut row, json!({"role": "assistant", "content": "Two."}));
    let (taught, checked) = taught_by_harmony(&row).unwrap();
    let add = ADD.strip_prefix("assistant").unwrap();
    assert_eq!(taught, format!("{hello}{add}<|channel|>final<|message|>Two.<|return|>"));
    assert_eq!(checked.reasoning_left_out, 2);
    assert!(matches!(&checked.problems[..], [Problem::Served { index: 6, .. }]), "{:?}", checked.problems);
}

/// Content of a call takes the place of its reasoning. A row with both is refused, and the error names the message.
#[test]
fn content_of_harmony_calls_is_analysis() {
    let (taught, checked) = taught_by_harmony(&row_with_call("I add.", "")).unwrap();
    let analysis = "<|channel|>analysis<|message|>I add.<|end|>";
    assert_eq!(taught, format!("<|channel|>final<|message|>Hello.<|end|>{analysis}<|start|>{ADD}"));
    assert!(checked.problems.is_empty(), "{:?}", checked.problems);

    let mut row = row_with_call("I add.", "");
    push(&mut row, json!({"role": "assistant", "content": "Two."}));
    let problems = taught_by_harmony(&row).unwrap().1.problems;
    assert!(matches!(problems[0], Problem::Rewritten { index: 4, part: "answer", .. }), "{problems:?}");

    let mut row = row_with_call("I add.", "Add them.");
    let refused = taught_by_harmony(&row).unwrap_err().to_string();
    let hint = "(assistant message 2 has `content` and reasoning beside `tool_calls`; remove one of the two)";
    assert!(
        refused.ends_with(&format!("refuses the conversation: Content or thinking, not both. {hint}")),
        "{refused}"
    );
    // Another cause of a refusal is named alone.
    row["conversations"].as_array_mut().unwrap().insert(4, json!({"role": "tool", "content": "2"}));
    let refused = taught_by_harmony(&row).unwrap_err().to_string();
    assert!(refused.ends_with("A result without a call."), "{refused}");
}

/// The template writes the first call of a message. A name in the reasoning is no call.
#[test]
fn later_calls_of_a_harmony_message_are_missed() {
    for reasoning in ["", "First add these, then add those."] {
        let mut row = row_with_call("", reasoning);
        let calls = row["conversations"][4]["tool_calls"].as_array_mut().unwrap();
        calls.push(calls[0].clone());
        let (taught, checked) = taught_by_harmony(&row).unwrap();
        assert_eq!(taught.matches("<|call|>").count(), 1, "{taught}");
        let problems = &checked.problems[..];
        assert!(
            matches!(problems, [Problem::Calls { index: 4, written: 1, calls: 2 }]),
            "{reasoning}: {problems:?}"
        );
        let told = problems[0].to_string();
        assert!(told.starts_with("conversations[4]: the template writes 1 of the message's 2 tool calls"));
    }
}

/// Reasoning reaches a template as `message.thinking` only if this template does not read `reasoning_content`.
#[test]
fn templates_get_reasoning_under_one_name() {
    let read = |names: &str| format!("{{% for message in messages %}}{names}{{% endfor %}}");
    let tokenizer = tokenizer(json!([
        {"name": "default", "template": read("{{ message.thinking }}|{{ message.reasoning_content }}")},
        {"name": "tool_use", "template": read("{{ message.thinking }}|{{ message.content }}")},
    ]));
    let row = json!({"role": "assistant", "content": "Two.", "thinking": "Add them."});
    let messages = [Message::try_from(row).unwrap()];
    let render =
        |tools| tokenizer.render(&messages, &RenderOptions { tools, ..RenderOptions::default() }).unwrap();
    assert_eq!(render(None), "|Add them.");
    assert_eq!(render(Some(json!([]))), "Add them.|Two.");
}

#[test]
fn the_answers_of_every_family_are_found() {
    for (name, template, expected) in FORMATS {
        let tokenizer = tokenizer(template);
        let format = ChatTemplate::from_name(name, &chat_formats()).unwrap();
        // Qwen2.5 has the marks of `qwen`, which is found first.
        let guessed = ChatTemplate::guess(&tokenizer, &chat_formats()).unwrap();
        assert_eq!(guessed.name, if name == "qwen2.5" { "qwen" } else { name });
        let row = json!({"conversations": [
            {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "Two."},
        ]});
        let conversation = Conversation::from_row(row.as_object().unwrap()).unwrap();
        let supervised = supervise(&tokenizer, &format, &conversation, 512).unwrap();
        let ids = supervised.input_ids.iter().zip(&supervised.loss_mask);
        let taught: Vec<i64> = ids.filter_map(|(id, taught)| taught.then_some(*id)).collect();
        assert_eq!(tokenizer.decode(&taught, false).unwrap(), expected.concat(), "{name}");
        let checked = check_loss_mask(&tokenizer, &format, &conversation, &supervised).unwrap();
        assert!(checked.problems.is_empty(), "{name}: {:?}", checked.problems);
    }
}
