//! The tiny target as a GGUF.

use std::fs;
use std::path::Path;

use deepspec_gguf::{Tensor as Written, TensorType, Tokenizer, Value as Entry, Writer};
use serde_json::Value;
use tch::{Kind, Tensor};

use super::target_dir;

/// The tiny target in float32, as llama.cpp reads it.
pub fn target_gguf(file: &Path) {
    let dir = target_dir();
    let config: Value = serde_json::from_str(&fs::read_to_string(dir.join("config.json")).unwrap()).unwrap();
    let mut writer = Writer::default();
    writer.put("general.architecture", Entry::Text("qwen3".into()));
    let size = |key: &str| Entry::U32(config[key].as_u64().unwrap() as u32);
    for (theirs, ours) in [
        ("block_count", "num_hidden_layers"),
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
        ("attention.key_length", "head_dim"),
        ("attention.value_length", "head_dim"),
    ] {
        writer.put(&format!("qwen3.{theirs}"), size(ours));
    }
    let rope = config["rope_parameters"]["rope_theta"].as_f64().or(config["rope_theta"].as_f64()).unwrap();
    writer.put("qwen3.rope.freq_base", Entry::F32(rope as f32));
    let eps = config["rms_norm_eps"].as_f64().unwrap();
    writer.put("qwen3.attention.layer_norm_rms_epsilon", Entry::F32(eps as f32));
    let tokenizer = Tokenizer::read(&dir, config["vocab_size"].as_u64().unwrap() as usize).unwrap();
    assert!(tokenizer.is_known());
    writer.extend(tokenizer.entries());
    for (theirs, ours) in [("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")] {
        let id = config[ours].get(0).unwrap_or(&config[ours]).as_u64().unwrap();
        writer.put(&format!("tokenizer.ggml.{theirs}_token_id"), Entry::U32(id as u32));
    }
    writer.put("tokenizer.ggml.add_bos_token", Entry::Bool(false));
    let template = fs::read_to_string(dir.join("chat_template.jinja")).unwrap();
    writer.put("tokenizer.chat_template", Entry::Text(template));
    let tensors = Tensor::read_safetensors(dir.join("model.safetensors")).unwrap();
    let spelled = |name: &str| {
        let known = [
            ("model.embed_tokens.", "token_embd."),
            ("lm_head.", "output."),
            ("model.norm.", "output_norm."),
            ("model.layers.", "blk."),
            (".input_layernorm.", ".attn_norm."),
            (".post_attention_layernorm.", ".ffn_norm."),
            (".self_attn.o_proj.", ".attn_output."),
            (".self_attn.", ".attn_"),
            (".mlp.", ".ffn_"),
            ("_proj.", "."),
        ];
        known.iter().fold(name.to_string(), |name, (ours, theirs)| name.replace(ours, theirs))
    };
    for (name, tensor) in &tensors {
        let shape = tensor.size().into_iter().map(|size| size as usize).collect();
        writer.tensor(Written { name: spelled(name), kind: TensorType::F32, shape });
    }
    let mut out = fs::File::create(file).unwrap();
    let data = |number: usize, _: &Written| {
        let values = Vec::<f32>::try_from(tensors[number].1.to_kind(Kind::Float).flatten(0, -1)).unwrap();
        Ok(values.iter().flat_map(|value| value.to_le_bytes()).collect())
    };
    writer.write(&mut out, data).unwrap();
}
