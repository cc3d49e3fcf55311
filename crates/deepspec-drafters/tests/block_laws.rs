//! Drafters do not change the output distribution: with them, the target samples as it does alone. This holds although DFlash 2
//! drafts candidates only, Eagle3 and P-EAGLE with a reduced vocabulary some tokens never, and although xPress and P-EAGLE draw a
//! block's tokens side by side.

mod common;

use std::fs;
use std::path::Path;

use common::laws::{
    SLOTS, VOCAB, blocks, chi_square, decoder, drafter, drafter_of, dspark_v4, law, peagle, reduced_vocab,
    taps, target,
};
use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    AssistantProposer, BlockSpec, Convolution, DFlash2Proposer, DFlash2Settings, DSparkProposer,
    DSparkSettings, DSparkV4Proposer, DominoProposer, DominoSettings, DraftDecoder, Drafter, DrafterOptions,
    Eagle3Proposer, Eagle3Settings, GruSettings, MarkovKind, MarkovSettings, MtpProposer, MtpSettings,
    PEagleProposer, XPressProposer, XPressSettings,
};
use deepspec_engine::{DraftRequest, Proposal, Proposer, VerifyRule};
use deepspec_models::ModelConfig;
use deepspec_testkit::tiny;
use tch::{Device, Kind};

/// A proposer that may report wrong sampling distributions.
struct Told<P> {
    inner: P,
    lies: bool,
}

impl<P: Proposer> Proposer for Told<P> {
    fn draft_len(&self) -> usize {
        self.inner.draft_len()
    }

    fn reads_hidden(&self) -> bool {
        self.inner.reads_hidden()
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        let proposal = self.inner.propose(request);
        let probs = match self.lies {
            // Distributions as if every token could have been sampled.
            true => Some(
                (proposal.draft_probs(proposal.tokens.size()[1], VOCAB) + 0.1) / (1.0 + 0.1 * VOCAB as f64),
            ),
            false => proposal.probs,
        };
        Proposal { probs, ..proposal }
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.inner.truncate(slot, len);
    }

    fn kv_cache_bytes(&self, tokens: usize) -> u64 {
        self.inner.kv_cache_bytes(tokens)
    }
}

/// [`chi_square_ratios_under`] token verification.
fn chi_square_ratios<P: Proposer>(proposer: impl Fn(&Path) -> P) -> [f64; 2] {
    chi_square_ratios_under(VerifyRule::Token, proposer)
}

/// [`chi_square_ratios_of`] a random Qwen3, whose folder the proposer is for.
fn chi_square_ratios_under<P: Proposer>(rule: VerifyRule, proposer: impl Fn(&Path) -> P) -> [f64; 2] {
    let dir = tempfile::tempdir().unwrap();
    tiny::qwen3(dir.path(), VOCAB);
    chi_square_ratios_of(dir.path(), &taps(), (rule, 10_000), || proposer(dir.path()))
}

/// χ² of so many outputs of this target with drafts of this proposer, divided by its 99.9 % quantile. The second one has a proposer that
/// lies about its distributions.
fn chi_square_ratios_of<P: Proposer>(
    target_dir: &Path,
    taps: &[Tap],
    samples: (VerifyRule, usize),
    proposer: impl Fn() -> P,
) -> [f64; 2] {
    let _guard = tch::no_grad_guard();
    let law = law(&mut target(target_dir, &[]));
    [false, true].map(|lies| {
        let proposer = Told { inner: proposer(), lies };
        chi_square(target(target_dir, taps), proposer, samples, &law)
    })
}

fn assert_lossless([told, lied]: [f64; 2]) {
    assert!(told < 1.0, "χ² is {told:.2} times its 99.9 % quantile");
    assert!(lied > 1.5, "a drafter that lies about its distributions is not noticed: {lied:.2}");
}

#[test]
fn with_dflash_2_the_first_tokens_have_the_targets_joint_law() {
    let settings = DFlash2Settings {
        blocks: blocks(SlotTarget::FillIn),
        convolution: Convolution::default(),
        selector_rank: 8,
        selector_top_k: 4,
    };
    assert_lossless(chi_square_ratios(|dir| DFlash2Proposer::new(drafter(dir, settings), SLOTS)));
}

#[test]
fn with_domino_the_first_tokens_have_the_targets_joint_law() {
    let gru = GruSettings { hidden_size: 8, rank: 8 };
    let settings = DominoSettings { blocks: blocks(SlotTarget::AnchorPredicts), gru };
    for rule in [VerifyRule::Token, VerifyRule::Block] {
        let proposer = |dir: &Path| DominoProposer::new(drafter(dir, settings), SLOTS);
        assert_lossless(chi_square_ratios_under(rule, proposer));
    }
}

