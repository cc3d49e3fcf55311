//! Compares the closed-form objective with the same formulas under autograd, for every head and
//! every loss.

#[path = "common/slow.rs"]
mod slow;

use std::path::Path;

use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockBatch, BlockSpec, BlockVerification, ConfidenceSettings, DSPARK_SUMS, DSpark, DSparkConfig,
    DSparkObjective, DSparkSettings, Dpace, DraftDecoder, Lk, LkForm, LossDenominator, LossRecipe, LossSum,
    MarkovKind, MarkovSettings, TrainSample,
};
use deepspec_models::ModelConfig;
use tch::{Device, Kind, Tensor};

const GAMMA: usize = 5;
const NORMALISER: f64 = 123.0;

/// The settings in which the drafters of these tests differ.
#[derive(Debug, Clone, Copy)]
struct Shape {
    vocab: i64,
    anchors: usize,
    markov: Option<MarkovKind>,
    confidence: Option<bool>,
    softcap: Option<f64>,
    kind: Kind,
    /// Factor on the target's last states, which controls how confident it is.
    sureness: f64,
}

const PLAIN: Shape = Shape {
    vocab: 512,
    anchors: 45,
    markov: Some(MarkovKind::Vanilla),
    confidence: Some(true),
    softcap: None,
    kind: Kind::Float,
    sureness: 1.0,
};

fn block(shape: Shape) -> DSpark {
    let model = serde_json::json!({
        "model_type": "qwen3", "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12, "vocab_size": shape.vocab,
        "initializer_range": 0.3,
    });
    let mut model =
        ModelConfig::parse(Path::new("config.json"), model.as_object().cloned().unwrap()).unwrap();
    model.logit_softcap = shape.softcap;
    let ends = |seed| (noise(seed, [shape.vocab, 24]) * 0.3).to_kind(shape.kind);
    let (embed, head) = (ends(7), ends(8));
    let config = DSparkConfig {
        decoder: DraftDecoder { model, taps: Tap::from_layer_ids([1, 2]).unwrap(), num_target_layers: 4 },
        settings: DSparkSettings {
            blocks: BlockSpec {
                block_size: GAMMA,
                slots: SlotTarget::AnchorPredicts,
                mask_token_id: 3,
                causal: false,
                num_anchors: shape.anchors,
            },
            markov: shape.markov.map(|kind| MarkovSettings { kind, rank: 8 }),
            confidence: shape.confidence.map(|with_markov| ConfidenceSettings { with_markov }),
        },
    };
    // With seed 11, a probability of the drafter equals the target's to the last bit. The sign of
    // their difference is then rounding noise.
    let block = DSpark::fresh(config, &embed, &head, 12, shape.kind);
    for (_, parameter) in block.parameters() {
        let _ = parameter.set_requires_grad(true);
    }
    block
}

/// Standard normal draws.
fn noise(seed: u64, shape: [i64; 2]) -> Tensor {
    Tensor::from_slice(&deepspec_testkit::noise(seed, (shape[0] * shape[1]) as usize)).view(shape)
}

/// Two sequences whose blocks cover every number of supervised slots.
fn batch(block: &DSpark, shape: Shape) -> BlockBatch {
    let length = 4 * shape.anchors as i64;
    let states = |seed: i64, width: i64| noise(seed as u64, [length, width]);
    let sample = |seed: i64| TrainSample {
        input_ids: (0..length).map(|i| (i * 31 + seed * 17) % shape.vocab).collect(),
        loss_mask: (0..length).map(|i| i % 23 > 4).collect(),
        taps: states(10 + seed, 2 * 24),
        last: states(20 + seed, 24) * shape.sureness,
        last_positions: (0..length as u32).collect(),
        anchors: (0..length as usize).filter(|i| i % 23 > 4 && (i + 1) % 23 > 4).step_by(3).collect(),
    };
    let samples: Vec<TrainSample> = (0..2).map(sample).collect();
    block.config().batch(&samples, 4.0, Device::Cpu, shape.kind).unwrap()
}

