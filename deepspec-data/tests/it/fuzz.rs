//! Rows, requests, answers and recipes with nulls, other types and unknown keys: each is used,
//! refused by name, or counted.

use std::fs;
use std::path::Path;

use deepspec_testkit::mutate::Fuzzer;
use deepspec_testkit::server::{Reply, Server as Mock};
use serde_json::{Value, json};

use crate::http::Http;
use crate::process::{Server, lines, rows, run, text, tiny};
use crate::regenerate::{by_id, question, regenerate};
use crate::split::{report, split};

const ROWS: usize = 3_000;
const ANSWER: &str = "The sum reads 3 + 4 = 7. The answer is 7, and there is nothing else to say.";

/// A row in one of the public formats.
fn row(dice: &mut Fuzzer, at: usize) -> Value {
    let asked = format!("What is {at} + 4?");
    let mut row = match dice.roll(7) {
        0 => json!({"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": ANSWER}]}),
        1 => {
            json!({"messages": [{"role": "developer", "content": "s", "name": null}, {"role": "user", "content": asked},
            {"role": "model", "content": ANSWER, "thinking": "hm", "tool_calls": null}]})
        }
        2 => {
            json!({"conversations": "a title", "messages": json!([{"role": "user", "content": asked}, {"role": "assistant", "content": ANSWER}]).to_string()})
        }
        3 => json!({"prompt": asked, "response": ANSWER, "score": null}),
        4 => json!({"instruction": asked, "input": "", "output": ANSWER}),
        5 => json!({"turns": [asked]}),
        _ => {
            json!({"tools": null, "messages": [{"role": "user", "content": [{"type": "text", "text": asked}]},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "function", "name": "f", "content": "7"}, {"role": "assistant", "content": ANSWER, "finish_reason": "length"}]})
        }
    };
    match dice.roll(4) {
        0 => row["id"] = json!(at / 2),
        1 => row["id"] = json!(format!("r{at}")),
        2 => row["id"] = Value::Null,
        _ => {}
    }
    row
}

const WORDS: [&str; 20] = [
    "role",
    "content",
    "from",
    "value",
    "user",
    "assistant",
    "model",
    "function",
    "messages",
    "conversations",
    "prompt",
    "response",
    "turns",
    "tools",
    "tool_calls",
    "sampling",
    "finish_reason",
    "thinking",
    "id",
    "nosuch",
];

/// A file of damaged rows.
fn damaged(dir: &Path, seed: u64) -> std::path::PathBuf {
    let mut dice = Fuzzer::new(seed, &WORDS);
    let mut text = vec![];
    for at in 0..ROWS {
        let row = row(&mut dice, at);
        text.extend(dice.line(row));
        text.push(b'\n');
    }
    let path = dir.join("rows.jsonl");
    // A `[` at the beginning would make it a file of another format.
    fs::write(&path, [&b"{}\n"[..], &text].concat()).unwrap();
    path
}

