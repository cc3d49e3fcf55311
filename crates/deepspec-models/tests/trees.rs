//! The target's pass over drafted trees: every path has the states of the path alone, and accepted rows continue the sequence.

use std::path::Path;

use deepspec_core::Tap;
use deepspec_engine::{ModelInput, ModelOutput, Target};
use deepspec_models::{TargetModel, TargetOptions};
use deepspec_ops::DraftTree;
use deepspec_testkit::tiny;
use tch::{Device, Kind, Tensor};

/// Tokens of the two sequences before their trees. Windows of the tiny models are 24 and 300 tokens.
const PAST: [usize; 2] = [40, 310];

fn load(dir: &Path) -> TargetModel {
    let taps = Tap::from_layer_ids([-1, 0, 1]).unwrap();
    TargetModel::load(dir, &TargetOptions { device: Device::Cpu, kind: Kind::Float, slots: 2, taps }).unwrap()
}

fn token(number: usize) -> i64 {
    3 + (number * 37 % 600) as i64
}

/// The anchor's children are 11, 12 and 13. Paths: 11 21 31, 11 22, 12 21 and 13 41 42 43.
fn tree() -> DraftTree {
    let mut tree = DraftTree::default();
    for (parent, token) in
        [(0, 11), (0, 12), (1, 21), (0, 13), (1, 22), (2, 21), (4, 41), (3, 31), (7, 42), (9, 43)]
    {
        tree.add(parent, token);
    }
    tree
}

/// Row, parent first, of every token of a path.
fn rows_of(path: &[i64]) -> Vec<usize> {
    let tree = tree();
    let child = |row: &mut usize, &token: &i64| {
        let node = (0..tree.len()).find(|&node| tree.parents()[node] == *row && tree.tokens()[node] == token);
        *row = node.unwrap() + 1;
        Some(*row)
    };
    std::iter::once(0).chain(path.iter().scan(0, child)).collect()
}

/// Appends each slot's tokens to its sequence.
fn append(target: &mut TargetModel, tokens: &[(usize, Vec<i64>)]) -> ModelOutput {
    let chunks: Vec<(usize, usize)> = tokens.iter().map(|(slot, tokens)| (*slot, tokens.len())).collect();
    let all: Vec<i64> = tokens.iter().flat_map(|(_, tokens)| tokens.clone()).collect();
    target.forward(&ModelInput { chunks: &chunks, tokens: Tensor::from_slice(&all) })
}

fn start(target: &mut TargetModel) {
    for (slot, past) in PAST.into_iter().enumerate() {
        let _ = append(target, &[(slot, (0..past).map(|number| token(number + slot)).collect())]);
    }
}

fn anchor(slot: usize) -> i64 {
    7 + slot as i64
}

/// Both slots' trees in one pass; slot 1 is first in the batch.
fn run_trees(target: &mut TargetModel) -> ModelOutput {
    let of_slot = |slot| [&[anchor(slot)], tree().tokens()].concat();
    let tokens = Tensor::from_slice(&[of_slot(1), of_slot(0)].concat());
    let rows = 1 + tree().len();
    let input = ModelInput { chunks: &[(1, rows), (0, rows)], tokens };
    target.as_tree_target().unwrap().forward_trees(&input, &[tree(), tree()])
}

fn assert_near(found: &Tensor, expected: &Tensor, what: &str) {
    let difference = (found - expected).abs().max().double_value(&[]);
    assert!(difference < 2e-4, "{what}: {difference:.1e} apart");
}

fn check(dir: &Path, name: &str) {
    let _no_grad = tch::no_grad_guard();
    let mut target = load(dir);
    start(&mut target);
    let out = run_trees(&mut target);
    let paths: [&[i64]; 5] = [&[11, 21, 31], &[11, 22], &[12, 21], &[13, 41, 42, 43], &[]];
    let mut alone = load(dir);
    start(&mut alone);
    for (batch, slot) in [(0, 1), (1, 0)] {
        for path in paths {
            let expected = append(&mut alone, &[(slot, [&[anchor(slot)], path].concat())]);
            alone.truncate(slot, PAST[slot]);
            let rows: Vec<i64> =
                rows_of(path).into_iter().map(|row| (batch * (1 + tree().len()) + row) as i64).collect();
            let rows = Tensor::from_slice(&rows);
            let what = format!("{name}, slot {slot}, path {path:?}");
            assert_near(&out.hidden.index_select(0, &rows), &expected.hidden, &what);
            assert_near(&out.captured_states.index_select(0, &rows), &expected.captured_states, &what);
        }
    }
    // Slot 0 accepts a path of scattered rows, and slot 1 nothing.
    let accepted = [13, 41, 42];
    let runs: Vec<(i64, i64)> = rows_of(&accepted).into_iter().map(|row| (row as i64, 1)).collect();
    target.as_tree_target().unwrap().keep_rows(0, PAST[0], &runs);
    target.truncate(1, PAST[1] + 1);
    let _ = append(&mut alone, &[(0, [&[anchor(0)][..], &accepted].concat()), (1, vec![anchor(1)])]);
    let next = [(0, vec![17, 18]), (1, vec![19])];
    let (found, expected) = (append(&mut target, &next), append(&mut alone, &next));
    assert_near(&found.hidden, &expected.hidden, &format!("{name}, after the trees"));
    // Trees begin behind accepted rows, too.
    for target in [&mut target, &mut alone] {
        target.truncate(0, PAST[0] + accepted.len() + 1);
        target.truncate(1, PAST[1] + 1);
    }
    assert_near(
        &run_trees(&mut target).hidden,
        &run_trees(&mut alone).hidden,
        &format!("{name}, next trees"),
    );
}

#[test]
fn paths_of_a_tree_have_the_states_of_the_paths_alone() {
    for family in ["llama", "gemma4", "mistral", "gemma3_text", "granite", "qwen3_moe", "gpt_oss"] {
        let dir = tempfile::tempdir().unwrap();
        match family {
            "llama" => tiny::llama(dir.path()),
            "gemma4" => tiny::gemma4(dir.path(), 1024),
            other => tiny::target(dir.path(), other),
        }
        check(dir.path(), family);
    }
    check(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-target"), "the embedded Qwen3");
}

/// A pass that takes the rows of a tree for a chain is noticed by the comparison above.
#[test]
fn a_chain_of_the_same_tokens_has_other_states() {
    let _no_grad = tch::no_grad_guard();
    let dir = tempfile::tempdir().unwrap();
    tiny::llama(dir.path());
    let (mut target, mut chain) = (load(dir.path()), load(dir.path()));
    start(&mut target);
    start(&mut chain);
    let tokens = |slot| [&[anchor(slot)], tree().tokens()].concat();
    let of_chain = append(&mut chain, &[(1, tokens(1)), (0, tokens(0))]).hidden;
    let of_tree = run_trees(&mut target).hidden;
    assert_near(&of_tree.narrow(0, 0, 2), &of_chain.narrow(0, 0, 2), "the first rows");
    assert!((of_tree - of_chain).abs().max().double_value(&[]) > 0.05);
}