/// Blocks as JetSpec's.
#[test]
fn with_causal_blocks_the_first_tokens_have_the_targets_joint_law() {
    let blocks = BlockSpec { causal: true, ..blocks(SlotTarget::FillIn) };
    let settings = DSparkSettings { blocks, markov: None, confidence: None };
    assert_lossless(chi_square_ratios(|dir| DSparkProposer::new(drafter(dir, settings), SLOTS)));
}

#[test]
fn with_xpress_the_first_tokens_have_the_targets_joint_law() {
    // On the layers of DFlash, and on those of DFlash 2.
    for convolution in [None, Some(Convolution::default())] {
        let settings = XPressSettings {
            blocks: blocks(SlotTarget::FillIn),
            rank: 8,
            mlp_ratio: 2,
            num_passes: 2,
            convolution,
        };
        assert_lossless(chi_square_ratios(|dir| XPressProposer::new(drafter(dir, settings), SLOTS)));
    }
}

#[test]
fn with_dspark_of_deepseek_v4_the_first_tokens_have_the_targets_joint_law() {
    assert_lossless(chi_square_ratios(|dir| DSparkV4Proposer::new(drafter(dir, dspark_v4()), SLOTS)));
}

#[test]
fn with_attention_sinks_the_first_tokens_have_the_targets_joint_law() {
    let markov = Some(MarkovSettings { kind: MarkovKind::Vanilla, rank: 8 });
    let settings = DSparkSettings { blocks: blocks(SlotTarget::AnchorPredicts), markov, confidence: None };
    assert_lossless(chi_square_ratios(|dir| {
        let plain = decoder(dir);
        let decoder = DraftDecoder { model: plain.model.with_attention_sinks().unwrap(), ..plain };
        DSparkProposer::new(drafter_of(dir, decoder, None, settings), SLOTS)
    }));
}

#[test]
fn with_mtp_1_the_first_tokens_have_the_targets_joint_law() {
    let settings = MtpSettings::default();
    assert_lossless(chi_square_ratios(|dir| {
        let model = ModelConfig::load(dir).unwrap().mtp_decoder().unwrap();
        let decoder = DraftDecoder { model, taps: vec![], ..decoder(dir) };
        MtpProposer::new(drafter_of(dir, decoder, None, settings), SLOTS)
    }));
}

#[test]
fn with_eagle3_and_a_reduced_vocabulary_the_first_tokens_have_the_targets_joint_law() {
    let (vocab, settings) = (reduced_vocab(), Eagle3Settings { ttt_length: 3, ..Eagle3Settings::default() });
    let settings = Eagle3Settings { draft_vocab_size: Some(vocab.tokens().len() as i64), ..settings };
    assert_lossless(chi_square_ratios(|dir| {
        Eagle3Proposer::new(drafter_of(dir, decoder(dir), Some(&vocab), settings), SLOTS)
    }));
}

#[test]
fn with_p_eagle_and_a_reduced_vocabulary_the_first_tokens_have_the_targets_joint_law() {
    let vocab = reduced_vocab();
    assert_lossless(chi_square_ratios(|dir| {
        PEagleProposer::new(drafter_of(dir, decoder(dir), Some(&vocab), peagle(Some(&vocab))), SLOTS)
    }));
}

#[test]
fn with_p_eagle_the_first_tokens_have_the_targets_joint_law() {
    assert_lossless(chi_square_ratios(|dir| PEagleProposer::new(drafter(dir, peagle(None)), SLOTS)));
}

/// Both models are random, so that the assistant is far from its target.
#[test]
fn with_assistants_of_gemma_4_the_first_tokens_have_the_targets_joint_law() {
    let root = tempfile::tempdir().unwrap();
    let [target, assistant] = ["target", "assistant"].map(|name| root.path().join(name));
    for dir in [&target, &assistant] {
        fs::create_dir(dir).unwrap();
    }
    tiny::gemma4_with_assistant(&target, &assistant, VOCAB);
    let (device, kind) = (Device::Cpu, Kind::Float);
    let options = DrafterOptions { device, kind, slots: SLOTS, target: Some(target.clone()) };
    let load = || {
        let mut drafter = AssistantProposer::load(&assistant, &options).unwrap();
        drafter.set_draft_len(3);
        drafter
    };
    let taps = load().taps().to_vec();
    for rule in [VerifyRule::Token, VerifyRule::Block] {
        assert_lossless(chi_square_ratios_of(&target, &taps, (rule, 8_000), load));
    }
}
