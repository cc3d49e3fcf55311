//! The captured states of a sample equal those that the target computes for this sample alone,
//! whatever else was in its batch.

mod common;

use std::path::Path;

use common::Bench;
use deepspec_capture::cache::{Builder, FinalStates, Plan, PlannedSample, Reader};
use deepspec_capture::{Capture, fill_shards};
use deepspec_drafters::Recipe;
use deepspec_engine::{ModelInput, Target};
use deepspec_testkit::skip;
use tch::{Device, Kind, Tensor};

/// Half a unit in the last place of bfloat16, and the noise of float32 sums in another order.
const RELATIVE: f64 = 1.0 / 256.0;
const ABSOLUTE: f64 = 1e-3;

/// Samples of 1 to 230 tokens, long next to short, with none to two supervised spans.
fn samples() -> Vec<PlannedSample> {
    let lengths = [40, 1, 230, 7, 33, 100, 2, 64, 31, 32, 150, 3, 90];
    let sample = |(index, &length): (usize, &u32)| {
        let spans = match index % 4 {
            0 => vec![(length / 3, length)],
            1 => vec![],
            2 => vec![(1, length / 2), (length / 2 + 3, length - 1)],
            _ => vec![(0, 1), (length - 1, length)],
        };
        let input_ids =
            (0..length).map(|p| ((index as u32 * 131 + p * p * 7 + p * 31) % 1024) as i32).collect();
        let spans = spans.into_iter().filter(|(start, end)| start < end).collect();
        PlannedSample { id: format!("s{index}"), input_ids, spans }
    };
    lengths.iter().enumerate().map(sample).collect()
}

/// Taps and final-normed states of one sample that runs through the target alone.
fn alone(recipe: &Recipe, sample: &PlannedSample) -> (Tensor, Tensor) {
    let _no_grad = tch::no_grad_guard();
    let options = deepspec_models::TargetOptions {
        device: Device::Cpu,
        kind: Kind::Float,
        slots: 1,
        taps: recipe.target.layer_ids.clone(),
    };
    let mut target = deepspec_models::TargetModel::load(Path::new(&recipe.target.model), &options).unwrap();
    let ids: Vec<i64> = sample.input_ids.iter().map(|&id| i64::from(id)).collect();
    let out = target.forward(&ModelInput { chunks: &[(0, ids.len())], tokens: Tensor::from_slice(&ids) });
    (out.captured_states, out.hidden)
}

/// The positions directly before or after a supervised token.
fn beside_supervised(sample: &PlannedSample) -> Vec<i64> {
    let supervised =
        |p: i64| sample.spans.iter().any(|&(start, end)| (i64::from(start)..i64::from(end)).contains(&p));
    (0..sample.input_ids.len() as i64).filter(|&p| supervised(p - 1) || supervised(p + 1)).collect()
}

#[track_caller]
fn assert_rounded(what: &str, found: &Tensor, exact: &Tensor) {
    assert_eq!(found.size(), exact.size(), "{what}");
    let excess = (found.to_kind(Kind::Double) - exact).abs() - exact.abs() * RELATIVE - ABSOLUTE;
    let excess = if excess.numel() == 0 { 0.0 } else { excess.max().double_value(&[]) };
    assert!(excess <= 0.0, "{what}: off by {excess:e} more than the rounding");
}

#[test]
fn states_do_not_depend_on_the_batch() {
    let bench = Bench::new();
    let (recipe, samples) = (bench.recipe(&[]), samples());
    let exact: Vec<(Tensor, Tensor)> = samples.iter().map(|sample| alone(&recipe, sample)).collect();
    let mut capture =
        Capture::load(Path::new(&recipe.target.model), &recipe, 230, Device::Cpu, Kind::Float).unwrap();
    assert!(capture.forward_limits().sequences >= samples.len() && capture.forward_limits().tokens >= 1000);
    for width in [samples.len(), 5, 2, 1] {
        for last in [FinalStates::Supervised, FinalStates::All] {
            for (batch, exact) in samples.chunks(width).zip(exact.chunks(width)) {
                let captured = capture.run(batch, last);
                assert_eq!((captured.taps.kind(), captured.last.kind()), (Kind::BFloat16, Kind::BFloat16));
                let (mut row, mut last_row) = (0, 0);
                for (sample, (taps, hidden)) in batch.iter().zip(exact) {
                    let rows = sample.input_ids.len() as i64;
                    let what = format!("{} among {width}", sample.id);
                    assert_rounded(&what, &captured.taps.narrow(0, row, rows), taps);
                    let kept = match last {
                        FinalStates::All => (0..rows).collect(),
                        FinalStates::Supervised => beside_supervised(sample),
                    };
                    let expected = hidden.index_select(0, &Tensor::from_slice(&kept));
                    assert_rounded(&what, &captured.last.narrow(0, last_row, kept.len() as i64), &expected);
                    (row, last_row) = (row + rows, last_row + kept.len() as i64);
                }
                assert_eq!((captured.taps.size()[0], captured.last.size()[0]), (row, last_row));
            }
        }
    }
}

