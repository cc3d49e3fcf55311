//! `serve` on a GPU that is none (`tests/standin`).

use std::path::Path;

use deepspec_testkit::standin::{Report, Standin};
use serde_json::Value;

use crate::http::{Http, ask, content};
use crate::process::{Running, Server, command, tiny};

const PROMPTS: [&str; 3] = [
    "What is 3 + 4?",
    "Write a function that adds two numbers.",
    "Which daring destination suits Sebastian?",
];

#[test]
fn requests_are_answered_from_a_gpu_alone_and_together() {
    let Some(gpu) = Standin::for_program(Path::new(env!("CARGO_BIN_EXE_deepspec-data"))) else { return };
    let dir = tempfile::tempdir().unwrap();
    let report = dir.path().join("report.json");
    let mut serve =
        command(&["serve", "--model", &tiny(), "--served-name", "tiny", "--device", "cuda", "--port", "0"]);
    gpu.watch(&mut serve, &report);
    let process = Running::start(serve);
    let url = process.line_with("listening on ").trim_start_matches("listening on ").to_string();
    let server = Server { process, url };
    let http = Http::new();
    let bodies: Vec<Value> = PROMPTS.iter().map(|prompt| ask(prompt, 24)).collect();
    let alone: Vec<Value> = bodies.iter().map(|body| http.complete(&server.url, body)).collect();
    let together = http.complete_together(&server.url, &bodies);
    for (alone, together) in alone.iter().zip(&together) {
        assert!(!content(alone).is_empty(), "{alone}");
        assert_eq!(content(alone), content(together));
    }
    server.process.signal("TERM");
    assert_eq!(server.process.end().code, Some(0));
    let report = Report::load(&report);
    assert!(report.memory(0, "peak_bytes") > 0 && report.total("downloads") > 0, "nothing ran on the GPU");
}
