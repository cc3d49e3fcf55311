//! Downloads the tensors outside a model's layers by byte ranges, without the rest of their shards.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use deepspec_checkpoint::{Tensors, is_layer_tensor};
use deepspec_core::atomic::{FileError, partial_path};
use deepspec_core::progress::Progress;
use serde_json::{Map, Value, json};
use ureq::http::StatusCode;

use crate::client::{Client, RequestError, RequestTarget, TransientError, unexpected_response};
use crate::download::{file_url, parse_content_range};
use crate::hub::RepoListing;
use crate::model::SINGLE_WEIGHTS_FILE;
use crate::{Hub, HubError, Repo};

/// Bytes of the header's length in front of a safetensors file.
const PREFIX_BYTES: u64 = 8;
/// Longest header that is read.
const MAX_HEADER_BYTES: u64 = 100 << 20;
/// Bytes per read and write.
const CHUNK_BYTES: usize = 1 << 18;

/// A tensor outside the layers.
struct OuterTensor<'a> {
    shard: &'a str,
    name: String,
    /// Its entry in the header.
    info: Value,
    /// Its bytes in the shard.
    bytes: Range<u64>,
}

/// A shard whose ranges can be requested.
struct Shard<'a> {
    client: &'a Client,
    target: RequestTarget<'a>,
    url: String,
}

impl Hub {
    /// The folder of the tensors outside a model's layers, and of its small files. `None` if it was
    /// not downloaded.
    pub(crate) fn outer_tensors_dir(&self, repo: &Repo, commit: &str) -> Option<PathBuf> {
        let name = format!("outer-tensors/{}", repo.to_hf_repo(commit).folder_name());
        let dir = self.settings.own_cache.as_ref()?.join(name).join(commit);
        Some(dir)
    }

    /// Downloads the tensors outside the layers to a folder of their own, beside copies of the
    /// snapshot's `small` files. `None` where the server sends no ranges, or where whole shards are
    /// not much larger.
    ///
    /// # Errors
    /// As [`Hub::fetch`].
    pub(crate) fn fetch_outer_tensors(
        &self,
        repo: &Repo,
        listing: &RepoListing,
        shards: &[String],
        small: &[&String],
    ) -> Result<Option<PathBuf>, HubError> {
        let Some(dir) = self.outer_tensors_dir(repo, &listing.commit) else { return Ok(None) };
        let snapshot = self.snapshot_dir(repo, &listing.commit);
        if shards.iter().all(|shard| snapshot.join(shard).exists()) {
            return Ok(None);
        }
        let _lock = match lock(&dir.with_extension("lock")) {
            Ok(lock) => lock,
            Err(error) => {
                tracing::warn!("{error}; whole shards are fetched");
                return Ok(None);
            }
        };
        // Another process may have downloaded it in between.
        if dir.exists() {
            return Ok(Some(dir));
        }
        let open = |file| {
            let target = RequestTarget { repo, file: Some(file), known: &listing.files };
            Shard { client: &self.client, target, url: file_url(&self.client, repo, &listing.commit, file) }
        };
        let (mut tensors, mut whole) = (vec![], 0);
        for shard in shards {
            let Some((found, bytes)) = open(shard).read_header(shard)? else { return Ok(None) };
            tensors.extend(found);
            whole += bytes;
        }
        let bytes = tensors.iter().map(|tensor| tensor.bytes.end - tensor.bytes.start).sum::<u64>();
        if 2 * bytes > whole {
            return Ok(None);
        }
        let disk = |source: FileError| HubError::Disk { what: repo.to_string(), source };
        let partial = partial_path(&dir);
        fs::create_dir_all(&partial).map_err(FileError::at("creating", &partial)).map_err(disk)?;
        let path = partial.join(SINGLE_WEIGHTS_FILE);
        let written = |error| disk(FileError::at("writing", &path)(error));
        let (mut file, mut done) = begin_or_resume(&path, &header(&tensors), bytes).map_err(written)?;
        let mut progress = Progress::for_bytes(self.settings.verbosity, "fetching", bytes, done);
        for OuterTensor { shard, bytes, .. } in &tensors {
            let rest = (bytes.start + done).min(bytes.end)..bytes.end;
            done = done.saturating_sub(bytes.end - bytes.start);
            if !open(shard).copy_range(&rest, &mut file, &path, &mut progress)? {
                let _ = fs::remove_dir_all(&partial);
                return Ok(None);
            }
        }
        progress.finish();
        file.sync_all().map_err(written)?;
        if let Err(problem) = check(&path) {
            let _ = fs::remove_dir_all(&partial);
            let (what, url) = (repo.to_string(), open(&shards[0]).url);
            return Err(HubError::Damaged { what, url, problem });
        }
        for name in small {
            copy(&snapshot.join(name), &partial.join(name)).map_err(disk)?;
        }
        fs::rename(&partial, &dir).map_err(FileError::at("writing", &dir)).map_err(disk)?;
        Ok(Some(dir))
    }
}

