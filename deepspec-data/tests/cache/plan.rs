//! Compares the estimates of `cache plan` with an actual build.

use serde_json::Value;

use crate::bench::{Bench, Ended};

/// `plan` of the bench's rows in shards of 1 MiB.
fn plan(bench: &Bench, more: &[&str]) -> Ended {
    let args = ["plan", "--config", "recipe.yaml", "--input", "rows.jsonl", "--shard-size", "1"];
    bench.run(&[&args[..], more].concat())
}

fn json(ended: &Ended) -> Value {
    assert_eq!(ended.code, Some(0), "{ended:?}");
    serde_json::from_str(&ended.stdout).unwrap()
}

#[test]
fn workers_build_what_one_builds() {
    let bench = Bench::new(40);
    for encoding in ["bf16", "bf16z", "fp8"] {
        let whole = format!("whole-{encoding}");
        let ended = bench.build(&whole, &["--encoding", encoding]);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let parts = format!("parts-{encoding}");
        for worker in ["2/3", "0/3"] {
            let ended = bench.build(&parts, &["--encoding", encoding, "--worker", worker]);
            assert_eq!(ended.code, Some(0), "{}", ended.stderr);
            assert!(ended.stdout.contains(&format!("worker {worker} has finished")), "{}", ended.stdout);
        }
        let ended = bench.run(&["merge", "--output-dir", &parts]);
        assert_eq!(ended.code, Some(1));
        assert!(ended.stderr.contains("--worker 1/3"), "{}", ended.stderr);
        bench.build(&parts, &["--encoding", encoding, "--worker", "1/3"]);
        let ended = bench.run(&["merge", "--output-dir", &parts]);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert_eq!(bench.files(&parts), bench.files(&whole));
    }
    let ended = bench.build("x", &["--worker", "3/3"]);
    assert!(ended.code == Some(2) && ended.stderr.contains("I/N"), "{}", ended.stderr);
}

#[test]
fn a_plan_foretells_the_size_of_what_is_built() {
    let bench = Bench::new(40);
    let foretold = json(&plan(&bench, &["--measure", "--device", "cpu", "--json"]));
    let choices = foretold["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 6);
    for choice in choices {
        let [encoding, last] = ["encoding", "last"].map(|key| choice[key].as_str().unwrap());
        let dir = format!("{encoding}-{last}");
        let ended = bench.build(&dir, &["--encoding", encoding, "--final-states", last]);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let built: usize = bench.files(&dir).iter().map(|(_, bytes)| bytes.len()).sum();
        let (built, planned) = (built as f64, choice["bytes"].as_f64().unwrap());
        if encoding == "bf16z" {
            let estimate = choice["estimate"].as_f64().unwrap();
            assert!(built <= planned, "{dir}: at most {planned}, built {built}");
            assert!((estimate - built).abs() < 0.05 * built, "{dir}: about {estimate}, built {built}");
        } else {
            assert!((planned - built).abs() < 0.01 * built, "{dir}: planned {planned}, built {built}");
        }
    }
    let rate = foretold["tokens_per_s"].as_f64().unwrap();
    assert!(rate > 0.0);
    let (seconds, tokens) = (foretold["seconds"].as_f64().unwrap(), foretold["tokens"].as_f64().unwrap());
    // Parsing a number from JSON may change its last bit.
    assert!(
        (seconds * rate / tokens - 1.0).abs() < 1e-12,
        "{seconds} s for {tokens} tokens at {rate} a second"
    );
    let text = plan(&bench, &["--measure", "--device", "cpu"]).stdout;
    assert!(text.contains("tokens/s (measured)") && text.contains("by the trial"), "{text}");
}

#[test]
fn a_given_rate_gives_the_time_without_a_trial() {
    let bench = Bench::new(3);
    let foretold = json(&plan(&bench, &["--rate", "1000", "--json"]));
    assert_eq!(foretold["seconds"].as_f64().unwrap(), foretold["tokens"].as_f64().unwrap() / 1000.0);
    let text = plan(&bench, &[]).stdout;
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.contains("give --rate TOKENS_PER_S, --hardware NAME, or --measure"), "{text}");
    assert!(text.contains("at most, two thirds of it as a rule"), "{text}");
    plan(&bench, &["--rate", "0"]).fails_with(2, &["--rate"]);
    assert_eq!(plan(&bench, &["--rate", "5", "--measure"]).code, Some(2));
}

#[test]
fn what_was_measured_foretells_the_same_build_and_a_longer_one() {
    let bench = Bench::new(40);
    let trial = plan(&bench, &["--measure", "--device", "cpu", "--json"]);
    let (measured, seconds) = (json(&trial), |plan: &Value| plan["seconds"].as_f64().unwrap());
    bench.write("measured.json", &trial.stdout);
    let told = ["--measured", "measured.json", "--device", "cpu"];
    let foretold = json(&plan(&bench, &[&told[..], &["--json"]].concat()));
    assert!((seconds(&foretold) / seconds(&measured) - 1.0).abs() < 1e-3, "{foretold} {measured}");
    let shared = json(&plan(&bench, &[&told[..], &["--devices", "4", "--json"]].concat()));
    assert!((seconds(&shared) * 4.0 / seconds(&foretold) - 1.0).abs() < 1e-9);
    let text = plan(&bench, &[&told[..], &["--devices", "4"]].concat()).stdout;
    assert!(text.contains("tokens/s (foretold) on 4 devices"), "{text}");
    // By its manufacturer's figures, an accelerator is faster than this machine.
    let stated = json(&plan(&bench, &["--hardware", "h100", "--json"]));
    assert!(seconds(&stated) > 0.0 && seconds(&stated) < seconds(&measured), "{stated}");

    plan(&bench, &["--hardware", "h1"]).fails_with(2, &["--hardware h1", "h200"]);
    plan(&bench, &["--devices", "2"]).fails_with(2, &["--devices", "--hardware"]);
    bench.write("other.json", "{}");
    plan(&bench, &["--measured", "other.json"]).fails_with(2, &["other.json", "says nothing of time"]);
    bench.write("wrong.json", r#"{"work": [{"stage": "states", "work": {"operations": -1}, "seconds": 1}]}"#);
    plan(&bench, &["--measured", "wrong.json"]).fails_with(2, &["wrong.json", "`operations` is -1"]);
    bench.write("none.json", r#"{"work": [{"stage": "training", "work": {"operations": 1}, "seconds": 1}]}"#);
    plan(&bench, &["--measured", "none.json"]).fails_with(2, &["none of the files is of states"]);
}

/// A folder on a file system that never has free space.
const NO_ROOM: &str = "/proc/deepspec-cache";

#[test]
fn a_build_without_room_is_refused_unless_forced() {
    let bench = Bench::new(3);
    let text = plan(&bench, &["--output-dir", NO_ROOM]).stdout;
    assert!(text.contains(", more than is free"), "{text}");
    bench.build(NO_ROOM, &[]).fails_with(1, &["0.0 MiB are free", "--encoding fp8", "--force"]);
    // With --force it warns and continues until the system refuses.
    let forced = bench.build(NO_ROOM, &["--force"]);
    assert_eq!(forced.code, Some(1), "{forced:?}");
    assert_eq!(forced.stderr.lines().count(), 2, "{forced:?}");
    let [warning, error] = [0, 1].map(|line| forced.stderr.lines().nth(line).unwrap());
    assert!(warning.contains("0.0 MiB are free") && !warning.contains("give --force"), "{forced:?}");
    assert!(error.contains(NO_ROOM), "{forced:?}");
    assert!(!bench.path("cache").exists());
}
