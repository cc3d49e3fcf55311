//! `serve --draft` under mixed load: every admitted request ends, the answers stay the same, and
//! memory does not grow.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::future::join_all;
use reqwest::{Client, Response};
use serde_json::{Value, json};

use crate::http::{Http, ask};
use crate::process::{DEADLINE, Server, full, text, tiny_for, wait_for};
use crate::serve_draft::noisy_twin;
use crate::serve_fire::{connection, head};

/// Rounds of requests by default, and how many of them are warm-up, in which memory still grows.
const ROUNDS: usize = 5;
const WARM_UP: usize = 2;
/// Duration of the full test, and the maximum duration of its warm-up.
const FULL: Duration = Duration::from_secs(2 * 60 * 60);
const FULL_WARM_UP: Duration = Duration::from_secs(60);
/// Overrides the duration, in seconds.
const SECONDS: &str = "DEEPSPEC_TEST_SOAK_SECONDS";
/// Resident memory may exceed its size after the warm-up by this much, because allocators keep
/// freed memory.
const MARGIN: u64 = 64 << 20;
/// The model's context length, and the server's limit for a conversation.
const POSITIONS: usize = 8192;
const CONTEXT: usize = 4096;
/// Repetitions of a word of two tokens in a prompt: more than the smallest KV cache row holds
/// (2,048), and more than the limit.
const LONG: usize = 1400;
const TOO_LONG: usize = CONTEXT;

const QUESTIONS: [&str; 4] = [
    "Hello?",
    "What is 3 + 4?",
    "Write a function that adds two numbers.",
    "Which daring destination suits Sebastian over the weekend?",
];

/// How many requests ended in each way.
type Counts = BTreeMap<String, usize>;

/// Shared by all requests of a test.
struct Load {
    client: Client,
    url: String,
}

impl Load {
    async fn post(&self, body: String) -> Response {
        let request = self.client.post(&self.url).header("content-type", "application/json");
        request.body(body).send().await.unwrap()
    }

    /// Sends a request without streaming; returns how it ended and the answer.
    async fn whole(&self, body: Value) -> (String, Value) {
        let response = self.post(body.to_string()).await;
        match response.status().as_u16() {
            200 => {
                let answer: Value = response.json().await.unwrap();
                let choice = &answer["choices"][0];
                assert!(choice["finish_reason"].is_string(), "{answer}");
                ("answered".into(), json!([body, choice]))
            }
            503 => {
                assert!(response.headers().contains_key("retry-after"));
                ("turned away".into(), Value::Null)
            }
            other => panic!("{other}: {}", response.text().await.unwrap()),
        }
    }

    /// Sends a streaming request and abandons it after `pieces` pieces; returns the answer if it
    /// was not abandoned.
    async fn stream(&self, body: Value, pieces: usize) -> (String, Value) {
        let response = self.begin(&body).await;
        self.follow(response, body, pieces).await
    }

    /// Starts a streaming request. If the server admits it, it holds a place from then on.
    async fn begin(&self, body: &Value) -> Response {
        let mut body = body.clone();
        body["stream"] = json!(true);
        self.post(body.to_string()).await
    }

    /// Reads the response of [`Self::begin`].
    async fn follow(&self, response: Response, body: Value, pieces: usize) -> (String, Value) {
        if response.status() == 503 {
            assert!(response.headers().contains_key("retry-after"));
            return ("turned away".into(), Value::Null);
        }
        assert_eq!(response.status(), 200);
        let (mut stream, mut text) = (response.bytes_stream(), vec![]);
        for _ in 0..pieces {
            match stream.next().await {
                Some(piece) => text.extend(piece.unwrap()),
                None => {
                    let text = String::from_utf8(text).unwrap();
                    assert!(
                        text.contains("\"finish_reason\":\"") && text.trim_end().ends_with("data: [DONE]"),
                        "{text}"
                    );
                    return ("streamed".into(), json!([body, pieced(&text)]));
                }
            }
        }
        ("abandoned".into(), Value::Null)
    }

