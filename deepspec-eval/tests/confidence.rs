//! The reported quality of confidences, and temperatures that calibrate them.

mod common;

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use common::{
    answers, assert_refused, deepspec_eval, drafter_config, results, run, run_ok, write_confident_drafter,
    write_drafter,
};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Drafters that differ only in their confidence heads, and a run of each.
fn bench() -> &'static Path {
    static DIR: OnceLock<TempDir> = OnceLock::new();
    let dir = DIR.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let corpus = dir.path().join("corpus");
        run_ok("none", &corpus, &["--seed", "7", "--limit", "24", "--max-new-tokens", "200"]);
        let corpus = answers(&corpus);
        // Strongly underconfident: 5 % for tokens that are accepted much more often.
        for (name, factor) in [("modest", 1.0), ("doubled", 2.0)] {
            let draft = dir.path().join(name);
            write_confident_drafter(&draft, corpus.values(), |part, tensor| {
                let tensor = if part == "bias" { tensor.full_like(-3.0) } else { tensor };
                tensor * factor
            });
            let out = dir.path().join(format!("{name}-run"));
            run_ok(
                draft.to_str().unwrap(),
                &out,
                &["--no-baseline", "--limit", "16", "--max-new-tokens", "80"],
            );
        }
        dir
    });
    dir.path()
}

