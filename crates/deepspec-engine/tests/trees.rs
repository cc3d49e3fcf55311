//! Verification of trees is lossless, and a tree of width 1 is a greedy chain.

mod common;

use common::law::{LENGTH, exact_law, options, requests, samples};
use common::{GAMMA, PROMPT, ToyDrafter, ToyTarget, V, extended, grow, prompt_prefix, target_logits};
use deepspec_core::rng::{Purpose, Stream};
use deepspec_engine::{
    Completion, Cycle, DraftRequest, Engine, EngineError, EngineOptions, ModelInput, ModelOutput, Proposal,
    Proposer, Request, Sampling, Target, TreeBudget, VerifyRule,
};
use deepspec_ops::DraftTree;
use deepspec_testkit::distribution::{chi_square_ratio, count_outputs};
use tch::{Device, Tensor};

/// All paths of up to [`GAMMA`] tokens.
const WHOLE_TREE: usize = (V + V * V + V * V * V) as usize;

fn tree_options(slots: usize, nodes: usize, width: usize) -> EngineOptions {
    EngineOptions { verify_rule: VerifyRule::Tree(TreeBudget { nodes, width }), ..options(slots) }
}

fn run(options: EngineOptions, drafted: bool, requests: Vec<Request>) -> Vec<Completion> {
    let drafter = drafted.then(|| ToyDrafter::new(options.slots));
    Engine::new(ToyTarget::new(options.slots), drafter, options).run(requests, |_| {}).unwrap()
}

#[test]
fn with_trees_the_first_tokens_have_the_targets_joint_law() {
    let short = EngineOptions { max_draft_tokens: Some(2), ..tree_options(64, 7, 3) };
    let settings: [(&str, EngineOptions, Sampling, &[i64]); 7] = [
        ("5 nodes", tree_options(64, 5, 8), Sampling::new(1.0, 61), &[]),
        ("1 node", tree_options(64, 1, 8), Sampling::new(1.0, 62), &[]),
        ("width 1", tree_options(64, 3, 1), Sampling::new(1.0, 63), &[]),
        ("temperature 0.6", tree_options(64, 12, 2), Sampling::new(0.6, 64), &[]),
        ("top-p", tree_options(64, 9, 3), Sampling { top_p: 0.9, ..Sampling::new(0.7, 65) }, &[]),
        ("stop token", tree_options(64, 12, 3), Sampling::new(1.0, 66), &[3]),
        ("depth 2", short, Sampling::new(1.0, 67), &[]),
    ];
    for (what, options, sampling, stop_ids) in settings {
        let done = run(options, true, requests(samples(), sampling, LENGTH + 2, stop_ids));
        assert!(done.iter().any(|done| done.cycles.iter().any(|cycle| cycle.accepted > 0)), "{what}");
        let counts =
            count_outputs(done.into_iter().map(|done| done.tokens.into_iter().take(LENGTH).collect()));
        let ratio = chi_square_ratio(&counts, &exact_law(sampling, stop_ids));
        assert!(ratio < 1.0, "{what}: χ² is {ratio:.2} times its 99.9 % quantile");
    }
}

/// A rule of verification: the tokens that it commits behind an anchor, given the tree, the target's distribution behind every row, and
/// uniforms.
type Rule = fn(&DraftTree, &[[f64; V as usize]], &mut dyn FnMut() -> f64) -> Vec<i64>;

fn draw(law: &[f64; V as usize], uniform: f64) -> i64 {
    let mut rest = uniform;
    let inside = |p: &f64| {
        rest -= p;
        rest < 0.0
    };
    law.iter().position(inside).unwrap_or(V as usize - 1) as i64
}

/// The engine's rule.
fn right(tree: &DraftTree, laws: &[[f64; V as usize]], uniform: &mut dyn FnMut() -> f64) -> Vec<i64> {
    let drawn: Vec<i64> = laws.iter().map(|law| draw(law, uniform())).collect();
    let path = tree.accept(&drawn);
    path.rows.iter().map(|row| tree.tokens()[row - 1]).chain([path.next]).collect()
}