    /// A request that must be refused.
    async fn refused(&self, body: String) -> (String, Value) {
        let request = self.client.post(&self.url).header("content-type", "application/json");
        // A full server does not read a megabyte before it refuses.
        let status = request.body(body).send().await.map_or(503, |response| response.status().as_u16());
        assert!([400, 413, 503].contains(&status), "{status}");
        (if status == 503 { "turned away".into() } else { format!("refused with {status}") }, Value::Null)
    }

    /// Sends a round of concurrent requests; answers at temperature 0 are recorded or compared.
    async fn round(&self, number: usize, counts: &mut Counts, said: &mut BTreeMap<String, Value>) {
        let question = |index: usize| QUESTIONS[index % QUESTIONS.len()];
        let sampled = |index: usize| {
            let mut body = ask(question(index), 16);
            (body["temperature"], body["seed"]) = (json!(1.0), json!(number * 100 + index));
            body
        };
        let endless = |index: usize| {
            let mut body = ask(question(index), 150);
            body["ignore_eos"] = json!(true);
            body
        };
        let long = |words: usize| ask(&"postcards ".repeat(words), 8);
        // Sent before the other requests, which would leave no place for it.
        let lengthy = long(LONG);
        let begun = self.begin(&lengthy).await;
        assert_eq!(begun.status(), 200);
        let lengthy = self.follow(begun, lengthy, usize::MAX);
        let greedy = join_all((0..4).map(|index| self.whole(ask(question(index), 24))));
        let random = join_all((0..4).map(|index| self.whole(sampled(index))));
        let streams = join_all((0..4).map(|index| self.stream(sampled(index), usize::MAX)));
        let abandoned = join_all((0..4).map(|index| self.stream(endless(index), 1 + index)));
        let flood = join_all((0..24).map(|index| self.whole(ask(question(index), 2))));
        let prompts = self.whole(long(40));
        let bad =
            ["{".into(), "[]".into(), long(TOO_LONG).to_string(), "\u{0}".into(), " ".repeat((1 << 20) + 1)];
        let bad = join_all(bad.map(|body| self.refused(body)));
        let prompts = async {
            let (lengthy, short) = futures::join!(lengthy, prompts);
            vec![lengthy, short]
        };
        let (a, b, c, d, e, f, g) = futures::join!(prompts, greedy, random, streams, abandoned, flood, bad);
        for (ended, answer) in [a, b, c, d, e, f, g].into_iter().flatten() {
            *counts.entry(ended).or_default() += 1;
            if answer[0]["temperature"] == json!(0) {
                let first = said.entry(answer[0].to_string()).or_insert_with(|| answer[1].clone());
                assert_eq!(*first, answer[1], "the answer changed under load");
            }
        }
    }
}

/// The text of a streamed answer.
fn pieced(events: &str) -> String {
    let events = events.lines().filter_map(|line| line.strip_prefix("data: "));
    let pieces = events.filter_map(|event| serde_json::from_str::<Value>(event).ok());
    pieces.filter_map(|piece| piece["choices"][0]["delta"]["content"].as_str().map(str::to_owned)).collect()
}

/// How long the test runs; None for a fixed number of rounds.
fn duration() -> Option<Duration> {
    match std::env::var(SECONDS) {
        Ok(seconds) => Some(Duration::from_secs(seconds.parse().unwrap())),
        Err(_) => full().then_some(FULL),
    }
}

/// Resident memory of a process in bytes.
fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn nothing_is_left_behind_by_hours_of_mixed_load() {
    let twin = tempfile::tempdir().unwrap();
    noisy_twin(twin.path());
    soak("whole blocks", &["--draft", &text(twin.path())]);
}

/// Steps take longer from the fifth token on. Many concurrent requests decode plainly, and one
/// or two use drafts.
#[test]
fn nothing_is_left_behind_under_a_schedule() {
    let dir = tempfile::tempdir().unwrap();
    let cost = dir.path().join("cost.csv");
    fs::write(&cost, "batch_tokens,seconds\n1,0.001\n4,0.001\n64,0.016\n").unwrap();
    let drafter = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/tiny-dspark");
    soak("prefix", &["--draft", &text(&drafter), "--schedule", "prefix", "--cost", &text(&cost)]);
}

