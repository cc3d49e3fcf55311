//! Tests Domino against autograd on its formulas, its decoding against its training, and its schedule.

mod common;

use std::fs;
use std::path::Path;

use common::{assert_close, noise};
use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockBatch, BlockSpec, DOMINO_SUMS, DSpark, DSparkConfig, DSparkSettings, Domino, DominoConfig,
    DominoProposer, DominoSettings, DraftDecoder, GruSettings, LambdaBase, LossDenominator, LossRecipe,
    LossSum, TrainSample,
};
use deepspec_engine::{Context, DraftRequest, Proposer, Sampling, SamplingBatch};
use deepspec_models::{ModelConfig, save};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

const VOCAB: i64 = 96;
const WIDTH: i64 = 32;
const BLOCK: usize = 6;
const TOKENS: usize = 40;
const SLOTS: [SlotTarget; 2] = [SlotTarget::AnchorPredicts, SlotTarget::FillIn];
const GRU: GruSettings = GruSettings { hidden_size: 12, rank: 8 };

fn decoder() -> DraftDecoder {
    let model = json!({
        "model_type": "qwen3", "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": VOCAB,
        "initializer_range": 0.3,
    });
    let model = ModelConfig::parse(Path::new("config.json"), model.as_object().cloned().unwrap()).unwrap();
    DraftDecoder { model, taps: Tap::from_layer_ids([1, 2]).unwrap(), num_target_layers: 4 }
}

fn blocks(slots: SlotTarget) -> BlockSpec {
    BlockSpec { block_size: BLOCK, slots, mask_token_id: 3, causal: false, num_anchors: 8 }
}

/// A random model, saved and loaded.
fn model(slots: SlotTarget) -> Domino {
    let config =
        DominoConfig { decoder: decoder(), settings: DominoSettings { blocks: blocks(slots), gru: GRU } };
    config.check().unwrap();
    let model =
        Domino::fresh(config, &noise(7, &[VOCAB, WIDTH]), &noise(8, &[VOCAB, WIDTH]), 11, Kind::Float);
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), Value::Object(model.config().to_json()).to_string()).unwrap();
    save(&dir.path().join("model.safetensors"), &model.checkpoint(), Kind::Float).unwrap();
    let loaded = Domino::load(dir.path(), Device::Cpu, Kind::Float).unwrap();
    assert_eq!(loaded.config().settings, model.config().settings);
    loaded
}

/// Random states for a random text; the last anchors have few supervised tokens after them.
fn sample() -> TrainSample {
    TrainSample {
        input_ids: (0..TOKENS as i64).map(|i| (i * 37 + 5) % VOCAB).collect(),
        loss_mask: (0..TOKENS).map(|i| i % 13 > 2).collect(),
        taps: noise(5, &[TOKENS as i64, 2 * WIDTH]),
        last: noise(6, &[TOKENS as i64, WIDTH]),
        last_positions: (0..TOKENS as u32).collect(),
        anchors: vec![3, 6, 9, 11, 17, 32],
    }
}

fn batch(model: &Domino) -> BlockBatch {
    model.config().batch(&[sample()], 4.0, Device::Cpu, Kind::Float).unwrap()
}

/// The first draft of a block, and the hidden states of all, are DFlash's.
#[test]
fn the_first_draft_of_a_block_is_dflashs() {
    let _guard = tch::no_grad_guard();
    for slots in SLOTS {
        let model = model(slots);
        let (embed, head) = (noise(7, &[VOCAB, WIDTH]), noise(8, &[VOCAB, WIDTH]));
        let config = DSparkConfig {
            decoder: decoder(),
            settings: DSparkSettings { blocks: blocks(slots), markov: None, confidence: None },
        };
        let dflash = DSpark::fresh(config, &embed, &head, 11, Kind::Float);
        let hidden = model.hidden_states(&batch(&model));
        assert_close("states", &hidden, &dflash.hidden_states(&batch(&model)), 1e-6);
        let (_, features) = model.teacher_forced_features(&hidden, &batch(&model).previous).unwrap();
        let gamma = blocks(slots).draft_len() as i64;
        assert_eq!(features.size(), [6, gamma, GRU.rank]);
        let corrected = model.teacher_forced_logits(&hidden, Some(&features)) - dflash.base_logits(&hidden);
        let corrected = corrected.abs().amax([0, 2], false);
        assert_eq!(corrected.double_value(&[0]), 0.0);
        assert!((1..gamma).all(|draft| corrected.double_value(&[draft]) > 0.1), "{corrected}");
    }
}

