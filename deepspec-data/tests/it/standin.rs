//! `serve` on the stand-in GPU (`tests/standin`).

use std::path::Path;
use std::process::Command;

use deepspec_testkit::fake_gpu::{FakeGpu, Report};
use deepspec_testkit::tiny as random;
use futures::future::join_all;
use serde_json::{Value, json};

use crate::http::{Http, ask, content};
use crate::process::{Running, Server, command, ended, text, tiny, tiny_for};

const PROMPTS: [&str; 3] = [
    "What is 3 + 4?",
    "Write a function that adds two numbers.",
    "Which daring destination suits Sebastian?",
];

/// The context length of the long target.
const LONGEST: usize = 32_768;
/// GPU memory that has room for about half of that context. The toy takes 6 MB and other parts of
/// `serve` up to 105 MB. A full conversation takes 75 MB, and 45 MB are left.
const TIGHT: u64 = 180_000_000;
/// Bytes of a KV cache of up to 256 tokens: keys and values of six layers with two heads of 48
/// numbers, two bytes each.
const HISTORY: i64 = 256 * 6 * 2 * 2 * 48 * 2;

/// `serve` of a model on the GPU, under the name `tiny` and on its own port.
fn serve(model: &str, more: &[&str]) -> Command {
    let args = ["serve", "--model", model, "--served-name", "tiny", "--device", "cuda", "--port", "0"];
    command(&[&args, more].concat())
}

fn started(serve: Command) -> Server {
    let process = Running::start(serve);
    let url = process.line_with("listening on ").trim_start_matches("listening on ").to_string();
    Server { process, url }
}

/// Stops a server as a user would.
#[track_caller]
fn stopped(server: Server) {
    server.process.signal("TERM");
    let ended = server.process.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
}

#[test]
fn requests_are_answered_from_a_gpu_alone_and_together() {
    let Some(gpu) = FakeGpu::for_program(Path::new(env!("CARGO_BIN_EXE_deepspec-data"))) else { return };
    let dir = tempfile::tempdir().unwrap();
    let report = dir.path().join("report.json");
    let mut command = serve(&tiny(), &[]);
    gpu.attach_with_report(&mut command, &report);
    let (server, http) = (started(command), Http::new());
    let bodies: Vec<Value> = PROMPTS.iter().map(|prompt| ask(prompt, 24)).collect();
    let alone: Vec<Value> = bodies.iter().map(|body| http.complete(&server.url, body)).collect();
    let together = http.complete_together(&server.url, &bodies);
    for (alone, together) in alone.iter().zip(&together) {
        assert!(!content(alone).is_empty(), "{alone}");
        assert_eq!(content(alone), content(together));
    }
    stopped(server);
    let report = Report::load(&report);
    assert!(
        report.memory(0, "peak_bytes") > 0 && report.operation_count("downloads") > 0,
        "nothing ran on the GPU"
    );
}

#[test]
fn conversations_are_as_long_as_the_gpu_has_room_for() {
    let Some(gpu) = FakeGpu::for_program(Path::new(env!("CARGO_BIN_EXE_deepspec-data"))) else { return };
    let dir = tempfile::tempdir().unwrap();
    tiny_for(dir.path(), LONGEST);
    let with = |bytes: u64, more: &[&str]| {
        let mut command = serve(&text(dir.path()), more);
        gpu.attach(&mut command).env("DEEPSPEC_STANDIN_MEMORY", bytes.to_string());
        command
    };

    let process = Running::start(with(TIGHT, &[]));
    let warning = process.line_with("conversations may hold ");
    let (_, behind) = warning.split_once("conversations may hold ").unwrap();
    let digits: String = behind.chars().take_while(char::is_ascii_digit).collect();
    let context: usize = digits.parse().unwrap();
    assert!((1..LONGEST).contains(&context), "{warning}");
    let url = process.line_with("listening on ").trim_start_matches("listening on ").to_string();
    let (server, http) = (Server { process, url }, Http::new());
    // At least one token per word.
    let (status, told) = http.post_text(&server.url, ask(&"postcards ".repeat(context), 3).to_string());
    assert_eq!(status, 400, "{told}");
    assert!(told.contains(&format!("the context holds {context},")), "{told}");
    assert!(!content(&http.complete(&server.url, &ask(PROMPTS[0], 3))).is_empty());
    stopped(server);

    let longest = LONGEST.to_string();
    let insist = ["--quiet", "--max-model-len", longest.as_str()];
    let advice = format!("give --max-model-len {context} or less");
    ended(with(TIGHT, &insist)).fails_with(2, &["one conversation of 32768 tokens", &advice]);
    for more in [&insist[..1], &insist[..]] {
        let hopeless = ended(with(TIGHT / 2, more));
        hopeless.fails_with(
            2,
            &["not even a short one has room", "a smaller model", "--device with more memory"],
        );
        assert!(!hopeless.stderr.contains("--max-model-len"), "{hopeless:?}");
    }
}

