//! Configurations and splits of datasets on the hub. The tests of the layout itself check which
//! files belong to which split.

use std::fs;
use std::path::PathBuf;

use deepspec_hub::{HubError, Repo};
use deepspec_testkit::hub::{FakeRepo, Fault};

use crate::bench::{Bench, says};

fn repo() -> Repo {
    Repo::dataset("own/rows", None)
}

/// The joined contents of a split's files.
fn read(outcome: Result<Vec<PathBuf>, HubError>) -> String {
    let paths = outcome.unwrap_or_else(|error| panic!("{error}"));
    paths.iter().map(|path| fs::read_to_string(path).unwrap()).collect::<Vec<_>>().join("+")
}

fn refused(outcome: Result<Vec<PathBuf>, HubError>, words: &[&str]) -> HubError {
    says(outcome.map(|paths| paths[0].clone()), words)
}

#[test]
fn configurations_and_splits_by_name() {
    let bench = Bench::new([FakeRepo::dataset("own/rows")
        .lfs("main/test-00000-of-00001.parquet", "main test")
        .lfs("main/train-00000-of-00002.parquet", "main train 0")
        .lfs("main/train-00001-of-00002.parquet", "main train 1")
        .lfs("socratic/test-00000-of-00001.parquet", "socratic test")]);
    let hub = bench.hub();
    assert_eq!(read(hub.dataset(&repo(), Some("main"), Some("test"))), "main test");
    assert_eq!(read(hub.dataset(&repo(), Some("main"), None)), "main train 0+main train 1");
    assert_eq!(read(hub.dataset(&repo(), Some("socratic"), None)), "socratic test");
    let unknown =
        refused(hub.dataset(&repo(), Some("mane"), None), &["no configuration mane", "main, socratic"]);
    let which =
        refused(hub.dataset(&repo(), None, Some("test")), &["several configurations", "main, socratic"]);
    let split =
        refused(hub.dataset(&repo(), Some("main"), Some("dev")), &["main", "no split dev", "test, train"]);
    assert!(unknown.is_usage() && which.is_usage() && split.is_usage());
    let asked =
        |name: &str| bench.fake.requests().iter().filter(|request| request.path.contains(name)).count();
    assert!(asked("socratic") > 0 && asked("revision/main") == 1, "the description is asked for once");
}

#[test]
fn the_card_names_what_file_names_do_not() {
    let card = "---\nconfigs:\n- config_name: a\n  data_files:\n  - {split: x, path: one.jsonl}\n  - {split: y, path: 'two.*'}\n\
                - config_name: b\n  default: true\n  data_files: '**/*.parquet'\n---\n";
    let bench = Bench::new([FakeRepo::dataset("own/rows")
        .file("README.md", card)
        .file("one.jsonl", "one")
        .file("two.jsonl", "two")
        .lfs("deep/er/three.parquet", "three")]);
    let hub = bench.hub();
    assert_eq!(read(hub.dataset(&repo(), None, None)), "three");
    assert_eq!(read(hub.dataset(&repo(), Some("a"), Some("y"))), "two");
    let which =
        refused(hub.dataset(&repo(), Some("a"), None), &["configuration a", "several splits", "x, y"]);
    assert!(matches!(which, HubError::WhichSplit { .. }));
    // A card that cannot be parsed must not cause a failure.
    bench.fake.put(
        FakeRepo::dataset("own/rows").file("README.md", "---\nconfigs: [\n---\n").file("test.jsonl", "t"),
    );
    assert_eq!(read(bench.hub().dataset(&repo(), None, Some("test"))), "t");
}

#[test]
fn a_dataset_without_rows_we_read_is_said() {
    let bench = Bench::new([FakeRepo::dataset("own/rows").file("train.csv", "a,b").file("load.py", "")]);
    refused(bench.hub().dataset(&repo(), None, None), &["own/rows", "parquet", "load.py, train.csv"]);
}

#[test]
fn offline_a_split_is_whole_or_an_error() {
    let bench = Bench::new([FakeRepo::dataset("own/rows")
        .lfs("data/train-00000-of-00002.parquet", "0")
        .lfs("data/train-00001-of-00002.parquet", "1")]);
    let words = ["not in the cache", "HF_HUB_OFFLINE"];
    refused(bench.offline().dataset(&repo(), None, None), &words);
    let first = bench.hub().fetch(&repo(), "data/train-00000-of-00002.parquet").unwrap();
    refused(bench.offline().dataset(&repo(), None, None), &["train-00001-of-00002", "missing"]);
    assert_eq!(read(bench.hub().dataset(&repo(), None, None)), "0+1");
    bench.fake.forget();
    assert_eq!(bench.offline().dataset(&repo(), None, None).unwrap()[0], first);
    assert!(bench.fake.requests().is_empty());
}

#[test]
fn offline_the_card_and_the_last_list_tell_what_is_missing() {
    let card = "---\nconfigs:\n- config_name: a\n  default: true\n  data_files:\n  - split: train\n    \
                path: [one.jsonl, 'two*']\n  - {split: test, path: three.jsonl}\n---\n";
    let bench = Bench::new([FakeRepo::dataset("own/rows")
        .file("README.md", card)
        .file("one.jsonl", "1")
        .file("two-a.jsonl", "2")
        .file("two-b.jsonl", "3")
        .file("three.jsonl", "4")]);
    for file in ["README.md", "one.jsonl", "two-a.jsonl"] {
        bench.hub().fetch(&repo(), file).unwrap();
    }
    // The hub's listing is cached, so a missing file is noticed offline and in an outage too.
    let words = ["1 of 3 files", "two-b.jsonl", "with a connection"];
    refused(bench.offline().dataset(&repo(), None, None), &words);
    bench.fake.fail("/api/", 3, Fault::Status(502, vec![]));
    refused(bench.hub().dataset(&repo(), None, None), &words);
    refused(bench.offline().dataset(&repo(), None, Some("test")), &["1 of 1 files", "three.jsonl"]);

    // In a cache filled by other tools, only the card describes the split, and any match satisfies
    // a pattern.
    let folder = bench.dir.path().join("hub/datasets--own--rows");
    fs::remove_dir_all(folder.join(".deepspec")).unwrap();
    assert_eq!(read(bench.offline().dataset(&repo(), None, None)), "1+2");
    refused(bench.offline().dataset(&repo(), None, Some("test")), &["three.jsonl of", "not in the cache"]);
    let snapshot = folder.join("snapshots").join(bench.offline().commit(&repo()).unwrap());
    fs::remove_file(snapshot.join("two-a.jsonl")).unwrap();
    refused(bench.offline().dataset(&repo(), None, None), &["two* of dataset own/rows", "not in the cache"]);
    assert!(matches!(bench.offline().files(&repo()), Err(HubError::Unlisted { .. })));
    assert_eq!(read(bench.hub().dataset(&repo(), None, None)), "1+2+3");
    assert_eq!(read(bench.offline().dataset(&repo(), None, None)), "1+2+3");
}
