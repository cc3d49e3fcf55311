//! Exports a cache to format 2.

use std::io::{self, Write};
use std::path::Path;

use deepspec_core::atomic;
use serde_json::{Value, json};

use super::record::{RECORD_BYTES, Record};
use super::{INDEX_FILE, VERSION, file_name, sort_keys};
use crate::cache::error::CacheError;
use crate::cache::identity::Identity;
use crate::cache::layout::Encoding;
use crate::cache::manifest::{MANIFEST_FILE, Manifest};
use crate::cache::reader::Reader;
use deepspec_core::FinalStates;

/// Converts the cache in `dir` to format 2 and writes it to the folder `to`. `model` is the
/// target's name if the cache was not imported. `progress` is called for each sample. The manifest
/// is written last; if it exists already, nothing is written and the result is false.
///
/// # Errors
/// Fails for encodings other than bf16, for a cache without all final states, on damage, if `to`
/// has another cache, and on I/O failures.
pub fn export(dir: &Path, to: &Path, model: &str, mut progress: impl FnMut()) -> Result<bool, CacheError> {
    let reader = Reader::open(dir)?;
    let layout = reader.layout();
    if (layout.encoding, layout.last) != (Encoding::Bf16, FinalStates::All) {
        let problem = format!(
            "its states are {} with the last states of {} tokens; format 2 holds bf16 with all: build with --encoding bf16 --final-states all",
            layout.encoding, layout.last
        );
        return Err(CacheError::Reference { path: dir.to_path_buf(), problem });
    }
    if layout.taps.is_empty() {
        let problem = "it holds no layers of the target, and format 2 needs some: build it for a drafter that reads layers".to_string();
        return Err(CacheError::Reference { path: dir.to_path_buf(), problem });
    }
    let manifest = reader.manifest();
    if manifest.no_last_token_states {
        let problem = "it lacks the states of each sample's last token, and format 2 has no place to say so: build the cache without data.states.answers".to_string();
        return Err(CacheError::Reference { path: dir.to_path_buf(), problem });
    }
    atomic::create_dir(to)?;
    let manifest = manifest.reference.clone().unwrap_or_else(|| format_2_manifest(manifest, model));
    let manifest_path = to.join(MANIFEST_FILE);
    if manifest_path.exists() {
        let there: Value = serde_json::from_str(&atomic::read_text(&manifest_path)?).unwrap_or_default();
        if there == manifest {
            return Ok(false);
        }
        let problem = "holds another cache already; give another folder".to_string();
        return Err(CacheError::Reference { path: to.to_path_buf(), problem });
    }
    let (mut records, mut index) = (Vec::with_capacity(reader.len() * RECORD_BYTES), 0);
    for shard in 0..reader.manifest().shards.len() {
        let mut damage = None;
        let written = atomic::replace(&to.join(file_name(shard)), |file| {
            let mut start = 0;
            while index < reader.len() {
                let sample = match reader.sample(index) {
                    Ok(sample) if sample.shard == shard => sample,
                    Ok(_) => break,
                    Err(error) => {
                        damage = Some(error);
                        return Err(io::Error::other("the cache is damaged"));
                    }
                };
                let length = sample.len() as u32;
                let record = Record { sample: index as u64, shard: shard as u32, length, start };
                let offsets = record.offsets(layout.taps.len(), layout.hidden_size);
                let offsets = offsets.ok_or_else(|| io::Error::other("the shard is past 64 bits"))?;
                let ids: Vec<u8> = sample.input_ids.iter().flat_map(|id| id.to_le_bytes()).collect();
                let loss: Vec<u8> = sample.loss_mask().into_iter().map(u8::from).collect();
                for bytes in [&ids[..], &vec![1; sample.len()], &loss, sample.taps, sample.last] {
                    file.write_all(bytes)?;
                }
                records.extend(record.bytes(&offsets));
                (start, index) = (offsets[5], index + 1);
                progress();
            }
            Ok(())
        });
        if let Some(damage) = damage {
            return Err(damage);
        }
        written?;
    }
    atomic::replace(&to.join(INDEX_FILE), |file| file.write_all(&records))?;
    atomic::write_json(&manifest_path, &manifest)?;
    Ok(true)
}

/// The format 2 manifest of a cache that was not imported.
fn format_2_manifest(manifest: &Manifest, model: &str) -> Value {
    let Identity { chat_template, taps, max_length, hidden_size, .. } = &manifest.identity;
    let shards: Vec<Value> = (0..manifest.shards.len())
        .map(|shard| json!({"file_name": file_name(shard), "shard_id": shard}))
        .collect();
    sort_keys(json!({
        "version": VERSION,
        "project_name": "deepspec",
        "exp_name": "export",
        "git_sha": "unknown",
        "target_model_name_or_path": model,
        "target_layer_ids": taps.iter().map(|tap| tap.layer_id()).collect::<Vec<_>>(),
        "chat_template": chat_template,
        "max_length": max_length,
        "min_loss_tokens": 1,
        "hidden_size": hidden_size,
        "hidden_dtype": "bfloat16",
        "mask_dtype": "uint8",
        "token_dtype": "int32",
        "index_record_size": RECORD_BYTES,
        "num_samples": manifest.counts.samples,
        "num_shards": shards.len(),
        "shards": shards,
        "source_jsonl_paths": [],
    }))
}