/// Draws another token if no child has the first one.
fn with_a_second_draw(
    tree: &DraftTree,
    laws: &[[f64; V as usize]],
    uniform: &mut dyn FnMut() -> f64,
) -> Vec<i64> {
    let mut tokens = right(tree, laws, uniform);
    tokens.pop();
    let child_of = |row: usize, token: i64| {
        (0..tree.len()).find(|&node| tree.parents()[node] == row && tree.tokens()[node] == token)
    };
    let last = tokens.iter().fold(0, |row, &token| child_of(row, token).unwrap() + 1);
    tokens.push(draw(&laws[last], uniform()));
    tokens
}

/// Accepts one child after the other with its probability, and draws from the whole distribution if none is accepted.
fn child_by_child(
    tree: &DraftTree,
    laws: &[[f64; V as usize]],
    uniform: &mut dyn FnMut() -> f64,
) -> Vec<i64> {
    let (mut at, mut tokens) = (0, vec![]);
    'rows: loop {
        for node in (0..tree.len()).filter(|&node| tree.parents()[node] == at) {
            let token = tree.tokens()[node];
            if uniform() < laws[at][token as usize] {
                tokens.push(token);
                at = node + 1;
                continue 'rows;
            }
        }
        tokens.push(draw(&laws[at], uniform()));
        return tokens;
    }
}

/// χ² of the first tokens under a rule, divided by its 99.9 % quantile. A short version of the engine's loop, one sample after the other.
fn ratio_of(rule: Rule, sampling: Sampling) -> f64 {
    let law_behind = |prefix: i64| -> [f64; V as usize] {
        let weights = target_logits(prefix).map(|logit| f64::from(logit).exp());
        weights.map(|weight| weight / weights.iter().sum::<f64>())
    };
    let output = |sample: usize| {
        let stream = Stream::new(sampling.seed, &format!("sample-{sample}"));
        let mut drawn = 0;
        let mut uniform = || {
            drawn += 1;
            stream.uniform(0, Purpose::Target, drawn)
        };
        let mut output = vec![draw(&law_behind(prompt_prefix()), uniform())];
        while output.len() < LENGTH {
            let start = output.iter().fold(prompt_prefix(), |prefix, &token| extended(prefix, token));
            let tree = grow(start, TreeBudget { nodes: 6, width: 2 }, GAMMA, 1.0);
            let mut rows = vec![start];
            for (&parent, &token) in tree.parents().iter().zip(tree.tokens()) {
                rows.push(extended(rows[parent], token));
            }
            let laws: Vec<_> = rows.into_iter().map(law_behind).collect();
            output.extend(rule(&tree, &laws, &mut uniform));
        }
        output.truncate(LENGTH);
        output
    };
    chi_square_ratio(&count_outputs((0..samples()).map(output)), &exact_law(sampling, &[]))
}

#[test]
fn the_law_tells_wrong_verifications_of_trees_apart() {
    let sampling = Sampling::new(1.0, 71);
    let (right, second, by_child) = (
        ratio_of(right, sampling),
        ratio_of(with_a_second_draw, sampling),
        ratio_of(child_by_child, sampling),
    );
    assert!(right < 1.0, "the right verification: χ² is {right:.2} times its 99.9 % quantile");
    assert!(second > 1.5, "a second draw goes unnoticed: χ² is {second:.2} times its quantile");
    assert!(
        by_child > 1.5,
        "acceptance child by child goes unnoticed: χ² is {by_child:.2} times its quantile"
    );
}

#[test]
fn at_temperature_0_trees_are_plain_decoding() {
    for (slots, nodes, width) in [(1, 6, 8), (4, 6, 2), (16, 20, 3)] {
        for stop_ids in [&[][..], &[3]] {
            let mut asked = requests(20, Sampling::new(0.0, 5), 12, stop_ids);
            for (i, request) in asked.iter_mut().enumerate() {
                request.prompt.extend([i as i64 % V, i as i64 / V % V]);
            }
            let tokens = |done: Vec<Completion>| done.into_iter().map(|done| done.tokens).collect::<Vec<_>>();
            let plain = tokens(run(options(1), false, asked.clone()));
            assert_eq!(plain, tokens(run(tree_options(slots, nodes, width), true, asked)), "{slots} slots");
        }
    }
}

