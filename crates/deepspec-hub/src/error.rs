//! Errors of downloads from the hub.

use std::io;
use std::time::Duration;

use deepspec_core::atomic::FileError;
use deepspec_core::cli::UsageError;

use crate::{Repo, RepoType};

/// Why a download failed. Every message names the failed request and a remedy.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// Text that is neither a local path nor a hub id.
    #[error(
        "{text} does not exist: there is no such folder or file{}, and it is no hub id of a {kind} (`owner/name` or `owner/name@revision`)",
        in_current_dir()
    )]
    NotAnId {
        /// Whether a model or a dataset was requested.
        kind: RepoType,
        /// The text.
        text: String,
    },
    /// An error of a hub id that may have been meant as a path.
    #[error("{source}. (There is no folder {text}{}, so it was taken as a hub id)", in_current_dir())]
    TakenAsId {
        /// The name as given.
        text: String,
        /// The error of the hub id.
        source: Box<HubError>,
    },
    /// A revision of a local path.
    #[error(
        "{path} is a folder here, which has no revision {revision}; leave the revision out, or give a hub id"
    )]
    RevisionOfFolder {
        /// The path as given.
        path: String,
        /// The revision.
        revision: String,
    },
    /// Two revisions for one repository.
    #[error("{text} names one revision and the separate setting another, {other}; give one of them")]
    TwoRevisions {
        /// The id with its revision.
        text: String,
        /// The other revision.
        other: String,
    },
    /// No folder for the cache.
    #[error("no folder for downloads: neither HOME nor HF_HOME is set; set HF_HUB_CACHE to a folder")]
    NoCacheFolder,
    /// No folder for unpacking a GGUF file.
    #[error(
        "no folder to unpack a GGUF into: neither HOME nor XDG_CACHE_HOME is set; set DEEPSPEC_CACHE to a folder"
    )]
    NowhereToUnpack,
    /// A GGUF file that cannot be unpacked.
    #[error(transparent)]
    Gguf(#[from] deepspec_checkpoint::gguf::GgufError),
    /// The server did not answer.
    #[error(
        "fetching {what}: {url} cannot be reached ({problem}; {attempts} attempts); give a local path instead of the hub id, \
         set HF_ENDPOINT to a mirror, or HF_HUB_OFFLINE=1 to use only what is cached"
    )]
    Unreachable {
        /// The file or repository.
        what: String,
        /// The URL.
        url: String,
        /// The connection's error.
        problem: String,
        /// Number of requests.
        attempts: u32,
    },
    /// The cache does not have a file, and the hub cannot be asked.
    #[error(
        "{what} is not in the cache {cache}, and {reason}; fetch it once with a connection (any tool that fills this \
         cache will do), or give a local path instead of the hub id"
    )]
    NotCached {
        /// The file or repository.
        what: String,
        /// The cache folder.
        cache: String,
        /// Why the hub was not asked.
        reason: String,
    },
    /// The cache has only some files of a set.
    #[error(
        "{repo}: {} of {total} files of the same set are missing here: {}; fetch the rest with a connection",
        missing.len(), first_few(missing)
    )]
    Incomplete {
        /// The repository.
        repo: Repo,
        /// The missing files.
        missing: Vec<String>,
        /// Number of files in the set.
        total: usize,
    },
    /// The cache has files of a repository, but no list of all its files.
    #[error(
        "{repo}: nothing in the cache says which files it has, and {reason}; fetch it once with a connection, or name \
         its files without wildcards"
    )]
    Unlisted {
        /// The repository.
        repo: Repo,
        /// Why the hub was not asked.
        reason: String,
    },
    /// HTTP 401: access without a valid token.
    #[error(
        "fetching {what}: {url} refuses access (HTTP 401{server_message}); {}",
        if *token { "the token is not valid: set HF_TOKEN to a current one" } else { "set HF_TOKEN to an access token of an account that may read it" }
    )]
    Unauthorized {
        /// The file or repository.
        what: String,
        /// The URL.
        url: String,
        /// Message of the hub, with a leading `: `.
        server_message: String,
        /// Whether a token was sent.
        token: bool,
    },
    /// A gated repository: its terms must be accepted first.
    #[error(
        "fetching {what}: it is gated (HTTP {status}, {url}); accept its terms at {page} and {}",
        if *token { "use a token (HF_TOKEN) of the account that did" } else { "set HF_TOKEN to a token of the account that did; none was sent" }
    )]
    Gated {
        /// The file or repository.
        what: String,
        /// The URL.
        url: String,
        /// The HTTP status.
        status: u16,
        /// The page with the terms.
        page: String,
        /// Whether a token was sent.
        token: bool,
    },
    /// HTTP 403: the account may not read the repository.
    #[error(
        "fetching {what}: {url} forbids access (HTTP 403{server_message}); accept its terms at {page} if it has any, and use a token (HF_TOKEN) \
         that may read it{}", if *token { "" } else { "; none was sent" }
    )]
    Forbidden {
        /// The file or repository.
        what: String,
        /// The URL.
        url: String,
        /// The hub's own message, with a leading `: `.
        server_message: String,
        /// The repository's page.
        page: String,
        /// Whether a token was sent.
        token: bool,
    },
    /// No repository of that name.
    #[error(
        "{repo}: the hub has no {} of that name{} (HTTP {status}, {url}), and no such path exists here; check the spelling{}",
        repo.kind, if *token { "" } else { ", or it is private" },
        if *token { "" } else { ", or set HF_TOKEN" }
    )]
    NoRepository {
        /// The repository.
        repo: Repo,
        /// The URL.
        url: String,
        /// The HTTP status: 404, or 401 where the hub hides private repositories.
        status: u16,
        /// Whether a token was sent.
        token: bool,
    },
    /// No branch, tag or commit of that name.
    #[error("{} {} has no revision {}; give a branch, a tag or a full commit number", repo.kind, repo.id, repo.revision())]
    NoRevision {
        /// The repository and its revision.
        repo: Repo,
    },
    /// No such file at that revision.
    #[error("{repo} has no file {file} (HTTP 404, {url}); its files: {}", first_few(files))]
    NoFile {
        /// The repository.
        repo: Box<Repo>,
        /// The file.
        file: String,
        /// The URL.
        url: String,
        /// Files of the repository.
        files: Vec<String>,
    },
    /// HTTP 429 after all retries.
    #[error(
        "fetching {what}: {url} refuses more requests for now (HTTP 429, {attempts} attempts{}); try again later{}",
        wait.map_or(String::new(), |wait| format!(", it asks for {} s of pause", wait.as_secs())),
        if *token { "" } else { ", or set HF_TOKEN: the hub grants more to those it knows" }
    )]
    RateLimited {
        /// The file or repository.
        what: String,
        /// The URL.
        url: String,
        /// The pause that the server asked for last.
        wait: Option<Duration>,
        /// Number of requests.
        attempts: u32,
        /// Whether a token was sent.
        token: bool,
    },
    /// A server error after all retries.
    #[error(
        "fetching {what}: {url} answers HTTP {status} ({attempts} attempts); try again later, or give a local path instead of the hub id"
    )]
    Server {
        /// The file or repository.
        what: String,
        /// The URL.
        url: String,
        /// The last HTTP status.
        status: u16,
        /// Number of requests.
        attempts: u32,
    },
    /// A response that no hub would give.
    #[error(
        "fetching {what}: {url} answers {found}; expected {expected}: is HF_ENDPOINT, or a proxy between, really a hub?"
    )]
    Unexpected {
        /// The file or repository.
        what: String,
        /// The URL.
        url: String,
        /// The response.
        found: String,
        /// The expected response.
        expected: &'static str,
    },
    /// Bytes that do not match the SHA-256 from the hub.
    #[error("fetching {what}: the bytes from {url} are damaged ({problem}); nothing was kept, try again")]
    Damaged {
        /// The file or repository.
        what: String,
        /// The URL.
        url: String,
        /// The mismatch.
        problem: String,
    },
    /// The cache cannot be written or read.
    #[error("fetching {what}: {source}{}", disk_remedy(&source.source))]
    Disk {
        /// The file or repository.
        what: String,
        /// The failed operation and its path.
        source: FileError,
    },
    /// A dataset without readable data files.
    #[error(
        "{repo}{}: no data files; parquet, jsonl and json (plain, .gz, .zst) are read, found: {}",
        with_leading_comma(place),
        first_few(files)
    )]
    NoData {
        /// The repository.
        repo: Repo,
        /// The split or configuration.
        place: String,
        /// Files of the repository.
        files: Vec<String>,
    },
    /// A configuration that the dataset does not have.
    #[error("{repo} has no configuration {wanted}; it has: {}", known.join(", "))]
    UnknownConfig {
        /// The repository.
        repo: Repo,
        /// The requested configuration.
        wanted: String,
        /// Known configurations.
        known: Vec<String>,
    },
    /// The dataset has several configurations, and the caller named none.
    #[error("{repo} has several configurations; name one of: {}", known.join(", "))]
    WhichConfig {
        /// The repository.
        repo: Repo,
        /// Known configurations.
        known: Vec<String>,
    },
    /// A split that the dataset does not have.
    #[error("{repo}, configuration {config}, has no split {wanted}; it has: {}", known.join(", "))]
    UnknownSplit {
        /// The repository.
        repo: Box<Repo>,
        /// The configuration.
        config: String,
        /// The requested split.
        wanted: String,
        /// Known splits.
        known: Vec<String>,
    },
    /// The dataset has several splits but no `train`, and the caller named none.
    #[error("{repo}, configuration {config}, has several splits and none is called train; name one of: {}", known.join(", "))]
    WhichSplit {
        /// The repository.
        repo: Repo,
        /// The configuration.
        config: String,
        /// Known splits.
        known: Vec<String>,
    },
    /// A repository without a model that this project can load.
    #[error("{repo} cannot be loaded: {problem}; its files: {}", first_few(files))]
    NoModel {
        /// The repository.
        repo: Repo,
        /// The missing part.
        problem: String,
        /// Files of the repository.
        files: Vec<String>,
    },
}