/// The closed-form gradients of both losses match autograd on the same formulas.
#[test]
fn gradients_are_autograds() {
    let recipe = LossRecipe { ce_alpha: 1.0, l1_alpha: 0.3, ..LossRecipe::NONE };
    for (slots, lambda) in SLOTS.into_iter().flat_map(|slots| [(slots, 0.0), (slots, 0.3)]) {
        let model = model(slots);
        for (_, parameter) in model.parameters() {
            let _ = parameter.set_requires_grad(true);
        }
        let batch = batch(&model);
        let (loss, named) = slow(&model, &batch, &recipe, lambda);
        loss.backward();
        let taken = || -> Vec<(String, Tensor)> {
            let gradient = |(name, parameter): &(String, Tensor)| {
                let gradient = parameter.grad().copy();
                parameter.shallow_clone().zero_grad();
                (name.clone(), gradient)
            };
            model.parameters().iter().map(gradient).collect()
        };
        let expected = taken();
        let sums = model.accumulate(&batch, &recipe, lambda, LossDenominator(50.0), None);
        for ((name, found), (_, expected)) in taken().into_iter().zip(&expected) {
            let size = expected.abs().max().double_value(&[]);
            assert!(size > 0.0, "{name} has gradients of {size}");
            assert_close(&format!("{slots}, λ {lambda}: {name}"), &found, expected, 2e-5 * size.max(1e-3));
        }
        let sums: Vec<f64> = Vec::try_from(sums).unwrap();
        let all: Vec<String> =
            LossSum::all(blocks(slots).draft_len(), &DOMINO_SUMS).map(LossSum::name).collect();
        for (name, expected) in named {
            let found = sums[all.iter().position(|other| other == name).unwrap()];
            assert!((found - expected).abs() < 1e-4 * expected.max(1.0), "{name}: {found}, {expected}");
        }
    }
}

