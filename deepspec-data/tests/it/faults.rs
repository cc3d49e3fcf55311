//! `regenerate` against servers that misbehave.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use crate::http::{Fake, completion, error};
use crate::process::{Running, command, lines, rows, wait_for};
use crate::regenerate::{answers, arguments, by_id, question, regenerate};

#[test]
fn only_what_was_given_is_sent() {
    let dir = tempfile::tempdir().unwrap();
    let input = lines(dir.path(), "in.jsonl", &[question(1, "Hello?")]);
    let fake = Fake::start(async |_, _| completion(json!({"content": "yes", "reasoning": "hm"})));
    let server = ["--server", fake.url.as_str()];
    assert_eq!(regenerate(&input, &dir.path().join("a.jsonl"), &server).code, Some(0));
    let full = [
        "--temperature",
        "0.7",
        "--top-p",
        "0.8",
        "--top-k",
        "20",
        "--min-p",
        "0",
        "--seed",
        "1",
        "--disable-thinking",
    ];
    assert_eq!(regenerate(&input, &dir.path().join("b.jsonl"), &[&full[..], &server].concat()).code, Some(0));
    let bodies = fake.bodies.lock().unwrap();
    let messages = json!([{"role": "user", "content": "Hello?"}]);
    assert_eq!(
        bodies[0],
        json!({"model": "tiny", "max_tokens": 4096, "messages": messages, "chat_template_kwargs": {"enable_thinking": false},
            "return_token_ids": true, "return_tokens": true, "verbose": true}),
        "without a flag the model does not think"
    );
    let seed = &bodies[1]["seed"];
    assert!(seed.as_u64().unwrap() < 1 << 31);
    assert_eq!(
        bodies[1],
        json!({"model": "tiny", "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0, "max_tokens": 4096, "seed": seed,
            "chat_template_kwargs": {"enable_thinking": false}, "messages": messages,
            "return_token_ids": true, "return_tokens": true, "verbose": true})
    );
    assert_eq!(rows(&dir.path().join("a.jsonl"))[0]["conversations"][1]["reasoning_content"], "hm");
}

#[test]
fn passing_failures_pass_and_refusals_fail_the_row() {
    let dir = tempfile::tempdir().unwrap();
    let data: Vec<String> =
        ["busy", "broken", "garbage", "never", "refused"].iter().map(|id| question(*id, id)).collect();
    let input = lines(dir.path(), "in.jsonl", &data);
    let answer = async |number: usize, body: Value| match (body["messages"][0]["content"].as_str(), number) {
        (Some("never"), _) => error(503, "out of order"),
        (Some("refused"), _) => error(422, "Unexpected fields"),
        (Some("busy"), 0..5) => error(429, "too many"),
        (Some("broken"), 0..5) => error(500, "oops"),
        (Some("garbage"), 0..5) => axum::response::IntoResponse::into_response("<html>"),
        _ => completion(json!({"content": "yes"})),
    };
    let fakes = [Fake::start(answer), Fake::start(answer)];
    let output = dir.path().join("out.jsonl");
    let ended = regenerate(&input, &output, &["--server", &fakes[0].url, "--server", &fakes[1].url]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(ended.stdout, "5 rows = 3 ok + 2 failed + 0 pending; 0 malformed lines\n");
    assert!(by_id(&output).values().all(|row| answers(row) == ["yes"]));
    let failed = by_id(&dir.path().join("out_error.jsonl"));
    let problem = |id: &str| failed[id]["error"].as_str().unwrap();
    assert!(problem("\"never\"").contains("HTTP 503: out of order"), "{failed:?}");
    assert!(problem("\"refused\"").contains("HTTP 422: Unexpected fields"), "{failed:?}");
    let asked = fakes.each_ref().map(|fake| fake.bodies.lock().unwrap().len());
    assert!(asked.iter().all(|&asked| asked > 0), "both servers are asked: {asked:?}");
}

#[test]
fn what_would_fail_every_row_ends_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let input = lines(dir.path(), "in.jsonl", &[question(1, "Hello?"), question(2, "Hello?")]);
    let output = dir.path().join("out.jsonl");
    let fake = Fake::start(async |_, _| error(404, "the model `tiny` does not exist"));
    let ended = regenerate(&input, &output, &["--server", &fake.url]);
    ended.fails_with(1, &[&fake.url, "404", "the model `tiny` does not exist"]);
    assert_eq!(ended.stdout, "2 rows = 0 ok + 0 failed + 2 pending; 0 malformed lines\n");

    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let nobody = format!("http://127.0.0.1:{port}");
    let ended = regenerate(&input, &output, &["--server", &nobody]);
    ended.fails_with(1, &["server down", &nobody, "refused"]);
    assert_eq!(ended.stdout, "2 rows = 0 ok + 0 failed + 2 pending; 0 malformed lines\n");

    // One reachable server of two is enough.
    let fake = Fake::start(async |_, _| completion(json!({"content": "yes"})));
    let ended = regenerate(&input, &output, &["--server", &nobody, &fake.url]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("server down") && ended.stderr.contains(&nobody), "{ended:?}");
    assert_eq!(by_id(&output).len(), 2);
}

#[test]
fn a_signal_stops_cleanly_and_a_second_run_keeps_off() {
    let dir = tempfile::tempdir().unwrap();
    let data: Vec<String> = (0..4).map(|id| question(id, "Hello?")).collect();
    let input = lines(dir.path(), "in.jsonl", &data);
    let output = dir.path().join("out.jsonl");
    let hangs = Arc::new(AtomicBool::new(true));
    let hanging = Arc::clone(&hangs);
    let fake = Fake::start(move |number, _| {
        let hangs = number >= 2 && hanging.load(Ordering::SeqCst);
        async move {
            if hangs {
                std::future::pending::<()>().await;
            }
            completion(json!({"content": "yes"}))
        }
    });
    let args = arguments(&input, &output, &["--server", &fake.url]);
    let first = Running::start(command(&args));
    wait_for("two answers", || {
        std::fs::read_to_string(&output).ok().filter(|text| text.lines().count() == 2)
    });
    crate::process::run(&args).fails_with(1, &["out.jsonl", "written by another run"]);
    first.signal("INT");
    let ended = first.end();
    assert_eq!(ended.code, Some(75), "{ended:?}");
    assert_eq!(ended.stdout, "4 rows = 2 ok + 0 failed + 2 pending; 0 malformed lines\n");
    assert!(ended.stderr.contains("2 rows pending"), "{ended:?}");
    hangs.store(false, Ordering::SeqCst);
    assert_eq!(crate::process::run(&args).code, Some(0));
    assert_eq!(by_id(&output).len(), 4);
}
