//! DFlash 2, Domino, xPress and P-EAGLE do not change the output distribution: with them, the target samples as it does alone. This
//! holds although DFlash 2 drafts candidates only, and although xPress and P-EAGLE draw a block's tokens side by side.

use std::collections::BTreeMap;

use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockProposerOf, BlockSpec, Convolution, DFlash2, DFlash2Proposer, DFlash2Settings, Domino,
    DominoSettings, DraftConfig, DraftDecoder, DraftModel, DrafterKind, Eagle3Norms, GruSettings, PEagle,
    PEagleProposer, PEagleSettings, XPress, XPressProposer, XPressSettings,
};
use deepspec_engine::{
    DraftRequest, DraftSampling, Engine, EngineOptions, ModelInput, Proposal, Proposer, Request, Sampling,
    SamplingBatch, Target, VerifyRule,
};
use deepspec_models::{ModelConfig, TargetModel, TargetOptions, load_embed_and_head};
use deepspec_testkit::distribution::{chi_square_ratio, count_outputs};
use deepspec_testkit::{noise, tiny};
use tch::{Device, Kind, Tensor};

const VOCAB: usize = 10;
/// The number of tokens whose joint distribution is checked.
const LENGTH: usize = 3;
const SLOTS: usize = 64;
const PROMPT: [i64; 3] = [1, 4, 7];
const TEMPERATURE: f64 = 0.8;

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

fn target(dir: &std::path::Path, taps: &[Tap]) -> TargetModel {
    let options = TargetOptions { device: Device::Cpu, kind: Kind::Float, slots: SLOTS, taps: taps.to_vec() };
    TargetModel::load(dir, &options).unwrap()
}

/// The probability of every output under the target alone.
fn law(target: &mut TargetModel) -> BTreeMap<Vec<i64>, f64> {
    let mut law = BTreeMap::from([(vec![], 1.0)]);
    for _ in 0..LENGTH {
        let mut longer = BTreeMap::new();
        for (output, probability) in law {
            let ids: Vec<i64> = PROMPT.iter().chain(&output).copied().collect();
            let feed = ModelInput { chunks: &[(0, ids.len())], tokens: Tensor::from_slice(&ids) };
            let hidden = target.forward(&feed).hidden;
            target.truncate(0, 0);
            let logits = target.logits(&hidden.narrow(0, ids.len() as i64 - 1, 1));
            let next =
                SamplingBatch::new(vec![Sampling::new(TEMPERATURE, 0)], Device::Cpu).distributions(&logits);
            for token in 0..VOCAB as i64 {
                let output: Vec<i64> = output.iter().copied().chain([token]).collect();
                longer.insert(output, probability * next.double_value(&[0, token]));
            }
        }
        law = longer;
    }
    law
}

/// χ² of outputs with drafts of `proposer(drafter)`, times its 99.9 % quantile: as it is, and with a proposer that lies about its
/// distributions.
fn chi_square_ratios<K: DrafterKind, P: Proposer>(
    settings: K::Settings,
    proposer: impl Fn(DraftModel<K>) -> P,
) -> [f64; 2] {
    let _guard = tch::no_grad_guard();
    let dir = tempfile::tempdir().unwrap();
    tiny::qwen3(dir.path(), VOCAB);
    let model = ModelConfig::load(dir.path()).unwrap();
    let taps = Tap::from_layer_ids([0, 1]).unwrap();
    let law = law(&mut target(dir.path(), &[]));
    let (embed, head) = load_embed_and_head(dir.path(), &model, Device::Cpu, Kind::Float).unwrap();
    let decoder = DraftDecoder {
        model: model.draft_decoder(&[None]).unwrap(),
        taps: taps.clone(),
        num_target_layers: 2,
    };
    let config = DraftConfig { decoder, settings };
    [false, true].map(|lies| {
        let drafter = DraftModel::<K>::fresh(config.clone(), &embed, &head, 5, Kind::Float);
        for (i, (_, parameter)) in drafter.parameters().iter().enumerate() {
            let _ = parameter.shallow_clone().g_add_(&(noise_like(parameter, i as u64) * 0.2));
        }
        let options = EngineOptions {
            slots: SLOTS,
            context: 64,
            max_draft_tokens: None,
            draft_sampling: DraftSampling::Probabilistic,
            verify_rule: VerifyRule::default(),
            counts_overrun: false,
        };
        let proposer = Told { inner: proposer(drafter), lies };
        let request = |i: usize| Request {
            id: i.to_string(),
            prompt: PROMPT.to_vec(),
            sampling: Sampling::new(TEMPERATURE, 3),
            max_new_tokens: LENGTH + 2,
            stop_ids: vec![],
        };
        let mut engine = Engine::new(target(dir.path(), &taps), Some(proposer), options);
        let outputs = engine.run((0..10_000).map(request).collect(), |_| {}).unwrap();
        let accepted: u32 = outputs.iter().flat_map(|done| &done.cycles).map(|cycle| cycle.accepted).sum();
        assert!(accepted as usize > outputs.len() / 4, "{accepted} drafts were accepted");
        chi_square_ratio(&count_outputs(outputs.into_iter().map(|done| done.tokens[..LENGTH].to_vec())), &law)
    })
}

fn blocks(slots: SlotTarget) -> BlockSpec {
    BlockSpec { block_size: 4, slots, mask_token_id: 9, causal: false, num_anchors: 4 }
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
    assert_lossless(chi_square_ratios(settings, |drafter: DFlash2| DFlash2Proposer::new(drafter, SLOTS)));
}

#[test]
fn with_domino_the_first_tokens_have_the_targets_joint_law() {
    let gru = GruSettings { hidden_size: 8, rank: 8 };
    let settings = DominoSettings { blocks: blocks(SlotTarget::AnchorPredicts), gru };
    assert_lossless(chi_square_ratios(settings, |drafter: Domino| BlockProposerOf::new(drafter, SLOTS)));
}

#[test]
fn with_xpress_the_first_tokens_have_the_targets_joint_law() {
    let settings =
        XPressSettings { blocks: blocks(SlotTarget::FillIn), rank: 8, mlp_ratio: 2, num_passes: 2 };
    assert_lossless(chi_square_ratios(settings, |drafter: XPress| XPressProposer::new(drafter, SLOTS)));
}

#[test]
fn with_p_eagle_the_first_tokens_have_the_targets_joint_law() {
    let norms = Eagle3Norms::default();
    let settings = PEagleSettings { num_depths: 4, mask_token_id: 9, draft_vocab_size: None, norms };
    assert_lossless(chi_square_ratios(settings, |drafter: PEagle| PEagleProposer::new(drafter, SLOTS)));
}

fn noise_like(parameter: &Tensor, seed: u64) -> Tensor {
    Tensor::from_slice(&noise(seed, parameter.numel())).view_as(parameter)
}
