//! Loading, streaming and identity of tokenizers, tested on the golden ones.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use deepspec_testkit::golden;
use deepspec_text::{
    ChatTokenizer, Message, RenderOptions, Role, TextError, generation_prompt, without_reasoning,
};
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Value, json};
use tempfile::TempDir;

const CASES: [&str; 2] = ["templates_qwen", "templates_gemma4"];
const BROKEN: char = '\u{FFFD}';

/// A copy of the golden Qwen tokenizer that a test may damage.
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

/// The output of the folder's default template and of its template for tools.
fn written(dir: &Path) -> (String, String) {
    let tokenizer = ChatTokenizer::load(dir).unwrap();
    let tools = RenderOptions { tools: Some(json!([{"type": "function"}])), ..RenderOptions::default() };
    let render = |options: &RenderOptions| tokenizer.render(&hello(), options).unwrap();
    (render(&RenderOptions::default()), render(&tools))
}

#[test]
fn templates_are_found_in_the_order_of_transformers() {
    let expect = |dir: &TempDir, plain: &str, tools: &str| {
        assert_eq!(written(dir.path()), (plain.to_string(), tools.to_string()));
    };
    let put = |dir: &TempDir, name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    // Older processors store the template in a separate file; the config's template has precedence.
    let dir = copy();
    set(dir.path(), "chat_template", Value::Null);
    put(&dir, "chat_template.json", &json!({"chat_template": "old"}).to_string());
    expect(&dir, "old", "old");
    set(dir.path(), "chat_template", json!("own"));
    expect(&dir, "own", "own");
    // A list of named templates, and an object of named templates.
    let list = json!([{"name": "default", "template": "own"}, {"name": "tool_use", "template": "own tools"}, {"name": "rag", "template": "x"}]);
    set(dir.path(), "chat_template", list);
    expect(&dir, "own", "own tools");
    set(dir.path(), "chat_template", json!({"default": "own", "tool_use": "object tools"}));
    expect(&dir, "own", "object tools");
    // The files of newer versions have precedence over all of them.
    put(&dir, "chat_template.jinja", "file");
    expect(&dir, "file", "file");
    put(&dir, "additional_chat_templates/tool_use.jinja", "file tools");
    put(&dir, "additional_chat_templates/README.md", "{% no template %}");
    expect(&dir, "file", "file tools");
    // Named files together with a default in the config.
    fs::remove_file(dir.path().join("chat_template.jinja")).unwrap();
    set(dir.path(), "chat_template", json!("own"));
    expect(&dir, "own", "file tools");
    // Named templates without a default.
    set(dir.path(), "chat_template", Value::Null);
    fs::remove_file(dir.path().join("chat_template.json")).unwrap();
    assert!(problem(dir.path()).contains("[\"tool_use\"]"), "{}", problem(dir.path()));
    // The error names the broken file.
    put(&dir, "chat_template.json", "[");
    assert!(problem(dir.path()).contains("chat_template.json"));
    put(&dir, "chat_template.json", &json!({"chat_template": 7}).to_string());
    assert!(problem(dir.path()).contains("chat_template.json: `chat_template`"), "{}", problem(dir.path()));
}

#[test]
fn a_template_without_an_end_is_an_error_and_no_hang() {
    let dir = copy();
    let spin = |what: &str| {
        format!(
            "{{% for a in range(99999) %}}{{% for b in range(99999) %}}{what}{{% endfor %}}{{% endfor %}}"
        )
    };
    for template in
        [spin(""), spin("{{ a }}"), "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}".into()]
    {
        set(dir.path(), "chat_template", json!(template));
        let begun = Instant::now();
        let told = match ChatTokenizer::load(dir.path()) {
            Err(error) => error,
            Ok(tokenizer) => tokenizer.render(&hello(), &RenderOptions::default()).unwrap_err(),
        };
        assert!(told.to_string().contains("tokenizer_config.json"), "{told}");
        assert!(begun.elapsed() < Duration::from_secs(10), "{template}: {:?}", begun.elapsed());
    }
    // A template that exceeds the limit only for long conversations.
    let squared = "{% for a in messages %}{% for b in messages %}{% for c in messages %}{{ loop.index }}{% endfor %}{% endfor %}{% endfor %}";
    set(dir.path(), "chat_template", json!(squared));
    let tokenizer = ChatTokenizer::load(dir.path()).unwrap();
    let many = vec![hello()[0].clone(); 400];
    let told = tokenizer.render(&many, &RenderOptions::default()).unwrap_err();
    assert!(matches!(told, TextError::Endless { .. }), "{told}");
    assert!(told.to_string().contains("tokenizer_config.json"), "{told}");
}

/// A conversation of 4,000 messages stays within the limit, for every template that is known here.
#[test]
fn long_conversations_are_within_the_limit_of_templates() {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-target");
    for dir in [tiny, golden::dir(CASES[0]), golden::dir(CASES[1])] {
        let tokenizer = ChatTokenizer::load(&dir).unwrap();
        let turn =
            |at: usize| Message::new(if at.is_multiple_of(2) { Role::User } else { Role::Assistant }, "Hi");
        let text = tokenizer.render(&(0..4000).map(turn).collect::<Vec<_>>(), &RenderOptions::default());
        assert!(text.unwrap().len() > 4000 * 2, "{}", dir.display());
    }
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
    assert!(tokenizer.stream("").push(-1).is_err());
    assert_eq!(tokenizer.token(-1), None);
    assert_eq!(tokenizer.decode(&[1 << 20], true).unwrap(), "");
}