#[test]
fn damaged_rows_of_all_forms_are_used_refused_or_counted() {
    let dir = tempfile::tempdir().unwrap();
    let input = damaged(dir.path(), 31);
    let all = ROWS + 1;

    let ended = split(&input, &["--test-size", "0.1"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let total = &report(dir.path())["total"];
    let of = |name: &str| total[name].as_u64().unwrap() as usize;
    assert_eq!(of("train") + of("eval") + of("overlap") + of("rejected"), all, "{total}");
    assert_eq!(rows(&dir.path().join("train.jsonl")).len(), of("train"));
    assert!(of("train") > ROWS / 4 && of("rejected") > ROWS / 10, "{total}");

    // Every conversation gets the same answer, so that rows cannot be mixed up.
    let server = Mock::start(|_| {
        Reply::Json(json!({"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}))
    });
    let output = dir.path().join("out.jsonl");
    let ended = regenerate(&input, &output, &["--server", &server.url()]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let (ok, rejected) = (by_id(&output), rows(&dir.path().join("out.jsonl.rejected.jsonl")));
    assert_eq!(ok.len() + rejected.len(), all, "{ended:?}");
    assert!(
        ok.len() > ROWS / 4 && rejected.iter().all(|reject| reject["reason"].as_str().unwrap().len() > 5)
    );

    let ended =
        run(&["inspect", "--input", &text(&input), "--model", &tiny(), "--json", "--quiet", "--limit", "0"]);
    let found: Value =
        serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"));
    let parts = ["good", "too_short", "with_problems", "status_error", "unusable"];
    let parts = parts.map(|part| found["summary"][part].as_u64().unwrap() as usize);
    assert_eq!(parts.iter().sum::<usize>(), all, "{found}");
    assert!(parts[0] > ROWS / 10, "{parts:?}");

    let recipe = format!(
        "name: t\ntarget: {{model: '{}', layer_ids: [1]}}\ndrafter: {{dspark: {{block_size: 3, num_draft_layers: 1, mask_token_id: 1023}}}}\n\
         data: {{states: {{cache: '{}'}}, chat_template: qwen, max_length: 256}}\n",
        tiny(),
        dir.path().join("cache").display()
    );
    let recipe = text(&lines(dir.path(), "recipe.yaml", &[recipe]));
    let ended = run(&["cache", "plan", "--config", &recipe, "--input", &text(&input), "--quiet"]);
    // The summary is wrapped at 80 columns, and the tokens follow it.
    let told = ended.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    let line = told.split_once(" rejected").unwrap_or_else(|| panic!("{ended:?}")).0;
    let (count, parts) = line.split_once(" rows = ").unwrap();
    let first = |part: &str| part.trim().split(' ').next().unwrap().replace(',', "").parse::<usize>().ok();
    let sum: usize = parts.split('+').map(|part| first(part).unwrap_or_else(|| panic!("{line}"))).sum();
    assert_eq!((first(count), sum), (Some(all), all), "{line}");
}

#[test]
fn damaged_requests_are_answered_or_refused_by_name() {
    let (server, http) = (Server::start(&["--max-model-len", "96", "--max-num-seqs", "2"]), Http::new());
    let words = [
        "messages",
        "role",
        "content",
        "stream",
        "stop",
        "tools",
        "tool_choice",
        "response_format",
        "none",
        "tiny",
        "user",
        "temperature",
        "n",
        "logit_bias",
        "chat_template_kwargs",
    ];
    let (mut answered, mut refused) = (0, 0);
    for seed in 0..400 {
        let mut dice = Fuzzer::new(seed, &words);
        let mut body = json!({
            "model": "tiny", "messages": [{"role": "user", "content": "Hello?", "name": null}], "max_tokens": 2, "temperature": 0, "top_p": 1,
            "top_k": null, "stop": ["\n"], "seed": 5, "n": 1, "stream": false, "stream_options": null, "tools": [], "tool_choice": "auto",
            "response_format": {"type": "text"}, "logit_bias": {}, "user": "me", "chat_template_kwargs": {"enable_thinking": false},
        });
        (0..dice.roll(3)).for_each(|_| dice.mutate(&mut body));
        let sent = match dice.roll(20) {
            0 => String::from_utf8_lossy(&dice.line(body)).into_owned(),
            _ => body.to_string(),
        };
        let (status, said) = http.post_text(&server.url, sent.clone());
        match status {
            200 => answered += 1,
            // An answer that ends at once is the model's doing, not a bad request.
            _ => {
                refused += 1;
                let error: Value =
                    serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {sent}: {said}"));
                let message = error["error"]["message"].as_str().unwrap_or_else(|| panic!("{sent}: {said}"));
                assert!((400..500).contains(&status) && message.len() > 10, "{status}: {sent}: {said}");
                assert!(!message.contains("Some(") && !message.contains("usize"), "{sent}: {said}");
            }
        }
    }
    assert!(answered > 50 && refused > 100, "{answered} answered, {refused} refused");
    // The slot of the last answer is released after the answer is sent.
    let is_idle = |_| http.get(&format!("{}/health", server.url))["running"] == 0;
    assert!((0..1000).any(is_idle), "a request that is over keeps its slot");
}

#[test]
fn damaged_answers_are_kept_or_failed() {
    let dir = tempfile::tempdir().unwrap();
    let data: Vec<String> = (0..600).map(|id| question(id, &format!("question {id}"))).collect();
    let input = lines(dir.path(), "in.jsonl", &data);
    let server = Mock::start(|ask| {
        let mut answer = json!({"error": null, "choices": [{"index": 0, "message": {"role": "assistant", "content": ANSWER, "tool_calls": null}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 3}});
        let mut dice =
            Fuzzer::new(ask.number as u64, &["content", "abort", "length", "message", "finish_reason", "x"]);
        if dice.roll(3) == 0 {
            (0..=dice.roll(2)).for_each(|_| dice.mutate(&mut answer));
        }
        Reply::Json(answer)
    });
    let output = dir.path().join("out.jsonl");
    let ended = regenerate(
        &input,
        &output,
        &["--max-attempts", "1", "--concurrency", "4", "--server", &server.url()],
    );
    assert!(matches!(ended.code, Some(0 | 1)), "{ended:?}");
    let (ok, failed) = (by_id(&output), by_id(&dir.path().join("out_error.jsonl")));
    assert_eq!(ok.len() + failed.len(), data.len(), "{ended:?}");
    assert!(failed.len() > 20, "{}", failed.len());
    assert!(ok.keys().all(|id| !failed.contains_key(id)));
    for row in ok.values() {
        let messages = deepspec_text::parse_messages(row).unwrap();
        assert!(messages.last().is_some_and(|last| !last.is_empty()), "{row:?}");
    }
    assert!(failed.values().all(|row| row["error"].as_str().unwrap().len() > 10), "{failed:?}");
}

#[test]
fn damaged_mixes_are_read_or_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let data = text(&lines(
        dir.path(),
        "data.jsonl",
        &(0..20).map(|id| question(id, &format!("question {id}"))).collect::<Vec<_>>(),
    ));
    let sound = format!(
        "sources:\n  - {{name: a, dataset: {data}, weight: 1, roles: {{bot: assistant}}}}\n  - {{name: b, dataset: {data}, weight: 2}}\n"
    );
    let whole = json!({"sources": [{"name": "a", "dataset": data, "weight": 1, "roles": {"bot": "assistant"}, "split": null}, {"name": "b", "dataset": data, "weight": 2.5}]});
    let path = dir.path().join("mix.yaml");
    let mut refused = 0;
    for seed in 0..60 {
        let mut dice =
            Fuzzer::new(seed, &["name", "dataset", "weight", "roles", "sources", "user", "nosuch"]);
        let text = match seed % 2 {
            0 => dice.file(sound.as_bytes()),
            _ => {
                let mut mix = whole.clone();
                (0..=dice.roll(2)).for_each(|_| dice.mutate(&mut mix));
                mix.to_string().into_bytes()
            }
        };
        fs::write(&path, text).unwrap();
        let ended = split(&path, &["--overwrite", "--quiet"]);
        assert!(matches!(ended.code, Some(0..=2)), "seed {seed}: {ended:?}");
        assert!(
            !ended.stderr.contains("panicked") && !ended.stderr.contains("Some("),
            "seed {seed}: {ended:?}"
        );
        if ended.code == Some(2) {
            refused += 1;
            ended.fails_with(2, &[]);
        }
    }
    assert!(refused > 20, "{refused}");
}

#[test]
fn inputs_without_rows_are_refused_by_every_command() {
    let dir = tempfile::tempdir().unwrap();
    let empty = lines(dir.path(), "empty.jsonl", &[]);
    let output = dir.path().join("out.jsonl");
    regenerate(&empty, &output, &["--server", "http://127.0.0.1:9"])
        .fails_with(2, &["empty.jsonl", "no rows"]);
}
