//! Access to the hub: finds files by repository and path, and downloads each at most once.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use deepspec_core::cli::Verbosity;

use crate::cache::RepoCache;
use crate::client::{Client, RequestError, RequestTarget, TransientError, unexpected_response};
use crate::download::Download;
use crate::repo::{is_commit_hash, is_safe_path};
use crate::{HubError, HubOptions, Repo};

/// Largest size of a repository's description, in bytes.
const MAX_DESCRIPTION_BYTES: u64 = 256 << 20;

/// The commit and files of a repository at a revision.
pub(crate) struct RepoListing {
    /// The commit of the revision.
    pub commit: String,
    /// Paths of the repository's files, sorted. A listing from the cache has only the cached files.
    pub files: Vec<String>,
    /// Paths of all files of the repository, sorted; None if the cache has no list of them.
    pub all: Option<Vec<String>>,
    /// Why the listing comes from the cache instead of the hub.
    pub local: Option<String>,
}

impl RepoListing {
    /// All files of the repository if they are known, otherwise the cached files.
    pub fn known_files(&self) -> &[String] {
        self.all.as_deref().unwrap_or(&self.files)
    }
}

/// Downloads files from the hub, or finds them in the cache.
pub struct Hub {
    pub(crate) settings: HubOptions,
    pub(crate) client: Client,
    listings: Mutex<HashMap<Repo, Arc<RepoListing>>>,
}

impl Hub {
    /// The hub from the environment variables; see [`deepspec_core::env::hub_env`].
    ///
    /// # Errors
    /// If no folder for the cache is known.
    pub fn from_env(verbosity: Verbosity) -> Result<Self, HubError> {
        Ok(Self::new(HubOptions::from_env(verbosity)?))
    }

    /// Creates a client with these options.
    pub fn new(settings: HubOptions) -> Self {
        Self { client: Client::new(&settings), settings, listings: Mutex::default() }
    }

    /// Paths in the repository at its revision, sorted. Offline, they come from the hub's last
    /// answer.
    ///
    /// # Errors
    /// If the hub refuses the request. Also if the hub cannot be reached and the cache lacks the
    /// revision or its list of files.
    pub fn files(&self, repo: &Repo) -> Result<Vec<String>, HubError> {
        let listing = self.listing(repo)?;
        listing.all.clone().ok_or_else(|| HubError::Unlisted {
            repo: repo.clone(),
            reason: listing.local.clone().unwrap_or_default(),
        })
    }

    /// The commit of the repository's revision, for provenance.
    ///
    /// # Errors
    /// If the hub refuses, or if it cannot be reached and the cache lacks the revision.
    pub fn commit(&self, repo: &Repo) -> Result<String, HubError> {
        Ok(self.listing(repo)?.commit.clone())
    }

    /// The local path of one file, downloaded if it is not cached.
    ///
    /// # Errors
    /// Fails as [`Self::commit`] does, or if the repository has no such file, its bytes are damaged
    /// or the disk is full.
    pub fn fetch(&self, repo: &Repo, path: &str) -> Result<PathBuf, HubError> {
        repo.check()?;
        if !is_safe_path(path) {
            return Err(self.no_file_error(repo, path, &[]));
        }
        let cache = self.repo_cache(repo);
        if repo.is_pinned() {
            let here = cache.snapshot_dir(repo.revision()).join(path);
            if here.exists() {
                return Ok(here);
            }
        }
        let listing = self.listing(repo)?;
        let here = cache.snapshot_dir(&listing.commit).join(path);
        if here.exists() {
            return Ok(here);
        }
        if let Some(reason) = &listing.local {
            return Err(self.not_cached_error(&format!("{path} of {repo}"), reason));
        }
        Download {
            client: &self.client,
            cache: &cache,
            repo,
            commit: &listing.commit,
            file: path,
            known: &listing.files,
            verbosity: self.settings.verbosity,
        }
        .run()
    }