fn path(name: &str) -> String {
    bench().join(name).display().to_string()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Calibrates on a run; returns the file's content.
fn calibrated(run: &str, output: &Path) -> Value {
    let told = deepspec_eval(&["calibrate", &path(run), "--output", output.to_str().unwrap()]);
    assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
    assert!(String::from_utf8(told.stdout).unwrap().contains("temperature"));
    serde_json::from_str(&fs::read_to_string(output).unwrap()).unwrap()
}

#[test]
fn calibration_mends_what_other_prompts_show_and_undoes_doubling() {
    let dir = tempfile::tempdir().unwrap();
    let found = calibrated("modest-run", &dir.path().join("modest.json"));
    let held = &found["held_out"];
    let ece = |report: &Value| number(&report["summary"]["ece"]);
    let (before, after, chance) = (ece(&held["before"]), ece(&held["after"]), number(&held["ece_of_chance"]));
    assert!(before > 0.05, "nothing to mend: {before}");
    assert!(after <= (0.5 * before).max(chance), "{before} became {after}, chance is {chance}");
    assert!(held["prompts"].as_u64().unwrap() > 10 && found["fit_prompts"].as_u64().unwrap() > 10);
    let bootstrap = &held["bootstrap"];
    assert!(number(&bootstrap["change"]["high"]) < 0.0, "the temperatures help: {bootstrap}");
    for (arm, error) in [("before", before), ("after", after)] {
        let interval = &bootstrap[arm]["interval"];
        assert!(number(&interval["low"]) <= error && error <= number(&interval["high"]), "{bootstrap}");
        assert!(number(&bootstrap[arm]["ece_of_chance"]) > 0.0, "{bootstrap}");
    }
    assert!(number(&held["ece_of_chance_before"]) > 0.0);

    let doubled = calibrated("doubled-run", &dir.path().join("doubled.json"));
    let first = |found: &Value| number(&found["temperatures"][0]);
    let ratio = first(&doubled) / first(&found);
    assert!((ratio / 2.0 - 1.0).abs() < 0.05, "two steps of the grid are 4.7 %: {ratio}");
    assert!((ece(&doubled["held_out"]["after"]) - after).abs() < 0.01);
}

#[test]
fn ways_to_calibrate_are_compared_and_one_temperature_can_be_folded_into_the_head() {
    let dir = tempfile::tempdir().unwrap();
    let [file, folded, out] = ["modest.json", "folded", "out"].map(|name| dir.path().join(name));
    let [output, fold] = [&file, &folded].map(|path| path.to_str().unwrap());
    let calibrate = ["calibrate", &path("modest-run"), "--output", output, "--write-folded", fold, "--json"];
    let told = deepspec_eval(&calibrate);
    assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
    let found: Value = serde_json::from_slice(&told.stdout).unwrap();
    let before = number(&found["held_out"]["before"]["summary"]["ece"]);
    let ways = found["alternatives"].as_array().unwrap();
    let methods: Vec<&str> = ways.iter().map(|way| way["method"].as_str().unwrap()).collect();
    assert_eq!(methods, ["pooled", "joint", "by domain"]);
    for way in ways {
        assert!(number(&way["ece"]) < 0.6 * before, "the head is far too modest: {way} beside {before}");
        let change = &way["change"];
        assert!(number(&change["low"]) <= number(&change["high"]), "{way}");
    }
    let pooled = ways[0]["temperatures"]["all"].as_array().unwrap();
    assert!(pooled.iter().all(|t| t == &pooled[0]), "one for all positions: {pooled:?}");
    let domains: Vec<&String> = ways[2]["temperatures"].as_object().unwrap().keys().collect();
    assert_eq!(domains, ["all", "chat", "code", "math"]);
    // Engines that read raw confidences then see the calibrated ones.
    run_ok(fold, &out, &["--no-baseline", "--limit", "16", "--max-new-tokens", "80"]);
    let raw = &results(&out)["confidence"]["reliability"]["summary"]["ece"];
    assert!(number(raw) < 0.6 * before, "{raw} beside {before}");
    assert_refused(
        &deepspec_eval(&[&calibrate[..], &["--overwrite"]].concat()),
        2,
        &["--write-folded", "exists"],
    );
}

#[test]
fn a_calibrated_run_cuts_by_calibrated_confidences() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("calibration.json");
    let temperatures = calibrated("modest-run", &file)["temperatures"].clone();
    let small = ["--no-baseline", "--limit", "5", "--max-new-tokens", "40", "--max-num-seqs", "1"];
    let file = file.to_str().unwrap();
    let decode = |name: &str, more: &[&str]| {
        let out = dir.path().join(name);
        run_ok(&path("modest"), &out, &[&small[..], more].concat());
        results(&out)
    };
    let proposed = |found: &Value| -> u64 {
        found["suites"]
            .as_array()
            .unwrap()
            .iter()
            .map(|suite| suite["counts"]["proposed"].as_u64().unwrap())
            .sum()
    };
    let plain = decode("plain", &[]);
    let whole = decode("whole", &["--calibration", file]);
    assert_eq!(whole["settings"]["calibration"], temperatures);
    assert_eq!(
        whole["suites"][0]["counts"], plain["suites"][0]["counts"],
        "without a threshold nothing is cut"
    );
    let (used, raw) = (&whole["confidence"]["reliability"], &whole["confidence"]["uncalibrated"]);
    assert_eq!(*raw, plain["confidence"]["reliability"]);
    assert!(number(&used["summary"]["ece"]) < number(&raw["summary"]["ece"]));
    // Nearly all raw confidences are below 0.1; calibrated ones are not.
    let raw = decode("raw cut", &["--confidence-threshold", "0.1"]);
    let cut = decode("cut", &["--confidence-threshold", "0.1", "--calibration", file]);
    assert!(10 * proposed(&raw) < proposed(&cut), "{} and {}", proposed(&raw), proposed(&cut));
    assert_eq!(cut["confidence"]["sweep"], json!([]));
    assert_eq!(plain["confidence"]["sweep"][0]["proposed"], proposed(&plain));
    for (i, point) in plain["confidence"]["sweep"].as_array().unwrap().iter().enumerate() {
        let suites = plain["suites"].as_array().unwrap().iter();
        let sum: u64 = suites.map(|suite| suite["sweep"][i]["accepted"].as_u64().unwrap()).sum();
        assert_eq!(point["accepted"].as_u64(), Some(sum), "{point}");
    }
    assert_eq!(cut["suites"][0]["sweep"], Value::Null);

    let refused = |draft: &str, args: &[&str], words: &[&str]| {
        assert_refused(&run(&path(draft), &dir.path().join("x"), args), 2, words);
    };
    refused(
        "doubled",
        &["--calibration", file],
        &["was found for the drafter", "modest", "calibrate this one"],
    );
    refused("modest", &["--calibration", "nowhere.json"], &["nowhere.json does not exist"]);
    fs::write(dir.path().join("broken.json"), "{}").unwrap();
    refused(
        "modest",
        &["--calibration", dir.path().join("broken.json").to_str().unwrap()],
        &["broken.json", "not a calibration"],
    );
    let calibrate = |args: &[&str], words: &[&str]| {
        assert_refused(&deepspec_eval(&[&["calibrate"], args].concat()), 2, words);
    };
    let other = dir.path().join("other.json").display().to_string();
    calibrate(&[&path("corpus"), "--output", &other], &["plain decoding"]);
    let cut = dir.path().join("cut").display().to_string();
    calibrate(&[&cut, "--output", &other], &["--schedule threshold:0.1"]);
    let again = deepspec_eval(&["calibrate", &path("modest-run"), "--output", file]);
    assert!(again.status.success(), "the same again has nothing to do");
    fs::write(file, "{}").unwrap();
    calibrate(&[&path("modest-run"), "--output", file], &["--overwrite"]);
}

