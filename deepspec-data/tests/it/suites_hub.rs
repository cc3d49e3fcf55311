//! `suites` from a hub: datasets are found and cached, and errors name a workaround.

use std::fs;
use std::path::{Path, PathBuf};

use deepspec_testkit::hub::{FakeHub, FakeRepo, Fault};
use serde_json::{Value, json};

use crate::hub_rows::{DATASETS, Dataset, dataset, invert};
use crate::process::{Ended, Row, command, lines, rows, text};

/// A hub, its cache and a folder of suites.
struct Bench {
    hub: FakeHub,
    dir: tempfile::TempDir,
}

impl Bench {
    fn new(repos: impl IntoIterator<Item = FakeRepo>) -> Self {
        Self { hub: FakeHub::start(repos), dir: tempfile::tempdir().unwrap() }
    }

    fn out(&self, name: &str) -> PathBuf {
        self.dir.path().join("out").join(name)
    }

    fn suites(&self, more: &[&str], variables: &[(&str, &str)]) -> Ended {
        let output = text(&self.dir.path().join("out"));
        let mut command = command(&[&["suites", "--output-dir", &output], more].concat());
        for name in ["HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"] {
            command.env_remove(name);
        }
        command.env("HF_HOME", self.dir.path()).env("HF_HUB_CACHE", self.dir.path().join("cache"));
        command.env("HF_ENDPOINT", self.hub.url()).envs(variables.iter().copied());
        let ended = command.output().unwrap();
        let told = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Ended { code: ended.status.code(), stdout: told(ended.stdout), stderr: told(ended.stderr) }
    }
}

