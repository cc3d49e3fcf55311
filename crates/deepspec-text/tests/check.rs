//! The problems that `check` finds in rows that would teach a drafter something wrong, and the
//! supervised end of truncated answers.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use deepspec_core::recipe::TemplateEntry;
use deepspec_models::chat_formats;
use deepspec_testkit::golden;
use deepspec_text::{
    ChatTemplate, ChatTokenizer, Conversation, Message, RowFindings, Supervised, check_loss_mask, supervise,
};
use serde_json::{Value, json};
use tempfile::TempDir;

const TINY: &str = "../../assets/tiny-target";

fn tiny() -> ChatTokenizer {
    ChatTokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join(TINY)).unwrap()
}

/// The tiny target's tokenizer with its template changed.
fn changed(change: impl Fn(String) -> String) -> (TempDir, ChatTokenizer) {
    let (dir, tiny) = (tempfile::tempdir().unwrap(), Path::new(env!("CARGO_MANIFEST_DIR")).join(TINY));
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::write(dir.path().join(file), fs::read(tiny.join(file)).unwrap()).unwrap();
    }
    let template = fs::read_to_string(tiny.join("chat_template.jinja")).unwrap();
    let other = change(template.clone());
    assert_ne!(template, other);
    fs::write(dir.path().join("chat_template.jinja"), other).unwrap();
    let tokenizer = ChatTokenizer::load(dir.path()).unwrap();
    (dir, tokenizer)
}

fn qwen() -> ChatTemplate {
    ChatTemplate::from_name("qwen", &chat_formats()).unwrap()
}

fn look(
    tokenizer: &ChatTokenizer,
    template: &ChatTemplate,
    messages: Value,
    max_length: usize,
) -> (Supervised, RowFindings) {
    let row = json!({"conversations": messages});
    let conversation = Conversation::from_row(row.as_object().unwrap()).unwrap();
    let supervised = supervise(tokenizer, template, &conversation, max_length).unwrap();
    let checked = check_loss_mask(tokenizer, template, &conversation, &supervised).unwrap();
    (supervised, checked)
}

fn problems(tokenizer: &ChatTokenizer, template: &ChatTemplate, messages: Value) -> Vec<String> {
    let (_, checked) = look(tokenizer, template, messages, 4096);
    checked.problems.iter().map(ToString::to_string).collect()
}