/// Streams `ids` as the answer to a prompt without open thinking. Returns the pieces, and the last
/// piece separately.
fn stream(tokenizer: &ChatTokenizer, ids: &[i64]) -> (Vec<String>, String) {
    stream_after("", tokenizer, ids)
}

fn stream_after(prompt: &str, tokenizer: &ChatTokenizer, ids: &[i64]) -> (Vec<String>, String) {
    let mut stream = tokenizer.stream(prompt);
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

#[test]
fn special_fences_stay_in_the_text_where_they_part_thoughts_from_the_answer() {
    let tokenizer = ChatTokenizer::load(&golden::dir("templates_gemma4")).unwrap();
    let ids = |text: &str| tokenizer.encode(text).unwrap();
    let text = |prompt: &str, ids: &[i64]| {
        let (pieces, rest) = stream_after(prompt, &tokenizer, ids);
        pieces.concat() + &rest
    };
    let (open, close) =
        (tokenizer.token_id("<|channel>").unwrap(), tokenizer.token_id("<channel|>").unwrap());
    assert!(tokenizer.is_special(open) && tokenizer.is_special(close));
    let thought = ids("<|channel>thought\nWhy?\n<channel|>Yes.<turn|>");
    assert_eq!((thought[0], thought.contains(&close)), (open, true));
    assert_eq!(text("<|turn>model\n", &thought), "<|channel>thought\nWhy?\n<channel|>Yes.");
    assert_eq!(tokenizer.decode_answer(&thought).unwrap(), "<|channel>thought\nWhy?\n<channel|>Yes.");
    let said = |ids: &[i64]| without_reasoning(&tokenizer.decode_answer(ids).unwrap()).to_string();
    assert_eq!(said(&thought), "Yes.");

    // The prompt opened the thinking block.
    let within = ids("Why?<channel|>Yes.<channel|> No.<|channel>");
    assert_eq!(text("<|turn>model\n<|channel>thought\n", &within), "Why?<channel|>Yes. No.");
    assert_eq!(said(&within), "Yes. No.");
    // Nothing was opened: a closing mark without an opening one is dropped, and so is an opening
    // mark after the answer.
    assert_eq!(text("<|turn>model\n", &within), "Why?Yes. No.");
    assert_eq!(text("", &ids("Yes.<|channel>thought<channel|>")), "Yes.thought");
    // Bytes that never form a character are output before the mark.
    let byte = tokenizer.token_id("<0xF0>").unwrap();
    assert_eq!(text("<|channel>", &[byte, close, byte]), format!("{BROKEN}<channel|>{BROKEN}"));
}

/// Shared by all threads, as in the stages.
static GOLDEN: LazyLock<[ChatTokenizer; 2]> =
    LazyLock::new(|| CASES.map(|case| ChatTokenizer::load(&golden::dir(case)).unwrap()));

/// Splits ids at the special tokens that open and close thinking; each part comes with the mark
/// after it.
fn fenced<'a>(tokenizer: &ChatTokenizer, ids: &'a [i64]) -> Vec<(&'a [i64], Option<String>)> {
    let is =
        |at: &usize, mark: &str| tokenizer.is_special(ids[*at]) && tokenizer.token(ids[*at]).unwrap() == mark;
    let blank = |at: usize| tokenizer.decode(&ids[..at], true).unwrap().trim().is_empty();
    let Some(open) = (0..ids.len()).find(|at| is(at, "<|channel>")).filter(|&at| blank(at)) else {
        return vec![(ids, None)];
    };
    let first = (&ids[..open], Some("<|channel>".into()));
    match (open..ids.len()).find(|at| is(at, "<channel|>")) {
        Some(close) => {
            vec![first, (&ids[open + 1..close], Some("<channel|>".into())), (&ids[close + 1..], None)]
        }
        None => vec![first, (&ids[open + 1..], None)],
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Any ids stream to their decoded text between the marks, including broken bytes, special
    /// tokens and unknown ids.
    #[test]
    fn streaming_is_decoding(bytes in any::<bool>(), seeds in prop::collection::vec(any::<Index>(), 0..40)) {
        for tokenizer in GOLDEN.iter() {
            // The low ids of both vocabularies are single bytes, so drawing from them alone makes
            // broken bytes likely.
            let range = if bytes { 270 } else { tokenizer.vocab_size() + 3 };
            let ids: Vec<i64> = seeds.iter().map(|seed| seed.index(range) as i64).collect();
            let (pieces, rest) = stream(tokenizer, &ids);
            let expected: String = fenced(tokenizer, &ids)
                .iter()
                .map(|(part, mark)| tokenizer.decode(part, true).unwrap() + mark.as_deref().unwrap_or_default())
                .collect();
            prop_assert_eq!(pieces.concat() + &rest, expected);
            let broken = pieces.iter().any(|piece| piece.ends_with(BROKEN));
            prop_assert!(!broken);
        }
    }
}
