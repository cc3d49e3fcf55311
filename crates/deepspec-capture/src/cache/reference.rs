//! The reference's cache format 2: `manifest.json`, `samples.idx` with a record of 56 bytes per
//! sample, and `shard-NNNNN.bin`.
//!
//! A little-endian record has the sample id (8 bytes), shard (4) and token count L (4), then five
//! offsets into the shard (8 each). The consecutive tensors there are token ids `[L]` of 32 bits,
//! attention mask `[L]` and loss mask `[L]` of 8 bits. Taps `[L, m·d]` and final hidden states `[L,
//! d]` follow in bfloat16. An import keeps shard boundaries and the manifest, so an export restores
//! equal bytes.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError};
use serde_json::{Value, json};

use crate::cache::builder::Builder;
use crate::cache::error::CacheError;
use crate::cache::identity::Identity;
use crate::cache::layout::{Encoding, Layout};
use crate::cache::manifest::{MANIFEST_FILE, Manifest};
use crate::cache::plan::Plan;
use crate::cache::sample::PlannedSample;
use deepspec_core::{FinalStates, Tap};

mod export;
mod record;

pub use export::export;
use record::{RECORD_BYTES, Record};

const VERSION: u64 = 2;
const INDEX_FILE: &str = "samples.idx";

/// A format 2 cache with its manifest and a consistent index.
#[derive(Debug)]
pub struct ReferenceCache {
    dir: PathBuf,
    manifest: Value,
    records: Vec<Record>,
}

impl ReferenceCache {
    /// Reads the manifest and index of the format 2 cache in `dir`.
    ///
    /// # Errors
    /// Fails if there is no such cache, on another version, and if the index contradicts the
    /// manifest.
    pub fn open(dir: &Path) -> Result<Self, CacheError> {
        let path = dir.join(MANIFEST_FILE);
        let text = atomic::read_text(&path)?;
        let manifest: Value =
            serde_json::from_str(&text).map_err(|source| CacheError::Json { path: path.clone(), source })?;
        let expected = [
            ("version", json!(VERSION)),
            ("index_record_size", json!(RECORD_BYTES)),
            ("hidden_dtype", json!("bfloat16")),
            ("mask_dtype", json!("uint8")),
            ("token_dtype", json!("int32")),
        ];
        for (key, expected) in expected {
            if manifest[key] != expected {
                let problem =
                    format!("{key} is {}, expected {expected}; only format 2 can be imported", manifest[key]);
                return Err(CacheError::Reference { path, problem });
            }
        }
        let mut reference =
            Self { dir: dir.to_path_buf(), manifest: sort_keys(manifest), records: Vec::new() };
        let (taps, hidden_size) = (reference.target_layer_ids()?.len(), reference.number("hidden_size")?);
        reference.records = reference.read_index(taps, hidden_size)?;
        Ok(reference)
    }

    /// A string of the manifest, such as the name or folder of the target.
    ///
    /// # Errors
    /// Fails if the value is not a string.
    pub fn text(&self, key: &str) -> Result<&str, CacheError> {
        self.manifest[key].as_str().ok_or_else(|| self.wrong_value(key, "text"))
    }

    /// A number of the manifest.
    ///
    /// # Errors
    /// Fails if the value is not a number.
    pub fn number(&self, key: &str) -> Result<usize, CacheError> {
        let number = self.manifest[key].as_u64().and_then(|number| usize::try_from(number).ok());
        number.ok_or_else(|| self.wrong_value(key, "a number"))
    }

