//! Quantised targets compute as the plain model whose weights another package de-quantises from the same tensors.
//! Weights and logits are equal to the last bit.
//!
//! Runs only if `DEEPSPEC_SPECULATORS_PYTHON` names a Python with compressed-tensors, transformers and AutoRound.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::tensor;
use deepspec_engine::{ModelInput, Target};
use deepspec_models::{TargetModel, TargetOptions, Weights};
use deepspec_testkit::{golden, skip, tiny};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

/// The logits after three tokens.
fn logits(dir: &Path, kind: Kind) -> Tensor {
    let _guard = tch::no_grad_guard();
    let options = TargetOptions { device: Device::Cpu, kind, slots: 1, taps: vec![] };
    let mut model = TargetModel::load(dir, &options).unwrap_or_else(|error| panic!("{error}"));
    let found = model.forward(&ModelInput { chunks: &[(0, 3)], tokens: Tensor::from_slice(&[3i64, 17, 39]) });
    model.logits(&found.hidden)
}

/// Quantises the model in `plain` by each scheme, and compares its weights and logits with the peer's.
fn check(plain: &Path, schemes: &[&str]) {
    let Some(python) = skip::speculators_python("compressed-tensors, transformers and AutoRound") else {
        return;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/quantised_targets.py");
    let out = tempfile::tempdir().unwrap();
    let run = Command::new(&python)
        .arg(&script)
        .args([plain, out.path()])
        .args(schemes)
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    for scheme in schemes {
        let [quantised, expected] = ["quantised", "expected"].map(|name| out.path().join(scheme).join(name));
        let kind = if scheme.ends_with("in bfloat16") { Kind::BFloat16 } else { Kind::Float };
        let weights = Weights::open_target(&quantised, "a target", Device::Cpu, kind).unwrap();
        let arrays = golden::arrays(&expected.join("model.safetensors"));
        let mut values = 0;
        for (name, array) in arrays {
            let found = weights.get(&name, &array.shape).unwrap_or_else(|error| panic!("{scheme}: {error}"));
            assert!(found.equal(&tensor(&array).to_kind(kind)), "{scheme}: {name}");
            values += found.numel();
        }
        assert_eq!(weights.unread_names(), [""; 0], "{scheme}");
        assert_eq!(weights.value_count(), values, "{scheme}");
        assert!(logits(&quantised, kind).equal(&logits(&expected, kind)), "{scheme}: the logits differ");
    }
}

#[test]
fn float8_weights_are_those_of_transformers_and_compressed_tensors() {
    let plain = tempfile::tempdir().unwrap();
    tiny::qwen3(plain.path(), 40);
    check(
        plain.path(),
        &[
            "fp8 blocks",
            "fp8 blocks, bfloat16 scales",
            "fp8 blocks, float8 scales",
            "fp8 uneven blocks",
            "fp8 tensors",
            "fp8 tensors, static inputs",
            "fp8 rows",
        ],
    );
}

#[test]
fn compressed_weights_are_those_of_compressed_tensors() {
    let plain = tempfile::tempdir().unwrap();
    tiny::qwen3(plain.path(), 40);
    check(
        plain.path(),
        &[
            "compressed float8 tensors",
            "compressed float8 channels",
            "compressed float8 channels in bfloat16",
            "compressed float8 blocks",
            "compressed int8 channels",
            "compressed int8 channels, asymmetric",
            "compressed int8 tensors, asymmetric",
            "packed int4 groups",
            "packed int4 groups, asymmetric",
            "packed int4 groups, asymmetric, in bfloat16",
            "packed int4 groups in order",
            "packed int4 channels",
            "packed int4 channels, asymmetric",
            "packed int8 groups",
            "packed int8 groups, asymmetric",
            "several groups",
        ],
    );
}

#[test]
fn packed_and_transposed_weights_are_those_of_compressed_tensors_and_auto_round() {
    let plain = tempfile::tempdir().unwrap();
    tiny::qwen3(plain.path(), 40);
    check(
        plain.path(),
        &[
            "awq",
            "awq rows",
            "gptq int4",
            "gptq int4 rows",
            "gptq int4 in order",
            "gptq int8",
            "gptq int8 in order",
            "gptq_v2 int4",
            "gptq_v2 int8 in order",
        ],
    );
}

#[test]
fn float4_weights_are_those_of_transformers_and_compressed_tensors() {
    let [experts, plain] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    tiny::target(experts.path(), "gpt_oss");
    check(experts.path(), &["mxfp4"]);
    tiny::qwen3(plain.path(), 40);
    check(plain.path(), &["compressed mxfp4", "compressed nvfp4"]);
}

/// AutoGPTQ stores a bias of zeros for every module. Biases with other values are refused by name.
#[test]
fn zero_biases_of_gptq_are_left_out() {
    let dir = tempfile::tempdir().unwrap();
    tiny::qwen3(dir.path(), 40);
    let (weights, config) = (dir.path().join("model.safetensors"), dir.path().join("config.json"));
    let module = "model.layers.1.mlp.down_proj";
    let mut tensors = Tensor::read_safetensors(&weights).unwrap();
    let place = tensors.iter().position(|(name, _)| *name == format!("{module}.weight")).unwrap();
    let [rows, columns] = tensors.remove(place).1.size()[..] else { panic!("no matrix") };
    let zeros = |shape: [i64; 2]| Tensor::zeros(shape, (Kind::Int, Device::Cpu));
    tensors.push((format!("{module}.qweight"), zeros([columns / 8, rows])));
    tensors.push((format!("{module}.qzeros"), zeros([1, rows / 8])));
    tensors.push((format!("{module}.scales"), Tensor::ones([1, rows], (Kind::Half, Device::Cpu))));
    tensors.push((format!("{module}.bias"), Tensor::zeros([rows], (Kind::Half, Device::Cpu))));
    Tensor::write_safetensors(&tensors, &weights).unwrap();
    let mut edited: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    edited["quantization_config"] = json!({"quant_method": "gptq", "bits": 4, "group_size": -1});
    fs::write(&config, edited.to_string()).unwrap();
    assert!(bool::try_from(logits(dir.path(), Kind::Float).isfinite().all()).unwrap());

    let (_, bias) = tensors.last_mut().unwrap();
    let _ = bias.get(rows - 1).fill_(1.0);
    Tensor::write_safetensors(&tensors, &weights).unwrap();
    let options = TargetOptions { device: Device::Cpu, kind: Kind::Float, slots: 1, taps: vec![] };
    let told = TargetModel::load(dir.path(), &options).map(drop).unwrap_err().to_string();
    assert!(told.contains("model.layers.1.mlp.down_proj.bias") && told.contains("no place"), "{told}");
}

/// Quantised checkpoints of Qwen3.5-MoE store experts one by one, and quantise projections of linear
/// attention, too. Plain ones stack the experts.
#[test]
fn experts_and_linear_attention_of_a_hybrid_are_quantised() {
    let plain = tempfile::tempdir().unwrap();
    tiny::target(plain.path(), "qwen3_5_moe");
    check(
        plain.path(),
        &["fp8 blocks", "compressed float8 channels", "packed int4 groups, asymmetric", "awq"],
    );
}

/// Phi-4 stores three projections as one tensor, and two others as another.
#[test]
fn fused_weights_are_read_in_parts() {
    let plain = tempfile::tempdir().unwrap();
    tiny::target(plain.path(), "phi3");
    check(
        plain.path(),
        &["fp8 blocks", "fp8 uneven blocks", "packed int4 groups, asymmetric", "awq", "gptq int4 in order"],
    );
}
