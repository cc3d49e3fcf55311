//! Tests the built binary: the files of a run, the output of a comparison, and the refusal of bad
//! input.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use common::{
    Trace, answers, assert_refused, deepspec_eval, drafter_config, repository, results, run, run_ok,
    target_dir, traces, write_bigram_drafter, write_drafter,
};
use deepspec_core::Tap;
use deepspec_drafters::DSparkConfig;
use deepspec_models::ModelConfig;
use deepspec_testkit::device_detection::{assert_misses_gpus, assert_waits_asleep};
use deepspec_testkit::hub::{FakeHub, FakeRepo};
use deepspec_text::{ChatTokenizer, Message, Role, generation_prompt};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Few samples, and few tokens each.
const SMALL: [&str; 4] = ["--limit", "4", "--max-new-tokens", "40"];

/// A folder with a good drafter in `good` and an untrained one in `bad`.
fn drafters() -> &'static Path {
    static DIR: OnceLock<TempDir> = OnceLock::new();
    let dir = DIR.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let corpus = dir.path().join("corpus");
        run_ok("none", &corpus, &["--seed", "7", "--limit", "24"]);
        write_bigram_drafter(&dir.path().join("good"), answers(&corpus).values());
        write_drafter(&dir.path().join("bad"), drafter_config(), |_, tensor| tensor);
        dir
    });
    dir.path()
}

fn good() -> String {
    drafters().join("good").display().to_string()
}

