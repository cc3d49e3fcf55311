//! A build that is stopped and resumed ends with the same bytes as an uninterrupted one.

#[path = "common_cache/mod.rs"]
mod common;

use std::fs;
use std::path::Path;

use common::*;
use deepspec_capture::cache::{Builder, CacheError, FinalStates, Identity, Plan, Reader, remove_cache};

fn ten_shards() -> Plan {
    let plan = plan(30, FinalStates::Supervised, 500);
    assert!(plan.shards().len() >= 10);
    plan
}

fn undisturbed(plan: &Plan) -> Vec<(String, Vec<u8>)> {
    let dir = tempfile::tempdir().unwrap();
    build(dir.path(), plan, &identity()).unwrap();
    files(dir.path())
}

fn fill(builder: &mut Builder<'_>, plan: &Plan, shards: usize) {
    for _ in 0..shards {
        let mut writer = builder.next_shard().unwrap().unwrap();
        for sample in writer.samples() {
            writer.push(&taps_of(sample), &last_of(sample, plan.layout().last)).unwrap();
        }
        writer.finish().unwrap();
    }
}

fn parts(dir: &Path) -> std::path::PathBuf {
    dir.join("parts/worker-000")
}

#[test]
fn finished_shards_are_kept_and_the_torn_one_starts_again() {
    let plan = ten_shards();
    let dir = tempfile::tempdir().unwrap();
    let mut builder = Builder::open(dir.path(), &plan, &identity()).unwrap();
    fill(&mut builder, &plan, 3);
    let mut torn = builder.next_shard().unwrap().unwrap();
    torn.push(&taps_of(&torn.samples()[0]), &last_of(&torn.samples()[0], FinalStates::Supervised)).unwrap();
    drop((torn, builder));
    assert!(parts(dir.path()).join("shard-00003.safetensors.partial").exists());
    assert!(matches!(Reader::open(dir.path()), Err(CacheError::NoManifest { unfinished: true, .. })));

    let kept = fs::metadata(parts(dir.path()).join("shard-00001.safetensors")).unwrap().modified().unwrap();
    let builder = Builder::open(dir.path(), &plan, &identity()).unwrap();
    assert_eq!(builder.pending_shards(), plan.shards().len() - 3);
    assert_eq!(builder.done_samples(), plan.shards()[2].samples.end);
    drop(builder);
    build(dir.path(), &plan, &identity()).unwrap();
    assert_eq!(fs::metadata(dir.path().join("shard-00001.safetensors")).unwrap().modified().unwrap(), kept);
    assert_eq!(files(dir.path()), undisturbed(&plan));
}

#[test]
fn whatever_a_kill_leaves_of_a_finished_shard_is_redone_or_kept_whole() {
    let plan = ten_shards();
    let expected = undisturbed(&plan);
    let damages: [fn(&Path); 6] = [
        |parts| fs::remove_file(parts.join("shard-00001.json")).unwrap(),
        |parts| fs::write(parts.join("shard-00001.json"), "{\"shard\":").unwrap(),
        |parts| fs::write(parts.join("shard-00001.json.partial"), "{").unwrap(),
        |parts| fs::remove_file(parts.join("shard-00001.safetensors")).unwrap(),
        |parts| fs::write(parts.join("shard-00001.safetensors"), "short").unwrap(),
        |parts| fs::rename(parts.join("shard-00002.json"), parts.join("shard-00001.json")).unwrap(),
    ];
    for (index, damage) in damages.into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let mut builder = Builder::open(dir.path(), &plan, &identity()).unwrap();
        fill(&mut builder, &plan, 5);
        drop(builder);
        damage(&parts(dir.path()));
        build(dir.path(), &plan, &identity()).unwrap();
        assert_eq!(files(dir.path()), expected, "damage {index}");
    }
}

#[test]
fn a_publication_stopped_between_any_two_steps_is_completed() {
    let plan = ten_shards();
    let expected = undisturbed(&plan);
    let shards = plan.shards().len();
    // Stops after this many moved shards, then after the samples' table, then after the manifest.
    for stop in 0..shards + 3 {
        let dir = tempfile::tempdir().unwrap();
        let mut builder = Builder::open(dir.path(), &plan, &identity()).unwrap();
        fill(&mut builder, &plan, shards);
        drop(builder);
        for (name, bytes) in expected.iter().filter(|(name, _)| name.starts_with("shard")).take(stop) {
            let moved = parts(dir.path()).join(name);
            assert_eq!(&fs::read(&moved).unwrap(), bytes);
            fs::rename(moved, dir.path().join(name)).unwrap();
        }
        if stop > shards {
            fs::write(dir.path().join("samples.parquet.partial"), "torn").unwrap();
            fs::write(dir.path().join("samples.parquet"), &expected[1].1).unwrap();
        }
        if stop > shards + 1 {
            fs::write(dir.path().join("manifest.json"), &expected[0].1).unwrap();
        }
        let builder = Builder::open(dir.path(), &plan, &identity()).unwrap();
        assert_eq!((builder.pending_shards(), builder.done_samples()), (0, 30), "stop {stop}");
        builder.publish().unwrap();
        let found: Vec<_> =
            files(dir.path()).into_iter().filter(|(name, _)| !name.ends_with(".partial")).collect();
        assert_eq!(found, expected, "stop {stop}");
    }
}

