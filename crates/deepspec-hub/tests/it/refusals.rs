//! Error messages when the hub refuses a request.

use std::fs;
use std::net::TcpListener;

use deepspec_hub::{Hub, HubError, HubOptions, Repo, RepoType, RetryPolicy};
use deepspec_testkit::hub::{FakeRepo, Fault};

use crate::bench::{Bench, bytes, says};

fn bench() -> Bench {
    Bench::new([FakeRepo::model("own/tiny").file("config.json", "{}").lfs("w.bin", bytes(2_000))])
}

fn repo() -> Repo {
    Repo::model("own/tiny", None)
}

fn code(code: &str) -> Vec<(&'static str, String)> {
    vec![("X-Error-Code", code.into())]
}

#[test]
fn a_401_asks_for_a_token_or_a_valid_one() {
    let bench = bench();
    bench.fake.fail("/api/models", 1, Fault::Status(401, vec![]));
    let error = says(
        bench.hub().fetch(&repo(), "w.bin"),
        &["own/tiny", "private", "HF_TOKEN", "HTTP 401", "spelling"],
    );
    assert!(error.is_usage());
    let message = vec![("X-Error-Message", "Invalid credentials in Authorization header".to_string())];
    bench.fake.fail("/api/models", 1, Fault::Status(401, message));
    let hub = Hub::new(HubOptions { token: Some("stale".into()), ..bench.settings() });
    let error = says(
        hub.fetch(&repo(), "w.bin"),
        &["401", "Invalid credentials", "token is not valid", &bench.fake.url()],
    );
    assert!(
        matches!(error, HubError::Unauthorized { token: true, .. }) && !error.to_string().contains("stale")
    );
    assert_eq!(bench.fake.requests().len(), 2, "asking again would not help");
}

#[test]
fn a_403_names_the_page_with_the_terms() {
    let bench = bench();
    let page = format!("{}/own/tiny", bench.fake.url());
    bench.fake.fail("/resolve/", 1, Fault::Status(403, code("GatedRepo")));
    says(
        bench.hub().fetch(&repo(), "w.bin"),
        &["w.bin of model own/tiny", "gated", "403", &page, "none was sent"],
    );
    bench.fake.fail("/resolve/", 1, Fault::Status(403, vec![]));
    let hub = Hub::new(HubOptions { token: Some("narrow".into()), ..bench.settings() });
    says(hub.fetch(&repo(), "w.bin"), &["forbids", "403", "HF_TOKEN", &page]);
    // Gated repositories answer anonymous requests with 401.
    bench.fake.fail("/resolve/", 1, Fault::Status(401, code("GatedRepo")));
    says(bench.hub().fetch(&repo(), "w.bin"), &["gated", "401", &page]);
}

#[test]
fn a_404_says_which_name_is_wrong() {
    let bench = bench();
    let error = says(
        bench.hub().fetch(&Repo::model("own/tinny", None), "w.bin"),
        &["own/tinny", "no model of that name", "404"],
    );
    assert!(matches!(error, HubError::NoRepository { .. }) && error.is_usage());
    says(bench.hub().fetch(&Repo::dataset("own/tiny", None), "w.bin"), &["no dataset of that name"]);
    says(
        bench.hub().fetch(&Repo::model("own/tiny", Some("v9")), "w.bin"),
        &["own/tiny", "no revision v9", "branch"],
    );
    let words = ["no file model.bin", "404", "config.json, w.bin", "/own/tiny/resolve/"];
    says(bench.hub().fetch(&repo(), "model.bin"), &words);
}

#[test]
fn a_429_is_waited_for_and_then_said() {
    let bench = bench();
    let pause = |seconds: &str| Fault::Status(429, vec![("Retry-After", seconds.to_string())]);
    bench.fake.fail("/resolve/", 2, pause("0"));
    assert!(bench.hub().fetch(&repo(), "w.bin").is_ok());
    bench.fake.fail("/resolve/", 3, pause("0"));
    says(bench.hub().fetch(&repo(), "config.json"), &["429", "3 attempts", "HF_TOKEN", "later"]);
    // The client does not wait for hours.
    bench.fake.forget();
    bench.fake.fail("/resolve/", 1, pause("7200"));
    let error = says(bench.hub().fetch(&repo(), "config.json"), &["429", "1 attempts", "7200 s"]);
    assert!(matches!(error, HubError::RateLimited { attempts: 1, .. }) && !error.is_usage());
}

