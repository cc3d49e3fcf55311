//! Training on served token ids, with the toy target's tokenizer and template.

use std::path::Path;

use deepspec_models::chat_formats;
use deepspec_text::{
    ChatTemplate, ChatTokenizer, Conversation, Message, Role, Served, Supervised, TextError, check_loss_mask,
    supervise,
};
use serde_json::{Value, json};

fn tokenizer() -> ChatTokenizer {
    ChatTokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-target")).unwrap()
}

fn trained(fields: Value, answer: &str) -> Result<Supervised, TextError> {
    let mut said = Message::new(Role::Assistant, answer);
    said.extra = fields.as_object().unwrap().clone();
    let conversation = Conversation::from(vec![
        Message::new(Role::User, "One?"),
        Message::new(Role::Assistant, "One."),
        Message::new(Role::User, "Two?"),
        said,
    ]);
    let mut template = ChatTemplate::from_name("qwen", &chat_formats()).unwrap();
    template.default_system = None;
    supervise(&tokenizer(), &template, &conversation, 512)
}

/// The prompt up to the last answer as a server renders it, without thinking.
fn prompt() -> Vec<i64> {
    let text = trained(json!({}), "MARK").unwrap().text;
    tokenizer().encode(&text[..text.find("MARK").unwrap()]).unwrap()
}

fn end() -> i64 {
    tokenizer().token_id("<|im_end|>").unwrap()
}

#[test]
fn tokens_that_the_text_has_too_change_nothing() {
    let plain = trained(json!({}), "Two.").unwrap();
    assert_eq!(plain.served, Served::Unknown);
    let ids = [tokenizer().encode("Two.").unwrap(), vec![end()]].concat();
    for ids in [ids.clone(), ids[..ids.len() - 1].to_vec()] {
        let served = trained(json!({"token_ids": ids, "finish_reason": "stop"}), "Two.").unwrap();
        assert_eq!(served, Supervised { served: Served::SameAsText, ..plain.clone() });
    }
}

#[test]
fn tokens_that_the_text_has_otherwise_are_trained_as_served() {
    let (tokenizer, prompt) = (tokenizer(), prompt());
    // Tokenised letter by letter, as sampling may produce it.
    let spelled: Vec<i64> = "Two.".chars().flat_map(|c| tokenizer.encode(&c.to_string()).unwrap()).collect();
    assert_ne!(spelled, tokenizer.encode("Two.").unwrap());
    let plain = trained(json!({}), "Two.").unwrap();
    for told in [json!(null), json!(prompt)] {
        let fields = json!({"token_ids": spelled, "prompt_token_ids": told, "finish_reason": "stop"});
        let served = trained(fields, "Two.").unwrap();
        assert_eq!(served.served, Served::DiffersFromText);
        assert_eq!(served.input_ids, [prompt.clone(), spelled.clone(), vec![end()]].concat());
        // The first answer is supervised as before, and the whole last answer is supervised.
        let learnt: Vec<bool> =
            plain.loss_mask[..prompt.len()].iter().copied().chain(vec![true; spelled.len() + 1]).collect();
        assert_eq!(served.loss_mask, learnt);
        assert!(served.loss_mask[..prompt.len()].contains(&true));
        assert_eq!(served.untruncated_len, served.input_ids.len());
    }
    // A truncated answer has no end-of-turn token, and a given prompt is used even if it differs.
    let other = [vec![5, 6], prompt.clone()].concat();
    let fields = json!({"token_ids": spelled, "prompt_token_ids": other, "finish_reason": "length"});
    let cut = trained(fields, "Two.").unwrap();
    assert_eq!(cut.input_ids, [other, spelled].concat());
}

#[test]
fn tokens_of_another_text_are_left_aside() {
    let (tokenizer, prompt) = (tokenizer(), prompt());
    let ids = |text: &str| tokenizer.encode(text).unwrap();
    let plain = trained(json!({}), "Two.").unwrap();
    for (answer, asked) in [(ids("Three."), prompt.clone()), (ids("Two."), ids("One?"))] {
        let stale = trained(json!({"token_ids": answer, "prompt_token_ids": asked}), "Two.").unwrap();
        assert_eq!(stale, plain);
    }
}

/// Served rows get no default system message, although the rules add one to other rows.
#[test]
fn a_default_system_message_is_not_put_before_what_was_served() {
    let (tokenizer, template) = (tokenizer(), ChatTemplate::from_name("qwen", &chat_formats()).unwrap());
    assert!(template.default_system.is_some());
    let prompt = prompt();
    let answer = [tokenizer.encode("Two.").unwrap(), vec![end()]].concat();
    let mut said = Message::new(Role::Assistant, "Two.");
    said.extra.insert("token_ids".into(), json!(answer));
    said.extra.insert("prompt_token_ids".into(), json!(prompt));
    let messages = [(Role::User, "One?"), (Role::Assistant, "One."), (Role::User, "Two?")];
    let mut messages: Vec<Message> =
        messages.into_iter().map(|(role, text)| Message::new(role, text)).collect();
    messages.push(said);
    let conversation = Conversation::from(messages);
    let served = supervise(&tokenizer, &template, &conversation, 512).unwrap();
    assert_eq!(served.served, Served::SameAsText);
    assert!(served.input_ids.starts_with(&prompt) && served.loss_mask[..prompt.len()].contains(&true));
    let checked = check_loss_mask(&tokenizer, &template, &conversation, &served).unwrap();
    assert!(checked.problems.is_empty(), "{:?}", checked.problems);
}

#[test]
fn an_answer_that_opens_with_a_line_break_does_not_merge_with_the_templates() {
    let (tokenizer, prompt) = (tokenizer(), prompt());
    let answer = [tokenizer.encode("\n\nTwo.").unwrap(), vec![end()]].concat();
    let served = trained(json!({"token_ids": answer, "prompt_token_ids": prompt}), "\n\nTwo.").unwrap();
    assert!(served.input_ids.starts_with(&[prompt, answer].concat()));
}

#[test]
fn what_are_no_ids_is_named() {
    for (ids, found) in
        [(json!([1, -4]), "-4"), (json!([1_099_511_627_776_i64]), "1099511627776"), (json!("7"), "a string")]
    {
        let told = trained(json!({"token_ids": ids}), "Two.").unwrap_err().to_string();
        assert!(told.contains("`token_ids`") && told.contains(found), "{told}");
    }
    assert_eq!(trained(json!({"token_ids": []}), "Two.").unwrap().served, Served::Unknown);
}
