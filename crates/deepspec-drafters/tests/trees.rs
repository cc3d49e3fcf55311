//! Trees of block drafters and P-EAGLE: nodes are the likeliest paths by the distributions that chains are drafted by, and
//! verification keeps the target's law.

mod common;

use std::path::Path;

use common::laws::{
    SLOTS, VOCAB, blocks, chi_square, decoder, drafter, drafter_of, dspark_v4, law, peagle, reduced_vocab,
    taps, target,
};
use deepspec_core::SlotTarget;
use deepspec_drafters::{
    BackboneDrafter, BlockProposerOf, Convolution, DFlash2Settings, DSpark, DSparkSettings, DominoSettings,
    DraftModel, Drafter, DrafterKind, DrafterOptions, GruSettings, MarkovKind, MarkovSettings,
    PEagleProposer, XPressSettings,
};
use deepspec_engine::{
    Completion, Context, Cycle, DraftRequest, DraftSampling, Engine, EngineOptions, ModelInput, ModelOutput,
    Proposal, Proposer, Request, Sampling, SamplingBatch, Target, TreeBudget, TreeTarget, VerifyRule,
};
use deepspec_models::{TargetModel, TargetOptions};
use deepspec_ops::DraftTree;
use deepspec_testkit::{noise, tiny};
use tch::{Device, Kind, Tensor};

const ANCHORS: [i64; 2] = [3, 8];

fn dspark(markov: Option<MarkovKind>, causal: bool) -> DSparkSettings {
    let slots = if markov.is_some() { SlotTarget::AnchorPredicts } else { SlotTarget::FillIn };
    let blocks = deepspec_drafters::BlockSpec { causal, ..blocks(slots) };
    let markov = markov.map(|kind| MarkovSettings { kind, rank: 8 });
    DSparkSettings { blocks, markov, confidence: None }
}

fn dflash2() -> DFlash2Settings {
    let convolution = Convolution::default();
    DFlash2Settings { blocks: blocks(SlotTarget::FillIn), convolution, selector_rank: 8, selector_top_k: 4 }
}

fn domino() -> DominoSettings {
    DominoSettings {
        blocks: blocks(SlotTarget::AnchorPredicts),
        gru: GruSettings { hidden_size: 8, rank: 8 },
    }
}

fn xpress() -> XPressSettings {
    XPressSettings {
        blocks: blocks(SlotTarget::FillIn),
        rank: 8,
        mlp_ratio: 2,
        num_passes: 2,
        convolution: None,
    }
}

/// Contexts of 5 and 7 tokens in slots 0 and 1.
fn context() -> Context {
    let rows = 5 + 7;
    let states = Tensor::from_slice(&noise(4, rows * 2 * 32)).view([rows as i64, 2 * 32]);
    let tokens = Tensor::arange(rows as i64, (Kind::Int64, Device::Cpu)).remainder(VOCAB as i64);
    Context {
        captured_states: states,
        hidden: None,
        next: tokens.shallow_clone(),
        tokens,
        chunks: vec![(0, 5), (1, 7)],
    }
}

/// Lets a copy of the drafter without context answer a request behind [`ANCHORS`] with these uniforms `[2, 4]`.
fn ask<R>(
    drafter: &dyn Drafter,
    temperature: f64,
    uniforms: &Tensor,
    answer: impl FnOnce(Box<dyn Drafter>, &DraftRequest) -> R,
) -> R {
    let sampling = SamplingBatch::new(vec![Sampling::new(temperature, 1); 2], Device::Cpu);
    let request = DraftRequest {
        context: &context(),
        slots: &[0, 1],
        anchors: &Tensor::from_slice(&ANCHORS),
        uniforms,
        sampling: &sampling,
    };
    answer(drafter.share(2), &request)
}

fn chains(drafter: &dyn Drafter, temperature: f64, uniforms: &Tensor) -> Proposal {
    ask(drafter, temperature, uniforms, |mut drafter, request| drafter.propose(request))
}

