//! MTP-1 converted to speculators' layout: that package computes the same logits, losses and gradients.
//!
//! Runs only if `DEEPSPEC_SPECULATORS_PYTHON` names a Python with speculators and torch.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use common::{assert_close, noise};
use deepspec_checkpoint::{CheckpointFormat, Target, convert};
use deepspec_drafters::{
    DraftDecoder, DrafterPlan, LossDenominator, Mtp, MtpConfig, MtpPlan, MtpSettings, StepBatch,
    StepObjective, TrainSample, open_checkpoint,
};
use deepspec_models::{ModelConfig, save};
use deepspec_ops::grad_or_zeros;
use deepspec_testkit::skip;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

const TOKENS: usize = 24;
const STEPS: usize = 3;
const TARGET_LAYERS: usize = 5;
const EXPERT_WIDTH: i64 = 16;
const FORWARD: f64 = 1e-4;
const GRADIENT: f64 = 5e-4;

/// Names of our tensors outside of the layer, and speculators' names of them.
const NAMES: [(&str, &str); 4] = [
    ("fc.weight", "input_proj.weight"),
    ("pre_fc_norm_embedding.weight", "token_layernorm.weight"),
    ("pre_fc_norm_hidden.weight", "hidden_layernorm.weight"),
    ("norm.weight", "final_layernorm.weight"),
];

/// Their gradient of our tensor. Two of their tensors hold all experts.
fn gradient_of(name: &str, theirs: &BTreeMap<String, Tensor>) -> Tensor {
    let own = NAMES.iter().find(|(ours, _)| *ours == name).map(|(_, theirs)| *theirs);
    let within = own.unwrap_or_else(|| name.strip_prefix("layers.0.").unwrap());
    let find = |within: &str| &theirs[&format!("grad.mtp_layers.0.{within}")];
    let Some(expert) = within.strip_prefix("mlp.experts.") else { return find(within).shallow_clone() };
    let [expert, projection, _] = expert.split('.').collect::<Vec<_>>()[..] else { panic!("{name}") };
    let of = |stacked: &str| find(&format!("mlp.experts.{stacked}")).get(expert.parse().unwrap());
    match projection {
        "gate_proj" => of("gate_up_proj").narrow(0, 0, EXPERT_WIDTH),
        "up_proj" => of("gate_up_proj").narrow(0, EXPERT_WIDTH, EXPERT_WIDTH),
        _ => of("down_proj"),
    }
}

/// Config of a target with Qwen3's layers.
fn qwen3() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": TARGET_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 96, "initializer_range": 0.2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "hidden_act": "silu", "attention_bias": false, "tie_word_embeddings": false,
    })
}

/// Config of a hybrid, whose MTP layer has a gate on attention's output, and rotates a quarter of each head.
fn qwen3_5() -> Value {
    let mut config = qwen3();
    let own = json!({
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "full_attention_interval": 4,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "attn_output_gate": true,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    });
    let map = config.as_object_mut().unwrap();
    map.remove("rope_theta");
    map.extend(own.as_object().unwrap().clone());
    config
}

/// [`qwen3_5`] with experts in all layers.
fn qwen3_5_moe() -> Value {
    let mut config = qwen3_5();
    let own = json!({
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "num_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_WIDTH, "shared_expert_intermediate_size": 24,
    });
    let map = config.as_object_mut().unwrap();
    map.remove("intermediate_size");
    map.extend(own.as_object().unwrap().clone());
    config
}

/// A random drafter whose norms are not all equal, and its target, under `root`.
fn models(root: &Path, target: &Value) -> Mtp {
    let folder = |name: &str| {
        fs::create_dir_all(root.join(name)).unwrap();
        root.join(name)
    };
    let raw = target.as_object().unwrap().clone();
    let target_config = ModelConfig::parse(Path::new("config.json"), raw).unwrap();
    let config = MtpConfig {
        decoder: DraftDecoder {
            model: target_config.mtp_decoder().unwrap(),
            taps: vec![],
            num_target_layers: TARGET_LAYERS,
        },
        settings: MtpSettings { num_speculative_steps: STEPS, step_weight_beta: 0.6 },
    };
    let ends = [1, 2].map(|seed| noise(seed, &[96, 32]) * 0.3);
    let model = Mtp::fresh(config, &ends[0], &ends[1], 5, Kind::Float);
    for (seed, (_, parameter)) in
        model.parameters().iter().filter(|(_, tensor)| tensor.dim() == 1).enumerate()
    {
        let _ = parameter.shallow_clone().g_add_(&(noise(9 + seed as u64, &parameter.size()) * 0.2));
    }
    let drafter = folder("drafter");
    save(&drafter.join("model.safetensors"), &model.checkpoint(), Kind::Float).unwrap();
    fs::write(drafter.join("config.json"), Value::Object(model.config().to_json()).to_string()).unwrap();
    let [embed, head] = ends;
    let own = [
        ("model.embed_tokens.weight".to_string(), embed),
        ("lm_head.weight".into(), head),
        ("model.norm.weight".into(), noise(3, &[32])),
    ];
    save(&folder("target").join("model.safetensors"), &own, Kind::Float).unwrap();
    fs::write(root.join("target/config.json"), target.to_string()).unwrap();
    model
}

