//! Rows per second of `regenerate` and of Python's openai client with 64 threads, against one
//! server that answers instantly.
//!
//! ```sh
//! DEEPSPEC_TEST_PYTHON=PYTHON cargo bench -p deepspec-data --bench regenerate
//! ```
//! The interpreter needs the packages of `scripts/requirements-test.txt`. Both clients read the
//! same file and write one; the server runs in this process. The best of three rounds counts.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use deepspec_testkit::server::{Reply, Server};
use serde_json::json;

/// Rows for the quick client and for the slow one.
const ROWS: (u64, u64) = (40_000, 4_000);
const THREADS: usize = 64;
const ROUNDS: usize = 3;

fn main() {
    let Ok(python) = std::env::var("DEEPSPEC_TEST_PYTHON") else {
        eprintln!("DEEPSPEC_TEST_PYTHON names no Python interpreter");
        return;
    };
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (many, few) = (dir.path().join("many.jsonl"), dir.path().join("few.jsonl"));
    write(&many, ROWS.0);
    write(&few, ROWS.1);
    let answer = json!({
        "id": "x", "object": "chat.completion", "created": 0, "model": "tiny",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "An answer of some length. ".repeat(20)}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 50, "completion_tokens": 100, "total_tokens": 150},
    });
    let server = Server::start(move |_| Reply::Json(answer.clone()));
    let (mut ours, mut theirs) = (0.0f64, 0.0f64);
    for _ in 0..ROUNDS {
        ours = ours.max(ROWS.0 as f64 / regenerate(&server.url(), &many, &dir.path().join("ours.jsonl")));
        theirs = theirs
            .max(ROWS.1 as f64 / openai(&python, &server.url(), &few, &dir.path().join("theirs.jsonl")));
    }
    let _ = writeln!(
        io::stdout(),
        "regenerate {ours:.0} rows/s, openai with {THREADS} threads {theirs:.0} rows/s: {:.1} times as fast",
        ours / theirs
    );
}

fn write(path: &Path, rows: u64) {
    let mut out = BufWriter::new(File::create(path).expect("a file"));
    for id in 0..rows {
        let prompt = format!("Question {id}: {}", "what about this and that? ".repeat(8));
        let row = json!({"id": id, "conversations": [{"role": "user", "content": prompt}, {"role": "assistant", "content": "old"}]});
        writeln!(out, "{row}").expect("room on the disk");
    }
}

/// Seconds of the whole program, including its start and reading the rows.
fn regenerate(url: &str, input: &Path, output: &Path) -> f64 {
    let started = Instant::now();
    let status = Command::new(env!("CARGO_BIN_EXE_deepspec-data"))
        .args([
            "regenerate",
            "--quiet",
            "--overwrite",
            "--model",
            "tiny",
            "--temperature",
            "0",
            "--max-tokens",
            "64",
        ])
        .args(["--concurrency", &THREADS.to_string(), "--server", url, "--input"])
        .args([input, Path::new("--output"), output])
        .status();
    assert!(status.expect("the program").success());
    started.elapsed().as_secs_f64()
}

/// Seconds from the first to the last answer, without the interpreter's start.
fn openai(python: &str, url: &str, input: &Path, output: &Path) -> f64 {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/openai_client.py");
    let mut run = Command::new(python);
    run.args([script.as_path(), Path::new(url), input, output]).arg(THREADS.to_string());
    let printed = run.output().expect("the interpreter");
    assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
    let lines = fs::read(output).expect("its output").iter().filter(|&&byte| byte == b'\n').count();
    assert_eq!(lines as u64, ROWS.1);
    String::from_utf8_lossy(&printed.stdout).trim().parse().expect("seconds")
}
