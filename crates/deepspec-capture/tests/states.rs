//! Every source returns the same states for the same samples.

mod common;

use std::fs;
use std::path::Path;

use common::Bench;
use deepspec_capture::cache::{Builder, Encoding, FinalStates, Plan, verify};
use deepspec_capture::{
    Capture, Dataset, SampleStates, StateSource, TargetRuntime, TargetSpec, fill_shards, tokenise,
};
use deepspec_drafters::Recipe;
use deepspec_testkit::folder::files;
use serde_json::json;
use tch::{Device, Kind, Tensor};

/// Samples per step: 23 samples make 5 steps, and the epoch leaves out 3.
const PER_STEP: usize = 4;
const SAMPLES: usize = 23;
const STEPS: usize = SAMPLES / PER_STEP;
const RUNNING: TargetRuntime = TargetRuntime { device: Device::Cpu, dtype: Kind::Float, per_step: PER_STEP };

/// A bench with conversations of many lengths in `rows.jsonl`.
fn bench() -> Bench {
    // With one thread, the bits of float32 sums do not depend on the other rows of the batch.
    tch::set_num_threads(1);
    let bench = Bench::new();
    let row = |index: usize| {
        let answer: Vec<String> =
            (0..3 + index * index % 37).map(|word| format!("word {word} of {index}.")).collect();
        let turns = [
            json!({"role": "user", "content": format!("Say something of length {index}, please.")}),
            json!({"role": "assistant", "content": answer.join(" ")}),
        ];
        json!({"id": format!("row-{index}"), "conversations": turns}).to_string()
    };
    bench.write("rows.jsonl", &(0..SAMPLES).map(row).collect::<Vec<_>>().join("\n"));
    bench
}

fn recipe(bench: &Bench, states: &str) -> Recipe {
    let states = format!("data.states={states}");
    let input = format!("data.input=['{}']", bench.path("rows.jsonl").display());
    let cached = states.starts_with("data.states={cache");
    let overrides = [states.as_str(), input.as_str()];
    bench.recipe(if cached { &overrides[..1] } else { &overrides })
}

/// The order of an epoch, which is neither the order of the rows nor its own inverse.
fn order(epoch: usize) -> Vec<usize> {
    (0..SAMPLES).map(|place| (place * 5 + 3 + epoch) % SAMPLES).collect()
}

fn dataset(bench: &Bench, recipe: &Recipe, source: &TargetSpec) -> Dataset {
    Dataset::open(recipe, source, Some(&bench.path("kept")), |samples| {
        assert_eq!(samples, SAMPLES);
        order(0)
    })
    .unwrap()
}

/// The states of a range of steps.
fn read(
    bench: &Bench,
    recipe: &Recipe,
    source: &TargetSpec,
    steps: std::ops::Range<usize>,
) -> Vec<(String, SampleStates)> {
    let dataset = dataset(bench, recipe, source);
    let mut states = StateSource::open(&dataset, source, recipe, RUNNING).unwrap();
    let mut read = vec![];
    for step in steps.clone() {
        let place = step % STEPS * PER_STEP;
        let samples = &order(step / STEPS)[place..place + PER_STEP];
        states.begin_step(step, samples).unwrap();
        for &sample in samples {
            read.push((dataset.meta(sample).id.to_string(), states.next_states().unwrap()));
        }
    }
    states.finish(steps.end).unwrap();
    read
}

#[track_caller]
fn assert_same(what: &str, found: &[(String, SampleStates)], expected: &[(String, SampleStates)]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for ((id, found), (expected_id, expected)) in found.iter().zip(expected) {
        assert_eq!((id, &found.last_positions), (expected_id, &expected.last_positions), "{what}");
        for (name, found, expected) in
            [("taps", &found.taps, &expected.taps), ("last", &found.last, &expected.last)]
        {
            assert_eq!(found.kind(), Kind::BFloat16, "{what}");
            let others = bits(found).iter().zip(bits(expected)).filter(|(a, b)| **a != *b).count();
            assert_eq!((found.size(), others), (expected.size(), 0), "{what}: {name} of {id}");
        }
    }
}

