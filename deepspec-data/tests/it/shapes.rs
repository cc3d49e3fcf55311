//! Rows in the formats of public data sets: `split` reads them. The other commands read them too,
//! or say which command to run first.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use arrow_array::{ArrayRef, StringArray};
use deepspec_testkit::server::{Reply, Server};
use parquet::basic::Compression;
use serde_json::{Value, json};

use crate::process::{Ended, lines, rows, run, text, tiny};
use crate::regenerate::{answers, regenerate};
use crate::split::{report, split};
use crate::split_inputs::{messages, write_parquet};

/// The messages of each row as (role, text).
fn said(path: &Path) -> Vec<Vec<(String, String)>> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let message = |message: &Value| (text(&message["role"]), text(&message["content"]));
    rows(path)
        .iter()
        .map(|row| row["conversations"].as_array().unwrap().iter().map(message).collect())
        .collect()
}

fn pair(question: &str, answer: &str) -> Vec<(String, String)> {
    vec![("user".into(), question.into()), ("assistant".into(), answer.into())]
}

#[test]
fn rows_of_every_public_form_become_conversations() {
    let dir = tempfile::tempdir().unwrap();
    let talk = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]);
    let forms = [
        json!({"messages": talk}),
        json!({"messages": talk.to_string()}),
        json!({"conversations": null, "messages": talk}),
        json!({"conversations": "about sums", "messages": talk}),
        json!({"conversations": [{"from": "Human", "value": "q"}, {"from": "GPT", "value": "a"}]}),
        json!({"conversations": [{"role": "USER", "content": "q"}, {"role": "Assistant", "content": "a"}]}),
        json!({"messages": [{"role": "user", "content": "q"}, {"role": "model", "content": "a"}]}),
        json!({"prompt": "q", "response": "a"}),
        json!({"prompt": "q", "completion": "a"}),
        json!({"prompt": [{"role": "user", "content": "q"}], "response": "a"}),
        json!({"instruction": "q", "input": "", "output": "a"}),
        json!({"question": "q", "answer": "a"}),
    ];
    let data = lines(dir.path(), "data.jsonl", &forms.iter().map(Value::to_string).collect::<Vec<_>>());
    let ended = split(&data, &["--test-size", "0"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for (form, found) in forms.iter().zip(said(&dir.path().join("train.jsonl"))) {
        assert_eq!(found, pair("q", "a"), "{form}");
    }
    let more = [
        json!({"instruction": "q", "input": "of this", "output": "a"}),
        json!({"turns": ["q", "r"]}),
        json!({"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": "q"}, {"role": "function", "content": "f"}]}),
    ];
    let data = lines(dir.path(), "more.jsonl", &more.map(|row| row.to_string()));
    assert_eq!(split(&data, &["--test-size", "0", "--overwrite"]).code, Some(0));
    let found = said(&dir.path().join("train.jsonl"));
    assert_eq!(found[0], pair("q\n\nof this", "a"));
    let roles = |at: usize| found[at].iter().map(|(role, _)| role.as_str()).collect::<Vec<_>>();
    assert_eq!((roles(1), roles(2)), (vec!["user", "user"], vec!["system", "user", "tool"]));

    // For rows without a conversation, the error lists their fields.
    let data = lines(
        dir.path(),
        "none.jsonl",
        &[json!({"text": "q"}).to_string(), json!({"messages": 3}).to_string()],
    );
    let ended = split(&data, &["--test-size", "0", "--overwrite"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(
        ended.stderr.contains("the row has `text`") && ended.stderr.contains("found a number"),
        "{ended:?}"
    );
}

#[test]
fn columns_of_json_text_and_of_words_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data.parquet");
    let texts = |values: [&str; 2]| -> ArrayRef { Arc::new(StringArray::from(values.to_vec())) };
    let talks = [0, 1].map(|at| {
        json!([{"role": "user", "content": format!("q{at}")}, {"role": "assistant", "content": format!("a{at}")}]).to_string()
    });
    let expected = [pair("q0", "a0"), pair("q1", "a1")];
    let lists = messages(
        ["role", "content"],
        &[&[("user", "q0"), ("assistant", "a0")], &[("user", "q1"), ("assistant", "a1")]],
    );
    let columns = [
        vec![("messages", texts([&talks[0], &talks[1]]))],
        // A title under the first name and the conversation under the second.
        vec![("conversations", texts(["about 0", "about 1"])), ("messages", lists)],
        vec![("prompt", texts(["q0", "q1"])), ("response", texts(["a0", "a1"]))],
        vec![("instruction", texts(["q0", "q1"])), ("output", texts(["a0", "a1"]))],
    ];
    for columns in columns {
        let names: Vec<String> = columns.iter().map(|(name, _)| (*name).to_owned()).collect();
        write_parquet(&path, columns, Compression::SNAPPY, 10);
        let ended = split(&path, &["--test-size", "0", "--overwrite"]);
        assert_eq!(ended.code, Some(0), "{names:?}: {ended:?}");
        assert_eq!(said(&dir.path().join("train.jsonl")), expected, "{names:?}");
    }
}

/// A recipe for `cache` on the tiny target.
fn recipe(dir: &Path) -> String {
    let recipe = format!(
        "name: t\ntarget: {{model: '{}', layer_ids: [1]}}\ndrafter: {{dspark: {{block_size: 3, num_draft_layers: 1, mask_token_id: 1023}}}}\n\
         data: {{states: {{cache: '{}'}}, chat_template: qwen, max_length: 256}}\n",
        tiny(),
        dir.join("cache").display()
    );
    text(&lines(dir, "recipe.yaml", &[recipe]))
}

