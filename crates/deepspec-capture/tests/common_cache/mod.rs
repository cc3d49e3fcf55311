//! Small caches with known contents.

// Each test binary uses its own part of this.
#![allow(dead_code)]

use std::fs;
use std::path::Path;

use deepspec_capture::cache::{
    Builder, CacheError, Encoding, FinalStates, Identity, Layout, Manifest, Plan, PlannedSample, Reader,
    verify,
};
use deepspec_core::Tap;
use deepspec_core::digest;
use deepspec_testkit::folder;
use serde_json::Value;

pub const HIDDEN: usize = 4;
pub const TAPS: [Tap; 2] = [Tap::Embedding, Tap::Layer(3)];

pub fn identity() -> Identity {
    Identity {
        model_type: "qwen3".into(),
        target_config: digest::sha256_of_bytes(b"config"),
        target_weights: digest::sha256_of_bytes(b"weights"),
        tokenizer: digest::sha256_of_bytes(b"tokenizer"),
        template: digest::sha256_of_bytes(b"template"),
        chat_template: "qwen".into(),
        system_prompt: Some("You are a helpful assistant.".into()),
        taps: TAPS.to_vec(),
        max_length: 64,
        hidden_size: HIDDEN,
        vocab_size: 100,
    }
}

pub fn layout(last: FinalStates) -> Layout {
    Layout { taps: TAPS.to_vec(), hidden_size: HIDDEN, last, encoding: Encoding::Bf16 }
}

/// Samples of different lengths, with zero to two supervised spans.
pub fn samples(count: usize) -> Vec<PlannedSample> {
    let sample = |index: usize| {
        let length = 3 + (index * 7) % 11;
        let spans = match (index % 3, length as u32) {
            (0, length) => vec![(1, length)],
            (1, length) => vec![(0, 1), (length - 1, length)],
            _ => vec![],
        };
        let input_ids = (0..length).map(|p| ((index * 13 + p * 5) % 100) as i32).collect();
        PlannedSample { id: format!("row-{index} \"ü\""), input_ids, spans }
    };
    (0..count).map(sample).collect()
}

pub fn plan(count: usize, last: FinalStates, shard_bytes: u64) -> Plan {
    Plan::new(samples(count), layout(last), shard_bytes).unwrap()
}

/// bf16 bytes of the states of `sample` at `positions`, `columns` values each.
pub fn states(sample: &PlannedSample, positions: &[u32], columns: usize) -> Vec<u8> {
    let value = |position: u32, column: usize| {
        let mixed =
            sample.input_ids[position as usize] as usize * 31 + position as usize * 17 + column * 7 + columns;
        ((mixed % 201) as f32 - 100.0) / 16.0
    };
    let cells = positions.iter().flat_map(|&p| (0..columns).map(move |c| (p, c)));
    cells.flat_map(|(p, c)| ((value(p, c).to_bits() >> 16) as u16).to_le_bytes()).collect()
}

pub fn taps_of(sample: &PlannedSample) -> Vec<u8> {
    states(sample, &(0..sample.length()).collect::<Vec<_>>(), TAPS.len() * HIDDEN)
}

pub fn last_of(sample: &PlannedSample, last: FinalStates) -> Vec<u8> {
    states(sample, &sample.last_positions(last), HIDDEN)
}

/// Fills all pending shards and publishes the cache.
pub fn build(dir: &Path, plan: &Plan, identity: &Identity) -> Result<Manifest, CacheError> {
    let mut builder = Builder::open(dir, plan, identity)?;
    while let Some(mut writer) = builder.next_shard()? {
        for sample in writer.samples() {
            writer.push(&taps_of(sample), &last_of(sample, plan.layout().last))?;
        }
        writer.finish()?;
    }
    builder.publish()
}

/// All files of a folder with their bytes, by name.
pub fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    folder::files(dir)
}

/// Reads everything in a cache; returns the first error of `open` or `sample`.
pub fn read_all(dir: &Path) -> Result<(), CacheError> {
    let reader = Reader::open(dir)?;
    for index in 0..reader.len() {
        let sample = reader.sample(index)?;
        assert_eq!(sample.loss_mask().len(), sample.len());
        deepspec_capture::cache::inspect(&sample)?;
    }
    Ok(())
}

/// Whether `verify` reports a problem or fails.
pub fn verify_complains(dir: &Path) -> bool {
    verify(dir, |_| ()).map_or(true, |problems| !problems.is_empty())
}

pub fn message<T: std::fmt::Debug>(result: Result<T, CacheError>) -> String {
    let text = result.unwrap_err().to_string();
    assert!(!text.contains('\n'), "more than one line: {text}");
    text
}

/// Writes a manifest with correct digests, so that only its content can be refused.
pub fn reseal(dir: &Path, mut manifest: Value) {
    manifest["digest"] = "".into();
    manifest["digest"] = digest::sha256_of_bytes(manifest.to_string().as_bytes()).into();
    let text = serde_json::to_string_pretty(&manifest).unwrap();
    fs::write(dir.join("manifest.json"), text + "\n").unwrap();
}

/// Calls [`reseal`] with the current size and digest of the samples' table.
pub fn reseal_table(dir: &Path, mut manifest: Value) {
    let path = dir.join("samples.parquet");
    manifest["samples"]["bytes"] = fs::metadata(&path).unwrap().len().into();
    manifest["samples"]["sha256"] = digest::sha256_of_file(&path).unwrap().into();
    reseal(dir, manifest);
}

pub fn manifest_json(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join("manifest.json")).unwrap()).unwrap()
}
