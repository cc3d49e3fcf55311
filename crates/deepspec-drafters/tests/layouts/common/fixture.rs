//! Checkpoints as other tools write them.

use safetensors::tensor::Dtype;
use serde_json::json;

use super::{Bytes, Folder, bytes, edited, golden, write};

/// A DFlash with z-lab's slots: the golden weights with z-lab's config.
pub fn zlab() -> Folder {
    let (folder, from) = (Folder::new(), golden("dflash"));
    let mut config = from.config();
    let map = config.as_object_mut().unwrap();
    for key in ["target_layer_ids", "mask_token_id", "num_anchors", "enable_confidence_head", "markov_rank"] {
        map.remove(key);
    }
    map.insert("architectures".into(), json!(["DFlashDraftModel"]));
    map.insert("auto_map".into(), json!({"AutoModel": "dflash.DFlashDraftModel"}));
    map.insert("dflash_config".into(), json!({"mask_token_id": 510, "target_layer_ids": [1, 3, 4]}));
    folder.put(&config);
    let mut tensors = bytes(&from);
    tensors.retain(|name, _| !name.starts_with("embed_tokens") && !name.starts_with("lm_head"));
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

/// SpecForge's Eagle3 with a reduced vocabulary: every second token, and a head of its own.
pub fn specforge_eagle3() -> Folder {
    let (folder, from) = (Folder::new(), llama_eagle3());
    let mut config = from.config();
    let map = config.as_object_mut().unwrap();
    map.retain(|key, _| {
        !["num_target_layers", "target_layer_ids", "draft_num_hidden_layers", "layer_types"]
            .contains(&key.as_str())
    });
    map.extend(
        json!({
            "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 64,
            "eagle_config": {"use_aux_hidden_state": true, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
        })
        .as_object()
        .unwrap()
        .clone(),
    );
    folder.put(&config);
    let mut tensors: super::Bytes = bytes(&from)
        .into_iter()
        .filter(|(name, _)| name != "embed_tokens.weight")
        .map(|(name, tensor)| (name.replace("layers.0.", "midlayer."), tensor))
        .collect();
    let mut put = |name: &str, dtype: Dtype, shape: &[usize], data: Vec<u8>| {
        tensors.insert(name.into(), (dtype, shape.to_vec(), data));
    };
    put("fc.weight", Dtype::F32, &[32, 96], vec![7; 4 * 32 * 96]);
    put("lm_head.weight", Dtype::F32, &[64, 32], vec![9; 4 * 64 * 32]);
    // Draft id i stands for token 2i.
    put("d2t", Dtype::I64, &[64], (0..64_i64).flat_map(i64::to_le_bytes).collect());
    put("t2d", Dtype::BOOL, &[128], (0..128).map(|id| u8::from(id % 2 == 0)).collect());
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

/// The golden Eagle3 without norms on queries and keys, as in Llama's layers.
pub fn llama_eagle3() -> Folder {
    let (folder, from) = (Folder::new(), golden("eagle3_qwen3"));
    let mut config = from.config();
    (config["architectures"], config["model_type"]) = (json!(["LlamaEagle3Model"]), json!("llama"));
    folder.put(&config);
    let mut tensors = bytes(&from);
    tensors.retain(|name, _| !name.contains("q_norm") && !name.contains("k_norm"));
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

/// A DFlash 2 in the reference's layout: the golden DFlash, with zeros for the additional parts of
/// DFlash 2.
pub fn dflash2() -> Folder {
    let (folder, from) = (Folder::new(), golden("dflash"));
    let mut config = from.config();
    let map = config.as_object_mut().unwrap();
    map.retain(|key, _| !["markov_rank", "enable_confidence_head"].contains(&key.as_str()));
    let own = json!({
        "architectures": ["Qwen3DFlash2Model"], "sample_from_anchor": false, "conv_kernel_size": 2, "conv_group_size": 16,
        "selector_rank": 8, "selector_top_k": 4,
    });
    map.extend(own.as_object().unwrap().clone());
    folder.put(&config);
    let mut tensors = bytes(&from);
    let [width, vocab, layers] =
        ["hidden_size", "vocab_size", "num_hidden_layers"].map(|key| config[key].as_u64().unwrap() as usize);
    put_convolutions(&mut tensors, layers, width);
    let mut put = |name: String, shape: Vec<usize>| put_zeros(&mut tensors, name, shape);
    put("candidate_selector.predecessor_codebook".into(), vec![vocab, 8]);
    put("candidate_selector.successor_codebook".into(), vec![vocab, 8]);
    put("candidate_selector.hidden_projection.weight".into(), vec![8, width]);
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

fn put_zeros(tensors: &mut Bytes, name: String, shape: Vec<usize>) {
    let data = vec![0; 4 * shape.iter().product::<usize>()];
    tensors.insert(name, (Dtype::F32, shape, data));
}

/// Adds convolutions of two taps and groups of 16 channels to all layers.
fn put_convolutions(tensors: &mut Bytes, layers: usize, width: usize) {
    for (layer, half) in (0..layers).flat_map(|layer| ["attention", "mlp"].map(|half| (layer, half))) {
        let name = format!("layers.{layer}.{half}_conv");
        put_zeros(tensors, format!("{name}.base_kernel"), vec![2, 2, width]);
        put_zeros(tensors, format!("{name}.kernel_projection.weight"), vec![2 * 2 * width / 16, width]);
    }
}

/// A Domino in the reference's layout: the golden DFlash, with other numbers for the correction head.
pub fn domino() -> Folder {
    let (folder, from) = (Folder::new(), golden("dflash"));
    let mut config = from.config();
    let map = config.as_object_mut().unwrap();
    map.retain(|key, _| !["markov_rank", "enable_confidence_head"].contains(&key.as_str()));
    let own = json!({
        "architectures": ["Qwen3DominoModel"], "gru_hidden_dim": 12, "emb_dim": 8, "pure_draft_prefix_len": 1,
    });
    map.extend(own.as_object().unwrap().clone());
    folder.put(&config);
    let mut tensors = bytes(&from);
    let [width, vocab] = ["hidden_size", "vocab_size"].map(|key| config[key].as_u64().unwrap() as usize);
    let shapes = [
        ("prefix_gru.weight_ih_l0", vec![3 * 12, width]),
        ("prefix_gru.weight_hh_l0", vec![3 * 12, 12]),
        ("embed_proj.0.weight", vec![8, width + 12]),
        ("embed_proj.2.weight", vec![vocab, 8]),
    ];
    for (seed, (name, shape)) in shapes.into_iter().enumerate() {
        // Every tensor has bytes of its own.
        let count = 4 * shape.iter().product::<usize>();
        let data = (0..count).map(|byte| if byte % 4 == 3 { 60 } else { (byte * 7 + seed) as u8 }).collect();
        tensors.insert(name.into(), (Dtype::F32, shape, data));
    }
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

/// An xPress in the reference's layout: the golden DFlash, with numbers for its refiner.
pub fn xpress() -> Folder {
    let (folder, from) = (Folder::new(), golden("dflash"));
    let mut config = from.config();
    let map = config.as_object_mut().unwrap();
    map.retain(|key, _| !["markov_rank", "enable_confidence_head"].contains(&key.as_str()));
    let own = json!({
        "architectures": ["Qwen3XPressModel"], "sample_from_anchor": false, "xpress_rank": 8, "xpress_mlp_ratio": 2,
        "xpress_num_passes": 6, "xpress_candidate_topc": 0,
    });
    map.extend(own.as_object().unwrap().clone());
    folder.put(&config);
    let mut tensors = bytes(&from);
    let [width, vocab, size] =
        ["hidden_size", "vocab_size", "block_size"].map(|key| config[key].as_u64().unwrap() as usize);
    let shapes = [
        ("w1.weight", vec![vocab, 8]),
        ("w2.weight", vec![vocab, 8]),
        ("down_h.weight", vec![8, width]),
        ("down_g.weight", vec![8, width]),
        ("in_proj.weight", vec![8, 24]),
        ("mix.L", vec![8, size, size]),
        ("mlp.gate_proj.weight", vec![16, 8]),
        ("mlp.up_proj.weight", vec![16, 8]),
        ("mlp.down_proj.weight", vec![8, 16]),
    ];
    for (seed, (name, shape)) in shapes.into_iter().enumerate() {
        // Every tensor has bytes of its own.
        let count = 4 * shape.iter().product::<usize>();
        let data = (0..count).map(|byte| if byte % 4 == 3 { 60 } else { (byte * 7 + seed) as u8 }).collect();
        tensors.insert(format!("xpress_head.{name}"), (Dtype::F32, shape, data));
    }
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

/// [`xpress`] on the backbone of DFlash 2.
pub fn xpress_dflash2() -> Folder {
    let folder = edited(&xpress(), |config| {
        config["xpress_backbone"] = json!("dflash2");
        config["conv_kernel_size"] = json!(2);
        config["conv_group_size"] = json!(16);
    });
    let config = folder.config();
    let [width, layers] =
        ["hidden_size", "num_hidden_layers"].map(|key| config[key].as_u64().unwrap() as usize);
    let mut tensors = bytes(&folder);
    put_convolutions(&mut tensors, layers, width);
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

/// An MTP-1 in the reference's layout: the layer of the golden Eagle3, as wide as the target's.
pub fn mtp() -> Folder {
    let (folder, from) = (Folder::new(), golden("eagle3_qwen3"));
    let mut config = from.config();
    let map = config.as_object_mut().unwrap();
    map.retain(|key, _| {
        !["ttt_length", "step_loss_decay", "draft_num_hidden_layers"].contains(&key.as_str())
    });
    let own = json!({
        "architectures": ["Qwen3MTPModel"], "target_layer_ids": [], "num_speculative_steps": 3,
        "step_weight_beta": 0.6, "num_hidden_layers": 1, "layer_types": ["full_attention"],
    });
    map.extend(own.as_object().unwrap().clone());
    folder.put(&config);
    let width = config["hidden_size"].as_u64().unwrap() as usize;
    let mut tensors = bytes(&from);
    tensors.retain(|name, _| !name.contains("hidden_norm"));
    let mut put = |name: &str, shape: Vec<usize>| {
        let data = (0..4 * shape.iter().product::<usize>()).map(|byte| (byte % 4 * 7) as u8).collect();
        tensors.insert(name.into(), (Dtype::F32, shape, data));
    };
    put("fc.weight", vec![width, 2 * width]);
    put("pre_fc_norm_embedding.weight", vec![width]);
    put("pre_fc_norm_hidden.weight", vec![width]);
    for name in ["q", "k", "v"] {
        let name = format!("layers.0.self_attn.{name}_proj.weight");
        let rows = bytes(&from)[&name].1[0];
        put(&name, vec![rows, width]);
    }
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

/// [`mtp`] for a Qwen3.5-MoE: its attention has a gate, and its MLP is three experts of width 8 and a shared one.
pub fn mtp_moe() -> Folder {
    const EXPERTS: usize = 3;
    let (folder, from) = (Folder::new(), mtp());
    let mut config = from.config();
    let map = config.as_object_mut().unwrap();
    let of_qwen3 = ["intermediate_size", "max_window_layers", "sliding_window", "use_sliding_window"];
    map.retain(|key, _| !of_qwen3.contains(&key.as_str()));
    let own = json!({
        "architectures": ["Qwen3_5MoeMTPModel"], "model_type": "qwen3_5_moe_text", "attn_output_gate": true,
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12,
    });
    map.extend(own.as_object().unwrap().clone());
    folder.put(&config);
    let [width, heads, dim] =
        ["hidden_size", "num_attention_heads", "head_dim"].map(|key| config[key].as_u64().unwrap() as usize);
    let mut tensors = bytes(&from);
    tensors.retain(|name, _| !name.contains(".mlp."));
    let mlp = |name: String, inner: usize| {
        [("gate", [inner, width]), ("up", [inner, width]), ("down", [width, inner])]
            .map(|(part, shape)| (format!("mlp.{name}.{part}_proj"), shape))
    };
    let mut shapes: Vec<_> = (0..EXPERTS).flat_map(|expert| mlp(format!("experts.{expert}"), 8)).collect();
    shapes.extend(mlp("shared_expert".into(), 12));
    shapes.push(("mlp.gate".into(), [EXPERTS, width]));
    shapes.push(("mlp.shared_expert_gate".into(), [1, width]));
    shapes.push(("self_attn.q_proj".into(), [2 * heads * dim, width]));
    for (seed, (name, shape)) in shapes.into_iter().enumerate() {
        // Every tensor has bytes of its own.
        let count = 4 * shape.iter().product::<usize>();
        let data = (0..count).map(|byte| if byte % 4 == 3 { 60 } else { (byte * 7 + seed) as u8 }).collect();
        tensors.insert(format!("layers.0.{name}.weight"), (Dtype::F32, shape.to_vec(), data));
    }
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

/// A P-EAGLE in the reference's layout: the layer of the golden Eagle3, and an ordinary one behind it.
pub fn peagle() -> Folder {
    let (folder, from) = (Folder::new(), golden("eagle3_qwen3"));
    let mut config = from.config();
    let map = config.as_object_mut().unwrap();
    map.retain(|key, _| {
        !["ttt_length", "step_loss_decay", "draft_num_hidden_layers"].contains(&key.as_str())
    });
    let own = json!({
        "architectures": ["Qwen3PEagleModel"], "num_depths": 5, "mask_token_id": 7, "num_hidden_layers": 2,
        "layer_types": ["full_attention", "full_attention"],
    });
    map.extend(own.as_object().unwrap().clone());
    folder.put(&config);
    let width = config["hidden_size"].as_u64().unwrap() as usize;
    let taps = config["target_layer_ids"].as_array().unwrap().len();
    let mut tensors = bytes(&from);
    let mut put = |name: String, shape: Vec<usize>| {
        let data = (0..4 * shape.iter().product::<usize>()).map(|byte| (byte % 4 * 7) as u8).collect();
        tensors.insert(name, (Dtype::F32, shape, data));
    };
    put("mask_hidden".into(), vec![1, 1, taps * width]);
    for (name, (_, shape, _)) in bytes(&from) {
        let Some(part) = name.strip_prefix("layers.0.").filter(|part| *part != "hidden_norm.weight") else {
            continue;
        };
        let is_wide = ["q_proj", "k_proj", "v_proj"].iter().any(|wide| part.contains(wide));
        put(format!("layers.1.{part}"), if is_wide { vec![shape[0], width] } else { shape });
    }
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}
