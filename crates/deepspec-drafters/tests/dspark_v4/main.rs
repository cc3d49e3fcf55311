//! Tests DSpark of DeepSeek-V4: against its formulas in float64, the formulas against transformers' modules, its decoding against its
//! training, and what its parts do.
//!
//! The comparisons in float64 run only if `DEEPSPEC_TEST_PYTHON` names a Python with torch, transformers and safetensors.

#[path = "../common/mod.rs"]
mod common;
mod flash;
mod released;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{assert_close, max_abs, noise};
use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockBatch, BlockSpec, DSPARK_SUMS, DSparkObjective, DSparkV4, DSparkV4Config, DSparkV4Proposer,
    DSparkV4Settings, DraftDecoder, LossDenominator, LossRecipe, LossSum, StageSettings, TrainSample,
};
use deepspec_engine::{Context, DraftRequest, Proposal, Proposer, Sampling, SamplingBatch};
use deepspec_models::{ModelConfig, save};
use deepspec_testkit::skip;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

const VOCAB: i64 = 96;
const WIDTH: i64 = 32;
const BLOCK: usize = 5;
const TOKENS: usize = 150;
const LOSS: LossRecipe = LossRecipe { ce_alpha: 0.1, l1_alpha: 0.9, decay_gamma: 4.0, ..LossRecipe::NONE };
const OBJECTIVE: DSparkObjective = DSparkObjective { loss: LOSS, confidence_alpha: 0.7 };
const FORWARD: f64 = 1e-4;
const GRADIENT: f64 = 5e-4;

/// Small stages with the window and the Sinkhorn iterations of DeepSeek-V4, whose experts reach their limit.
const SMALL: StageSettings = StageSettings {
    num_attention_heads: 4,
    head_dim: 16,
    qk_rope_head_dim: 8,
    q_lora_rank: 12,
    o_lora_rank: 10,
    o_groups: 2,
    sliding_window: 128,
    rope_theta: 1e4,
    rms_norm_eps: 1e-6,
    n_routed_experts: 8,
    num_experts_per_tok: 3,
    moe_intermediate_size: 24,
    routed_scaling_factor: 1.5,
    swiglu_limit: 0.8,
    hc_mult: 4,
    hc_sinkhorn_iters: 20,
    hc_eps: 1e-6,
};

fn model(stages: StageSettings) -> DSparkV4 {
    let model = json!({
        "model_type": "qwen3", "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": VOCAB,
        "initializer_range": 0.3,
    });
    let model = ModelConfig::parse(Path::new("config.json"), model.as_object().cloned().unwrap()).unwrap();
    let decoder = DraftDecoder { model, taps: Tap::from_layer_ids([1, 2]).unwrap(), num_target_layers: 4 };
    let blocks = BlockSpec {
        block_size: BLOCK,
        slots: SlotTarget::AnchorPredicts,
        mask_token_id: 3,
        causal: false,
        num_anchors: 8,
    };
    let config = DSparkV4Config { decoder, settings: DSparkV4Settings { blocks, markov_rank: 10, stages } };
    config.check().unwrap();
    let (embed, head) = (noise(7, &[VOCAB, WIDTH]), noise(8, &[VOCAB, WIDTH]) * 0.3);
    let model = DSparkV4::fresh(config, &embed, &head, 11, Kind::Float);
    // Norms, sinks, biases and factors that are not all the same.
    for (seed, (_, tensor)) in model.checkpoint().iter().filter(|(_, tensor)| tensor.dim() == 1).enumerate() {
        let _ = tensor.shallow_clone().g_add_(&(noise(20 + seed as u64, &tensor.size()) * 0.5));
    }
    model
}

/// The tensors of a model whose names end with `end`.
fn tensors(model: &DSparkV4, end: &str) -> Vec<Tensor> {
    let found = model.checkpoint().into_iter().filter(|(name, _)| name.ends_with(end));
    found.map(|(_, tensor)| tensor).collect()
}

/// Random states for a random text. Two anchors have more context than the window, the last one few supervised tokens behind it.
fn sample() -> TrainSample {
    TrainSample {
        input_ids: (0..TOKENS as i64).map(|i| (i * 37 + 5) % VOCAB).collect(),
        loss_mask: (0..TOKENS).map(|i| i > 2 && i != 66).collect(),
        taps: noise(5, &[TOKENS as i64, 2 * WIDTH]),
        last: noise(6, &[TOKENS as i64, WIDTH]),
        last_positions: (0..TOKENS as u32).collect(),
        anchors: vec![3, 63, 128, 140, 147],
    }
}

