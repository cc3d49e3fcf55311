//! A backward layer by layer, with or without recomputation, gives the same sums and gradients as
//! one backward through all layers. Gradients that are reported as complete are complete.

use std::fs;
use std::path::Path;

use deepspec_drafters::{GradReadyHook, LossDenominator, TrainSample, load_recipe, plan_drafter};
use deepspec_models::ModelConfig;
use serde_json::json;
use tch::{Device, Kind, Tensor};

const VOCAB: i64 = 50;
const WIDTH: i64 = 32;
const TAPS: i64 = 2;

fn target() -> ModelConfig {
    let config = json!({
        "model_type": "qwen3", "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB,
    });
    ModelConfig::parse(Path::new("config.json"), config.as_object().unwrap().clone()).unwrap()
}

fn values(seed: f64, shape: &[i64]) -> Tensor {
    let numbers = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    (((numbers * 0.731 + seed).sin() * 37.0).sin()).view(shape).to_kind(Kind::Float)
}

fn sample(seed: f64, tokens: usize, anchors: &[usize]) -> TrainSample {
    TrainSample {
        input_ids: (0..tokens as i64).map(|i| (i * 7 + seed as i64) % VOCAB).collect(),
        loss_mask: (0..tokens).map(|i| i > 2).collect(),
        taps: values(seed, &[tokens as i64, TAPS * WIDTH]),
        last: values(seed + 0.5, &[tokens as i64, WIDTH]),
        last_positions: (0..tokens as u32).collect(),
        anchors: anchors.to_vec(),
    }
}

/// The sums of a micro-batch and the gradients of all parameters that have one. With `is_heard`,
/// checks that gradients are complete when they are reported.
fn pass(drafter: &str, changes: &[&str], is_heard: bool) -> (Tensor, Vec<(String, Tensor)>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("recipe.yaml");
    let text = format!(
        "name: t\ntarget: {{model: nowhere, layer_ids: {}}}\ndrafter: {drafter}\ndata: {{states: {{cache: nowhere}}, chat_template: qwen}}\n",
        if drafter.contains("mtp") { "[]" } else { "[0, 3]" }
    );
    fs::write(&path, text).unwrap();
    let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
    let plan = plan_drafter(&load_recipe(&path, &changes).unwrap(), &target()).unwrap();
    let (embed, head) = (values(0.1, &[VOCAB, WIDTH]), values(0.2, &[VOCAB, WIDTH]));
    let trainee = plan.build(&embed, &head, 3, Kind::Float);
    trainee.parameters().iter().for_each(|(_, parameter)| drop(parameter.set_requires_grad(true)));
    let samples = [sample(1.0, 40, &[3, 4, 11, 30]), sample(2.0, 9, &[5]), sample(3.0, 12, &[])];
    let stages = trainee.grad_stages();
    let (mut heard, mut complete) = (vec![], vec![]);
    let mut on_grad_ready = |count: usize| {
        heard.push(count);
        for (name, parameter) in trainee.parameters() {
            if stages[..count].iter().any(|stage| name.starts_with(stage)) {
                complete.push((name, parameter, parameter.grad().copy()));
            }
        }
    };
    let listened = is_heard.then_some(&mut on_grad_ready as GradReadyHook);
    let sums = trainee.accumulate(&samples, LossDenominator(20.0), 0.4, listened).unwrap();
    let all: Vec<usize> = (1..=stages.len()).collect();
    assert_eq!(heard, if is_heard { all } else { vec![] }, "{drafter}");
    for (name, parameter, gradient) in complete {
        assert_eq!(parameter.grad(), gradient, "{name} of {drafter} was not complete");
    }
    let gradients = trainee.parameters().iter().map(|(name, parameter)| (name.clone(), parameter.grad()));
    (sums, gradients.filter(|(_, gradient)| gradient.defined()).collect())
}

const BLOCKS: &str = "block_size: 5, num_draft_layers: 3, mask_token_id: 7";

#[test]
fn gradients_are_those_of_kept_activations() {
    let windows = "sliding_window: 9, layer_types: [sliding_attention, full_attention, sliding_attention]";
    for drafter in [
        format!(
            "{{dspark: {{{BLOCKS}, {windows}, markov: {{type: gated, rank: 8}}, confidence: {{with_markov: true}}}}}}"
        ),
        format!("{{dflash: {{{BLOCKS}}}}}"),
        format!(
            "{{dflash2: {{{BLOCKS}, convolution: {{kernel_size: 2, group_size: 8}}, selector: {{rank: 8, top_k: 40}}}}}}"
        ),
        format!("{{xpress: {{{BLOCKS}, refiner: {{rank: 8}}}}}}"),
        format!("{{xpress: {{{BLOCKS}, backbone: dflash2, refiner: {{rank: 8}}}}}}"),
        format!("{{domino: {{{BLOCKS}, gru: {{hidden_size: 12, rank: 8}}}}}}"),
    ] {
        let (sums, kept) = pass(&drafter, &[], false);
        assert!(kept.iter().any(|(name, _)| name == "layers.0.self_attn.q_proj.weight"));
        for (changes, is_heard) in
            [(vec!["train.recompute=true"], false), (vec!["train.recompute=true"], true), (vec![], true)]
        {
            let (again, computed) = pass(&drafter, &changes, is_heard);
            // Without an autograd graph some norms run in one pass, with other last bits.
            assert!(sums.allclose(&again, 1e-5, 1e-6, false), "{drafter}: {sums} {again}");
            assert_eq!(kept.len(), computed.len(), "{drafter}");
            for ((name, kept), (other, computed)) in kept.iter().zip(&computed) {
                let (most, apart) = (kept.abs().max(), (kept - computed).abs().max());
                assert_eq!(name, other);
                // The selector's features are multiplied by a codebook that is initialised to
                // zeros.
                let idle = name.starts_with("candidate_selector.") && !name.contains("successor");
                assert!(most.double_value(&[]) > 0.0 || idle, "{name} of {drafter} learns nothing");
                let apart = apart.double_value(&[]);
                assert!(apart <= 1e-5 * most.double_value(&[]), "{name} of {drafter}: {apart}");
            }
        }
    }
}

/// Autograd differentiates all their layers in one call, so that gradients are complete only at the end.
#[test]
fn drafters_that_read_tokens_complete_nothing_early() {
    for drafter in ["{eagle3: {}}", "{peagle: {mask_token_id: 7}}", "{mtp: {}}"] {
        let (_, whole) = pass(drafter, &[], false);
        let (_, heard) = pass(drafter, &[], true);
        assert!(!whole.is_empty() && whole == heard, "{drafter}");
    }
}

#[test]
fn drafters_that_read_tokens_refuse_it() {
    let kinds = [
        ("[0, 3]", "eagle3: {}", "Eagle3"),
        ("[0, 3]", "peagle: {mask_token_id: 7}", "P-EAGLE"),
        ("[]", "mtp: {}", "MTP-1"),
    ];
    for (layer_ids, drafter, title) in kinds {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("recipe.yaml");
        let text = format!(
            "name: t\ntarget: {{model: nowhere, layer_ids: {layer_ids}}}\ndrafter: {{{drafter}}}\n\
             data: {{states: {{cache: nowhere}}, chat_template: qwen}}\ntrain: {{recompute: true}}\n"
        );
        fs::write(&path, text).unwrap();
        let error = plan_drafter(&load_recipe(&path, &[]).unwrap(), &target()).err().unwrap().to_string();
        let expected = format!("`train.recompute`: {title} keeps what its layers make");
        assert!(error.contains(&expected), "{error}");
    }
}