fn bad() -> String {
    drafters().join("bad").display().to_string()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn a_run_leaves_counts_traces_and_answers_that_agree() {
    let dir = tempfile::tempdir().unwrap();
    let table = run_ok(&good(), dir.path(), &SMALL);
    assert!(table.lines().all(|line| line.chars().count() <= 140), "{table}");
    let results = results(dir.path());
    assert_eq!((&results["format"], &results["format_version"]), (&json!("deepspec-results"), &json!(1)));
    assert_eq!(results["settings"]["seed"], 980_406);
    assert_eq!(results["drafter"]["block_size"], 5);
    assert_eq!(results["drafter"]["taps"], json!([-1, 2, 5]));
    let suites = results["suites"].as_array().unwrap();
    let names: Vec<&str> = suites.iter().map(|suite| suite["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["smoke-math", "smoke-code", "smoke-chat"]);
    assert!(names.iter().chain(&["overall", "@5", "speed-up"]).all(|word| table.contains(word)), "{table}");

    let answers = answers(dir.path());
    let traces = traces(&dir.path().join("traces.parquet"));
    for suite in suites {
        let (name, counts) = (suite["name"].as_str().unwrap(), &suite["counts"]);
        let of_suite = || traces.iter().filter(|row| row.suite == name);
        let sum = |value: fn(&Trace) -> i32| of_suite().map(|row| i64::from(value(row))).sum::<i64>();
        assert_eq!(counts["cycles"], of_suite().count());
        assert_eq!(counts["proposed"], sum(|row| row.proposed));
        assert_eq!(counts["accepted"], sum(|row| row.accepted));
        assert_eq!(counts["committed"], sum(|row| row.committed));
        assert!(of_suite().all(|row| row.confidences == row.proposed));
        assert!(of_suite().all(|row| (row.accepted.max(1)..=row.proposed).contains(&row.usable)));
        let tokens: usize =
            answers.iter().filter(|(id, _)| id.starts_with(name)).map(|(_, ids)| ids.len()).sum();
        assert_eq!((&counts["output_tokens"], &counts["samples"]), (&json!(tokens), &json!(4)));
        let tau = number(&suite["metrics"]["accepted_length"]);
        assert!((tau - number(&counts["committed"]) / number(&counts["cycles"])).abs() < 1e-12);
        assert!(tau > 1.1, "the bigram drafter should now and then be right, but τ is {tau}");
        assert!(
            number(&suite["metrics"]["speed_up"]) > 0.0
                && number(&suite["baseline"]["timing"]["wall_s"]) > 0.0
        );
    }
    for (i, domain) in results["domains"].as_array().unwrap().iter().enumerate() {
        assert_eq!(domain["metrics"], suites[i]["metrics"], "one suite is its domain's mean");
    }
    let mean = suites.iter().map(|suite| number(&suite["metrics"]["accepted_length"])).sum::<f64>() / 3.0;
    assert!((number(&results["overall"]["accepted_length"]) - mean).abs() < 1e-12);
    let mut left: Vec<_> =
        fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(
        left,
        ["outputs.jsonl", "plots", "report.html", "report.md", "results.json", "traces.parquet"],
        "nothing else stays, the journal neither"
    );
}

#[test]
fn renamed_flags_are_refused_with_the_new_name() {
    let renamed: [(&[&str], &str, &str); 10] = [
        (&["run", "--slots", "4"], "--slots", "--max-num-seqs"),
        (&["run", "--lanes", "2"], "--lanes", "--replicas"),
        (&["run", "--profile", "trace.json"], "--profile", "--torch-profile"),
        (&["run", "--dtype", "f32"], "f32", "float32"),
        (&["profile", "--requests", "1,2"], "--requests", "--max-num-seqs"),
        (&["profile", "--contexts", "128"], "--contexts", "--context-lens"),
        (&["economics", "--batch", "1"], "--batch", "--batch-size"),
        (&["economics", "--context", "1024"], "--context", "--context-len"),
        (&["calibrate", "--fold", "folded"], "--fold", "--write-folded"),
        (&["checkpoint", "convert", "--matrices", "f16"], "--matrices", "--dtype"),
    ];
    for (arguments, old, new) in renamed {
        let output = deepspec_eval(arguments);
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(told.contains(&format!("`{old}` is now `{new}`")), "{told}");
    }
}

#[test]
fn results_are_replaced_only_when_told() {
    let dir = tempfile::tempdir().unwrap();
    let small = ["--suite", "smoke-math", "--limit", "2", "--max-new-tokens", "8"];
    let printed = run_ok("none", dir.path(), &[&small[..], &["--json"]].concat());
    assert_eq!(printed, fs::read_to_string(dir.path().join("results.json")).unwrap());
    let first = results(dir.path());
    assert_eq!((&first["drafter"], &first["suites"][0]["baseline"]), (&Value::Null, &Value::Null));
    assert_eq!(first["overall"]["accepted_length"], 1.0);
    let again = run_ok("none", dir.path(), &[&small[..], &["--json"]].concat());
    assert_eq!(again, printed, "the same again has nothing to do");
    assert_refused(
        &run("none", dir.path(), &[&small[..], &["--temperature", "0"]].concat()),
        2,
        &["--overwrite"],
    );
    run_ok("none", dir.path(), &[&small[..], &["--overwrite", "--temperature", "0"]].concat());
    assert_eq!(results(dir.path())["settings"]["temperature"], 0.0);
}

#[test]
fn prompts_are_fitted_into_the_target() {
    let suites = tempfile::tempdir().unwrap();
    let tokenizer = ChatTokenizer::load(&target_dir()).unwrap();
    let length = |words: usize| {
        let message = Message::new(Role::User, "yes ".repeat(words));
        generation_prompt(&tokenizer, &[message], None, Some(false)).unwrap().len()
    };
    // The target has a context of 2048 tokens. One prompt leaves room to spare, one leaves less
    // than requested, and one is too long.
    let almost = (1..).step_by(10).take_while(|&words| length(words) < 2040).last().unwrap();
    let rows = [2, almost, almost + 20].map(|words| json!({"turns": ["yes ".repeat(words)]}).to_string());
    fs::write(suites.path().join("aime24.jsonl"), rows.join("\n")).unwrap();
    let many: String =
        (0..501).map(|i| json!({"id": i, "turns": [format!("{i} apples?")]}).to_string() + "\n").collect();
    fs::write(suites.path().join("gsm8k.jsonl"), many).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let args = ["--suite", "aime24", "--suite", "gsm8k", "--limit", "3", "--max-new-tokens", "64"];
    let args = [&args[..], &["--suites-dir", suites.path().to_str().unwrap()]].concat();
    let target = target_dir();
    let fixed = ["run", "--quiet", "--draft", "none", "--target", target.to_str().unwrap()];
    let output =
        deepspec_eval(&[&fixed[..], &["--output-dir", dir.path().to_str().unwrap()], &args].concat());
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && told.contains("aime24/2 is skipped"), "{told}");
    let results = results(dir.path());
    let aime = results["suites"].as_array().unwrap().iter().find(|suite| suite["name"] == "aime24").unwrap();
    assert_eq!((&aime["skipped"], &aime["shortened"], &aime["rows"]), (&json!(["2"]), &json!(1), &json!(3)));
    assert_eq!(aime["counts"]["samples"], 2);
    // CPython: r = list(range(501)); random.Random(980406).shuffle(r); r[:3]
    let answers = answers(dir.path());
    let shuffled = [277, 140, 388].map(|row| format!("gsm8k/{row}"));
    assert!(shuffled.iter().all(|id| answers.contains_key(id)), "{:?}", answers.keys());
}

#[test]
fn recorded_suites_are_scored_and_changed_ones_warned_of() {
    let suites = tempfile::tempdir().unwrap();
    let file = suites.path().join("mine.jsonl");
    let text: String =
        (0..5).map(|i| json!({"turns": [format!("{i} apples?")]}).to_string() + "\n").collect();
    fs::write(&file, &text).unwrap();
    let entry = json!({
        "domain": "chat", "rows": 5, "cap": 2, "source": {"files": []}, "converter": "description 0",
        "sha256": deepspec_core::digest::sha256_of_bytes(text.as_bytes()),
    });
    let record = json!({"format": "deepspec-datasets", "format_version": 1, "suites": {"mine": entry}});
    fs::write(suites.path().join("suites.json"), record.to_string()).unwrap();
    let (dir, target) = (tempfile::tempdir().unwrap(), target_dir().display().to_string());
    let score = || {
        let out = dir.path().to_str().unwrap();
        let fixed = [
            "run",
            "--quiet",
            "--overwrite",
            "--draft",
            "none",
            "--max-new-tokens",
            "8",
            "--output-dir",
            out,
        ];
        let suite = ["--target", &target, "--suites-dir", suites.path().to_str().unwrap(), "--suite", "mine"];
        let output = deepspec_eval(&[&fixed[..], &suite].concat());
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{told}");
        (results(dir.path())["suites"][0].clone(), told)
    };
    let (scored, told) = score();
    assert_eq!((&scored["name"], &scored["domain"]), (&json!("mine"), &json!("chat")));
    assert_eq!((&scored["rows"], &scored["counts"]["samples"]), (&json!(5), &json!(2)));
    assert_eq!((&scored["file_digest"], told.as_str()), (&entry["sha256"], ""));
    fs::write(&file, text.replace("apples", "pears")).unwrap();
    let (changed, told) = score();
    assert!(told.contains("mine.jsonl is not the file that suites.json records"), "{told}");
    assert_ne!(changed["file_digest"], entry["sha256"]);
    fs::write(suites.path().join("suites.json"), "[]").unwrap();
    let args = ["run", "--target", &target, "--draft", "none", "--output-dir", "out", "--suites-dir"];
    let output = deepspec_eval(&[&args[..], &[suites.path().to_str().unwrap()]].concat());
    assert_refused(&output, 2, &["suites.json: not a record of suites"]);
}

#[test]
fn files_are_scored_without_a_description() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        fs::write(dir.path().join(name), text).unwrap();
        dir.path().join(name).display().to_string()
    };
    let apples =
        write("Apples.jsonl", "{\"turns\": [\"2 apples?\"]}\n{\"id\": \"b\", \"turns\": [\"3?\"]}\n");
    let pears = write("pears.jsonl", "{\"turns\": [\"4 pears?\"], \"note\": 1}\n");
    let (out, target) = (dir.path().join("out"), target_dir().display().to_string());
    let score = |suites: &[&str]| {
        let out = out.to_str().unwrap();
        let fixed = ["run", "--quiet", "--draft", "none", "--device", "cpu", "--max-new-tokens", "8"];
        let place = ["--target", &target, "--output-dir", out, "--suites-dir", "nowhere"];
        deepspec_eval(&[&fixed[..], &place, suites].concat())
    };
    let output = score(&["--suite", &apples, "--suite", &pears]);
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(["Apples", "pears", "own"].iter().all(|word| told.contains(word)), "{told}");
    let found = results(&out);
    let of = |i: usize| ["name", "domain", "rows", "file"].map(|key| found["suites"][i][key].clone());
    assert_eq!(of(0), [json!("Apples"), json!("own"), json!(2), json!(apples)]);
    assert_eq!(of(1), [json!("pears"), json!("own"), json!(1), json!(pears)]);
    assert_eq!(found["domains"][0]["suites"], json!(["Apples", "pears"]));
    assert_eq!(answers(&out).keys().collect::<Vec<_>>(), ["Apples/0", "Apples/b", "pears/0"]);
    fs::remove_dir_all(&out).unwrap();
    let bad = write("bad.jsonl", "{\"turns\": [\"a\"]}\n{\"conversations\": []}\n");
    assert_refused(&score(&["--suite", &bad]), 2, &["bad.jsonl:2: the row has no `turns`"]);
    assert_refused(&score(&["--suite", "none.jsonl"]), 2, &["none.jsonl does not exist"]);
}

