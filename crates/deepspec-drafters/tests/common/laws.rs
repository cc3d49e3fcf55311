//! The exact law of outputs of a random Qwen3, and random drafters for it.

use std::collections::BTreeMap;
use std::path::Path;

use deepspec_checkpoint::DraftVocab;
use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockSpec, DSparkV4Settings, DraftConfig, DraftDecoder, DraftModel, DrafterKind, Eagle3Norms,
    PEagleSettings, StageSettings,
};
use deepspec_engine::{
    DraftSampling, Engine, EngineOptions, ModelInput, Proposer, Request, Sampling, SamplingBatch, Target,
    VerifyRule,
};
use deepspec_models::{ModelConfig, TargetModel, TargetOptions, load_embed_and_head};
use deepspec_testkit::distribution::{chi_square_ratio, count_outputs};
use deepspec_testkit::noise;
use tch::{Device, Kind, Tensor};

pub const VOCAB: usize = 10;
/// The number of tokens whose joint distribution is checked.
pub const LENGTH: usize = 3;
pub const SLOTS: usize = 64;
pub const PROMPT: [i64; 3] = [1, 4, 7];
pub const TEMPERATURE: f64 = 0.8;

/// Target layers that the drafters read.
pub fn taps() -> Vec<Tap> {
    Tap::from_layer_ids([0, 1]).unwrap()
}

pub fn target(dir: &Path, taps: &[Tap]) -> TargetModel {
    let options = TargetOptions { device: Device::Cpu, kind: Kind::Float, slots: SLOTS, taps: taps.to_vec() };
    TargetModel::load(dir, &options).unwrap()
}

/// The probability of every output under the target alone.
pub fn law(target: &mut TargetModel) -> BTreeMap<Vec<i64>, f64> {
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

/// One draft layer of the target's family, which reads [`taps`].
pub fn decoder(dir: &Path) -> DraftDecoder {
    let model = ModelConfig::load(dir).unwrap();
    DraftDecoder { model: model.draft_decoder(&[None]).unwrap(), taps: taps(), num_target_layers: 2 }
}

/// A drafter with random weights for the target in `dir`.
pub fn drafter<K: DrafterKind>(dir: &Path, settings: K::Settings) -> DraftModel<K> {
    drafter_of(dir, decoder(dir), None, settings)
}

/// [`drafter`] with this decoder, which drafts the tokens of `vocab` only.
pub fn drafter_of<K: DrafterKind>(
    dir: &Path,
    decoder: DraftDecoder,
    vocab: Option<&DraftVocab>,
    settings: K::Settings,
) -> DraftModel<K> {
    let model = ModelConfig::load(dir).unwrap();
    let (embed, head) = load_embed_and_head(dir, &model, Device::Cpu, Kind::Float).unwrap();
    let config = DraftConfig { decoder, settings };
    let drafter = DraftModel::<K>::fresh_with_draft_vocab(config, (&embed, &head), vocab, 5, Kind::Float);
    for (i, (_, parameter)) in drafter.parameters().iter().enumerate() {
        let _ = parameter.shallow_clone().g_add_(&(noise_like(parameter, i as u64) * 0.2));
    }
    drafter
}

/// χ² of the engine's outputs of this many samples, divided by its 99.9 % quantile.
pub fn chi_square(
    target: impl Target,
    proposer: impl Proposer,
    (verify_rule, samples): (VerifyRule, usize),
    law: &BTreeMap<Vec<i64>, f64>,
) -> f64 {
    let options = EngineOptions {
        slots: SLOTS,
        context: 64,
        max_draft_tokens: None,
        draft_sampling: DraftSampling::Probabilistic,
        verify_rule,
        counts_overrun: false,
    };
    let request = |i: usize| Request {
        id: i.to_string(),
        prompt: PROMPT.to_vec(),
        sampling: Sampling::new(TEMPERATURE, 3),
        max_new_tokens: LENGTH + 2,
        stop_ids: vec![],
    };
    let mut engine = Engine::new(target, Some(proposer), options);
    let outputs = engine.run((0..samples).map(request).collect(), |_| {}).unwrap();
    let accepted: u32 = outputs.iter().flat_map(|done| &done.cycles).map(|cycle| cycle.accepted).sum();
    assert!(accepted as usize > outputs.len() / 4, "{accepted} drafts were accepted");
    chi_square_ratio(&count_outputs(outputs.into_iter().map(|done| done.tokens[..LENGTH].to_vec())), law)
}

pub fn blocks(slots: SlotTarget) -> BlockSpec {
    BlockSpec { block_size: 4, slots, mask_token_id: 9, causal: false, num_anchors: 4 }
}

/// Settings of a DSpark of DeepSeek-V4 with [`blocks`].
pub fn dspark_v4() -> DSparkV4Settings {
    let stages = StageSettings {
        num_attention_heads: 2,
        head_dim: 8,
        qk_rope_head_dim: 4,
        q_lora_rank: 8,
        o_lora_rank: 8,
        o_groups: 2,
        n_routed_experts: 3,
        num_experts_per_tok: 2,
        moe_intermediate_size: 8,
        hc_mult: 2,
        hc_sinkhorn_iters: 1,
        ..StageSettings::default()
    };
    DSparkV4Settings { blocks: blocks(SlotTarget::AnchorPredicts), markov_rank: 8, stages }
}

/// Settings of a P-EAGLE that drafts 4 tokens, only those of `vocab` if it is given.
pub fn peagle(vocab: Option<&DraftVocab>) -> PEagleSettings {
    PEagleSettings {
        num_depths: 4,
        mask_token_id: 9,
        draft_vocab_size: vocab.map(|vocab| vocab.tokens().len() as i64),
        norms: Eagle3Norms::default(),
    }
}

/// A reduced vocabulary: three of the tokens are never drafted.
pub fn reduced_vocab() -> DraftVocab {
    let counts: Vec<u64> = (0..VOCAB as u64).map(|id| u64::from(id % 4 != 0)).collect();
    DraftVocab::most_frequent(&counts, 7).unwrap()
}

pub fn noise_like(parameter: &Tensor, seed: u64) -> Tensor {
    Tensor::from_slice(&noise(seed, parameter.numel())).view_as(parameter)
}