fn batch(model: &DSparkV4) -> BlockBatch {
    model.config().batch(&[sample()], LOSS.decay_gamma, Device::Cpu, Kind::Float).unwrap()
}

/// Writes two models with their inputs, each into its own folder of `root`. The tolerances see where the second one adds its ε.
fn write_cases(root: &Path) -> [(PathBuf, DSparkV4); 2] {
    let other = StageSettings {
        o_groups: 4,
        sliding_window: 6,
        n_routed_experts: 5,
        num_experts_per_tok: 2,
        swiglu_limit: 0.0,
        hc_mult: 2,
        hc_sinkhorn_iters: 2,
        hc_eps: 1e-2,
        rms_norm_eps: 1e-3,
        ..SMALL
    };
    let given = sample();
    let anchors: Vec<i64> = given.anchors.iter().map(|&anchor| anchor as i64).collect();
    let tensors = [
        ("input_ids", Tensor::from_slice(&given.input_ids)),
        ("taps", given.taps),
        ("last", given.last),
        ("loss_mask", Tensor::from_slice(&given.loss_mask)),
        ("anchors", Tensor::from_slice(&anchors)),
        ("decay_gamma", Tensor::from(LOSS.decay_gamma)),
        ("alphas", Tensor::from_slice(&[LOSS.ce_alpha, LOSS.l1_alpha, OBJECTIVE.confidence_alpha])),
    ];
    [("small", SMALL), ("other", other)].map(|(name, stages)| {
        let (dir, model) = (root.join(name), model(stages));
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("config.json"), Value::Object(model.config().to_json()).to_string()).unwrap();
        save(&dir.join("model.safetensors"), &model.checkpoint(), Kind::Float).unwrap();
        Tensor::write_safetensors(&tensors, dir.join("given.safetensors")).unwrap();
        (dir, model)
    })
}

/// Runs a script of this folder on configs, weights and inputs of all cases, each followed by its file `output`.
fn run_on_cases(python: &str, script: &str, cases: &[(PathBuf, DSparkV4)], output: Option<&str>) {
    let files = ["config.json", "model.safetensors", "given.safetensors"].into_iter().chain(output);
    let files = cases.iter().flat_map(|(dir, _)| files.clone().map(|file| dir.join(file)));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(script);
    let run = Command::new(python).arg(script).args(files).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
}

/// The next test compares with the formulas, and by this one with an implementation of others.
#[test]
fn the_formulas_are_those_of_transformers() {
    let Some(python) = skip::python("torch, transformers and safetensors") else { return };
    let root = tempfile::tempdir().unwrap();
    run_on_cases(&python, "dspark_v4_transformers.py", &write_cases(root.path()), None);
}

#[test]
fn logits_losses_and_gradients_are_those_of_the_formulas_in_float64() {
    let Some(python) = skip::python("torch and safetensors") else { return };
    let root = tempfile::tempdir().unwrap();
    let cases = write_cases(root.path());
    run_on_cases(&python, "dspark_v4.py", &cases, Some("out.safetensors"));
    for (dir, model) in &cases {
        let out = Tensor::read_safetensors(dir.join("out.safetensors")).unwrap();
        compare(model, &out.into_iter().collect());
    }
}

