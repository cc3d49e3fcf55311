//! Tests xPress against its formulas and against autograd, and its drafting against its training.

mod common;

use std::fs;
use std::path::Path;

use common::{assert_close, noise};
use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockBatch, BlockSpec, Consistency, Convolution, DraftDecoder, LossDenominator, LossRecipe, LossSum,
    TrainSample, XPRESS_SUMS, XPress, XPressConfig, XPressObjective, XPressProposer, XPressSettings,
};
use deepspec_engine::{Context, DraftRequest, Proposal, Proposer, Sampling, SamplingBatch};
use deepspec_models::{ModelConfig, save};
use deepspec_ops::sample as draw;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

const VOCAB: i64 = 96;
const WIDTH: i64 = 32;
const BLOCK: usize = 6;
const GAMMA: i64 = BLOCK as i64 - 1;
const TOKENS: usize = 40;

/// The backbones of DFlash and of DFlash 2.
const BACKBONES: [Option<Convolution>; 2] = [None, Some(Convolution { kernel_size: 3, group_size: 8 })];

/// A model on the backbone of DFlash; see [`model_on`].
fn model(num_passes: i64) -> XPress {
    model_on(None, num_passes)
}

/// A model whose convolutions and refiner are not trivial, with this number of passes, saved and loaded.
fn model_on(convolution: Option<Convolution>, num_passes: i64) -> XPress {
    let decoder = json!({
        "model_type": "qwen3", "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": VOCAB,
        "initializer_range": 0.2,
    });
    let decoder =
        ModelConfig::parse(Path::new("config.json"), decoder.as_object().cloned().unwrap()).unwrap();
    let blocks = BlockSpec {
        block_size: BLOCK,
        slots: SlotTarget::FillIn,
        mask_token_id: 3,
        causal: false,
        num_anchors: 8,
    };
    let config = XPressConfig {
        decoder: DraftDecoder {
            model: decoder,
            taps: Tap::from_layer_ids([1, 2]).unwrap(),
            num_target_layers: 4,
        },
        settings: XPressSettings { blocks, rank: 5, mlp_ratio: 3, num_passes, convolution },
    };
    config.check().unwrap();
    let ends = [7, 8].map(|seed| noise(seed, &[VOCAB, WIDTH]) * 0.3);
    let model = XPress::fresh(config, &ends[0], &ends[1], 11, Kind::Float);
    for (i, (name, parameter)) in model.parameters().iter().enumerate() {
        let scale = match name.as_str() {
            name if name.starts_with("xpress_head.") => 0.2,
            name if name.contains("_conv.") => 0.1,
            _ => continue,
        };
        let _ = parameter.shallow_clone().g_add_(&(noise(30 + i as u64, &parameter.size()) * scale));
    }
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), Value::Object(model.config().to_json()).to_string()).unwrap();
    save(&dir.path().join("model.safetensors"), &model.checkpoint(), Kind::Float).unwrap();
    let loaded = XPress::load(dir.path(), Device::Cpu, Kind::Float).unwrap();
    assert_eq!(loaded.config().settings, model.config().settings);
    loaded
}

/// Random states for a random text. Some blocks have few supervised tokens, and the first has no token before it.
fn sample() -> TrainSample {
    TrainSample {
        input_ids: (0..TOKENS as i64).map(|i| (i * 37 + 5) % VOCAB).collect(),
        loss_mask: (0..TOKENS).map(|i| i % 13 != 4).collect(),
        taps: noise(5, &[TOKENS as i64, 2 * WIDTH]),
        last: noise(6, &[TOKENS as i64, WIDTH]),
        last_positions: (0..TOKENS as u32).collect(),
        anchors: vec![0, 2, 6, 9, 13, 18, 37],
    }
}

fn batch(model: &XPress, sample: TrainSample) -> BlockBatch {
    model.config().batch(&[sample], 4.0, Device::Cpu, Kind::Float).unwrap()
}

/// Logits `[A, γ, V]` of the LM head, and with the refiner's bias after these tokens `[A, B]`, as the formulas say.
fn logits(model: &XPress, hidden: &Tensor, previous: Option<&Tensor>) -> Tensor {
    let part = |name: &str| {
        let named = model.parameters().iter().find(|(other, _)| *other == format!("xpress_head.{name}"));
        named.unwrap().1.shallow_clone()
    };
    let base = model.base_logits(hidden);
    let all = match previous {
        None => base,
        Some(previous) => {
            let mean = hidden.mean_dim(1, true, Kind::Float).expand_as(hidden);
            let parts = [
                hidden.matmul(&part("down_h.weight").tr()),
                mean.matmul(&part("down_g.weight").tr()),
                Tensor::embedding(&part("w1.weight"), previous, -1, false, false),
            ];
            let x = Tensor::cat(&parts, -1).matmul(&part("in_proj.weight").tr());
            let mixed =
                Tensor::einsum("ckj,njc->nkc", &[part("mix.L").tril(0), x.shallow_clone()], None::<i64>);
            let y = x + mixed;
            let inner = y.matmul(&part("mlp.gate_proj.weight").tr()).silu()
                * y.matmul(&part("mlp.up_proj.weight").tr());
            let features = y + inner.matmul(&part("mlp.down_proj.weight").tr());
            base + features.matmul(&part("w2.weight").tr())
        }
    };
    all.narrow(1, 1, GAMMA)
}