fn sample(loss_mask: Vec<bool>) -> TrainSample {
    let ids = (noise(5, &[TOKENS as i64]) * 1e4).abs().to_kind(Kind::Int64).remainder(96);
    TrainSample {
        input_ids: Vec::try_from(ids).unwrap(),
        loss_mask,
        taps: Tensor::zeros([TOKENS as i64, 0], (Kind::Float, Device::Cpu)),
        last: noise(7, &[TOKENS as i64, 32]),
        last_positions: (0..TOKENS as u32).collect(),
        anchors: vec![],
    }
}

/// Loss, losses of the steps, and gradients with this mask.
fn ours(model: &Mtp, sample: TrainSample) -> (f64, Vec<f64>, Vec<Tensor>) {
    let objective = StepObjective::new(0.6, STEPS);
    let plan = MtpPlan::new(model.config().clone(), objective.clone());
    let denominator = LossDenominator(plan.loss_denominator_part(&sample.loss_mask, &[]));
    let batch = StepBatch::new(&[sample], &objective.step_weights, Device::Cpu, Kind::Float).unwrap();
    for (_, parameter) in model.parameters() {
        parameter.set_requires_grad(true).zero_grad();
    }
    let sums = Vec::<f64>::try_from(model.accumulate(&batch, denominator)).unwrap();
    let metrics = (plan.metric_defs().compute)(&sums, 1);
    let losses = metrics["step_loss"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect();
    let gradients = model.parameters().iter().map(|(_, parameter)| grad_or_zeros(parameter).copy()).collect();
    (metrics["loss"].as_f64().unwrap(), losses, gradients)
}

#[test]
fn speculators_trains_a_converted_mtp_1_alike() {
    compare_with_speculators(&qwen3());
}

#[test]
fn speculators_trains_a_converted_mtp_1_of_a_hybrid_alike() {
    compare_with_speculators(&qwen3_5());
}

#[test]
fn speculators_trains_a_converted_mtp_1_with_experts_alike() {
    compare_with_speculators(&qwen3_5_moe());
}

fn compare_with_speculators(target: &Value) {
    let Some(python) = skip::speculators_python("speculators and torch") else { return };
    let root = tempfile::tempdir().unwrap();
    let model = models(root.path(), target);
    let (drafter, target) = (root.path().join("drafter"), root.path().join("target"));
    let target = Target::open(&target, target.to_str().unwrap()).unwrap();
    let source = open_checkpoint(&drafter).unwrap();
    let converted = convert(&source, CheckpointFormat::Speculators, Some(&target)).unwrap();
    converted.write(&root.path().join("speculators"), false).unwrap();

    // All steps have ten labels of the even mask, and different numbers of the uneven one.
    let even: Vec<bool> = (0..TOKENS).map(|at| (6..16).contains(&at)).collect();
    let uneven: Vec<bool> = (0..TOKENS).map(|at| at < 3 || at == 11 || at > 20).collect();
    let flags = |mask: &[bool]| Tensor::from_slice(mask).to_kind(Kind::Float).unsqueeze(0);
    let given = sample(vec![true; TOKENS]);
    let tensors = [
        ("input_ids", Tensor::from_slice(&given.input_ids).unsqueeze(0)),
        ("last", given.last.unsqueeze(0)),
        ("even_mask", flags(&even)),
        ("uneven_mask", flags(&uneven)),
    ];
    Tensor::write_safetensors(&tensors, root.path().join("given.safetensors")).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/speculators_mtp.py");
    let mut command = Command::new(python);
    command.arg(script).env("HF_HUB_OFFLINE", "1");
    command.args(["speculators", "given.safetensors", "out.safetensors"].map(|file| root.path().join(file)));
    let run = command.output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let out: BTreeMap<String, Tensor> =
        Tensor::read_safetensors(root.path().join("out.safetensors")).unwrap().into_iter().collect();

    let batch = StepBatch::new(&[given], &[1.0; STEPS], Device::Cpu, Kind::Float).unwrap();
    let states = tch::no_grad(|| model.step_states(&batch));
    let logits = Tensor::stack(&states, 0).detach();
    assert_close("logits", &tch::no_grad(|| model.draft_logits(&logits)), &out["logits"], FORWARD);
    for (name, mask) in [("uneven", uneven), ("even", even)] {
        let (loss, losses, gradients) = ours(&model, sample(mask));
        assert_close(name, &Tensor::from_slice(&losses), &out[&format!("{name}_losses")], FORWARD);
        if name == "uneven" {
            continue; // Steps with other numbers of labels weigh differently there.
        }
        assert_close("loss", &Tensor::from_slice(&[loss]), &out["even_loss"], FORWARD);
        let theirs = out.iter().filter(|(key, _)| key.starts_with("grad."));
        let values = [
            theirs.map(|(_, tensor)| tensor.numel()).sum::<usize>(),
            model.parameters().iter().map(|(_, tensor)| tensor.numel()).sum(),
        ];
        assert_eq!(values[0], values[1]);
        for ((name, _), gradient) in model.parameters().iter().zip(gradients) {
            let expected = gradient_of(name, &out);
            assert_close(name, &gradient, &expected, GRADIENT * common::max_abs(&expected));
        }
    }
    // Its data pipeline takes the output of the target's last layer.
    assert_eq!(Vec::<i64>::try_from(&out["target_layer_ids"]).unwrap(), [TARGET_LAYERS as i64]);
}