#[test]
fn a_500_is_asked_again() {
    let bench = bench();
    for part in ["/api/models", "/resolve/", "/cdn/"] {
        bench.fake.fail(part, 2, Fault::Status(500, vec![]));
    }
    assert_eq!(fs::read(bench.hub().fetch(&repo(), "w.bin").unwrap()).unwrap(), bytes(2_000));
    bench.fake.fail("/resolve/", 9, Fault::Status(503, vec![]));
    says(bench.hub().fetch(&repo(), "config.json"), &["503", "3 attempts", "local path"]);
}

#[test]
fn nobody_there_is_said_with_the_ways_out() {
    let bench = bench();
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let endpoint = format!("http://{nobody}");
    let hub = Hub::new(HubOptions { endpoint: endpoint.clone(), ..bench.settings() });
    let words = [&endpoint, "model own/tiny", "refused", "local path", "HF_ENDPOINT", "HF_HUB_OFFLINE"];
    let error = says(hub.fetch(&repo(), "w.bin"), &words);
    assert!(matches!(error, HubError::Unreachable { .. }) && !error.is_usage());
    for endpoint in ["nonsense", "http://", "http://a b"] {
        let hub = Hub::new(HubOptions { endpoint: endpoint.into(), ..bench.settings() });
        says(hub.fetch(&repo(), "w.bin"), &["HF_ENDPOINT"]);
    }
}

#[test]
fn a_silent_server_is_not_waited_for_forever() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap());
    let bench = bench();
    let retry = RetryPolicy { read_timeout: std::time::Duration::from_millis(50), ..bench.settings().retry };
    let hub = Hub::new(HubOptions { endpoint, retry, ..bench.settings() });
    says(hub.fetch(&repo(), "w.bin"), &["cannot be reached", "timeout"]);
}

#[test]
fn what_is_no_hub_is_said() {
    let bench = Bench::new([FakeRepo::model("own/tiny").file("a", "x")]);
    let endpoint = format!("{}/own/tiny/resolve/main/a?", bench.fake.url());
    let hub = Hub::new(HubOptions { endpoint, ..bench.settings() });
    says(hub.fetch(&repo(), "a"), &["expected a repository's description", "HF_ENDPOINT"]);
    bench.fake.fail("/resolve/", 1, Fault::Status(200, vec![]));
    says(bench.hub().fetch(&repo(), "a"), &["etag"]);
}

#[cfg(unix)]
#[test]
fn a_cache_that_cannot_be_written_is_said() {
    let bench = bench();
    fs::write(bench.dir.path().join("hub"), "a file where the folder should be").unwrap();
    let error = says(bench.hub().fetch(&repo(), "w.bin"), &["own/tiny", "hub/models--own--tiny"]);
    assert!(matches!(error, HubError::Disk { .. }));
}

#[test]
fn names_of_files_and_paths_are_no_ids() {
    let here = std::env::current_dir().unwrap();
    for text in [
        "models/tiny.gguf",
        "own/model.safetensors",
        "own/recipe.YAML",
        "./tiny",
        "/nowhere/at/all",
        "../tiny",
        "own/tiny/",
    ] {
        let error = Repo::parse(RepoType::Model, text, None).unwrap_err();
        let told = error.to_string();
        assert!(matches!(error, HubError::NotAnId { .. }) && error.is_usage(), "{told}");
        assert!(
            told.contains(text)
                && told.contains("no such folder or file")
                && told.contains(here.to_str().unwrap()),
            "{told}"
        );
    }
    assert!(Repo::parse(RepoType::Model, "own/tiny-v1.2", None).is_ok());
}

/// A mistyped path of two parts is requested from the hub, and the error says so.
#[test]
fn a_path_that_was_taken_as_an_id_is_told_with_the_folder() {
    let bench = bench();
    let source = bench.hub().fetch(&Repo::model("assets/tiny-targt", None), "config.json").unwrap_err();
    let (usage, words) = (source.is_usage(), source.to_string());
    let taken = HubError::TakenAsId { text: "assets/tiny-targt".into(), source: Box::new(source) };
    let (told, here) = (taken.to_string(), std::env::current_dir().unwrap());
    assert_eq!(taken.is_usage(), usage);
    for part in [words.as_str(), "There is no folder assets/tiny-targt", here.to_str().unwrap(), "hub id"] {
        assert!(told.contains(part), "{part} not in {told}");
    }
}
