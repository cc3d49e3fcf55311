//! `load` against servers that stream in various ways.

mod common;

use std::fs::{self, File};
use std::path::Path;

use arrow_array::cast::AsArray;
use arrow_array::types::UInt64Type;
use common::deepspec_eval;
use deepspec_testkit::server::{Reply, Server};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Value, json};

fn event(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// An event with a piece of text.
fn piece(text: &str) -> String {
    event(&json!({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": null}]}))
}

fn ended(word: &str) -> String {
    event(&json!({"choices": [{"index": 0, "delta": {}, "finish_reason": word}]}))
}

fn usage(completion: u64) -> Value {
    json!({"prompt_tokens": 5, "completion_tokens": completion, "total_tokens": 5 + completion})
}

fn used() -> String {
    event(&json!({"choices": [], "usage": usage(9)}))
}

const DONE: &str = "data: [DONE]\n\n";

/// A response that lasts until the connection is closed.
fn streamed(body: &str) -> Reply {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
    Reply::Garbage(Box::leak(format!("{head}{body}").into_bytes().into_boxed_slice()))
}

/// Exit code, the run in load.json, and standard error.
struct Told {
    code: Option<i32>,
    run: Value,
    stderr: String,
    /// Tokens per answer.
    tokens: Vec<u64>,
}

fn load(server: &Server, dir: &Path) -> Told {
    let suite = dir.join("asked.jsonl");
    fs::write(&suite, "{\"id\": \"a\", \"turns\": [\"What is 2 + 2?\"]}\n").unwrap();
    let out = dir.join("out");
    let [suite, out] = [suite, out].map(|path| path.display().to_string());
    let args = [
        "load",
        "--server",
        &server.url(),
        "--model",
        "m",
        "--suite",
        &suite,
        "--output-dir",
        &out,
        "--overwrite",
    ];
    let output =
        deepspec_eval(&[&args[..], &["--concurrency", "1", "--seconds", "0.3", "--warm-up", "0"]].concat());
    let out = Path::new(&out);
    let run = fs::read(out.join("load.json"))
        .map_or(Value::Null, |text| serde_json::from_slice::<Value>(&text).unwrap()["runs"][0].clone());
    let tokens = File::open(out.join("requests.parquet")).map_or(vec![], |file| {
        let batches = ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap();
        let column = |batch: arrow_array::RecordBatch| {
            batch.column_by_name("completion_tokens").unwrap().as_primitive::<UInt64Type>().values().to_vec()
        };
        batches.flat_map(|batch| column(batch.unwrap())).collect()
    });
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(!stderr.contains("panicked"), "{stderr}");
    Told { code: output.status.code(), run, stderr, tokens }
}

/// A load test of a server that always streams this body.
fn load_of(body: &str) -> Told {
    let dir = tempfile::tempdir().unwrap();
    let body = body.to_owned();
    load(&Server::start(move |_| streamed(&body)), dir.path())
}

#[test]
fn streams_of_every_kind_are_read() {
    let with_null = |mut chunk: Value| {
        chunk["error"] = Value::Null;
        event(&chunk)
    };
    let counting = |text: &str, so_far: u64| {
        event(
            &json!({"choices": [{"delta": {"content": text}, "finish_reason": null}], "usage": usage(so_far)}),
        )
    };
    let delta =
        |delta: Value| event(&json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]}));
    // A name, the stream, and the answer's number of tokens.
    let streams = [
        ("plain", piece("a") + &piece("b") + &ended("stop") + &used() + DONE, 9),
        (
            "empty data lines",
            piece("a") + "data:\n\ndata: \n\n" + &piece("b") + &ended("stop") + &used() + DONE,
            9,
        ),
        (
            "comments and other fields",
            ": ping\n\nevent: x\nid: 3\nretry: 5\n".to_owned()
                + &piece("a")
                + &ended("stop")
                + &used()
                + DONE,
            9,
        ),
        (
            "returns before line feeds",
            (piece("a") + &ended("stop") + &used() + DONE).replace('\n', "\r\n"),
            9,
        ),
        ("returns alone", (piece("a") + &ended("stop") + &used() + DONE).replace('\n', "\r"), 9),
        (
            "no blank behind the colon",
            (piece("a") + &ended("stop") + &used() + DONE).replace("data: ", "data:"),
            9,
        ),
        (
            "an event in two lines",
            "data: {\"choices\": [{\"delta\":\ndata: {\"content\": \"a\"}}]}\n\n".to_owned()
                + &ended("stop")
                + &used()
                + DONE,
            9,
        ),
        (
            "errors that are null",
            with_null(json!({"choices": [{"delta": {"content": "a"}, "finish_reason": null}]}))
                + &with_null(json!({"choices": [{"delta": {}, "finish_reason": "stop"}]}))
                + &used()
                + DONE,
            9,
        ),
        (
            "usage in each chunk",
            counting("a", 1)
                + &counting("b", 2)
                + &ended("stop")
                + &event(&json!({"choices": [], "usage": usage(3)}))
                + DONE,
            3,
        ),
        (
            "usage that is null",
            event(&json!({"choices": [{"delta": {"content": "a"}}], "usage": null}))
                + &ended("stop")
                + &used()
                + DONE,
            9,
        ),
        ("a last line without a break", piece("a") + &ended("stop") + used().trim_end(), 9),
        ("no mark behind the end", piece("a") + &ended("stop") + &used(), 9),
        ("no reason before the mark", piece("a") + &used() + DONE, 9),
        ("cut at the limit", piece("a") + &ended("length") + &used() + DONE, 9),
        (
            "thoughts alone",
            delta(json!({"reasoning_content": "hm"}))
                + &delta(json!({"reasoning": "hm", "content": null}))
                + &ended("length")
                + &used()
                + DONE,
            9,
        ),
        (
            "calls alone",
            delta(json!({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}))
                + &ended("tool_calls")
                + &used()
                + DONE,
            9,
        ),
        (
            "llama.cpp's counts",
            piece("a")
                + &event(
                    &json!({"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": {"prompt_n": 5, "predicted_n": 7}}),
                )
                + DONE,
            7,
        ),
    ];
    for (what, stream, tokens) in streams {
        let told = load_of(&stream);
        assert_eq!((told.code, &told.run["failed"]), (Some(0), &json!(0)), "{what}: {}", told.stderr);
        assert!(
            !told.tokens.is_empty() && told.tokens.iter().all(|&found| found == tokens),
            "{what}: {:?}",
            told.tokens
        );
        assert_eq!(told.run["tokens_are_pieces"], 0, "{what}");
    }
}

#[test]
fn tokens_that_nobody_counted_are_pieces_of_text_and_it_is_said() {
    let text = piece("a") + &piece("b") + &piece("c") + &ended("stop");
    for uncounted in [
        String::new(),
        event(&json!({"choices": [], "usage": {}})),
        event(&json!({"choices": [], "usage": usage(0)})),
    ] {
        let told = load_of(&(text.clone() + &uncounted + DONE));
        assert_eq!(told.code, Some(0), "{}", told.stderr);
        assert!(told.tokens.iter().all(|&tokens| tokens == 3), "{:?}", told.tokens);
        assert_eq!(told.run["tokens_are_pieces"], told.run["requests"]);
        assert!(
            told.stderr.lines().any(|line| line.contains("WARN") && line.contains("without token counts")),
            "{}",
            told.stderr
        );
    }
}

#[test]
fn broken_answers_fail_with_their_reasons() {
    let reset = |_| Reply::Reset;
    let torn = |_| Reply::Truncated(json!({"choices": []}));
    let body = |body: String| move |_| streamed(&body);
    let refusing = |_| Reply::Status(500, vec![], "out of memory".into());
    let cases: Vec<(Server, &str)> = vec![
        (
            Server::start(body(piece("a") + &ended("abort") + &used() + DONE)),
            "broken off (finish_reason abort)",
        ),
        (
            Server::start(body(piece("a") + &ended("error") + &used() + DONE)),
            "broken off (finish_reason error)",
        ),
        (Server::start(body(piece("a") + &piece("b"))), "ended before the answer did"),
        (Server::start(body(String::new())), "ended before the answer did"),
        (
            Server::start(body(piece("a") + &event(&json!({"error": {"message": "the engine died"}})))),
            "the engine died",
        ),
        (Server::start(body(piece("a") + "data: {\"choices\": [\n\n" + DONE)), "no JSON"),
        (Server::start(refusing), "500 Internal Server Error: out of memory"),
        (Server::start(torn), ""),
        (Server::start(reset), ""),
    ];
    for (server, reason) in cases {
        let dir = tempfile::tempdir().unwrap();
        let told = load(&server, dir.path());
        assert_eq!(told.code, Some(1), "{reason}: {}", told.stderr);
        assert!(told.stderr.contains(reason), "{reason}: {}", told.stderr);
        assert_eq!(told.stderr.lines().filter(|line| line.contains("ERROR")).count(), 1, "{}", told.stderr);
    }
}

#[test]
fn more_than_a_few_failures_are_an_exit_code() {
    let whole = piece("a") + &ended("stop") + &used() + DONE;
    let failing = |every: usize| {
        let (whole, broken) = (whole.clone(), piece("a"));
        Server::start(move |ask| streamed(if ask.number % every == 1 { &broken } else { &whole }))
    };
    let dir = tempfile::tempdir().unwrap();
    let told = load(&failing(2), dir.path());
    assert_eq!(told.code, Some(1), "{}", told.stderr);
    let requests = told.run["requests"].as_u64().unwrap();
    let failed = told.run["failed"].as_u64().unwrap();
    assert!(told.stderr.contains(&format!("{failed} of {requests} requests failed")), "{}", told.stderr);
    assert!(told.stderr.contains("neither finish_reason nor [DONE] came"), "{}", told.stderr);
    let reasons = told.run["problems"].as_object().unwrap();
    assert_eq!(reasons.values().map(|count| count.as_u64().unwrap()).sum::<u64>(), failed);
    // A request that never returns is reported only in the statistics.
    let told = load(&failing(usize::MAX), dir.path());
    let requests = told.run["requests"].as_u64().unwrap();
    let expected = if requests >= 20 { 0 } else { 1 };
    assert_eq!((told.code, &told.run["failed"]), (Some(expected), &json!(1)), "{}", told.stderr);
}