fn soak(what: &str, drafting: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    tiny_for(dir.path(), POSITIONS);
    let context = CONTEXT.to_string();
    let limits = ["--max-num-seqs", "4", "--queue", "24", "--max-body", "1", "--client-timeout", "5"];
    let server =
        Server::of(&text(dir.path()), &[&limits[..], &["--max-model-len", &context], drafting].concat());
    let http = Http::new();
    // One connection per request, so that none fails because the server closes an idle connection.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = Client::builder().no_proxy().timeout(DEADLINE).pool_max_idle_per_host(0).build().unwrap();
    let load = Load { client, url: format!("{}/v1/chat/completions", server.url) };
    let health = || http.get(&format!("{}/health", server.url));

    let (started, mut counts, mut said) = (Instant::now(), Counts::new(), BTreeMap::new());
    let (mut settled, mut rounds) = (0, 0);
    let duration = duration();
    let goes_on = |rounds| duration.map_or(rounds < ROUNDS, |duration| started.elapsed() < duration);
    let warms_up = |rounds| match duration {
        Some(duration) => started.elapsed() < FULL_WARM_UP.min(duration / 4),
        None => rounds <= WARM_UP,
    };
    while goes_on(rounds) {
        // Clients that send half a head, half a body, or read nothing until all other clients are
        // done.
        let lame = [connection(&server, "POST /v1"), connection(&server, &(head(100) + "{"))];
        let mut body = ask(QUESTIONS[rounds % QUESTIONS.len()], 100);
        (body["ignore_eos"], body["stream"]) = (json!(true), json!(true));
        let body = body.to_string();
        let slow = [(); 2].map(|()| {
            connection(
                &server,
                &(head(body.len()).replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n") + &body),
            )
        });
        http.runtime.block_on(load.round(rounds, &mut counts, &mut said));
        drop(lame);
        let [mut read, unread] = slow;
        drop(unread);
        let mut text = String::new();
        read.read_to_string(&mut text).unwrap();
        let whole = text.contains("\"finish_reason\":\"length\"") && text.contains("data: [DONE]");
        let turned_away =
            text.starts_with("HTTP/1.1 503") && text.to_ascii_lowercase().contains("\r\nretry-after:");
        assert!(whole || turned_away, "{text}");
        *counts.entry(if whole { "read late" } else { "turned away" }.into()).or_default() += 1;
        // All admitted requests have ended, including the abandoned ones.
        wait_for("the end of all requests", || {
            let load = health();
            (load["running"] == 0 && load["queued"] == 0).then_some(())
        });
        let too_long = ask(&"postcards ".repeat(TOO_LONG), 8).to_string();
        for (body, status) in [("{".into(), 400), (too_long, 400), (" ".repeat((1 << 20) + 1), 413)] {
            assert_eq!(http.post_text(&server.url, body).0, status);
        }
        rounds += 1;
        let now = resident(server.process.child.id());
        if rounds == 1 || warms_up(rounds) {
            settled = settled.max(now);
        } else {
            assert!(
                now <= settled + MARGIN,
                "{now} bytes are resident after {rounds} rounds, {settled} when warm"
            );
        }
    }
    let health = health();
    let line = format!(
        "soak, {what}: {rounds} rounds in {:.0} s, {counts:?}; {} tokens; waited for a slot: p50 ≤ {} s, p99 ≤ {} s; resident {} MB when warm, {} MB at the end",
        started.elapsed().as_secs_f64(),
        health["generated_tokens"],
        health["queue_seconds"]["p50"],
        health["queue_seconds"]["p99"],
        settled >> 20,
        resident(server.process.child.id()) >> 20,
    );
    eprintln!("{line}");
    // A file for scripts/test.sh, because the output of a passing test is not shown.
    fs::write(
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("soak-{}.txt", what.replace(' ', "-"))),
        line + "\n",
    )
    .unwrap();
    assert!(counts["answered"] >= rounds && counts["streamed"] >= rounds, "{counts:?}");
    server.process.signal("TERM");
    let ended = server.process.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
}
