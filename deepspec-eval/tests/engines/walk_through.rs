//! Runs the commands of docs/real-model.md from a GGUF to a drafter that llama.cpp serves,
//! unchanged but with shorter training.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use deepspec_testkit::conversations::tokenizers;
use serde_json::Value;

use crate::common::repository;
use crate::llama_cpp::llama_server;

/// The first block of shell commands of a page.
fn commands(page: &Path) -> String {
    let text = fs::read_to_string(page).unwrap();
    let block = text.split_once("```sh\n").and_then(|(_, rest)| rest.split_once("```"));
    block.unwrap_or_else(|| panic!("{} has no commands", page.display())).0.to_string()
}

#[test]
fn a_gguf_becomes_a_served_drafter_by_the_commands_of_the_book() {
    let (Some(_), Some(folder)) = (llama_server(), tokenizers()) else { return };
    let root = tempfile::tempdir().unwrap();
    let [prompts, out] = ["prompts.jsonl", "mine"].map(|name| root.path().join(name));
    let some = fs::read_to_string(repository("assets/real-prompts.jsonl")).unwrap();
    fs::write(&prompts, some.split_inclusive('\n').take(40).collect::<String>()).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let programs = Path::new(env!("CARGO_BIN_EXE_deepspec-eval")).parent().unwrap();
    let path = |path: &Path| path.to_str().unwrap().to_string();
    // The only changes are paths and durations.
    let changes = [
        ("$PWD/target/release", path(programs)),
        ("runs/mine", path(&out)),
        ("prompts.jsonl", path(&prompts)),
        ("FILE.gguf", path(&folder.join("smollm2.gguf"))),
        ("mine=(", "mine=(--set train.max_train_steps=6 --set logging.logging_steps=2 ".into()),
        ("--max-tokens 192", "--max-tokens 24".into()),
        ("--limit 20 --max-new-tokens 192", "--limit 1 --max-new-tokens 16".into()),
        ("--limit 4 --max-new-tokens 64", "--limit 1 --max-new-tokens 16".into()),
        ("8080", port),
        (
            "{\"enable_thinking\": false}}'",
            "{\"enable_thinking\": false}, \"max_tokens\": 24}' >$out/answer.json".into(),
        ),
    ];
    let mut script = commands(&repository("docs/real-model.md"));
    for (words, instead) in changes {
        assert!(script.contains(words), "{words:?} is not in {script}");
        script = script.replace(words, &instead);
    }
    let script = format!("set -euo pipefail\ntrap 'kill $(jobs -p)' EXIT\n{script}");
    let mut shell = Command::new("bash");
    shell.args(["-c", &script]).current_dir(repository(".")).env("XDG_CACHE_HOME", root.path());
    let ended = shell.env("OMP_NUM_THREADS", "1").output().unwrap();
    let said =
        format!("{}{}", String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success(), "{said}");
    let answer: Value = serde_json::from_slice(&fs::read(out.join("answer.json")).unwrap()).unwrap();
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(!text.is_empty() && answer["timings"]["draft_n"].as_u64().unwrap() > 0, "{answer}");
}
