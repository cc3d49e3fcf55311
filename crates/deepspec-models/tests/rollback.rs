//! Rollback of a target with recurrent states: after rejected drafts it computes what it would without them.

use std::path::Path;

use deepspec_core::Tap;
use deepspec_engine::{ModelInput, Target};
use deepspec_models::{TargetModel, TargetOptions};
use deepspec_testkit::tiny;
use tch::{Device, Kind, Tensor};

/// Anchor and drafts of a verified block.
const BLOCK: usize = 12;
/// Tokens that follow.
const MORE: usize = 5;
/// Prompts around the borders of chunks of 64 tokens.
const PROMPTS: [usize; 6] = [1, 5, 63, 64, 70, 150];

fn load(dir: &Path, kind: Kind) -> TargetModel {
    let taps = Tap::from_layer_ids([-1, 0, 1, 3]).unwrap();
    TargetModel::load(dir, &TargetOptions { device: Device::Cpu, kind, slots: 3, taps }).unwrap()
}

fn hybrid() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    tiny::target(dir.path(), "qwen3_5");
    dir
}

fn token(slot: usize, position: usize) -> i64 {
    3 + ((position * position + 37 * position + 101 * slot) % 1000) as i64
}

/// A token that is not the one of this position.
fn other_token(slot: usize, position: usize) -> i64 {
    3 + (token(slot, position) + 500) % 1000
}

/// Appends tokens to sequences, given as (slot, tokens); returns states, taps and logits of all rows side by side.
fn append(target: &mut TargetModel, parts: &[(usize, Vec<i64>)]) -> Tensor {
    let chunks: Vec<(usize, usize)> = parts.iter().map(|(slot, tokens)| (*slot, tokens.len())).collect();
    let tokens: Vec<i64> = parts.iter().flat_map(|(_, tokens)| tokens.clone()).collect();
    let out = target.forward(&ModelInput { chunks: &chunks, tokens: Tensor::from_slice(&tokens) });
    Tensor::cat(&[out.hidden.shallow_clone(), out.captured_states, target.logits(&out.hidden)], 1)
}

fn tokens(slot: usize, range: std::ops::Range<usize>) -> Vec<i64> {
    range.map(|position| token(slot, position)).collect()
}

/// Appends tokens one by one.
fn step(target: &mut TargetModel, slot: usize, range: std::ops::Range<usize>) -> Tensor {
    let rows: Vec<Tensor> =
        range.map(|position| append(target, &[(slot, vec![token(slot, position)])])).collect();
    Tensor::cat(&rows, 0)
}

fn off(found: &Tensor, expected: &Tensor) -> f64 {
    (found - expected).abs().max().double_value(&[])
}

#[test]
#[cfg_attr(not(feature = "kernels"), ignore = "rows have the same bits in every batch with kernels only")]
fn a_rejected_block_leaves_no_trace() {
    let _no_grad = tch::no_grad_guard();
    let dir = hybrid();
    for past in PROMPTS {
        // Never drafted: every token of the block on its own.
        let mut plain = load(dir.path(), Kind::Float);
        let _ = append(&mut plain, &[(1, tokens(1, 0..past))]);
        let expected = step(&mut plain, 1, past..past + BLOCK + MORE);
        let row = |from: usize, count: usize| expected.narrow(0, from as i64, count as i64);

        for kept in 0..=BLOCK {
            let mut target = load(dir.path(), Kind::Float);
            let _ = append(&mut target, &[(1, tokens(1, 0..past))]);
            // The accepted tokens, then others, which are rejected.
            let mut block = tokens(1, past..past + kept);
            block.extend((past + kept..past + BLOCK).map(|position| other_token(1, position)));
            let verified = append(&mut target, &[(1, block)]);
            assert!(verified.narrow(0, 0, kept as i64).equal(&row(0, kept)), "{past}: block, {kept} kept");
            target.truncate(1, past + kept);
            let next = append(&mut target, &[(1, tokens(1, past + kept..past + kept + MORE))]);
            assert!(next.equal(&row(kept, MORE)), "{past}: behind {kept} kept");
        }
    }
}

