//! DSpark of DeepSeek-V4 in llama.cpp's layout.

use std::slice;

use deepspec_checkpoint::{GgufExport, Target, TensorType};
use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockSpec, DSparkV4, DSparkV4Config, DSparkV4Settings, DraftDecoder, StageSettings, open_checkpoint,
};
use deepspec_models::{ModelConfig, load_embed_and_head, save};
use deepspec_testkit::noise;
use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor};

use crate::common::{Folder, edited};
use crate::gguf::{asset, read_back, write_named};

/// Experts of a stage, so many that their numbers and their names have different orders.
const EXPERTS: i64 = 12;
const STAGES: usize = 2;

/// A random drafter for the tiny target.
pub fn drafter() -> Folder {
    let (folder, target) = (Folder::new(), asset("tiny-target"));
    let model = ModelConfig::load(&target).unwrap();
    let config = DSparkV4Config {
        decoder: DraftDecoder {
            model: model.draft_decoder(&[None; STAGES]).unwrap(),
            taps: Tap::from_layer_ids([0, 2, 4]).unwrap(),
            num_target_layers: model.layers.len(),
        },
        settings: DSparkV4Settings {
            blocks: BlockSpec {
                block_size: 5,
                slots: SlotTarget::AnchorPredicts,
                mask_token_id: 1023,
                causal: false,
                num_anchors: 8,
            },
            markov_rank: 16,
            stages: StageSettings {
                num_attention_heads: 3,
                head_dim: 32,
                qk_rope_head_dim: 16,
                q_lora_rank: 24,
                o_lora_rank: 20,
                o_groups: 3,
                sliding_window: 64,
                rope_theta: 2e4,
                rms_norm_eps: 1e-5,
                n_routed_experts: EXPERTS,
                num_experts_per_tok: 2,
                moe_intermediate_size: 40,
                routed_scaling_factor: 2.5,
                swiglu_limit: 7.0,
                hc_mult: 4,
                hc_sinkhorn_iters: 6,
                hc_eps: 1e-4,
            },
        },
    };
    let (embed, head) = load_embed_and_head(&target, &model, Device::Cpu, Kind::Float).unwrap();
    let model = DSparkV4::fresh(config, &embed, &head, 1, Kind::Float);
    // Norms, sinks and biases that are not all the same.
    let tensors = model.checkpoint();
    for (seed, (_, tensor)) in tensors.iter().filter(|(_, tensor)| tensor.dim() == 1).enumerate() {
        let noise = Tensor::from_slice(&noise(seed as u64, tensor.numel()));
        let _ = tensor.shallow_clone().g_add_(&noise);
    }
    save(&folder.path().join("model.safetensors"), &tensors, Kind::BFloat16).unwrap();
    folder.put(&Value::Object(model.config().to_json()));
    folder
}

/// Names in the file, and what each tensor holds.
fn names() -> Map<String, Value> {
    let mut names: Map<String, Value> = [
        ("fc.weight", "fc.weight"),
        ("enc.output_norm.weight", "hidden_norm.weight"),
        ("output_norm.weight", "norm.weight"),
        ("output_hc_fn.weight", "hc_head_fn"),
        ("output_hc_base.weight", "hc_head_base"),
        ("output_hc_scale.weight", "hc_head_scale"),
        ("markov_w1.weight", "markov_head.markov_w1.weight"),
        ("markov_w2.weight", "markov_head.markov_w2.weight"),
        ("conf_proj.weight", "confidence_head.proj.weight"),
    ]
    .map(|(there, here)| (there.to_string(), json!(here)))
    .into_iter()
    .collect();
    for stage in 0..STAGES {
        for (there, here) in [
            ("attn_norm.weight", "attn_norm.weight"),
            ("attn_q_a.weight", "attn.wq_a.weight"),
            ("attn_q_a_norm.weight", "attn.q_norm.weight"),
            ("attn_q_b.weight", "attn.wq_b.weight"),
            ("attn_kv.weight", "attn.wkv.weight"),
            ("attn_kv_a_norm.weight", "attn.kv_norm.weight"),
            ("attn_output_a.weight", "attn.wo_a.weight"),
            ("attn_output_b.weight", "attn.wo_b.weight"),
            ("attn_sinks.weight", "attn.attn_sink"),
            ("ffn_norm.weight", "ffn_norm.weight"),
            ("ffn_gate_inp.weight", "ffn.gate.weight"),
            ("exp_probs_b.bias", "ffn.gate.bias"),
            ("ffn_gate_shexp.weight", "ffn.shared_experts.w1.weight"),
            ("ffn_down_shexp.weight", "ffn.shared_experts.w2.weight"),
            ("ffn_up_shexp.weight", "ffn.shared_experts.w3.weight"),
            ("hc_attn_fn.weight", "hc_attn_fn"),
            ("hc_attn_base.weight", "hc_attn_base"),
            ("hc_attn_scale.weight", "hc_attn_scale"),
            ("hc_ffn_fn.weight", "hc_ffn_fn"),
            ("hc_ffn_base.weight", "hc_ffn_base"),
            ("hc_ffn_scale.weight", "hc_ffn_scale"),
        ] {
            names.insert(format!("blk.{stage}.{there}"), json!(format!("layers.{stage}.{here}")));
        }
        for (there, here) in [("gate", "w1"), ("down", "w2"), ("up", "w3")] {
            let of = |expert| format!("layers.{stage}.ffn.experts.{expert}.{here}.weight");
            let experts: Vec<String> = (0..EXPERTS).map(of).collect();
            names.insert(format!("blk.{stage}.ffn_{there}_exps.weight"), json!({"stack": experts}));
        }
    }
    names
}

