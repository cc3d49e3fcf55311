//! Converts the reference's format 2 in both directions.

#[path = "common_cache/mod.rs"]
mod common;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use common::*;
use deepspec_capture::cache::{
    Encoding, FinalStates, Identity, Layout, Plan, Reader, ReferenceCache, export,
};
use safetensors::SafeTensors;
use serde_json::Value;

fn golden() -> PathBuf {
    let root = env::var_os("DEEPSPEC_GOLDEN").map(PathBuf::from);
    root.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden"))
        .join("target_cache")
}

fn identity_of(reference: &ReferenceCache) -> Identity {
    Identity {
        taps: reference.target_layer_ids().unwrap(),
        hidden_size: reference.number("hidden_size").unwrap(),
        max_length: reference.number("max_length").unwrap(),
        vocab_size: 1 << 30,
        ..identity()
    }
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn same_but_for_layout_of_json(there: &Path, here: &Path) {
    let (there_files, here_files) = (files(there), files(here));
    let names = |files: &[(String, Vec<u8>)]| files.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&there_files), names(&here_files));
    for ((name, expected), (_, found)) in there_files.iter().zip(&here_files) {
        match name.as_str() {
            "manifest.json" => assert_eq!(json(&there.join(name)), json(&here.join(name))),
            name => assert_eq!(expected, found, "{name}"),
        }
    }
}

#[test]
fn golden_target_cache() {
    let golden = golden();
    let reference = ReferenceCache::open(&golden.join("cache")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (own, back) = (dir.path().join("own"), dir.path().join("back"));
    let manifest = reference.import(&own, &identity_of(&reference), || ()).unwrap();
    assert_eq!(manifest.shards.len(), reference.number("num_shards").unwrap());
    export(&own, &back, "unused", || ()).unwrap();
    same_but_for_layout_of_json(&golden.join("cache"), &back);

    // The values that the reference read back, tensor by tensor.
    let expected = fs::read(golden.join("expected.safetensors")).unwrap();
    let expected = SafeTensors::deserialize(&expected).unwrap();
    let reader = Reader::open(&own).unwrap();
    for index in 0..reader.len() {
        let sample = reader.sample(index).unwrap();
        for (name, stored) in
            [("target_hidden_states", sample.taps), ("target_last_hidden_states", sample.last)]
        {
            let tensor = expected.tensor(&format!("{index}.{name}")).unwrap();
            assert_eq!(tensor.dtype(), safetensors::Dtype::F32);
            let values: Vec<u32> = tensor
                .data()
                .as_chunks::<4>()
                .0
                .iter()
                .map(|bytes| u32::from_le_bytes(*bytes) >> 16)
                .collect();
            let stored: Vec<u32> =
                stored.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b).into()).collect();
            assert_eq!(stored, values, "{name} of {index}");
        }
    }
}

#[test]
fn a_cache_of_ours_goes_out_and_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let (own, out, again, back) =
        (dir.path().join("own"), dir.path().join("out"), dir.path().join("again"), dir.path().join("back"));
    build(&own, &plan(20, FinalStates::All, 700), &identity()).unwrap();
    export(&own, &out, "some/model", || ()).unwrap();
    assert_eq!(json(&out.join("manifest.json"))["target_model_name_or_path"], "some/model");
    assert!(!export(&own, &out, "some/model", || ()).unwrap(), "it is there already");
    assert!(message(export(&own, &out, "another/model", || ())).contains("holds another cache already"));
    let reference = ReferenceCache::open(&out).unwrap();
    assert_eq!((reference.len(), reference.is_empty()), (20, false));
    let imported = Identity { vocab_size: 100, ..identity_of(&reference) };
    reference.import(&again, &imported, || ()).unwrap();
    let (first, second) = (Reader::open(&own).unwrap(), Reader::open(&again).unwrap());
    for index in 0..20 {
        let (first, second) = (first.sample(index).unwrap(), second.sample(index).unwrap());
        assert_eq!(
            (first.taps, first.last, first.spans, first.input_ids),
            (second.taps, second.last, second.spans, second.input_ids)
        );
    }
    export(&again, &back, "ignored", || ()).unwrap();
    same_but_for_layout_of_json(&out, &back);
}

#[test]
fn what_format_2_cannot_hold_or_is_not_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (own, out) = (dir.path().join("own"), dir.path().join("out"));
    build(&own, &plan(3, FinalStates::Supervised, 700), &identity()).unwrap();
    let text = message(export(&own, &out, "m", || ()));
    assert!(text.contains("build with --encoding bf16 --final-states all") && !out.exists(), "{text}");
    let eight = dir.path().join("eight");
    let layout = Layout { encoding: Encoding::Fp8, ..layout(FinalStates::All) };
    let plan_of_eight = Plan::new(samples(3), layout, 700).unwrap();
    build(&eight, &plan_of_eight, &identity()).unwrap();
    assert!(message(export(&eight, &out, "m", || ())).contains("its states are fp8"));

    let good = dir.path().join("good");
    build(&own.join("all"), &plan(6, FinalStates::All, 700), &identity()).unwrap();
    export(&own.join("all"), &good, "m", || ()).unwrap();
    let whole = files(&good);
    let into = dir.path().join("into");
    // Changed, truncated and extended files: nothing panics, and each refusal names the place.
    let mut refused = 0;
    for (name, bytes) in &whole {
        let path = good.join(name);
        for at in (0..bytes.len()).step_by(if name == "samples.idx" { 1 } else { 5 }) {
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x81;
            fs::write(&path, &flipped).unwrap();
            let outcome = ReferenceCache::open(&good)
                .and_then(|reference| reference.import(&into.join("x"), &identity(), || ()));
            refused += usize::from(outcome.is_err());
            assert!(name != "samples.idx" || outcome.is_err(), "record byte {at}");
            fs::remove_dir_all(into.join("x")).ok();
        }
        fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        let outcome = ReferenceCache::open(&good)
            .and_then(|reference| reference.import(&into.join("x"), &identity(), || ()));
        assert!(outcome.is_err() || name == "manifest.json", "{name} cut");
        fs::remove_dir_all(into.join("x")).ok();
        fs::write(&path, bytes).unwrap();
    }
    assert!(refused > 100);
}

#[test]
fn plans_predict_the_size_of_the_cache() {
    for (count, last, encoding) in [
        (1, FinalStates::All, Encoding::Bf16),
        (500, FinalStates::Supervised, Encoding::Fp8),
        (500, FinalStates::All, Encoding::Bf16),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let plan = Plan::new(samples(count), Layout { encoding, ..layout(last) }, 20_000).unwrap();
        build(dir.path(), &plan, &identity()).unwrap();
        let built: usize = files(dir.path()).iter().map(|(_, bytes)| bytes.len()).sum();
        let planned = plan.cache_bytes(&identity()).unwrap();
        let off = (built as f64 - planned as f64).abs() / built as f64;
        assert!(off < 0.01, "planned {planned}, built {built}");
    }
}
