//! `serve` under attack: clients that never finish, too many clients, and requests that are too
//! large.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;

use futures::StreamExt;
use serde_json::{Value, json};

use crate::http::{Http, ask};
use crate::process::{DEADLINE, Running, Server, command, text, tiny, wait_for};

/// A connection on which `sent` was written.
pub fn connection(server: &Server, sent: &str) -> TcpStream {
    let mut stream = TcpStream::connect(server.url.trim_start_matches("http://")).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.write_all(sent.as_bytes()).unwrap();
    stream
}

/// The head of a chat completion request that announces a body of `length` bytes.
pub fn head(length: usize) -> String {
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    )
}

#[test]
fn clients_that_never_finish_are_given_up() {
    let (server, http) =
        (Server::start(&["--client-timeout", "1", "--max-num-seqs", "1", "--queue", "0"]), Http::new());
    let sent = ["", "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n", &(head(100) + "{")];
    let answers = sent.map(|sent| connection(&server, sent)).map(|mut stream| {
        let mut answer = vec![];
        // If the server waits for more, this fails at the deadline.
        stream.read_to_end(&mut answer).unwrap();
        String::from_utf8(answer).unwrap()
    });
    let [silent, headless, bodiless] = answers;
    assert_eq!((silent.as_str(), headless.contains("200 OK")), ("", false));
    assert!(bodiless.starts_with("HTTP/1.1 408") && bodiless.contains("within 1 seconds"), "{bodiless}");
    // The only slot is free again.
    assert_eq!(http.complete(&server.url, &ask("Hello?", 3))["usage"]["completion_tokens"], 3);
}

#[test]
fn a_client_that_never_reads_is_given_up() {
    let (server, http) =
        (Server::start(&["--client-timeout", "1", "--max-num-seqs", "1", "--queue", "0"]), Http::new());
    // Pipelined requests whose refusals are never read: more than all buffers on the way hold,
    // which may be 32 MiB and more.
    let mut stream = connection(&server, "");
    let refused = format!("{}x", head(1)).repeat(100);
    let cut_off = (0..100_000).any(|_| stream.write_all(refused.as_bytes()).is_err());
    assert!(cut_off);
    assert_eq!(http.complete(&server.url, &ask("Hello?", 3))["usage"]["completion_tokens"], 3);
}

#[test]
fn a_full_queue_is_told_to_come_again() {
    let (server, http) = (Server::start(&["--max-num-seqs", "1", "--queue", "1"]), Http::new());
    let url = format!("{}/v1/chat/completions", server.url);
    let mut endless = ask("Hello?", 2000);
    (endless["ignore_eos"], endless["stream"]) = (json!(true), json!(true));
    // Both are admitted once their answers have begun; one of them waits for the other's slot.
    let admitted = http.runtime.block_on(async {
        let mut admitted = vec![];
        for _ in 0..2 {
            let response = http.client.post(&url).json(&endless).send().await.unwrap();
            assert_eq!(response.status(), 200);
            let mut pieces = response.bytes_stream();
            pieces.next().await.unwrap().unwrap();
            admitted.push(pieces);
        }
        let refused = http.client.post(&url).json(&ask("Hello?", 3)).send().await.unwrap();
        assert_eq!(
            (refused.status().as_u16(), &refused.headers()["retry-after"]),
            (503, &"1".parse().unwrap())
        );
        let error: Value = refused.json().await.unwrap();
        assert_eq!(error["error"]["code"], "queue_full", "{error}");
        admitted
    });
    // Other endpoints still respond, and abandoned requests free their places.
    assert_eq!(http.get(&format!("{}/v1/models", server.url))["object"], "list");
    drop(admitted);
    wait_for("a place", || {
        (http.post_text(&server.url, ask("Hello?", 3).to_string()).0 == 200).then_some(())
    });
    let health = http.get(&format!("{}/health", server.url));
    assert!(health["queue_seconds"]["p99"].as_f64() >= health["queue_seconds"]["p50"].as_f64(), "{health}");
}

#[test]
fn large_bodies_need_a_flag() {
    let http = Http::new();
    let mut body = ask("Hello?", 3);
    body["user"] = json!("x".repeat(1 << 20));
    let (usual, small) = (Server::start(&[]), Server::start(&["--max-body", "1"]));
    assert_eq!(http.post_text(&usual.url, body.to_string()).0, 200);
    let (status, told) = http.post_text(&small.url, body.to_string());
    assert_eq!(status, 413, "{told}");
    crate::process::run(&["serve", "--model", &tiny(), "--max-body", "0"]).fails_with(2, &["--max-body 0"]);
}

#[test]
fn a_slow_prompt_keeps_nobody_else_waiting() {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in deepspec_testkit::folder::files(tiny().as_ref()) {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    let path = dir.path().join("chat_template.jinja");
    let ages = ["a", "b", "c", "d"].map(|name| format!("{{%- for {name} in range(10000) -%}}")).concat();
    let slow = format!(
        "{{%- if messages[0].content == 'slow' -%}}{ages}{}{{%- endif -%}}",
        "{%- endfor -%}".repeat(4)
    );
    let template = slow + &fs::read_to_string(&path).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, template).unwrap();

    // With a single thread for all connections, a busy connection would delay all others.
    let model = text(dir.path());
    let args = ["serve", "--model", &model, "--served-name", "tiny", "--device", "cpu", "--port", "0"];
    let mut command = command(&args);
    command.env("TOKIO_WORKER_THREADS", "1");
    let process = Running::start(command);
    let url = process.line_with("listening on ").trim_start_matches("listening on ").to_string();
    let (server, http) = (Server { process, url }, Http::new());
    let body = ask("slow", 3).to_string();
    let _slow = connection(&server, &(head(body.len()) + &body));
    // The first of these may arrive before the slow request is parsed; the last ones do not.
    for _ in 0..10 {
        assert_eq!(http.get(&format!("{}/health", server.url))["status"], "ok");
    }
}
