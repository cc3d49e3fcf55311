//! Checkpoints as other tools write them.

use serde_json::{Value, json};

use super::{Folder, bytes, golden, write};

/// A DFlash with z-lab's slots: the golden weights under z-lab's config.
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

/// SpecForge's Eagle3, as far as it is read.
pub fn specforge_eagle3() -> Folder {
    let (folder, from) = (Folder::new(), golden("eagle3_qwen3"));
    let config: Value = json!({
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 32, "vocab_size": 128,
        "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
        "draft_vocab_size": 64, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]},
    });
    folder.put(&config);
    let renamed = |name: String| name.replace("layers.0.", "midlayer.");
    let tensors = bytes(&from).into_iter().map(|(name, tensor)| (renamed(name), tensor)).collect();
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}
