//! Python tools as clients and servers. `DEEPSPEC_TEST_PYTHON` names an interpreter that has them.

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use deepspec_testkit::skip;

use crate::http::Http;
use crate::process::{Running, Server, lines, run, tiny, wait_for};
use crate::regenerate::{answers, arguments, by_id, question};

#[test]
fn the_openai_client_is_content() {
    let Some(python) = skip::python("openai") else { return };
    let server = Server::start(&[]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/openai_client.py");
    let output =
        Command::new(python).arg(script).arg(&server.url).env_remove("OPENAI_API_KEY").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn transformers_serve_answers_too() {
    let Some(python) = skip::python("transformers and what it serves with") else { return };
    let dir = tempfile::tempdir().unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("http://127.0.0.1:{port}");
    let mut serve = Command::new(python);
    serve.args(["-c", "from transformers.cli.transformers import main; main()"]);
    serve.args([
        "serve",
        "--host",
        "127.0.0.1",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--port",
        &port.to_string(),
    ]);
    serve.env("HF_HUB_OFFLINE", "1");
    let mut peer = Running::start(serve);
    let http = Http::new();
    wait_for("transformers serve", || {
        assert!(peer.child.try_wait().unwrap().is_none(), "transformers serve ended");
        let asked = async { http.client.get(format!("{url}/health")).send().await };
        http.runtime.block_on(asked).ok().filter(|response| response.status().is_success())
    });

    let prompts = ["Hello?", "What is 3 + 4?", "Write a function that adds two numbers."];
    let data: Vec<String> = prompts.iter().enumerate().map(|(id, prompt)| question(id, prompt)).collect();
    let input = lines(dir.path(), "in.jsonl", &data);
    // The peer names the model by its path.
    let tiny = tiny();
    let named = |output: &Path, more: &[&str]| {
        let sampling = ["--temperature", "0", "--max-tokens", "12", "--disable-thinking"];
        let mut args = arguments(&input, output, &[&sampling[..], more].concat());
        args.iter_mut().filter(|arg| *arg == "tiny").for_each(|arg| arg.clone_from(&tiny));
        run(&args)
    };
    let theirs = dir.path().join("theirs.jsonl");
    let ended = named(&theirs, &["--server", &url]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let ours = dir.path().join("ours.jsonl");
    assert_eq!(named(&ours, &["--local-model", &tiny, "--device", "cpu"]).code, Some(0));
    let (theirs, ours) = (by_id(&theirs), by_id(&ours));
    for (id, row) in &theirs {
        // The peer strips whitespace from the ends.
        assert_eq!(answers(row)[0].trim(), answers(&ours[id])[0].trim(), "row {id}");
    }

    // The peer refuses unknown fields, so they are dropped with a warning.
    let dropped = named(&dir.path().join("dropped.jsonl"), &["--server", &url, "--top-k", "5"]);
    assert_eq!(dropped.code, Some(0), "{dropped:?}");
    let warnings: Vec<&str> = dropped.stderr.lines().filter(|line| line.contains("refuses top_k")).collect();
    assert_eq!(warnings.len(), 1, "{dropped:?}");
}
