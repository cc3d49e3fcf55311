//! `run --server` against servers that answer as vLLM, SGLang and llama.cpp do.

mod common;

use std::fs;
use std::path::Path;
use std::process::Output;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use common::{assert_refused, deepspec_eval, repository, results, target_dir};
use deepspec_testkit::server::{ReceivedRequest, Reply, Server};
use serde_json::{Value, json};

/// A stop token of the tiny target.
const STOP: i64 = 1020;
/// Every answer has these tokens. Its cycles commit 7, and its blocks 8: one lies behind the end.
const TOKENS: [i64; 8] = [40, 41, 42, 43, 44, 45, 46, STOP];
/// Drafted tokens of a block, and the accepted ones of an answer's two blocks.
const BLOCK: u64 = 7;
const ACCEPTED: [u64; 2] = [2, 4];
/// (tokens − answers) ÷ cycles.
const TAU: f64 = 3.5;

/// `run --server` on four prompts of a suite.
fn run(server: &str, dir: &Path, more: &[&str]) -> Output {
    let (suites, target) = (repository("eval_datasets"), target_dir());
    let mut args = vec!["run", "--quiet", "--suite", "smoke-math", "--limit", "4", "--temperature", "0"];
    args.extend(["--target", target.to_str().unwrap(), "--suites-dir", suites.to_str().unwrap()]);
    args.extend(["--server", server, "--output-dir", dir.to_str().unwrap(), "--max-new-tokens", "64"]);
    args.extend(more);
    deepspec_eval(&args)
}