#[test]
fn comparisons_show_what_differs() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    run_ok(&good(), Path::new(&path("good")), &SMALL);
    run_ok(&bad(), Path::new(&path("bad")), &SMALL);
    run_ok(
        &bad(),
        Path::new(&path("other")),
        &["--limit", "2", "--max-new-tokens", "40", "--seed", "1", "--domain", "math"],
    );
    let compare = |args: &[&str]| {
        let output = deepspec_eval(&[&["compare"], args].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (table, warnings) = compare(&[&path("good"), &path("bad/results.json")]);
    assert_eq!(warnings, "");
    let header = table.lines().nth(1).unwrap();
    assert_eq!(header.split_whitespace().collect::<Vec<_>>(), ["suite", "good", "bad", "good", "bad"]);
    let overall = table.lines().find(|line| line.starts_with("overall")).unwrap();
    let tau: Vec<f64> =
        overall.split_whitespace().skip(1).take(2).map(|cell| cell.parse().unwrap()).collect();
    assert!(tau[0] > tau[1], "{table}");
    let delta = table.lines().filter(|line| line.starts_with("overall")).nth(1).unwrap();
    assert!(table.contains("bad less good") && delta.contains(" -") && delta.contains("…"), "{table}");

    let (text, _) = compare(&[&path("bad"), &path("good"), &path("good"), "--json"]);
    let three: Value = serde_json::from_str(&text).unwrap();
    let (found, same) = (&three["deltas"][0]["overall"], &three["columns"][1]["overall"]);
    assert!(number(&found["p_value"]) < 0.05 && number(&found["interval"]["low"]) > 0.0, "{found}");
    assert_eq!(
        same["accepted_length_interval"],
        results(Path::new(&path("good")))["overall"]["accepted_length_interval"]
    );
    assert_eq!(three["deltas"][0]["suites"][0]["prompts"], 4);
    assert_eq!(three["deltas"][0], {
        let mut b = three["deltas"][1].clone();
        b["label"] = json!("good");
        b
    });

    let (table, warnings) = compare(&[&path("good"), &path("other"), "--label", "A", "--label", "B"]);
    for what in [
        "seed differs: 980406 in A, 1 in B",
        "limit differs",
        "set of suites differs",
        "smoke-math [file, samples]",
    ] {
        assert!(table.contains(what) && warnings.contains(what), "{what} not in: {table}{warnings}");
    }
    assert!(table.contains("smoke-math") && !table.contains("\nsmoke-code"), "{table}");
    let (text, _) = compare(&[&path("good"), &path("bad"), "--json"]);
    let comparison: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&comparison["columns"][1]["label"], &comparison["differences"]), (&json!("bad"), &json!([])));
    let tau = |metrics: &Value| number(&metrics["accepted_length"]);
    let expected = tau(&results(Path::new(&path("good")))["overall"]);
    assert!((tau(&comparison["columns"][0]["overall"]) - expected).abs() < 1e-12);

    assert_refused(
        &deepspec_eval(&["compare", &path("good"), &path("nowhere")]),
        2,
        &["nowhere", "does not exist"],
    );
    assert_refused(
        &deepspec_eval(&["compare", &path("good"), "--label", "a", "--label", "b"]),
        2,
        &["2 labels"],
    );
    fs::write(path("broken.json"), "{\"format\": 1}").unwrap();
    assert_refused(
        &deepspec_eval(&["compare", &path("broken.json")]),
        2,
        &["broken.json", "deepspec-results"],
    );
}