fn any_uniforms() -> Tensor {
    Tensor::full([2, 4], 0.5, (Kind::Double, Device::Cpu))
}

/// Distributions `[γ, V]` of the chain behind slot `slot`'s anchor that is forced to draft `path` first.
fn laws_behind(drafter: &dyn Drafter, slot: usize, path: &[i64], temperature: f64) -> Tensor {
    let (uniforms, slot) = (any_uniforms(), slot as i64);
    let laws = |uniforms: &Tensor| {
        chains(drafter, temperature, uniforms).probs.expect("drawn above temperature 0").get(slot)
    };
    for (k, token) in path.iter().enumerate() {
        let law = laws(&uniforms).narrow(0, k as i64, 1);
        let forcing = common::forcing(&law, &[*token]);
        uniforms.narrow(0, slot, 1).narrow(1, k as i64, 1).copy_(&forcing);
    }
    laws(&uniforms)
}

fn trees(drafter: &dyn Drafter, budget: TreeBudget, depth: usize, temperature: f64) -> Vec<DraftTree> {
    ask(drafter, temperature, &any_uniforms(), |mut drafter, request| {
        drafter.propose_trees(request, budget, depth)
    })
}

fn paths(tree: &DraftTree) -> Vec<Vec<i64>> {
    let mut paths = vec![vec![]];
    for (&parent, &token) in tree.parents().iter().zip(tree.tokens()) {
        let path = [paths[parent].as_slice(), &[token]].concat();
        paths.push(path);
    }
    paths
}

/// Checks nodes against all paths: every path is scored by the chain's distributions, and the tree has the likeliest.
fn nodes_are_the_likeliest_paths(name: &str, drafter: &dyn Drafter) {
    let gamma = drafter.draft_len();
    let greedy = chains(drafter, 0.0, &any_uniforms()).tokens;
    let greedy: Vec<Vec<i64>> = Vec::try_from(greedy).unwrap();
    let (mut scattered, mut own) = (false, vec![]);
    for temperature in [0.0, 0.7] {
        let budget = TreeBudget { nodes: 9, width: 3 };
        for (slot, tree) in trees(drafter, budget, 2, temperature).iter().enumerate() {
            assert_eq!((tree.len(), tree.max_depth() <= 2), (9, true), "{name}");
            let scale = if temperature == 0.0 { 1.0 } else { temperature };
            // The three likeliest first tokens, and the three likeliest behind each.
            let ranked = |score: f64, prefix: &[i64]| {
                let law = laws_behind(drafter, slot, prefix, scale).get(prefix.len() as i64);
                let mut all: Vec<(f64, Vec<i64>)> = (0..VOCAB as i64)
                    .map(|token| (score + law.double_value(&[token]).ln(), [prefix, &[token]].concat()))
                    .collect();
                all.sort_by(|a, b| b.0.total_cmp(&a.0));
                all.truncate(3);
                all
            };
            let first = ranked(0.0, &[]);
            let second = first.iter().flat_map(|(score, path)| ranked(*score, path)).collect::<Vec<_>>();
            let mut expected = [first, second].concat();
            expected.sort_by(|a, b| b.0.total_cmp(&a.0));
            let expected: Vec<Vec<i64>> = expected.into_iter().take(9).map(|(_, path)| path).collect();
            let found = paths(tree)[1..].to_vec();
            assert_eq!(found, expected, "{name}, slot {slot}, temperature {temperature}");
            scattered |= tree.parents().iter().filter(|&&parent| parent > 0).count() > 3;
            own.push(found);
        }
        // Width 1 is the chain that is drafted greedily.
        let narrow = trees(drafter, TreeBudget { nodes: gamma, width: 1 }, gamma, temperature);
        assert_eq!(narrow.iter().map(DraftTree::tokens).collect::<Vec<_>>(), greedy, "{name}");
        assert!(narrow.iter().all(|tree| tree.max_depth() == gamma), "{name}");
    }
    assert!(scattered && own[0] != own[1], "{name}: the trees show little");
}

