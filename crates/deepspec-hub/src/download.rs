//! Downloads one file from the hub into the cache. Interrupted transfers resume, also in a later
//! process. A file appears in the snapshot only when it is complete.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use deepspec_core::atomic::FileError;
use deepspec_core::cli::Verbosity;
use deepspec_core::digest;
use deepspec_core::progress::Progress;
use ureq::http::{HeaderMap, StatusCode, header};

use crate::cache::{RepoCache, create_parent};
use crate::client::{Client, RequestError, RequestTarget, TransientError, unexpected_response};
use crate::{HubError, Repo};

/// Bytes per read and write.
const CHUNK_BYTES: usize = 1 << 18;

/// Metadata of a file from a HEAD request.
struct Metadata {
    /// ETag of the content: the SHA-256 of a large file, else its git hash.
    etag: String,
    size: Option<u64>,
}

impl Metadata {
    fn sha256(&self) -> Option<&str> {
        (self.etag.len() == 64 && self.etag.bytes().all(|byte| byte.is_ascii_hexdigit()))
            .then_some(&self.etag)
    }
}

/// The download of one file of a repository at a commit.
pub struct Download<'a> {
    pub client: &'a Client,
    pub cache: &'a RepoCache,
    pub repo: &'a Repo,
    pub commit: &'a str,
    pub file: &'a str,
    /// Known files of the repository, for error messages.
    pub known: &'a [String],
    pub verbosity: Verbosity,
}

impl Download<'_> {
    /// Downloads the file unless its blob is cached, and returns its path in the snapshot.
    pub fn run(&self) -> Result<PathBuf, HubError> {
        let target = self.request_target();
        let url = file_url(self.client, self.repo, self.commit, self.file);
        let head = self.client.with_retries(&target, &url, || self.client.head(&target, &url))?;
        let status = head.status();
        let meta = parse_metadata(&target, &url, status, head.headers())?;
        let blob = self.cache.blob_path(&meta.etag);
        create_parent(&blob).map_err(|source| self.disk_error(source))?;
        let lock = self.cache.lock_blob(&meta.etag).map_err(|source| self.disk_error(source))?;
        let here = fs::metadata(&blob).is_ok_and(|blob| meta.size.is_none_or(|size| size == blob.len()));
        if !here {
            let part = incomplete_path(&blob);
            self.download_verified(&target, &url, &meta, &part)?;
            fs::rename(&part, &blob)
                .map_err(FileError::at("writing", &blob))
                .map_err(|source| self.disk_error(source))?;
        }
        let path = self
            .cache
            .link_into_snapshot(&meta.etag, self.commit, self.file)
            .map_err(|source| self.disk_error(source))?;
        drop(lock);
        Ok(path)
    }

    fn request_target(&self) -> RequestTarget<'_> {
        RequestTarget { repo: self.repo, file: Some(self.file), known: self.known }
    }

    fn disk_error(&self, source: FileError) -> HubError {
        HubError::Disk { what: self.request_target().name(), source }
    }

    /// Downloads until `part` is complete and its SHA-256, if known, matches. A mismatch is retried
    /// once from the start.
    fn download_verified(
        &self,
        target: &RequestTarget,
        url: &str,
        meta: &Metadata,
        part: &Path,
    ) -> Result<(), HubError> {
        for again in [true, false] {
            self.transfer_until_complete(target, url, meta, part)?;
            let Some(expected) = meta.sha256() else { return Ok(()) };
            let found = digest::sha256_of_file(part).map_err(|source| self.disk_error(source))?;
            if found == expected {
                return Ok(());
            }
            fs::remove_file(part)
                .map_err(FileError::at("removing", part))
                .map_err(|source| self.disk_error(source))?;
            let problem = format!("their SHA-256 is {found}, the hub announced {expected}");
            if !again {
                return Err(HubError::Damaged { what: target.name(), url: url.into(), problem });
            }
            // Bytes of an earlier process may have caused the mismatch.
            tracing::warn!("{}: {problem}; fetching it once more from the start", target.name());
        }
        Ok(())
    }

    /// Repeats the transfer until all bytes are on disk. Only attempts in a row without new bytes
    /// count against the retry policy.
    fn transfer_until_complete(
        &self,
        target: &RequestTarget,
        url: &str,
        meta: &Metadata,
        part: &Path,
    ) -> Result<(), HubError> {
        let length = || fs::metadata(part).map_or(0, |part| part.len());
        if meta.size.is_some_and(|size| length() > size) {
            let _ = fs::remove_file(part);
        }
        let (start, mut progress) = (length(), None);
        if start > 0 {
            tracing::info!("{}: continuing at byte {start}", target.name());
        }
        let mut best = start;
        let mut tried = 0;
        while let Err(failure) = self.request_remaining_bytes(target, url, meta, part, &mut progress) {
            let error = match failure {
                RequestError::Final(error) => return Err(error),
                RequestError::Transient(error) => error,
            };
            tried = if length() > best { 1 } else { tried + 1 };
            best = best.max(length());
            self.client.wait_before_retry(target, url, error, tried, best > start)?;
        }
        if let Some(progress) = progress {
            progress.finish();
        }
        Ok(())
    }

    /// Requests the remaining bytes of `part` once and appends them.
    fn request_remaining_bytes(
        &self,
        target: &RequestTarget,
        url: &str,
        meta: &Metadata,
        part: &Path,
        progress: &mut Option<Progress>,
    ) -> Result<(), RequestError> {
        let failed =
            |error: io::Error| RequestError::Final(self.disk_error(FileError::at("writing", part)(error)));
        let mut file = File::options().create(true).append(true).open(part).map_err(failed)?;
        let start = file.metadata().map_err(failed)?.len();
        if meta.size == Some(start) {
            return file.sync_all().map_err(failed);
        }
        let mut response = self.client.get(target, url, start)?;
        let announced = match response.status() {
            StatusCode::PARTIAL_CONTENT => {
                let (first, total) = parse_content_range(response.headers()).ok_or_else(|| {
                    RequestError::Transient(TransientError::Broken("a range without Content-Range".into()))
                })?;
                if first != start {
                    let problem = format!("bytes from {first} where those from {start} were asked for");
                    return Err(RequestError::Transient(TransientError::Broken(problem)));
                }
                total
            }
            StatusCode::OK => {
                // The server ignored the range and sends the whole file again.
                file.set_len(0).map_err(failed)?;
                parse_header_number(response.headers(), header::CONTENT_LENGTH.as_str())
            }
            status => {
                file.set_len(0).map_err(failed)?;
                return Err(RequestError::Transient(TransientError::Broken(format!("HTTP {status}"))));
            }
        };
        let mut have = file.metadata().map_err(failed)?.len();
        let size = meta.size.or(announced);
        let bar = progress
            .get_or_insert_with(|| Progress::for_bytes(self.verbosity, "fetching", size.unwrap_or(0), have));
        let (mut body, mut buffer) = (response.body_mut().as_reader(), vec![0; CHUNK_BYTES]);
        loop {
            let read = match body.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    let problem = format!("broken off after {have} bytes: {error}");
                    return Err(RequestError::Transient(TransientError::Broken(problem)));
                }
            };
            file.write_all(&buffer[..read]).map_err(failed)?;
            have += read as u64;
            bar.add(read as u64, || self.file.to_string());
        }
        match size {
            Some(size) if have < size => {
                let problem = format!("broken off after {have} of {size} bytes");
                Err(RequestError::Transient(TransientError::Broken(problem)))
            }
            Some(size) if have > size => {
                file.set_len(0).map_err(failed)?;
                let problem = format!("{have} bytes where {size} were announced");
                Err(RequestError::Transient(TransientError::Broken(problem)))
            }
            _ => file.sync_all().map_err(failed),
        }
    }
}