fn values(bytes: &[u8], columns: i64) -> Tensor {
    let value = |pair: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16);
    Tensor::from_slice(&bytes.chunks_exact(2).map(value).collect::<Vec<f32>>()).view([-1, columns])
}

#[test]
fn a_filled_cache_holds_the_states_of_its_samples() {
    let bench = Bench::new();
    let (recipe, samples) = (bench.recipe(&[]), samples());
    let source = bench.source(&[]).unwrap();
    let layout = source.layout(FinalStates::Supervised, deepspec_capture::cache::Encoding::Bf16);
    let plan = Plan::new(samples.clone(), layout, 200_000).unwrap();
    assert!(plan.shards().len() > 3);
    let dir = bench.path("cache");
    let mut builder = Builder::open(&dir, &plan, &source.identity).unwrap();
    let mut capture =
        Capture::load(Path::new(&recipe.target.model), &recipe, 230, Device::Cpu, Kind::Float).unwrap();
    let mut done = vec![];
    fill_shards(&mut builder, &mut capture, |sample| done.push(sample.id.clone())).unwrap();
    // Windows are captured in order of length, but each sample is captured exactly once.
    let mut expected: Vec<String> = samples.iter().map(|sample| sample.id.clone()).collect();
    done.sort();
    expected.sort();
    assert_eq!(done, expected);
    builder.publish().unwrap();
    assert!(deepspec_capture::cache::verify(&dir, |_| ()).unwrap().is_empty());

    let reader = Reader::open(&dir).unwrap();
    reader.check_identity(&source.identity).unwrap();
    assert_eq!(reader.len(), samples.len());
    for (index, sample) in samples.iter().enumerate() {
        assert_eq!(reader.index_of_id(&sample.id), Some(index));
        let cached = reader.sample(index).unwrap();
        assert_eq!((cached.input_ids, cached.spans), (&sample.input_ids[..], &sample.spans[..]));
        let (taps, hidden) = alone(&recipe, sample);
        assert_rounded(&sample.id, &values(cached.taps, taps.size()[1]), &taps);
        let kept = Tensor::from_slice(&beside_supervised(sample));
        assert_rounded(&sample.id, &values(cached.last, hidden.size()[1]), &hidden.index_select(0, &kept));
    }
}

/// Peak resident memory of the process, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix("kB").unwrap().trim().parse::<u64>().unwrap() << 10
}

/// Captures a sequence of 32,768 tokens in several passes and pieces. Takes more than half a
/// minute, so it runs only with `DEEPSPEC_TEST_FULL`.
#[test]
fn a_sequence_of_32k_tokens_is_captured_in_little_memory() {
    if !skip::full() {
        return skip::skip(skip::Kind::Long, "capturing 32,768 tokens takes half a minute");
    }
    const LENGTH: u32 = 32_768;
    let bench = Bench::new();
    bench.edit("config.json", "\"max_position_embeddings\": 2048", "\"max_position_embeddings\": 32768");
    let recipe = bench.recipe(&[]);
    let target = Path::new(&recipe.target.model);
    let sample = |id: &str, length: u32| PlannedSample {
        id: id.into(),
        input_ids: (0..length).map(|p| ((p % 911) * 7 + p % 31) as i32 % 1024).collect(),
        spans: vec![(length / 2, length)],
    };
    let mut capture = Capture::load(target, &recipe, LENGTH as usize, Device::Cpu, Kind::Float).unwrap();
    let short = sample("short", 4096);
    let expected = alone(&recipe, &short);
    let before = peak();
    let captured = capture.run(&[sample("long", LENGTH)], FinalStates::Supervised);
    let taken = peak() - before;
    // Its 151 MB of keys and values, 75 MB of taps and last states (twice, once in float32), and
    // the scores of the pieces.
    assert!(taken < 1 << 30, "{} MB", taken >> 20);
    assert_eq!(captured.taps.size()[0], i64::from(LENGTH));
    assert!(captured.taps.isfinite().all().int64_value(&[]) == 1);
    // The first positions do not depend on later ones.
    assert_rounded("the first pass", &captured.taps.narrow(0, 0, 4096), &expected.0);
}
