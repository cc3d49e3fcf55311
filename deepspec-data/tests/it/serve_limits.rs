//! The requests that `serve` refuses, and how it shuts down.

use std::fs;
use std::path::Path;
use std::time::Duration;

use futures::StreamExt;
use serde_json::{Value, json};

use crate::http::{Http, ask};
use crate::process::{Server, run, tiny, wait_for};

#[test]
fn bad_requests_are_explained() {
    let (server, http) = (Server::start(&["--max-model-len", "64"]), Http::new());
    let with = |field: &str, value: Value| {
        let mut body = ask("Hello?", 4);
        body[field] = value;
        body.to_string()
    };
    let long = ask(&"postcards ".repeat(100), 4).to_string();
    let cases = [
        ("{".to_string(), 400, Value::Null, "not valid JSON"),
        (json!({"model": "tiny"}).to_string(), 400, json!("body"), "missing field `messages`"),
        (with("model", json!("gpt-4")), 404, json!("model"), "`gpt-4` does not exist"),
        (with("messages", json!("hi")), 400, json!("messages"), "expected a list"),
        (
            with("messages", json!([{"role": "user", "content": 3}])),
            400,
            json!("messages[0]"),
            "`content` must be a string",
        ),
        (with("temperature", json!("hot")), 400, json!("temperature"), "invalid type"),
        (with("temperature", json!(-1)), 400, json!("temperature"), "not between 0 and 2"),
        (with("n", json!(2)), 400, json!("n"), "only 1"),
        (with("stop", json!(vec!["x"; 17])), 400, json!("stop"), "at most 16"),
        (with("max_tokens", json!(0)), 400, json!("max_tokens"), "at least 1"),
        (long, 400, json!("messages"), "the context holds 64"),
    ];
    for (body, status, param, words) in cases {
        let (found, text) = http.post_text(&server.url, body.clone());
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((found, &error["error"]["param"]), (status, &param), "{body}: {text}");
        assert!(error["error"]["message"].as_str().unwrap().contains(words), "{body}: {text}");
        assert_eq!(error["error"]["type"], "invalid_request_error");
    }
    // The token limit is cut to the remaining context.
    let mut endless = ask("Hello?", 1_000_000);
    endless["ignore_eos"] = json!(true);
    let cut = http.complete(&server.url, &endless);
    assert_eq!(
        (&cut["usage"]["total_tokens"], &cut["choices"][0]["finish_reason"]),
        (&json!(64), &json!("length"))
    );
    assert_eq!(http.get(&format!("{}/nowhere", server.url))["error"]["type"], "invalid_request_error");
}

#[test]
fn an_abandoned_request_frees_its_slot() {
    let (server, http) = (Server::start(&["--max-num-seqs", "1"]), Http::new());
    let mut endless = ask("Hello?", 2000);
    (endless["ignore_eos"], endless["stream"]) = (json!(true), json!(true));
    let url = format!("{}/v1/chat/completions", server.url);
    http.runtime.block_on(async {
        let response = http.client.post(&url).json(&endless).send().await.unwrap();
        response.bytes_stream().next().await.unwrap().unwrap();
    });
    let free = || {
        let health = http.get(&format!("{}/health", server.url));
        (health["running"] == 0).then(|| health["generated_tokens"].as_u64().unwrap())
    };
    assert!(wait_for("a free slot", free) < 1500);

    // Without streaming, for a client that times out.
    endless["stream"] = json!(false);
    let impatient = http.client.post(&url).json(&endless).timeout(Duration::from_millis(100));
    assert!(http.runtime.block_on(async { impatient.send().await }).unwrap_err().is_timeout());
    assert!(wait_for("a free slot", free) < 3000);
    assert_eq!(http.complete(&server.url, &ask("Hello?", 3))["usage"]["completion_tokens"], 3);
}

#[test]
fn running_answers_finish_before_the_server_does() {
    let (server, http) = (Server::start(&[]), Http::new());
    let mut long = ask("Hello?", 100);
    (long["ignore_eos"], long["stream"]) = (json!(true), json!(true));
    let url = format!("{}/v1/chat/completions", server.url);
    let text = http.runtime.block_on(async {
        let mut pieces = http.client.post(&url).json(&long).send().await.unwrap().bytes_stream();
        let mut text = pieces.next().await.unwrap().unwrap().to_vec();
        server.process.signal("TERM");
        while let Some(piece) = pieces.next().await {
            text.extend(piece.unwrap());
        }
        String::from_utf8(text).unwrap()
    });
    assert!(
        text.contains("\"finish_reason\":\"length\"") && text.trim_end().ends_with("data: [DONE]"),
        "{text}"
    );
    let ended = server.process.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
}

#[test]
fn what_cannot_be_served_is_one_line() {
    let server = Server::start(&[]);
    let port = server.url.rsplit(':').next().unwrap();
    let tiny = tiny();
    run(&["serve", "--model", &tiny, "--device", "cpu", "--port", port])
        .fails_with(1, &["cannot listen on", port, "in use"]);
    run(&["serve", "--model", "/nowhere", "--port", "0"]).fails_with(2, &["/nowhere", "does not exist"]);
    run(&["serve", "--model", &tiny, "--draft", "/nowhere", "--port", "0"]).fails_with(2, &["/nowhere"]);
    run(&["serve", "--model", &tiny, "--device", "abacus", "--port", "0"]).fails_with(2, &["abacus"]);
    let empty = tempfile::tempdir().unwrap();
    run(&["serve", "--model", &empty.path().to_string_lossy(), "--port", "0"]).fails_with(1, &["tokenizer"]);
}

#[test]
fn a_language_model_of_other_tokens_does_not_draft() {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in deepspec_testkit::folder::files(Path::new(&tiny())) {
        let bytes = if name == "tokenizer.json" { with_swapped_tokens(&bytes) } else { bytes };
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    let draft = dir.path().to_string_lossy();
    let told = run(&["serve", "--model", &tiny(), "--draft", &draft, "--port", "0"]);
    told.fails_with(2, &[&draft, "token 300 is", "the target's is", "its own tokenizer"]);
}

/// The tokenizer with the ids of two tokens swapped: the number of tokens is equal, and most ids
/// are unchanged.
fn with_swapped_tokens(tokenizer: &[u8]) -> Vec<u8> {
    let mut tokenizer: Value = serde_json::from_slice(tokenizer).unwrap();
    for id in tokenizer["model"]["vocab"].as_object_mut().unwrap().values_mut() {
        *id = match id.as_i64() {
            Some(300) => 301.into(),
            Some(301) => 300.into(),
            _ => continue,
        };
    }
    tokenizer.to_string().into_bytes()
}