fn published(suite: &str) -> Vec<Row> {
    rows(&Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/suites/{suite}.jsonl")))
}

/// Rows of a dataset, enough for all of its files.
fn data(dataset: &Dataset) -> Vec<Row> {
    let data: Vec<Row> = published(dataset.suite).iter().map(|line| invert(dataset.suite, line)).collect();
    data.iter().cycle().take(data.len().max(dataset.files.len())).cloned().collect()
}

/// The repository of a dataset; if it has several configurations, its card names them.
fn repository(dataset: &Dataset) -> FakeRepo {
    let dir = tempfile::tempdir().unwrap();
    let paths = dataset.write(dir.path(), &data(dataset));
    let files = dataset.files.iter().zip(paths);
    let repo = files
        .fold(FakeRepo::dataset(dataset.id), |repo, (name, path)| repo.lfs(name, fs::read(path).unwrap()));
    let Some(config) = dataset.config() else { return repo };
    let entry =
        |name| format!("- config_name: {name}\n  data_files:\n  - split: test\n    path: {name}/test-*\n");
    let card = format!("---\nconfigs:\n{}{}---\n# A dataset\n", entry("other"), entry(config));
    repo.file("README.md", card).lfs("other/test-00000-of-00001.parquet", "none")
}

#[test]
fn every_suite_is_found_where_its_dataset_keeps_it() {
    let repos: Vec<FakeRepo> = DATASETS.iter().map(repository).collect();
    let bench = Bench::new(repos.clone());
    let ended = bench.suites(&[], &[]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.ends_with("12 suites = 12 written + 0 there already + 0 failed\n"), "{ended:?}");
    let record: Value = serde_json::from_str(&fs::read_to_string(bench.out("suites.json")).unwrap()).unwrap();
    for (dataset, repo) in DATASETS.iter().zip(&repos) {
        let (entry, count) = (&record["suites"][dataset.suite], data(dataset).len());
        assert_eq!(entry["source"], json!({"hub": {"dataset": dataset.id, "revision": repo.commit()}}));
        assert_eq!(entry["rows"], count, "{}", dataset.suite);
        let found = rows(&bench.out(&format!("{}.jsonl", dataset.suite)));
        assert!(found.iter().eq(published(dataset.suite).iter().cycle().take(count)), "{}", dataset.suite);
    }
    bench.hub.forget();
    let again = bench.suites(&["--suite", "lbpp", "--suite", "alpaca"], &[]);
    assert!(again.stdout.ends_with("2 suites = 0 written + 2 there already + 0 failed\n"), "{again:?}");
    assert_eq!(bench.hub.requests(), [], "what is there is not asked for");
    let offline = bench.suites(&["--overwrite"], &[("HF_HUB_OFFLINE", "1")]);
    assert!(offline.stdout.contains("12 written") && bench.hub.requests().is_empty(), "{offline:?}");
}

#[test]
fn what_is_not_there_is_told_with_the_way_around_it() {
    let cut = FakeRepo::dataset("livecodebench/code_generation_lite").file("test.jsonl", "{}");
    let bench = Bench::new([repository(dataset("math500")), repository(dataset("mbpp")), cut]);
    bench
        .suites(&["--suite", "gsm8k"], &[("HF_HUB_OFFLINE", "1")])
        .fails_with(1, &["gsm8k", "openai/gsm8k", "HF_HUB_OFFLINE", "--source gsm8k=FILE"]);
    bench.hub.fail("/resolve/", 1, Fault::Status(403, vec![("X-Error-Code", "GatedRepo".into())]));
    bench.suites(&["--suite", "math500"], &[]).fails_with(1, &["math500", "gated", "--source math500=FILE"]);

    let names = ["math500", "livecodebench", "gsm8k", "mbpp"].map(|name| ["--suite", name]).concat();
    let ended = bench.suites(&names, &[]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    for words in ["test2.jsonl", "openai/gsm8k", "2 of 4 suites failed, as told above: gsm8k, livecodebench"]
    {
        assert!(ended.stderr.contains(words), "{words} not in {ended:?}");
    }
    assert!(bench.out("math500.jsonl").exists() && bench.out("mbpp.jsonl").exists());
    assert!(!bench.out("livecodebench.jsonl").exists());
}

#[test]
fn suites_of_ones_own_come_from_the_hub_too() {
    let bench = Bench::new([repository(dataset("livecodebench")).at("v1")]);
    let describe = |files: &str| {
        let said = [
            "name: mine",
            "domain: code",
            "dataset: livecodebench/code_generation_lite",
            "revision: v1",
            files,
            "turns: [\"{{ question_title }}: {{ question_content }}\"]",
        ];
        text(&lines(bench.dir.path(), "mine.yaml", &said.map(String::from)))
    };
    let some = describe("files: [\"test[2-5].jsonl\"]");
    let ended = bench.suites(&["--description", &some], &[]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let found = rows(&bench.out("mine.jsonl"));
    assert_eq!(found.len(), 4);
    assert!(found[0]["turns"][0].as_str().unwrap().starts_with("the question_title: "));
    let offline = bench.suites(&["--description", &some, "--overwrite"], &[("HF_HUB_OFFLINE", "1")]);
    assert_eq!(offline.code, Some(0), "{offline:?}");
    // A recorded suite is complete: files that merely remain in the cache do not suffice, not even
    // in an outage.
    let cache = bench.dir.path().join("cache/datasets--livecodebench--code_generation_lite");
    let commit = fs::read_to_string(cache.join("refs/v1")).unwrap();
    fs::remove_file(cache.join("snapshots").join(commit).join("test4.jsonl")).unwrap();
    let offline = || bench.suites(&["--description", &some, "--overwrite"], &[("HF_HUB_OFFLINE", "1")]);
    offline().fails_with(1, &["test4.jsonl", "not in the cache", "HF_HUB_OFFLINE"]);
    fs::remove_dir_all(cache.join(".deepspec")).unwrap();
    offline().fails_with(1, &["nothing in the cache says which files", "HF_HUB_OFFLINE"]);
    let gone =
        bench.suites(&["--description", &some, "--overwrite"], &[("HF_ENDPOINT", "http://127.0.0.1:9")]);
    assert!(gone.code == Some(1) && gone.stderr.contains("the hub cannot be asked"), "{gone:?}");
    let nothing = describe("files: [\"train*.jsonl\"]");
    bench
        .suites(&["--description", &nothing, "--overwrite"], &[])
        .fails_with(2, &["train*.jsonl", "test2.jsonl"]);
    assert_eq!(rows(&bench.out("mine.jsonl")).len(), 4);
}

/// The descriptions of suites with long prompts, with books that tell where each character stood.
#[test]
fn suites_of_long_prompts_come_from_books() {
    let book = |number: usize| -> String {
        (0..40_000).map(|word| format!("w{word:05}")).collect::<Vec<_>>().join(if number == 0 {
            " "
        } else {
            "\n"
        })
    };
    let split: String = (0..2)
        .map(|number| json!({"short_book_title": "t", "text": book(number)}).to_string() + "\n")
        .collect();
    let repo =
        FakeRepo::dataset("emozilla/pg19-test").lfs("data/test-00000-of-00001.jsonl", split.into_bytes());
    let bench = Bench::new([repo]);
    for (length, characters) in [("4k", 12_500), ("8k", 29_000), ("16k", 63_000), ("32k", 127_000)] {
        let description =
            Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../configs/suites/long_{length}.yaml"));
        let ended = bench.suites(&["--description", description.to_str().unwrap()], &[]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let found = rows(&bench.out(&format!("long-{length}.jsonl")));
        let parts = found.iter().enumerate().map(|(number, row)| {
            let prompt = row["turns"][0].as_str().unwrap().to_owned();
            let part = &book(number)[10_000..10_000 + characters];
            assert!(prompt.starts_with("Here is a part of a book:\n\n") && prompt.contains(part), "{length}");
            prompt.len() - part.len()
        });
        assert_eq!(parts.collect::<Vec<_>>(), [60, 60], "{length}");
    }
}