/// A conversation of the hybrid takes 33 kB of keys and values, and 131 kB of states in three layers.
#[test]
fn states_of_a_hybrid_count_as_memory_of_conversations() {
    let Some(gpu) = FakeGpu::for_program(Path::new(env!("CARGO_BIN_EXE_deepspec-data"))) else { return };
    let dir = tempfile::tempdir().unwrap();
    random::target(dir.path(), "qwen3_5");
    let mut command = serve(&text(dir.path()), &["--max-num-seqs", "2000", "--max-model-len", "64"]);
    gpu.attach(&mut command).env("DEEPSPEC_STANDIN_MEMORY", "400000000");
    let warning = Running::start(command).line_with("2000 conversations of 64 tokens take ");
    assert!(warning.contains("take 0.33 GB"), "{warning}");
}

#[test]
fn a_request_that_finds_no_memory_ends_alone() {
    let Some(gpu) = FakeGpu::for_program(Path::new(env!("CARGO_BIN_EXE_deepspec-data"))) else { return };
    let dir = tempfile::tempdir().unwrap();
    let [one, many] = ["one.json", "many.json"].map(|name| dir.path().join(name));
    let http = Http::new();
    // Long enough that all of them run concurrently.
    let endless = |prompt: &&str| {
        let mut body = ask(prompt, 200);
        body["ignore_eos"] = json!(true);
        body
    };
    let bodies: Vec<Value> = PROMPTS[..2].iter().map(endless).collect();

    let mut command = serve(&tiny(), &["--max-num-seqs", "8"]);
    gpu.attach_with_report(&mut command, &one);
    let server = started(command);
    let alone: Vec<Value> = bodies.iter().map(|body| http.complete(&server.url, body)).collect();
    stopped(server);

    // A request always has the memory that it had alone. A second request would grow the KV cache
    // to three times its size.
    let memory = Report::load(&one).memory(0, "peak_bytes") + HISTORY * 3 / 2;
    let mut command = serve(&tiny(), &["--max-num-seqs", "8"]);
    gpu.attach_with_report(&mut command, &many)
        .env("DEEPSPEC_STANDIN_MEMORY", memory.to_string())
        .env("DEEPSPEC_STANDIN_FREE", (80_u64 << 30).to_string());
    let server = started(command);
    let url = format!("{}/v1/chat/completions", server.url);
    let (client, url, bodies) = (&http.client, &url, &bodies);
    let asked = (0..8).map(|number| async move {
        let index = number % bodies.len();
        let response = client.post(url).json(&bodies[index]).send().await.unwrap();
        (index, response.status().as_u16(), response.json::<Value>().await.unwrap())
    });
    let answers = http.runtime.block_on(join_all(asked));
    let (answered, refused): (Vec<_>, Vec<_>) = answers.iter().partition(|(_, status, _)| *status == 200);
    assert!(!answered.is_empty() && !refused.is_empty(), "{answers:?}");
    for (index, _, answer) in answered {
        assert_eq!(content(answer), content(&alone[*index]));
    }
    for (_, status, error) in refused {
        let told = error["error"]["message"].as_str().unwrap();
        assert!(*status == 503 && told.contains("the memory ran out at a sequence of"), "{status}: {error}");
    }
    assert_eq!(content(&http.complete(&server.url, &bodies[0])), content(&alone[0]));
    stopped(server);
    assert!(Report::load(&many).memory(0, "refused") > 0, "there was room for all");
}
