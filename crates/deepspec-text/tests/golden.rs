//! The golden template cases: rendered text, ids, masks and prompts of the reference.

use std::fs;

use deepspec_models::chat_formats;
use deepspec_testkit::golden;
use deepspec_text::{
    ChatTemplate, ChatTokenizer, Conversation, MIN_SUPERVISED_TOKENS, Message, RenderOptions,
    generation_prompt, supervise,
};
use serde_json::{Map, Value};

struct Case {
    json: Value,
    tokenizer: ChatTokenizer,
    template: ChatTemplate,
}

impl Case {
    fn load(name: &str) -> Self {
        let dir = golden::dir(name);
        let json: Value = serde_json::from_slice(&fs::read(dir.join("case.json")).unwrap()).unwrap();
        let entry = &json["template_registry_entry"];
        let template = ChatTemplate::from_name(entry["name"].as_str().unwrap(), &chat_formats()).unwrap();
        let markers = template.markers().unwrap();
        assert_eq!(markers.assistant_header, entry["assistant_header"]);
        assert_eq!(markers.end_of_turn, entry["end_of_turn_token"]);
        assert_eq!(template.default_system.as_deref(), entry["system_prompt"].as_str());
        assert_eq!(markers.assistant_prefix.as_deref(), entry["assistant_loss_prefix"].as_str());
        Self { tokenizer: ChatTokenizer::load(&dir).unwrap(), template, json }
    }

    fn each(&self, list: &str) -> &[Value] {
        self.json[list].as_array().unwrap()
    }
}

fn messages(value: &Value) -> Vec<Message> {
    serde_json::from_value(value.clone()).unwrap()
}

fn ids(value: &Value) -> Vec<i64> {
    serde_json::from_value(value.clone()).unwrap()
}

fn check_vocabulary(case: &Case) {
    let tokenizer = &case.tokenizer;
    assert_eq!(tokenizer.vocab_size(), case.json["hyper_parameters"]["vocab_size"]);
    assert_eq!(tokenizer.eos_token_id(), case.json["eos_token_id"].as_i64());
    for (token, id) in case.json["special_tokens"].as_object().unwrap() {
        assert_eq!(tokenizer.token_id(token), id.as_i64());
        assert_eq!(tokenizer.token(id.as_i64().unwrap()).as_deref(), Some(token.as_str()));
    }
}

fn check_conversations(case: &Case) {
    for expected in case.each("conversations") {
        let name = &expected["name"];
        let conversation = Conversation::from(messages(&expected["conversations"]));
        let max_length = expected["max_length"].as_u64().unwrap() as usize;
        let found = supervise(&case.tokenizer, &case.template, &conversation, max_length).unwrap();
        assert_eq!(found.text, expected["rendered_text"], "{name}");
        assert_eq!(found.input_ids, ids(&expected["input_ids"]), "{name}");
        assert_eq!(found.untruncated_len, expected["num_tokens_untruncated"], "{name}");
        if name == "empty_answer" {
            // The reference supervises the end of an empty turn.
            assert!(ids(&expected["loss_mask"]).contains(&1) && found.supervised_count() == 0);
            continue;
        }
        let mask: Vec<i64> = found.loss_mask.iter().map(|&supervised| supervised.into()).collect();
        assert_eq!(mask, ids(&expected["loss_mask"]), "{name}");
        assert_eq!(found.supervised_count(), expected["loss_token_count"], "{name}");
        let kept = found.supervised_count() >= MIN_SUPERVISED_TOKENS;
        assert_eq!(kept, expected["kept_with_min_loss_tokens_14"], "{name}");
        let supervised: Vec<i64> = found
            .spans()
            .iter()
            .flat_map(|&(a, b)| &found.input_ids[a as usize..b as usize])
            .copied()
            .collect();
        assert_eq!(case.tokenizer.decode(&supervised, false).unwrap(), expected["loss_text"], "{name}");
    }
}

fn check_generation_prompts(case: &Case) {
    for expected in case.each("generation_prompts") {
        let thinking = expected["enable_thinking"].as_bool();
        let conversation = messages(&expected["messages"]);
        let kwargs = thinking.map(|thinking| ("enable_thinking".to_owned(), Value::Bool(thinking)));
        let options =
            RenderOptions { add_generation_prompt: true, kwargs: Map::from_iter(kwargs), tools: None };
        assert_eq!(case.tokenizer.render(&conversation, &options).unwrap(), expected["rendered_text"]);
        let found = generation_prompt(&case.tokenizer, &conversation, None, thinking).unwrap();
        assert_eq!(found, ids(&expected["input_ids"]));
    }
}

fn check_rejected(case: &Case) {
    for rejected in case.each("rejected") {
        let conversation = Conversation::from(messages(&rejected["conversations"]));
        let error = supervise(&case.tokenizer, &case.template, &conversation, 512).unwrap_err();
        let expected = rejected["reference_message"]
            .as_str()
            .unwrap()
            .trim_end_matches('.')
            .replace(", got ", ", found ");
        assert_eq!(error.to_string(), expected);
    }
}

fn check(name: &str) {
    let case = Case::load(name);
    check_vocabulary(&case);
    check_conversations(&case);
    check_generation_prompts(&case);
    check_rejected(&case);
}

#[test]
fn golden_templates_qwen() {
    check("templates_qwen");
}

#[test]
fn golden_templates_gemma4() {
    check("templates_gemma4");
}