fn turn(question: &str, answer: &str) -> Value {
    json!([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
}

fn two_turns() -> Value {
    json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello. "},
        {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2", "reasoning_content": "One and one."}])
}

#[test]
fn good_rows_have_no_problems() {
    for (tokenizer, name) in [
        (tiny(), "qwen"),
        (ChatTokenizer::load(&golden::dir("templates_qwen")).unwrap(), "qwen"),
        (ChatTokenizer::load(&golden::dir("templates_gemma4")).unwrap(), "gemma4"),
    ] {
        let template = ChatTemplate::from_name(name, &chat_formats()).unwrap();
        assert_eq!(ChatTemplate::guess(&tokenizer, &chat_formats()).unwrap(), template);
        for messages in [turn("Hi", "Hello."), turn("Hi", "<think>\nhm\n</think>\n\nHello.")] {
            assert_eq!(problems(&tokenizer, &template, messages), [""; 0], "{name}");
        }
        // The end-of-turn token of an empty answer is not supervised.
        let mark = template.markers().unwrap().end_of_turn.clone();
        for nothing in [String::new(), mark] {
            let found = problems(&tokenizer, &template, turn("Hi", &nothing));
            assert_eq!(found[0], "the mask is empty: the answers have no text", "{name}: {nothing:?}");
        }
    }
    let (_, checked) = look(&tiny(), &qwen(), two_turns(), 4096);
    assert_eq!(
        (checked.problems.len(), checked.prompt_mismatch_earlier, checked.reasoning_left_out),
        (0, 1, 0)
    );
}

#[test]
fn empty_masks_say_why() {
    let only = |problems: Vec<String>, words: &str| {
        assert!(problems[0].contains("the mask is empty") && problems[0].contains(words), "{problems:?}")
    };
    only(problems(&tiny(), &qwen(), json!([{"role": "user", "content": "Hi"}])), "no assistant speaks");
    let gemma = ChatTemplate::from_name("gemma4", &chat_formats()).unwrap();
    only(problems(&tiny(), &gemma, turn("Hi", "Hello.")), "the rules `gemma4` are not those");
    let (_, cut) = look(&tiny(), &qwen(), turn("Hi", "Hello."), 20);
    assert_eq!(cut.problems.len(), 1, "{cut:?}");
    assert!(cut.problems[0].to_string().contains("cut at 20 tokens, before the first answer"));
}

#[test]
fn words_that_are_not_the_assistants_are_shown() {
    let typed = problems(&tiny(), &qwen(), turn("a<|im_start|>assistant\nb", "c"));
    assert!(typed[0].starts_with("\"b<|im_end|>\\n\" is supervised"), "{typed:?}");
    assert!(typed[0].contains("conversations[0], the user's, holds the assistant's header"), "{typed:?}");

    let (_dir, loud) = changed(|template| template.replace("ns.answer.lstrip('\\n')", "ns.answer | upper"));
    let rewritten = problems(&loud, &qwen(), turn("Hi", "Well, HELLO you."));
    assert!(
        rewritten[0].starts_with("conversations[1]: the template rewrites the assistant's answer"),
        "{rewritten:?}"
    );
    assert!(
        rewritten[0].contains("\"Well, HELLO you.\"") && rewritten[0].contains("from character 1 on"),
        "{rewritten:?}"
    );

    let (_dir, silent) = changed(|template| {
        template.replace(
            "'<|im_start|>' + message.role",
            "'<|im_start|>' + (message.role if loop.index0 else 'me')",
        )
    });
    assert_eq!(problems(&silent, &qwen(), turn("Hi", "Hello.")), [""; 0]);
    let (_dir, deaf) = changed(|template| {
        template.replace("message.role + '\\n'", "(message.role if loop.index0 != 2 else 'nobody') + '\\n'")
    });
    let missing = problems(&deaf, &qwen(), two_turns());
    assert!(
        missing
            .iter()
            .any(|problem| problem == "conversations[1]: the assistant's message is not supervised"),
        "{missing:?}"
    );
}

#[test]
fn a_template_that_serves_something_else_is_shown_where_it_differs() {
    let (_dir, greeting) =
        changed(|template| template.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\nOh, '"));
    let found = problems(&greeting, &qwen(), turn("Hi", "Hello."));
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].starts_with("conversations[1]: the template differs from the served one at token 27"),
        "{found:?}"
    );
    assert!(found[0].contains("behind \"sistant\\n\" the served prompt without thinking has"), "{found:?}");

    // Served without thinking, an answer follows an empty thinking block, so it must in training,
    // too.
    let (_dir, bare) = changed(|template| template.replace("loop.index0 > ns.last_user", "ns.thought"));
    let found = problems(&bare, &qwen(), turn("Hi", "Hello."));
    assert!(
        found[0].contains("without thinking has \"<think>\"") && found[0].contains("the training text \"H"),
        "{found:?}"
    );
    assert_eq!(problems(&bare, &qwen(), turn("Hi", "<think>\nhm\n</think>\n\nHello.")), [""; 0]);

    let (_dir, strict) = changed(|template| {
        template
            + "{%- if add_generation_prompt and messages|length > 3 -%}{{ raise_exception('too long') }}{%- endif -%}"
    });
    let found = problems(&strict, &qwen(), two_turns());
    assert!(
        found[0].contains("conversations[3]: no prompt can be served") && found[0].contains("too long"),
        "{found:?}"
    );
}

#[test]
fn a_cut_answer_ends_with_its_last_word() {
    let said = |tokenizer: &ChatTokenizer, template: &ChatTemplate, message: Value| {
        let (supervised, checked) =
            look(tokenizer, template, json!([{"role": "user", "content": "Hi"}, message]), 4096);
        assert_eq!(checked.problems, [], "{supervised:?}");
        let ids: Vec<i64> = supervised
            .input_ids
            .iter()
            .zip(&supervised.loss_mask)
            .filter(|(_, learnt)| **learnt)
            .map(|(&id, _)| id)
            .collect();
        tokenizer.decode(&ids, false).unwrap()
    };
    let cut = |content: &str| json!({"role": "assistant", "content": content, "finish_reason": "length"});
    let gemma = (
        ChatTokenizer::load(&golden::dir("templates_gemma4")).unwrap(),
        ChatTemplate::from_name("gemma4", &chat_formats()).unwrap(),
    );
    assert_eq!(said(&gemma.0, &gemma.1, cut("one two thr")), "one two thr");
    assert_eq!(said(&tiny(), &qwen(), cut("one two thr ")), "<think>\n\n</think>\n\none two thr ");
    let mut stopped = cut("one two three");
    stopped["finish_reason"] = json!("stop");
    assert_eq!(said(&gemma.0, &gemma.1, stopped), "one two three<turn|>\n");
    // The thinking used all tokens, so neither its end nor the end of the turn was generated.
    let thinking = json!({"role": "assistant", "content": "", "reasoning_content": "I wonder", "finish_reason": "length"});
    assert_eq!(said(&tiny(), &qwen(), thinking), "<think>\nI wonder");
    let (_dir, tagged) = changed(|template| {
        template.replace(
            "{{- ns.answer.lstrip('\\n') -}}",
            "{%- generation -%}{{- ns.answer + '<|im_end|>' -}}{%- endgeneration -%}",
        )
    });
    let generation = ChatTemplate::from_name("generation", &chat_formats()).unwrap();
    assert_eq!(said(&tagged, &generation, cut("one two thr")), "one two thr");
}

/// The supervised texts of a row.
fn learnt(tokenizer: &ChatTokenizer, template: &ChatTemplate, row: &Value) -> Vec<String> {
    let conversation = Conversation::from_row(row.as_object().unwrap()).unwrap();
    let supervised = supervise(tokenizer, template, &conversation, 4096).unwrap();
    let spans = supervised.spans().into_iter();
    spans
        .map(|(start, end)| {
            tokenizer.decode(&supervised.input_ids[start as usize..end as usize], false).unwrap()
        })
        .collect()
}

#[test]
fn whatever_cut_an_answer_no_end_of_turn_is_learnt_behind_it() {
    let (tokenizer, template) = (tiny(), qwen());
    let row = |reason: Value| {
        let mut row = json!({"conversations": turn("Hi", "one two three")});
        row["conversations"][1]["finish_reason"] = reason;
        row
    };
    let prefix = "<think>\n\n</think>\n\none two three";
    for cut in [
        "length",
        "max_tokens",
        "LENGTH",
        "content_filter",
        "stop_sequence",
        "invalid_tool_call",
        "abort",
        "error",
        "repetition",
        "unknown",
        "a word of tomorrow",
    ] {
        assert_eq!(learnt(&tokenizer, &template, &row(json!(cut))), [prefix], "{cut}");
    }
    assert_eq!(learnt(&tokenizer, &template, &row(json!({"type": "length", "length": 9}))), [prefix]);
    for whole in [json!("stop"), json!("tool_calls"), json!("eos_token"), json!("end_turn"), json!(null)] {
        let found = learnt(&tokenizer, &template, &row(whole.clone()));
        assert_eq!(found, [format!("{prefix}<|im_end|>\n")], "{whole}");
    }
    // A finish reason of the whole row applies to its last answer, unless that has its own.
    let mut of_row = json!({"conversations": two_turns(), "finish_reason": "content_filter"});
    let found = learnt(&tokenizer, &template, &of_row);
    assert!(found[0].ends_with("Hello. <|im_end|>\n") && found[1].ends_with('2'), "{found:?}");
    of_row["conversations"][3]["finish_reason"] = json!("stop");
    assert!(learnt(&tokenizer, &template, &of_row)[1].ends_with("2<|im_end|>\n"));
    of_row["conversations"].as_array_mut().unwrap().push(json!({"role": "user", "content": "More?"}));
    of_row["conversations"][3]["finish_reason"] = json!(null);
    assert!(learnt(&tokenizer, &template, &of_row)[1].ends_with("2<|im_end|>\n"));
}

#[test]
fn an_answer_of_nothing_teaches_nothing() {
    let (tokenizer, template) = (tiny(), qwen());
    for content in [json!(null), json!(""), json!(" \n"), json!([]), json!("<think>\n\n</think>\n\n")] {
        let row = json!({"conversations": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]});
        assert_eq!(learnt(&tokenizer, &template, &row), [""; 0], "{row}");
    }
    let between = json!({"conversations": [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": null},
        {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]});
    let found = learnt(&tokenizer, &template, &between);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].ends_with("Yes.<|im_end|>\n"), "{found:?}");
}

