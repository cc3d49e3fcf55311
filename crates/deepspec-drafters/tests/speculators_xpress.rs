//! xPress converted to speculators' layout: that package computes the same logits, losses and gradients.
//!
//! Runs only if `DEEPSPEC_SPECULATORS_PYTHON` names a Python with speculators and torch.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use common::{assert_close, max_abs, noise};
use deepspec_checkpoint::{CheckpointFormat, Target, convert};
use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockSpec, Consistency, Convolution, DraftDecoder, LossDenominator, LossRecipe, LossSum, TrainSample,
    XPRESS_SUMS, XPress, XPressConfig, XPressObjective, XPressProposer, XPressSettings, open_checkpoint,
};
use deepspec_engine::Context;
use deepspec_models::{ModelConfig, save};
use deepspec_testkit::skip;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

const VOCAB: i64 = 96;
const WIDTH: i64 = 32;
const BLOCK: usize = 5;
const GAMMA: usize = BLOCK - 1;
const PASSES: i64 = 3;
const TOKENS: usize = 26;
const SUPERVISED: usize = 20;
const TARGET_LAYERS: usize = 6;
const EPS: f64 = 1e-6;
/// The first block has no token before it, and the last one ends behind the supervised tokens.
const ANCHORS: [usize; 5] = [0, 3, 4, 11, 17];
const FORWARD: f64 = 1e-4;
const GRADIENT: f64 = 5e-4;

/// Names of our tensors, and speculators' names of them.
const NAMES: [(&str, &str); 9] = [
    ("xpress_head.w1.weight", "token_embed.weight"),
    ("xpress_head.w2.weight", "readout.weight"),
    ("xpress_head.down_h.weight", "down_h.weight"),
    ("xpress_head.down_g.weight", "down_g.weight"),
    ("xpress_head.in_proj.weight", "in_proj.weight"),
    ("xpress_head.mix.L", "mix_l"),
    ("xpress_head.mlp.gate_proj.weight", "mlp_gate.weight"),
    ("xpress_head.mlp.up_proj.weight", "mlp_up.weight"),
    ("xpress_head.mlp.down_proj.weight", "mlp_down.weight"),
];

fn theirs(name: &str) -> String {
    let head = NAMES.iter().find(|(ours, _)| *ours == name);
    head.map_or_else(|| name.to_string(), |(_, theirs)| format!("refiner_head.{theirs}"))
}

/// A random drafter, all of whose parameters matter, and its target, under `root`. Also returns the weight of the target's final norm.
fn models(root: &Path, convolution: Option<Convolution>) -> (XPress, Tensor) {
    let target = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": WIDTH, "intermediate_size": 48,
        "num_hidden_layers": TARGET_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": VOCAB, "initializer_range": 0.2, "max_position_embeddings": 256, "rms_norm_eps": EPS,
        "rope_theta": 1e4, "hidden_act": "silu", "attention_bias": false, "tie_word_embeddings": false,
    });
    let folder = |name: &str| {
        fs::create_dir_all(root.join(name)).unwrap();
        root.join(name)
    };
    let raw = target.as_object().unwrap().clone();
    let target_config = ModelConfig::parse(Path::new("config.json"), raw).unwrap();
    let config = XPressConfig {
        decoder: DraftDecoder {
            model: target_config.draft_decoder(&[None, None]).unwrap(),
            taps: Tap::from_layer_ids([1, 3]).unwrap(),
            num_target_layers: TARGET_LAYERS,
        },
        settings: XPressSettings {
            blocks: BlockSpec {
                block_size: BLOCK,
                slots: SlotTarget::FillIn,
                mask_token_id: 7,
                causal: false,
                num_anchors: 8,
            },
            rank: 8,
            mlp_ratio: 2,
            num_passes: PASSES,
            convolution,
        },
    };
    let ends = [1, 2].map(|seed| noise(seed, &[VOCAB, WIDTH]) * 0.3);
    let model = XPress::fresh(config, &ends[0], &ends[1], 5, Kind::Float);
    // Norms are not all ones, slots are mixed, and the refiner changes which tokens are likeliest.
    for (seed, (name, parameter)) in model.parameters().iter().enumerate() {
        let scale = match name.as_str() {
            name if name.starts_with("xpress_head.") => 0.25,
            name if name.contains("_conv.") => 0.2,
            _ if parameter.dim() == 1 => 0.2,
            _ => continue,
        };
        let _ = parameter.shallow_clone().g_add_(&(noise(9 + seed as u64, &parameter.size()) * scale));
    }
    let drafter = folder("drafter");
    save(&drafter.join("model.safetensors"), &model.checkpoint(), Kind::Float).unwrap();
    fs::write(drafter.join("config.json"), Value::Object(model.config().to_json()).to_string()).unwrap();
    let ([embed, head], norm) = (ends, noise(3, &[WIDTH]));
    let own = [
        ("model.embed_tokens.weight".to_string(), embed),
        ("lm_head.weight".into(), head),
        ("model.norm.weight".into(), norm.shallow_clone()),
    ];
    save(&folder("target").join("model.safetensors"), &own, Kind::Float).unwrap();
    fs::write(root.join("target/config.json"), target.to_string()).unwrap();
    (model, norm)
}