fn gradients(block: &DSpark) -> Vec<(String, Tensor)> {
    let taken = |(name, parameter): &(String, Tensor)| {
        let gradient = parameter.grad();
        let gradient =
            if gradient.defined() { gradient.to_kind(Kind::Double) } else { parameter.zeros_like() };
        parameter.shallow_clone().zero_grad();
        (name.clone(), gradient.copy())
    };
    block.parameters().iter().map(taken).collect()
}

/// Compares gradients within `tolerance` by norm, and sums within 1e-5 in float32.
fn check(shape: Shape, objective: DSparkObjective, tolerance: f64) {
    let block = block(shape);
    let batch = batch(&block, shape);
    let (loss, expected) = slow::objective(&block, &batch, &objective, LossDenominator(NORMALISER));
    loss.backward();
    let slow = gradients(&block);
    let sums: Vec<f64> =
        Vec::try_from(block.accumulate(&batch, &objective, LossDenominator(NORMALISER), None)).unwrap();
    let names = LossSum::all(GAMMA, &DSPARK_SUMS).map(LossSum::name).collect::<Vec<_>>();
    for (name, expected) in expected {
        let found = sums[names.iter().position(|n| n == name).unwrap()];
        let error = (found - expected).abs() / expected.abs();
        assert!(error < tolerance, "{shape:?} {objective:?}: {name} is {found}, expected {expected}");
    }
    for ((name, fast), (_, slow)) in gradients(&block).iter().zip(&slow) {
        let norm = |t: &Tensor| t.norm().double_value(&[]);
        let error = norm(&(fast - slow));
        assert!(
            error <= tolerance * norm(slow),
            "{shape:?} {objective:?}: gradient of {name} is off by {error:e}, its norm is {:e}",
            norm(slow)
        );
    }
    // A second pass accumulates gradients.
    for _ in 0..2 {
        let _ = block.accumulate(&batch, &objective, LossDenominator(NORMALISER), None);
    }
    for ((name, twice), (_, slow)) in gradients(&block).iter().zip(&slow) {
        let error = (twice - slow * 2.0).norm().double_value(&[]);
        assert!(
            error <= 2.0 * tolerance * slow.norm().double_value(&[]),
            "{shape:?}: {name} does not add up"
        );
    }
}

const DSPARK: DSparkObjective = DSparkObjective {
    loss: LossRecipe { ce_alpha: 0.1, l1_alpha: 0.9, ..LossRecipe::NONE },
    confidence_alpha: 1.0,
};

/// This loss together with the confidence head's.
fn only(loss: LossRecipe) -> DSparkObjective {
    DSparkObjective { loss, ..DSPARK }
}

const NOTHING: LossRecipe = LossRecipe::NONE;

const BV: DSparkObjective = DSparkObjective {
    loss: LossRecipe {
        ce_alpha: 0.1,
        block_verification: Some(BlockVerification { alpha: 0.9, beta: 0.7 }),
        ..NOTHING
    },
    ..DSPARK
};

#[test]
fn every_head_has_the_gradients_of_autograd() {
    let heads = [None, Some(MarkovKind::Vanilla), Some(MarkovKind::Gated), Some(MarkovKind::Rnn)];
    for markov in heads {
        for confidence in [None, Some(false), Some(true)] {
            if markov.is_none() && confidence == Some(true) {
                continue;
            }
            for softcap in [None, Some(2.0)] {
                check(Shape { markov, confidence, softcap, ..PLAIN }, DSPARK, 1e-5);
            }
        }
    }
}

