//! Access control of `serve`, the fields that it refuses by name, and the effect of a model's
//! default sampling settings.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;

use serde_json::{Value, json};

use crate::http::{Http, ask, content};
use crate::process::{Running, Server, command, text, tiny_for};

/// The address of a server without its scheme.
fn address(server: &Server) -> &str {
    server.url.strip_prefix("http://").unwrap()
}

/// The status of a request with these header lines.
fn status(server: &Server, request: &str, head: &[&str], body: &str) -> u16 {
    let mut stream = TcpStream::connect(address(server)).unwrap();
    let more: String = head.iter().map(|line| format!("{line}\r\n")).collect();
    let host = if head.iter().any(|line| line.starts_with("Host:")) {
        String::new()
    } else {
        format!("Host: {}\r\n", address(server))
    };
    let length = body.len();
    write!(
        stream,
        "{request} HTTP/1.1\r\n{host}{more}Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
    .unwrap();
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    line.split(' ').nth(1).unwrap_or_else(|| panic!("{line:?}")).parse().unwrap()
}

#[test]
fn fields_that_would_change_the_answer_are_refused_by_name() {
    let (server, http) = (Server::start(&[]), Http::new());
    let refused = [
        ("response_format", json!({"type": "json_object"})),
        ("response_format", json!({"type": "json_schema", "json_schema": {}})),
        ("tool_choice", json!("required")),
        ("tool_choice", json!({"type": "function", "function": {"name": "f"}})),
        ("logit_bias", json!({"5": 10})),
        ("min_tokens", json!(5)),
        ("guided_json", json!({"type": "object"})),
        ("guided_regex", json!("a+")),
        ("top_logprobs", json!(3)),
        ("logprobs", json!(true)),
        ("bad_words", json!(["a"])),
    ];
    for (field, value) in refused {
        let mut body = ask("Hello?", 4);
        body[field] = value.clone();
        let (status, said) = http.post_text(&server.url, body.to_string());
        let error: Value = serde_json::from_str(&said).unwrap();
        assert_eq!((status, &error["error"]["param"]), (400, &json!(field)), "{value}: {said}");
    }
    // Fields without effect are accepted, and a request without a model gets the only one.
    let plain = http.complete(&server.url, &ask("Hello?", 8));
    let mut idle = ask("Hello?", 8);
    idle.as_object_mut().unwrap().shift_remove("model");
    idle["response_format"] = json!({"type": "text"});
    (idle["logit_bias"], idle["tool_choice"], idle["n"], idle["user"]) =
        (json!({}), json!("none"), json!(1), json!("me"));
    let taken = http.complete(&server.url, &idle);
    assert_eq!((&taken["choices"], &taken["model"]), (&plain["choices"], &json!("tiny")));
    // Known fields are obeyed: generation continues past the end of turn, or stops at any given
    // token.
    let mut on = ask("Hello?", 60);
    on["ignore_eos"] = json!(true);
    assert_eq!(http.complete(&server.url, &on)["usage"]["completion_tokens"], 60);
    let mut whole = ask("Hello?", 8);
    whole["return_token_ids"] = json!(true);
    let ids = http.complete(&server.url, &whole)["choices"][0]["token_ids"].clone();
    whole["stop_token_ids"] = json!([ids[3]]);
    let at = ids.as_array().unwrap().iter().position(|id| *id == ids[3]).unwrap();
    let stopped = http.complete(&server.url, &whole);
    assert_eq!(
        (&stopped["usage"]["completion_tokens"], &stopped["choices"][0]["finish_reason"]),
        (&json!(at + 1), &json!("stop"))
    );
    let mut developer = ask("Hello?", 8);
    developer["messages"] =
        json!([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]);
    let mut system = developer.clone();
    system["messages"][0]["role"] = json!("system");
    assert_eq!(
        http.complete(&server.url, &developer)["choices"],
        http.complete(&server.url, &system)["choices"]
    );
}

#[test]
fn pages_of_browsers_are_not_answered() {
    let server = Server::start(&[]);
    let body = ask("Hello?", 2).to_string();
    let post = "POST /v1/chat/completions";
    let json = "Content-Type: application/json";
    assert_eq!(status(&server, post, &[json], &body), 200);
    assert_eq!(status(&server, post, &["Content-Type: text/plain"], &body), 415);
    assert_eq!(status(&server, post, &[json, "Origin: http://evil.example"], &body), 403);
    assert_eq!(
        status(
            &server,
            post,
            &["Content-Type: application/x-www-form-urlencoded", "Origin: http://evil.example"],
            &body
        ),
        403
    );
    // A host name that was made to resolve to this machine.
    assert_eq!(status(&server, post, &[json, "Host: evil.example:80"], &body), 403);
    assert_eq!(status(&server, "GET /v1/models", &["Host: evil.example:80"], ""), 403);
    let own = format!("Origin: {}", server.url);
    assert_eq!(status(&server, post, &[json, &own], &body), 200);
}

#[test]
fn a_key_keeps_others_out() {
    let server = Server::start(&["--api-key", "secret"]);
    let body = ask("Hello?", 2).to_string();
    let post = "POST /v1/chat/completions";
    let with = |key: &str| {
        status(&server, post, &["Content-Type: application/json", &format!("Authorization: {key}")], &body)
    };
    assert_eq!(status(&server, post, &["Content-Type: application/json"], &body), 401);
    assert_eq!(["Bearer wrong", "Bearer secret2", "secret", "Bearer secret"].map(with), [401, 401, 401, 200]);
    assert_eq!(status(&server, "GET /v1/models", &[], ""), 401);
    // The health check needs no key.
    assert_eq!(status(&server, "GET /health", &[], ""), 200);
    // Our own commands send the key.
    let dir = tempfile::tempdir().unwrap();
    let input = crate::process::lines(dir.path(), "in.jsonl", &[crate::regenerate::question("a", "Hello?")]);
    let output = dir.path().join("out.jsonl");
    let args = crate::regenerate::arguments(&input, &output, &["--server", &server.url, "--max-tokens", "4"]);
    let mut keyed = command(&args);
    keyed.env("OPENAI_API_KEY", "secret");
    assert_eq!(crate::process::ended(keyed).code, Some(0));
}

#[test]
fn a_prompt_that_cannot_fit_takes_no_memory() {
    let server = Server::start(&["--max-num-seqs", "1"]);
    let http = Http::new();
    http.complete(&server.url, &ask("Hello?", 2));
    let process = server.process.child.id();
    let peak = || {
        let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() >> 10
    };
    let before = peak();
    let long = ask(&"word ".repeat(1_400_000), 2).to_string();
    for _ in 0..2 {
        let (status, said) = http.post_text(&server.url, long.clone());
        assert!(status == 400 && said.contains("the context holds 2048"), "{status}: {said}");
    }
    assert!(peak() - before < 256, "{before} MB before, {} MB at most", peak());
    let (status, said) = http.post_text(&server.url, ask(&"word ".repeat(2_000_000), 2).to_string());
    assert!(status == 413 && said.contains("8 MB") && said.contains("--max-body"), "{status}: {said}");
}

#[test]
fn a_models_own_defaults_are_applied_and_said() {
    let dir = tempfile::tempdir().unwrap();
    tiny_for(dir.path(), 2048);
    let path = dir.path().join("generation_config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    // Only the most likely token is left, and the answer is short.
    config["top_k"] = json!(1);
    config["max_new_tokens"] = json!(7);
    config["repetition_penalty"] = json!(1.5);
    fs::write(&path, config.to_string()).unwrap();
    let args =
        ["serve", "--model", &text(dir.path()), "--served-name", "tiny", "--device", "cpu", "--port", "0"];
    let process = Running::start(command(&args));
    let warned = process.line_with("repetition_penalty");
    assert!(warned.contains("not applied"), "{warned}");
    let told = process.line_with("the model's defaults");
    assert!(told.contains("top_k 1") && told.contains("max_tokens 7"), "{told}");
    let url = process.line_with("listening on ").trim_start_matches("listening on ").to_string();
    let server = Server { process, url };
    let http = Http::new();
    let mut unsaid = ask("What is 3 + 4?", 7);
    for field in ["temperature", "max_tokens"] {
        unsaid.as_object_mut().unwrap().shift_remove(field);
    }
    let (unsaid, greedy) =
        (http.complete(&server.url, &unsaid), http.complete(&server.url, &ask("What is 3 + 4?", 7)));
    assert_eq!(content(&unsaid), content(&greedy));
    assert_eq!(unsaid["usage"], greedy["usage"]);
}

#[test]
fn connections_beyond_the_limit_wait() {
    let server = Server::start(&["--max-connections", "1"]);
    let held = TcpStream::connect(address(&server)).unwrap();
    let mut second = TcpStream::connect(address(&server)).unwrap();
    write!(second, "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    second.set_nonblocking(true).unwrap();
    let waits = second.peek(&mut [0]).unwrap_err();
    assert_eq!(waits.kind(), std::io::ErrorKind::WouldBlock);
    // The second client is served after the first one disconnects.
    drop(held);
    second.set_nonblocking(false).unwrap();
    let mut line = String::new();
    BufReader::new(second).read_line(&mut line).unwrap();
    assert!(line.starts_with("HTTP/1.1 200"), "{line}");
}
