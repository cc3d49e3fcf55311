//! Which drafters train on the states of a sample's last token. An engine that returns states with
//! its answers never computes these.

use std::fs;
use std::path::Path;

use deepspec_drafters::{LossDenominator, TrainSample, load_recipe, plan_drafter};
use deepspec_models::ModelConfig;
use serde_json::json;
use tch::{Device, Kind, Tensor};

const VOCAB: i64 = 50;
const WIDTH: i64 = 32;
const TOKENS: i64 = 24;

fn values(seed: f64, shape: &[i64]) -> Tensor {
    let numbers = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    (((numbers * 0.731 + seed).sin() * 37.0).sin()).view(shape).to_kind(Kind::Float)
}

/// Sums and gradients of a sample whose last states are multiplied by `factor`, and whether the
/// drafter says that it reads them.
fn pass(drafter: &str, factor: f64) -> (bool, Vec<Tensor>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("recipe.yaml");
    let text = format!(
        "name: t\ntarget: {{model: nowhere, layer_ids: {}}}\ndrafter: {drafter}\ndata: {{states: {{cache: nowhere}}, chat_template: qwen}}\n",
        if drafter.contains("mtp") { "[]" } else { "[0, 3]" }
    );
    fs::write(&path, text).unwrap();
    let config = json!({
        "model_type": "qwen3", "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB,
    });
    let target = ModelConfig::parse(Path::new("config.json"), config.as_object().unwrap().clone()).unwrap();
    let plan = plan_drafter(&load_recipe(&path, &[]).unwrap(), &target).unwrap();
    let trainee = plan.build(&values(0.1, &[VOCAB, WIDTH]), &values(0.2, &[VOCAB, WIDTH]), 3, Kind::Float);
    trainee.parameters().iter().for_each(|(_, parameter)| drop(parameter.set_requires_grad(true)));
    // The answer ends with the sample.
    let loss_mask: Vec<bool> = (0..TOKENS).map(|i| i > 2).collect();
    let (taps, last) = (values(1.0, &[TOKENS, 2 * WIDTH]), values(1.5, &[TOKENS, WIDTH]));
    for states in [&taps, &last] {
        let row = states.get(TOKENS - 1);
        row.shallow_clone().copy_(&(&row * factor));
    }
    let sample = TrainSample {
        input_ids: (0..TOKENS).map(|i| (i * 7) % VOCAB).collect(),
        anchors: plan.choose_anchors(&loss_mask, &mut |candidates, _, _| candidates.to_vec()),
        loss_mask,
        taps,
        last,
        last_positions: (0..TOKENS as u32).collect(),
    };
    let sums = trainee.accumulate(&[sample], LossDenominator(20.0), 0.4, None).unwrap();
    let gradients = trainee.parameters().iter().map(|(_, parameter)| parameter.grad());
    let mut found = vec![sums];
    found.extend(gradients.filter(Tensor::defined));
    (plan.reads_last_token_state(), found)
}

#[test]
fn only_shifted_eagle3_reads_the_states_of_the_last_token() {
    const BLOCKS: &str = "block_size: 5, num_draft_layers: 2, mask_token_id: 7";
    let drafters = [
        (
            format!(
                "{{dspark: {{{BLOCKS}, markov: {{type: vanilla, rank: 8}}, confidence: {{with_markov: true}}}}}}"
            ),
            false,
        ),
        (format!("{{dflash: {{{BLOCKS}}}}}"), false),
        (
            format!(
                "{{dflash2: {{{BLOCKS}, convolution: {{kernel_size: 2, group_size: 8}}, selector: {{rank: 8, top_k: 40}}}}}}"
            ),
            false,
        ),
        (
            "{dspark_v4: {block_size: 5, num_nextn_predict_layers: 1, mask_token_id: 7, markov_rank: 8, stage_config: \
             {num_attention_heads: 2, head_dim: 8, qk_rope_head_dim: 4, q_lora_rank: 8, o_lora_rank: 8, o_groups: 2, \
             n_routed_experts: 3, num_experts_per_tok: 2, moe_intermediate_size: 8}}}"
                .into(),
            false,
        ),
        (format!("{{xpress: {{{BLOCKS}, refiner: {{rank: 8}}}}}}"), false),
        (format!("{{domino: {{{BLOCKS}, gru: {{hidden_size: 12, rank: 8}}}}}}"), false),
        ("{eagle3: {ttt_length: 3, supervise: labels}}".into(), false),
        ("{mtp: {}}".into(), false),
        ("{peagle: {num_depths: 4, num_draft_layers: 2, mask_token_id: 7}}".into(), false),
        ("{eagle3: {ttt_length: 3, supervise: shifted}}".into(), true),
    ];
    for (drafter, expected) in drafters {
        let ((reads, kept), (_, zeroed)) = (pass(&drafter, 1.0), pass(&drafter, 0.0));
        assert_eq!(reads, expected, "{drafter}");
        let are_equal = kept.iter().zip(&zeroed).all(|(kept, zeroed)| kept.equal(zeroed));
        assert_eq!(are_equal, !reads, "{drafter}");
    }
}