/// The loss with its autograd graph, and sums by name.
fn slow(
    model: &Domino,
    batch: &BlockBatch,
    recipe: &LossRecipe,
    lambda: f64,
) -> (Tensor, Vec<(&'static str, f64)>) {
    let hidden = model.hidden_states(batch);
    let rows = |t: &Tensor| t.flatten(0, 1).index_select(0, &batch.supervised_indices);
    let (_, features) = model.teacher_forced_features(&hidden, &batch.previous).unwrap();
    let base = model.base_logits(&rows(&hidden));
    let corrected = model.teacher_forced_logits(&rows(&hidden), Some(&rows(&features)));
    let teacher = model.base_logits(&batch.teacher_states()).detach().softmax(-1, Kind::Float);
    let weighted = |values: &Tensor| (values * &batch.weights).sum(Kind::Float);
    let of_logits = |logits: &Tensor| {
        let ce =
            -logits.log_softmax(-1, Kind::Float).gather(1, &batch.labels.unsqueeze(1), false).squeeze_dim(1);
        let l1 = (logits.softmax(-1, Kind::Float) - &teacher).abs().sum_dim_intlist(-1, false, Kind::Float);
        // Σ of 1 + Π accept rates over the blocks.
        let slots = Tensor::zeros([batch.previous.numel() as i64], (Kind::Float, Device::Cpu));
        let accepted =
            slots.index_add(0, &batch.supervised_indices, &(1.0 - &l1 * 0.5)).view_as(&batch.previous);
        let tau = accepted.cumprod(1, Kind::Float).sum(Kind::Float) + batch.blocks as f64;
        let (ce, l1) = (weighted(&ce), weighted(&l1));
        (&ce * recipe.ce_alpha + l1 * recipe.l1_alpha, ce, tau)
    };
    let (corrected, ce, tau) = of_logits(&corrected);
    let (base, _, base_tau) = of_logits(&base);
    let loss = corrected * (1.0 - lambda) + &base * lambda;
    let shares = batch.weights.sum(Kind::Float) * lambda;
    let sums = [
        ("loss", &loss),
        ("ce", &ce),
        ("tau", &tau),
        ("base_loss", &base),
        ("base_tau", &base_tau),
        ("lambda_base", &shares),
    ];
    let sums = sums.map(|(name, sum)| (name, sum.double_value(&[])));
    (loss / (50.0 + 1e-6), sums.to_vec())
}

/// Drafting matches training: with the drafted tokens as previous tokens, training gives the same
/// distributions.
#[test]
fn it_decodes_as_it_was_trained() {
    let _guard = tch::no_grad_guard();
    for (slots, temperature) in SLOTS.into_iter().flat_map(|slots| [(slots, 0.0), (slots, 0.8)]) {
        let gamma = blocks(slots).draft_len() as i64;
        let mut proposer = DominoProposer::new(model(slots), 3);
        let (sample, mut seen) = (sample(), 0);
        for &anchor in &sample.anchors {
            let rows = (anchor - seen) as i64;
            let context = Context {
                captured_states: sample.taps.narrow(0, seen as i64, rows),
                hidden: None,
                tokens: Tensor::from_slice(&sample.input_ids[seen..anchor]),
                next: Tensor::from_slice(&sample.input_ids[seen + 1..=anchor]),
                chunks: vec![(2, rows as usize)],
            };
            let uniforms = noise(anchor as u64, &[1, gamma]).to_kind(Kind::Double).sigmoid();
            let proposal = proposer.propose(&DraftRequest {
                context: &context,
                slots: &[2],
                anchors: &Tensor::from_slice(&sample.input_ids[anchor..=anchor]),
                uniforms: &uniforms,
                sampling: &SamplingBatch::new(vec![Sampling::new(temperature, 0)], Device::Cpu),
            });
            let drafted: Vec<i64> = Vec::try_from(proposal.tokens.get(0)).unwrap();
            assert_eq!(drafted.len(), gamma as usize);
            // A training block with the drafted tokens as its text.
            let mut ids = sample.input_ids.clone();
            ids.splice(anchor + 1..anchor + 1 + drafted.len(), drafted);
            let forced = TrainSample { input_ids: ids, anchors: vec![anchor], ..self::sample() };
            let model = proposer.model();
            let batch = model.config().batch(&[forced], 4.0, Device::Cpu, Kind::Float).unwrap();
            let hidden = model.hidden_states(&batch);
            let (_, features) = model.teacher_forced_features(&hidden, &batch.previous).unwrap();
            let logits = model.teacher_forced_logits(&hidden.flatten(0, 1), Some(&features.flatten(0, 1)));
            if temperature > 0.0 {
                let expected = (logits / temperature).softmax(-1, Kind::Float);
                assert_close("q", &proposal.probs.expect("drawn at a temperature").get(0), &expected, 1e-5);
            } else {
                assert!(logits.argmax(-1, false).equal(&proposal.tokens.get(0)));
            }
            seen = anchor;
        }
    }
}

#[test]
fn lambda_falls_to_zero_and_stays_there() {
    let at = |decay_ratio: f64, progress: f64| LambdaBase { start: 0.8, decay_ratio }.at(progress);
    assert_eq!([at(1.0, 0.0), at(1.0, 0.5), at(0.5, 0.25)], [0.8, 0.4, 0.4]);
    assert_eq!([at(0.5, 0.5), at(0.5, 0.75), at(0.25, 0.99)], [0.0; 3]);
}
