//! The content and location of fetched files, and the recovery from broken transfers.

use std::fs;
use std::ops::Range;
use std::path::Path;

use deepspec_core::digest;
use deepspec_hub::{Hub, HubError, HubOptions, ModelFiles, Repo, RetryPolicy};
use deepspec_testkit::hub::{FakeRepo, Fault};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::bench::{Bench, bytes, names, says};

const FOLDER: &str = "models--own--tiny";

fn tiny() -> FakeRepo {
    FakeRepo::model("own/tiny").file("config.json", "{}").lfs("sub/weights 1%.bin", bytes(100_000))
}

#[test]
fn files_lie_where_the_python_tools_look() {
    let bench = Bench::new([tiny()]);
    let (hub, repo) = (bench.hub(), Repo::model("own/tiny", None));
    assert_eq!(hub.files(&repo).unwrap(), ["config.json", "sub/weights 1%.bin"]);
    let (small, large) =
        (hub.fetch(&repo, "config.json").unwrap(), hub.fetch(&repo, "sub/weights 1%.bin").unwrap());
    let commit = tiny().commit();
    assert_eq!(hub.commit(&repo).unwrap(), commit);
    let top = bench.dir.path().join("hub").join(FOLDER);
    assert_eq!(small, top.join("snapshots").join(&commit).join("config.json"));
    assert_eq!(fs::read(&small).unwrap(), b"{}");
    assert_eq!(fs::read(&large).unwrap(), bytes(100_000));
    assert_eq!(fs::read_to_string(top.join("refs/main")).unwrap(), commit);
    assert_eq!(names(&top), [".deepspec", "blobs", "refs", "snapshots"]);
    let sha = digest::sha256_of_bytes(&bytes(100_000));
    assert_eq!(fs::read_link(&large).unwrap(), Path::new("../../../blobs").join(&sha));
    assert_eq!(fs::read_link(&small).unwrap().parent(), Some(Path::new("../../blobs")));
    assert!(bench.blobs(FOLDER).contains(&sha));

    // Cached content is not requested again: one request resolves the branch.
    bench.fake.forget();
    assert_eq!(bench.hub().fetch(&repo, "config.json").unwrap(), small);
    let paths: Vec<String> = bench.fake.requests().into_iter().map(|request| request.path).collect();
    assert_eq!(paths, ["/api/models/own/tiny/revision/main"]);
    // A commit cannot change, so there is no request at all.
    bench.fake.forget();
    assert_eq!(bench.hub().fetch(&Repo::model("own/tiny", Some(&commit)), "config.json").unwrap(), small);
    assert!(bench.fake.requests().is_empty());
}

#[test]
fn a_broken_transfer_is_continued_where_it_broke() {
    let bench = Bench::new([FakeRepo::model("own/tiny").lfs("w.bin", bytes(300_000))]);
    let repo = Repo::model("own/tiny", None);
    bench.fake.fail("/cdn/", 1, Fault::BreakAfter(70_001));
    bench.fake.fail("/cdn/", 1, Fault::BreakAfter(29_999));
    let path = bench.hub().fetch(&repo, "w.bin").unwrap();
    assert_eq!(fs::read(path).unwrap(), bytes(300_000));
    let ranges: Vec<_> = bench.transfers().into_iter().map(|(_, range)| range).collect();
    assert_eq!(ranges, [None, Some("bytes=70001-".into()), Some("bytes=100000-".into())]);
    assert_eq!(bench.blobs(FOLDER), [digest::sha256_of_bytes(&bytes(300_000))]);
}

#[test]
fn a_server_that_goes_away_in_the_middle_is_waited_for() {
    let bench = Bench::new([FakeRepo::model("own/tiny").lfs("w.bin", bytes(300_000))]);
    let retry = RetryPolicy { attempts: 4, ..bench.settings().retry };
    let fetch = |repo: &Repo| Hub::new(HubOptions { retry, ..bench.settings() }).fetch(repo, "w.bin");
    bench.fake.fail("/cdn/", 2, Fault::Closed);
    says(fetch(&Repo::model("own/tiny", None)), &["cannot be reached", "2 attempts"]);
    bench.fake.fail("/cdn/", 1, Fault::BreakAfter(70_000));
    bench.fake.fail("/cdn/", 2, Fault::Closed);
    let path = fetch(&Repo::model("own/tiny", None)).unwrap();
    assert_eq!(fs::read(path).unwrap(), bytes(300_000));
}