/// A sample whose final states are before the target's final norm, as speculators takes them.
fn sample() -> TrainSample {
    let ids = (noise(5, &[TOKENS as i64]) * 1e4).abs().to_kind(Kind::Int64).remainder(VOCAB);
    TrainSample {
        input_ids: Vec::try_from(ids).unwrap(),
        loss_mask: (0..TOKENS).map(|at| at < SUPERVISED).collect(),
        taps: noise(6, &[TOKENS as i64, 2 * WIDTH]),
        last: noise(7, &[TOKENS as i64, WIDTH]) * 3.0,
        last_positions: (0..TOKENS as u32).collect(),
        anchors: ANCHORS.to_vec(),
    }
}

fn objective() -> XPressObjective {
    XPressObjective {
        // Total variation is half of the L1 norm.
        loss: LossRecipe { ce_alpha: 0.1, l1_alpha: 0.45, ..LossRecipe::NONE },
        consistency: Consistency { alpha: 0.3, passes: PASSES as usize },
        base_alpha: 0.6,
    }
}

/// The last pass's logits after each of these anchors, `[S, γ, V]`, as the engine drafts.
fn drafted_logits(dir: &Path, sample: &TrainSample, anchors: &[usize]) -> Tensor {
    let _no_grad = tch::no_grad_guard();
    let model = XPress::load_packed(dir, Device::Cpu, Kind::Float).unwrap_or_else(|error| panic!("{error}"));
    let mut proposer = XPressProposer::new(model, anchors.len());
    let ids = Tensor::from_slice(&sample.input_ids);
    let before = |rows: &Tensor| {
        let parts: Vec<Tensor> = anchors.iter().map(|&anchor| rows.narrow(0, 0, anchor as i64)).collect();
        Tensor::cat(&parts, 0)
    };
    let context = Context {
        captured_states: before(&sample.taps),
        hidden: None,
        tokens: before(&ids),
        next: before(&ids.narrow(0, 1, TOKENS as i64 - 1)),
        chunks: anchors.iter().copied().enumerate().collect(),
    };
    let slots: Vec<usize> = (0..anchors.len()).collect();
    let tokens: Vec<i64> = anchors.iter().map(|&anchor| sample.input_ids[anchor]).collect();
    let mut logits = vec![];
    proposer.forward(&context, &slots, &Tensor::from_slice(&tokens), |_, row| {
        logits.push(row.copy());
        row.argmax(-1, false)
    });
    Tensor::stack(&logits, 1)
}

/// The backbones of DFlash and of DFlash 2, by folder.
const BACKBONES: [(&str, Option<Convolution>); 2] =
    [("dflash", None), ("dflash2", Some(Convolution { kernel_size: 3, group_size: 8 }))];

#[test]
fn speculators_trains_and_refines_a_converted_xpress_alike() {
    let Some(python) = skip::speculators_python("speculators and torch") else { return };
    let root = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/speculators_xpress.py");
    let mut command = Command::new(python);
    command.arg(script).env("HF_HUB_OFFLINE", "1");
    let given = sample();
    let made = BACKBONES.map(|(name, convolution)| {
        let dir = root.path().join(name);
        let (model, norm) = models(&dir, convolution);
        let (drafter, target) = (dir.join("drafter"), dir.join("target"));
        let target = Target::open(&target, target.to_str().unwrap()).unwrap();
        let source = open_checkpoint(&drafter).unwrap();
        let converted = convert(&source, CheckpointFormat::Speculators, Some(&target)).unwrap();
        converted.write(&dir.join("speculators"), false).unwrap();
        let tensors = [
            ("input_ids", Tensor::from_slice(&given.input_ids).unsqueeze(0)),
            ("loss_mask", Tensor::from_slice(&given.loss_mask).to_kind(Kind::Float).unsqueeze(0)),
            ("taps", given.taps.unsqueeze(0)),
            ("last", given.last.unsqueeze(0)),
            ("anchors", Tensor::from_slice(&ANCHORS.map(|anchor| anchor as i64))),
        ];
        Tensor::write_safetensors(&tensors, dir.join("given.safetensors")).unwrap();
        command.args(["speculators", "given.safetensors", "out.safetensors"].map(|file| dir.join(file)));
        (dir, model, norm)
    });
    let run = command.output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    for (dir, model, norm) in &made {
        compare(dir, model, norm);
    }
}

