//! DSpark of DeepSeek-V4 in GGUF files, which llama.cpp reads as its architecture `dflash` with hyper-connections.

use deepspec_checkpoint::{Drafter, GgufParts, GgufValue, ROPE_BASE_KEY};

use super::settings::DSparkV4Settings;
use crate::block_common::formats::GGUF_ARCHITECTURE;

/// Residual streams of llama.cpp's hyper-connections.
const STREAMS: i64 = 4;
/// Most experts of a layer in llama.cpp.
const MAX_EXPERTS: i64 = 1024;
/// llama.cpp's number of the router scores √softplus.
const SQRT_SOFTPLUS: u32 = 4;

/// Metadata and tensor names of the drafter.
///
/// # Errors
/// Returns the reason if llama.cpp cannot run it.
pub fn parts(settings: &DSparkV4Settings, drafter: &Drafter) -> Result<GgufParts, String> {
    let s = &settings.stages;
    if s.hc_mult != STREAMS {
        return Err(format!("llama.cpp has {STREAMS} residual streams, and `hc_mult` is {}", s.hc_mult));
    }
    if s.n_routed_experts > MAX_EXPERTS {
        let found = s.n_routed_experts;
        return Err(format!(
            "llama.cpp has at most {MAX_EXPERTS} experts, and `n_routed_experts` is {found}"
        ));
    }
    let sizes = [
        ("block_size", settings.blocks.block_size as i64),
        ("attention.head_count", s.num_attention_heads),
        ("attention.head_count_kv", 1),
        ("attention.key_length", s.head_dim),
        ("attention.value_length", s.head_dim),
        ("rope.dimension_count", s.qk_rope_head_dim),
        ("attention.q_lora_rank", s.q_lora_rank),
        ("attention.output_lora_rank", s.o_lora_rank),
        ("attention.output_group_count", s.o_groups),
        ("attention.sliding_window", s.sliding_window),
        ("expert_count", s.n_routed_experts),
        ("expert_used_count", s.num_experts_per_tok),
        ("expert_shared_count", 1),
        ("expert_feed_forward_length", s.moe_intermediate_size),
        ("hyper_connection.count", s.hc_mult),
        ("hyper_connection.sinkhorn_iterations", s.hc_sinkhorn_iters as i64),
    ];
    let floats = [
        ("attention.layer_norm_rms_epsilon", s.rms_norm_eps),
        (ROPE_BASE_KEY, s.rope_theta),
        ("expert_weights_scale", s.routed_scaling_factor),
        // It clamps routed and shared experts alike. 0 means no clamp.
        ("swiglu_clamp_exp", s.swiglu_limit),
        ("hyper_connection.epsilon", s.hc_eps),
    ];
    let others = [
        ("sample_from_anchor", GgufValue::Bool(true)),
        ("has_confidence_head", GgufValue::Bool(true)),
        ("expert_weights_norm", GgufValue::Bool(true)),
        ("expert_gating_func", GgufValue::U32(SQRT_SOFTPLUS)),
        // No stage compresses its context.
        ("attention.compress_ratios", GgufValue::Integers(vec![0; drafter.layers as usize])),
    ];
    let sizes = sizes.map(|(key, size)| (key, GgufValue::U32(size as u32)));
    let floats = floats.map(|(key, value)| (key, GgufValue::F32(value as f32)));
    Ok(GgufParts {
        architecture: GGUF_ARCHITECTURE,
        keys: sizes.into_iter().chain(floats).chain(others).collect(),
        names: vec![
            ("hc_head_fn", "output_hc_fn.weight"),
            ("hc_head_base", "output_hc_base.weight"),
            ("hc_head_scale", "output_hc_scale.weight"),
            ("markov_head.markov_w1.weight", "markov_w1.weight"),
            ("markov_head.markov_w2.weight", "markov_w2.weight"),
            ("confidence_head.proj.weight", "conf_proj.weight"),
        ],
        layer_names: LAYER_NAMES.to_vec(),
        ..GgufParts::default()
    })
}

/// Tensor names of a stage, here and in llama.cpp.
const LAYER_NAMES: [(&str, &str); 24] = [
    ("attn_norm.weight", "attn_norm.weight"),
    ("attn.wq_a.weight", "attn_q_a.weight"),
    ("attn.q_norm.weight", "attn_q_a_norm.weight"),
    ("attn.wq_b.weight", "attn_q_b.weight"),
    ("attn.wkv.weight", "attn_kv.weight"),
    ("attn.kv_norm.weight", "attn_kv_a_norm.weight"),
    ("attn.wo_a.weight", "attn_output_a.weight"),
    ("attn.wo_b.weight", "attn_output_b.weight"),
    ("attn.attn_sink", "attn_sinks.weight"),
    ("ffn_norm.weight", "ffn_norm.weight"),
    ("ffn.gate.weight", "ffn_gate_inp.weight"),
    ("ffn.gate.bias", "exp_probs_b.bias"),
    ("ffn.experts.w1.weight", "ffn_gate_exps.weight"),
    ("ffn.experts.w2.weight", "ffn_down_exps.weight"),
    ("ffn.experts.w3.weight", "ffn_up_exps.weight"),
    ("ffn.shared_experts.w1.weight", "ffn_gate_shexp.weight"),
    ("ffn.shared_experts.w2.weight", "ffn_down_shexp.weight"),
    ("ffn.shared_experts.w3.weight", "ffn_up_shexp.weight"),
    ("hc_attn_fn", "hc_attn_fn.weight"),
    ("hc_attn_base", "hc_attn_base.weight"),
    ("hc_attn_scale", "hc_attn_scale.weight"),
    ("hc_ffn_fn", "hc_ffn_fn.weight"),
    ("hc_ffn_base", "hc_ffn_base.weight"),
    ("hc_ffn_scale", "hc_ffn_scale.weight"),
];
