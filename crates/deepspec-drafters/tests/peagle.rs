//! P-EAGLE: decoding computes what training computes, gradients are autograd's, and segments add up to the whole.

mod common;

use std::path::Path;

use common::{assert_close, noise};
use deepspec_core::{FinalStates, Tap};
use deepspec_drafters::{
    DownSampling, DraftDecoder, DrafterPlan, Eagle3Norms, LossDenominator, PEagle, PEagleBatch, PEagleConfig,
    PEagleObjective, PEaglePlan, PEagleProposer, PEagleSettings, TrainSample,
};
use deepspec_engine::{Context, DraftRequest, Proposal, Proposer, Sampling, SamplingBatch};
use deepspec_models::ModelConfig;
use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor};

const TOKENS: usize = 40;
const VOCAB: i64 = 64;
const WIDTH: i64 = 32;
const DEPTHS: usize = 4;
const MASK: i64 = VOCAB - 1;
const SAMPLING: DownSampling = DownSampling { depths: DEPTHS, ratio: 0.7, least_ratio: 0.2 };
const NORMS: [Eagle3Norms; 2] = [
    Eagle3Norms { before_residual: false, before_fc: false, fc: false, output: false },
    Eagle3Norms { before_residual: true, before_fc: false, fc: true, output: false },
];