/// Blocks follow each other, each is cut at another length, and the sequences of a batch are at other ones.
#[test]
#[cfg_attr(not(feature = "kernels"), ignore = "rows have the same bits in every batch with kernels only")]
fn cycles_of_many_sequences_equal_steps_of_each_alone() {
    let _no_grad = tch::no_grad_guard();
    let dir = hybrid();
    let past = [70, 3, 64];
    let cuts = [[3, 1, 12], [12, 12, 1], [1, 7, 2], [5, 5, 5], [2, 11, 12], [1, 1, 1]];
    let mut target = load(dir.path(), Kind::Float);
    let prompts: Vec<(usize, Vec<i64>)> = (0..3).map(|slot| (slot, tokens(slot, 0..past[slot]))).collect();
    let _ = append(&mut target, &prompts);
    let mut plain = load(dir.path(), Kind::Float);
    for (slot, tokens) in prompts {
        let _ = append(&mut plain, &[(slot, tokens)]);
    }
    let mut len = past;
    for (cycle, cuts) in cuts.into_iter().enumerate() {
        // Some cycles have blocks of several lengths, and sequences in another order.
        let widths = if cycle % 2 == 0 { [12; 3] } else { [12, 12, 5.max(cuts[2])] };
        let order = if cycle % 3 == 0 { [0, 1, 2] } else { [2, 0, 1] };
        let parts: Vec<(usize, Vec<i64>)> = order
            .into_iter()
            .map(|slot| {
                let mut block = tokens(slot, len[slot]..len[slot] + cuts[slot]);
                block.extend((cuts[slot]..widths[slot]).map(|at| other_token(slot, len[slot] + at)));
                (slot, block)
            })
            .collect();
        let found = append(&mut target, &parts);
        let mut first = 0;
        for (slot, block) in parts {
            let expected = step(&mut plain, slot, len[slot]..len[slot] + cuts[slot]);
            assert!(found.narrow(0, first, cuts[slot] as i64).equal(&expected), "cycle {cycle}, slot {slot}");
            first += block.len() as i64;
            len[slot] += cuts[slot];
            target.truncate(slot, len[slot]);
        }
    }
    // A slot starts again from nothing.
    target.truncate(1, 0);
    plain.truncate(2, 0);
    let again = append(&mut target, &[(1, tokens(5, 0..40))]);
    assert!(again.equal(&append(&mut plain, &[(2, tokens(5, 0..40))])));
}

/// Pieces of a prompt end within chunks of 64 tokens, so that sums have another order.
#[test]
fn a_prompt_in_pieces_computes_what_it_computes_at_once() {
    let _no_grad = tch::no_grad_guard();
    let dir = hybrid();
    let mut target = load(dir.path(), Kind::Float);
    let whole = append(&mut target, &[(0, tokens(0, 0..330))]);
    for pieces in [vec![100, 230], vec![64, 64, 64, 64, 74], vec![1, 2, 62, 1, 199, 65], vec![5; 66]] {
        let (mut at, mut rows) = (0, vec![]);
        for count in pieces {
            rows.push(append(&mut target, &[(1, tokens(0, at..at + count))]));
            at += count;
        }
        target.truncate(1, 0);
        let found = Tensor::cat(&rows, 0);
        let largest = whole.abs().max().double_value(&[]);
        // The tolerance of the comparison with transformers.
        assert!(off(&found, &whole) < 1e-4 * largest, "{:e} of {largest}", off(&found, &whole));
    }
}

/// In bfloat16, a rolled-back sequence goes on as one that was never drafted for.
#[test]
fn a_rollback_in_bfloat16_stays_within_rounding() {
    let _no_grad = tch::no_grad_guard();
    let dir = hybrid();
    let (mut target, mut plain) = (load(dir.path(), Kind::BFloat16), load(dir.path(), Kind::BFloat16));
    for target in [&mut target, &mut plain] {
        let _ = append(target, &[(0, tokens(0, 0..70))]);
    }
    let mut block = tokens(0, 70..74);
    block.extend((74..80).map(|position| other_token(0, position)));
    let _ = append(&mut target, &[(0, block)]);
    target.truncate(0, 74);
    let _ = append(&mut plain, &[(0, tokens(0, 70..74))]);
    let [found, expected] = [&mut target, &mut plain]
        .map(|target| append(target, &[(0, tokens(0, 74..84))]).to_kind(Kind::Float));
    let largest = expected.abs().max().double_value(&[]);
    assert!(off(&found, &expected) < 0.05 * largest, "{:e} of {largest}", off(&found, &expected));
}

#[test]
fn limits_are_told() {
    let _no_grad = tch::no_grad_guard();
    let dir = hybrid();
    let mut target = load(dir.path(), Kind::Float);
    assert_eq!(target.max_rollback(), Some(63));
    assert!(target.as_tree_target().is_none());
    // Three layers: two states of 4 · 16 · 32, inputs of 66 tokens and gates of 63.
    let states = 3 * 4 * (2 * 4 * 16 * 32 + 66 * 192 + 2 * 63 * 4);
    let attention = 2 * 2 * 16 * 4;
    // Rows of keys and values have room for 256 tokens at least.
    for tokens in [256, 1024] {
        assert_eq!(target.kv_cache_bytes(tokens), states + tokens as u64 * attention);
    }
    // Blocks of 63 tokens can be cut off whole, the prompt before them no more.
    let _ = append(&mut target, &[(0, tokens(0, 0..100))]);
    let _ = append(&mut target, &[(0, tokens(0, 100..163))]);
    target.truncate(0, 100);
    let cut = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| target.truncate(0, 99)));
    let told = cut.unwrap_err().downcast::<String>().unwrap();
    assert!(told.contains("kept for 100 to 163 tokens, and not for 99"), "{told}");
}