impl HubError {
    /// Adds to an error of the hub id `text` the hint that no folder of that name exists.
    pub fn with_path_hint(self, text: &str) -> Self {
        Self::TakenAsId { text: text.into(), source: Box::new(self) }
    }

    /// Whether the request itself is wrong, so that a retry is useless.
    pub fn is_usage(&self) -> bool {
        if let Self::TakenAsId { source, .. } = self {
            return source.is_usage();
        }
        matches!(
            self,
            Self::NotAnId { .. }
                | Self::RevisionOfFolder { .. }
                | Self::TwoRevisions { .. }
                | Self::NoCacheFolder
                | Self::NowhereToUnpack
                | Self::Gguf(_)
                | Self::NoRepository { .. }
                | Self::NoRevision { .. }
                | Self::NoFile { .. }
                | Self::UnknownConfig { .. }
                | Self::WhichConfig { .. }
                | Self::UnknownSplit { .. }
                | Self::WhichSplit { .. }
        )
    }

    /// Converts the error for a program's `main`. A usage error exits with code 2.
    pub fn report(self) -> anyhow::Error {
        if self.is_usage() { UsageError(self.to_string()).into() } else { self.into() }
    }

    /// Whether the hub gave no usable answer, so that the cache may be used instead.
    pub(crate) fn is_outage(&self) -> bool {
        if let Self::TakenAsId { source, .. } = self {
            return source.is_outage();
        }
        matches!(self, Self::Unreachable { .. } | Self::Server { .. } | Self::RateLimited { .. })
    }
}

fn disk_remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free some space, or set HF_HUB_CACHE to a folder on another disk (what has arrived is kept and continued)"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; set HF_HUB_CACHE to a folder that you may write to"
        }
        _ => "",
    }
}

/// The current directory, for messages about relative paths.
fn in_current_dir() -> String {
    std::env::current_dir().map_or_else(|_| String::new(), |dir| format!(" in {}", dir.display()))
}

fn with_leading_comma(place: &str) -> String {
    if place.is_empty() { String::new() } else { format!(", {place}") }
}

/// Up to twelve names, and the number of further names.
fn first_few(names: &[String]) -> String {
    const MAX_NAMES_SHOWN: usize = 12;
    let mut text = names.iter().take(MAX_NAMES_SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if names.is_empty() {
        text.push_str("none");
    } else if names.len() > MAX_NAMES_SHOWN {
        text.push_str(&format!(" and {} more", names.len() - MAX_NAMES_SHOWN));
    }
    text
}