fn compare(model: &DSparkV4, out: &BTreeMap<String, Tensor>) {
    let stages = model.config().settings.stages;
    assert_eq!(out["limited"].int64_value(&[]) > 0, stages.swiglu_limit > 0.0, "limits of the experts");
    assert!(out["experts"].numel() as i64 > stages.num_experts_per_tok, "experts {}", out["experts"]);
    let batch = batch(model);
    tch::no_grad(|| {
        let states = model.block_states(&batch);
        assert_close("states", &states, &out["states"], FORWARD);
        let (e, features) = model.teacher_forced_features(&states, &batch.previous).unwrap();
        let logits = model.teacher_forced_logits(&states, Some(&features));
        assert_close("logits", &logits, &out["logits"], FORWARD);
        let confidence = model.confidence_logits(&states, Some(&e)).unwrap();
        assert_close("confidence", &confidence, &out["confidence"], FORWARD);
    });
    for (_, parameter) in model.parameters() {
        let _ = parameter.set_requires_grad(true);
    }
    let denominator = LossDenominator(out["weight"].double_value(&[]));
    let sums: Vec<f64> = Vec::try_from(model.accumulate(&batch, &OBJECTIVE, denominator)).unwrap();
    let names: Vec<String> = LossSum::all(BLOCK, &DSPARK_SUMS).map(LossSum::name).collect();
    for (name, theirs) in [("ce", "ce"), ("l1", "l1"), ("confidence", "bce"), ("weight", "weight")] {
        let found = sums[names.iter().position(|other| other == name).unwrap()];
        let expected = out[theirs].double_value(&[]);
        assert!((found - expected).abs() < FORWARD * expected, "{name}: {found} for {expected}");
    }
    let compared = out.keys().filter(|key| key.starts_with("grad.")).count();
    assert_eq!(compared, model.parameters().len());
    let chosen: Vec<i64> = Vec::try_from(&out["experts"]).unwrap();
    for (name, parameter) in model.parameters() {
        let expected = &out[&format!("grad.{name}")];
        let size = max_abs(expected);
        let gradient = parameter.grad();
        if !gradient.defined() {
            assert!(name.contains(".experts.") && size == 0.0, "{name} has no gradient");
            continue;
        }
        let is_used =
            chosen.iter().any(|expert| !name.contains(".experts.") || name.contains(&format!(".{expert}.")));
        assert!(size > 0.0 || !is_used || name.contains(".experts."), "{name} has gradients of {size}");
        assert_close(name, &gradient, expected, GRADIENT * size.max(1e-6));
    }
}

/// A block sees no latents of the other sequences of its batch.
#[test]
fn sequences_of_a_batch_do_not_see_each_other() {
    let _guard = tch::no_grad_guard();
    let model = model(SMALL);
    let other =
        || TrainSample { taps: noise(9, &[TOKENS as i64, 2 * WIDTH]), anchors: vec![5, 90], ..sample() };
    let states = |samples: &[TrainSample]| {
        let batch = model.config().batch(samples, LOSS.decay_gamma, Device::Cpu, Kind::Float).unwrap();
        model.block_states(&batch)
    };
    let both = states(&[other(), sample()]);
    assert_close("first sequence", &both.narrow(0, 0, 2), &states(&[other()]), FORWARD);
    assert_close("second sequence", &both.narrow(0, 2, 5), &states(&[sample()]), FORWARD);
}

/// Every part is needed for the states, so that a model without it would differ.
#[test]
fn window_sinks_iterations_and_biases_matter() {
    let _guard = tch::no_grad_guard();
    let states = |stages: StageSettings, change: &dyn Fn(&DSparkV4, &mut TrainSample)| {
        let (model, mut sample) = (model(stages), sample());
        change(&model, &mut sample);
        let batch = model.config().batch(&[sample], LOSS.decay_gamma, Device::Cpu, Kind::Float).unwrap();
        model.block_states(&batch)
    };
    let plain = states(SMALL, &|_, _| {});
    let difference = |other: &Tensor, block: i64| max_abs(&(other.get(block) - plain.get(block)));
    // The first tokens are visible for anchors up to 128.
    let early = states(SMALL, &|_, sample| {
        let _ = sample.taps.narrow(0, 0, 1).fill_(9.0);
    });
    let reached: Vec<bool> = (0..5).map(|block| difference(&early, block) > 1e-4).collect();
    assert_eq!(reached, [true, true, true, false, false]);
    let fewer = states(StageSettings { hc_sinkhorn_iters: 3, ..SMALL }, &|_, _| {});
    let no_sinks = states(SMALL, &|model, _| {
        tensors(model, "attn_sink").iter().for_each(|sink| drop(sink.shallow_clone().fill_(-1e9)));
    });
    let selected = states(SMALL, &|model, _| {
        tensors(model, "gate.bias").iter().for_each(|bias| drop(bias.shallow_clone().g_mul_scalar_(-9.0)));
    });
    for other in [fewer, no_sinks, selected] {
        assert!((0..5).all(|block| difference(&other, block) > 1e-3), "{}", (other - &plain).abs().max());
    }
}

/// Drafts of some slots, whose contexts grow by the tokens before the next anchors.
struct Run {
    proposer: DSparkV4Proposer,
    seen: Vec<usize>,
}