#[test]
fn other_commands_read_what_split_reads_or_name_it() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path());
    let server = Server::start(|_| {
        Reply::Json(json!({"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}))
    });
    let url = server.url();
    let commands = |input: &Path| -> [(&str, Ended); 4] {
        let (input_text, tiny) = (text(input), tiny());
        let output = dir.path().join("out.jsonl");
        [
            ("regenerate", regenerate(input, &output, &["--server", &url, "--overwrite"])),
            ("inspect", run(&["inspect", "--input", &input_text, "--model", &tiny, "--json", "--quiet"])),
            ("plan", run(&["cache", "plan", "--config", &recipe, "--input", &input_text, "--quiet"])),
            (
                "build",
                run(&[
                    "cache",
                    "build",
                    "--config",
                    &recipe,
                    "--input",
                    &input_text,
                    "--device",
                    "cpu",
                    "--quiet",
                    "--overwrite",
                ]),
            ),
        ]
    };
    // Rows without ids, under other field names.
    let answer = "The sum reads 3 + 4 = 7. The answer is 7, and there is nothing else to say.";
    let forms = [
        json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]}),
        json!({"id": null, "prompt": "q", "response": answer}),
        json!({"id": "a", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": answer}]}),
        json!({"id": "a", "instruction": "q", "output": answer}),
    ];
    let input = lines(dir.path(), "rows.jsonl", &forms.map(|row| row.to_string()));
    for (name, ended) in commands(&input) {
        assert_eq!(ended.code, Some(0), "{name}: {ended:?}");
    }
    let found = rows(&dir.path().join("out.jsonl"));
    assert!(found.iter().all(|row| answers(row) == ["yes"] && !row.contains_key("messages")), "{found:?}");
    let mut ids: Vec<Value> = found.iter().map(|row| row["id"].clone()).collect();
    ids.sort_by_key(Value::to_string);
    assert_eq!(ids, [json!("a"), json!("a~2"), json!(0), json!(1)]);

    let conversation: &[(&str, &str)] = &[("human", "hi"), ("gpt", "ho")];
    let columns = vec![("conversations", messages(["from", "value"], &[conversation]))];
    let parquet = dir.path().join("rows.parquet");
    write_parquet(&parquet, columns, Compression::SNAPPY, 10);
    let array = lines(dir.path(), "array.json", &[format!("[{}]", json!({"id": 1}))]);
    for (input, kind) in [(parquet, "a parquet file"), (array, "a JSON array")] {
        for (name, ended) in commands(&input) {
            assert_eq!(ended.code, Some(2), "{name}: {ended:?}");
            assert!(
                ended.stderr.contains(kind) && ended.stderr.contains("deepspec-data split --dataset"),
                "{name}: {ended:?}"
            );
        }
    }
}

#[test]
fn files_of_rows_without_ids_do_not_collide() {
    let dir = tempfile::tempdir().unwrap();
    let row = |text: String| json!({"messages": [{"role": "user", "content": text}]}).to_string();
    let first = lines(dir.path(), "a.jsonl", &[row("a".into()), row("b".into())]);
    let second = lines(
        dir.path(),
        "b.jsonl",
        &[json!({"id": 0, "messages": [{"role": "user", "content": "c"}]}).to_string(), row("d".into())],
    );
    let server = Server::start(|_| {
        Reply::Json(json!({"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}))
    });
    let output = dir.path().join("out.jsonl");
    let both = regenerate(&first, &output, &["--input", &text(&second), "--server", &server.url()]);
    assert_eq!(both.stdout, "4 rows = 4 ok + 0 failed + 0 pending; 0 malformed lines\n", "{both:?}");
    // A second run of the command finds its rows done.
    let again = regenerate(&first, &output, &["--input", &text(&second), "--server", &server.url()]);
    assert_eq!((again.code, again.stdout, server.count()), (Some(0), both.stdout, 4));
}

#[test]
fn speakers_without_a_role_are_warned_of() {
    let dir = tempfile::tempdir().unwrap();
    let row = json!({"conversations": [{"from": "human", "value": "q"}, {"from": "critic", "value": "hm"}, {"from": "gpt", "value": "a"}]});
    let data = lines(dir.path(), "data.jsonl", &[row.to_string()]);
    let ended = split(&data, &["--test-size", "0", "--role", "nobody=user"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let warned = |words: &str| ended.stderr.lines().any(|line| line.contains("WARN") && line.contains(words));
    assert!(warned("1 messages of speakers without a role were dropped (`critic`)"), "{ended:?}");
    assert!(warned("--role nobody=…: no message has this speaker"), "{ended:?}");
    assert_eq!(report(dir.path())["sources"][0]["dropped_messages"], json!({"critic": 1}));
}

#[test]
fn files_of_one_value_are_named_for_their_shape() {
    let dir = tempfile::tempdir().unwrap();
    let row = json!({"messages": [{"role": "user", "content": "q"}]});
    let wrapped = lines(dir.path(), "data.json", &[json!({"data": [row]}).to_string()]);
    let ended = split(&wrapped, &[]);
    assert_ne!(ended.code, Some(0), "{ended:?}");
    assert!(!ended.stderr.contains("too small"), "{ended:?}");
    let array = dir.path().join("array.jsonl");
    fs::write(&array, json!([row, row]).to_string()).unwrap();
    split(&array, &[]).fails_with(1, &["array.jsonl", "a JSON array", "name the file .json"]);
}
