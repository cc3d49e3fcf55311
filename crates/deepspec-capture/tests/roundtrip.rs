//! A cache returns the states that were written to it.

#[path = "common_cache/mod.rs"]
mod common;

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use common::*;
use deepspec_capture::cache::{
    Builder, CacheError, Encoding, FinalStates, Identity, Layout, Part, Plan, PlannedSample, Reader,
    ShardWriter, inspect, verify,
};
use deepspec_core::Tap;
use proptest::prelude::*;

fn assert_reads_back(dir: &Path, plan: &Plan) {
    let last = plan.layout().last;
    let [reader, unseen] = [dir; 2].map(|dir| Reader::open(dir).unwrap());
    assert_eq!(reader.len(), plan.samples().len());
    assert_eq!(reader.layout(), plan.layout());
    for (index, planned) in plan.samples().iter().enumerate() {
        let sample = reader.sample(index).unwrap();
        assert_eq!(
            (sample.id, sample.input_ids, sample.spans),
            (&*planned.id, &*planned.input_ids, &*planned.spans)
        );
        assert_eq!(
            (reader.length(index), reader.spans(index)),
            (Some(planned.length()), Some(&*planned.spans))
        );
        let expected = [taps_of(planned), last_of(planned, last)];
        assert_eq!(sample.states().unwrap().map(|states| states.into_owned()), expected, "sample {index}");
        let [mut taps, mut last_states] = reader.state_bytes(index).unwrap().map(|bytes| vec![0; bytes]);
        // The fresh reader verifies checksums on this read; the other one has verified them
        // already.
        for reader in [&unseen, &reader] {
            reader.read_into(index, &mut taps, &mut last_states).unwrap();
            assert_eq!([&taps, &last_states], [&expected[0], &expected[1]], "copy of sample {index}");
        }
        assert_eq!(reader.last_positions(index).unwrap(), planned.last_positions(last));
        assert_eq!(sample.loss_mask(), planned.loss_mask());
        assert!(plan.shards()[sample.shard].samples.contains(&index));
        if plan.layout().encoding == Encoding::Bf16 {
            assert_eq!((sample.taps.as_ptr() as usize % 2, sample.last.as_ptr() as usize % 2), (0, 0));
        }
    }
    let read = AtomicU64::new(0);
    let problems = verify(dir, |bytes| {
        read.fetch_add(bytes, Ordering::Relaxed);
    })
    .unwrap();
    assert!(problems.is_empty(), "{problems:?}");
    assert_eq!(read.into_inner(), reader.manifest().bytes());
}

#[test]
fn what_was_written_is_read_from_one_shard_and_from_many() {
    for (encoding, last) in [Encoding::Bf16, Encoding::Bf16z]
        .into_iter()
        .flat_map(|e| [(e, FinalStates::Supervised), (e, FinalStates::All)])
    {
        for shard_bytes in [1, 300, 1 << 30] {
            let dir = tempfile::tempdir().unwrap();
            let plan = Plan::new(samples(40), Layout { encoding, ..layout(last) }, shard_bytes).unwrap();
            let manifest = build(dir.path(), &plan, &identity()).unwrap();
            assert_eq!(manifest.shards.len(), plan.shards().len());
            if encoding == Encoding::Bf16 {
                assert_eq!(manifest.shards.iter().map(|shard| shard.bytes).sum::<u64>(), plan.bytes());
            }
            assert_eq!(&manifest.counts, plan.counts());
            assert_reads_back(dir.path(), &plan);
            let names: Vec<String> = files(dir.path()).into_iter().map(|(name, _)| name).collect();
            let shards = (0..plan.shards().len()).map(|shard| format!("shard-{shard:05}.safetensors"));
            let expected: Vec<String> =
                ["manifest.json".into(), "samples.parquet".into()].into_iter().chain(shards).collect();
            assert_eq!(names, expected);
        }
    }
}

/// The cache of a drafter that reads no layers.
#[test]
fn final_states_alone_are_a_cache() {
    for encoding in [Encoding::Bf16, Encoding::Bf16z, Encoding::Fp8] {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout { taps: vec![], encoding, ..layout(FinalStates::All) };
        let plan = Plan::new(samples(40), layout, 300).unwrap();
        let identity = Identity { taps: vec![], ..identity() };
        let mut builder = Builder::open(dir.path(), &plan, &identity).unwrap();
        while let Some(mut writer) = builder.next_shard().unwrap() {
            for sample in writer.samples() {
                writer.push(&[], &last_of(sample, FinalStates::All)).unwrap();
            }
            writer.finish().unwrap();
        }
        builder.publish().unwrap();
        assert!(verify(dir.path(), |_| ()).unwrap().is_empty());
        let reader = Reader::open(dir.path()).unwrap();
        for (index, planned) in plan.samples().iter().enumerate() {
            let [taps, last] = reader.sample(index).unwrap().states().unwrap();
            assert!(taps.is_empty() && (encoding.is_lossy() || *last == last_of(planned, FinalStates::All)));
            let inspection = inspect(&reader.sample(index).unwrap()).unwrap();
            assert_eq!(inspection.tensors.iter().map(|tensor| tensor.part).collect::<Vec<_>>(), [Part::Last]);
        }
        let shard = fs::read(dir.path().join("shard-00000.safetensors")).unwrap();
        assert_eq!(
            safetensors::SafeTensors::deserialize(&shard).unwrap().tensor("taps").unwrap().shape()[1],
            0
        );
    }
}