#[test]
fn another_process_continues_it_too() {
    let bench = Bench::new([FakeRepo::model("own/tiny").lfs("w.bin", bytes(300_000))]);
    let repo = Repo::model("own/tiny", None);
    bench.fake.fail("/cdn/", 1, Fault::BreakAfter(123_456));
    let hasty = RetryPolicy { attempts: 1, ..bench.settings().retry };
    let first = Hub::new(HubOptions { retry: hasty, ..bench.settings() }).fetch(&repo, "w.bin");
    says(first, &["w.bin of model own/tiny", "broken off after 123456"]);
    let part = format!("{}.incomplete", digest::sha256_of_bytes(&bytes(300_000)));
    assert_eq!(bench.blobs(FOLDER), [part]);
    assert_eq!(fs::read(bench.hub().fetch(&repo, "w.bin").unwrap()).unwrap(), bytes(300_000));
    assert_eq!(bench.transfers()[1].1.as_deref(), Some("bytes=123456-"));
}

#[test]
fn a_server_without_ranges_sends_all_of_it_again() {
    let bench = Bench::new([FakeRepo::model("own/tiny").lfs("w.bin", bytes(300_000))]);
    bench.fake.fail("/cdn/", 1, Fault::BreakAfter(70_000));
    bench.fake.fail("/cdn/", 1, Fault::NoRanges);
    let path = bench.hub().fetch(&Repo::model("own/tiny", None), "w.bin").unwrap();
    assert_eq!(fs::read(path).unwrap(), bytes(300_000));
    assert_eq!(bench.transfers().len(), 2);
}

#[test]
fn what_an_earlier_process_left_is_checked() {
    let (sha, repo) = (digest::sha256_of_bytes(&bytes(9_000)), Repo::model("own/tiny", None));
    // A partial file with wrong bytes, with all bytes, and with too many bytes.
    for (left, transfers) in
        [(vec![7; 5_000], 2), (bytes(9_000), 0), (vec![7; 9_000], 1), (vec![7; 10_000], 1)]
    {
        let bench = Bench::new([FakeRepo::model("own/tiny").lfs("w.bin", bytes(9_000))]);
        let blobs = bench.dir.path().join("hub").join(FOLDER).join("blobs");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join(format!("{sha}.incomplete")), &left).unwrap();
        assert_eq!(fs::read(bench.hub().fetch(&repo, "w.bin").unwrap()).unwrap(), bytes(9_000));
        assert_eq!(bench.transfers().len(), transfers, "{} bytes left", left.len());
        assert_eq!(names(&blobs), std::slice::from_ref(&sha));
    }
}

#[test]
fn damaged_bytes_are_never_kept() {
    let bench = Bench::new([FakeRepo::model("own/tiny").lfs("w.bin", bytes(9_000))]);
    let repo = Repo::model("own/tiny", None);
    bench.fake.fail("/cdn/", 2, Fault::Flipped);
    let error = says(
        bench.hub().fetch(&repo, "w.bin"),
        &["damaged", "SHA-256", &digest::sha256_of_bytes(&bytes(9_000))],
    );
    assert!(matches!(error, HubError::Damaged { .. }));
    assert!(bench.blobs(FOLDER).is_empty());
    assert_eq!(fs::read(bench.hub().fetch(&repo, "w.bin").unwrap()).unwrap(), bytes(9_000));
}

#[test]
fn two_at_once_fetch_it_once() {
    let bench = Bench::new([FakeRepo::model("own/tiny").lfs("w.bin", bytes(3_000_000))]);
    let repo = Repo::model("own/tiny", None);
    std::thread::scope(|scope| {
        let runs: Vec<_> =
            (0..4).map(|_| scope.spawn(|| bench.hub().fetch(&repo, "w.bin").unwrap())).collect();
        for run in runs {
            assert_eq!(fs::read(run.join().unwrap()).unwrap(), bytes(3_000_000));
        }
    });
    assert_eq!(bench.transfers().len(), 1);
}

#[test]
fn an_empty_file_and_one_that_two_commits_share() {
    let bench = Bench::new([
        FakeRepo::model("own/tiny").file("empty", "").lfs("w.bin", bytes(5_000)),
        FakeRepo::model("own/tiny").at("v2").file("other", "x").lfs("w.bin", bytes(5_000)),
    ]);
    let (main, v2) = (Repo::model("own/tiny", None), Repo::model("own/tiny", Some("v2")));
    let hub = bench.hub();
    assert_eq!(fs::read(hub.fetch(&main, "empty").unwrap()).unwrap(), b"");
    let (one, two) = (hub.fetch(&main, "w.bin").unwrap(), hub.fetch(&v2, "w.bin").unwrap());
    assert_ne!(one, two);
    assert_eq!(fs::canonicalize(one).unwrap(), fs::canonicalize(two).unwrap());
    assert_eq!(bench.transfers().len(), 1);
}