#[test]
fn every_loss_has_the_gradients_of_autograd() {
    let lk = |form, alpha, eta| Some(Lk { form, alpha, eta });
    let losses = [
        only(LossRecipe { ce_alpha: 1.0, ..NOTHING }),
        only(LossRecipe { l1_alpha: 0.7, ..NOTHING }),
        only(LossRecipe { soft_ce_alpha: 0.7, ..NOTHING }),
        only(LossRecipe { kl_alpha: 1.3, ..NOTHING }),
        only(LossRecipe { lk: lk(LkForm::LogAcceptance, 0.8, 3.0), ..NOTHING }),
        only(LossRecipe { lk: lk(LkForm::Hybrid, 0.8, 3.0), ..NOTHING }),
        only(LossRecipe { block_verification: Some(BlockVerification { alpha: 0.6, beta: 0.0 }), ..NOTHING }),
        BV,
        only(LossRecipe { ce_alpha: 1.0, until_first_error: true, ..NOTHING }),
        only(LossRecipe { ce_alpha: 1.0, dpace: Some(Dpace { smoothing: 0.5 }), ..NOTHING }),
        DSparkObjective {
            loss: LossRecipe {
                ce_alpha: 0.3,
                l1_alpha: 0.2,
                soft_ce_alpha: 0.4,
                kl_alpha: 0.1,
                lk: lk(LkForm::Hybrid, 0.6, 1.5),
                dpace: Some(Dpace { smoothing: 0.2 }),
                ..LossRecipe::NONE
            },
            confidence_alpha: 0.5,
        },
    ];
    for objective in losses {
        for softcap in [None, Some(2.0)] {
            check(Shape { softcap, ..PLAIN }, objective, 1e-5);
        }
    }
}

/// Vocabulary and rows are so large that there are several chunks, several tiles in each, and
/// several pieces of the vocabulary. Rows share their bias with others, or each has its own. 9000
/// tokens leave a smaller piece at the end; rows of 9216 would be whole pages apart.
#[test]
fn chunks_tiles_and_pieces_join_without_a_seam() {
    let dpace = Some(Dpace { smoothing: 0.5 });
    let cases = [
        (9000, MarkovKind::Vanilla),
        (9000, MarkovKind::Gated),
        (9216, MarkovKind::Vanilla),
        (9216, MarkovKind::Gated),
    ];
    for (vocab, kind) in cases {
        check(
            Shape { vocab, anchors: 90, markov: Some(kind), ..PLAIN },
            only(LossRecipe { ce_alpha: 1.0, kl_alpha: 0.5, dpace, ..NOTHING }),
            1e-5,
        );
    }
}

/// bfloat16 has 8 bits of precision, and both implementations round every product to it.
#[test]
fn bfloat16_is_as_close_as_its_rounding() {
    for (markov, softcap) in
        [(Some(MarkovKind::Vanilla), None), (Some(MarkovKind::Rnn), Some(2.0)), (None, None)]
    {
        let confidence = markov.map(|_| true);
        check(Shape { markov, confidence, softcap, kind: Kind::BFloat16, ..PLAIN }, DSPARK, 2e-2);
    }
    check(Shape { kind: Kind::BFloat16, ..PLAIN }, BV, 2e-2);
}

/// Every slot follows the same token, so its row of W1 gets all gradients. A bfloat16 sum of them
/// would soon stop growing.
#[test]
fn a_token_that_all_blocks_begin_with_gets_its_whole_gradient() {
    let w1 = |kind| {
        let shape = Shape { kind, ..PLAIN };
        let block = block(shape);
        let length = 700;
        let row = |seed, width| noise(seed, [1, width]).repeat([length, 1]);
        let sample = TrainSample {
            input_ids: vec![5; length as usize],
            loss_mask: vec![true; length as usize],
            taps: row(41, 2 * 24),
            last: row(42, 24),
            last_positions: (0..length as u32).collect(),
            anchors: (0..500).collect(),
        };
        let batch = block.config().batch(&[sample], 4.0, Device::Cpu, kind).unwrap();
        let _ = block.accumulate(&batch, &DSPARK, LossDenominator(NORMALISER), None);
        let found = gradients(&block).into_iter().find(|(name, _)| name == "markov_head.markov_w1.weight");
        found.unwrap().1.get(5)
    };
    let (exact, found) = (w1(Kind::Float), w1(Kind::BFloat16));
    let error = (&found - &exact).norm().double_value(&[]) / exact.norm().double_value(&[]);
    assert!(error < 0.05, "{found:?} is off by {error}, in float32 it is {exact:?}");
}

