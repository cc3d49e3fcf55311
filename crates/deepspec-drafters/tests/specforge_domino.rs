//! Domino converted to SpecForge's layout: that package computes the same logits, losses, gradients and drafts.
//!
//! Runs only if `DEEPSPEC_SPECULATORS_PYTHON` names a Python with specforge and torch.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use common::{assert_close, noise};
use deepspec_checkpoint::{CheckpointFormat, Target, convert};
use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockSpec, Domino, DominoConfig, DominoObjective, DominoPlan, DominoProposer, DominoSettings,
    DraftDecoder, DrafterPlan, GruSettings, LambdaBase, LossDenominator, LossRecipe, TrainSample,
    open_checkpoint,
};
use deepspec_engine::{Context, DraftRequest, Proposer, Sampling, SamplingBatch};
use deepspec_models::{ModelConfig, save};
use deepspec_testkit::skip;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

const TOKENS: usize = 40;
const VOCAB: i64 = 96;
const WIDTH: i64 = 32;
const BLOCK: usize = 6;
const LAMBDAS: [f64; 3] = [0.0, 0.25, 1.0];
const LOSS: LossRecipe = LossRecipe { ce_alpha: 1.0, decay_gamma: 7.0, ..LossRecipe::NONE };
const FORWARD: f64 = 1e-4;
const GRADIENT: f64 = 5e-4;

fn target() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": WIDTH, "intermediate_size": 48,
        "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": VOCAB, "initializer_range": 0.3, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "hidden_act": "silu", "attention_bias": false, "tie_word_embeddings": false,
    })
}

fn ends() -> [Tensor; 2] {
    [1, 2].map(|seed| noise(seed, &[VOCAB, WIDTH]) * 0.3)
}

/// A random drafter whose norms are not all ones.
fn model(slots: SlotTarget) -> Domino {
    let raw = target().as_object().unwrap().clone();
    let target = ModelConfig::parse(Path::new("config.json"), raw).unwrap();
    let config = DominoConfig {
        decoder: DraftDecoder {
            model: target.draft_decoder(&[None, None]).unwrap(),
            taps: Tap::from_layer_ids([0, 2]).unwrap(),
            num_target_layers: 5,
        },
        settings: DominoSettings {
            blocks: BlockSpec {
                block_size: BLOCK,
                slots,
                mask_token_id: VOCAB - 1,
                causal: false,
                num_anchors: 8,
            },
            gru: GruSettings { hidden_size: 12, rank: 10 },
        },
    };
    config.check().unwrap();
    let [embed, head] = ends();
    let model = Domino::fresh(config, &embed, &head, 5, Kind::Float);
    for (seed, (_, parameter)) in
        model.parameters().iter().filter(|(_, tensor)| tensor.dim() == 1).enumerate()
    {
        let _ = parameter.shallow_clone().g_add_(&(noise(9 + seed as u64, &parameter.size()) * 0.2));
    }
    model
}

/// Whoever is supervised has supervised tokens up to the end of the answer, as SpecForge weighs every supervised slot, and this
/// project those before the first gap. The last blocks reach beyond the answer.
fn sample() -> TrainSample {
    let ids = (noise(5, &[TOKENS as i64]) * 1e4).abs().to_kind(Kind::Int64).remainder(VOCAB - 1);
    TrainSample {
        input_ids: Vec::try_from(ids).unwrap(),
        loss_mask: (0..TOKENS).map(|at| (4..37).contains(&at)).collect(),
        taps: noise(6, &[TOKENS as i64, 2 * WIDTH]),
        last: noise(7, &[TOKENS as i64, WIDTH]),
        last_positions: (0..TOKENS as u32).collect(),
        anchors: vec![4, 5, 17, 30, 33, 35],
    }
}

/// Writes drafter and target under `root`, and converts the drafter to SpecForge's layout.
fn write(root: &Path, model: &Domino) {
    let folder = |name: &str| {
        fs::create_dir_all(root.join(name)).unwrap();
        root.join(name)
    };
    let drafter = folder("drafter");
    save(&drafter.join("model.safetensors"), &model.checkpoint(), Kind::Float).unwrap();
    fs::write(drafter.join("config.json"), Value::Object(model.config().to_json()).to_string()).unwrap();
    let [embed, head] = ends();
    let own = [("model.embed_tokens.weight".to_string(), embed), ("lm_head.weight".into(), head)];
    save(&folder("target").join("model.safetensors"), &own, Kind::Float).unwrap();
    fs::write(root.join("target/config.json"), target().to_string()).unwrap();
    let target = Target::open(&root.join("target"), "target").unwrap();
    let source = open_checkpoint(&drafter).unwrap();
    let converted = convert(&source, CheckpointFormat::Specforge, Some(&target)).unwrap();
    converted.write(&root.join("specforge"), false).unwrap();
}