    /// The captured layers: `target_layer_ids` of the manifest.
    ///
    /// # Errors
    /// Fails if the manifest has no list of layer ids.
    pub fn target_layer_ids(&self) -> Result<Vec<Tap>, CacheError> {
        let ids = self.manifest["target_layer_ids"].as_array().map(Vec::as_slice).unwrap_or_default();
        let taps: Option<Vec<Tap>> = ids.iter().map(|id| Tap::from_layer_id(id.as_i64()?)).collect();
        taps.filter(|taps| !taps.is_empty()).ok_or_else(|| self.wrong_value("target_layer_ids", "layer ids"))
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    fn wrong_value(&self, key: &str, expected: &str) -> CacheError {
        let problem = format!("{key} is {}, expected {expected}", self.manifest[key]);
        CacheError::Reference { path: self.dir.join(MANIFEST_FILE), problem }
    }

    fn read_index(&self, taps: usize, hidden_size: usize) -> Result<Vec<Record>, CacheError> {
        let path = self.dir.join(INDEX_FILE);
        let bytes = fs::read(&path).map_err(FileError::at("reading", &path))?;
        let problem = |problem| CacheError::Reference { path: path.clone(), problem };
        let (found, rest) = bytes.as_chunks::<RECORD_BYTES>();
        let samples = self.number("num_samples")?;
        if found.len() != samples || !rest.is_empty() {
            return Err(problem(format!(
                "{} bytes, expected {samples} records of {RECORD_BYTES}",
                bytes.len()
            )));
        }
        let mut records: Vec<Record> = Vec::with_capacity(samples);
        let (mut shard, mut end) = (0, 0);
        for (index, bytes) in found.iter().enumerate() {
            let record = Record::read(bytes);
            if index > 0 && record.shard == shard + 1 {
                (shard, end) = (record.shard, 0);
            }
            let expected = Record { sample: index as u64, shard, start: end, ..record };
            let offsets =
                expected.offsets(taps, hidden_size).filter(|offsets| expected.bytes(offsets) == bytes);
            let Some(offsets) = offsets.filter(|_| record.length > 0) else {
                return Err(problem(format!(
                    "record {index} is {record:?}, expected sample {index} in shard {shard} or the next, its tensors from byte {end} on without gaps"
                )));
            };
            end = offsets[5];
            records.push(record);
        }
        let (shards, found) =
            (self.number("num_shards")?, records.last().map_or(0, |last| last.shard as usize + 1));
        match shards == found {
            true => Ok(records),
            false => Err(problem(format!("{found} shards, expected the manifest's {shards}"))),
        }
    }

    /// Converts the cache to the format of this project and writes it to `dir`, with `identity`.
    /// Resumes after a kill like any build. `progress` is called for each sample.
    ///
    /// # Errors
    /// Fails if taps, hidden size or length differ from the identity's, and if `dir` has another
    /// cache. Also fails on a sample with padding, NaN, or masks other than 0 and 1, and on I/O
    /// failures.
    pub fn import(
        &self,
        dir: &Path,
        identity: &Identity,
        mut progress: impl FnMut(),
    ) -> Result<Manifest, CacheError> {
        let (taps, hidden_size) = (self.target_layer_ids()?, self.number("hidden_size")?);
        let files = (0..self.number("num_shards")?)
            .map(|shard| self.open_shard(shard))
            .collect::<Result<Vec<_>, _>>()?;
        let samples =
            self.records.iter().map(|record| self.read_sample(record, &files[record.shard as usize]));
        let samples = samples.collect::<Result<Vec<_>, _>>()?;
        let starts: HashSet<usize> = (0..self.len())
            .filter(|&index| index == 0 || self.records[index - 1].shard != self.records[index].shard)
            .collect();
        let layout =
            Layout { taps: taps.clone(), hidden_size, last: FinalStates::All, encoding: Encoding::Bf16 };
        let plan = Plan::from_imported(samples, layout, &starts, self.manifest.clone())?;
        let mut builder = Builder::open(dir, &plan, identity)?;
        while let Some(mut writer) = builder.next_shard()? {
            let first = plan.shards()[writer.shard()].samples.start;
            let (path, file) = &files[writer.shard()];
            for index in first..first + writer.samples().len() {
                let [_, _, _, from, last, end] = self.tensor_offsets(&self.records[index], path)?;
                let read =
                    |from: u64, to: u64| read_range(file, from, to).map_err(FileError::at("reading", path));
                writer.push(&read(from, last)?, &read(last, end)?)?;
                progress();
            }
            writer.finish()?;
        }
        builder.publish()
    }

    fn open_shard(&self, shard: usize) -> Result<(PathBuf, File), CacheError> {
        let path = self.dir.join(file_name(shard));
        let file = File::open(&path).map_err(FileError::at("opening", &path))?;
        let found = file.metadata().map_err(FileError::at("reading", &path))?.len();
        let last = self.records.iter().rfind(|record| record.shard as usize == shard);
        let expected =
            last.map_or(Ok(0), |record| self.tensor_offsets(record, &path).map(|offsets| offsets[5]))?;
        match found == expected {
            true => Ok((path, file)),
            false => {
                let problem =
                    format!("{found} bytes, expected {expected} by {INDEX_FILE}; the shard is damaged");
                Err(CacheError::Reference { path, problem })
            }
        }
    }

    fn tensor_offsets(&self, record: &Record, path: &Path) -> Result<[u64; 6], CacheError> {
        let offsets = record.offsets(self.target_layer_ids()?.len(), self.number("hidden_size")?);
        offsets.ok_or_else(|| CacheError::Reference {
            path: path.to_path_buf(),
            problem: format!("sample {} is past 64 bits; the index is damaged", record.sample),
        })
    }

    fn read_sample(
        &self,
        record: &Record,
        (path, file): &(PathBuf, File),
    ) -> Result<PlannedSample, CacheError> {
        let [ids, attention, loss, taps, ..] = self.tensor_offsets(record, path)?;
        let read = |from, to| read_range(file, from, to).map_err(FileError::at("reading", path));
        let (ids, attention, loss) = (read(ids, attention)?, read(attention, loss)?, read(loss, taps)?);
        let problem = |what: &str| CacheError::Reference {
            path: path.clone(),
            problem: format!("sample {}: {what}", record.sample),
        };
        if attention.iter().any(|&attended| attended != 1) {
            return Err(problem("its attention mask is not all 1; samples with padding cannot be imported"));
        }
        if loss.iter().any(|&supervised| supervised > 1) {
            return Err(problem("its loss mask has values other than 0 and 1; the shard is damaged"));
        }
        Ok(PlannedSample {
            id: record.sample.to_string(),
            input_ids: ids.as_chunks::<4>().0.iter().map(|id| i32::from_le_bytes(*id)).collect(),
            spans: spans_from_mask(&loss),
        })
    }
}

fn file_name(shard: usize) -> String {
    format!("shard-{shard:05}.bin")
}

fn read_range(file: &File, from: u64, to: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; (to - from) as usize];
    file.read_exact_at(&mut bytes, from)?;
    Ok(bytes)
}

/// Converts a mask to half-open spans, one per run of ones.
fn spans_from_mask(mask: &[u8]) -> Vec<(u32, u32)> {
    let mut spans: Vec<(u32, u32)> = Vec::new();
    for position in (0..mask.len()).filter(|&position| mask[position] == 1).map(|position| position as u32) {
        match spans.last_mut() {
            Some((_, end)) if *end == position => *end += 1,
            _ => spans.push((position, position + 1)),
        }
    }
    spans
}

/// Sorts all keys of a JSON value, so that its bytes do not depend on the order in which it was
/// read.
fn sort_keys(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let map: BTreeMap<String, Value> =
                map.into_iter().map(|(key, value)| (key, sort_keys(value))).collect();
            Value::Object(map.into_iter().collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(sort_keys).collect()),
        other => other,
    }
}