/// If drafter and target agree fully, there is nothing left to learn. No loss is infinite if they
/// share nothing.
#[test]
fn gradients_stay_finite_at_both_ends() {
    let lk = Some(Lk { form: LkForm::LogAcceptance, alpha: 1.0, eta: 3.0 });
    let block = block(PLAIN);
    let batch = batch(&block, PLAIN);
    for (_, parameter) in block.parameters() {
        // Logits in the thousands: both distributions are one-hot, at different tokens.
        let _ = tch::no_grad(|| parameter.shallow_clone().g_mul_scalar_(300.0));
    }
    let kl = DSparkObjective { loss: LossRecipe { kl_alpha: 1.0, lk, ..DSPARK.loss }, ..DSPARK };
    for objective in [kl, BV] {
        let sums = block.accumulate(&batch, &objective, LossDenominator(NORMALISER), None);
        assert!(sums.isfinite().all().int64_value(&[]) == 1, "{sums:?}");
        for (name, gradient) in gradients(&block) {
            assert!(gradient.isfinite().all().int64_value(&[]) == 1, "{name}");
        }
    }
}

/// Both distributions are nearly uniform, so the divergence is a thousandth of the logarithms that
/// it is computed from. A sum of bfloat16 logarithms would be noise.
#[test]
fn the_divergence_of_bfloat16_logits_does_not_cancel() {
    let kl = |kind| {
        let shape = Shape { markov: None, confidence: None, kind, sureness: 0.02, ..PLAIN };
        let block = block(shape);
        let norm =
            block.parameters().iter().find(|(name, _)| name == "norm.weight").unwrap().1.shallow_clone();
        let _ = tch::no_grad(|| norm.shallow_clone().g_mul_scalar_(0.02));
        let objective = only(LossRecipe { kl_alpha: 1.0, ..NOTHING });
        let sums: Vec<f64> = Vec::try_from(block.accumulate(
            &batch(&block, shape),
            &objective,
            LossDenominator(NORMALISER),
            None,
        ))
        .unwrap();
        let sum =
            |name: &str| sums[LossSum::all(GAMMA, &DSPARK_SUMS).position(|sum| sum.name() == name).unwrap()];
        sum("kl") / sum("weight")
    };
    let (exact, found) = (kl(Kind::Float), kl(Kind::BFloat16));
    assert!((1e-5..0.1).contains(&exact), "{exact}");
    assert!((found / exact - 1.0).abs() < 0.05, "{found} in bfloat16, {exact} in float32");
}

/// The confidence loss trains the confidence head and the backbone. The label is a constant, so
/// this loss has no gradient with respect to the logits that it describes.
#[test]
fn the_confidence_loss_reaches_the_backbone_and_not_the_logits() {
    let block = block(PLAIN);
    let _ = block.accumulate(&batch(&block, PLAIN), &only(NOTHING), LossDenominator(NORMALISER), None);
    for (name, gradient) in gradients(&block) {
        let moves = gradient.abs().max().double_value(&[]) > 0.0;
        assert_eq!(moves, name != "markov_head.markov_w2.weight", "{name}");
    }
}

/// Blocks that extend past the end of the shorter of two padded samples; one has a single
/// supervised slot.
#[test]
fn a_block_that_is_mostly_padding_is_finite() {
    let block = block(PLAIN);
    let sample = |length: i64, anchors: Vec<usize>| TrainSample {
        input_ids: (0..length).collect(),
        loss_mask: vec![true; length as usize],
        taps: noise(31, [length, 2 * 24]),
        last: noise(32, [length, 24]),
        last_positions: (0..length as u32).collect(),
        anchors,
    };
    let samples = [sample(2, vec![0]), sample(60, vec![3, 57, 58])];
    let batch = block.config().batch(&samples, 4.0, Device::Cpu, Kind::Float).unwrap();
    let sums = block.accumulate(&batch, &DSPARK, LossDenominator(NORMALISER), None);
    assert!(sums.isfinite().all().int64_value(&[]) == 1, "{sums:?}");
    for (name, gradient) in gradients(&block) {
        assert!(gradient.isfinite().all().int64_value(&[]) == 1, "{name}");
    }
}
