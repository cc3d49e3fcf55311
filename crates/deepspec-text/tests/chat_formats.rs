//! Built-in chat formats on conversations as the families' templates write them. The templates here are written for this
//! test in the form that the models document; the published files are not part of it.

use std::fs;
use std::path::Path;

use deepspec_models::chat_formats;
use deepspec_text::{ChatTemplate, ChatTokenizer, Conversation, check_loss_mask, supervise};
use serde_json::json;

const TINY: &str = "../../assets/tiny-target";

/// Name of the format, a template, and the supervised text of the answers "Hello." and "Two.".
const FORMATS: [(&str, &str, [&str; 2]); 5] = [
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
];

#[test]
fn the_answers_of_every_family_are_found() {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join(TINY);
    for (name, template, expected) in FORMATS {
        let dir = tempfile::tempdir().unwrap();
        let mut config: serde_json::Value =
            serde_json::from_slice(&fs::read(tiny.join("tokenizer_config.json")).unwrap()).unwrap();
        config["chat_template"] = json!(template);
        fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        fs::copy(tiny.join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
        let tokenizer = ChatTokenizer::load(dir.path()).unwrap();
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