#[test]
fn more_samples_than_a_batch_of_the_table() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(2500, FinalStates::Supervised, 1 << 16);
    build(dir.path(), &plan, &identity()).unwrap();
    assert_reads_back(dir.path(), &plan);
}

#[test]
fn supervised_keeps_fewer_last_rows_and_a_sample_may_keep_none() {
    let sample = |id: &str, spans| PlannedSample { id: id.into(), input_ids: vec![1; 10], spans };
    let dir = tempfile::tempdir().unwrap();
    let samples = vec![sample("a", vec![(4, 6)]), sample("b", vec![]), sample("c", vec![(9, 10)])];
    let plan = Plan::new(samples, layout(FinalStates::Supervised), 1 << 20).unwrap();
    let manifest = build(dir.path(), &plan, &identity()).unwrap();
    assert_eq!((manifest.shards[0].rows, manifest.shards[0].last_rows), (30, 5));
    let reader = Reader::open(dir.path()).unwrap();
    let positions: Vec<_> = (0..3).map(|index| reader.last_positions(index).unwrap()).collect();
    assert_eq!(positions, [vec![3, 4, 5, 6], vec![], vec![8]]);
    assert_reads_back(dir.path(), &plan);
}

#[test]
fn safetensors_reads_a_shard() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(3, FinalStates::Supervised, 1 << 20);
    build(dir.path(), &plan, &identity()).unwrap();
    let bytes = fs::read(dir.path().join("shard-00000.safetensors")).unwrap();
    let (header, _) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!((8 + header) % 64, 0);
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let (taps, last) = (tensors.tensor("taps").unwrap(), tensors.tensor("last").unwrap());
    let expected: Vec<u8> = plan.samples().iter().flat_map(taps_of).collect();
    assert_eq!(
        (taps.dtype(), taps.shape(), taps.data()),
        (safetensors::Dtype::BF16, &[expected.len() / 16, 8][..], &*expected)
    );
    assert_eq!(last.shape()[1], HIDDEN);
}

#[test]
fn a_sample_is_summed_up() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(1, FinalStates::Supervised, 1 << 20);
    build(dir.path(), &plan, &identity()).unwrap();
    let reader = Reader::open(dir.path()).unwrap();
    let inspection = inspect(&reader.sample(0).unwrap()).unwrap();
    assert_eq!((inspection.length, inspection.supervised), (3, 2));
    let parts: Vec<_> = inspection.tensors.iter().map(|tensor| (tensor.part, tensor.rows)).collect();
    assert_eq!(parts, [(Part::Tap(Tap::Embedding), 3), (Part::Tap(Tap::Layer(3)), 3), (Part::Last, 3)]);
    // A slow reimplementation: the second tap's columns are 4..8 of each row.
    let values: Vec<f64> = taps_of(&plan.samples()[0])
        .chunks_exact(2)
        .map(|pair| f64::from(f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16)))
        .collect();
    let norms = values.chunks_exact(8).map(|row| row[4..].iter().map(|v| v * v).sum::<f64>().sqrt());
    assert!((inspection.tensors[1].mean_norm - norms.sum::<f64>() / 3.0).abs() < 1e-9);
    assert!(inspection.tensors.iter().all(|tensor| tensor.non_finite == 0 && tensor.max_abs > 0.0));
}

