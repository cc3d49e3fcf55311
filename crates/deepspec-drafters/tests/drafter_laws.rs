//! Training and decoding compute the same values at a given position of a text, for every kind of
//! drafter and target.

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::assert_close;
use deepspec_checkpoint::ATTENTION_SINK_BIAS;
use deepspec_core::recipe::LossNormalization;
use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockSpec, DSpark, DSparkConfig, DSparkProposer, DSparkSettings, DraftDecoder, Eagle3, Eagle3Batch,
    Eagle3Config, Eagle3Norms, Eagle3Objective, Eagle3Proposer, Eagle3Settings, LossDenominator, Supervise,
    TrainSample,
};
use deepspec_engine::{Context, DraftRequest, Proposer, Sampling, SamplingBatch};
use deepspec_models::ModelConfig;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

const TOKENS: usize = 40;
const VOCAB: i64 = 64;

/// Targets whose weights are large enough that every part of the model affects its output.
fn targets() -> [ModelConfig; 2] {
    let common = json!({
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "initializer_range": 0.3,
        "max_position_embeddings": 512,
    });
    let gemma4 = json!({
        "model_type": "gemma4_unified_text", "global_head_dim": 16, "num_global_key_value_heads": 1,
        "attention_k_eq_v": true, "sliding_window": 8, "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    });
    [json!({"model_type": "qwen3", "rope_theta": 1e5}), gemma4].map(|own| {
        let mut raw = common.as_object().cloned().unwrap();
        raw.extend(own.as_object().cloned().unwrap());
        ModelConfig::parse(Path::new("config.json"), raw).unwrap()
    })
}

fn ends() -> (Tensor, Tensor) {
    let random = |seed| common::noise(seed, &[VOCAB, 32]) * 0.3;
    (random(3), random(4))
}

/// A text with two taps, in which everything after token 4 is supervised.
fn sample(anchors: Vec<usize>) -> TrainSample {
    TrainSample {
        input_ids: (0..TOKENS as i64).map(|i| (i * i + 3 * i) % VOCAB).collect(),
        loss_mask: (0..TOKENS).map(|i| i > 4).collect(),
        taps: common::noise(5, &[TOKENS as i64, 64]),
        last: common::noise(6, &[TOKENS as i64, 32]),
        last_positions: (0..TOKENS as u32).collect(),
        anchors,
    }
}

/// The context for slot 2: `rows` tokens of the sample from `first` on.
fn context(sample: &TrainSample, first: usize, rows: usize) -> Context {
    let [tokens, next] =
        [first, first + 1].map(|from| Tensor::from_slice(&sample.input_ids[from..from + rows]));
    Context {
        captured_states: sample.taps.narrow(0, first as i64, rows as i64),
        hidden: None,
        tokens,
        next,
        chunks: vec![(2, rows)],
    }
}

fn at_temperature_one() -> SamplingBatch {
    SamplingBatch::new(vec![Sampling::new(1.0, 0)], Device::Cpu)
}

fn block(target: &ModelConfig, blocks: (SlotTarget, bool), windows: &[Option<usize>]) -> DSpark {
    block_of(target.draft_decoder(windows).unwrap(), blocks)
}

/// A block drafter with the layers of `model`. Attention sinks are not zero.
fn block_of(model: ModelConfig, (slots, causal): (SlotTarget, bool)) -> DSpark {
    let config = DSparkConfig {
        decoder: DraftDecoder { model, taps: Tap::from_layer_ids([0, 2]).unwrap(), num_target_layers: 4 },
        settings: DSparkSettings {
            blocks: BlockSpec { block_size: 5, slots, mask_token_id: 7, causal, num_anchors: 4 },
            markov: None,
            confidence: None,
        },
    };
    let (embed, head) = ends();
    let dir = tempfile::tempdir().unwrap();
    let block = DSpark::fresh(config, &embed, &head, 11, Kind::Float);
    // Saved and loaded, so that the saved config must describe the whole model.
    let json = Value::Object(block.config().to_json()).to_string();
    std::fs::write(dir.path().join("config.json"), json).unwrap();
    let mut tensors = block.checkpoint();
    for (name, sinks) in tensors.iter_mut().filter(|(name, _)| name.ends_with(ATTENTION_SINK_BIAS)) {
        assert_eq!(sinks.abs().max().double_value(&[]), 0.0, "{name}");
        *sinks = Tensor::arange(sinks.size()[0], (Kind::Float, Device::Cpu)) - 1.0;
    }
    deepspec_models::save(&dir.path().join("model.safetensors"), &tensors, Kind::Float).unwrap();
    let loaded = DSpark::load(dir.path(), Device::Cpu, Kind::Float).unwrap();
    assert_eq!(loaded.config().decoder.model.layers, block.config().decoder.model.layers);
    assert_eq!(loaded.config().settings.blocks, block.config().settings.blocks);
    loaded
}

/// Training probabilities `[γ, V]` of the block at each anchor.
fn trained(block: &DSpark, sample: &TrainSample) -> Tensor {
    let batch = block.config().batch(std::slice::from_ref(sample), 4.0, Device::Cpu, Kind::Float);
    block.base_logits(&block.hidden_states(&batch.unwrap())).softmax(-1, Kind::Float)
}

#[test]
fn blocks_decode_as_they_were_trained_with_and_without_windows() {
    let _guard = tch::no_grad_guard();
    let sample = sample(vec![9, 10, 30]);
    for target in targets() {
        let slots = [SlotTarget::AnchorPredicts, SlotTarget::FillIn];
        for blocks in slots.into_iter().flat_map(|slots| [(slots, false), (slots, true)]) {
            decodes_as_trained(&target, blocks, &sample);
        }
    }
}

fn decodes_as_trained(target: &ModelConfig, blocks: (SlotTarget, bool), sample: &TrainSample) {
    let (slots, causal) = blocks;
    let gamma = slots.draft_len(5) as i64;
    let plain = trained(&block(target, blocks, &[None, None]), sample);
    assert_eq!(plain.size()[..2], [3, gamma]);
    let other = trained(&block(target, (slots, !causal), &[None, None]), sample);
    assert!((&other - &plain).abs().max().double_value(&[]) > 1e-3, "the mask changes nothing");
    // Windows smaller than a block, smaller than the context, and larger than everything.
    for (window, matters) in [(3, true), (12, true), (64, false)] {
        let block = block(target, blocks, &[Some(window), None]);
        let expected = trained(&block, sample);
        if target.layers[0].attention.window.is_none() {
            let change = (&expected - &plain).abs().max().double_value(&[]);
            assert_eq!(change > 1e-3, matters, "window {window}: {change}");
        }
        let what = format!("{} {blocks:?} window {window}", target.family);
        proposes_as_trained(block, gamma, &expected, sample, &what);
    }
}

/// The proposals at temperature 1 have the probabilities `expected [A, γ, V]` of training.
fn proposes_as_trained(block: DSpark, gamma: i64, expected: &Tensor, sample: &TrainSample, what: &str) {
    let mut proposer = DSparkProposer::new(block, 3);
    let mut seen = 0;
    for (b, &anchor) in sample.anchors.iter().enumerate() {
        let token = Tensor::from_slice(&sample.input_ids[anchor..=anchor]);
        let uniforms = Tensor::zeros([1, gamma], (Kind::Double, Device::Cpu));
        let context = context(sample, seen, anchor - seen);
        let proposal = proposer.propose(&DraftRequest {
            context: &context,
            slots: &[2],
            anchors: &token,
            uniforms: &uniforms,
            sampling: &at_temperature_one(),
        });
        assert_close(
            &format!("{what}, anchor {anchor}"),
            &proposal.probs.expect("drawn at temperature 1").get(0),
            &expected.get(b as i64),
            1e-5,
        );
        seen = anchor;
    }
}

#[test]
fn blocks_with_attention_sinks_decode_as_they_were_trained() {
    let _guard = tch::no_grad_guard();
    let (sample, [target, gemma]) = (sample(vec![9, 10, 30]), targets());
    assert!(gemma.draft_decoder(&[None]).unwrap().with_attention_sinks().is_none());
    for (slots, causal) in [(SlotTarget::AnchorPredicts, false), (SlotTarget::FillIn, true)] {
        for windows in [[None, None], [Some(12), None]] {
            let decoder = target.draft_decoder(&windows).unwrap();
            let plain = trained(&block_of(decoder.clone(), (slots, causal)), &sample);
            let block = block_of(decoder.with_attention_sinks().unwrap(), (slots, causal));
            let expected = trained(&block, &sample);
            assert!((&plain - &expected).abs().max().double_value(&[]) > 1e-3, "the sinks change nothing");
            let what = format!("sinks, {slots:?}, causal {causal}, windows {windows:?}");
            proposes_as_trained(block, slots.draft_len(5) as i64, &expected, &sample, &what);
        }
    }
}

/// Both variants have the same slots and states. They differ in which slots draft and in the
/// position of the labels.
#[test]
fn a_slot_that_fills_in_learns_the_token_before() {
    let _guard = tch::no_grad_guard();
    let [target, _] = targets();
    let sample = sample(vec![9, 10, 30]);
    let pass = |slots| {
        let block = block(&target, (slots, false), &[None]);
        let batch =
            block.config().batch(std::slice::from_ref(&sample), 4.0, Device::Cpu, Kind::Float).unwrap();
        (block.hidden_states(&batch), batch)
    };
    let ((all, ours), (filled, theirs)) = (pass(SlotTarget::AnchorPredicts), pass(SlotTarget::FillIn));
    assert_close("states", &all.narrow(1, 1, 4), &filled, 1e-6);
    // Slot k fills in the token that slot k − 1 predicts, from the same previous token and with the
    // same weight.
    let by_block = |rows: &Tensor, gamma: i64| rows.view([3, gamma]).narrow(1, 0, 4);
    assert!(by_block(&ours.labels, 5).equal(&by_block(&theirs.labels, 4)));
    assert!(by_block(&ours.weights, 5).equal(&by_block(&theirs.weights, 4)));
    assert!(ours.previous.narrow(1, 0, 4).equal(&theirs.previous));
    assert!(
        ours.teacher_states()
            .view([3, 5, -1])
            .narrow(1, 0, 4)
            .equal(&theirs.teacher_states().view([3, 4, -1]))
    );
}

#[test]
fn a_layer_pattern_the_target_cannot_have_is_refused() {
    let [qwen3, gemma4] = targets();
    let refusal = |target: &ModelConfig, windows: &[Option<usize>]| {
        target.draft_decoder(windows).unwrap_err().to_string()
    };
    assert!(refusal(&qwen3, &[Some(4), Some(8)]).contains("one size"));
    assert!(refusal(&gemma4, &[None, Some(4)]).contains("last layer of a Gemma 4"));
}

/// The original's norms, and those of its variants.
const NORMS: [Eagle3Norms; 3] = [
    Eagle3Norms { before_residual: false, before_fc: false, fc: false, output: false },
    Eagle3Norms { before_residual: true, before_fc: false, fc: true, output: true },
    Eagle3Norms { before_residual: false, before_fc: true, fc: false, output: false },
];

/// Decoding after token i + 1 equals position i of the training-time test if it samples the tokens
/// of the text.
#[test]
fn eagle3_decodes_as_its_training_time_test_ran() {
    let _guard = tch::no_grad_guard();
    let (sample, steps) = (sample(vec![]), 4);
    for (target, norms) in targets().iter().flat_map(|target| NORMS.map(|norms| (target, norms))) {
        let config = Eagle3Config {
            decoder: DraftDecoder {
                model: target.draft_decoder(&[None, None]).unwrap(),
                taps: Tap::from_layer_ids([1, 3]).unwrap(),
                num_target_layers: 4,
            },
            settings: Eagle3Settings {
                ttt_length: steps,
                step_loss_decay: 0.8,
                norms,
                ..Eagle3Settings::default()
            },
        };
        let (embed, head) = ends();
        let model = Eagle3::fresh(config, &embed, &head, 11, Kind::Float);
        for supervise in [Supervise::Shifted, Supervise::Labels] {
            let normalization = LossNormalization::Global;
            let objective = Eagle3Objective { supervise, step_loss_decay: 0.8, normalization };
            let batch =
                Eagle3Batch::new(std::slice::from_ref(&sample), &objective, steps, Device::Cpu, Kind::Float);
            let batch = batch.unwrap();
            let trained: Vec<Tensor> = model
                .step_states(&batch)
                .iter()
                .enumerate()
                .map(|(s, states)| model.draft_logits(&states.index_select(0, &batch.supervised_indices(s))))
                .map(|logits| logits.softmax(-1, Kind::Float))
                .collect();
            // The first supervised position of each step, and the number of supervised positions.
            let first = |s: usize| match supervise {
                Supervise::Shifted => 5usize.saturating_sub(s),
                Supervise::Labels => 3usize.saturating_sub(s),
            };
            let (embed, head) = ends();
            let model = Eagle3::fresh(model.config().clone(), &embed, &head, 11, Kind::Float);
            let mut proposer = Eagle3Proposer::new(model, 3);
            let mut seen = 0;
            for position in [5, 6, 20, 33] {
                let expected: Vec<Tensor> =
                    (0..steps).map(|s| trained[s].get((position - first(s)) as i64)).collect();
                let expected = Tensor::stack(&expected, 0);
                let tokens = &sample.input_ids[position + 2..position + 2 + steps];
                let context = context(&sample, seen, position + 1 - seen);
                let anchor = Tensor::from_slice(&sample.input_ids[position + 1..position + 2]);
                let uniforms = common::forcing(&expected, tokens);
                let proposal = proposer.propose(&DraftRequest {
                    context: &context,
                    slots: &[2],
                    anchors: &anchor,
                    uniforms: &uniforms,
                    sampling: &at_temperature_one(),
                });
                assert_eq!(Vec::<i64>::try_from(proposal.tokens.reshape([-1])).unwrap(), tokens);
                let what = format!("{} {supervise:?}, position {position}", target.family);
                assert_close(&what, &proposal.probs.expect("drawn at temperature 1").get(0), &expected, 1e-5);
                seen = position + 1;
            }
        }
    }
}

/// The layers' scalars are stored but not trained.
#[test]
fn gemma4_layer_scalars_are_saved_and_not_trained() {
    let [_, gemma4] = targets();
    let block = block(&gemma4, (SlotTarget::AnchorPredicts, false), &[None, None]);
    let scalars = |tensors: &[(String, Tensor)]| {
        tensors.iter().filter(|(name, _)| name.ends_with("layer_scalar")).count()
    };
    assert_eq!((scalars(block.parameters()), scalars(&block.checkpoint())), (0, 2));
}

/// During training, a drafter is evaluated with a packed copy of its current weights.
#[test]
#[cfg_attr(not(feature = "kernels"), ignore = "weights are packed for kernels only")]
fn a_drafter_that_learns_is_packed_as_it_is_now() {
    let _guard = tch::no_grad_guard();
    for target in targets() {
        let block = block(&target, (SlotTarget::AnchorPredicts, false), &[None, None]);
        block.parameters().iter().for_each(|(_, parameter)| drop(parameter.set_requires_grad(true)));
        for (_, parameter) in block.parameters() {
            let _ = parameter.shallow_clone().g_add_scalar_(0.01);
        }
        let packed = block.packed();
        let stored =
            packed.parameters().iter().find(|(name, _)| name.contains("proj") || name.starts_with("fc"));
        assert!(stored.is_none(), "{} is not packed", stored.unwrap().0);
        let by_name = |of: &DSpark| BTreeMap::from_iter(of.checkpoint());
        let (found, expected) = (by_name(&packed), by_name(&block));
        assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
        assert!(found.iter().all(|(name, tensor)| tensor.equal(&expected[name])));
        // A copy, so that it does not change with the parameter.
        let before = by_name(&packed)["fc.weight"].copy();
        let (_, fc) = block.parameters().iter().find(|(name, _)| name == "fc.weight").unwrap();
        let _ = fc.shallow_clone().zero_();
        assert!(by_name(&packed)["fc.weight"].equal(&before));
    }
}

/// With one denominator for the step, a sequence's gradient does not depend on the rest of the
/// batch.
#[test]
fn eagle3_gradients_add_over_sequences() {
    let [target, _] = targets();
    let config = Eagle3Config {
        decoder: DraftDecoder {
            model: target.draft_decoder(&[None]).unwrap(),
            taps: Tap::from_layer_ids([1, 3]).unwrap(),
            num_target_layers: 4,
        },
        settings: Eagle3Settings { ttt_length: 3, step_loss_decay: 0.8, ..Eagle3Settings::default() },
    };
    let objective = Eagle3Objective {
        supervise: Supervise::Labels,
        step_loss_decay: 0.8,
        normalization: LossNormalization::Global,
    };
    let texts = || {
        let long = sample(vec![]);
        let cut = |tensor: &Tensor| tensor.narrow(0, 0, 17);
        let short = TrainSample {
            input_ids: long.input_ids[..17].iter().rev().copied().collect(),
            loss_mask: (0..17).map(|i| (3..6).contains(&i) || i > 12).collect(),
            taps: cut(&long.taps),
            last: cut(&long.last),
            last_positions: (0..17).collect(),
            anchors: vec![],
        };
        // One sample without supervised tokens, and one with supervised tokens in the first step
        // only.
        let silent = TrainSample { loss_mask: vec![false; TOKENS], ..sample(vec![]) };
        let brief = TrainSample { loss_mask: (0..TOKENS).map(|i| i == 2).collect(), ..sample(vec![]) };
        [long, short, silent, brief]
    };
    let (embed, head) = ends();
    let run = |batches: &[&[TrainSample]]| {
        let model = Eagle3::fresh(config.clone(), &embed, &head, 11, Kind::Float);
        model.parameters().iter().for_each(|(_, parameter)| drop(parameter.set_requires_grad(true)));
        let sums: Vec<Tensor> = batches
            .iter()
            .map(|samples| {
                let batch = Eagle3Batch::new(samples, &objective, 3, Device::Cpu, Kind::Float);
                model.accumulate(batch.as_ref(), LossDenominator(4.0), samples.len())
            })
            .collect();
        let gradients: Vec<Tensor> =
            model.parameters().iter().map(|(_, parameter)| parameter.grad()).collect();
        (gradients, Tensor::stack(&sums, 0).sum_dim_intlist(0, false, Kind::Double))
    };
    let texts = texts();
    let (together, apart) = (run(&[&texts]), run(&[&texts[..1], &texts[1..2], &texts[2..3], &texts[3..]]));
    assert_close("sums", &together.1, &apart.1, 1e-4);
    for (a, b) in together.0.iter().zip(&apart.0) {
        assert_close("gradient", a, b, 1e-5 * common::max_abs(b).max(1e-6));
    }
}

/// The closed-form gradients of all steps, computed chunk by chunk, match autograd over whole
/// logits. Rows and vocabulary exceed one chunk and one tile.
#[test]
fn eagle3_gradients_are_autograds() {
    const VOCAB: i64 = 4096;
    const LENGTH: usize = 160;
    let [target, _] = targets();
    let mut model = target.draft_decoder(&[None]).unwrap();
    model.vocab_size = VOCAB;
    let width = model.hidden_size;
    let config = Eagle3Config {
        decoder: DraftDecoder { model, taps: Tap::from_layer_ids([1, 3]).unwrap(), num_target_layers: 4 },
        settings: Eagle3Settings { ttt_length: 3, step_loss_decay: 0.8, ..Eagle3Settings::default() },
    };
    let objective = Eagle3Objective {
        supervise: Supervise::Labels,
        step_loss_decay: 0.8,
        normalization: LossNormalization::Global,
    };
    let kinds = [(Kind::Float, 1e-5), (Kind::BFloat16, 3e-2)];
    for ((kind, tolerance), norms) in kinds.into_iter().flat_map(|kind| NORMS.map(|norms| (kind, norms))) {
        let config = Eagle3Config { settings: Eagle3Settings { norms, ..config.settings }, ..config.clone() };
        let ends = [41, 42].map(|seed| common::noise(seed, &[VOCAB, width]).to_kind(kind));
        let sample = TrainSample {
            input_ids: (0..LENGTH as i64).map(|i| (i * 37 + 11) % VOCAB).collect(),
            loss_mask: vec![true; LENGTH],
            taps: common::noise(43, &[LENGTH as i64, 2 * width]).to_kind(kind),
            last: common::noise(44, &[LENGTH as i64, width]).to_kind(kind),
            last_positions: (0..LENGTH as u32).collect(),
            anchors: vec![],
        };
        let model = Eagle3::fresh(config.clone(), &ends[0], &ends[1], 11, kind);
        let parameters: Vec<Tensor> =
            model.parameters().iter().map(|(_, parameter)| parameter.set_requires_grad(true)).collect();
        let taken = || -> Vec<Tensor> {
            let taken = |parameter: &Tensor| {
                let gradient = parameter.grad().to_kind(Kind::Double).copy();
                parameter.shallow_clone().zero_grad();
                gradient
            };
            parameters.iter().map(taken).collect()
        };
        let batch = Eagle3Batch::new(&[sample], &objective, 3, Device::Cpu, kind).unwrap();
        let sums: Vec<f64> = Vec::try_from(model.accumulate(Some(&batch), LossDenominator(2.0), 1)).unwrap();
        let found = taken();
        let mut loss = Tensor::zeros([], (Kind::Float, Device::Cpu));
        for (step, states) in model.step_states(&batch).iter().enumerate() {
            let rows = states.index_select(0, &batch.supervised_indices(step));
            let target = batch
                .teacher_states(step)
                .matmul(&ends[1].tr())
                .to_kind(Kind::Float)
                .softmax(-1, Kind::Float);
            let draft = model.draft_logits(&rows).log_softmax(-1, Kind::Float);
            let entropy = -(&target * &draft).sum(Kind::Float) / LENGTH as f64;
            let agree = draft.argmax(-1, false).eq_tensor(&target.argmax(-1, false)).sum(Kind::Double);
            let overlap = draft.exp().minimum(&target).sum(Kind::Double);
            let expected =
                [&entropy.to_kind(Kind::Double), &agree, &overlap].map(|sum| sum.double_value(&[]));
            for (place, expected) in [0, 2, 3].into_iter().zip(expected) {
                let found = sums[4 * step + place];
                let error = (found - expected).abs();
                assert!(
                    error <= 1e-4 * expected.abs().max(1.0),
                    "{kind:?}, step {step}: {found} for {expected}"
                );
            }
            loss += entropy * (0.8f64.powi(step as i32) / 2.0);
        }
        loss.backward();
        for (((name, _), found), expected) in model.parameters().iter().zip(found).zip(taken()) {
            let norm = |tensor: &Tensor| tensor.norm().double_value(&[]);
            let error = norm(&(found - &expected));
            assert!(error <= tolerance * norm(&expected), "{kind:?}: {name} is off by {error:e}");
        }
    }
}