#[test]
fn nodes_are_the_likeliest_paths_of_the_chains_distributions() {
    use deepspec_drafters::{DFlash2, DSparkV4, Domino, PEagle, XPress};
    fn check<K: DrafterKind>(name: &str, settings: K::Settings, _: fn(DraftModel<K>)) {
        let dir = tempfile::tempdir().unwrap();
        tiny::qwen3(dir.path(), VOCAB);
        let drafter = K::into_drafter(drafter::<K>(dir.path(), settings), 2);
        nodes_are_the_likeliest_paths(name, drafter.as_ref());
    }
    let _no_grad = tch::no_grad_guard();
    for kind in [MarkovKind::Vanilla, MarkovKind::Gated, MarkovKind::Rnn] {
        check(&format!("DSpark, {kind:?}"), dspark(Some(kind), false), |_: DSpark| {});
    }
    check("DFlash", dspark(None, false), |_: DSpark| {});
    check("causal blocks", dspark(None, true), |_: DSpark| {});
    check("DFlash 2", dflash2(), |_: DFlash2| {});
    check("Domino", domino(), |_: Domino| {});
    check("xPress", xpress(), |_: XPress| {});
    check("DSpark of DeepSeek-V4", dspark_v4(), |_: DSparkV4| {});
    check("P-EAGLE", peagle(None), |_: PEagle| {});
}

#[test]
fn nodes_of_a_reduced_vocabulary_are_tokens_of_the_target() {
    let _no_grad = tch::no_grad_guard();
    let dir = tempfile::tempdir().unwrap();
    tiny::qwen3(dir.path(), VOCAB);
    let vocab = reduced_vocab();
    let drafter = PEagleProposer::new(
        drafter_of(dir.path(), decoder(dir.path()), Some(&vocab), peagle(Some(&vocab))),
        2,
    );
    nodes_are_the_likeliest_paths("P-EAGLE, reduced vocabulary", &drafter);
    // More nodes than there are tokens.
    for tree in trees(&drafter, TreeBudget { nodes: 2 * VOCAB, width: VOCAB }, 1, 0.0) {
        let mut tokens = tree.tokens().to_vec();
        tokens.sort_unstable();
        assert_eq!(tokens, [1, 2, 3, 5, 6, 7, 9]);
    }
}

/// A target that takes the rows of a tree for a chain.
struct WithoutMask(TargetModel);

impl Target for WithoutMask {
    fn forward(&mut self, input: &ModelInput) -> ModelOutput {
        self.0.forward(input)
    }
    fn logits(&self, hidden: &Tensor) -> Tensor {
        self.0.logits(hidden)
    }
    fn truncate(&mut self, slot: usize, len: usize) {
        self.0.truncate(slot, len);
    }
    fn vocab_size(&self) -> usize {
        self.0.vocab_size()
    }
    fn device(&self) -> Device {
        self.0.device()
    }
    fn as_tree_target(&mut self) -> Option<&mut dyn TreeTarget> {
        Some(self)
    }
}

impl TreeTarget for WithoutMask {
    fn forward_trees(&mut self, input: &ModelInput, _: &[DraftTree]) -> ModelOutput {
        self.0.forward(input)
    }
    fn keep_rows(&mut self, slot: usize, past_len: usize, runs: &[(i64, i64)]) {
        self.0.keep_rows(slot, past_len, runs);
    }
}

/// χ² of outputs with trees: as they are, and without the mask.
fn chi_square_ratios<K: BackboneDrafter>(settings: K::Settings) -> [f64; 2] {
    let _guard = tch::no_grad_guard();
    let dir = tempfile::tempdir().unwrap();
    tiny::qwen3(dir.path(), VOCAB);
    let law = law(&mut target(dir.path(), &[]));
    let rule = (VerifyRule::Tree(TreeBudget { nodes: 8, width: 3 }), 3_000);
    let proposer = || BlockProposerOf::new(drafter::<K>(dir.path(), settings.clone()), SLOTS);
    let right = chi_square(target(dir.path(), &taps()), proposer(), rule, &law);
    let wrong = chi_square(WithoutMask(target(dir.path(), &taps())), proposer(), rule, &law);
    eprintln!("χ² of trees is {right:.2} and {wrong:.2} times its quantile");
    [right, wrong]
}