/// As [`run`], which must succeed; returns its standard output.
fn run_ok(server: &str, dir: &Path, more: &[&str]) -> String {
    let output = run(server, dir, more);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn nothing_here() -> Reply {
    Reply::Status(404, vec![], r#"{"detail": "Not Found"}"#.into())
}

/// A suite of a short prompt and one of more than 512 tokens. Cycles begin behind 1 and 4 tokens of an answer.
#[test]
fn steps_of_vllm_tell_accepted_lengths_by_context() {
    let root = tempfile::tempdir().unwrap();
    let suite = root.path().join("contexts.jsonl");
    let rows =
        ["Hi.".to_string(), "One more word. ".repeat(250)].map(|text| json!({"turns": [text]}).to_string());
    fs::write(&suite, rows.join("\n")).unwrap();
    for (name, with_steps) in [("steps", true), ("totals", false)] {
        let server = Server::start(move |ask| {
            vllm(&ask, || {
                let mut answer = vllm_answer(true);
                let figures = answer["metrics"]["speculative_decoding"].as_object_mut().unwrap();
                if !with_steps {
                    figures.retain(|key, _| !key.starts_with("per_step"));
                }
                Reply::Json(answer)
            })
        });
        let (dir, target) = (root.path().join(name), target_dir());
        let output = deepspec_eval(&[
            "run",
            "--quiet",
            "--temperature",
            "0",
            "--max-new-tokens",
            "64",
            "--server",
            &server.url(),
            "--suite",
            suite.to_str().unwrap(),
            "--target",
            target.to_str().unwrap(),
            "--output-dir",
            dir.to_str().unwrap(),
        ]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let ranges = results(&dir)["suites"][0]["context_lengths"].as_array().cloned().unwrap_or_default();
        let found: Vec<_> =
            ranges.iter().map(|range| (&range["cycles"], &range["accepted_length"])).collect();
        let expected = (json!(2), json!(TAU));
        let expected = if with_steps { vec![(&expected.0, &expected.1); 2] } else { vec![] };
        assert_eq!(found, expected, "{name}");
    }
}

/// An answer of vLLM, with figures or without.
fn vllm_answer(with_figures: bool) -> Value {
    let figures = json!({"speculative_decoding": {"num_spec_tokens": BLOCK, "num_spec_steps": 2,
        "acceptance_histogram": [0, 0, 1, 0, 1, 0, 0, 0], "num_draft_tokens": 2 * BLOCK,
        "num_accepted_draft_tokens": 6, "per_step_accepted": ACCEPTED, "per_step_drafted": [BLOCK, BLOCK]}});
    let metrics = if with_figures { figures } else { Value::Null };
    json!({"choices": [{"token_ids": TOKENS, "finish_reason": "stop", "stop_reason": STOP}], "metrics": metrics})
}

/// Paths of vLLM, apart from its answers.
fn vllm(ask: &ReceivedRequest, answer: impl FnOnce() -> Reply) -> Reply {
    match ask.path.as_str() {
        "/version" => Reply::Json(json!({"version": "0.32.0"})),
        "/v1/completions" => answer(),
        _ => nothing_here(),
    }
}

fn tau(found: &Value) -> f64 {
    found["suites"][0]["metrics"]["accepted_length"].as_f64().unwrap()
}

#[test]
fn vllm_is_judged_by_its_figures_of_every_request() {
    let bodies = Arc::new(Mutex::new(vec![]));
    let seen = Arc::clone(&bodies);
    let server = Server::start(move |ask| {
        vllm(&ask, || {
            seen.lock().unwrap().push(ask.body.clone());
            Reply::Json(vllm_answer(true))
        })
    });
    let baseline = Server::start(|ask| vllm(&ask, || Reply::Json(vllm_answer(false))));
    let root = tempfile::tempdir().unwrap();
    let dirs = [root.path().join("one"), root.path().join("two")];
    let more = ["--baseline-server", &baseline.url(), "--draft", "deepseek-ai/dspark_qwen3_4b_block7"];
    let table = run_ok(&server.url(), &dirs[0], &more);
    assert!(table.lines().all(|line| line.chars().count() <= 80 || line.starts_with("target ")), "{table}");
    for words in
        ["served by vLLM 0.32.0", "figures per request", "as the engine is configured", "without a drafter"]
    {
        assert!(table.contains(words), "{words} not in {table}");
    }
    let found = results(&dirs[0]);
    assert_eq!((tau(&found), found["served"]["figures"].as_str()), (TAU, Some("per_request")));
    let suite = &found["suites"][0];
    assert_eq!(suite["counts"]["committed"], 4 * 7);
    assert_eq!(suite["counts"]["accepted_at"], json!([8, 8, 4, 4, 0, 0, 0]));
    assert!(suite["metrics"]["speed_up"].as_f64().unwrap() > 0.0);
    assert!(suite["metrics"]["accepted_length_interval"].is_object());
    assert_eq!(found["drafter"]["hub_id"], more[3]);
    assert!(fs::read_to_string(dirs[0].join("report.md")).unwrap().contains("vLLM 0.32.0 decoded"));
    let body = bodies.lock().unwrap().last().unwrap().clone();
    assert!(body["prompt"].as_array().is_some_and(|ids| ids.iter().all(Value::is_i64)), "{body}");
    assert!(body["stop_token_ids"].as_array().unwrap().contains(&json!(STOP)), "{body}");
    assert_eq!(
        (&body["temperature"], &body["max_tokens"], &body["top_k"]),
        (&json!(0.0), &json!(64), &json!(0))
    );

    // A repeated command has nothing to do, and other results are kept.
    let asked = server.count();
    assert_eq!(run_ok(&server.url(), &dirs[0], &more), table);
    assert_eq!(server.count(), asked);
    assert_refused(
        &run(&server.url(), &dirs[0], &["--seed", "3"]),
        2,
        &["another evaluation", "--overwrite"],
    );

    run_ok(&server.url(), &dirs[1], &[]);
    let compared =
        deepspec_eval(&["compare", "--json", dirs[0].to_str().unwrap(), dirs[1].to_str().unwrap()]);
    let compared: Value = serde_json::from_slice(&compared.stdout).unwrap();
    assert_eq!(
        (&compared["deltas"][0]["overall"]["delta"], &compared["deltas"][0]["overall"]["prompts"]),
        (&json!(0.0), &json!(4))
    );
    assert_eq!(compared["differences"], json!([]));
}

/// A vLLM without figures in its answers, whose counters grow with each.
fn counting() -> Server {
    let answers = AtomicU64::new(0);
    Server::start(move |ask| {
        let counter = |name: &str, value: u64| {
            format!("# TYPE vllm:{name} counter\nvllm:{name}{{engine=\"0\"}} {value}.0\n")
        };
        if ask.path == "/metrics" {
            let count = answers.load(Ordering::SeqCst);
            let position = |k: u64| {
                let blocks = ACCEPTED.iter().filter(|accepted| **accepted > k).count() as u64;
                format!(
                    "vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine=\"0\",position=\"{k}\"}} {}.0\n",
                    blocks * count
                )
            };
            let page = counter("spec_decode_num_drafts_total", 2 * count)
                + &counter("spec_decode_num_draft_tokens_total", 2 * BLOCK * count)
                + &counter("spec_decode_num_accepted_tokens_total", 6 * count)
                + &counter("generation_tokens_total", 8 * count)
                + "# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter\n"
                + &(0..BLOCK).map(position).collect::<String>();
            return Reply::Status(200, vec![], page);
        }
        vllm(&ask, || {
            answers.fetch_add(1, Ordering::SeqCst);
            Reply::Json(vllm_answer(false))
        })
    })
}

#[test]
fn counters_serve_where_answers_have_no_figures() {
    let (server, root) = (counting(), tempfile::tempdir().unwrap());
    let dirs = [root.path().join("many"), root.path().join("one")];
    let output = run(&server.url(), &dirs[0], &[]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    assert!(
        told.contains("--per-request-spec-decode-metrics detailed") && !told.contains("other requests are"),
        "{told}"
    );
    let found = results(&dirs[0]);
    assert_eq!((tau(&found), found["served"]["figures"].as_str()), (TAU, Some("counters")));
    assert_eq!(found["suites"][0]["metrics"]["accepted_length_interval"], Value::Null);
    assert_eq!(found["suites"][0]["counts"]["accepted_at"], json!([8, 8, 4, 4, 0, 0, 0]));
    // One at a time, the counters grow by one answer's figures.
    run_ok(&server.url(), &dirs[1], &["--max-num-seqs", "1"]);
    let found = results(&dirs[1]);
    assert_eq!(tau(&found), TAU);
    assert!(found["suites"][0]["metrics"]["accepted_length_interval"].is_object());
}

#[test]
fn llama_cpp_is_judged_by_its_timings() {
    let server = Server::start(|ask| match ask.path.as_str() {
        "/props" => {
            Reply::Json(json!({"build_info": "b9000", "default_generation_settings": {"n_ctx": 512}}))
        }
        "/completion" => {
            let timings = |tokens: usize| match tokens {
                1 => json!({"predicted_n": 1}),
                2..=4 => json!({"predicted_n": tokens, "draft_n": 7, "draft_n_accepted": 2}),
                _ => json!({"predicted_n": tokens, "draft_n": 14, "draft_n_accepted": 6}),
            };
            let event = |value: Value| format!("data: {value}\n\n");
            let token = |(at, id): (usize, &i64)| {
                event(json!({"content": "a", "tokens": [id], "stop": false, "timings": timings(at + 1)}))
            };
            let stream: String = TOKENS.iter().enumerate().map(token).collect();
            let last =
                json!({"content": "", "tokens": [], "stop": true, "stop_type": "eos", "timings": timings(8)});
            Reply::Status(200, vec![], stream + &event(last))
        }
        _ => nothing_here(),
    });
    let dir = tempfile::tempdir().unwrap();
    run_ok(&server.url(), dir.path(), &[]);
    let found = results(dir.path());
    assert_eq!((tau(&found), found["served"]["engine"].as_str()), (TAU, Some("llama.cpp")));
    assert_eq!(found["suites"][0]["counts"]["accepted_at"], json!([8, 8, 4, 4, 0, 0, 0]));
}

/// An SGLang that reports these settings beside its own.
fn sglang(settings: Value) -> Server {
    Server::start(move |ask| match ask.path.as_str() {
        "/server_info" => {
            let mut told = json!({"version": "0.5.23", "speculative_algorithm": "DSPARK", "context_length": 512,
                "speculative_num_draft_tokens": 8, "speculative_draft_model_path": "a/b"});
            told["internal_states"] = json!([settings]);
            Reply::Json(told)
        }
        "/generate" => Reply::Json(json!({"text": "a", "output_ids": TOKENS[..7], "meta_info": {
            "finish_reason": {"type": "stop", "matched": STOP}, "completion_tokens": 8, "spec_verify_ct": 2,
            "spec_num_proposed_drafts": 2 * BLOCK, "spec_correct_drafts_histogram": [0, 0, 1, 0, 1]}})),
        _ => nothing_here(),
    })
}

#[test]
fn sglang_is_judged_by_its_meta_info() {
    let (server, dir) = (sglang(json!({})), tempfile::tempdir().unwrap());
    run_ok(&server.url(), dir.path(), &[]);
    let found = results(dir.path());
    assert_eq!((tau(&found), found["drafter"]["path"].as_str()), (TAU, Some("a/b")));
    assert_eq!(found["drafter"]["block_size"], 7);
    let outputs = fs::read_to_string(dir.path().join("outputs.jsonl")).unwrap();
    let row: Value = serde_json::from_str(outputs.lines().next().unwrap()).unwrap();
    assert_eq!(row["token_ids"], json!(TOKENS), "SGLang leaves the stop token out");
}

#[test]
fn servers_that_pin_acceptance_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let pinned = sglang(json!({"env": {"SGLANG_SIMULATE_ACC_LEN": "2.5"}}));
    let words = ["SGLang pins acceptance by SGLANG_SIMULATE_ACC_LEN", "start it without"];
    assert_refused(&run(&pinned.url(), dir.path(), &[]), 1, &words);
    let synthetic = Server::start(|ask| match ask.path.as_str() {
        "/server_info?config_format=json" => Reply::Json(json!({"vllm_config": {"speculative_config":
            {"rejection_sample_method": "synthetic", "draft_sample_method": "greedy"}}})),
        _ => vllm(&ask, || Reply::Json(vllm_answer(true))),
    });
    let words = ["vLLM pins acceptance by rejection_sample_method = \"synthetic\""];
    assert_refused(&run(&synthetic.url(), dir.path(), &[]), 1, &words);
}

#[test]
fn a_server_that_is_busy_for_a_while_is_asked_again() {
    let refusals = AtomicUsize::new(0);
    let server = Server::start(move |ask| {
        vllm(&ask, || match refusals.fetch_add(1, Ordering::SeqCst) {
            1 | 5 | 7 => Reply::Status(503, vec![], "busy".into()),
            6 => Reply::Reset,
            _ => Reply::Json(vllm_answer(true)),
        })
    });
    let dir = tempfile::tempdir().unwrap();
    run_ok(&server.url(), dir.path(), &[]);
    assert_eq!(results(dir.path())["suites"][0]["counts"]["samples"], 4);
}

#[test]
fn a_run_goes_on_after_its_server_died() {
    let (answers, dead) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(1)));
    let (count, is_dead) = (Arc::clone(&answers), Arc::clone(&dead));
    let server = Server::start(move |ask| {
        vllm(&ask, || {
            // Four answers warm up, and two of the suite follow.
            if count.fetch_add(1, Ordering::SeqCst) >= 6 && is_dead.load(Ordering::SeqCst) == 1 {
                return Reply::Reset;
            }
            Reply::Json(vllm_answer(true))
        })
    });
    let dir = tempfile::tempdir().unwrap();
    let words = ["--server http", "does not answer smoke-math/", "start the engine again"];
    assert_refused(&run(&server.url(), dir.path(), &["--max-num-seqs", "1"]), 1, &words);
    assert!(dir.path().join("journal.jsonl").exists());
    dead.store(0, Ordering::SeqCst);
    let before = answers.load(Ordering::SeqCst);
    run_ok(&server.url(), dir.path(), &["--max-num-seqs", "1"]);
    assert_eq!(answers.load(Ordering::SeqCst) - before, 4 + 2, "the first two answers are in the journal");
    assert_eq!((tau(&results(dir.path())), dir.path().join("journal.jsonl").exists()), (TAU, false));
}

#[test]
fn servers_that_cannot_be_judged_say_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let plain = Server::start(|ask| vllm(&ask, || Reply::Json(vllm_answer(false))));
    let words = [
        "reports no speculation",
        "vllm serve TARGET --speculative-config",
        "--per-request-spec-decode-metrics detailed",
    ];
    assert_refused(&run(&plain.url(), dir.path(), &[]), 1, &words);
    let other = Server::start(|_| nothing_here());
    assert_refused(&run(&other.url(), dir.path(), &[]), 1, &["none of the engines", "/props"]);
    let gone = {
        let server = Server::start(|_| nothing_here());
        server.url()
    };
    assert_refused(&run(&gone, dir.path(), &[]), 1, &["cannot be reached", "start the engine"]);
    let drafting = Server::start(|ask| vllm(&ask, || Reply::Json(vllm_answer(true))));
    let [one, two] = [drafting.url(), drafting.url().replace("127.0.0.1", "localhost")];
    assert_refused(
        &run(&one, dir.path(), &["--baseline-server", &two]),
        1,
        &["speculates", "without a drafter"],
    );
    assert!(!dir.path().join("results.json").exists());
}

#[test]
fn flags_of_decoding_here_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    for flags in [
        &["--dtype", "float32"][..],
        &["--device", "cpu"],
        &["--schedule", "fixed:3"],
        &["--calibration", "c.json"],
        &["--no-markov"],
        &["--draft-sampling", "greedy"],
        &["--verify", "block"],
        &["--replicas", "2"],
    ] {
        assert_refused(&run("http://127.0.0.1:1", dir.path(), flags), 2, &[flags[0], "leave"]);
    }
    assert_refused(&run("http://127.0.0.1:1", dir.path(), &["--draft", "none"]), 2, &["--draft none"]);
    assert_refused(
        &run("localhost:8000", dir.path(), &[]),
        2,
        &["--server localhost:8000", "expected the address"],
    );
}