#[test]
fn another_plan_or_target_is_refused_by_field() {
    let plan = ten_shards();
    for finished in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let mut builder = Builder::open(dir.path(), &plan, &identity()).unwrap();
        fill(&mut builder, &plan, 2);
        drop(builder);
        if finished {
            build(dir.path(), &plan, &identity()).unwrap();
        }
        let before = files(dir.path());
        let refused = |plan: &Plan, identity: &Identity| {
            let text = message(Builder::open(dir.path(), plan, identity).map(|_| ()));
            assert!(text.contains("--overwrite"), "{text}");
            assert!(
                text.contains(if finished { "a finished cache" } else { "an unfinished build" }),
                "{text}"
            );
            text
        };
        let text = refused(&plan, &Identity { tokenizer: "other".into(), ..identity() });
        assert!(
            text.contains("tokenizer is ") && text.contains("other is wanted") && !text.contains("template"),
            "{text}"
        );
        let text = refused(&common::plan(30, FinalStates::All, 500), &identity());
        assert!(text.contains("last is supervised there, all is wanted"), "{text}");
        let text = refused(&common::plan(29, FinalStates::Supervised, 500), &identity());
        assert!(text.contains("samples is 30 there, 29 is wanted"), "{text}");
        let text = refused(&common::plan(30, FinalStates::Supervised, 501), &identity());
        assert!(text.contains("shard_bytes is 500 there, 501 is wanted"), "{text}");
        let mut changed = samples(30);
        changed[7].input_ids[0] = 99;
        let text = refused(&Plan::new(changed, layout(FinalStates::Supervised), 500).unwrap(), &identity());
        assert!(text.contains("input digest is"), "{text}");
        assert_eq!(files(dir.path()), before);

        let other = Identity { tokenizer: "other".into(), ..identity() };
        remove_cache(dir.path()).unwrap();
        assert!(files(dir.path()).is_empty());
        build(dir.path(), &plan, &other).unwrap();
        Reader::open(dir.path()).unwrap().check_identity(&other).unwrap();
    }
}

#[test]
fn a_finished_cache_is_not_built_again() {
    let plan = ten_shards();
    let dir = tempfile::tempdir().unwrap();
    let manifest = build(dir.path(), &plan, &identity()).unwrap();
    let before = files(dir.path());
    let mut builder = Builder::open(dir.path(), &plan, &identity()).unwrap();
    assert_eq!((builder.pending_shards(), builder.done_samples()), (0, 30));
    assert!(builder.next_shard().unwrap().is_none());
    assert_eq!(builder.publish().unwrap(), manifest);
    assert_eq!(files(dir.path()), before);
}

#[test]
fn shards_without_a_manifest_are_not_taken_over_and_strangers_survive_an_overwrite() {
    let plan = ten_shards();
    let dir = tempfile::tempdir().unwrap();
    build(dir.path(), &plan, &identity()).unwrap();
    fs::remove_file(dir.path().join("manifest.json")).unwrap();
    fs::write(dir.path().join("notes.txt"), "mine").unwrap();
    let text = message(Builder::open(dir.path(), &plan, &identity()).map(|_| ()));
    assert!(text.contains("samples.parquet is left over"), "{text}");
    remove_cache(dir.path()).unwrap();
    assert_eq!(files(dir.path()), [("notes.txt".to_string(), b"mine".to_vec())]);
    remove_cache(&dir.path().join("nowhere")).unwrap();
}

#[test]
fn two_processes_do_not_build_in_one_folder() {
    let plan = ten_shards();
    let dir = tempfile::tempdir().unwrap();
    let first = Builder::open(dir.path(), &plan, &identity()).unwrap();
    assert!(matches!(Builder::open(dir.path(), &plan, &identity()), Err(CacheError::Locked { .. })));
    assert!(matches!(remove_cache(dir.path()), Err(CacheError::Locked { .. })));
    drop(first);
    build(dir.path(), &plan, &identity()).unwrap();
}

#[test]
fn shards_may_be_filled_side_by_side() {
    let plan = ten_shards();
    let dir = tempfile::tempdir().unwrap();
    let mut builder = Builder::open(dir.path(), &plan, &identity()).unwrap();
    std::thread::scope(|scope| {
        while let Some(mut writer) = builder.next_shard().unwrap() {
            scope.spawn(move || {
                for sample in writer.samples() {
                    writer.push(&taps_of(sample), &last_of(sample, FinalStates::Supervised)).unwrap();
                }
                writer.finish().unwrap();
            });
        }
    });
    builder.publish().unwrap();
    assert_eq!(files(dir.path()), undisturbed(&plan));
}
