//! MTP-1 in speculators' layout, whose config describes the target, and refusals of other layouts.

use deepspec_checkpoint::{
    CheckpointError, CheckpointFormat, Engine, GgufExport, Target, convert, convert_for_engine,
};
use deepspec_drafters::open_checkpoint;
use serde_json::json;

use crate::common::{Folder, bytes, edited, golden, target};

const TARGET_LAYERS: usize = 6;

fn converted(from: &Folder, to: CheckpointFormat) -> Result<Folder, CheckpointError> {
    let (source, target) = (open_checkpoint(from.path())?, target(&golden("mtp")));
    let (target, folder) = (Target::open(target.path(), "owner/target")?, Folder::new());
    convert(&source, to, Some(&target))?.write(&folder.path().join("out"), false)?;
    Ok(folder.within("out"))
}

#[test]
fn speculators_names_and_config_are_its_own() {
    let there = converted(&golden("mtp"), CheckpointFormat::Speculators).unwrap();
    let config = there.config();
    assert_eq!(
        (&config["speculators_model_type"], &config["architectures"], &config["num_nextn_predict_layers"]),
        (&json!("mtp"), &json!(["MTPDraftModel"]), &json!(1))
    );
    assert_eq!(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"], 3);
    // Its data pipeline takes the output of layer `num_hidden_layers`, the target's last.
    let layer = &config["transformer_layer_config"];
    assert_eq!(layer["num_hidden_layers"], TARGET_LAYERS);
    assert_eq!(layer["layer_types"], json!(vec!["full_attention"; TARGET_LAYERS]));
    for absent in ["draft_vocab_size", "aux_hidden_state_layer_ids", "target_layer_ids"] {
        assert_eq!(config.get(absent), None, "{absent}");
    }
    let mut expected: Vec<String> = [
        "input_proj",
        "token_layernorm",
        "hidden_layernorm",
        "final_layernorm",
        "input_layernorm",
        "post_attention_layernorm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ]
    .map(|name| format!("mtp_layers.0.{name}.weight"))
    .to_vec();
    let attention = ["q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"];
    expected.extend(attention.map(|name| format!("mtp_layers.0.self_attn.{name}.weight")));
    expected.extend(["embed_tokens.weight", "lm_head.weight"].map(String::from));
    expected.sort();
    assert_eq!(bytes(&there).into_keys().collect::<Vec<_>>(), expected);
    assert!(open_checkpoint(there.path()).unwrap().check().is_ok());
}

/// Two tensors hold all experts there, as in transformers.
#[test]
fn speculators_stores_experts_together() {
    let own = golden("mtp_moe");
    let there = converted(&own, CheckpointFormat::Speculators).unwrap();
    assert_eq!(there.config()["transformer_layer_config"]["model_type"], "qwen3_5_moe_text");
    let (each, all) = (bytes(&own), bytes(&there));
    let of = |expert: usize, projection: &str| {
        each[&format!("layers.0.mlp.experts.{expert}.{projection}_proj.weight")].2.clone()
    };
    let gate_up: Vec<u8> =
        (0..3).flat_map(|expert| [of(expert, "gate"), of(expert, "up")].concat()).collect();
    let down: Vec<u8> = (0..3).flat_map(|expert| of(expert, "down")).collect();
    for (name, shape, data) in [("gate_up_proj", [3, 16, 32], gate_up), ("down_proj", [3, 32, 8], down)] {
        let (_, found, values) = &all[&format!("mtp_layers.0.mlp.experts.{name}")];
        assert_eq!((found.as_slice(), values), (shape.as_slice(), &data), "{name}");
    }
    assert!(all.keys().all(|name| !name.ends_with(".0.gate_proj.weight")));
    assert_eq!(all.len(), each.len() - 3 * 3 + 2);
}

/// The config of speculators leaves out the defaults of transformers, which are the sizes of a published model.
#[test]
fn sizes_of_experts_have_defaults_in_speculators() {
    let there = converted(&golden("mtp_moe"), CheckpointFormat::Speculators).unwrap();
    let short = edited(&there, |config| {
        let layer = config["transformer_layer_config"].as_object_mut().unwrap();
        layer.retain(|key, _| !key.ends_with("intermediate_size") && !key.starts_with("num_experts"));
    });
    let checkpoint = open_checkpoint(short.path()).unwrap();
    let decoder = &checkpoint.drafter().decoder;
    let sizes = ["num_experts", "num_experts_per_tok", "moe_intermediate_size"].map(|key| &decoder[key]);
    assert_eq!(sizes, [&json!(256), &json!(8), &json!(512)]);
    let told = checkpoint.check().unwrap_err().to_string();
    assert!(told.contains("mlp.shared_expert.gate_proj") && told.contains("[512, 32]"), "{told}");
    let many = edited(&there, |config| config["transformer_layer_config"]["num_experts"] = json!(5000));
    let told = open_checkpoint(many.path()).unwrap().check().unwrap_err().to_string();
    assert!(told.contains("`num_experts`: 5000 is more than 4096"), "{told}");
}

/// speculators writes the target's config without defaults, and no key of ours.
#[test]
fn a_checkpoint_that_speculators_wrote_is_read() {
    let there = converted(&golden("mtp"), CheckpointFormat::Speculators).unwrap();
    let written = edited(&there, |config| {
        config.as_object_mut().unwrap().remove("num_target_layers");
        config["transformer_layer_config"].as_object_mut().unwrap().remove("layer_types");
    });
    let back = converted(&written, CheckpointFormat::Reference).unwrap();
    assert_eq!(bytes(&back), bytes(&golden("mtp")));
    let config = back.config();
    assert_eq!(config["architectures"], json!(["Qwen3MTPModel"]));
    assert_eq!(
        (&config["num_hidden_layers"], &config["num_target_layers"]),
        (&json!(1), &json!(TARGET_LAYERS))
    );
    assert_eq!((&config["target_layer_ids"], &config["num_speculative_steps"]), (&json!([]), &json!(3)));
    let two = edited(&written, |config| config["num_nextn_predict_layers"] = json!(2));
    let told = open_checkpoint(two.path()).err().unwrap().to_string();
    assert!(told.contains("`num_nextn_predict_layers`: 2, but MTP-1 has 1 layer"), "{told}");
}

#[test]
fn other_layouts_and_engines_are_refused() {
    let mtp = golden("mtp");
    for to in [CheckpointFormat::Specforge, CheckpointFormat::Zlab, CheckpointFormat::Modelopt] {
        let told = converted(&mtp, to).err().unwrap().to_string();
        assert!(told.contains("has no layout for MTP-1"), "{told}");
    }
    let (source, target) = (open_checkpoint(mtp.path()).unwrap(), target(&mtp));
    let target = Target::open(target.path(), "owner/target").unwrap();
    for engine in [Engine::Vllm, Engine::Sglang] {
        let told = convert_for_engine(&source, engine, &target).err().unwrap().to_string();
        assert!(told.contains("none with dense Qwen3 or Llama layers"), "{told}");
    }
    let told = GgufExport::plan(&source, &target, None).err().unwrap().to_string();
    assert!(told.contains("none with dense Qwen3 or Llama layers"), "{told}");
    let llama = edited(&mtp, |config| {
        (config["architectures"], config["model_type"]) = (json!(["LlamaMTPModel"]), json!("llama"));
    });
    let told = converted(&llama, CheckpointFormat::Speculators).err().unwrap().to_string();
    assert!(told.contains("only Qwen3, Qwen3.5, Qwen3.5-MoE draft layers"), "{told}");
}