#[test]
fn llama_cpps_package_reads_a_dspark_of_deepseek_v4() {
    let drafter = drafter();
    // The rotation of the decoder's config is not the stages'.
    let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512});
    let mut config = drafter.config();
    config["rope_scaling"] = scaling;
    drafter.put(&config);
    let written = write_named(&drafter, TensorType::Bf16, &names());
    let Some(mut told) = read_back(slice::from_ref(&written)) else { return };
    let (fields, tensors) = (told[0]["fields"].take(), told[0]["tensors"].take());
    assert_eq!(fields["general.architecture"], "dflash");
    let close = |found: &Value, expected: f64| (found.as_f64().unwrap() / expected - 1.0).abs() < 1e-6;
    for (key, expected) in [
        ("attention.layer_norm_rms_epsilon", 1e-5),
        ("rope.freq_base", 2e4),
        ("expert_weights_scale", 2.5),
        ("swiglu_clamp_exp", 7.0),
        ("hyper_connection.epsilon", 1e-4),
    ] {
        assert!(close(&fields[format!("dflash.{key}")], expected), "{key}");
    }
    for (key, expected) in [
        ("block_count", json!(STAGES)),
        ("block_size", json!(5)),
        ("target_layers", json!([1, 3, 5])),
        ("sample_from_anchor", json!(true)),
        ("has_confidence_head", json!(true)),
        ("attention.head_count", json!(3)),
        ("attention.head_count_kv", json!(1)),
        ("attention.key_length", json!(32)),
        ("attention.value_length", json!(32)),
        ("rope.dimension_count", json!(16)),
        ("attention.q_lora_rank", json!(24)),
        ("attention.output_lora_rank", json!(20)),
        ("attention.output_group_count", json!(3)),
        ("attention.sliding_window", json!(64)),
        ("attention.compress_ratios", json!([0, 0])),
        ("expert_count", json!(EXPERTS)),
        ("expert_used_count", json!(2)),
        ("expert_shared_count", json!(1)),
        ("expert_feed_forward_length", json!(40)),
        ("expert_weights_norm", json!(true)),
        ("expert_gating_func", json!(4)),
        ("hyper_connection.count", json!(4)),
        ("hyper_connection.sinkhorn_iterations", json!(6)),
    ] {
        assert_eq!(fields[format!("dflash.{key}")], expected, "{key}");
    }
    for (name, kind) in [
        ("blk.0.attn_q_a.weight", "BF16"),
        ("blk.0.ffn_gate_exps.weight", "BF16"),
        ("blk.0.ffn_gate_inp.weight", "F32"),
        ("blk.0.hc_attn_fn.weight", "F32"),
        ("output_hc_fn.weight", "F32"),
        ("conf_proj.weight", "F32"),
    ] {
        assert_eq!(tensors[name], kind, "{name}");
    }
}

#[test]
fn drafters_that_llama_cpp_cannot_hold_are_refused() {
    let own = drafter();
    for (key, value, words) in [
        ("hc_mult", json!(2), "llama.cpp has 4 residual streams, and `hc_mult` is 2"),
        ("n_routed_experts", json!(2000), "at most 1024 experts, and `n_routed_experts` is 2000"),
        ("target_layer_ids", json!([0, 2, 5]), "layer id 5 is outside of 0 to 4"),
        ("target_layer_ids", json!([-1, 2, 4]), "layer id -1 is outside of 0 to 4"),
    ] {
        let changed = edited(&own, |config| match key {
            "target_layer_ids" => config[key] = value.clone(),
            _ => config["stage_config"][key] = value.clone(),
        });
        let source = open_checkpoint(changed.path()).unwrap();
        let target = Target::open(&asset("tiny-target"), "owner/target").unwrap();
        let told = GgufExport::plan(&source, &target, None).err().unwrap().to_string();
        assert!(told.contains(words), "{told}");
    }
}