impl Shard<'_> {
    /// The tensors outside the layers, and the size of the shard in bytes. `None` where the server
    /// sends no ranges.
    fn read_header<'a>(&self, shard: &'a str) -> Result<Option<(Vec<OuterTensor<'a>>, u64)>, HubError> {
        let invalid = |found: &str| {
            unexpected_response(&self.target, &self.url, found, "the header of a safetensors file")
        };
        let Some(prefix) = self.read_range(0..PREFIX_BYTES)? else { return Ok(None) };
        let length = u64::from_le_bytes(prefix.try_into().map_err(|_| invalid("fewer bytes"))?);
        if length > MAX_HEADER_BYTES {
            return Err(invalid("a longer one"));
        }
        let start = PREFIX_BYTES + length;
        let Some(header) = self.read_range(PREFIX_BYTES..start)? else { return Ok(None) };
        let header: Map<String, Value> =
            serde_json::from_slice(&header).map_err(|error| invalid(&error.to_string()))?;
        let (mut tensors, mut end_of_shard) = (vec![], start);
        for (name, info) in header.into_iter().filter(|(name, _)| name != "__metadata__") {
            let offset = |index: usize| info["data_offsets"][index].as_u64();
            let bytes = offset(0).zip(offset(1)).filter(|(first, end)| first <= end);
            let (first, end) = bytes.ok_or_else(|| invalid(&format!("{name} without offsets")))?;
            let bytes = start.saturating_add(first)..start.saturating_add(end);
            end_of_shard = end_of_shard.max(bytes.end);
            if !is_layer_tensor(&name) {
                tensors.push(OuterTensor { shard, name, info, bytes });
            }
        }
        Ok(Some((tensors, end_of_shard)))
    }

    /// The bytes of a short range.
    fn read_range(&self, range: Range<u64>) -> Result<Option<Vec<u8>>, HubError> {
        self.client.with_retries(&self.target, &self.url, || {
            let Some(mut body) = self.request(&range)? else { return Ok(None) };
            let mut bytes = Vec::with_capacity((range.end - range.start) as usize);
            body.read_to_end(&mut bytes).map_err(broken)?;
            if bytes.len() as u64 != range.end - range.start {
                return Err(broken(io::Error::from(io::ErrorKind::UnexpectedEof)));
            }
            Ok(Some(bytes))
        })
    }

    /// Appends the bytes of a range to `file`, and resumes after interruptions. False where the
    /// server sends no ranges.
    fn copy_range(
        &self,
        range: &Range<u64>,
        file: &mut File,
        path: &Path,
        progress: &mut Progress,
    ) -> Result<bool, HubError> {
        let (mut next, mut tried) = (range.start, 0);
        while next < range.end {
            let before = next;
            let mut attempt = || {
                let Some(mut body) = self.request(&(next..range.end))? else { return Ok(false) };
                let mut buffer = vec![0; CHUNK_BYTES];
                while next < range.end {
                    let read = body.read(&mut buffer).map_err(broken)?;
                    if read == 0 {
                        return Err(broken(io::Error::from(io::ErrorKind::UnexpectedEof)));
                    }
                    let read = read.min((range.end - next) as usize);
                    file.write_all(&buffer[..read]).map_err(|error| {
                        let source = FileError::at("writing", path)(error);
                        RequestError::Final(HubError::Disk { what: self.target.name(), source })
                    })?;
                    next += read as u64;
                    progress.add(read as u64, String::new);
                }
                Ok(true)
            };
            match attempt() {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                Err(RequestError::Final(error)) => return Err(error),
                Err(RequestError::Transient(error)) => {
                    tried = if next > before { 1 } else { tried + 1 };
                    self.client.wait_before_retry(&self.target, &self.url, error, tried, true)?;
                }
            }
        }
        Ok(true)
    }

    /// The body of a range; `None` if the server answers with the whole file.
    fn request(&self, range: &Range<u64>) -> Result<Option<impl Read + use<>>, RequestError> {
        let response = self.client.get_range(&self.target, &self.url, range)?;
        if response.status() != StatusCode::PARTIAL_CONTENT {
            return Ok(None);
        }
        match parse_content_range(response.headers()) {
            Some((first, _)) if first == range.start => {
                Ok(Some(response.into_body().into_reader().take(range.end - range.start)))
            }
            _ => Err(RequestError::Transient(TransientError::Broken(
                "another range than was asked for".into(),
            ))),
        }
    }
}

