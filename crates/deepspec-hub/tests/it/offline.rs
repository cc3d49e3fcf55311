//! The cache serves requests when the hub must not be or cannot be reached.

use std::fs;

use deepspec_hub::{Hub, HubError, HubOptions, ModelFiles, Repo};
use deepspec_testkit::hub::{FakeRepo, Fault};

use crate::bench::{Bench, says};

fn model() -> FakeRepo {
    let index = r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
    FakeRepo::model("own/tiny")
        .file("config.json", "{}")
        .file("tokenizer.json", "{}")
        .file("tokenizer_config.json", "{}")
        .file("generation_config.json", "{}")
        .file("chat_template.jinja", "{{ x }}")
        .file("README.md", "# tiny")
        .file("model.safetensors.index.json", index)
        .lfs("model-00001-of-00002.safetensors", "one")
        .lfs("model-00002-of-00002.safetensors", "two")
        .lfs("pytorch_model.bin", "old")
        .lfs("tiny.gguf", "other")
        .lfs("consolidated.safetensors", "twice")
}

fn repo() -> Repo {
    Repo::model("own/tiny", None)
}

#[test]
fn a_model_is_what_loading_it_takes() {
    let bench = Bench::new([model()]);
    let dir = bench.hub().model(&repo()).unwrap();
    assert_eq!(dir.file_name().unwrap().to_str().unwrap(), model().commit());
    let expected = [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(crate::bench::names(&dir), expected);
    let refused = |repo: FakeRepo, words: &[&str]| says(Bench::new([repo]).hub().model(&self::repo()), words);
    refused(FakeRepo::model("own/tiny").file("x", ""), &["no config.json", "its files: x"]);
    let only_bin = FakeRepo::model("own/tiny").file("config.json", "{}").lfs("pytorch_model.bin", "x");
    refused(only_bin, &["no model.safetensors", "pytorch_model.bin"]);
    let bad_index =
        FakeRepo::model("own/tiny").file("config.json", "{}").file("model.safetensors.index.json", "[]");
    refused(bad_index, &["index names no files"]);
}

#[test]
fn a_tokenizer_comes_without_weights() {
    let bench = Bench::new([model()]);
    let dir = bench.hub().model_files(&repo(), ModelFiles::Config).unwrap();
    let expected = [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(crate::bench::names(&dir), expected);
    let bare = FakeRepo::model("own/tiny").file("tokenizer.json", "{}");
    says(Bench::new([bare]).hub().model_files(&repo(), ModelFiles::Config), &["no config.json"]);
}

#[test]
fn offline_the_cache_answers_without_a_request() {
    let bench = Bench::new([model()]);
    let dir = bench.hub().model(&repo()).unwrap();
    bench.fake.forget();
    let hub = bench.offline();
    assert_eq!(hub.model(&repo()).unwrap(), dir);
    assert_eq!(hub.commit(&repo()).unwrap(), model().commit());
    assert_eq!(hub.model(&Repo::model("own/tiny", Some(&model().commit()))).unwrap(), dir);
    assert_eq!(hub.files(&repo()).unwrap(), bench.hub().files(&repo()).unwrap(), "those that it has");
    bench.fake.forget();
    let words =
        ["README.md of model own/tiny is not in the cache", "HF_HUB_OFFLINE forbids requests", "local path"];
    says(hub.fetch(&repo(), "README.md"), &words);
    for repo in
        [Repo::model("own/other", None), Repo::model("own/tiny", Some("v1")), Repo::dataset("own/tiny", None)]
    {
        let error = says(hub.model(&repo), &["not in the cache", "HF_HUB_OFFLINE", "hub"]);
        assert!(matches!(error, HubError::NotCached { .. }));
    }
    assert!(bench.fake.requests().is_empty());
}

#[test]
fn offline_half_a_model_is_none() {
    let bench = Bench::new([model()]);
    let dir = bench.hub().model(&repo()).unwrap();
    fs::remove_file(dir.join("model-00002-of-00002.safetensors")).unwrap();
    says(bench.offline().model(&repo()), &["model-00002-of-00002.safetensors", "1 of 2"]);
    // A link whose content was deleted counts as missing.
    fs::remove_file(fs::canonicalize(dir.join("config.json")).unwrap()).unwrap();
    says(bench.offline().model(&repo()), &["config.json", "not in the cache"]);
    assert!(bench.hub().model(&repo()).is_ok());
}

#[test]
fn an_unreachable_hub_leaves_what_is_cached() {
    let bench = Bench::new([model()]);
    let dir = bench.hub().model(&repo()).unwrap();
    bench.fake.fail("/api/", 99, Fault::Status(502, vec![]));
    let hub = bench.hub();
    assert_eq!(hub.model(&repo()).unwrap(), dir);
    says(hub.fetch(&repo(), "README.md"), &["not in the cache", "cannot be asked"]);
    let gone = Hub::new(HubOptions { endpoint: "http://127.0.0.1:9".into(), ..bench.settings() });
    assert_eq!(gone.model(&repo()).unwrap(), dir);
    says(gone.model(&Repo::model("own/other", None)), &["127.0.0.1:9", "cannot be reached"]);
    // A refusal is not an outage.
    let bench = Bench::new([model()]);
    bench.hub().model(&repo()).unwrap();
    bench.fake.fail("/api/", 1, Fault::Status(403, vec![]));
    says(bench.hub().model(&repo()), &["403"]);
}
