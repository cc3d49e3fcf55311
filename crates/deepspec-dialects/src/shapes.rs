//! The tensors that a Qwen3 drafter consists of, by their names in the reference.

use std::path::Path;

use crate::DialectError;
use crate::drafter::Drafter;
use crate::fields::Fields;

pub const EMBED: &str = "embed_tokens.weight";
pub const HEAD: &str = "lm_head.weight";
/// What speculators may add and rebuilds itself.
pub const REBUILT: [&str; 4] = ["verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t"];

/// Tensors by name, with their shapes.
pub type Shapes = Vec<(String, Vec<usize>)>;

/// Whether this is the target's embedding or head.
pub fn is_embed_or_head(name: &str) -> bool {
    name == EMBED || name == HEAD
}

/// Names and shapes of everything but the ends; None for layers of another family. `path` is for errors.
pub fn tensors(path: &Path, drafter: &Drafter) -> Result<Option<Shapes>, DialectError> {
    if !drafter.family.pre_norm {
        return Ok(None);
    }
    let fields = Fields::new(path, &drafter.decoder);
    let width = drafter.hidden_size as usize;
    let inner = fields.required_size("intermediate_size")? as usize;
    let heads = fields.required_size("num_attention_heads")? as usize;
    let groups = fields.size("num_key_value_heads")?.map_or(heads, |groups| groups as usize);
    let dim = fields.size("head_dim")?.map_or(width / heads, |dim| dim as usize);
    let read = drafter.kind.layer_inputs() * width;

    let mut found = vec![
        ("fc.weight".to_string(), vec![width, width * drafter.taps.len()]),
        ("norm.weight".into(), vec![width]),
    ];
    for layer in 0..drafter.layers {
        let mut put =
            |name: &str, shape: Vec<usize>| found.push((format!("layers.{layer}.{name}.weight"), shape));
        put("self_attn.q_proj", vec![heads * dim, read]);
        put("self_attn.k_proj", vec![groups * dim, read]);
        put("self_attn.v_proj", vec![groups * dim, read]);
        put("self_attn.o_proj", vec![width, heads * dim]);
        if drafter.family.qk_norm {
            put("self_attn.q_norm", vec![dim]);
            put("self_attn.k_norm", vec![dim]);
        }
        put("mlp.gate_proj", vec![inner, width]);
        put("mlp.up_proj", vec![inner, width]);
        put("mlp.down_proj", vec![width, inner]);
        put("input_layernorm", vec![width]);
        put("post_attention_layernorm", vec![width]);
    }
    drafter.kind.tensors(drafter, &mut found);
    Ok(Some(found))
}