#[test]
fn comparisons_are_named_by_what_differs_in_their_paths() {
    let dir = tempfile::tempdir().unwrap();
    let eval = |name: &str| dir.path().join(name).join("eval");
    for name in ["a", "b"] {
        run_ok("none", &eval(name), &["--suite", "smoke-math", "--limit", "1", "--max-new-tokens", "4"]);
    }
    let paths = ["a", "b"].map(|name| eval(name).display().to_string());
    let output = deepspec_eval(&["compare", &paths[0], &paths[1]]);
    let table = String::from_utf8(output.stdout).unwrap();
    let header: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(header[..3], ["suite", "a", "b"], "{table}");
    assert!(table.contains("b less a"), "{table}");
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let refused = |draft: &str, args: &[&str], words: &[&str]| {
        assert_refused(&run(draft, &out, args), 2, words);
        assert!(!out.join("results.json").exists());
    };
    refused("nowhere", &[], &["--draft", "nowhere", "does not exist"]);
    refused("none", &["--suite", "gsm9k"], &["`gsm9k` is no suite", "smoke-math"]);
    refused("none", &["--suite", "alpaca"], &["alpaca.jsonl does not exist", "deepspec-data suites"]);
    refused("none", &["--limit", "0"], &["--limit must be at least 1"]);
    refused("none", &["--temperature=-1"], &["--temperature"]);
    refused("none", &["--confidence-threshold", "0.5"], &["--confidence-threshold needs a drafter"]);
    refused(&bad(), &["--confidence-threshold", "1.5"], &["between 0 and 1"]);

    let suites = repository("eval_datasets");
    let raw = |args: &[&str]| {
        let fixed = ["run", "--draft", "none", "--output-dir", out.to_str().unwrap()];
        deepspec_eval(&[&fixed[..], args].concat())
    };
    let (target, suites) = (target_dir().display().to_string(), suites.display().to_string());
    assert_refused(&raw(&["--target", "nowhere", "--suites-dir", &suites]), 2, &["--target", "nowhere"]);
    assert_refused(&raw(&["--target", &target, "--suites-dir", "nowhere"]), 2, &["nowhere", "--suites-dir"]);
    assert_refused(
        &raw(&["--target", &target, "--suites-dir", &suites, "--device", "tpu"]),
        2,
        &["--device", "tpu"],
    );
    let file = dir.path().join("aime24.jsonl");
    for (text, words) in [
        ("", ["aime24.jsonl", "no rows"]),
        ("{\"id\":\"a\",\"turns\":[\"Hi\"]}\n{\"id\":\"b\",\"turns\":", ["aime24.jsonl:2", "not valid JSON"]),
        ("{\"id\":\"a\"}\n", ["aime24.jsonl:1", "no `turns`"]),
        (
            "{\"id\":\"a\",\"turns\":[\"Hi\"]}\n{\"id\":\"a\",\"turns\":[\"Hi\"]}\n",
            ["aime24.jsonl:2", "line 1"],
        ),
    ] {
        fs::write(&file, text).unwrap();
        let here = dir.path().to_str().unwrap();
        assert_refused(&raw(&["--target", &target, "--suites-dir", here, "--suite", "aime24"]), 2, &words);
    }
}