/// Targets whose weights are large enough that every part of the model affects its output.
fn targets() -> [ModelConfig; 3] {
    let common = json!({
        "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "initializer_range": 0.3,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    });
    let gemma4 = json!({
        "model_type": "gemma4_unified_text", "global_head_dim": 16, "num_global_key_value_heads": 1,
        "attention_k_eq_v": true, "sliding_window": 8, "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    });
    let llama = json!({"model_type": "llama", "rope_theta": 1e4});
    [json!({"model_type": "qwen3", "rope_theta": 1e5}), gemma4, llama].map(|own| {
        let mut raw = common.as_object().cloned().unwrap();
        raw.extend(own.as_object().cloned().unwrap());
        ModelConfig::parse(Path::new("config.json"), raw).unwrap()
    })
}

fn config(target: &ModelConfig, norms: Eagle3Norms) -> PEagleConfig {
    PEagleConfig {
        decoder: DraftDecoder {
            model: target.draft_decoder(&[None; 3]).unwrap(),
            taps: Tap::from_layer_ids([0, 2]).unwrap(),
            num_target_layers: target.layers.len(),
        },
        settings: PEagleSettings { num_depths: DEPTHS, mask_token_id: MASK, draft_vocab_size: None, norms },
    }
}

fn fresh(config: PEagleConfig, kind: Kind) -> PEagle {
    let shape = [config.model().vocab_size, WIDTH];
    let ends = [3, 4].map(|seed| (noise(seed, &shape) * 0.3).to_kind(kind));
    PEagle::fresh(config, &ends[0], &ends[1], 11, kind)
}

fn plan(config: PEagleConfig, segments: usize) -> PEaglePlan {
    PEaglePlan::new(config, PEagleObjective { sampling: SAMPLING, segments })
}

/// Evenly spread candidates, other ones for other draws.
fn spread(candidates: &[usize], count: usize, draw: usize) -> Vec<usize> {
    let stride = (candidates.len() / count).max(1);
    candidates.iter().copied().skip(draw % stride).step_by(stride).take(count).collect()
}

/// A text in which everything after token 4 is supervised, with sampled rows.
fn sample(tokens: usize, width: i64) -> TrainSample {
    let loss_mask: Vec<bool> = (0..tokens).map(|i| i > 4).collect();
    TrainSample {
        input_ids: (0..tokens as i64).map(|i| (i * i + 3 * i) % VOCAB).collect(),
        anchors: SAMPLING.sample(&loss_mask, &mut spread),
        loss_mask,
        taps: noise(5, &[tokens as i64, 2 * width]),
        last: noise(6, &[tokens as i64, width]),
        last_positions: (0..tokens as u32).collect(),
    }
}

fn batch(sample: TrainSample) -> PEagleBatch {
    let kind = sample.last.kind();
    PEagleBatch::new(&[sample], MASK, (0, 1), Device::Cpu, kind).unwrap()
}

/// The tokens from `seen` up to `end`, of the sequence in `slot`.
fn context(sample: &TrainSample, slot: usize, seen: usize, end: usize) -> Context {
    let rows = end - seen;
    let [tokens, next] =
        [seen, seen + 1].map(|from| Tensor::from_slice(&sample.input_ids[from..from + rows]));
    Context {
        captured_states: sample.taps.narrow(0, seen as i64, rows as i64),
        hidden: None,
        tokens,
        next,
        chunks: if rows == 0 { vec![] } else { vec![(slot, rows)] },
    }
}

fn both(a: Context, b: Context) -> Context {
    let cat = |a: Tensor, b: Tensor| Tensor::cat(&[a, b], 0);
    Context {
        captured_states: cat(a.captured_states, b.captured_states),
        hidden: None,
        tokens: cat(a.tokens, b.tokens),
        next: cat(a.next, b.next),
        chunks: [a.chunks, b.chunks].concat(),
    }
}

/// Proposals at temperature 1 that draw `tokens [S, γ]` from `expected [S, γ, V]`.
fn propose(
    proposer: &mut PEagleProposer,
    context: &Context,
    slots: &[usize],
    expected: &Tensor,
    tokens: &[&[i64]],
) -> Proposal {
    let uniforms = tokens.iter().enumerate();
    let uniforms: Vec<Tensor> =
        uniforms.map(|(row, tokens)| common::forcing(&expected.get(row as i64), tokens)).collect();
    proposer.propose(&DraftRequest {
        context,
        slots,
        anchors: &Tensor::zeros([slots.len() as i64], (Kind::Int64, Device::Cpu)),
        uniforms: &Tensor::cat(&uniforms, 0),
        sampling: &SamplingBatch::new(vec![Sampling::new(1.0, 0); slots.len()], Device::Cpu),
    })
}

/// Distributions that training computes for the chain at `anchor`: the row of depth 0 and the masked rows, `[γ, V]`.
fn trained(model: &PEagle, sample: &TrainSample, anchor: usize) -> Tensor {
    let chain = TrainSample {
        input_ids: sample.input_ids.clone(),
        loss_mask: vec![true; TOKENS],
        taps: sample.taps.shallow_clone(),
        last: sample.last.shallow_clone(),
        last_positions: sample.last_positions.clone(),
        anchors: vec![anchor; DEPTHS - 1],
    };
    let states = model.row_states(&batch(chain));
    let positions = states.size()[0] - (DEPTHS as i64 - 1);
    let rows = [states.narrow(0, anchor as i64, 1), states.narrow(0, positions, DEPTHS as i64 - 1)];
    model.draft_logits(&Tensor::cat(&rows, 0)).softmax(-1, Kind::Float)
}

/// Decoding after token p + 1 drafts from the chain at position p. Masked rows of earlier proposals leave no trace.
#[test]
fn drafts_are_drawn_from_the_chains_of_training() {
    let _guard = tch::no_grad_guard();
    let sample = sample(TOKENS, WIDTH);
    for (target, norms) in targets().into_iter().flat_map(|target| NORMS.map(|norms| (target.clone(), norms)))
    {
        let model = fresh(config(&target, norms), Kind::Float);
        let mut proposer = PEagleProposer::new(fresh(config(&target, norms), Kind::Float), 3);
        assert!(!proposer.reads_hidden() && proposer.draft_len() == DEPTHS);
        let mut seen = 0;
        for position in [5, 6, 20, 33] {
            let expected = trained(&model, &sample, position).unsqueeze(0);
            let tokens = &sample.input_ids[position + 2..position + 2 + DEPTHS];
            let what = format!("{}, position {position}", target.family);
            // The second proposal has no new context.
            for seen in [seen, position + 1] {
                let context = context(&sample, 2, seen, position + 1);
                let proposal = propose(&mut proposer, &context, &[2], &expected, &[tokens]);
                assert_eq!(Vec::<i64>::try_from(proposal.tokens.reshape([-1])).unwrap(), tokens);
                assert_close(&what, &proposal.probs.expect("drawn at temperature 1"), &expected, 1e-5);
            }
            seen = position + 1;
        }
    }
}

/// Two sequences, of which only one has new context, or only one drafts.
#[test]
fn sequences_draft_alone_and_together_alike() {
    let _guard = tch::no_grad_guard();
    let [target, ..] = targets();
    let (text, model) = (sample(TOKENS, WIDTH), fresh(config(&target, NORMS[0]), Kind::Float));
    let mut proposer = PEagleProposer::new(fresh(config(&target, NORMS[0]), Kind::Float), 3);
    let expected = |positions: &[usize]| {
        Tensor::stack(&positions.iter().map(|&at| trained(&model, &text, at)).collect::<Vec<_>>(), 0)
    };
    let tokens = |position: usize| &text.input_ids[position + 2..position + 2 + DEPTHS];
    let mut check = |context: &Context, slots: &[usize], positions: &[usize]| {
        let expected = expected(positions);
        let tokens: Vec<&[i64]> = positions.iter().map(|&position| tokens(position)).collect();
        let proposal = propose(&mut proposer, context, slots, &expected, &tokens);
        assert_close(&format!("{slots:?}"), &proposal.probs.unwrap(), &expected, 1e-5);
    };
    check(&both(context(&text, 0, 0, 9), context(&text, 2, 0, 21)), &[2, 0], &[20, 8]);
    check(&context(&text, 2, 21, 24), &[0, 2], &[8, 23]);
    check(&both(context(&text, 2, 24, 26), context(&text, 0, 9, 12)), &[0], &[11]);
    check(&context(&text, 0, 12, 12), &[2], &[25]);
}

/// A saved drafter is the one that was saved, in the target's family.
#[test]
fn checkpoints_hold_the_whole_drafter() {
    let _guard = tch::no_grad_guard();
    for (target, class) in targets().iter().zip(["Qwen3PEagleModel", "Gemma4PEagleModel", "LlamaPEagleModel"])
    {
        let model = fresh(config(target, NORMS[1]), Kind::Float);
        let dir = tempfile::tempdir().unwrap();
        let map = model.config().to_json();
        assert_eq!(map["architectures"], json!([class]));
        assert_eq!((&map["num_depths"], &map["mask_token_id"]), (&json!(DEPTHS), &json!(MASK)));
        let write = |map: &Map<String, Value>| {
            std::fs::write(dir.path().join("config.json"), json!(map).to_string()).unwrap();
        };
        write(&map);
        deepspec_models::save(&dir.path().join("model.safetensors"), &model.checkpoint(), Kind::Float)
            .unwrap();
        let loaded = PEagle::load(dir.path(), Device::Cpu, Kind::Float).unwrap();
        let [own, other] = [&model, &loaded].map(|model| model.row_states(&batch(sample(TOKENS, WIDTH))));
        assert!(own.equal(&other), "{class}");
        for (key, value, told) in [
            ("num_depths", json!(1), "1 is not between 2 and 64"),
            ("num_depths", json!(null), "num_depths"),
            ("mask_token_id", json!(VOCAB), "64 is no token of the target; expected 0 to 63"),
            ("norm_output", json!(true), "never reads its own states"),
            ("norm_before_fc", json!(true), "fc_norm"),
        ] {
            let mut wrong = map.clone();
            wrong.insert(key.into(), value);
            write(&wrong);
            let error = PEagle::load(dir.path(), Device::Cpu, Kind::Float).err().unwrap().to_string();
            assert!(error.contains(told), "{error}");
        }
    }
}

fn gradients(model: &PEagle) -> Vec<Tensor> {
    let taken = |(_, parameter): &(String, Tensor)| {
        let gradient = parameter.grad().to_kind(Kind::Double).copy();
        parameter.shallow_clone().zero_grad();
        gradient
    };
    model.parameters().iter().map(taken).collect()
}

fn learning(model: PEagle) -> PEagle {
    model.parameters().iter().for_each(|(_, parameter)| drop(parameter.set_requires_grad(true)));
    model
}

/// Divergence of each row, computed by autograd over whole logits, and the metrics of the same rows.
#[test]
fn losses_and_gradients_are_autograds() {
    const VOCAB: i64 = 4096;
    const LENGTH: usize = 160;
    let [target, ..] = targets();
    let mut config = config(&target, NORMS[0]);
    config.decoder.model.vocab_size = VOCAB;
    for (kind, tolerance) in [(Kind::Float, 1e-5), (Kind::BFloat16, 3e-2)] {
        let loss_mask: Vec<bool> = (0..LENGTH).map(|i| i > 8 && i % 9 != 0).collect();
        let sample = TrainSample {
            input_ids: (0..LENGTH as i64).map(|i| (i * 37 + 11) % VOCAB).collect(),
            anchors: SAMPLING.sample(&loss_mask, &mut spread),
            loss_mask,
            taps: noise(43, &[LENGTH as i64, 2 * WIDTH]).to_kind(kind),
            last: noise(44, &[LENGTH as i64, WIDTH]).to_kind(kind),
            last_positions: (0..LENGTH as u32).collect(),
        };
        let plan = plan(config.clone(), 1);
        assert_eq!((plan.final_states(), plan.reads_last_token_state()), (FinalStates::Supervised, false));
        let denominator = plan.loss_denominator_part(&sample.loss_mask, &sample.anchors);
        let is_supervised = |position: usize| sample.loss_mask.get(position + 2) == Some(&true);
        // Anchor, depth and row of all supervised rows.
        let last = (0..LENGTH).rev().find(|&position| is_supervised(position)).unwrap();
        let mut rows: Vec<(usize, usize, i64)> = (0..=last)
            .filter(|&position| is_supervised(position))
            .map(|position| (position, 0, position as i64))
            .collect();
        for (row, &anchor) in sample.anchors.iter().enumerate() {
            let depth = 1 + sample.anchors[..row].iter().filter(|&&other| other == anchor).count();
            rows.push((anchor, depth, (last + 1 + row) as i64));
        }
        assert_eq!(denominator, rows.len() as f64);
        let model = learning(fresh(config.clone(), kind));
        let (states_of, last_states) = (sample.last.shallow_clone(), sample.last_positions.len());
        assert_eq!(last_states, LENGTH);
        let batch = batch(sample);
        let sums = Vec::<f64>::try_from(model.accumulate(&batch, LossDenominator(denominator))).unwrap();
        let metrics = (plan.metric_defs().compute)(&sums, 1);
        let found = gradients(&model);

        let head = model.embed_and_head().1;
        let states = model.row_states(&batch);
        let select = |of: &Tensor, index: &dyn Fn(&(usize, usize, i64)) -> i64| {
            of.index_select(0, &Tensor::from_slice(&rows.iter().map(index).collect::<Vec<_>>()))
        };
        let draft = model.draft_logits(&select(&states, &|row| row.2)).softmax(-1, Kind::Float);
        let teacher = select(&states_of, &|row| (row.0 + row.1) as i64 + 1);
        let teacher = teacher.matmul(&head.tr()).to_kind(Kind::Float).softmax(-1, Kind::Float);
        let kl = (&teacher * (teacher.log() - draft.log())).sum_dim_intlist(-1, false, Kind::Float);
        (kl.sum(Kind::Float) / denominator).backward();
        let values = |of: Tensor| Vec::<f64>::try_from(of.to_kind(Kind::Double).detach()).unwrap();
        let agree = values(draft.argmax(-1, false).eq_tensor(&teacher.argmax(-1, false)));
        let overlap = values(draft.minimum(&teacher).sum_dim_intlist(-1, false, Kind::Float));
        let kl = values(kl);
        let mean = |of: &[f64], keep: &dyn Fn(usize) -> bool| {
            let kept: Vec<f64> = (0..rows.len()).filter(|&row| keep(row)).map(|row| of[row]).collect();
            kept.iter().sum::<f64>() / kept.len() as f64
        };
        let near = |key: &str, found: f64, expected: f64| {
            let error = (found - expected).abs();
            assert!(error <= 1e-4 * expected.abs().max(1.0), "{kind:?}, {key}: {found} for {expected}");
        };
        near("loss", metrics["loss"].as_f64().unwrap(), mean(&kl, &|_| true));
        let mut taus = [1.0, 1.0];
        for depth in 0..DEPTHS {
            let of_depth = |row: usize| rows[row].1 == depth;
            for (key, values) in [("step_loss", &kl), ("accuracy", &agree), ("accept_rate", &overlap)] {
                near(key, metrics[key][depth].as_f64().unwrap(), mean(values, &of_depth));
            }
            // Chains that begin at an anchor with a loss.
            let chain = |anchor: usize| -> Vec<usize> {
                (0..rows.len()).filter(|&row| rows[row].0 == anchor && rows[row].1 <= depth).collect()
            };
            let chains: Vec<Vec<usize>> =
                (0..LENGTH).map(chain).filter(|rows| rows.len() == depth + 1).collect();
            assert!(!chains.is_empty());
            for (tau, accept) in taus.iter_mut().zip([&agree, &overlap]) {
                let survival = chains.iter().map(|rows| rows.iter().map(|&row| accept[row]).product::<f64>());
                *tau += survival.sum::<f64>() / chains.len() as f64;
            }
        }
        near("tau_greedy", metrics["tau_greedy"].as_f64().unwrap(), taus[0]);
        near("tau_probabilistic", metrics["tau_probabilistic"].as_f64().unwrap(), taus[1]);
        for (((name, _), found), expected) in model.parameters().iter().zip(found).zip(gradients(&model)) {
            let norm = |tensor: &Tensor| tensor.norm().double_value(&[]);
            let error = norm(&(found - &expected));
            assert!(error <= tolerance * norm(&expected), "{kind:?}: {name} is off by {error:e}");
        }
    }
}

/// Samples of different lengths, without labels, with one label, and without masked rows.
fn texts() -> [TrainSample; 5] {
    let masked = |tokens: usize, mask: &dyn Fn(usize) -> bool| {
        let loss_mask: Vec<bool> = (0..tokens).map(mask).collect();
        let anchors = SAMPLING.sample(&loss_mask, &mut spread);
        TrainSample { loss_mask, anchors, ..sample(tokens, WIDTH) }
    };
    [
        sample(TOKENS, WIDTH),
        masked(17, &|i| (3..6).contains(&i) || i > 12),
        masked(TOKENS, &|_| false),
        masked(TOKENS, &|i| i == 2),
        masked(600, &|_| true),
    ]
}

/// Sums of the metrics and gradients of passes over some batches.
fn run(batches: &[&[TrainSample]], segments: usize) -> (Vec<Tensor>, Tensor) {
    let [target, ..] = targets();
    let model = learning(fresh(config(&target, NORMS[1]), Kind::Float));
    let passes = batches.iter().flat_map(|samples| {
        let batch = |index| PEagleBatch::new(samples, MASK, (index, segments), Device::Cpu, Kind::Float);
        (0..segments).filter_map(batch)
    });
    let sums: Vec<Tensor> = passes.map(|batch| model.accumulate(&batch, LossDenominator(40.0))).collect();
    (gradients(&model), Tensor::stack(&sums, 0).sum_dim_intlist(0, false, Kind::Double))
}

fn assert_same(what: &str, found: &(Vec<Tensor>, Tensor), expected: &(Vec<Tensor>, Tensor)) {
    assert_close(what, &found.1, &expected.1, 1e-3);
    for (found, expected) in found.0.iter().zip(&expected.0) {
        let error = (found - expected).norm().double_value(&[]);
        assert!(error <= 1e-5 * expected.norm().double_value(&[]), "{what}: off by {error:e}");
    }
}

/// With one denominator for the step, a sequence's gradient does not depend on the rest of the batch: no row sees another sequence.
#[test]
fn gradients_add_over_sequences() {
    let texts = texts();
    let [target, ..] = targets();
    let plan = plan(config(&target, NORMS[1]), 1);
    let parts = texts.each_ref().map(|text| plan.loss_denominator_part(&text.loss_mask, &text.anchors));
    assert_eq!((parts[2], parts[3]), (0.0, 1.0));
    let alone: Vec<&[TrainSample]> = texts.chunks(1).collect();
    assert_same("sequences", &run(&alone, 1), &run(&[&texts], 1));
}

/// A pass over a segment has the losses of its anchors, and all positions before them. More segments than rows do no harm.
#[test]
fn segments_add_up_to_the_whole_batch() {
    let texts = texts();
    let whole = run(&[&texts], 1);
    for segments in [2, 3, 7, 200] {
        assert_same(&format!("{segments} segments"), &run(&[&texts], segments), &whole);
    }
}