    /// The repository's listing at its revision; later calls reuse the first.
    pub(crate) fn listing(&self, repo: &Repo) -> Result<Arc<RepoListing>, HubError> {
        let mut known = self.listings.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(listing) = known.get(repo) {
            return Ok(Arc::clone(listing));
        }
        repo.check()?;
        let listing = match self.settings.offline {
            Some(variable) => self.cached_listing(repo, format!("{variable} forbids requests"))?,
            None => match self.fetch_listing(repo) {
                Err(outage) if outage.is_outage() => {
                    let listing =
                        self.cached_listing(repo, "the hub cannot be asked".into()).map_err(|_| &outage);
                    match listing {
                        Ok(listing) => {
                            tracing::warn!("{outage}; using the cached commit {}", listing.commit);
                            listing
                        }
                        Err(_) => return Err(outage),
                    }
                }
                answer => answer?,
            },
        };
        let listing = Arc::new(listing);
        known.insert(repo.clone(), Arc::clone(&listing));
        Ok(listing)
    }

    /// The folder of a snapshot.
    pub(crate) fn snapshot_dir(&self, repo: &Repo, commit: &str) -> PathBuf {
        self.repo_cache(repo).snapshot_dir(commit)
    }

    fn repo_cache(&self, repo: &Repo) -> RepoCache {
        RepoCache::new(&absolute_path(&self.settings.cache), repo)
    }

    fn fetch_listing(&self, repo: &Repo) -> Result<RepoListing, HubError> {
        let target = RequestTarget { repo, file: None, known: &[] };
        let url = self.client.url(&format!("api/{}", repo.to_hf_repo(repo.revision()).api_url()));
        let text = self.client.with_retries(&target, &url, || {
            let mut response = self.client.get(&target, &url, 0)?;
            let text = response.body_mut().with_config().limit(MAX_DESCRIPTION_BYTES).read_to_string();
            text.map_err(|error| RequestError::Transient(TransientError::Broken(error.to_string())))
        })?;
        let info: hf_hub::api::RepoInfo = serde_json::from_str(&text).map_err(|error| {
            unexpected_response(&target, &url, &format!("other text ({error})"), "a repository's description")
        })?;
        if !is_commit_hash(&info.sha) {
            let found = format!("the commit {:?}", info.sha);
            return Err(unexpected_response(&target, &url, &found, "40 hexadecimal digits"));
        }
        // Drops paths that would escape the snapshot folder.
        let mut files: Vec<String> =
            info.siblings.into_iter().map(|file| file.rfilename).filter(|file| is_safe_path(file)).collect();
        files.sort();
        let recorded = self.repo_cache(repo).record_revision(repo.revision(), &info.sha);
        recorded.map_err(|source| HubError::Disk { what: target.name(), source })?;
        // A read-only cache may still have all requested files.
        if let Err(problem) = self.repo_cache(repo).record_files(&info.sha, &files) {
            tracing::debug!("{problem}");
        }
        Ok(RepoListing { commit: info.sha, all: Some(files.clone()), files, local: None })
    }

    fn cached_listing(&self, repo: &Repo, reason: String) -> Result<RepoListing, HubError> {
        let cache = self.repo_cache(repo);
        let Some(commit) = cache.cached_commit(repo.revision()) else {
            return Err(self.not_cached_error(&repo.to_string(), &reason));
        };
        let files = cache
            .cached_files(&commit)
            .map_err(|source| HubError::Disk { what: repo.to_string(), source })?;
        let all = cache.all_files(&commit);
        Ok(RepoListing { commit, files, all, local: Some(reason) })
    }

    pub(crate) fn not_cached_error(&self, what: &str, reason: &str) -> HubError {
        let cache = self.settings.cache.display().to_string();
        HubError::NotCached { what: what.into(), cache, reason: reason.into() }
    }

    fn no_file_error(&self, repo: &Repo, file: &str, files: &[String]) -> HubError {
        let url = self.client.url(&repo.to_hf_repo(repo.revision()).url());
        HubError::NoFile { repo: Box::new(repo.clone()), file: file.into(), url, files: files.to_vec() }
    }
}

/// The absolute path, without `.` components.
fn absolute_path(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    path.components().filter(|part| *part != Component::CurDir).collect()
}
