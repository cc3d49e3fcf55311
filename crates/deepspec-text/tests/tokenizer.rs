//! Loading, streaming and identity of tokenizers, on the golden ones.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use deepspec_testkit::golden;
use deepspec_text::{ChatTokenizer, Message, RenderOptions, Role, TextError, generation_prompt};
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Value, json};
use tempfile::TempDir;

const CASES: [&str; 2] = ["templates_qwen", "templates_gemma4"];
const BROKEN: char = '\u{FFFD}';

/// A copy of the golden Qwen tokenizer whose files a test may spoil.
fn copy() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(golden::dir(CASES[0]).join(file), dir.path().join(file)).unwrap();
    }
    dir
}

fn config(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join("tokenizer_config.json")).unwrap()).unwrap()
}

fn set(dir: &Path, field: &str, value: Value) {
    let mut config = config(dir);
    config[field] = value;
    // `fs::copy` keeps the permissions of a golden tree that may be read-only.
    fs::remove_file(dir.join("tokenizer_config.json")).unwrap();
    fs::write(dir.join("tokenizer_config.json"), config.to_string()).unwrap();
}

fn problem(dir: &Path) -> String {
    ChatTokenizer::load(dir).err().expect("it should not load").to_string()
}

fn hello() -> [Message; 1] {
    [Message::new(Role::User, "Hi")]
}

#[test]
fn files_that_are_missing_or_broken_are_named() {
    let dir = copy();
    let tokenizer = dir.path().join("tokenizer.json");
    fs::remove_file(&tokenizer).unwrap();
    assert!(problem(dir.path()).contains("tokenizer.json"));
    fs::write(&tokenizer, "{\"version\": \"1.0\"}").unwrap();
    assert!(problem(dir.path()).contains("tokenizer.json: not a usable tokenizer"));

    let dir = copy();
    let config = dir.path().join("tokenizer_config.json");
    fs::remove_file(&config).unwrap();
    assert!(problem(dir.path()).contains("tokenizer_config.json"));
    fs::write(&config, "[").unwrap();
    assert!(problem(dir.path()).contains("tokenizer_config.json: not a JSON object"));
}

#[test]
fn a_wrong_or_missing_template_is_named() {
    let dir = copy();
    set(dir.path(), "chat_template", json!(7));
    assert!(
        problem(dir.path())
            .ends_with("`chat_template` must be a string or a list of templates, found a number")
    );
    set(dir.path(), "chat_template", Value::Null);
    assert!(problem(dir.path()).contains("no chat template (named templates: [])"));
    set(dir.path(), "chat_template", json!([{"name": "rag", "template": ""}]));
    assert!(problem(dir.path()).contains("[\"rag\"]"));
    set(dir.path(), "chat_template", json!([{"name": "rag"}]));
    assert!(problem(dir.path()).contains("a list of objects with `name` and `template`"));
    set(dir.path(), "chat_template", json!("{% endfor %}"));
    assert!(problem(dir.path()).contains("does not compile"));
    set(dir.path(), "chat_template", json!("{{ raise_exception('never') }}"));
    let refused = ChatTokenizer::load(dir.path()).unwrap().render(&hello(), &RenderOptions::default());
    assert!(matches!(refused, Err(TextError::Refused { message, .. }) if message == "never"));
}

#[test]
fn the_template_file_wins_and_tokens_may_be_objects() {
    let dir = copy();
    set(dir.path(), "chat_template", json!([{"name": "default", "template": "{{ eos_token }}!"}]));
    set(dir.path(), "eos_token", json!({"content": "<|endoftext|>", "lstrip": false}));
    let tokenizer = ChatTokenizer::load(dir.path()).unwrap();
    assert_eq!(tokenizer.render(&hello(), &RenderOptions::default()).unwrap(), "<|endoftext|>!");
    assert_eq!(tokenizer.eos_token_id(), tokenizer.token_id("<|endoftext|>"));
    fs::write(
        dir.path().join("chat_template.jinja"),
        "{{ bos_token is defined }} {{ messages[0].content }}\n",
    )
    .unwrap();
    let tokenizer = ChatTokenizer::load(dir.path()).unwrap();
    assert_eq!(tokenizer.render(&hello(), &RenderOptions::default()).unwrap(), "False Hi");
    set(dir.path(), "eos_token", json!(2));
    assert!(problem(dir.path()).contains("`eos_token` must be a string"));
}

