//! The tensors that a Qwen3 drafter consists of, by their names in the reference.

use std::path::Path;

use crate::DialectError;
use crate::drafter::{Design, Drafter, MarkovKind};
use crate::fields::Fields;

pub const EMBED: &str = "embed_tokens.weight";
pub const HEAD: &str = "lm_head.weight";
/// The target's final norm, which speculators keeps beside the drafter.
pub const VERIFIER_NORM: &str = "verifier_norm.weight";
/// What speculators may add and rebuilds itself.
pub const REBUILT: [&str; 4] = ["verifier_lm_head.weight", VERIFIER_NORM, "t2d", "d2t"];

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
    let is_eagle3 = matches!(drafter.design, Design::Eagle3 { .. });
    let read = if is_eagle3 { 2 * width } else { width };

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
        if is_eagle3 {
            put("hidden_norm", vec![width]);
        }
    }
    let Some(block) = drafter.block() else { return Ok(Some(found)) };
    let mut put = |name: &str, shape: Vec<usize>| found.push((name.into(), shape));
    put("hidden_norm.weight", vec![width]);
    let (vocab, drafts) = (drafter.vocab_size as usize, drafter.draft_vocab_size as usize);
    if let Some(markov) = block.markov {
        let rank = markov.rank as usize;
        put("markov_head.markov_w1.weight", vec![vocab, rank]);
        put("markov_head.markov_w2.weight", vec![drafts, rank]);
        let extra = match markov.kind {
            MarkovKind::Vanilla => None,
            MarkovKind::Gated => Some(("gate_proj", rank, width + rank)),
            MarkovKind::Rnn => Some(("joint_proj", 3 * rank, 2 * rank + width)),
        };
        if let Some((name, out, read)) = extra {
            put(&format!("markov_head.{name}.weight"), vec![out, read]);
            put(&format!("markov_head.{name}.bias"), vec![out]);
        }
    }
    if let Some(with_markov) = block.confidence_with_markov {
        let rank = block.markov.filter(|_| with_markov).map_or(0, |markov| markov.rank as usize);
        put("confidence_head.proj.weight", vec![1, width + rank]);
        put("confidence_head.proj.bias", vec![1]);
    }
    Ok(Some(found))
}
