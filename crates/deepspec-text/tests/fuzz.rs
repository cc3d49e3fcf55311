//! Rows as they come from the world: whatever is in them, they are masked or refused with a reason.

use std::path::Path;
use std::sync::LazyLock;

use deepspec_models::chat_formats;
use deepspec_testkit::golden;
use deepspec_text::{ChatTemplate, ChatTokenizer, Conversation, Supervised, check, supervise};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde_json::{Value, json};

/// Tokenizers and the rules of their templates, shared by all threads as the stages do it.
static BENCHES: LazyLock<Vec<(ChatTokenizer, ChatTemplate)>> = LazyLock::new(|| {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-target");
    [(tiny, "qwen"), (golden::dir("templates_qwen"), "qwen"), (golden::dir("templates_gemma4"), "gemma4")]
        .map(|(dir, name)| {
            (ChatTokenizer::load(&dir).unwrap(), ChatTemplate::named(name, &chat_formats()).unwrap())
        })
        .into()
});

/// Texts that stand in the way: marks, halves of marks, blanks, broken and private characters.
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

/// Replaces or removes something somewhere in `value`.
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
    let checked =
        check(tokenizer, template, &conversation, &supervised).map_err(|error| error.to_string())?;
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
                prop_assert!(found.places.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            }
            Err(reason) => prop_assert!(!reason.is_empty()),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    /// Cutting later only adds.
    #[test]
    fn a_longer_limit_keeps_what_a_shorter_one_has(row in row(), bench in 0..3usize, short in 1..80usize, more in 0..80usize) {
        let found = [short, short + more].map(|limit| look(&BENCHES[bench], &row, limit));
        if let [Ok(short), Ok(long)] = found {
            prop_assert!(long.input_ids.starts_with(&short.input_ids));
            prop_assert!(long.loss_mask.starts_with(&short.loss_mask));
            prop_assert_eq!((short.text, short.places), (long.text, long.places));
        }
    }

    /// Of plain words, exactly the assistant's are supervised, each with the end of its turn, in tokens as in text.
    #[test]
    fn plain_answers_are_supervised_word_for_word(turns in prop::collection::vec(("[a-z][a-z ,.?]{0,30}[a-z]", "[A-Z][a-z ,.0-9]{0,60}[.!?]"), 1..4), bench in 0..3usize) {
        let (tokenizer, template) = &BENCHES[bench];
        let messages: Vec<Value> = turns.iter().flat_map(|(question, answer)| [json!({"role": "user", "content": question}), json!({"role": "assistant", "content": answer})]).collect();
        let found = look(&BENCHES[bench], &json!({"conversations": messages}), 4096).unwrap();
        let end = &template.marks().unwrap().end_of_turn;
        let expected: Vec<String> = turns.iter().map(|(_, answer)| format!("{answer}{end}")).collect();
        let said: Vec<&str> = found.places.iter().map(|&(start, end)| found.text[start..end].trim_start_matches("<think>\n\n</think>\n\n")).collect();
        prop_assert_eq!(said, expected);
        for ((start, end), &(from, to)) in found.spans().into_iter().zip(&found.places) {
            let tokens = tokenizer.decode(&found.input_ids[start as usize..end as usize], false).unwrap();
            prop_assert_eq!(tokens, &found.text[from..to]);
        }
    }
}
