//! From a measured cost to a schedule: `profile`, `run --schedule`, `simulate`, `economics`, and
//! `load` against a real server.

mod common;

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::thread;

use clap::Parser;
use common::{answers, assert_refused, deepspec_eval, repository, run, run_ok, target_dir};
use deepspec_core::cli::Verbosity;
use parquet::file::reader::{FileReader, SerializedFileReader};
use serde_json::{Value, json};
use tempfile::tempdir;

/// Steps take 1 ms for up to 4 tokens, and a quarter more for every further token.
const STEEP: &str = "batch_tokens,seconds\n1,0.001\n4,0.001\n128,0.032\n";

fn drafter() -> String {
    repository("assets/tiny-dspark").to_str().unwrap().to_string()
}

fn ok(args: &[&str]) -> String {
    let output = deepspec_eval(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn parsed(file: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap()
}

#[test]
fn a_measured_cost_decides_what_is_verified_and_no_answer_changes() {
    let dir = tempdir().unwrap();
    let [cost, steep, whole, cut] =
        ["cost.json", "steep.csv", "whole", "cut"].map(|name| dir.path().join(name));
    let (target, file) = (target_dir(), cost.to_str().unwrap());
    let profile = [
        "profile",
        "--quiet",
        "--device",
        "cpu",
        "--target",
        target.to_str().unwrap(),
        "--draft",
        &drafter(),
    ];
    let profile =
        [&profile[..], &["--max-num-seqs", "4,1", "--context-lens", "32,8", "--output", file]].concat();
    assert!(ok(&profile).contains("verification behind 32 tokens of history"));
    let found = parsed(&cost);
    assert_eq!(found["verify"][0]["batch_tokens"], json!([1, 2, 4, 8, 16, 32]), "{found}");
    assert_eq!((&found["verify"][1]["context"], &found["draft"]["requests"]), (&json!(32), &json!([1, 4])));
    // Without the drafter, whose taps the target would store; it equals a profile of the target
    // alone.
    let plain = dir.path().join("plain.json");
    let alone = [
        &profile[..6],
        &["--max-num-seqs", "4,1", "--context-lens", "32", "--output", plain.to_str().unwrap()],
    ];
    ok(&alone.concat());
    for table in [&found["plain"][1], &parsed(&plain)["verify"][0]] {
        assert_eq!((&table["context"], &table["batch_tokens"]), (&json!(32), &json!([1, 4])));
    }
    assert_eq!(parsed(&plain)["plain"], json!([]));
    assert!(found["target"]["weights_digest"].is_string() && found["machine"]["processor"].is_string());
    assert!(deepspec_eval(&profile).status.success(), "the same again has nothing to do");
    let other = [&profile[..], &["--context-lens", "64"]].concat();
    assert_refused(&deepspec_eval(&other), 2, &[file, "--overwrite"]);

    let asked = ["--no-baseline", "--temperature", "0", "--limit", "4", "--max-num-seqs", "4", "--json"];
    run_ok(&drafter(), &whole, &asked);
    fs::write(&steep, STEEP).unwrap();
    for (schedule, costs) in [
        ("prefix", file),
        ("prefix-async", file),
        ("prefix", steep.to_str().unwrap()),
        ("fixed:3", ""),
        ("threshold:0.7", ""),
    ] {
        let mut more = vec!["--schedule", schedule, "--overwrite"];
        if !costs.is_empty() {
            more.extend(["--cost", costs]);
        }
        run_ok(&drafter(), &cut, &[&asked[..], &more].concat());
        assert_eq!(answers(&cut), answers(&whole), "{schedule}");
        let [before, after] = [&whole, &cut].map(|dir| parsed(&dir.join("results.json")));
        assert_eq!(after["settings"]["schedule"], json!(schedule));
        let verified = |results: &Value| results["suites"][0]["counts"]["proposed"].as_u64().unwrap();
        assert!(verified(&after) <= verified(&before));
        if costs.ends_with(".csv") {
            assert!(verified(&after) < verified(&before) / 2, "four sequences leave no free token");
        }
    }
    for (more, words) in [
        (vec!["--schedule", "prefix"], vec!["--cost", "profile"]),
        (vec!["--schedule", "plain"], vec!["--draft none"]),
        (vec!["--schedule", "whole", "--cost", file], vec!["reads no costs"]),
        (vec!["--schedule", "prefix", "--cost", file, "--max-num-seqs", "64"], vec!["up to 32 tokens"]),
        (vec!["--schedule", "prefix", "--cost", "absent.json"], vec!["absent.json", "profile"]),
    ] {
        let refused = run(&drafter(), &cut, &[&["--overwrite", "--no-baseline"][..], &more].concat());
        assert_refused(&refused, 2, &words);
    }
    assert_eq!(run(&drafter(), &cut, &["--schedule", "fixed:0", "--overwrite"]).status.code(), Some(2));
}

#[test]
fn a_recorded_run_is_replayed_on_any_cost() {
    let dir = tempdir().unwrap();
    let [recorded, steep, out] = ["run", "steep.csv", "simulation"].map(|name| dir.path().join(name));
    run_ok(&drafter(), &recorded, &["--no-baseline", "--temperature", "0", "--limit", "6", "--json"]);
    fs::write(&steep, STEEP).unwrap();
    let [from, cost, to] = [&recorded, &steep, &out].map(|path| path.to_str().unwrap());
    let simulate =
        ["simulate", "--quiet", from, "--cost", cost, "--output-dir", to, "--cycles", "4000", "--emit"];
    let told = ok(&[&simulate[..], &["--concurrency", "1,16"]].concat());
    assert!(told.contains("whole is slower than plain decoding from 16 sequences on"), "{told}");
    let found = parsed(&out.join("simulation.json"));
    let rate = |schedule: &str, load: usize| {
        let courses = found["courses"].as_array().unwrap();
        let course = courses.iter().find(|course| course["schedule"] == schedule).unwrap();
        let of = |key: &str| course["outcomes"][load][key].as_f64().unwrap();
        (of("tokens") + of("first_tokens")) / of("seconds")
    };
    // One token per step, and one step per prompt, which costs nothing here: 1,000 tokens/s, and
    // the cost of 16 tokens.
    assert!((rate("plain", 0) / 1000.0 - 1.0).abs() < 1e-6, "{}", rate("plain", 0));
    assert!((rate("plain", 1) / 4000.0 - 1.0).abs() < 0.02, "{}", rate("plain", 1));
    assert!(rate("whole", 0) > 1200.0 && rate("whole", 1) < 3000.0);
    assert!(
        rate("prefix", 0) > 0.97 * rate("whole", 0),
        "{} against {}",
        rate("prefix", 0),
        rate("whole", 0)
    );
    assert!(rate("prefix", 1) > 0.97 * rate("plain", 1), "{}", rate("prefix", 1));
    for name in ["throughput.svg", "frontier.png", "engines.md"] {
        assert!(out.join(name).is_file(), "{name}");
    }
    let ranges = parsed(&out.join("vllm-batch-sizes.json"));
    assert_eq!(
        (&ranges[0][0], &ranges.as_array().unwrap().last().unwrap()[2]),
        (&json!(1), &json!(0)),
        "{ranges}"
    );
    let others = found["miscalibrated"].as_array().unwrap();
    let sharpness: Vec<f64> = others.iter().map(|course| course["sharpness"].as_f64().unwrap()).collect();
    assert_eq!(sharpness, [0.25, 0.5, 2.0, 4.0], "{others:?}");
    // The files written for SGLang give the same results when they are read back.
    let [rates, temperatures] = ["sglang-cost.json", "sglang-sts.json"].map(|name| out.join(name));
    let again = dir.path().join("again");
    let more = ["--calibration", temperatures.to_str().unwrap(), "--concurrency", "1,16"];
    let again_args = [
        "simulate",
        "--quiet",
        from,
        "--cost",
        rates.to_str().unwrap(),
        "--output-dir",
        again.to_str().unwrap(),
    ];
    ok(&[&again_args[..], &["--cycles", "4000"], &more].concat());
    let plain = |file: &Path| parsed(file)["courses"][0]["outcomes"][1]["seconds"].as_f64().unwrap();
    let ratio = plain(&again.join("simulation.json")) / plain(&out.join("simulation.json"));
    assert!((ratio - 1.0).abs() < 1e-3, "{ratio}");
    assert_refused(&deepspec_eval(&simulate), 2, &["simulation.json", "--overwrite"]);
    let crowded = [&simulate[..], &["--overwrite", "--concurrency", "256"]].concat();
    assert_refused(&deepspec_eval(&crowded), 2, &["up to 128 tokens", "profile further"]);
    // The server's overhead per step is estimated from its throughput, and predicts other loads.
    let loads = [1, 2, 3, 4, 6, 8];
    let simulated = |out: &Path, more: &[&str]| {
        let out =
            ["--output-dir", out.to_str().unwrap(), "--concurrency", "1,2,3,4,6,8", "--schedule", "prefix"];
        ok(&[&["simulate", "--quiet", from, "--cost", cost, "--cycles", "4000"], &out[..], more].concat());
    };
    let [seen, file, told] = ["seen", "load.json", "told"].map(|name| dir.path().join(name));
    let bare = {
        simulated(&seen, &[]);
        parsed(&seen.join("simulation.json"))
    };
    // A server whose scheduling takes half a millisecond, which changes the decisions of its
    // planner.
    simulated(&seen, &["--overhead-ms", "0.5", "--overwrite"]);
    let seen = parsed(&seen.join("simulation.json"));
    let rates = |simulation: &Value| -> Vec<(String, u64, f64)> {
        let courses = simulation["courses"].as_array().unwrap().clone();
        let of = |course: &Value| -> Vec<_> {
            let number = |cell: &Value, key: &str| cell[key].as_f64().unwrap();
            let rate = |cell: &Value| {
                (number(cell, "tokens") + number(cell, "first_tokens")) / number(cell, "seconds")
            };
            let schedule = course["schedule"].as_str().unwrap().to_string();
            let outcomes = course["outcomes"].as_array().unwrap().iter();
            outcomes
                .map(|cell| (schedule.clone(), cell["concurrency"].as_u64().unwrap(), rate(cell)))
                .collect()
        };
        courses.iter().flat_map(of).collect()
    };
    let runs: Vec<Value> = rates(&seen)
        .into_iter()
        .filter(|(_, users, _)| ![3, 6].contains(users))
        .map(|(schedule, users, rate)| {
            json!({"server": schedule, "level": {"concurrency": users}, "failed": 0, "tokens_per_second": rate})
        })
        .collect();
    let written = |runs: &[Value]| {
        let load = json!({"format": "deepspec-load", "format_version": 1, "runs": runs});
        fs::write(&file, load.to_string()).unwrap();
    };
    written(&runs);
    simulated(&told, &["--served", file.to_str().unwrap()]);
    let told = parsed(&told.join("simulation.json"));
    assert_eq!(told["served"].as_array().unwrap().len(), 3 * (loads.len() - 2));
    let mut apart: f64 = 0.0;
    for ((found, wanted), without) in rates(&told).iter().zip(rates(&seen)).zip(rates(&bare)) {
        let (schedule, users, wanted) = wanted;
        assert!((found.2 / wanted - 1.0).abs() < 2e-2, "{schedule} at {users}: {} for {wanted}", found.2);
        apart = apart.max((without.2 / wanted - 1.0).abs());
    }
    assert!(apart > 0.1, "costs alone would have foretold it: {apart}");
    assert!(told["served_off"].as_f64().unwrap() < 2e-2);
    let refused = |runs: &[Value], words: &[&str]| {
        written(runs);
        let args = [&simulate[..], &["--overwrite", "--served", file.to_str().unwrap()]].concat();
        assert_refused(&deepspec_eval(&args), 2, words);
    };
    refused(&runs[..3], &["3 throughputs, of 1 schedules at 3 loads", "8"]);
    let flat = |users: usize| json!({"server": "plain", "level": {"concurrency": users}, "failed": 0, "tokens_per_second": 9.0});
    refused(
        &(1..9).map(flat).collect::<Vec<_>>(),
        &["8 throughputs, of 1 schedules at 8 loads", "two schedules"],
    );
    let mut failed = runs.clone();
    failed[2]["failed"] = json!(4);
    refused(&failed, &["4 requests to plain failed"]);
    written(&runs);
    refused(&runs, &["--emit", "--served"]);
    let bare = ["simulate", from, "--cost", cost, "--output-dir", to, "--overwrite"];
    let twice = ["--overhead-ms", "1", "--served", file.to_str().unwrap()];
    assert_refused(&deepspec_eval(&[&bare[..], &twice].concat()), 2, &["--overhead-ms", "leave one"]);
    let level = json!({"concurrency": 1});
    refused(
        &[json!({"server": "mine", "level": level, "failed": 0, "tokens_per_second": 1.0})],
        &["`mine`", "prefix=http"],
    );
    refused(
        &[json!({"server": "plain", "level": {"rate": 2.0}, "failed": 0, "tokens_per_second": 1.0})],
        &["2 requests/s"],
    );
    let cut = dir.path().join("cut");
    run_ok(&drafter(), &cut, &["--no-baseline", "--limit", "2", "--schedule", "threshold:0.5", "--json"]);
    let of_cut = ["simulate", cut.to_str().unwrap(), "--cost", cost, "--output-dir", to, "--overwrite"];
    assert_refused(&deepspec_eval(&of_cut), 2, &["threshold:0.5", "never saw"]);
}

#[test]
fn economics_reads_configs_and_its_own_descriptions() {
    let dir = tempdir().unwrap();
    let [yaml, out] = ["model.yaml", "out"].map(|name| dir.path().join(name));
    let config = repository("configs/shapes/qwen3_4b.json");
    let config = config.to_str().unwrap();
    let asked =
        ["--hardware", "h200", "--batch-size", "1,256", "--context-len", "4096", "--acceptance", "0.8"];
    let table = ok(&[&["economics", config][..], &asked].concat());
    assert!(table.contains("B = 256") && table.contains("nothing measured"), "{table}");
    fs::write(&yaml, ok(&["economics", config, "--print-model"])).unwrap();
    let again =
        ok(&[&["economics", yaml.to_str().unwrap(), "--output-dir", out.to_str().unwrap()][..], &asked]
            .concat());
    // The sentence above the table names the model as it was given.
    let rows = |text: &str| text.split_once("\n\n").map(|(_, rows)| rows.to_string());
    assert_eq!(rows(&again), rows(&table));
    assert!(table.contains("--draft-share"), "what drafting costs is said: {table}");
    assert!(out.join("report.html").is_file() && out.join("plots/marginal.svg").is_file());
    let best = parsed(&out.join("economics.json"))["points"][0]["best_length"].as_u64().unwrap();
    assert!(best > 3, "tokens are free for one request: {best}");
    // A drafter with its own roofline.
    let tiny = repository("assets/tiny-dspark");
    let drafting = ["--draft-model", tiny.to_str().unwrap()];
    let of = |folder: &str, more: &[&str]| {
        let dir = dir.path().join(folder);
        ok(&[&["economics", config, "--output-dir", dir.to_str().unwrap()][..], &asked, more].concat());
        parsed(&dir.join("economics.json"))["points"][0]["speed_up"].as_f64().unwrap()
    };
    let block = of("block", &drafting);
    let turns = of("turns", &[&drafting[..], &["--sequential-draft"]].concat());
    assert!(1.0 < turns && turns < block, "a pass for each token against one for all: {turns}, {block}");
    for (args, words) in [
        (vec!["economics", config, "--expert-parallel", "0", "--print-model"], vec!["--expert-parallel"]),
        (vec!["economics", config, "--hardware", "z9"], vec!["z9", "b200"]),
        (vec!["economics", "absent"], vec!["absent", "hub"]),
        (vec!["economics", config, "--acceptance", "2"], vec!["--acceptance 2"]),
    ] {
        assert_refused(&deepspec_eval(&args), 2, &words);
    }
    fs::write(&yaml, "layers: []\n").unwrap();
    assert_refused(
        &deepspec_eval(&["economics", yaml.to_str().unwrap()]),
        2,
        &["model.yaml", "`layers` is empty"],
    );
    let weird = dir.path().join("hardware.yaml");
    fs::write(&weird, "{bandwidth: 0, bf16: 1, fp8: 1, fp4: 1}").unwrap();
    let slow = ["economics", config, "--hardware", weird.to_str().unwrap()];
    assert_refused(&deepspec_eval(&slow), 2, &["hardware.yaml", "`bandwidth` is 0"]);
    fs::write(&yaml, "layers: 3\n").unwrap();
    assert_refused(&deepspec_eval(&["economics", yaml.to_str().unwrap()]), 2, &["model.yaml", "layers"]);
}

/// The server's own arguments.
#[derive(Parser)]
struct Serve {
    #[command(flatten)]
    args: deepspec_serve::http::Args,
}

#[test]
fn load_is_measured_against_a_real_server() {
    let dir = tempdir().unwrap();
    let steep = dir.path().join("steep.csv");
    fs::write(&steep, STEEP).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let (target, drafter) = (target_dir(), drafter());
    let serve = [
        "serve",
        "--model",
        target.to_str().unwrap(),
        "--port",
        &port,
        "--max-num-seqs",
        "4",
        "--draft",
        &drafter,
    ];
    let schedule = ["--schedule", "prefix", "--cost", steep.to_str().unwrap(), "--device", "cpu"];
    let serve = Serve::parse_from([&serve[..], &schedule].concat());
    thread::spawn(move || deepspec_serve::http::run(&serve.args, Verbosity::Quiet).unwrap());
    let url = format!("http://127.0.0.1:{port}");
    let page = |path: &str| ureq::get(format!("{url}{path}")).call().ok()?.body_mut().read_to_string().ok();
    while page("/health").is_none() {
        thread::yield_now();
    }
    let suites = repository("eval_datasets");
    let load = |levels: &[&str], out: &Path| {
        let asked = ["load", "--quiet", "--server", &url, "--suite", "smoke-math", "--suite", "smoke-chat"];
        let limits = ["--seconds", "2", "--warm-up", "0.5", "--max-new-tokens", "24"];
        let to = ["--suites-dir", suites.to_str().unwrap(), "--output-dir", out.to_str().unwrap(), "--json"];
        let report: Value = serde_json::from_str(&ok(&[&asked[..], &limits, &to, levels].concat())).unwrap();
        report
    };
    let closed = dir.path().join("closed");
    let report = load(&["--concurrency", "1,6"], &closed);
    for run in report["runs"].as_array().unwrap() {
        assert!(run["requests"].as_u64().unwrap() > 0 && run["failed"] == 0, "{run}");
        assert!(
            run["tokens_per_second"].as_f64().unwrap() > 0.0 && run["time_to_first_token"]["p99"].is_number(),
            "{run}"
        );
    }
    let rows = |dir: &Path| {
        let file = fs::File::open(dir.join("requests.parquet")).unwrap();
        SerializedFileReader::new(file).unwrap().metadata().file_metadata().num_rows()
    };
    let counted: u64 =
        report["runs"].as_array().unwrap().iter().map(|run| run["requests"].as_u64().unwrap()).sum();
    assert!(rows(&closed) >= counted as i64 && closed.join("report.html").is_file());
    let open = dir.path().join("open");
    let report = load(&["--rate", "8"], &open);
    assert!(report["runs"][0]["failed"] == 0 && report["runs"][0]["level"]["rate"] == 8.0, "{report}");
    // The server's counters match the requests.
    let metrics = page("/metrics").unwrap();
    let value = |name: &str| -> f64 {
        let line = metrics.lines().find(|line| line.starts_with(&format!("deepspec:{name} "))).unwrap();
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    };
    let [cycles, drafts, proposed, accepted] = [
        "decode_cycles_total",
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
    ]
    .map(value);
    assert!(cycles > drafts && drafts > 0.0 && proposed >= drafts && accepted <= proposed, "{metrics}");
    assert_eq!(value("time_to_first_token_seconds_count"), (rows(&closed) + rows(&open)) as f64);
    assert!(value("num_requests_running") == 0.0 && value("num_requests_waiting") == 0.0, "all have ended");
    assert!((value("spec_decode_wasted_fraction") - (1.0 - accepted / proposed)).abs() < 1e-9);
    assert!((0.0..=7.0).contains(&value("verify_budget_per_request")) && value("occupancy") <= 1.0);
    let answers = value("time_to_first_token_seconds_count");
    assert_eq!(value("request_queue_time_seconds_count"), answers);
    // The first token of an answer has waited for its prompt, so it has no inter-token latency.
    assert_eq!(value("inter_token_latency_seconds_count"), value("generation_tokens_total") - answers);
    let by_position: f64 = metrics
        .lines()
        .filter(|line| line.starts_with("deepspec:spec_decode_num_accepted_tokens_per_pos_total{position="))
        .map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap())
        .sum();
    assert_eq!(by_position, accepted);
    // This page, sampled over time under load.
    let watched = dir.path().join("watched");
    let told = thread::scope(|scope| {
        let busy = scope.spawn(|| load(&["--concurrency", "3"], &dir.path().join("busy")));
        let to = ["--output-dir", watched.to_str().unwrap(), "--json"];
        let told = ok(&[&["watch", &url, "--seconds", "2", "--every", "0.25"][..], &to].concat());
        busy.join().unwrap();
        told
    });
    let told: Value = serde_json::from_str(&told).unwrap();
    let intervals = told["intervals"].as_array().unwrap();
    assert!(intervals.iter().any(|interval| interval["accepted_length"].as_f64() >= Some(1.0)), "{told}");
    assert!(intervals.iter().any(|interval| interval["running"].as_f64() > Some(0.0)), "{told}");
    assert!(watched.join("report.html").is_file() && watched.join("watch.json").is_file());
    let nobody = ["load", "--server", "http://127.0.0.1:9", "--suite", "smoke-math", "--output-dir", "x"];
    let refused = deepspec_eval(&[&nobody[..], &["--suites-dir", suites.to_str().unwrap()]].concat());
    assert_eq!(refused.status.code(), Some(1), "{}", String::from_utf8_lossy(&refused.stderr));
}