#[test]
fn the_markov_head_can_be_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let small = [
        "--no-baseline",
        "--limit",
        "5",
        "--max-new-tokens",
        "40",
        "--temperature",
        "0",
        "--max-num-seqs",
        "1",
    ];
    let decode = |name: &str, more: &[&str]| {
        let out = dir.path().join(name);
        run_ok(&path("modest"), &out, &[&small[..], more].concat());
        (results(&out), answers(&out))
    };
    let ((with, same), (without, answers)) = (decode("with", &[]), decode("without", &["--no-markov"]));
    let tau = |found: &Value| number(&found["overall"]["accepted_length"]);
    assert!(tau(&without) < tau(&with), "all that this drafter knows is in its Markov head");
    assert_eq!(answers, same, "a drafter decides about speed alone");
    assert_eq!(without["settings"]["no_markov"], true);
    let plain = dir.path().join("plain");
    let mut config = drafter_config();
    (config.settings.markov, config.settings.confidence) = (None, None);
    write_drafter(&plain, config, |_, tensor| tensor);
    let output = run(plain.to_str().unwrap(), &dir.path().join("x"), &["--no-markov"]);
    assert_refused(&output, 2, &["--no-markov: the drafter has no Markov head"]);
}

#[test]
fn reports_hold_all_plots_and_ask_for_nothing() {
    let dir = bench().join("modest-run");
    let html = fs::read_to_string(dir.join("report.html")).unwrap();
    let markdown = fs::read_to_string(dir.join("report.md")).unwrap();
    let plots = ["accepted_length", "positions", "reliability", "thresholds", "time"];
    for plot in plots {
        let svg = fs::read_to_string(dir.join(format!("plots/{plot}.svg"))).unwrap();
        assert!(html.contains(&svg) && markdown.contains(&format!("](plots/{plot}.svg)")), "{plot}");
        assert!(fs::read(dir.join(format!("plots/{plot}.png"))).unwrap().starts_with(b"\x89PNG\r\n\x1a\n"));
    }
    let text = html.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
    for outside in ["http:", "https:", "src=", "href=", "url(", "@import", "<script"] {
        assert!(!text.contains(outside), "{outside}");
    }
    let tau = number(&results(&dir)["overall"]["accepted_length"]);
    assert!(html.contains(&format!("<td>overall</td><td>{tau:.2}</td>")), "the table has the number");
    for name in ["smoke-math", "smoke-code", "smoke-chat", "ECE", "threshold", "@5", "temperature"] {
        assert!(html.contains(name) && markdown.contains(name), "{name}");
    }
}