/// Greedy drafts after each anchor, `[A, γ]`.
fn drafts(model: Domino, sample: &TrainSample) -> Vec<Vec<i64>> {
    let gamma = model.config().settings.blocks.draft_len() as i64;
    let mut proposer = DominoProposer::new(model, 1);
    let mut seen = 0;
    let propose = |&anchor: &usize| {
        let rows = anchor - seen;
        let context = Context {
            captured_states: sample.taps.narrow(0, seen as i64, rows as i64),
            hidden: None,
            tokens: Tensor::from_slice(&sample.input_ids[seen..anchor]),
            next: Tensor::from_slice(&sample.input_ids[seen + 1..=anchor]),
            chunks: vec![(0, rows)],
        };
        seen = anchor;
        let proposal = proposer.propose(&DraftRequest {
            context: &context,
            slots: &[0],
            anchors: &Tensor::from_slice(&sample.input_ids[anchor..=anchor]),
            uniforms: &Tensor::zeros([1, gamma], (Kind::Double, Device::Cpu)),
            sampling: &SamplingBatch::new(vec![Sampling::new(0.0, 0)], Device::Cpu),
        });
        Vec::try_from(proposal.tokens.get(0)).unwrap()
    };
    sample.anchors.iter().map(propose).collect()
}

#[test]
fn specforge_trains_and_drafts_with_a_converted_domino_alike() {
    let Some(python) = skip::speculators_python("specforge and torch") else { return };
    let root = tempfile::tempdir().unwrap();
    let cases = [SlotTarget::AnchorPredicts, SlotTarget::FillIn].map(|slots| {
        let case = root.path().join(slots.name());
        let model = model(slots);
        write(&case, &model);
        (case, model)
    });
    let given = sample();
    let flags = Tensor::from_slice(&given.loss_mask).to_kind(Kind::Float).unsqueeze(0);
    let anchors: Vec<i64> = given.anchors.iter().map(|&anchor| anchor as i64).collect();
    let [embed, head] = ends();
    let tensors = [
        ("input_ids", Tensor::from_slice(&given.input_ids).unsqueeze(0)),
        ("taps", given.taps.unsqueeze(0)),
        ("loss_mask", flags),
        ("anchors", Tensor::from_slice(&anchors)),
        ("embed", embed),
        ("lm_head", head),
        ("lambdas", Tensor::from_slice(&LAMBDAS)),
    ];
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/specforge_domino.py");
    let mut command = Command::new(python);
    command.arg(script).env("HF_HUB_OFFLINE", "1");
    for (case, _) in &cases {
        Tensor::write_safetensors(&tensors, case.join("given.safetensors")).unwrap();
        command.args(["specforge", "given.safetensors", "out.safetensors"].map(|file| case.join(file)));
    }
    let run = command.output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    for (case, model) in cases {
        let out = Tensor::read_safetensors(case.join("out.safetensors")).unwrap();
        compare(model, &out.into_iter().collect());
    }
}

fn compare(model: Domino, out: &BTreeMap<String, Tensor>) {
    let slots = model.config().settings.blocks.slots;
    let batch = model.config().batch(&[sample()], LOSS.decay_gamma, Device::Cpu, Kind::Float).unwrap();
    let supervised = |all: &Tensor| all.flatten(0, 1).index_select(0, &batch.supervised_indices);
    tch::no_grad(|| {
        let hidden = model.hidden_states(&batch);
        let (_, features) = model.teacher_forced_features(&hidden, &batch.previous).unwrap();
        let logits = model.teacher_forced_logits(&supervised(&hidden), Some(&supervised(&features)));
        let first = slots.first_drafting_position() as i64;
        let theirs = supervised(&out["logits"].narrow(1, first, BLOCK as i64 - first));
        assert_close("logits", &logits, &theirs, FORWARD);
        let base = model.base_logits(&supervised(&hidden));
        assert!(common::max_abs(&(&logits - base)) > 0.1, "the head corrects nothing");
    });
    let objective = DominoObjective { loss: LOSS, lambda_base: LambdaBase::default() };
    let plan = DominoPlan::new(model.config().clone(), objective);
    let denominator = LossDenominator(plan.loss_denominator_part(&sample().loss_mask, &sample().anchors));
    for lambda in LAMBDAS {
        for (_, parameter) in model.parameters() {
            parameter.set_requires_grad(true).zero_grad();
        }
        let sums = Vec::<f64>::try_from(model.accumulate(&batch, &LOSS, lambda, denominator, None)).unwrap();
        let metrics = (plan.metric_defs().compute)(&sums, 1);
        let losses = ["loss", "ce_loss", "base_loss"].map(|name| metrics[name].as_f64().unwrap());
        let of = |name: &str| format!("{name}_{lambda:?}");
        assert_close(&of("losses"), &Tensor::from_slice(&losses), &out[&of("losses")], FORWARD);
        assert!((metrics["lambda_base"].as_f64().unwrap() - lambda).abs() < 1e-6);
        let prefix = format!("{}.", of("grad"));
        let compared = out.keys().filter(|key| key.starts_with(&prefix)).count();
        assert_eq!(compared, model.parameters().len());
        for (name, parameter) in model.parameters() {
            let expected = &out[&format!("{prefix}{name}")];
            let size = common::max_abs(expected);
            let is_head = name.starts_with("prefix_gru.") || name.starts_with("embed_proj.");
            assert_eq!(size > 0.0, !is_head || lambda < 1.0, "{name} with λ = {lambda}");
            assert_close(&of(name), &parameter.grad(), expected, GRADIENT * size);
        }
    }
    // SpecForge drafts one token less than a block has slots, wherever the anchor's slot drafts.
    let own = tch::no_grad(|| drafts(model, &sample()));
    for (block, own) in own.iter().enumerate() {
        let theirs: Vec<i64> = Vec::try_from(out["drafts"].get(block as i64)).unwrap();
        assert_eq!(own[..BLOCK - 1], theirs, "{slots}");
    }
}