/// A drafter's model config with another number in its config.json.
fn changed(model: &ModelConfig, key: &str, value: i64) -> ModelConfig {
    let mut raw = model.raw.clone();
    raw.insert(key.into(), json!(value));
    ModelConfig::parse(Path::new("config.json"), raw).unwrap().draft_decoder(&[None; 1]).unwrap()
}

#[test]
fn drafters_of_other_targets_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let written = |name: &str, change: &dyn Fn(&mut DSparkConfig)| {
        let mut config = drafter_config();
        change(&mut config);
        write_drafter(&dir.path().join(name), config, |_, tensor| tensor);
        dir.path().join(name).display().to_string()
    };
    let smaller = written("vocabulary", &|config| {
        config.decoder.model = changed(&config.decoder.model, "vocab_size", 512);
        (config.settings.blocks.mask_token_id, config.settings.markov, config.settings.confidence) =
            (511, None, None);
    });
    assert_refused(&run(&smaller, &out, &SMALL), 2, &["vocab_size 1024", "trained for 512"]);
    let narrower = written("width", &|config| {
        config.decoder.model = changed(&config.decoder.model, "hidden_size", 96);
    });
    assert_refused(&run(&narrower, &out, &SMALL), 2, &["hidden_size 192", "trained for 96"]);
    let deeper = written("depth", &|config| config.decoder.num_target_layers = 7);
    assert_refused(&run(&deeper, &out, &SMALL), 2, &["number of target layers 6", "trained for 7"]);
    let beyond = written("taps", &|config| {
        config.decoder.num_target_layers = 9;
        config.decoder.taps = Tap::from_layer_ids([1, 8]).unwrap();
    });
    assert_refused(&run(&beyond, &out, &SMALL), 2, &["[1, 8]", "6 layers"]);
    let unsure = written("unsure", &|config| config.settings.confidence = None);
    let args = [&SMALL[..], &["--confidence-threshold", "0.5"]].concat();
    assert_refused(&run(&unsure, &out, &args), 2, &["no confidence head"]);
    let stranger = dir.path().join("stranger");
    fs::create_dir(&stranger).unwrap();
    fs::write(stranger.join("config.json"), r#"{"architectures": ["BertModel"]}"#).unwrap();
    fs::copy(dir.path().join("unsure/model.safetensors"), stranger.join("model.safetensors")).unwrap();
    let stranger = stranger.display().to_string();
    assert_refused(&run(&stranger, &out, &SMALL), 1, &["BertModel", "no known drafter"]);
    assert!(!out.join("results.json").exists());
}