#[test]
fn revisions_are_pinned() {
    let old = FakeRepo::model("own/tiny").file("config.json", "old");
    let (commit, text) = (old.commit(), |path| fs::read_to_string(path).unwrap());
    let bench = Bench::new([
        old.at("refs/pr/1"),
        FakeRepo::model("own/tiny").file("config.json", "new"),
        FakeRepo::model("own/tiny").at("v1").file("config.json", "one"),
    ]);
    let hub = bench.hub();
    let at =
        |revision: Option<&str>| text(hub.fetch(&Repo::model("own/tiny", revision), "config.json").unwrap());
    assert_eq!(at(None), "new");
    assert_eq!(at(Some("v1")), "one");
    assert_eq!(at(Some("refs/pr/1")), "old");
    assert_eq!(at(Some(&commit)), "old");
    let refs = bench.dir.path().join("hub").join(FOLDER).join("refs");
    assert_eq!(names(&refs), ["main", "refs", "v1"]);

    // A branch moves on; the files of its old commit remain.
    bench.fake.put(FakeRepo::model("own/tiny").file("config.json", "newest"));
    assert_eq!(text(bench.hub().fetch(&Repo::model("own/tiny", None), "config.json").unwrap()), "newest");
    assert_eq!(at(Some(&commit)), "old");
}

#[test]
fn the_token_goes_to_the_hub_alone() {
    let bench = Bench::new([tiny()]);
    let hub = Hub::new(HubOptions { token: Some("hf_secret".into()), ..bench.settings() });
    hub.fetch(&Repo::model("own/tiny", None), "sub/weights 1%.bin").unwrap();
    for request in bench.fake.requests() {
        let expected = (!request.path.starts_with("/cdn/")).then_some("Bearer hf_secret");
        assert_eq!(request.authorization.as_deref(), expected, "{request:?}");
    }
    bench.fake.forget();
    bench.hub().files(&Repo::model("own/tiny", None)).unwrap();
    assert!(bench.fake.requests().iter().all(|request| request.authorization.is_none()));
}

#[test]
fn no_name_leads_out_of_the_cache() {
    let bench = Bench::new([FakeRepo::model("own/tiny")
        .file("../../evil", "x")
        .file("a/../../b", "x")
        .file("c", "x")]);
    let hub = bench.hub();
    assert_eq!(hub.files(&Repo::model("own/tiny", None)).unwrap(), ["c"]);
    for path in ["../c", "/c", "a//b", ""] {
        says(hub.fetch(&Repo::model("own/tiny", None), path), &["no file"]);
    }
    says(hub.fetch(&Repo::model("own/../tiny", None), "c"), &["owner/name"]);
    says(hub.fetch(&Repo::model("own/tiny", Some("../../x")), "c"), &["no revision ../../x"]);
}

/// A model of two shards, whose layers are much larger than the tensors around them.
fn sharded() -> (FakeRepo, [Vec<u8>; 2]) {
    let tensor = |name: &str, bytes: Range<usize>| {
        (
            name.to_string(),
            json!({"dtype": "U8", "shape": [bytes.len()], "data_offsets": [bytes.start, bytes.end]}),
        )
    };
    let shard = |tensors: Vec<(String, Value)>, count: usize, shift: usize| {
        let header = Value::Object(tensors.into_iter().collect()).to_string();
        let header = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
        [header, bytes(count + shift)[shift..].to_vec()].concat()
    };
    let first = vec![tensor("model.embed_tokens.weight", 0..4000), tensor("model.layers.0.a", 4000..90_000)];
    let second = vec![tensor("model.layers.1.a", 0..70_000), tensor("model.norm.weight", 70_000..70_100)];
    let shards = [shard(first, 90_000, 0), shard(second, 70_100, 4)];
    let index = json!({"weight_map": {
        "model.embed_tokens.weight": "a.safetensors", "model.layers.0.a": "a.safetensors",
        "model.layers.1.a": "b.safetensors", "model.norm.weight": "b.safetensors",
    }});
    let repo = FakeRepo::model("own/large")
        .file("config.json", "{}")
        .file("tokenizer.json", "{ }")
        .file("model.safetensors.index.json", index.to_string())
        .lfs("a.safetensors", &shards[0])
        .lfs("b.safetensors", &shards[1]);
    (repo, shards)
}

