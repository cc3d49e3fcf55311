//! Bugs that other trainers of block drafters shipped; each test is named after the property that
//! it guards.

use std::path::Path;

use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockSpec, DSpark, DSparkConfig, DSparkProposer, DSparkSettings, DraftDecoder, MarkovKind,
    MarkovSettings, TrainSample, anchor_candidates, slot_weight, supervised_draft_count,
};
use deepspec_engine::{Context, DraftRequest, Proposer, Sampling, SamplingBatch};
use deepspec_models::ModelConfig;
use serde_json::json;
use tch::{Device, Kind, Tensor};

const VOCAB: i64 = 48;
const MASK: i64 = 40;
const GAMMA: usize = 4;
const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

/// A block drafter whose backbone has no effect, so only its Markov head decides: after token i it
/// predicts `follower(i)`.
fn bigrams(follower: impl Fn(i64) -> i64) -> DSpark {
    let raw = json!({
        "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCAB,
    });
    let target = ModelConfig::parse(Path::new("config.json"), raw.as_object().cloned().unwrap()).unwrap();
    let config = DSparkConfig {
        decoder: DraftDecoder {
            model: target.draft_decoder(&[None]).unwrap(),
            taps: Tap::from_layer_ids([0]).unwrap(),
            num_target_layers: 2,
        },
        settings: DSparkSettings {
            blocks: BlockSpec {
                block_size: GAMMA,
                slots: SlotTarget::AnchorPredicts,
                mask_token_id: MASK,
                causal: false,
                num_anchors: 4,
            },
            markov: Some(MarkovSettings { kind: MarkovKind::Vanilla, rank: VOCAB }),
            confidence: None,
        },
    };
    let silent = Tensor::zeros([VOCAB, 16], CPU);
    let block = DSpark::fresh(config, &silent, &silent, 1, Kind::Float);
    let table = Tensor::zeros([VOCAB, VOCAB], CPU); // [next, previous]
    for token in 0..VOCAB {
        let _ = table.get(follower(token)).get(token).fill_(20.0);
    }
    for (name, parameter) in block.parameters() {
        let mut parameter = parameter.shallow_clone();
        match name.as_str() {
            "markov_head.markov_w1.weight" => parameter.copy_(&Tensor::eye(VOCAB, CPU)),
            "markov_head.markov_w2.weight" => parameter.copy_(&table),
            _ => {}
        }
    }
    block
}

#[test]
fn the_first_slot_of_a_block_has_the_largest_weight() {
    assert_eq!(slot_weight(0, 4.0), 1.0);
    assert!((1..16).all(|k| slot_weight(k, 4.0) < slot_weight(k - 1, 4.0) && slot_weight(k, 4.0) > 0.0));
}

/// The token before an answer is not an anchor: an anchor must be supervised itself, as in the
/// reference.
#[test]
fn anchors_and_labels_lie_within_what_is_supervised() {
    let mask = [false, false, true, true, true, false, true, true];
    assert_eq!(anchor_candidates(&mask), [2, 3, 6]);
    let supervised = |anchor| supervised_draft_count(&mask, anchor, GAMMA);
    assert_eq!([2, 3, 4, 6].map(supervised), [2, 1, 0, 1]);
}

/// Slot k is corrected by token anchor + k, the token before its label, in training and in
/// decoding.
#[test]
fn the_markov_head_reads_the_token_before_each_label() {
    let _guard = tch::no_grad_guard();
    let follower = |token: i64| (token * 5 + 3) % VOCAB;
    let mut text = vec![1];
    while text.len() < 12 {
        text.push(follower(text[text.len() - 1]));
    }
    let block = bigrams(follower);
    let sample = TrainSample {
        input_ids: text.clone(),
        loss_mask: vec![true; 12],
        taps: Tensor::ones([12, 16], CPU),
        last: Tensor::ones([12, 16], CPU),
        last_positions: (0..12).collect(),
        anchors: vec![0, 5],
    };
    let batch = block.config().batch(&[sample], 4.0, Device::Cpu, Kind::Float).unwrap();
    let hidden = block.hidden_states(&batch);
    let (_, features) = block.teacher_forced_features(&hidden, &batch.previous).unwrap();
    let best = block.teacher_forced_logits(&hidden, Some(&features)).argmax(-1, false);
    let labels = [&text[1..=GAMMA], &text[6..6 + GAMMA]].concat();
    assert_eq!(Vec::<i64>::try_from(best.reshape([-1])).unwrap(), labels);
}

fn draft(block: DSpark, anchor: i64) -> Vec<i64> {
    let _guard = tch::no_grad_guard();
    let context = Context {
        captured_states: Tensor::ones([3, 16], CPU),
        hidden: None,
        tokens: Tensor::from_slice(&[2, 2, 2]),
        next: Tensor::from_slice(&[2, 2, anchor]),
        chunks: vec![(0, 3)],
    };
    let greedy = SamplingBatch::new(vec![Sampling::new(0.0, 0)], Device::Cpu);
    let uniforms = Tensor::zeros([1, GAMMA as i64], (Kind::Double, Device::Cpu));
    let anchors = Tensor::from_slice(&[anchor]);
    let proposal = DSparkProposer::new(block, 1).propose(&DraftRequest {
        context: &context,
        slots: &[0],
        anchors: &anchors,
        uniforms: &uniforms,
        sampling: &greedy,
    });
    Vec::try_from(proposal.tokens.reshape([-1])).unwrap()
}

/// A drafted mask token id is a token like any other.
#[test]
fn a_drafted_mask_token_is_kept() {
    let follower = |token: i64| if token == MASK { 9 } else { MASK };
    assert_eq!(draft(bigrams(follower), 3), [MASK, 9, MASK, 9]);
}