#[test]
fn models_are_fetched_by_their_hub_ids() {
    let dir = tempfile::tempdir().unwrap();
    write_drafter(&dir.path().join("draft"), drafter_config(), |_, tensor| tensor);
    let hub = FakeHub::start([
        FakeRepo::model("own/tiny").folder(&target_dir()),
        FakeRepo::model("own/draft").at("v1").folder(&dir.path().join("draft")),
    ]);
    let suites = repository("eval_datasets");
    let evaluate = |draft: &str, out: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_deepspec-eval"));
        command.args(["run", "--quiet", "--target", "own/tiny", "--draft", draft, "--device", "cpu"]);
        command.args(["--limit", "1", "--max-new-tokens", "4", "--no-baseline", "--domain", "math"]);
        command.arg("--suites-dir").arg(&suites).arg("--output-dir").arg(dir.path().join(out));
        command
            .env("HF_ENDPOINT", hub.url())
            .env("HF_HUB_CACHE", dir.path().join("hub"))
            .env("OMP_NUM_THREADS", "1");
        command.env_remove("RUST_LOG").output().unwrap()
    };
    let output = evaluate("own/draft@v1", "out");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found = results(&dir.path().join("out"));
    let path = |role: &str| found[role]["path"].as_str().unwrap().to_string();
    assert!(path("target").contains("models--own--tiny/snapshots"), "{}", path("target"));
    assert!(path("drafter").contains("models--own--draft/snapshots"), "{}", path("drafter"));
    assert_refused(&evaluate("own/draft@v2", "other"), 2, &["--draft", "own/draft", "no revision v2"]);
}

#[test]
fn a_gpu_that_libtorch_cannot_use_is_missed() {
    let dir = tempfile::tempdir().unwrap();
    let run = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_deepspec-eval"));
        command.env("OMP_NUM_THREADS", "1").args(["run", "--draft", "none", "--target"]).arg(target_dir());
        command.arg("--suites-dir").arg(repository("eval_datasets")).arg("--output-dir").arg(dir.path());
        command.args(["--limit", "1", "--max-new-tokens", "1", "--overwrite"]);
        command
    };
    assert_misses_gpus(run, dir.path());
}

#[test]
fn threads_wait_asleep() {
    assert_waits_asleep(env!("CARGO_BIN_EXE_deepspec-eval"));
}
