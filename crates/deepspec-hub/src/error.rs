//! What can go wrong between here and the hub.

use std::io;
use std::time::Duration;

use deepspec_core::atomic::FileError;
use deepspec_core::cli::UsageError;

use crate::{Kind, Repo};

/// Why a file of the hub is not here. Every message says what was tried and what to do.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// Text that is neither here nor a hub id.
    #[error(
        "{text} does not exist: there is no such folder or file{}, and it is no hub id of a {kind} (`owner/name` or `owner/name@revision`)",
        here()
    )]
    NotAnId {
        /// What was looked for.
        kind: Kind,
        /// What was given.
        text: String,
    },
    /// A hub id that could have been meant as a path.
    #[error("{source}. (There is no folder {text}{}, so it was taken as a hub id)", here())]
    TakenAsId {
        /// The name, as it was given.
        text: String,
        /// What came of it.
        source: Box<HubError>,
    },
    /// A revision for what lies here already.
    #[error(
        "{path} is a folder here, which has no revision {revision}; leave the revision out, or give a hub id"
    )]
    RevisionOfFolder {
        /// The folder, as it was given.
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
    /// Nowhere to keep files.
    #[error("no folder for downloads: neither HOME nor HF_HOME is set; set HF_HUB_CACHE to a folder")]
    NoCacheFolder,
    /// Nowhere to keep what a GGUF is unpacked to.
    #[error(
        "no folder to unpack a GGUF into: neither HOME nor XDG_CACHE_HOME is set; set DEEPSPEC_CACHE to a folder"
    )]
    NowhereToUnpack,
    /// A file that is no GGUF of a model that is read.
    #[error(transparent)]
    Gguf(#[from] deepspec_checkpoint::gguf::GgufError),
    /// No answer.
    #[error(
        "fetching {what}: {url} cannot be reached ({problem}; {attempts} attempts); give a local path instead of the hub id, \
         set HF_ENDPOINT to a mirror, or HF_HUB_OFFLINE=1 to use only what is cached"
    )]
    Unreachable {
        /// What was fetched.
        what: String,
        /// The address.
        url: String,
        /// What happened to the connection.
        problem: String,
        /// Requests made.
        attempts: u32,
    },
    /// Requests are forbidden and the cache does not have it.
    #[error(
        "{what} is not in the cache {cache}, and {reason}; fetch it once with a connection (any tool that fills this \
         cache will do), or give a local path instead of the hub id"
    )]
    NotCached {
        /// What was wanted.
        what: String,
        /// The cache folder.
        cache: String,
        /// Why it was not asked for.
        reason: String,
    },
    /// The cache has a part of what belongs together.
    #[error(
        "{repo}: {} of {total} files of the same set are missing here: {}; fetch the rest with a connection",
        missing.len(), first_few(missing)
    )]
    Incomplete {
        /// The repository.
        repo: Repo,
        /// Files that should be there.
        missing: Vec<String>,
        /// How many belong together.
        total: usize,
    },
    /// The cache has files of a repository, but nobody knows whether they are all.
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
    /// The hub wants to know who asks.
    #[error(
        "fetching {what}: {url} refuses access (HTTP 401{said}); {}",
        if *token { "the token is not valid: set HF_TOKEN to a current one" } else { "set HF_TOKEN to an access token of an account that may read it" }
    )]
    Unauthorized {
        /// What was fetched.
        what: String,
        /// The address.
        url: String,
        /// The hub's own words, with a leading `: `.
        said: String,
        /// Whether a token was sent.
        token: bool,
    },
    /// Terms to accept first.
    #[error(
        "fetching {what}: it is gated (HTTP {status}, {url}); accept its terms at {page} and {}",
        if *token { "use a token (HF_TOKEN) of the account that did" } else { "set HF_TOKEN to a token of the account that did; none was sent" }
    )]
    Gated {
        /// What was fetched.
        what: String,
        /// The address.
        url: String,
        /// The HTTP status.
        status: u16,
        /// Where the terms are.
        page: String,
        /// Whether a token was sent.
        token: bool,
    },
    /// Known, but not allowed.
    #[error(
        "fetching {what}: {url} forbids access (HTTP 403{said}); accept its terms at {page} if it has any, and use a token (HF_TOKEN) \
         that may read it{}", if *token { "" } else { "; none was sent" }
    )]
    Forbidden {
        /// What was fetched.
        what: String,
        /// The address.
        url: String,
        /// The hub's own words, with a leading `: `.
        said: String,
        /// Where its page is.
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
        /// What was asked for.
        repo: Repo,
        /// The address.
        url: String,
        /// The HTTP status: 404, or 401 where the hub hides what it has.
        status: u16,
        /// Whether a token was sent.
        token: bool,
    },
    /// No branch, tag or commit of that name.
    #[error("{} {} has no revision {}; give a branch, a tag or a full commit number", repo.kind, repo.id, repo.revision())]
    NoRevision {
        /// What was asked for.
        repo: Repo,
    },
    /// No such file at that revision.
    #[error("{repo} has no file {file} (HTTP 404, {url}); its files: {}", first_few(files))]
    NoFile {
        /// Where it was looked for.
        repo: Box<Repo>,
        /// The file.
        file: String,
        /// The address.
        url: String,
        /// What the repository has.
        files: Vec<String>,
    },
    /// Too many requests, and waiting did not help.
    #[error(
        "fetching {what}: {url} refuses more requests for now (HTTP 429, {attempts} attempts{}); try again later{}",
        wait.map_or(String::new(), |wait| format!(", it asks for {} s of pause", wait.as_secs())),
        if *token { "" } else { ", or set HF_TOKEN: the hub grants more to those it knows" }
    )]
    RateLimited {
        /// What was fetched.
        what: String,
        /// The address.
        url: String,
        /// The pause last asked for.
        wait: Option<Duration>,
        /// Requests made.
        attempts: u32,
        /// Whether a token was sent.
        token: bool,
    },
    /// The hub is out of order.
    #[error(
        "fetching {what}: {url} answers HTTP {status} ({attempts} attempts); try again later, or give a local path instead of the hub id"
    )]
    Server {
        /// What was fetched.
        what: String,
        /// The address.
        url: String,
        /// The last HTTP status.
        status: u16,
        /// Requests made.
        attempts: u32,
    },
    /// An answer that no hub gives.
    #[error(
        "fetching {what}: {url} answers {found}; expected {expected}: is HF_ENDPOINT, or a proxy between, really a hub?"
    )]
    Unexpected {
        /// What was fetched.
        what: String,
        /// The address.
        url: String,
        /// What came.
        found: String,
        /// What should have come.
        expected: &'static str,
    },
    /// Bytes that are not those that the hub announced.
    #[error("fetching {what}: the bytes from {url} are damaged ({problem}); nothing was kept, try again")]
    Damaged {
        /// What was fetched.
        what: String,
        /// The address.
        url: String,
        /// What differs.
        problem: String,
    },
    /// The cache cannot be written or read.
    #[error("fetching {what}: {source}{}", remedy(&source.source))]
    Disk {
        /// What was fetched.
        what: String,
        /// What failed where.
        source: FileError,
    },
    /// A dataset without files that can be read.
    #[error(
        "{repo}{}: no data files; parquet, jsonl and json (plain, .gz, .zst) are read, found: {}",
        located(place),
        first_few(files)
    )]
    NoData {
        /// The repository.
        repo: Repo,
        /// Where in it.
        place: String,
        /// What the repository has.
        files: Vec<String>,
    },
    /// A configuration that the dataset does not have.
    #[error("{repo} has no configuration {wanted}; it has: {}", known.join(", "))]
    UnknownConfig {
        /// The repository.
        repo: Repo,
        /// What was asked for.
        wanted: String,
        /// What there is.
        known: Vec<String>,
    },
    /// Several configurations and none named.
    #[error("{repo} has several configurations; name one of: {}", known.join(", "))]
    WhichConfig {
        /// The repository.
        repo: Repo,
        /// What there is.
        known: Vec<String>,
    },
    /// A split that the dataset does not have.
    #[error("{repo}, configuration {config}, has no split {wanted}; it has: {}", known.join(", "))]
    UnknownSplit {
        /// The repository.
        repo: Box<Repo>,
        /// The configuration.
        config: String,
        /// What was asked for.
        wanted: String,
        /// What there is.
        known: Vec<String>,
    },
    /// Several splits, no `train` among them and none named.
    #[error("{repo}, configuration {config}, has several splits and none is called train; name one of: {}", known.join(", "))]
    WhichSplit {
        /// The repository.
        repo: Repo,
        /// The configuration.
        config: String,
        /// What there is.
        known: Vec<String>,
    },
    /// A repository that holds no model this project can load.
    #[error("{repo} cannot be loaded: {problem}; its files: {}", first_few(files))]
    NoModel {
        /// The repository.
        repo: Repo,
        /// What is missing.
        problem: String,
        /// What the repository has.
        files: Vec<String>,
    },
}

