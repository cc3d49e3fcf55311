//! Tensor names of decoders in llama.cpp and transformers.

/// Tensor names of a layer: in transformers after `layers.N.`, in llama.cpp after `blk.N.`.
pub const LAYER_NAMES: [(&str, &str); 11] = [
    ("input_layernorm.weight", "attn_norm.weight"),
    ("self_attn.q_proj.weight", "attn_q.weight"),
    ("self_attn.k_proj.weight", "attn_k.weight"),
    ("self_attn.v_proj.weight", "attn_v.weight"),
    ("self_attn.o_proj.weight", "attn_output.weight"),
    ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("post_attention_layernorm.weight", "ffn_norm.weight"),
    ("mlp.gate_proj.weight", "ffn_gate.weight"),
    ("mlp.up_proj.weight", "ffn_up.weight"),
    ("mlp.down_proj.weight", "ffn_down.weight"),
];

/// Names of the tensors outside the layers.
const OUTER_NAMES: [(&str, &str); 3] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

/// Converts llama.cpp's tensor name to that of transformers, in a language model of `layers`
/// layers. None if transformers has no such tensor.
pub(crate) fn to_transformers_name(name: &str, layers: u64) -> Option<String> {
    let Some(rest) = name.strip_prefix("blk.") else {
        return OUTER_NAMES.iter().find(|(_, theirs)| *theirs == name).map(|(ours, _)| ours.to_string());
    };
    let (layer, part) = rest.split_once('.')?;
    // Accepts only the canonical number: `blk.01` would be a second `blk.1`.
    layer.parse::<u64>().ok().filter(|number| *number < layers && number.to_string() == layer)?;
    let (ours, _) = LAYER_NAMES.iter().find(|(_, theirs)| *theirs == part)?;
    Some(format!("model.layers.{layer}.{ours}"))
}
