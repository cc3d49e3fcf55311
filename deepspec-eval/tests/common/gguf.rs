//! The tiny target as a GGUF, a Llama made from it, and a quantised model converted to float32.

use std::fs;
use std::path::Path;

use deepspec_checkpoint::gguf::{
    Entry as Found, GgufFile, Tensor as Written, TensorType, Tokenizer, Value as Entry, Writer,
    to_interleaved,
};
use serde_json::Value;
use tch::{Kind, Tensor};

use super::target_dir;

/// Writes the tiny target in float32, as llama.cpp reads it.
pub fn target_gguf(file: &Path) {
    write(file, "qwen3");
}

/// Writes the tiny target without the norms on queries and keys: a Llama whose weights were trained
/// as another model.
pub fn llama_gguf(file: &Path) {
    write(file, "llama");
}

fn write(file: &Path, architecture: &str) {
    let dir = target_dir();
    let config: Value = serde_json::from_str(&fs::read_to_string(dir.join("config.json")).unwrap()).unwrap();
    let mut writer = Writer::default();
    writer.put("general.architecture", Entry::Text(architecture.into()));
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
        writer.put(&format!("{architecture}.{theirs}"), size(ours));
    }
    let rope = config["rope_parameters"]["rope_theta"].as_f64().or(config["rope_theta"].as_f64()).unwrap();
    writer.put(&format!("{architecture}.rope.freq_base"), Entry::F32(rope as f32));
    let eps = config["rms_norm_eps"].as_f64().unwrap();
    writer.put(&format!("{architecture}.attention.layer_norm_rms_epsilon"), Entry::F32(eps as f32));
    let tokenizer = Tokenizer::read(&dir, config["vocab_size"].as_u64().unwrap() as usize).unwrap();
    assert!(tokenizer.has_known_pre_tokenizer());
    writer.extend(tokenizer.into_entries());
    for (theirs, ours) in [("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")] {
        let id = config[ours].get(0).unwrap_or(&config[ours]).as_u64().unwrap();
        writer.put(&format!("tokenizer.ggml.{theirs}_token_id"), Entry::U32(id as u32));
    }
    writer.put("tokenizer.ggml.add_bos_token", Entry::Bool(false));
    let template = fs::read_to_string(dir.join("chat_template.jinja")).unwrap();
    writer.put("tokenizer.chat_template", Entry::Text(template));
    let is_llama = architecture == "llama";
    let mut tensors = Tensor::read_safetensors(dir.join("model.safetensors")).unwrap();
    tensors.retain(|(name, _)| !is_llama || !(name.contains("q_norm") || name.contains("k_norm")));
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
        let (name, tensor) = &tensors[number];
        let values = Vec::<f32>::try_from(tensor.to_kind(Kind::Float).flatten(0, -1)).unwrap();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let heads = [("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")];
        let heads = heads.into_iter().find(|(part, _)| is_llama && name.contains(part));
        Ok(match heads {
            Some((_, key)) => {
                to_interleaved(&bytes, config[key].as_u64().unwrap() as usize, tensor.size()[0] as usize)
            }
            None => bytes,
        })
    };
    writer.write(&mut out, data).unwrap();
}

/// Rewrites a model with all its tensors in float32.
pub fn dequantised(packed: &Path, file: &Path) {
    let packed = GgufFile::open(packed).unwrap();
    let mut writer = Writer::default();
    for (key, value) in packed.entries() {
        let value = match value {
            Found::Integer(value) => Entry::U32(*value as u32),
            Found::Float(value) => Entry::F32(*value as f32),
            Found::Bool(value) => Entry::Bool(*value),
            Found::Text(text) => Entry::Text(text.clone()),
            Found::List(list) if matches!(list[..], [Found::Text(_), ..]) => {
                Entry::Texts(packed.texts(key).unwrap().unwrap().into_iter().map(String::from).collect())
            }
            Found::List(_) => {
                let list = packed.integers(key).unwrap().unwrap();
                Entry::Integers(list.into_iter().map(|value| value as i32).collect())
            }
        };
        if key != "general.file_type" {
            writer.put(key, value);
        }
    }
    let tensors: Vec<_> = packed.tensors().iter().collect();
    for (name, stored) in &tensors {
        assert_eq!(stored.kind.decoded_type(), TensorType::F32, "{name}");
        writer.tensor(Written { name: name.to_string(), kind: TensorType::F32, shape: stored.shape.clone() });
    }
    let data = |number: usize, _: &Written| Ok(packed.values(tensors[number].0).unwrap());
    writer.write(&mut fs::File::create(file).unwrap(), data).unwrap();
}