/// Compares logits, losses and gradients with those of the package.
fn compare(dir: &Path, model: &XPress, norm: &Tensor) {
    let (mut given, drafter) = (sample(), dir.join("drafter"));
    let out: BTreeMap<String, Tensor> =
        Tensor::read_safetensors(dir.join("out.safetensors")).unwrap().into_iter().collect();

    // Logits of the LM head, after the true tokens, and of the last Jacobi pass. Their slot 0 drafts nothing.
    let drafts = |name: &str| out[name].narrow(-2, 1, GAMMA as i64);
    let squares = given.last.square().mean_dim(-1, true, Kind::Float);
    given.last = &given.last * (squares + EPS).rsqrt() * norm;
    let batch = model.config().batch(std::slice::from_ref(&given), 4.0, Device::Cpu, Kind::Float).unwrap();
    tch::no_grad(|| {
        let hidden = model.hidden_states(&batch);
        let (_, features) = model.teacher_forced_features(&hidden, &batch.previous).unwrap();
        let hidden = hidden.narrow(1, 1, GAMMA as i64);
        assert_close("base", &model.teacher_forced_logits(&hidden, None), &drafts("base"), FORWARD);
        let forced = model.teacher_forced_logits(&hidden, Some(&features));
        assert_close("forced", &forced, &drafts("forced"), FORWARD);
    });
    let passes = drafts("rounds"); // [K, A, γ, V]
    // The passes read different tokens.
    let read = Tensor::cat(&[drafts("base").unsqueeze(0), passes.shallow_clone()], 0).argmax(-1, false);
    for pass in 1..PASSES {
        let changed = read.get(pass).ne_tensor(&read.get(pass - 1)).any();
        assert!(changed.int64_value(&[]) == 1, "pass {pass} reads the tokens of the pass before");
    }
    let own = drafted_logits(&drafter, &given, &ANCHORS[1..]);
    assert_close("last pass", &own, &passes.get(PASSES - 1).narrow(0, 1, 4), FORWARD);

    // Losses. The package divides by the number of supervised drafts.
    let count = batch.labels.size()[0] as f64;
    assert!(count < (ANCHORS.len() * GAMMA) as f64, "no block is cut");
    for (_, parameter) in model.parameters() {
        let _ = parameter.set_requires_grad(true);
    }
    let sums = model.accumulate(&batch, &objective(), LossDenominator(count), None);
    let sums = Vec::<f64>::try_from(sums).unwrap();
    let sum = |wanted: LossSum| {
        let place = LossSum::all(GAMMA, &XPRESS_SUMS).position(|sum| sum == wanted);
        sums[place.unwrap_or_else(|| panic!("no sum {}", wanted.name()))]
    };
    let accepted = (0..GAMMA).map(|position| sum(LossSum::Accept(position))).sum::<f64>();
    let (rounds, base) = (sum(LossSum::Own("consistency")), sum(LossSum::Own("base")));
    for (name, found) in [
        ("loss_sum", sum(LossSum::Loss) / count),
        ("tf_loss_sum", (sum(LossSum::Loss) - 0.3 * rounds - 0.6 * base) / count),
        ("ce_loss_sum", sum(LossSum::CE) / count),
        ("tv_loss_sum", sum(LossSum::L1) / 2.0 / count),
        ("consistency_loss_sum", rounds / count),
        ("base_anchor_loss_sum", base / count),
        ("accept_rate_sum", accepted),
        ("accept_rate_total", sum(LossSum::Drafts)),
        ("base_accept_rate_sum", sum(LossSum::Own("base_accept"))),
    ] {
        assert_close(name, &Tensor::from_slice(&[found]), &out[name], FORWARD);
    }

    let compared = out.keys().filter(|key| key.starts_with("grad.")).count();
    assert_eq!(compared, model.parameters().len());
    for (name, parameter) in model.parameters() {
        let expected = &out[&format!("grad.{}", theirs(name))];
        assert!(max_abs(expected) > 0.0, "{name} learns nothing");
        assert_close(name, &parameter.grad(), expected, GRADIENT * max_abs(expected));
    }
}