impl HubError {
    /// The error about a hub id which was given as `text`, and which may have been meant as a path.
    pub fn taken_as_id(self, text: &str) -> Self {
        Self::TakenAsId { text: text.into(), source: Box::new(self) }
    }

    /// Whether the caller asked for something that does not exist or cannot be meant, so that trying again is no use.
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

    /// The error for a program's `main`, which exits with 2 for what is a mistake in the call.
    pub fn report(self) -> anyhow::Error {
        if self.is_usage() { UsageError(self.to_string()).into() } else { self.into() }
    }

    /// Whether the hub gave no usable answer, so that what is cached may stand in.
    pub(crate) fn is_outage(&self) -> bool {
        if let Self::TakenAsId { source, .. } = self {
            return source.is_outage();
        }
        matches!(self, Self::Unreachable { .. } | Self::Server { .. } | Self::RateLimited { .. })
    }
}

fn remedy(error: &io::Error) -> &'static str {
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

/// The working folder, where relative paths begin.
fn here() -> String {
    std::env::current_dir().map_or_else(|_| String::new(), |dir| format!(" in {}", dir.display()))
}

fn located(place: &str) -> String {
    if place.is_empty() { String::new() } else { format!(", {place}") }
}

/// At most a dozen names, and how many more there are.
fn first_few(names: &[String]) -> String {
    const SHOWN: usize = 12;
    let mut text = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if names.is_empty() {
        text.push_str("none");
    } else if names.len() > SHOWN {
        text.push_str(&format!(" and {} more", names.len() - SHOWN));
    }
    text
}
