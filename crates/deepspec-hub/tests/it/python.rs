//! `huggingface_hub` and this client share a cache: each uses the other's files without a request.

use std::fs;
use std::path::Path;
use std::process::Command;

use deepspec_hub::Repo;
use deepspec_testkit::hub::FakeRepo;
use deepspec_testkit::skip;

use crate::bench::{Bench, bytes};

const FETCH: &str = "import sys; from huggingface_hub import snapshot_download; \
                     print(snapshot_download('own/tiny', revision=sys.argv[1], cache_dir=sys.argv[2]))";

fn snapshot_download(python: &str, bench: &Bench, offline: bool) -> String {
    let (home, cache) = (bench.dir.path().join("home"), bench.dir.path().join("hub"));
    let output = Command::new(python)
        .args(["-c", FETCH, "main"])
        .arg(&cache)
        .env("HF_ENDPOINT", bench.fake.url())
        .env("HF_HOME", home)
        .env("HF_HUB_OFFLINE", if offline { "1" } else { "0" })
        .env("HF_HUB_DISABLE_XET", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_string()
}

fn repository() -> FakeRepo {
    FakeRepo::model("own/tiny").file("config.json", "{}").lfs("model.safetensors", bytes(200_000))
}

#[test]
fn either_uses_what_the_other_fetched() {
    let Some(python) = skip::python("huggingface_hub") else { return };
    let repo = Repo::model("own/tiny", None);

    let ours = Bench::new([repository()]);
    let dir = ours.hub().model(&repo).unwrap();
    ours.fake.forget();
    assert_eq!(Path::new(&snapshot_download(&python, &ours, true)), dir);
    assert!(ours.fake.requests().is_empty());
    // With requests allowed, it finds the content in place.
    snapshot_download(&python, &ours, false);
    assert!(ours.transfers().is_empty());

    let theirs = Bench::new([repository()]);
    let dir = snapshot_download(&python, &theirs, false);
    assert_eq!(theirs.transfers().len(), 1);
    theirs.fake.forget();
    assert_eq!(theirs.offline().model(&repo).unwrap(), Path::new(&dir));
    assert_eq!(fs::read(Path::new(&dir).join("model.safetensors")).unwrap(), bytes(200_000));
    assert!(theirs.fake.requests().is_empty());
    theirs.hub().model(&repo).unwrap();
    assert!(theirs.transfers().is_empty());
}