#[test]
fn the_template_digest_follows_behaviour() {
    let dir = copy();
    let original = ChatTokenizer::load(dir.path()).unwrap();
    let template = config(dir.path())["chat_template"].as_str().unwrap().to_owned();
    let digest = |template: &str| {
        set(dir.path(), "chat_template", json!(template));
        ChatTokenizer::load(dir.path()).unwrap().template_digest()
    };
    assert_eq!(
        digest(&format!("{{# reworded #}}{template}{{%- if false %}}x{{% endif -%}}")),
        original.template_digest()
    );
    assert_ne!(digest(&template.replace("is false", "is true")), original.template_digest());
    assert_ne!(digest(&template.replace("thought.strip", "thought.lstrip")), original.template_digest());
    assert_ne!(digest("{{ raise_exception('a') }}"), original.template_digest());
    assert_eq!(digest("{{ strftime_now('%s') }}"), digest("0"));
    assert_eq!(original.tokenizer_digest(), ChatTokenizer::load(dir.path()).unwrap().tokenizer_digest());
}

#[test]
fn a_default_system_message_gives_way_to_the_conversations_own() {
    let tokenizer = ChatTokenizer::load(&golden::dir(CASES[0])).unwrap();
    let own = [Message::new(Role::System, "Be brief."), Message::new(Role::User, "Hi")];
    let expected = generation_prompt(&tokenizer, &own, None, Some(true)).unwrap();
    assert_eq!(generation_prompt(&tokenizer, &own[1..], Some("Be brief."), Some(true)).unwrap(), expected);
    assert_eq!(generation_prompt(&tokenizer, &own, Some("Be long."), Some(true)).unwrap(), expected);
}

#[test]
fn a_negative_id_is_no_token() {
    let tokenizer = ChatTokenizer::load(&golden::dir(CASES[0])).unwrap();
    assert!(matches!(tokenizer.decode(&[3, -1], true), Err(TextError::NotAnId { id: -1 })));
    assert!(tokenizer.stream().push(-1).is_err());
    assert_eq!(tokenizer.token(-1), None);
    assert_eq!(tokenizer.decode(&[1 << 20], true).unwrap(), "");
}

/// Streams `ids`; the pieces before the last one.
fn stream(tokenizer: &ChatTokenizer, ids: &[i64]) -> (Vec<String>, String) {
    let mut stream = tokenizer.stream();
    let pieces = ids.iter().filter_map(|&id| stream.push(id).unwrap()).collect();
    (pieces, stream.finish().unwrap())
}

#[test]
fn text_streams_without_delay() {
    for case in CASES {
        let tokenizer = ChatTokenizer::load(&golden::dir(case)).unwrap();
        let ids = tokenizer.encode("What is the capital of France?").unwrap();
        let (pieces, rest) = stream(&tokenizer, &ids);
        assert_eq!((pieces.len(), rest.as_str()), (ids.len(), ""), "{case}");
        let (pieces, rest) = stream(&tokenizer, &tokenizer.encode("a👩‍👩‍👧‍👦é 🙂.").unwrap());
        assert_eq!(pieces.concat() + &rest, "a👩‍👩‍👧‍👦é 🙂.", "{case}");
        assert!(pieces.iter().all(|piece| !piece.contains(BROKEN)), "{case}");
    }
}

/// Shared by all threads, as the stages do it.
static GOLDEN: LazyLock<[ChatTokenizer; 2]> =
    LazyLock::new(|| CASES.map(|case| ChatTokenizer::load(&golden::dir(case)).unwrap()));

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Any ids, broken bytes, special tokens and unknown ids included, stream to what they decode to.
    #[test]
    fn streaming_is_decoding(bytes in any::<bool>(), seeds in prop::collection::vec(any::<Index>(), 0..40)) {
        for tokenizer in GOLDEN.iter() {
            // The low ids of both vocabularies are single bytes: drawing from them alone makes broken ones likely.
            let range = if bytes { 270 } else { tokenizer.vocab_size() + 3 };
            let ids: Vec<i64> = seeds.iter().map(|seed| seed.index(range) as i64).collect();
            let (pieces, rest) = stream(tokenizer, &ids);
            prop_assert_eq!(pieces.concat() + &rest, tokenizer.decode(&ids, true).unwrap());
            let broken = pieces.iter().any(|piece| piece.ends_with(BROKEN));
            prop_assert!(!broken);
        }
    }
}
