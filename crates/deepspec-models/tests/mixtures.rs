//! Mixtures of experts in bfloat16, in both layouts of checkpoints, and with tensors that are missing or misshapen.

use std::path::Path;

use deepspec_core::Tap;
use deepspec_engine::{ModelInput, Target};
use deepspec_models::{TargetModel, TargetOptions, Weights, save};
use deepspec_testkit::tiny;
use tch::{Device, Kind, Tensor};

const TOKENS: usize = 60;

/// Tensors by name.
type Named = Vec<(String, Tensor)>;

fn load(dir: &Path, kind: Kind) -> Result<TargetModel, String> {
    let options = TargetOptions { device: Device::Cpu, kind, slots: 1, taps: vec![] };
    TargetModel::load(dir, &options).map_err(|error| error.to_string())
}

/// Final states of [`TOKENS`] tokens, in float32.
fn states(dir: &Path, kind: Kind) -> Tensor {
    let _no_grad = tch::no_grad_guard();
    let tokens: Vec<i64> = (0..TOKENS).map(|number| 3 + (number * 37 % 600) as i64).collect();
    let input = ModelInput { chunks: &[(0, TOKENS)], tokens: Tensor::from_slice(&tokens) };
    load(dir, kind).unwrap().forward(&input).hidden.to_kind(Kind::Float)
}

fn family(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    tiny::target(dir.path(), name);
    dir
}

/// Rounded logits of a router may choose another expert for a few rows. The other rows are as near as roundings allow.
#[test]
fn states_in_bfloat16_are_near_those_in_float32() {
    for name in ["qwen3_moe", "gpt_oss"] {
        let dir = family(name);
        let (exact, rounded) = (states(dir.path(), Kind::Float), states(dir.path(), Kind::BFloat16));
        let off = (&rounded - &exact).square().sum_dim_intlist(1, false, Kind::Float).sqrt();
        let size = exact.square().sum_dim_intlist(1, false, Kind::Float).sqrt();
        let near = (off / size).lt(0.05).sum(Kind::Int64).int64_value(&[]);
        assert!(near > TOKENS as i64 * 3 / 4, "{name}: {near} of {TOKENS} rows are near");
    }
}

/// Norms of gpt-oss multiply in float32 and round once. Those of Llama round before they multiply.
#[test]
fn norms_of_gpt_oss_round_once_in_bfloat16() {
    let _no_grad = tch::no_grad_guard();
    let dir = family("gpt_oss");
    let taps = Tap::from_layer_ids([3]).unwrap();
    let options = TargetOptions { device: Device::Cpu, kind: Kind::BFloat16, slots: 1, taps };
    let mut model = TargetModel::load(dir.path(), &options).unwrap();
    let tokens: Vec<i64> = (3..3 + TOKENS as i64).collect();
    let found = model.forward(&ModelInput { chunks: &[(0, TOKENS)], tokens: Tensor::from_slice(&tokens) });
    let weights = Weights::open(dir.path(), "a test", Device::Cpu, Kind::BFloat16).unwrap();
    let weight = weights.get("model.norm.weight", &[32]).unwrap();
    let last = found.captured_states.to_kind(Kind::Float);
    let variance = last.square().mean_dim(&[-1i64][..], true, Kind::Float);
    let normed = last * (variance + 1e-5).rsqrt();
    let once = (weight.to_kind(Kind::Float) * &normed).to_kind(Kind::BFloat16);
    let twice = weight * normed.to_kind(Kind::BFloat16);
    let differing = |other: &Tensor| found.hidden.not_equal_tensor(other).sum(Kind::Int64).int64_value(&[]);
    let (count, once, twice) = (found.hidden.numel() as i64, differing(&once), differing(&twice));
    // A sum in another order may move a few values by a rounding.
    assert!(once * 100 <= count && twice * 10 > count, "of {count} values {once} and {twice} differ");
}

/// All tensors of the model in `dir`, by name.
fn tensors(dir: &Path) -> Named {
    let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let weights = Weights::open(dir, "a test", Device::Cpu, Kind::Float).unwrap();
    let read = |name: &str| {
        let shape: Vec<i64> = file.tensor(name).unwrap().shape().iter().map(|&size| size as i64).collect();
        (name.to_string(), weights.get(name, &shape).unwrap())
    };
    file.names().into_iter().map(read).collect()
}

/// Replaces the experts of a layer by tensors of all of them.
fn stack(all: &mut Named, layer: usize) {
    let prefix = format!("model.layers.{layer}.mlp.experts.");
    let (own, rest): (Vec<_>, Vec<_>) =
        std::mem::take(all).into_iter().partition(|(name, _)| name.starts_with(&prefix));
    *all = rest;
    let part = |expert: usize, part: &str| {
        let name = format!("{prefix}{expert}.{part}_proj.weight");
        own.iter().find(|(other, _)| *other == name).unwrap().1.shallow_clone()
    };
    let experts = 0..own.len() / 3;
    let gate_up: Vec<Tensor> =
        experts.clone().map(|expert| Tensor::cat(&[part(expert, "gate"), part(expert, "up")], 0)).collect();
    let down: Vec<Tensor> = experts.map(|expert| part(expert, "down")).collect();
    all.push((format!("{prefix}gate_up_proj"), Tensor::stack(&gate_up, 0)));
    all.push((format!("{prefix}down_proj"), Tensor::stack(&down, 0)));
}

#[test]
fn stacked_experts_give_the_states_of_single_ones() {
    let dir = family("qwen3_moe");
    let expected = states(dir.path(), Kind::Float);
    let mut all = tensors(dir.path());
    stack(&mut all, 2);
    save(&dir.path().join("model.safetensors"), &all, Kind::Float).unwrap();
    assert!(states(dir.path(), Kind::Float).equal(&expected));
}

#[test]
fn missing_and_misshapen_experts_are_named() {
    let refused = |name: &str, change: &dyn Fn(&mut Named)| {
        let dir = family(name);
        let mut all = tensors(dir.path());
        change(&mut all);
        save(&dir.path().join("model.safetensors"), &all, Kind::Float).unwrap();
        load(dir.path(), Kind::Float).map(|_| ()).unwrap_err()
    };
    let without = |name: &'static str| move |all: &mut Named| all.retain(|(own, _)| own != name);
    let gone = "model.layers.1.mlp.experts.3.up_proj.weight";
    assert!(refused("qwen3_moe", &without(gone)).contains(gone));
    let gone = "model.layers.1.mlp.experts.down_proj_bias";
    assert!(refused("gpt_oss", &without(gone)).contains(gone));
    let narrow = |all: &mut Named| {
        for (_, tensor) in all.iter_mut().filter(|(name, _)| name.ends_with("mlp.experts.gate_up_proj")) {
            *tensor = tensor.narrow(0, 0, 7).contiguous();
        }
    };
    let told = refused("gpt_oss", &narrow);
    assert!(
        told.contains("model.layers.0.mlp.experts.gate_up_proj") && told.contains("[7, 32, 32]"),
        "{told}"
    );
    // Experts of a layer that is dense by the config have no place.
    let more = |all: &mut Named| {
        all.push((
            "model.layers.0.mlp.gate.weight".into(),
            Tensor::zeros([8, 32], (Kind::Float, Device::Cpu)),
        ));
    };
    assert!(refused("qwen3_moe", &more).contains("model.layers.0.mlp.gate.weight"));
}