/// The tokens before all slots after these drafts: `[A, γ]` to `[A, B]`.
fn after(known: &Tensor, drafted: &Tensor) -> Tensor {
    Tensor::cat(&[known, &drafted.narrow(1, 0, GAMMA - 1)], 1)
}

/// The objective with its autograd graph and whole tensors of logits, and sums by name. All drafts of a block go on, the unsupervised
/// ones too.
fn slow(
    model: &XPress,
    batch: &BlockBatch,
    objective: &XPressObjective,
) -> (Tensor, Vec<(&'static str, f64)>) {
    let hidden = model.hidden_states(batch);
    let teacher = model.base_logits(&batch.teacher_states()).detach().softmax(-1, Kind::Float);
    let labels = batch.labels.unsqueeze(1);
    let part = |logits: &Tensor| {
        let rows = logits.flatten(0, 1).index_select(0, &batch.supervised_indices);
        let ce = -rows.log_softmax(-1, Kind::Float).gather(1, &labels, false).squeeze_dim(1);
        let l1 = (rows.softmax(-1, Kind::Float) - &teacher).abs().sum_dim_intlist(-1, false, Kind::Float);
        let accept = (&l1 * -0.5 + 1.0).sum(Kind::Float);
        let weighted = |values: &Tensor| (values * &batch.weights).sum(Kind::Float);
        let (ce, l1) = (weighted(&ce), weighted(&l1));
        let loss = &ce * objective.loss.ce_alpha + &l1 * objective.loss.l1_alpha;
        (loss, [ce, l1, accept])
    };
    let base = logits(model, &hidden, None);
    let (forced, [ce, l1, accept]) = part(&logits(model, &hidden, Some(&batch.previous)));
    let (of_base, [_, _, base_accept]) = part(&base);
    let known = batch.previous.narrow(1, 0, 2);
    let mut drafted = base.argmax(-1, false);
    let (mut rounds, mut last) = (vec![], accept.zeros_like());
    for _ in 0..objective.consistency.passes {
        let refined = logits(model, &hidden, Some(&after(&known, &drafted)));
        let (loss, [_, _, accept]) = part(&refined);
        rounds.push(loss);
        last = accept;
        let again = refined.argmax(-1, false);
        assert!(again.ne_tensor(&drafted).any().int64_value(&[]) == 1, "a round changes nothing");
        drafted = again;
    }
    let rounds = Tensor::stack(&rounds, 0).mean(Kind::Float);
    let loss = &forced + &rounds * objective.consistency.alpha + &of_base * objective.base_alpha;
    let sums = [
        ("loss", &loss),
        ("ce", &ce),
        ("l1", &l1),
        ("consistency", &rounds),
        ("base", &of_base),
        ("consistency_accept", &last),
        ("base_accept", &base_accept),
    ];
    let sums = sums.map(|(name, sum)| (name, sum.double_value(&[])));
    (loss / (50.0 + 1e-6), sums.to_vec())
}

#[test]
fn losses_and_gradients_are_autograds() {
    BACKBONES.into_iter().for_each(losses_and_gradients);
}

fn losses_and_gradients(convolution: Option<Convolution>) {
    let model = model_on(convolution, 2);
    for (_, parameter) in model.parameters() {
        let _ = parameter.set_requires_grad(true);
    }
    let objective = XPressObjective {
        loss: LossRecipe { ce_alpha: 0.2, l1_alpha: 0.5, ..LossRecipe::NONE },
        consistency: Consistency { alpha: 0.4, passes: 2 },
        base_alpha: 0.7,
    };
    let batch = batch(&model, sample());
    let (loss, named) = slow(&model, &batch, &objective);
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
    let sums = model.accumulate(&batch, &objective, LossDenominator(50.0), None);
    for ((name, found), (_, expected)) in taken().into_iter().zip(&expected) {
        let size = expected.abs().max().double_value(&[]);
        assert!(size > 0.0, "{name} has gradients of {size}");
        assert_close(&name, &found, expected, 5e-5 * size);
    }
    let sums: Vec<f64> = Vec::try_from(sums).unwrap();
    for (name, expected) in named {
        let place = LossSum::all(BLOCK - 1, &XPRESS_SUMS).position(|sum| sum.name() == name).unwrap();
        let found = sums[place];
        assert!((found - expected).abs() < 1e-4 * expected.max(1.0), "{name}: {found}, {expected}");
    }
}

/// Without rounds and without the LM head's part, the objective is that of the true tokens.
#[test]
fn parts_of_the_objective_can_be_left_out() {
    let model = model(2);
    for (_, parameter) in model.parameters() {
        let _ = parameter.set_requires_grad(true);
    }
    let batch = batch(&model, sample());
    let sums_of = |alpha: f64, passes: usize, base_alpha: f64| {
        let loss = LossRecipe { ce_alpha: 1.0, ..LossRecipe::NONE };
        let objective = XPressObjective { loss, consistency: Consistency { alpha, passes }, base_alpha };
        let sums: Vec<f64> =
            Vec::try_from(model.accumulate(&batch, &objective, LossDenominator(50.0), None)).unwrap();
        let names = LossSum::all(BLOCK - 1, &XPRESS_SUMS).map(LossSum::name);
        names.zip(sums).collect::<std::collections::BTreeMap<String, f64>>()
    };
    let whole = sums_of(0.4, 2, 0.7);
    for alone in [sums_of(0.0, 2, 0.0), sums_of(0.4, 0, 0.0)] {
        // The loss is summed in float64, its parts in float32.
        assert!((alone["loss"] - alone["ce"]).abs() < 1e-6 * alone["ce"] && alone["consistency"] == 0.0);
        assert_eq!((alone["ce"], alone["base"]), (whole["ce"], whole["base"]));
    }
    let expected = whole["ce"] + 0.4 * whole["consistency"] + 0.7 * whole["base"];
    assert!((whole["loss"] - expected).abs() < 1e-6 * expected && whole["consistency"] > 0.0);
}

fn context(sample: &TrainSample, slot: usize, first: usize, end: usize) -> Context {
    Context {
        captured_states: sample.taps.narrow(0, first as i64, (end - first) as i64),
        hidden: None,
        tokens: Tensor::from_slice(&sample.input_ids[first..end]),
        next: Tensor::from_slice(&sample.input_ids[first + 1..=end]),
        chunks: if first < end { vec![(slot, end - first)] } else { vec![] },
    }
}

fn uniforms(seed: usize) -> Tensor {
    noise(seed as u64, &[1, GAMMA]).to_kind(Kind::Double).sigmoid()
}

fn propose(
    proposer: &mut XPressProposer,
    context: &Context,
    anchor: i64,
    seed: usize,
    heat: f64,
) -> Proposal {
    proposer.propose(&DraftRequest {
        context,
        slots: &[2],
        anchors: &Tensor::from_slice(&[anchor]),
        uniforms: &uniforms(seed),
        sampling: &SamplingBatch::new(vec![Sampling::new(heat, 0)], Device::Cpu),
    })
}

/// The reported distributions are the softmax of the last pass's logits, and the tokens are drawn from them.
#[test]
fn it_drafts_by_jacobi_passes() {
    let _guard = tch::no_grad_guard();
    let [dflash, dflash2] = BACKBONES;
    for (convolution, num_passes, heat) in
        [(dflash, 1, 0.0), (dflash, 3, 0.0), (dflash2, 3, 0.0), (dflash2, 3, 0.8)]
    {
        let mut proposer = XPressProposer::new(model_on(convolution, num_passes), 3);
        let (sample, mut seen) = (sample(), 0);
        for &anchor in &sample.anchors[1..] {
            let given = context(&sample, 2, seen, anchor);
            let proposal = propose(&mut proposer, &given, sample.input_ids[anchor], anchor, heat);
            seen = anchor;
            let model = proposer.model();
            let batch = batch(model, TrainSample { anchors: vec![anchor], ..self::sample() });
            let hidden = model.hidden_states(&batch);
            let known = Tensor::from_slice(&sample.input_ids[anchor - 1..=anchor]).unsqueeze(0);
            let mut drafted = logits(model, &hidden, None).argmax(-1, false);
            let mut last = drafted.shallow_clone();
            for _ in 0..num_passes {
                last = logits(model, &hidden, Some(&after(&known, &drafted)));
                drafted = last.argmax(-1, false);
            }
            if heat == 0.0 {
                assert_eq!(proposal.tokens, drafted, "{num_passes} passes, anchor {anchor}");
                continue;
            }
            let probs = proposal.probs.expect("drawn at temperature 0.8");
            assert_close("q", &probs, &(last / heat).softmax(-1, Kind::Float), 1e-5);
            let drawn: Vec<Tensor> =
                (0..GAMMA).map(|k| draw(&probs.select(1, k), &uniforms(anchor).select(1, k))).collect();
            assert_eq!(proposal.tokens, Tensor::stack(&drawn, 1));
        }
    }
}

/// A slot is final one pass after the slot before it, so γ passes draft what drafting in turn would.
#[test]
fn as_many_passes_as_drafts_are_drafting_in_turn() {
    let _guard = tch::no_grad_guard();
    let (few, many) = (model(1), model(GAMMA));
    let mut changed = 0;
    for &anchor in &sample().anchors[1..] {
        let sample = sample();
        let tokens = |model: XPress| {
            let mut proposer = XPressProposer::new(model, 3);
            propose(&mut proposer, &context(&sample, 2, 0, anchor), sample.input_ids[anchor], 0, 0.0).tokens
        };
        let (early, found) = (tokens(few.share()), tokens(many.share()));
        changed += i64::from(early != found);
        let batch = batch(&many, TrainSample { anchors: vec![anchor], ..self::sample() });
        let hidden = many.hidden_states(&batch);
        let known = Tensor::from_slice(&sample.input_ids[anchor - 1..=anchor]).unsqueeze(0);
        let in_turn = Tensor::zeros([1, GAMMA], (Kind::Int64, Device::Cpu));
        for k in 0..GAMMA {
            let best = logits(&many, &hidden, Some(&after(&known, &in_turn))).argmax(-1, false);
            in_turn.select(1, k).copy_(&best.select(1, k));
        }
        assert_eq!(found, in_turn, "anchor {anchor}");
    }
    assert!(changed > 0, "one pass is enough everywhere");
}

/// The token before the anchor is that of the last context, also if a step is repeated without its context.
#[test]
fn the_token_before_the_anchor_is_kept() {
    let _guard = tch::no_grad_guard();
    let (mut proposer, sample) = (XPressProposer::new(model(3), 3), sample());
    let heat = 0.8;
    let mut probs =
        |given: &Context| propose(&mut proposer, given, sample.input_ids[9], 1, heat).probs.unwrap();
    let first = probs(&context(&sample, 2, 0, 9));
    assert!(probs(&context(&sample, 2, 9, 9)).equal(&first));
    // It has an effect.
    let given = context(&sample, 2, 0, 9);
    let _ = given.tokens.get(8).fill_(50);
    proposer.truncate(2, 0);
    let other = propose(&mut proposer, &given, sample.input_ids[9], 1, heat).probs.unwrap();
    assert!(!other.allclose(&first, 1e-3, 1e-3, false));
}

/// Drafts of a block have the same bits in every batch.
#[test]
#[cfg_attr(not(feature = "kernels"), ignore = "rows have the same bits in every batch with kernels only")]
fn drafts_do_not_depend_on_other_slots() {
    for backbone in BACKBONES {
        check_drafts_of_other_slots(backbone);
    }
}

fn check_drafts_of_other_slots(backbone: Option<Convolution>) {
    let _guard = tch::no_grad_guard();
    let (model, sample) = (model_on(backbone, 3).packed(), sample());
    let lengths = [9_usize, 20, 31];
    let probs = |slots: &[usize]| {
        let parts: Vec<Context> =
            slots.iter().map(|&slot| context(&sample, slot, 0, lengths[slot])).collect();
        let joined = |of: fn(&Context) -> &Tensor| Tensor::cat(&parts.iter().map(of).collect::<Vec<_>>(), 0);
        let anchors: Vec<i64> = slots.iter().map(|&slot| sample.input_ids[lengths[slot]]).collect();
        let mut proposer = XPressProposer::new(model.share(), lengths.len());
        let proposal = proposer.propose(&DraftRequest {
            context: &Context {
                captured_states: joined(|part| &part.captured_states),
                hidden: None,
                tokens: joined(|part| &part.tokens),
                next: joined(|part| &part.next),
                chunks: parts.iter().flat_map(|part| part.chunks.clone()).collect(),
            },
            slots,
            anchors: &Tensor::from_slice(&anchors),
            uniforms: &Tensor::full([slots.len() as i64, GAMMA], 0.5, (Kind::Double, Device::Cpu)),
            sampling: &SamplingBatch::new(vec![Sampling::new(1.0, 0); slots.len()], Device::Cpu),
        });
        proposal.probs.unwrap()
    };
    let together = probs(&[2, 0, 1]);
    for (place, slot) in [2, 0, 1].into_iter().enumerate() {
        assert!(probs(&[slot]).get(0).equal(&together.get(place as i64)), "slot {slot}");
    }
}
