//! Names and shapes of a drafter's tensors, for layers like Qwen3's or Llama's. The names are those
//! of the reference.

use std::path::Path;

use crate::CheckpointError;
use crate::drafter::{Drafter, TensorShapes};
use crate::experts::{expert_shapes, gated_mlp_shapes};
use crate::fields::Fields;

/// Config key of attention sinks, and the name of a layer's sinks `[H]` below `self_attn`. vLLM and SGLang read the key in
/// `dflash_config`.
pub const ATTENTION_SINK_BIAS: &str = "attention_sink_bias";
/// Config key of attention sinks that vLLM reads without `dflash_config`.
pub const ADD_SWA_ATTENTION_SINK_BIAS: &str = "add_swa_attention_sink_bias";
/// Config key of a gate on attention's output (Qwen3.5). `q_proj` then has twice as many rows.
pub const OUTPUT_GATE_KEY: &str = "attn_output_gate";
pub const EMBED: &str = "embed_tokens.weight";
pub const HEAD: &str = "lm_head.weight";
/// Names of the tensors that speculators may store but rebuilds itself.
pub const REBUILT_TENSORS: [&str; 4] = ["verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t"];

/// Numbers of heads of a layer and their dimension.
pub struct Heads {
    pub query: u64,
    pub key_value: u64,
    pub dim: u64,
}

impl Heads {
    /// Reads the numbers of heads from the decoder config `fields`, with the defaults of
    /// transformers.
    pub fn of(fields: &Fields, drafter: &Drafter) -> Result<Self, CheckpointError> {
        let query = fields.required_size("num_attention_heads")?;
        let key_value = fields.size("num_key_value_heads")?.unwrap_or(query);
        let dim = fields.size("head_dim")?.unwrap_or(drafter.hidden_size / query);
        Ok(Self { query, key_value, dim })
    }
}

/// Whether the tensor is the target's embedding or LM head.
pub fn is_embed_or_head(name: &str) -> bool {
    name == EMBED || name == HEAD
}

/// Names and shapes of all tensors except embedding and LM head. None if the layers are unlike
/// Qwen3's and Llama's. `path` is used in errors.
pub fn tensor_shapes(path: &Path, drafter: &Drafter) -> Result<Option<TensorShapes>, CheckpointError> {
    let width = drafter.hidden_size as usize;
    let outer = [
        ("fc.weight".to_string(), vec![width, width * drafter.kind.fc_inputs(drafter)]),
        ("norm.weight".into(), vec![width]),
    ];
    if let Some(layers) = drafter.kind.own_layer_shapes(drafter) {
        let mut found: TensorShapes = outer.into_iter().chain(layers).collect();
        drafter.kind.add_tensor_shapes(drafter, &mut found);
        return Ok(Some(found));
    }
    if !drafter.family.pre_norm {
        return Ok(None);
    }
    let fields = Fields::new(path, &drafter.decoder);
    let mlp = match drafter.family.has_experts() {
        true => expert_shapes(&fields, drafter)?,
        false => {
            gated_mlp_shapes("", width, fields.required_size::<u64>("intermediate_size")? as usize).to_vec()
        }
    };
    let heads = Heads::of(&fields, drafter)?;
    let [heads, groups, dim] = [heads.query, heads.key_value, heads.dim].map(|size| size as usize);

    let has_gate = drafter.family.may_have_output_gate() && fields.flag(OUTPUT_GATE_KEY)?.unwrap_or(true);
    let gates = if has_gate { 2 } else { 1 };
    let mut found = outer.to_vec();
    for layer in 0..drafter.layers {
        let read = drafter.kind.layer_inputs(layer) * width;
        let mut put =
            |name: &str, shape: Vec<usize>| found.push((format!("layers.{layer}.{name}.weight"), shape));
        put("self_attn.q_proj", vec![gates * heads * dim, read]);
        put("self_attn.k_proj", vec![groups * dim, read]);
        put("self_attn.v_proj", vec![groups * dim, read]);
        put("self_attn.o_proj", vec![width, heads * dim]);
        if drafter.family.qk_norm {
            put("self_attn.q_norm", vec![dim]);
            put("self_attn.k_norm", vec![dim]);
        }
        mlp.iter().for_each(|(name, shape)| put(&format!("mlp.{name}"), shape.clone()));
        put("input_layernorm", vec![width]);
        put("post_attention_layernorm", vec![width]);
        if drafter.has_attention_sinks() {
            found.push((format!("layers.{layer}.self_attn.{ATTENTION_SINK_BIAS}"), vec![heads]));
        }
    }
    drafter.kind.add_tensor_shapes(drafter, &mut found);
    Ok(Some(found))
}