/// A tree of width 1 drafts the tokens of a greedy chain, and accepts as many of them.
#[test]
fn a_tree_of_width_1_is_a_greedy_chain_cycle_by_cycle() {
    for (slots, stop_ids, depth) in [(1, &[][..], None), (4, &[3], None), (4, &[], Some(2))] {
        let mut asked = requests(40, Sampling::new(0.0, 9), 16, stop_ids);
        for (i, request) in asked.iter_mut().enumerate() {
            request.prompt.extend([i as i64 % V, i as i64 / V % V]);
        }
        let cut = |options| EngineOptions { max_draft_tokens: depth, ..options };
        let chain = run(cut(options(slots)), true, asked.clone());
        let tree = run(cut(tree_options(slots, GAMMA, 1)), true, asked);
        assert!(chain.iter().flat_map(|done| &done.cycles).any(|cycle| cycle.accepted > 1));
        for (chain, tree) in chain.iter().zip(&tree) {
            let as_tree =
                |cycle: &Cycle| Cycle { nodes: cycle.proposed, confidence: vec![], ..cycle.clone() };
            let expected: Vec<Cycle> = chain.cycles.iter().map(as_tree).collect();
            assert_eq!((&expected, &chain.tokens), (&tree.cycles, &tree.tokens), "{}", chain.id);
        }
    }
}

/// A tree with all paths contains every token that the target can draw.
#[test]
fn a_whole_tree_accepts_a_node_of_every_depth() {
    for temperature in [0.0, 1.0] {
        let done = run(
            tree_options(3, WHOLE_TREE, V as usize),
            true,
            requests(30, Sampling::new(temperature, 8), 13, &[]),
        );
        for cycle in done.iter().flat_map(|done| &done.cycles) {
            let Cycle { proposed, nodes, accepted, committed, .. } = *cycle;
            let depth = GAMMA as u32;
            assert_eq!(
                (proposed, nodes as usize, accepted, committed),
                (depth, WHOLE_TREE, depth, depth + 1)
            );
        }
    }
}

#[test]
fn a_sample_does_not_depend_on_its_batch() {
    let asked = requests(50, Sampling::new(1.0, 7), 9, &[3]);
    let alone: Vec<Completion> =
        asked.iter().flat_map(|request| run(tree_options(1, 8, 3), true, vec![request.clone()])).collect();
    for slots in [4, 16] {
        for (a, b) in alone.iter().zip(run(tree_options(slots, 8, 3), true, asked.clone())) {
            assert_eq!((&a.id, &a.tokens, &a.cycles, a.finish), (&b.id, &b.tokens, &b.cycles, b.finish));
        }
    }
}

/// A target without trees.
struct Chains(ToyTarget);

impl Target for Chains {
    fn forward(&mut self, feed: &ModelInput) -> ModelOutput {
        self.0.forward(feed)
    }
    fn logits(&self, hidden: &Tensor) -> Tensor {
        self.0.logits(hidden)
    }
    fn truncate(&mut self, slot: usize, len: usize) {
        self.0.truncate(slot, len);
    }
    fn vocab_size(&self) -> usize {
        V as usize
    }
    fn device(&self) -> Device {
        Device::Cpu
    }
}

/// A drafter without trees.
struct ChainDrafter(ToyDrafter);

impl Proposer for ChainDrafter {
    fn draft_len(&self) -> usize {
        GAMMA
    }
    fn reads_hidden(&self) -> bool {
        true
    }
    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        self.0.propose(request)
    }
    fn truncate(&mut self, slot: usize, len: usize) {
        self.0.truncate(slot, len);
    }
}

#[test]
fn models_without_trees_are_refused() {
    let request = Request { prompt: PROMPT.to_vec(), ..requests(1, Sampling::new(1.0, 5), 4, &[]).remove(0) };
    let options = tree_options(1, 4, 2);
    let mut engine = Engine::new(Chains(ToyTarget::new(1)), Some(ToyDrafter::new(1)), options);
    assert_eq!(engine.submit(request.clone()), Err(EngineError::NoTrees("the target verifies chains only")));
    let mut engine = Engine::new(ToyTarget::new(1), Some(ChainDrafter(ToyDrafter::new(1))), options);
    assert_eq!(engine.submit(request.clone()), Err(EngineError::NoTrees("it drafts chains only")));
    // Plain decoding needs no trees.
    let mut engine = Engine::<_, ToyDrafter>::new(Chains(ToyTarget::new(1)), None, options);
    assert_eq!(engine.run(vec![request], |_| {}).unwrap()[0].tokens.len(), 4);
}