#[test]
fn tensors_outside_the_layers_come_without_their_shards() {
    let (repo, shards) = sharded();
    let bench = Bench::new([repo]);
    let repo = Repo::model("own/large", None);
    bench.fake.fail("/cdn/", 1, Fault::BreakAfter(5));
    let dir = bench.hub().model_files(&repo, ModelFiles::WithoutLayers).unwrap();
    assert_eq!(names(&dir), ["config.json", "model.safetensors", "tokenizer.json"]);
    let file = fs::read(dir.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let mut found = tensors.names();
    found.sort_unstable();
    assert_eq!(found, ["model.embed_tokens.weight", "model.norm.weight"]);
    let behind_header = |shard: &[u8]| 8 + u64::from_le_bytes(shard[..8].try_into().unwrap()) as usize;
    let embedding = behind_header(&shards[0]);
    assert_eq!(
        tensors.tensor("model.embed_tokens.weight").unwrap().data(),
        &shards[0][embedding..embedding + 4000]
    );
    assert_eq!(tensors.tensor("model.norm.weight").unwrap().data(), &shards[1][shards[1].len() - 100..]);
    assert!(bench.transfers().iter().all(|(_, range)| range.is_some()), "{:?}", bench.transfers());
    assert_eq!(bench.blobs("models--own--large").len(), 3, "no shard is in the shared cache");

    bench.fake.forget();
    assert_eq!(bench.hub().model_files(&repo, ModelFiles::WithoutLayers).unwrap(), dir);
    assert_eq!(bench.offline().model_files(&repo, ModelFiles::WithoutLayers).unwrap(), dir);
    assert_eq!(bench.transfers(), []);
    // The whole model is still to be had, and then serves for its parts.
    let whole = bench.hub().model(&repo).unwrap();
    assert_eq!(fs::read(whole.join("b.safetensors")).unwrap(), shards[1]);
    assert_eq!(bench.hub().model_files(&repo, ModelFiles::WithoutLayers).unwrap(), whole);
}

#[test]
fn tensors_outside_the_layers_are_fetched_once_and_continued() {
    let (repo, shards) = sharded();
    let bench = Bench::new([repo]);
    let repo = Repo::model("own/large", None);
    // Four requests read the headers. Those for the embedding break off until the client gives up.
    for _ in 0..4 {
        bench.fake.fail("/cdn/", 1, Fault::BreakAfter(1 << 20));
    }
    bench.fake.fail("/cdn/", 1, Fault::BreakAfter(1000));
    bench.fake.fail("/cdn/", 3, Fault::Closed);
    bench.hub().model_files(&repo, ModelFiles::WithoutLayers).unwrap_err();
    bench.fake.forget();
    let fetched = std::thread::scope(|scope| {
        let fetch = || bench.hub().model_files(&repo, ModelFiles::WithoutLayers).unwrap();
        [(); 3].map(|()| scope.spawn(fetch)).map(|thread| thread.join().unwrap())
    });
    let file = fs::read(fetched[0].join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    assert_eq!(tensors.tensor("model.norm.weight").unwrap().data(), &shards[1][shards[1].len() - 100..]);
    assert!(fetched.iter().all(|dir| *dir == fetched[0]));
    let header = 8 + u64::from_le_bytes(shards[0][..8].try_into().unwrap());
    let rest = Some(format!("bytes={}-{}", header + 1000, header + 3999));
    let of_embedding = bench.transfers().into_iter().filter(|(_, range)| *range == rest).count();
    assert_eq!(of_embedding, 1, "{:?}", bench.transfers());
}

#[test]
fn a_server_without_ranges_sends_whole_shards() {
    let (repo, shards) = sharded();
    let bench = Bench::new([repo]);
    bench.fake.fail("/cdn/", 1, Fault::NoRanges);
    let repo = Repo::model("own/large", None);
    let dir = bench.hub().model_files(&repo, ModelFiles::WithoutLayers).unwrap();
    assert_eq!(fs::read(dir.join("a.safetensors")).unwrap(), shards[0]);
    let own = bench.dir.path().join("own/outer-tensors/models--own--large");
    assert_eq!(names(&own).len(), 1, "only the lock is left");
}