/// Path of a partly downloaded blob. Older Python tools use the same path, so DeepSpec resumes
/// their interrupted downloads.
fn incomplete_path(blob: &Path) -> PathBuf {
    let mut name = blob.as_os_str().to_owned();
    name.push(".incomplete");
    name.into()
}

/// The hub's URL of a file.
pub fn file_url(client: &Client, repo: &Repo, commit: &str, file: &str) -> String {
    let repo = repo.to_hf_repo(commit);
    client.url(&format!("{}/resolve/{}/{}", repo.url(), repo.url_revision(), escape_percent_signs(file)))
}

/// A file's path for a URL: encodes literal percent signs, before [`Client::url`] encodes the rest.
fn escape_percent_signs(file: &str) -> String {
    file.replace('%', "%25")
}

fn parse_metadata(
    target: &RequestTarget,
    url: &str,
    status: StatusCode,
    headers: &HeaderMap,
) -> Result<Metadata, HubError> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let etag = text("x-linked-etag").or_else(|| text("etag")).unwrap_or_default();
    let etag = etag.trim_start_matches("W/").trim_matches('"');
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if etag.is_empty() || etag.starts_with('.') || !etag.chars().all(is_name) {
        let found = format!("HTTP {status} with the etag {etag:?}");
        return Err(unexpected_response(target, url, &found, "a tag that names the content"));
    }
    let length =
        || parse_header_number(headers, header::CONTENT_LENGTH.as_str()).filter(|_| status.is_success());
    Ok(Metadata { etag: etag.into(), size: parse_header_number(headers, "x-linked-size").or_else(length) })
}

fn parse_header_number(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

/// The first byte and the whole size in a `Content-Range` such as `bytes 5-9/10`.
pub fn parse_content_range(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let text = headers.get(header::CONTENT_RANGE)?.to_str().ok()?;
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-')?.0.trim().parse().ok()?, total.trim().parse().ok()))
}
