//! `regenerate` with all its options: tools, samples, overrides, fields that servers refuse,
//! earlier answers, dry runs, https.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};

use deepspec_testkit::mutate::Fuzzer;
use deepspec_testkit::server::{Reply, Server};
use serde_json::{Value, json};

use crate::https::Https;
use crate::process::{Ended, command, lines, rows, run};
use crate::regenerate::{answers, arguments, by_id, question, regenerate};

/// An answer with this finish reason.
fn answer(content: &str, finish: &str) -> Value {
    json!({
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3},
    })
}

/// A server that records the bodies of requests.
fn recording(reply: impl Fn(&Value) -> Reply + Send + Sync + 'static) -> (Server, Arc<Mutex<Vec<Value>>>) {
    let bodies: Arc<Mutex<Vec<Value>>> = Arc::default();
    let seen = Arc::clone(&bodies);
    let server = Server::start(move |ask| {
        let reply = reply(&ask.body);
        seen.lock().unwrap().push(ask.body);
        reply
    });
    (server, bodies)
}

fn report(output: &Path) -> Value {
    let name = format!("{}.report.json", output.file_name().unwrap().to_string_lossy());
    serde_json::from_slice(&fs::read(output.with_file_name(name)).unwrap()).unwrap()
}

#[test]
fn recorded_tool_calls_are_spliced_and_new_ones_kept() {
    let dir = tempfile::tempdir().unwrap();
    let tools = json!([{"type": "function", "function": {"name": "add"}}]);
    let call = json!({"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]});
    let row = |id: u64, tools: &Value| {
        json!({"id": id, "tools": tools, "conversations": [
            {"role": "system", "content": "s"}, {"role": "user", "content": "1+2?"}, call,
            {"role": "tool", "content": "3", "tool_call_id": "c1"}, {"role": "assistant", "content": "old"},
            {"role": "user", "content": "thanks"}, {"role": "assistant", "content": "old"}]})
        .to_string()
    };
    let input = lines(dir.path(), "in.jsonl", &[row(1, &tools), row(2, &json!(tools.to_string()))]);
    let (server, bodies) = recording(|body| {
        let last = body["messages"].as_array().unwrap().last().unwrap();
        Reply::Json(if last["content"] == "thanks" {
            json!({"choices": [{"message": {"content": null, "tool_calls": [{"id": "n", "function": {"name": "add", "arguments": "{}"}}]}, "finish_reason": "tool_calls"}]})
        } else {
            answer("3, of course", "stop")
        })
    });
    let output = dir.path().join("out.jsonl");
    assert_eq!(regenerate(&input, &output, &["--server", &server.url()]).code, Some(0));
    let found = by_id(&output);
    for row in found.values() {
        let said = row["conversations"].as_array().unwrap();
        let roles: Vec<&str> = said.iter().map(|message| message["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]);
        assert_eq!((&said[2], &said[4]["content"]), (&call, &json!("3, of course")));
        assert_eq!(
            (&said[6]["tool_calls"][0]["id"], &row["finish_reason"]),
            (&json!("n"), &json!("tool_calls"))
        );
    }
    let bodies = bodies.lock().unwrap();
    assert_eq!(bodies.len(), 4, "one answer behind the tool's result and one to the thanks");
    assert!(bodies.iter().all(|body| body["tools"] == tools), "{bodies:?}");
}

#[test]
fn samples_overrides_and_cut_answers() {
    let dir = tempfile::tempdir().unwrap();
    let mut own = serde_json::from_str::<Value>(&question("own", "Hello?")).unwrap();
    own["sampling"] = json!({"temperature": 0.25, "max_tokens": 5, "enable_thinking": true});
    let bad = question("bad", "Hello?").replacen('{', "{\"sampling\": {\"temp\": 1},", 1);
    let input = lines(dir.path(), "in.jsonl", &[question(1, "Hello?"), own.to_string(), bad]);
    let (server, bodies) = recording(|body| {
        Reply::Json(if body["max_tokens"] == 5 { answer("cut", "length") } else { answer("whole", "stop") })
    });
    let output = dir.path().join("out.jsonl");
    let more = ["--samples", "2", "--temperature", "1", "--seed", "3", "--server", &server.url()];
    let ended = regenerate(&input, &output, &more);
    assert_eq!(ended.stdout, "4 rows = 4 ok + 0 failed + 0 pending; 1 malformed lines\n");
    assert!(ended.stderr.contains("in.jsonl:3: `sampling.temp` is unknown"), "{ended:?}");
    let found = by_id(&output);
    assert_eq!(found.keys().collect::<Vec<_>>(), ["\"1#0\"", "\"1#1\"", "\"own#0\"", "\"own#1\""]);
    let row = &found["\"own#1\""];
    assert_eq!(
        (&row["prompt_id"], &row["sample"], &row["finish_reason"], &row["conversations"][1]["finish_reason"]),
        (&json!("own"), &json!(1), &json!("length"), &json!("length"))
    );
    let bodies = bodies.lock().unwrap();
    let seeds: std::collections::BTreeSet<u64> =
        bodies.iter().map(|body| body["seed"].as_u64().unwrap()).collect();
    assert_eq!(seeds.len(), 4, "every sample has a seed of its own");
    let own = bodies.iter().find(|body| body["max_tokens"] == 5).unwrap();
    assert_eq!(
        (&own["temperature"], &own["chat_template_kwargs"]),
        (&json!(0.25), &json!({"enable_thinking": true}))
    );
    let report = report(&output);
    assert_eq!(
        (&report["rows"]["cut"], &report["rows"]["finish_reasons"]),
        (&json!(2), &json!({"length": 2, "stop": 2}))
    );
    assert_eq!(report["this_run"]["completion_tokens"], 12);
    assert_eq!(report["this_run"]["servers"][0]["answered"], 4);
    // A second run sends no requests, and truncated answers are still counted.
    assert_eq!(regenerate(&input, &output, &more).stdout, ended.stdout);
    assert_eq!(self::report(&output)["rows"]["cut"], 2);
}

#[test]
fn thoughts_are_dropped_on_demand() {
    let dir = tempfile::tempdir().unwrap();
    let input = lines(dir.path(), "in.jsonl", &[question(1, "Hello?")]);
    let server = Server::start(|_| {
        Reply::Json(
            json!({"choices": [{"message": {"content": "<think>\nhm\n</think>\n\nyes"}, "finish_reason": "stop"}]}),
        )
    });
    let output = dir.path().join("out.jsonl");
    let url = server.url();
    assert_eq!(regenerate(&input, &output, &["--reasoning", "drop", "--server", &url]).code, Some(0));
    let message = &rows(&output)[0]["conversations"][1];
    assert_eq!(message, &json!({"role": "assistant", "content": "yes", "finish_reason": "stop"}));
    let ended = regenerate(&input, &output, &["--reasoning", "keep", "--server", &url]);
    ended.fails_with(2, &["other settings (reasoning)"]);
}

#[test]
fn a_refused_extension_is_dropped_with_one_warning_and_a_refused_switch_ends_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let data: Vec<String> = (0..20).map(|id| question(id, "Hello?")).collect();
    let input = lines(dir.path(), "in.jsonl", &data);
    let refuse = |field: &'static str, words: &'static str| {
        move |body: &Value| match body.get(field) {
            Some(_) => Reply::Status(422, vec![], json!({"detail": words}).to_string()),
            None => Reply::Json(answer("yes", "stop")),
        }
    };
    let (strict, _) = recording(refuse("top_k", "Unexpected fields in the request: {'top_k'}"));
    let (mute, _) = recording(refuse("min_p", "bad request"));
    let (easy, bodies) = recording(|_| Reply::Json(answer("yes", "stop")));
    let output = dir.path().join("out.jsonl");
    let urls = [strict.url(), mute.url(), easy.url()];
    let mut more = vec!["--top-k", "5", "--min-p", "0.1", "--concurrency", "2"];
    more.extend(urls.iter().flat_map(|url| ["--server", url]));
    let ended = regenerate(&input, &output, &more);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let warnings: Vec<&str> = ended.stderr.lines().filter(|line| line.contains("refuses")).collect();
    assert_eq!(warnings.len(), 2, "{ended:?}");
    assert!(warnings.iter().any(|line| line.contains(&urls[0]) && line.contains("top_k")), "{warnings:?}");
    assert!(bodies.lock().unwrap().iter().all(|body| body["top_k"] == 5), "others still get the field");
    let servers = &report(&output)["this_run"]["servers"];
    assert_eq!(servers[0]["dropped_fields"], json!(["top_k"]));
    assert_eq!(servers[2]["dropped_fields"], json!([]));

    let (old, _) = recording(refuse("chat_template_kwargs", "unknown field chat_template_kwargs"));
    let other = dir.path().join("other.jsonl");
    let ended = regenerate(&input, &other, &["--disable-thinking", "--server", &old.url()]);
    ended.fails_with(1, &[&old.url(), "refuses the thinking switch", "silently"]);
    assert!(ended.stdout.contains("0 ok + 0 failed + 20 pending"), "{ended:?}");
}

#[test]
fn a_server_that_asks_for_time_gets_it_and_costs_no_attempt() {
    let dir = tempfile::tempdir().unwrap();
    let data: Vec<String> = (0..6).map(|id| question(id, "Hello?")).collect();
    let input = lines(dir.path(), "in.jsonl", &data);
    let limited = Server::start(|ask| match ask.number % 4 {
        0 => Reply::Json(answer("yes", "stop")),
        _ => Reply::Status(429, vec![("retry-after", "0.01".into())], "slow down".into()),
    });
    let output = dir.path().join("out.jsonl");
    let ended = regenerate(&input, &output, &["--max-attempts", "1", "--server", &limited.url()]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let failures = &report(&output)["this_run"]["servers"][0]["failures"];
    assert_eq!(failures.as_object().unwrap().keys().collect::<Vec<_>>(), ["rate_limited"]);
}

#[test]
fn nobody_is_sent_away_while_an_answer_may_still_come() {
    // The server fails during a long answer, and asks for a longer pause than the client accepts.
    let dir = tempfile::tempdir().unwrap();
    let data: Vec<String> = (0..8).map(|id| question(id, &format!("question {id}"))).collect();
    let input = lines(dir.path(), "in.jsonl", &data);
    let server = Server::start(|ask| match ask.number {
        0 => Reply::Later(std::time::Duration::from_secs(4), answer("late", "stop")),
        1..7 => Reply::Status(500, vec![], "oops".into()),
        7 => Reply::Status(429, vec![("retry-after", "3".into())], "slow down".into()),
        _ => Reply::Json(answer("yes", "stop")),
    });
    let output = dir.path().join("out.jsonl");
    let more = ["--server-wait", "1", "--max-attempts", "9", "--concurrency", "4", "--server", &server.url()];
    let ended = regenerate(&input, &output, &more);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(by_id(&output).len(), 8);
}

#[test]
fn a_refusal_that_repeats_the_request_is_about_the_row() {
    let dir = tempfile::tempdir().unwrap();
    let data: Vec<String> = (0..6).map(|id| question(id, if id == 3 { "odd" } else { "Hello?" })).collect();
    let input = lines(dir.path(), "in.jsonl", &data);
    let (server, bodies) = recording(|body| match body["messages"][0]["content"].as_str() {
        Some("odd") => {
            Reply::Status(422, vec![], json!({"detail": [{"msg": "odd message", "input": body}]}).to_string())
        }
        _ => Reply::Json(answer("yes", "stop")),
    });
    let output = dir.path().join("out.jsonl");
    let more = ["--top-k", "5", "--disable-thinking", "--concurrency", "1", "--server", &server.url()];
    let ended = regenerate(&input, &output, &more);
    assert_eq!(ended.stdout, "6 rows = 5 ok + 1 failed + 0 pending; 0 malformed lines\n", "{ended:?}");
    assert!(bodies.lock().unwrap().iter().all(|body| body["top_k"] == 5), "the field is still sent");
}

#[test]
fn a_run_without_servers_ends_when_patience_does() {
    let dir = tempfile::tempdir().unwrap();
    let data: Vec<String> = (0..200).map(|id| question(id, "Hello?")).collect();
    let input = lines(dir.path(), "in.jsonl", &data);
    let server = Server::start(|ask| match ask.number {
        0..20 => Reply::Json(answer("yes", "stop")),
        _ => Reply::Reset,
    });
    let output = dir.path().join("out.jsonl");
    let more =
        ["--max-attempts", "50", "--server-wait", "2", "--concurrency", "2", "--server", &server.url()];
    let ended = regenerate(&input, &output, &more);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(
        ended.stderr.contains("no server has answered for 2 s") && ended.stderr.contains(&server.url()),
        "{ended:?}"
    );
    assert_eq!(ended.stdout, "200 rows = 20 ok + 0 failed + 180 pending; 0 malformed lines\n");
}

#[test]
fn a_dry_run_asks_nothing_and_earlier_answers_are_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let few: Vec<String> = (0..3).map(|id| question(id, &format!("question {id}"))).collect();
    let (server, bodies) = recording(|_| Reply::Json(answer("yes", "stop")));
    let url = server.url();
    let (first, second) = (dir.path().join("first.jsonl"), dir.path().join("second.jsonl"));
    let more = ["--temperature", "0", "--server", &url];
    assert_eq!(regenerate(&lines(dir.path(), "few.jsonl", &few), &first, &more).code, Some(0));

    // One prompt has changed under its id, and one is new.
    let many_rows = [
        question(0, "question 0").replace("\"test\"", "\"new\""),
        question(1, "another"),
        question(2, "question 2"),
        question(3, "new"),
    ];
    let many = lines(dir.path(), "many.jsonl", &many_rows);
    let first_text = crate::process::text(&first);
    let reuse = [&more[..], &["--reuse", &first_text]].concat();
    let dry = regenerate(&many, &second, &[&reuse[..], &["--dry-run"]].concat());
    assert_eq!(dry.code, Some(0), "{dry:?}");
    assert!(
        dry.stdout.starts_with(
            "4 rows = 0 ok + 0 failed + 2 to take over + 2 to ask (2 requests); 0 malformed lines\n"
        ),
        "{dry:?}"
    );
    assert!(dry.stdout.contains("\"content\": \"another\""), "{dry:?}");
    assert!(!second.exists());
    assert_eq!(bodies.lock().unwrap().len(), 3);

    let ended = regenerate(&many, &second, &reuse);
    assert_eq!(ended.stdout, "4 rows = 4 ok + 0 failed + 0 pending; 0 malformed lines\n");
    assert_eq!(bodies.lock().unwrap().len(), 5);
    assert_eq!(report(&second)["this_run"]["rows_reused"], 2);
    assert_eq!(by_id(&second)["1"]["conversations"][0]["content"], "another");
    assert_eq!(by_id(&second)["0"]["source"], "new", "the row is the new one, its answers are the old ones");

    // An input file is never replaced, whatever path names it.
    let alias = dir.path().join(".").join("first.jsonl");
    let kept = fs::read(&first).unwrap();
    regenerate(&many, &alias, &[&reuse[..], &["--overwrite"]].concat()).fails_with(2, &["it would replace"]);
    regenerate(&alias, &first, &[&more[..], &["--overwrite"]].concat()).fails_with(2, &["it would replace"]);
    let errors = lines(dir.path(), "again_error.jsonl", &few);
    regenerate(&errors, &dir.path().join("again.jsonl"), &[&more[..], &["--overwrite"]].concat())
        .fails_with(2, &["it would replace", "again_error.jsonl"]);
    assert_eq!(fs::read(&first).unwrap(), kept);

    // Two workers share the rows, each with its own output; a duplicated row counts as two rows.
    let twice =
        lines(dir.path(), "twice.jsonl", &[&many_rows[..], &[question(4, "more")], &many_rows[..1]].concat());
    let (mut shared, mut shared_ids) = (vec![], vec![]);
    for worker in ["0/2", "1/2"] {
        let output = dir.path().join(format!("shared-{}.jsonl", &worker[..1]));
        let ended = regenerate(&twice, &output, &[&reuse[..], &["--worker", worker]].concat());
        shared.push(ended.code);
        shared_ids.extend(by_id(&output).into_keys());
        let alone = regenerate(&twice, &output, &reuse);
        assert!(alone.code == Some(2) && alone.stderr.contains("other settings (worker)"), "{alone:?}");
    }
    shared.sort();
    assert_eq!(shared, [Some(0), Some(0)]);
    shared_ids.sort();
    assert_eq!(shared_ids, ["\"0~2\"", "0", "1", "2", "3", "4"]);
    let none = regenerate(&twice, &dir.path().join("x.jsonl"), &[&more[..], &["--worker", "2/2"]].concat());
    assert!(none.code == Some(2) && none.stderr.contains("expected I/N with I from 0 to N-1"), "{none:?}");

    let hot = ["--temperature", "1", "--server", &url, "--reuse", &first_text];
    regenerate(&many, &dir.path().join("x.jsonl"), &hot)
        .fails_with(2, &["first.jsonl", "other settings (temperature)"]);
    regenerate(&many, &dir.path().join("x.jsonl"), &[&more[..], &["--reuse", "absent.jsonl"]].concat())
        .fails_with(2, &["absent.jsonl does not exist"]);
}

#[test]
fn ten_thousand_damaged_rows_are_answered_or_explained() {
    const ROWS: usize = 10_000;
    let seed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    eprintln!("seed {seed}");
    let words = [
        "role",
        "content",
        "conversations",
        "user",
        "assistant",
        "tool",
        "tool_calls",
        "tools",
        "sampling",
        "id",
    ];
    let mut dice = Fuzzer::new(seed, &words);
    let mut text = vec![];
    for id in 0..ROWS {
        let row = json!({"id": if dice.roll(20) == 0 { id / 2 } else { id }, "tools": [{"name": "f"}],
        "sampling": {"temperature": 0.5, "stop": ["x"]}, "conversations": [
            {"role": "system", "content": "s"}, {"role": "user", "content": "q"},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}]},
            {"role": "tool", "content": "r", "tool_call_id": "c"}, {"role": "assistant", "content": "a"}]});
        // A file that begins with an array is refused as a whole, so the first row stays as it is.
        text.extend(if id == 0 { row.to_string().into_bytes() } else { dice.line(row) });
        text.push(b'\n');
    }
    let dir = tempfile::tempdir().unwrap();
    let (input, output) = (dir.path().join("in.jsonl"), dir.path().join("out.jsonl"));
    fs::write(&input, text).unwrap();
    let server = Server::start(|_| Reply::Json(answer("yes", "stop")));
    let ended = regenerate(&input, &output, &["--server", &server.url()]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let (ok, rejected) = (by_id(&output), rows(&dir.path().join("out.jsonl.rejected.jsonl")));
    assert_eq!(ok.len() + rejected.len(), ROWS);
    assert!(ok.len() > ROWS / 10 && rejected.len() > ROWS / 10, "{} and {}", ok.len(), rejected.len());
    let mut last = 0;
    for reject in &rejected {
        assert_eq!(reject["file"], json!(input));
        let (line, reason) = (reject["line"].as_u64().unwrap(), reject["reason"].as_str().unwrap());
        assert!(line > last && line <= ROWS as u64 && reason.len() > 5, "{reject:?}");
        last = line;
    }
}

#[test]
fn compressed_inputs_and_keys_over_https() {
    let dir = tempfile::tempdir().unwrap();
    let heads: Arc<Mutex<Vec<String>>> = Arc::default();
    let seen = Arc::clone(&heads);
    let server = Https::start(move |head| {
        seen.lock().unwrap().push(head.to_lowercase());
        let body = answer("yes", "stop").to_string();
        let head = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
        (head + &body).into_bytes()
    });
    let input = dir.path().join("in.jsonl.gz");
    let mut gz =
        flate2::write::GzEncoder::new(fs::File::create(&input).unwrap(), flate2::Compression::fast());
    writeln!(gz, "{}", question(1, "Hello?")).unwrap();
    gz.finish().unwrap();

    let output = dir.path().join("out.jsonl");
    let args = arguments(&input, &output, &["--server", &server.url, "--api-key-env", "MY_KEY"]);
    let mut trusting = command(&args);
    trusting.env("SSL_CERT_FILE", server.authority()).env("MY_KEY", "secret-key");
    let ended = trusting.output().unwrap();
    assert_eq!(ended.status.code(), Some(0), "{}", String::from_utf8_lossy(&ended.stderr));
    assert_eq!(answers(&rows(&output)[0]), ["yes"]);
    assert!(heads.lock().unwrap().iter().all(|head| head.contains("authorization: bearer secret-key")));

    // A certificate of an unknown authority is not accepted.
    let doubting: Ended = run(&arguments(&input, &dir.path().join("no.jsonl"), &["--server", &server.url]));
    doubting.fails_with(1, &["server down", "certificate"]);
}
