//! `manifest.json`: identity and files of a cache. It is written last, which commits the build.

use std::io;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError};
use deepspec_core::digest;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::cache::error::CacheError;
use crate::cache::files::{CacheTotals, SamplesEntry, ShardEntry, parts_dir};
use crate::cache::identity::{Identity, Recipe};
use crate::cache::layout::{Encoding, Layout};
use crate::cache::plan::{Plan, PlannedShard};
use crate::cache::samples::{self, SAMPLES_FILE};
use crate::cache::shard::{self, Geometry};
use deepspec_core::FinalStates;

/// Name of the manifest.
pub const MANIFEST_FILE: &str = "manifest.json";

const FORMAT: &str = "deepspec-cache";
const VERSION: u64 = 1;

/// The content of `manifest.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Always `deepspec-cache`.
    pub format: String,
    /// Version of the format.
    pub version: u64,
    /// Program that wrote it.
    pub tool: String,
    /// Identity of the hidden states, with taps, hidden size and max_length.
    pub identity: Identity,
    /// Encoding of values.
    pub encoding: Encoding,
    /// Which final hidden states are stored.
    pub last: FinalStates,
    /// Target size of a shard's hidden states, in bytes.
    pub shard_bytes: u64,
    /// Digest over ids, token ids and spans of all samples.
    pub input: String,
    /// Sums over all samples.
    pub counts: CacheTotals,
    /// The samples' table.
    pub samples: SamplesEntry,
    /// The shards, in order.
    pub shards: Vec<ShardEntry>,
    /// The engine that computed the states; absent if the target ran in the program that wrote the cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// Whether zeros stand for the states of each sample's last token.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_last_token_states: bool,
    /// The manifest of the format 2 cache that was imported, with sorted keys. An export writes it
    /// back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<Value>,
    /// Digest of this manifest with an empty digest field, which detects a damaged manifest.
    pub digest: String,
}

impl Manifest {
    pub(crate) fn new(recipe: &Recipe, samples: SamplesEntry, shards: Vec<ShardEntry>) -> Self {
        let Recipe { identity, encoding, last, shard_bytes, counts, input, reference } = recipe.clone();
        let (format, tool) = (FORMAT.to_string(), format!("deepspec {}", deepspec_core::VERSION));
        let mut manifest = Self {
            format,
            version: VERSION,
            tool,
            identity,
            encoding,
            last,
            shard_bytes,
            input,
            counts,
            samples,
            shards,
            origin: None,
            no_last_token_states: false,
            reference,
            digest: String::new(),
        };
        manifest.update_digest();
        manifest
    }

    /// Sets the digest field to the digest of the current content.
    pub(crate) fn update_digest(&mut self) {
        self.digest = self.compute_digest();
    }

    /// Writes the manifest, which commits a build.
    pub(crate) fn write(&self, dir: &Path) -> Result<(), CacheError> {
        Ok(atomic::write_json(&manifest_path(dir), self)?)
    }

    /// Size of the file.
    pub(crate) fn file_bytes(&self) -> u64 {
        serde_json::to_vec_pretty(self).map_or(0, |text| text.len() as u64 + 1)
    }

    /// Reads and checks the manifest of the cache in `dir`, and no other file.
    ///
    /// # Errors
    /// Fails without a manifest, and on another format or version, changed bytes, or contradictory
    /// numbers.
    pub fn read(dir: &Path) -> Result<Self, CacheError> {
        Self::read_if_present(dir)?.ok_or_else(|| CacheError::NoManifest {
            dir: dir.to_path_buf(),
            unfinished: parts_dir(dir).exists(),
        })
    }