fn assert_lossless([right, wrong]: [f64; 2]) {
    assert!(right < 1.0, "χ² is {right:.2} times its 99.9 % quantile");
    assert!(wrong > 1.5, "a missing mask goes unnoticed: χ² is {wrong:.2} times its quantile");
}

#[test]
fn with_trees_of_dspark_the_first_tokens_have_the_targets_joint_law() {
    assert_lossless(chi_square_ratios::<<DSpark as Modules>::Of>(dspark(Some(MarkovKind::Rnn), false)));
}

#[test]
fn with_trees_of_marginals_the_first_tokens_have_the_targets_joint_law() {
    assert_lossless(chi_square_ratios::<<DSpark as Modules>::Of>(dspark(None, true)));
}

/// Names the modules of a model.
trait Modules {
    type Of: BackboneDrafter;
}

impl<K: BackboneDrafter> Modules for DraftModel<K> {
    type Of = K;
}

/// Answers at temperature 0 of the embedded target with a drafter of the repository.
fn answers(drafter: &str, options: EngineOptions) -> Vec<Completion> {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets");
    let load = DrafterOptions { device: Device::Cpu, kind: Kind::Float, slots: options.slots, target: None };
    let drafter: Box<dyn Drafter> = deepspec_drafters::load_drafter(&assets.join(drafter), &load)
        .unwrap_or_else(|error| panic!("{error}"));
    let load = TargetOptions {
        device: Device::Cpu,
        kind: Kind::Float,
        slots: options.slots,
        taps: drafter.taps().to_vec(),
    };
    let target = TargetModel::load(&assets.join("tiny-target"), &load).unwrap();
    let request = |i: i64| Request {
        id: i.to_string(),
        prompt: (0..6 + i).map(|k| 10 + (k * 53 + i * 17) % 900).collect(),
        sampling: Sampling::new(0.0, 0),
        max_new_tokens: 40,
        stop_ids: vec![],
    };
    Engine::new(target, Some(drafter), options).run((0..12).map(request).collect(), |_| {}).unwrap()
}

#[test]
fn at_temperature_0_a_tree_of_width_1_is_the_greedy_chain_and_wider_trees_accept_more() {
    let options = EngineOptions {
        slots: 3,
        context: 128,
        max_draft_tokens: None,
        draft_sampling: DraftSampling::Greedy,
        verify_rule: VerifyRule::Token,
        counts_overrun: true,
    };
    for drafter in ["tiny-dspark", "tiny-dflash2"] {
        let with = |nodes, width| {
            let verify_rule = VerifyRule::Tree(TreeBudget { nodes, width });
            answers(drafter, EngineOptions { verify_rule, ..options })
        };
        let (chain, narrow, wide) = (answers(drafter, options), with(64, 1), with(64, 8));
        for ((chain, narrow), wide) in chain.iter().zip(&narrow).zip(&wide) {
            assert_eq!((&chain.tokens, &chain.tokens), (&narrow.tokens, &wide.tokens), "{drafter}");
            let as_tree =
                |cycle: &Cycle| Cycle { nodes: cycle.proposed, confidence: vec![], ..cycle.clone() };
            assert_eq!(chain.cycles.iter().map(as_tree).collect::<Vec<_>>(), narrow.cycles, "{drafter}");
        }
        let cycles = |done: &[Completion]| done.iter().map(|done| done.cycles.len()).sum::<usize>();
        let [chain, wide] = [&chain, &wide].map(|done| cycles(done));
        assert!(wide < chain, "{drafter}: {wide} cycles with trees, {chain} with chains");
    }
}