impl Run {
    /// Drafts behind anchor `anchors[i]` in slot i.
    fn propose(&mut self, anchors: &[usize], temperature: f64) -> Proposal {
        let sample = sample();
        let spans =
            self.seen.iter().zip(anchors).map(|(&seen, &anchor)| (seen as i64, (anchor - seen) as i64));
        let of = |all: &Tensor| {
            Tensor::cat(&spans.clone().map(|(first, rows)| all.narrow(0, first, rows)).collect::<Vec<_>>(), 0)
        };
        let ids = Tensor::from_slice(&sample.input_ids);
        let context = Context {
            captured_states: of(&sample.taps),
            hidden: None,
            tokens: of(&ids),
            next: of(&ids.roll([-1], [0])),
            chunks: spans.clone().enumerate().map(|(slot, (_, rows))| (slot, rows as usize)).collect(),
        };
        let slots: Vec<usize> = (0..anchors.len()).collect();
        let at: Vec<i64> = anchors.iter().map(|&anchor| sample.input_ids[anchor]).collect();
        let uniforms: Vec<Tensor> =
            anchors.iter().map(|&anchor| noise(anchor as u64, &[BLOCK as i64])).collect();
        let proposal = self.proposer.propose(&DraftRequest {
            context: &context,
            slots: &slots,
            anchors: &Tensor::from_slice(&at),
            uniforms: &Tensor::stack(&uniforms, 0).to_kind(Kind::Double).sigmoid(),
            sampling: &SamplingBatch::new(vec![Sampling::new(temperature, 0); slots.len()], Device::Cpu),
        });
        self.seen = anchors.to_vec();
        proposal
    }
}

/// Drafting matches training: with the drafted tokens as previous tokens, training gives the same distributions. A sequence
/// drafts beside another as it does alone.
#[test]
fn it_decodes_as_it_was_trained() {
    let _guard = tch::no_grad_guard();
    let run =
        |slots| Run { proposer: DSparkV4Proposer::new(model(SMALL).packed(), slots), seen: vec![0; slots] };
    for temperature in [0.0, 0.8] {
        let (mut both, mut alone) = (run(2), run(1));
        for anchors in [[3, 60], [63, 128], [140, 144]] {
            let proposal = both.propose(&anchors, temperature);
            let single = alone.propose(&anchors[..1], temperature);
            assert!(single.tokens.get(0).equal(&proposal.tokens.get(0)));
            assert_close(
                "alone",
                &single.confidence.unwrap().get(0),
                &proposal.confidence.as_ref().unwrap().get(0),
                1e-5,
            );
            for (slot, &anchor) in anchors.iter().enumerate() {
                let slot = slot as i64;
                let drafted: Vec<i64> = Vec::try_from(proposal.tokens.get(slot)).unwrap();
                let mut ids = sample().input_ids;
                ids.splice(anchor + 1..anchor + 1 + BLOCK, drafted);
                let forced = TrainSample { input_ids: ids, anchors: vec![anchor], ..sample() };
                let model = both.proposer.model();
                let batch = model.config().batch(&[forced], 4.0, Device::Cpu, Kind::Float).unwrap();
                let states = model.block_states(&batch);
                let (e, features) = model.teacher_forced_features(&states, &batch.previous).unwrap();
                let logits = model.teacher_forced_logits(&states, Some(&features)).get(0);
                let confidence = model.confidence_logits(&states, Some(&e)).unwrap().get(0);
                assert_close(
                    "confidence",
                    &proposal.confidence.as_ref().unwrap().get(slot),
                    &confidence,
                    1e-4,
                );
                match &proposal.probs {
                    Some(probs) => {
                        let expected = (logits / temperature).softmax(-1, Kind::Float);
                        assert_close("q", &probs.get(slot), &expected, 1e-5);
                    }
                    None => assert!(logits.argmax(-1, false).equal(&proposal.tokens.get(slot))),
                }
            }
        }
    }
}

/// A slot that another sequence takes has an empty context, and one that is cut has a shorter one.
#[test]
fn a_cut_context_is_that_of_a_shorter_sequence() {
    let _guard = tch::no_grad_guard();
    let mut cut = Run { proposer: DSparkV4Proposer::new(model(SMALL), 1), seen: vec![0] };
    let first = cut.propose(&[20], 0.0).confidence.unwrap();
    cut.propose(&[140], 0.0);
    for len in [20, 0] {
        cut.proposer.truncate(0, len);
        cut.seen = vec![len];
        let again = cut.propose(&[20], 0.0).confidence.unwrap();
        assert_close("confidence", &again, &first, 1e-5);
        cut.propose(&[140], 0.0);
    }
}