fn broken(error: io::Error) -> RequestError {
    RequestError::Transient(TransientError::Broken(error.to_string()))
}

/// The header of a safetensors file with these tensors, in order.
fn header(tensors: &[OuterTensor]) -> Vec<u8> {
    let (mut entries, mut next) = (Map::new(), 0);
    for tensor in tensors {
        let end = next + tensor.bytes.end - tensor.bytes.start;
        let entry = json!({"dtype": tensor.info["dtype"], "shape": tensor.info["shape"], "data_offsets": [next, end]});
        entries.insert(tensor.name.clone(), entry);
        next = end;
    }
    let mut text = Value::Object(entries).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(PREFIX_BYTES as usize), b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}

/// Checks that the file's header fits its bytes.
fn check(path: &Path) -> Result<(), String> {
    Tensors::open_file(path).map(drop).map_err(|error| error.to_string())
}

/// Opens the file of tensors behind the bytes of an earlier process. Returns the number of these bytes
/// behind the header, at most `bytes`.
fn begin_or_resume(path: &Path, header: &[u8], bytes: u64) -> io::Result<(File, u64)> {
    let mut file = File::options().read(true).append(true).create(true).open(path)?;
    let mut found = vec![];
    Read::by_ref(&mut file).take(header.len() as u64).read_to_end(&mut found)?;
    if found != header || file.metadata()?.len() > header.len() as u64 + bytes {
        file.set_len(0)?;
        file.write_all(header)?;
    }
    let done = file.metadata()?.len() - header.len() as u64;
    Ok((file, done))
}

/// Locks a file that is created for it. The lock ends with the returned file.
fn lock(path: &Path) -> Result<File, FileError> {
    let open = || -> io::Result<File> {
        fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
        let file = File::options().create(true).truncate(false).write(true).open(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                tracing::info!("another process is fetching the same tensors; waiting for it");
                file.lock()?;
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
        Ok(file)
    };
    open().map_err(FileError::at("locking", path))
}

fn copy(from: &Path, to: &Path) -> Result<(), FileError> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).map_err(FileError::at("creating", parent))?;
    }
    fs::copy(from, to).map(drop).map_err(FileError::at("writing", to))
}