#[test]
fn plans_that_cannot_be_built_are_refused() {
    let sample = |id: &str, length: usize, spans: &[(u32, u32)]| PlannedSample {
        id: id.into(),
        input_ids: vec![1; length],
        spans: spans.to_vec(),
    };
    let new = |samples| Plan::new(samples, layout(FinalStates::Supervised), 1 << 20);
    assert!(matches!(new(vec![]), Err(CacheError::EmptyPlan)));
    assert!(matches!(new(vec![sample("a", 0, &[])]), Err(CacheError::BadLength { .. })));
    assert!(message(new(vec![sample("a", 5, &[]), sample("a", 5, &[])])).contains("\"a\" occurs twice"));
    for spans in [&[(3, 3)][..], &[(4, 6)], &[(0, 3), (2, 4)], &[(u32::MAX, u32::MAX)], &[(4, 2)]] {
        assert!(matches!(new(vec![sample("a", 5, spans)]), Err(CacheError::BadSpan { .. })), "{spans:?}");
    }
    let none = Layout { hidden_size: 0, ..layout(FinalStates::All) };
    let huge = Layout { hidden_size: usize::MAX / 2, ..layout(FinalStates::All) };
    for layout in [none, huge] {
        assert!(matches!(Plan::new(vec![sample("a", 5, &[])], layout, 9), Err(CacheError::BadLayout { .. })));
    }
    assert!(matches!(
        Plan::new(vec![sample("a", 5, &[])], layout(FinalStates::All), 0),
        Err(CacheError::ZeroShardBytes)
    ));

    let dir = tempfile::tempdir().unwrap();
    let open = |plan: &Plan, identity| message(Builder::open(dir.path(), plan, &identity).map(|_| ()));
    let long = new(vec![sample("long", 65, &[])]).unwrap();
    assert_eq!(open(&long, identity()), "sample \"long\" has 65 tokens, past max_length 64");
    let plan = plan(2, FinalStates::All, 100);
    let small = Identity { vocab_size: 18, ..identity() };
    assert!(open(&plan, small).contains("token id 18 at position 1 is outside the vocabulary of 18"));
    let other = Identity { hidden_size: 5, ..identity() };
    assert!(open(&plan, other).contains("hidden_size is 4 there, 5 is wanted"));
    assert!(files(dir.path()).is_empty(), "a refused plan leaves nothing behind");
}

#[test]
fn the_writer_refuses_wrong_sizes_and_values() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(2, FinalStates::Supervised, 1 << 20);
    let mut builder = Builder::open(dir.path(), &plan, &identity()).unwrap();
    let mut writer = builder.next_shard().unwrap().unwrap();
    let sample = &plan.samples()[0];
    let (taps, last) = (taps_of(sample), last_of(sample, FinalStates::Supervised));
    assert!(message(writer.push(&taps[1..], &last)).contains("taps has 47 bytes, expected 48"));
    assert!(message(writer.push(&taps, &[])).contains("last hidden state has 0 bytes, expected 24"));
    for (bits, shown) in [(0x7FC0_u16, "NaN"), (0x7F80, "inf"), (0xFF80, "-inf")] {
        let mut bad = taps.clone();
        bad[16 + 10..16 + 12].copy_from_slice(&bits.to_le_bytes());
        let text = message(writer.push(&bad, &last));
        assert!(text.contains(&format!("{:?}: row 1 of tap 3 has the value {shown};", sample.id)), "{text}");
        let mut bad = last.clone();
        bad[16..18].copy_from_slice(&bits.to_le_bytes());
        assert!(
            message(writer.push(&taps, &bad))
                .contains(&format!("row 2 of last hidden state has the value {shown}"))
        );
    }
    writer.push(&taps, &last).unwrap();
    assert_eq!(writer.pushed(), 1);
    let short = message(writer.finish());
    assert!(short.contains("shard-00000.safetensors: finished after 1 of 2 samples"), "{short}");
    assert!(message(builder.publish()).contains("0 of 1 shards are finished, shard 0 is not"));
}

#[test]
fn a_cache_of_another_identity_is_refused_by_field() {
    let dir = tempfile::tempdir().unwrap();
    build(dir.path(), &plan(2, FinalStates::All, 100), &identity()).unwrap();
    let reader = Reader::open(dir.path()).unwrap();
    reader.check_identity(&identity()).unwrap();
    let mut other = identity();
    other.taps = vec![Tap::Layer(1)];
    other.system_prompt = None;
    let text = message(reader.check_identity(&other));
    assert!(
        text.contains("system_prompt is \"You are a helpful assistant.\" there, absent is wanted"),
        "{text}"
    );
    assert!(text.contains("taps is [embedding, 3] there, [1] is wanted"), "{text}");
    assert!(!text.contains("tokenizer"), "{text}");
}

#[test]
fn readers_and_writers_cross_threads() {
    fn shared<T: Send + Sync>() {}
    fn sent<T: Send>() {}
    shared::<Reader>();
    sent::<ShardWriter<'static>>();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Shards partition the samples in order. None is empty, and only a shard with a single sample
    /// exceeds the size.
    #[test]
    fn shards_partition_the_samples(count in 1usize..60, shard_bytes in 1u64..2000) {
        let plan = plan(count, FinalStates::Supervised, shard_bytes);
        let mut next = 0;
        for shard in plan.shards() {
            prop_assert_eq!(shard.samples.start, next);
            prop_assert!(!shard.samples.is_empty());
            next = shard.samples.end;
            let bytes: usize = plan.samples()[shard.samples.clone()].iter().map(|s| taps_of(s).len() + last_of(s, FinalStates::Supervised).len()).sum();
            prop_assert_eq!(bytes as u64, shard.rows * 16 + shard.last_rows * 8);
            prop_assert!(bytes as u64 <= shard_bytes || shard.samples.len() == 1);
        }
        prop_assert_eq!(next, count);
    }
}
