//! Built-in chat formats on conversations as the families' templates write them. The templates here are written for this
//! test in the form that the models document; the published files are not part of it.

use std::fs;
use std::path::Path;

use deepspec_models::chat_formats;
use deepspec_text::{ChatTemplate, ChatTokenizer, Conversation, check_loss_mask, supervise};
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

/// Harmony as gpt-oss's template writes it: reasoning of the last answer and of tool calls only, and the end of turn
/// behind the last answer only.
const HARMONY: &str = "\
    {{- '<|start|>system<|message|>Reasoning: medium\n\n# Valid channels: analysis, commentary, final.<|end|>' -}}\
    {%- macro thought(message) -%}{%- if message.thinking -%}\
    {{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif -%}{%- endmacro -%}\
    {%- for message in messages -%}{%- set is_last = loop.last and not add_generation_prompt -%}\
    {%- if message.role == 'system' -%}\
    {{ '<|start|>developer<|message|># Instructions\n\n' + message.content + '<|end|>' }}\
    {%- elif message.role == 'tool' -%}\
    {{ '<|start|>functions.' + message.name + ' to=assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}\
    {%- elif message.tool_calls -%}{%- set call = message.tool_calls[0].function -%}{{ thought(message) }}\
    {{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}\
    {{- call.arguments | tojson + '<|call|>' }}\
    {%- elif message.role == 'assistant' -%}{%- if is_last -%}{{ thought(message) }}{%- endif -%}\
    {{ '<|start|>assistant<|channel|>final<|message|>' + message.content + ('<|return|>' if is_last else '<|end|>') }}\
    {%- else -%}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}{%- endif -%}\
    {%- endfor -%}{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}";

/// The tiny target's tokenizer with another template.
fn tokenizer(template: &str) -> ChatTokenizer {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join(TINY);
    let dir = tempfile::tempdir().unwrap();
    let mut config: serde_json::Value =
        serde_json::from_slice(&fs::read(tiny.join("tokenizer_config.json")).unwrap()).unwrap();
    config["chat_template"] = json!(template);
    fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    fs::copy(tiny.join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    ChatTokenizer::load(dir.path()).unwrap()
}

/// All channels of the assistant are learned, with the marks that the model generates between them. Instructions, the
/// user's words and results of tools are not.
#[test]
fn all_channels_of_harmony_are_learned() {
    let tokenizer = tokenizer(HARMONY);
    let harmony = ChatTemplate::from_name("harmony", &chat_formats()).unwrap();
    let mut row = json!({"conversations": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello.", "thinking": "Dropped."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "thinking": "Add them.", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}]},
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "assistant", "content": "Two.", "reasoning_content": "It says 2."},
    ]});
    let taught = |row: &serde_json::Value| {
        let conversation = Conversation::from_row(row.as_object().unwrap()).unwrap();
        let supervised = supervise(&tokenizer, &harmony, &conversation, 512).unwrap();
        let ids = supervised.input_ids.iter().zip(&supervised.loss_mask);
        let ids: Vec<i64> = ids.filter_map(|(id, taught)| taught.then_some(*id)).collect();
        let checked = check_loss_mask(&tokenizer, &harmony, &conversation, &supervised).unwrap();
        assert!(checked.problems.is_empty(), "{:?}", checked.problems);
        (tokenizer.decode(&ids, false).unwrap(), checked.reasoning_left_out)
    };
    let expected = [
        "<|channel|>final<|message|>Hello.<|end|>",
        "<|channel|>analysis<|message|>Add them.<|end|>",
        "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{\"a\": 1, \"b\": 1}<|call|>",
        "<|channel|>analysis<|message|>It says 2.<|end|>",
        "<|start|>assistant<|channel|>final<|message|>",
    ];
    // The template drops the first answer's reasoning.
    assert_eq!(taught(&row), (expected.concat() + "Two.<|return|>", 1));
    // A cut answer is learned up to its last word, and an empty one is not.
    row["conversations"][6]["finish_reason"] = json!("length");
    assert_eq!(taught(&row).0, expected.concat() + "Two.");
    row["conversations"][2]["content"] = json!("");
    assert_eq!(taught(&row).0, expected[1..].concat() + "Two.");
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