fn bits(states: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0; states.numel() * 2];
    states.contiguous().copy_data_u8(&mut bytes, states.numel());
    bytes
}

/// Builds a cache as `cache build` does.
fn build(recipe: &Recipe, source: &TargetSpec, dir: &Path, rows: &Path) {
    build_as(Encoding::Bf16, recipe, source, dir, rows);
}

fn build_as(encoding: Encoding, recipe: &Recipe, source: &TargetSpec, dir: &Path, rows: &Path) {
    let samples = tokenise(&[rows.to_path_buf()], source, |_| ()).unwrap().samples;
    let longest = samples.iter().map(|sample| sample.input_ids.len()).max().unwrap();
    let plan = Plan::new(samples, source.layout(FinalStates::Supervised, encoding), 1 << 20).unwrap();
    let mut builder = Builder::open(dir, &plan, &source.identity).unwrap();
    let mut capture = Capture::load(&source.dir, recipe, longest, Device::Cpu, Kind::Float).unwrap();
    fill_shards(&mut builder, &mut capture, |_| ()).unwrap();
    builder.publish().unwrap();
}

#[test]
fn online_states_are_the_cached_ones() {
    let bench = bench();
    let cached = recipe(&bench, &format!("{{cache: '{}'}}", bench.path("cache").display()));
    let online = recipe(&bench, "online");
    let source = bench.source(&[]).unwrap();
    build(&cached, &source, &bench.path("cache"), &bench.path("rows.jsonl"));
    let (from_cache, from_target) = (dataset(&bench, &cached, &source), dataset(&bench, &online, &source));
    assert_eq!(from_cache.digest(), from_target.digest());
    assert_eq!(from_cache.counts(), from_target.counts());
    assert!((0..SAMPLES).all(|index| from_cache.meta(index) == from_target.meta(index)));
    assert!(from_target.needs_target() && !from_cache.needs_target());
    let steps = 0..STEPS + 2;
    assert_same(
        "online",
        &read(&bench, &online, &source, steps.clone()),
        &read(&bench, &cached, &source, steps),
    );
}

/// Training on fp8 states counts as other data than training on the target's own states. bf16z
/// restores those bit by bit.
#[test]
fn only_states_that_were_rounded_are_other_data() {
    let bench = bench();
    let source = bench.source(&[]).unwrap();
    let online = dataset(&bench, &recipe(&bench, "online"), &source);
    assert_eq!(online.lossy_encoding(), None);
    for (encoding, rounding) in
        [(Encoding::Bf16, None), (Encoding::Bf16z, None), (Encoding::Fp8, Some(Encoding::Fp8))]
    {
        let dir = bench.path(&encoding.to_string());
        let cached = recipe(&bench, &format!("{{cache: '{}'}}", dir.display()));
        build_as(encoding, &cached, &source, &dir, &bench.path("rows.jsonl"));
        for states in ["cache", "hybrid"] {
            let recipe = recipe(&bench, &format!("{{{states}: '{}'}}", dir.display()));
            let dataset = dataset(&bench, &recipe, &source);
            assert_eq!(dataset.lossy_encoding(), rounding, "{states} of {encoding}");
            assert_eq!(dataset.digest() == online.digest(), rounding.is_none(), "{states} of {encoding}");
        }
    }
}