#[test]
fn nulls_and_spellings_change_no_mask() {
    let (tokenizer, template) = (tiny(), qwen());
    let plain = json!({"conversations": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello.", "reasoning_content": "Well."}]});
    let expected = learnt(&tokenizer, &template, &plain);
    assert_eq!(expected, ["<think>\nWell.\n</think>\n\nHello.<|im_end|>\n"]);
    let same = [
        json!({"messages": [
            {"role": "developer", "content": "Be brief.", "name": null}, {"role": "USER", "content": [{"type": "text", "text": "Hi"}], "tool_calls": null},
            {"role": "model", "content": "Hello.", "reasoning": "Well.", "refusal": null, "tool_calls": null, "audio": null}], "tools": null, "finish_reason": null}),
        json!({"conversations": null, "messages": [
            {"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello.", "thinking": "Well."}]}),
        json!({"conversations": [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Well."}, null, {"type": "text", "text": "Hello."}], "reasoning_content": null}]}),
        json!({"conversations": plain["conversations"].to_string(), "tools": "null"}),
    ];
    for row in same {
        assert_eq!(learnt(&tokenizer, &template, &row), expected, "{row}");
    }
}

/// Tool calls that the template does not render are counted, but they are not a problem of the row.
#[test]
fn calls_that_the_template_leaves_out_are_counted() {
    // The tiny target's template renders none.
    let call = json!([{"role": "user", "content": "3+4?"},
        {"role": "assistant", "content": null, "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]},
        {"role": "tool", "content": "7"}, {"role": "assistant", "content": "It is 7."}]);
    let (_, checked) = look(&tiny(), &qwen(), call, 4096);
    assert_eq!((checked.problems.len(), checked.calls_left_out), (0, 1), "{checked:?}");
    assert_eq!((checked.recorded_calls, checked.untrained), (1, 0));
}

#[test]
fn messages_of_weight_0_are_context() {
    let weighted = |weights: [Value; 2]| {
        let mut messages = two_turns();
        for (at, weight) in [1, 3].into_iter().zip(weights) {
            messages[at]["weight"] = weight;
        }
        look(&tiny(), &qwen(), messages, 4096)
    };
    let (all, _) = look(&tiny(), &qwen(), two_turns(), 4096);
    let [first, second] = all.spans()[..] else { panic!("{all:?}") };
    for (weights, spans, untrained) in [
        ([json!(1), Value::Null], vec![first, second], 0),
        ([json!(0), json!(1.0)], vec![second], 1),
        ([json!(1), json!(0)], vec![first], 1),
    ] {
        let (found, checked) = weighted(weights);
        assert_eq!((&found.input_ids, found.spans()), (&all.input_ids, spans), "{checked:?}");
        assert_eq!((checked.problems.as_slice(), checked.untrained), (&[][..], untrained));
    }
    let (_, none) = weighted([json!(0), json!(0)]);
    assert_eq!(none.problems[0].to_string(), "the mask is empty: every answer has weight 0");
    for weight in [json!(2), json!("0"), json!(true)] {
        let error = Message::try_from(json!({"role": "assistant", "content": "a", "weight": weight}));
        assert!(error.unwrap_err().to_string().contains("`weight` must be 1, or 0"), "{weight}");
    }
}

/// Such a row took minutes when every prefix was tokenised again.
#[test]
fn a_row_of_a_thousand_turns_is_masked_and_checked_at_once() {
    let (tokenizer, template) = (tiny(), qwen());
    let turns: Vec<Value> = (0..500)
        .flat_map(|at| {
            let [question, answer] =
                ["What would you like to say about it?", "I would like to say something about it here."]
                    .map(|text| format!("{text} {at} {}", "and more of it ".repeat(10)));
            turn(&question, &answer).as_array().unwrap().clone()
        })
        .collect();
    let begun = Instant::now();
    for max_length in [2048, 1 << 20] {
        let (supervised, checked) = look(&tokenizer, &template, json!(turns), max_length);
        assert_eq!(supervised.text_ranges.len(), 500);
        assert!(checked.problems.is_empty(), "{:?}", checked.problems);
    }
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[test]
fn rules_of_ones_own_find_the_same_as_built_in_ones() {
    let mine = TemplateEntry {
        name: "mine".into(),
        assistant_header: "<|turn>model\n".into(),
        end_of_turn: "<turn|>\n".into(),
        default_system: Some(String::new()),
        assistant_prefix: Some("<|channel>thought\n<channel|>".into()),
    };
    let tokenizer = ChatTokenizer::load(&golden::dir("templates_gemma4")).unwrap();
    let (own, builtin) =
        (ChatTemplate::from(mine.clone()), ChatTemplate::from_name("gemma4", &chat_formats()).unwrap());
    let messages = turn("Hi", "Hello there.");
    assert_eq!(look(&tokenizer, &own, messages.clone(), 99), look(&tokenizer, &builtin, messages, 99));
    // Rules equal to the built-in ones count as built-in under a built-in name, but not under
    // another name or with other marks.
    assert_eq!(builtin.digest(&tokenizer, &chat_formats()), tokenizer.template_digest());
    let named = ChatTemplate::from(TemplateEntry { name: "gemma4".into(), ..mine.clone() });
    assert_eq!(named.digest(&tokenizer, &chat_formats()), tokenizer.template_digest());
    let other = ChatTemplate::from(TemplateEntry { assistant_prefix: None, ..mine });
    let digests = [
        own.digest(&tokenizer, &chat_formats()),
        other.digest(&tokenizer, &chat_formats()),
        tokenizer.template_digest(),
    ];
    assert!(digests[0] != digests[1] && digests[0] != digests[2] && digests[1] != digests[2]);
}
