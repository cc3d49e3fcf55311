//! A fake hub, a cache, and the requests that the hub received.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use deepspec_core::cli::Verbosity;
use deepspec_hub::{Hub, HubError, HubOptions, RetryPolicy};
use deepspec_testkit::hub::{FakeHub, FakeRepo, Request};
use tempfile::TempDir;

/// A fake hub on loopback and an empty cache.
pub struct Bench {
    pub fake: FakeHub,
    pub dir: TempDir,
}

impl Bench {
    pub fn new(repos: impl IntoIterator<Item = FakeRepo>) -> Self {
        Self { fake: FakeHub::start(repos), dir: tempfile::tempdir().unwrap() }
    }

    pub fn settings(&self) -> HubOptions {
        let pause = Duration::from_millis(1);
        HubOptions {
            endpoint: self.fake.url(),
            token: None,
            cache: self.dir.path().join("hub"),
            own_cache: Some(self.dir.path().join("own")),
            offline: None,
            verbosity: Verbosity::Quiet,
            retry: RetryPolicy { attempts: 3, pause, ..RetryPolicy::default() },
        }
    }

    /// A hub client as a new process would open it.
    pub fn hub(&self) -> Hub {
        Hub::new(self.settings())
    }

    /// As `hub`, but in offline mode.
    pub fn offline(&self) -> Hub {
        Hub::new(HubOptions { offline: Some("HF_HUB_OFFLINE"), ..self.settings() })
    }

    /// The requests for content, with their path and range.
    pub fn transfers(&self) -> Vec<(String, Option<String>)> {
        let is_transfer = |request: &Request| request.path.starts_with("/cdn/");
        let requests = self.fake.requests().into_iter().filter(is_transfer);
        requests.map(|request| (request.path, request.range)).collect()
    }

    /// The files in a model's folder of blobs, sorted.
    pub fn blobs(&self, folder: &str) -> Vec<String> {
        names(&self.dir.path().join("hub").join(folder).join("blobs"))
    }
}

/// The names in a folder, sorted.
pub fn names(dir: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else { return vec![] };
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Bytes in which every position has a different value.
pub fn bytes(count: usize) -> Vec<u8> {
    (0..count as u32).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).take(count).collect()
}

/// Asserts that it failed and that the error message, on one line, contains all `words`.
pub fn says(outcome: Result<PathBuf, HubError>, words: &[&str]) -> HubError {
    let error = outcome.unwrap_err();
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    for word in words {
        assert!(text.contains(word), "{word} is not in: {text}");
    }
    error
}