    /// Like [`Self::read`], but `None` without a manifest.
    pub(crate) fn read_if_present(dir: &Path) -> Result<Option<Self>, CacheError> {
        let path = manifest_path(dir);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if is_not_found(&error) => return Ok(None),
            Err(error) => return Err(FileError::at("reading", &path)(error).into()),
        };
        let json = |source| CacheError::Json { path: path.clone(), source };
        let raw: Value = serde_json::from_slice(&bytes).map_err(json)?;
        if raw["format"] != FORMAT || raw["version"] != VERSION {
            let found = format!("format {} version {}", raw["format"], raw["version"]);
            return Err(CacheError::Version {
                path,
                found,
                expected: format!("format {FORMAT:?} version {VERSION}"),
            });
        }
        let manifest: Self = serde_json::from_slice(&bytes).map_err(json)?;
        let found = manifest.compute_digest();
        if found != manifest.digest {
            return Err(CacheError::ManifestChanged { path, found, expected: manifest.digest });
        }
        // The digest covers values only. White space and key order must be unchanged too.
        let mut written = serde_json::to_vec_pretty(&manifest).map_err(json)?;
        written.push(b'\n');
        if written != bytes {
            let [found, expected] = [&bytes, &written].map(|bytes| digest::sha256_of_bytes(bytes));
            return Err(CacheError::ManifestChanged { path, found, expected });
        }
        manifest.check(&path)?;
        Ok(Some(manifest))
    }

    /// The shape of the rows.
    pub fn layout(&self) -> Layout {
        let Identity { taps, hidden_size, .. } = &self.identity;
        Layout { taps: taps.clone(), hidden_size: *hidden_size, last: self.last, encoding: self.encoding }
    }

    /// Bytes of all files except the manifest, which are the bytes that [`crate::cache::verify`]
    /// reads.
    pub fn bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.bytes).fold(self.samples.bytes, u64::saturating_add)
    }

    pub(crate) fn recipe(&self) -> Recipe {
        Recipe {
            identity: self.identity.clone(),
            encoding: self.encoding,
            last: self.last,
            shard_bytes: self.shard_bytes,
            counts: self.counts.clone(),
            input: self.input.clone(),
            reference: self.reference.clone(),
        }
    }

    /// Rejects contradictory numbers, so that later arithmetic on them cannot overflow.
    fn check(&self, path: &Path) -> Result<(), CacheError> {
        let same = |field: String, found: String, expected: String| match found == expected {
            true => Ok(()),
            false => Err(CacheError::Inconsistent { path: path.to_path_buf(), field, found, expected }),
        };
        let layout = self.layout();
        let mut tokens: u64 = 0;
        for (index, entry) in self.shards.iter().enumerate() {
            same(format!("file of shard {index}"), entry.file.clone(), shard::file_name(index))?;
            if shard::exponent_bytes(&layout, entry)?.is_none() {
                let bytes = Geometry::new(&layout, entry.rows, entry.last_rows, 0)?.bytes().to_string();
                let least = if layout.encoding.compresses() { "at least " } else { "" };
                same(format!("bytes of shard {index}"), entry.bytes.to_string(), format!("{least}{bytes}"))?;
            }
            tokens = tokens.saturating_add(entry.rows);
        }
        same("counts.tokens".into(), self.counts.tokens.to_string(), tokens.to_string())?;
        same("samples.file".into(), self.samples.file.clone(), SAMPLES_FILE.into())
    }

    fn compute_digest(&self) -> String {
        let mut unsealed = self.clone();
        unsealed.digest.clear();
        // Serializing plain data to memory cannot fail.
        digest::sha256_of_bytes(&serde_json::to_vec(&unsealed).unwrap_or_default())
    }
}

/// Path of the manifest of `dir`.
pub(crate) fn manifest_path(dir: &Path) -> PathBuf {
    dir.join(MANIFEST_FILE)
}

/// Whether an error means that a file does not exist.
pub(crate) fn is_not_found(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

impl Plan {
    /// Bytes of all files of the finished cache; an upper bound if the encoding compresses. Exact
    /// except for the samples' table, whose checksums are unknown, and for digits in the manifest.
    ///
    /// # Errors
    /// Fails if the plan does not fit the identity, or if the table cannot be serialized.
    pub fn cache_bytes(&self, identity: &Identity) -> Result<u64, CacheError> {
        let table = samples::table_bytes(self)?;
        let shard = |(index, shard): (usize, &PlannedShard)| {
            let bytes = shard.geometry(self.layout())?.bytes();
            let (file, sha256) = (shard::file_name(index), placeholder_digest());
            Ok(ShardEntry { file, bytes, rows: shard.rows, last_rows: shard.last_rows, sha256 })
        };
        let shards: Vec<ShardEntry> =
            self.shards().iter().enumerate().map(shard).collect::<Result<_, CacheError>>()?;
        let entry =
            SamplesEntry { file: SAMPLES_FILE.to_string(), bytes: table, sha256: placeholder_digest() };
        let manifest = Manifest::new(&self.recipe(identity)?, entry, shards).file_bytes();
        Ok(self.bytes().saturating_add(table).saturating_add(manifest))
    }
}

/// Placeholder for an unknown digest.
fn placeholder_digest() -> String {
    "0".repeat(64)
}