#[test]
fn the_first_epoch_of_hybrid_leaves_a_cache_wherever_it_was_stopped() {
    let bench = bench();
    let source = bench.source(&[]).unwrap();
    let hybrid = |dir: &str| recipe(&bench, &format!("{{hybrid: '{}'}}", bench.path(dir).display()));
    let online = recipe(&bench, "online");
    let expected = read(&bench, &online, &source, 0..STEPS + 2);
    let whole = hybrid("whole");
    assert_same("hybrid", &read(&bench, &whole, &source, 0..STEPS + 2), &expected);
    assert!(verify(&bench.path("whole"), |_| ()).unwrap().is_empty());
    assert_eq!(dataset(&bench, &whole, &source).digest(), dataset(&bench, &online, &source).digest());
    assert!(!dataset(&bench, &whole, &source).needs_target());
    assert_same("read again", &read(&bench, &whole, &source, 1..STEPS + 2), &expected[PER_STEP..]);

    // Stopped within the epoch and resumed at an earlier checkpoint, at the same step, or after the
    // end of the epoch.
    for (stopped, resumed) in [(3, 1), (2, 2), (STEPS - 1, STEPS - 1), (1, STEPS)] {
        let dir = format!("stopped-{stopped}-{resumed}");
        let torn = hybrid(&dir);
        read(&bench, &torn, &source, 0..stopped);
        assert!(!bench.path(&dir).join("manifest.json").exists());
        let rest = read(&bench, &torn, &source, resumed..STEPS + 2);
        assert_same(&dir, &rest, &expected[resumed * PER_STEP..]);
        assert!(files(&bench.path(&dir)) == files(&bench.path("whole")), "{dir}: another cache");
    }
    // Exactly one epoch.
    read(&bench, &hybrid("epoch"), &source, 0..STEPS);
    assert!(files(&bench.path("epoch")) == files(&bench.path("whole")));
}

#[test]
fn a_finished_cache_serves_hybrid_in_any_order() {
    let bench = bench();
    let source = bench.source(&[]).unwrap();
    let dir = bench.path("cache");
    let cached = recipe(&bench, &format!("{{cache: '{}'}}", dir.display()));
    let hybrid = recipe(&bench, &format!("{{hybrid: '{}'}}", dir.display()));
    build(&cached, &source, &dir, &bench.path("rows.jsonl"));
    assert_same("hybrid", &read(&bench, &hybrid, &source, 0..3), &read(&bench, &cached, &source, 0..3));

    // As for a drafter that learns from every position.
    let mut greedy = bench.source(&[]).unwrap();
    greedy.final_states = FinalStates::All;
    let error = Dataset::open(&cached, &greedy, None, |_| order(0)).err().unwrap().to_string();
    assert!(error.contains("supervised positions") && error.contains("--final-states all"), "{error}");

    let text = fs::read_to_string(bench.path("rows.jsonl")).unwrap();
    bench.write("rows.jsonl", &text.replace("word 1 of 7.", "word 1 of 8."));
    let error =
        Dataset::open(&hybrid, &source, Some(&bench.path("kept")), |_| order(0)).err().unwrap().to_string();
    assert!(error.contains("no sample \"row-7\"") && error.contains("data.input"), "{error}");
}

#[test]
fn unusable_input_is_named() {
    let bench = bench();
    let source = bench.source(&[]).unwrap();
    let online = recipe(&bench, "online");
    let refused = |words: &[&str]| {
        let error = Dataset::open(&online, &source, Some(&bench.path("kept")), |_| order(0))
            .err()
            .unwrap()
            .to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{words:?} in {error}");
        assert!(!error.contains('\n'), "{error}");
    };
    bench.write("rows.jsonl", "");
    refused(&["`data.input`", "rows.jsonl", "0 rows"]);
    bench.write("rows.jsonl", "{\"id\": 1}\nnonsense\n");
    refused(&["`data.input`", "2 rows = 0 kept", "2 rejected"]);
    fs::remove_file(bench.path("rows.jsonl")).unwrap();
    refused(&["`data.input`", "rows.jsonl", "no such file"]);
}

#[test]
fn states_that_are_not_finite_are_refused_by_sample() {
    let bench = bench();
    let weights = bench.path("target/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let norm = header["model.norm.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
    // All bits set is a NaN in every float format.
    bytes[8 + length + norm..][..4].fill(0xFF);
    fs::write(&weights, bytes).unwrap();
    let (online, source) = (recipe(&bench, "online"), bench.source(&[]).unwrap());
    let dataset = dataset(&bench, &online, &source);
    let mut states = StateSource::open(&dataset, &source, &online, RUNNING).unwrap();
    states.begin_step(0, &order(0)[..PER_STEP]).unwrap();
    let error = states.next_states().unwrap_err().to_string();
    let words = ["sample \"row-3\"", "row 0 of last hidden state", "NaN"];
    assert!(words.iter().all(|word| error.contains(word)), "{error}");
}
