//! MTP layers in the checkpoints of targets become drafters, byte for byte.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::noise;
use deepspec_checkpoint::Target;
use deepspec_drafters::{DraftDecoder, Mtp, MtpConfig, MtpSettings, extract_mtp, merge_mtp, open_checkpoint};
use deepspec_models::{ModelConfig, save};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

/// Config of a multimodal hybrid, as published.
fn hybrid() -> Value {
    json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": false,
        "text_config": {
            "model_type": "qwen3_5_text", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96,
            "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "full_attention_interval": 4,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false, "attn_output_gate": true,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    })
}

/// Experts of [`mixture`].
const EXPERTS: i64 = 4;
/// Names of the tensors that hold all experts.
const STACKED: [&str; 2] = ["layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"];

/// [`hybrid`] with experts in all layers.
fn mixture() -> Value {
    let mut config = hybrid();
    config["architectures"] = json!(["Qwen3_5MoeForConditionalGeneration"]);
    config["model_type"] = json!("qwen3_5_moe");
    let own = json!({
        "model_type": "qwen3_5_moe_text", "num_experts": EXPERTS, "num_experts_per_tok": 2,
        "moe_intermediate_size": 8, "shared_expert_intermediate_size": 24,
    });
    let text = config["text_config"].as_object_mut().unwrap();
    text.remove("intermediate_size");
    text.extend(own.as_object().unwrap().clone());
    config
}

/// Joins the tensors of all experts, as Qwen3.6 stores them.
fn stack(tensors: &mut Vec<(String, Tensor)>) {
    let mut parts: Vec<(String, Tensor)> =
        tensors.extract_if(.., |(name, _)| name.contains(".experts.")).collect();
    let mut take = |expert: i64, projection: &str| {
        let name = format!("mtp.layers.0.mlp.experts.{expert}.{projection}.weight");
        parts.swap_remove(parts.iter().position(|(known, _)| *known == name).unwrap()).1
    };
    let gate_up = |expert| Tensor::cat(&[take(expert, "gate_proj"), take(expert, "up_proj")], 0);
    let gate_up: Vec<Tensor> = (0..EXPERTS).map(gate_up).collect();
    let down: Vec<Tensor> = (0..EXPERTS).map(|expert| take(expert, "down_proj")).collect();
    assert!(parts.is_empty());
    for (name, all) in STACKED.iter().zip([gate_up, down]) {
        tensors.push((format!("mtp.{name}"), Tensor::stack(&all, 0)));
    }
}

/// A drafter like the target's MTP layer.
fn drafter(config: &Value) -> Mtp {
    let target = ModelConfig::parse(Path::new("config.json"), config.as_object().unwrap().clone()).unwrap();
    let decoder = DraftDecoder {
        model: target.mtp_decoder().unwrap(),
        taps: vec![],
        num_target_layers: target.layers.len(),
    };
    let settings = MtpSettings { num_speculative_steps: 2, ..MtpSettings::default() };
    let ends = [1, 2].map(|seed| noise(seed, &[96, 32]));
    let model = Mtp::fresh(MtpConfig { decoder, settings }, &ends[0], &ends[1], 3, Kind::Float);
    // Norms of the family are stored without the 1 that is added to them.
    let norms = model.parameters().iter().filter(|(name, _)| name.contains("norm"));
    assert_eq!(norms.clone().count(), 7);
    for (seed, (_, norm)) in norms.enumerate() {
        assert_eq!(norm.abs().max().double_value(&[]), 0.0);
        let _ = norm.shallow_clone().g_add_(&(noise(9 + seed as u64, &norm.size()) * 0.2));
    }
    model
}

/// A change of a target's tensors.
type Edit<'a> = &'a dyn Fn(&mut Vec<(String, Tensor)>);

/// The target's folder with tensors changed by `edit`.
fn target(config: &Value, model: &Mtp, edit: impl Fn(&mut Vec<(String, Tensor)>)) -> (TempDir, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("target");
    fs::create_dir(&dir).unwrap();
    let (embed, head) = model.embed_and_head();
    let mut tensors = vec![
        ("model.language_model.embed_tokens.weight".to_string(), embed),
        ("lm_head.weight".into(), head),
        ("model.language_model.norm.weight".into(), noise(4, &[32])),
    ];
    let own = model.parameters().iter().map(|(name, tensor)| (format!("mtp.{name}"), tensor.shallow_clone()));
    tensors.extend(own);
    edit(&mut tensors);
    save(&dir.join("model.safetensors"), &tensors, Kind::BFloat16).unwrap();
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    (root, dir)
}

fn extracted(dir: &Path) -> Result<PathBuf, String> {
    let target = Target::open(dir, "target").unwrap();
    let out = dir.with_file_name("drafter");
    extract_mtp(&target, 2).map_err(|error| error.to_string())?.write(&out, false).unwrap();
    Ok(out)
}

#[test]
fn the_layer_of_a_checkpoint_is_the_drafter_that_was_stored() {
    let forms: [(Value, Edit); 3] = [(hybrid(), &|_| ()), (mixture(), &|_| ()), (mixture(), &stack)];
    forms.iter().for_each(|(config, edit)| check_extraction(config, edit));
}

fn check_extraction(config: &Value, edit: Edit) {
    let model = drafter(config);
    let (_root, dir) = target(config, &model, edit);
    let out = extracted(&dir).unwrap();
    let found = Mtp::load(&out, Device::Cpu, Kind::BFloat16).unwrap();
    assert_eq!(found.config().settings, model.config().settings);
    assert_eq!(found.config().model().layers, model.config().model().layers);
    let (found, stored) = (found.checkpoint(), model.checkpoint());
    assert_eq!(found.len(), stored.len());
    for (name, tensor) in stored {
        let (_, found) = found.iter().find(|(known, _)| *known == name).unwrap();
        assert!(found.equal(&tensor.to_kind(Kind::BFloat16)), "{name}");
    }
    // An equal folder stays, and is no error.
    extracted(&dir).unwrap();
}

/// A target that ties its LM head to the embedding stores one tensor for both.
#[test]
fn a_tied_head_is_the_embedding() {
    let mut config = hybrid();
    config["tie_word_embeddings"] = true.into();
    let model = drafter(&config);
    let (_root, dir) =
        target(&config, &model, |tensors| tensors.retain(|(name, _)| name != "lm_head.weight"));
    let found = Mtp::load(&extracted(&dir).unwrap(), Device::Cpu, Kind::Float).unwrap();
    let (embed, head) = found.embed_and_head();
    assert!(embed.equal(&head));
}

#[test]
fn other_checkpoints_are_refused_by_name() {
    let config = hybrid();
    let model = drafter(&config);
    let refused = |config: &Value, edit: Edit, words: &[&str]| {
        let (_root, dir) = target(config, &model, edit);
        let problem = extracted(&dir).unwrap_err();
        assert!(words.iter().all(|word| problem.contains(word)), "{words:?} not in: {problem}");
    };
    refused(
        &config,
        &|tensors| tensors.retain(|(name, _)| name != "mtp.fc.weight"),
        &["mtp.fc.weight", "missing"],
    );
    let more = |tensors: &mut Vec<(String, Tensor)>| {
        tensors.push(("mtp.layers.1.input_layernorm.weight".into(), noise(5, &[32])));
    };
    refused(&config, &more, &["mtp.layers.1.input_layernorm.weight", "no such tensor"]);
    let narrow = |tensors: &mut Vec<(String, Tensor)>| {
        let (_, fc) = tensors.iter_mut().find(|(name, _)| name == "mtp.fc.weight").unwrap();
        *fc = fc.narrow(1, 0, 32).contiguous();
    };
    refused(&config, &narrow, &["mtp.fc.weight", "[32, 32]", "[32, 64]"]);
    for (key, value, word) in [
        ("mtp_num_hidden_layers", json!(2), "2 MTP layers"),
        ("mtp_use_dedicated_embeddings", json!(true), "own"),
    ] {
        let mut changed = config.clone();
        changed["text_config"][key] = value;
        refused(&changed, &|_| (), &[key, word]);
    }
    let mut dense = config["text_config"].clone();
    dense["model_type"] = "qwen3".into();
    dense["layer_types"] = Value::Null;
    refused(&dense, &|_| (), &["Qwen3 ", "no MTP layer"]);
}

/// The drafter's folder, written as training writes it.
fn stored_drafter(root: &Path, model: &Mtp) -> PathBuf {
    let dir = root.join("trained");
    fs::create_dir(&dir).unwrap();
    save(&dir.join("model.safetensors"), &model.checkpoint(), Kind::BFloat16).unwrap();
    fs::write(dir.join("config.json"), Value::Object(model.config().to_json()).to_string()).unwrap();
    dir
}

/// Published shards are named `model.safetensors-00001-of-00001.safetensors`. None of the target's old files stays beside the merged ones,
/// because vLLM would read it, too.
#[test]
fn a_merged_folder_holds_the_new_layer_only() {
    let config = hybrid();
    let model = drafter(&config);
    let (root, dir) = target(&config, &model, |tensors| {
        let (_, fc) = tensors.iter_mut().find(|(name, _)| name == "mtp.fc.weight").unwrap();
        *fc = fc.ones_like();
    });
    let shard = "model.safetensors-00001-of-00001.safetensors";
    fs::rename(dir.join("model.safetensors"), dir.join(shard)).unwrap();
    let names =
        Tensor::read_safetensors(dir.join(shard)).unwrap().into_iter().map(|(name, _)| (name, shard.into()));
    let map: serde_json::Map<String, Value> = names.collect();
    fs::write(dir.join("model.safetensors.index.json"), json!({"weight_map": map}).to_string()).unwrap();
    fs::write(dir.join("tokenizer.json"), "{}").unwrap();
    let source = open_checkpoint(&stored_drafter(root.path(), &model)).unwrap();
    let merged = root.path().join("merged");
    merge_mtp(&source, &Target::open(&dir, "target").unwrap()).unwrap().write(&merged, false).unwrap();
    let mut files: Vec<_> = fs::read_dir(&merged)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    assert_eq!(files, ["config.json", "model.safetensors", "tokenizer.json"]);
    let configs = [&dir, &merged].map(|dir| fs::read(dir.join("config.json")).unwrap());
    assert_eq!(configs[0], configs[1]);
    // A null is no number of layers.
    let mut null = config.clone();
    null["text_config"]["mtp_num_hidden_layers"] = Value::Null;
    fs::write(dir.join("config.json"), null.to_string()).unwrap();
    merge_mtp(&source, &Target::open(&dir, "target").unwrap()).unwrap().write(&merged, true).unwrap();
    let written: Value = serde_json::from_slice(&fs::read(merged.join("config.json")).unwrap()).unwrap();
    assert_eq!(written, config);
    let tensors = Tensor::read_safetensors(merged.join("model.safetensors")).unwrap();
    assert_eq!(tensors.len(), map.len());
    let (_, fc) = model.parameters().iter().find(|(name, _)| name == "fc.weight").unwrap();
    let (_, found) = tensors.iter().find(|(name, _)| name == "mtp.fc.weight").unwrap();
    assert!(found.equal(&fc.to_kind(Kind::BFloat16)));
}

/// Experts go back as the target stores those of its MTP layer, or else of its other layers: each alone, or all together.
#[test]
fn merged_experts_have_the_form_of_the_targets() {
    let config = mixture();
    let model = drafter(&config);
    let is_own = |(name, _): &(String, Tensor)| name.starts_with("mtp.");
    let without = |tensors: &mut Vec<(String, Tensor)>| tensors.retain(|tensor| !is_own(tensor));
    let with_layer = |tensors: &mut Vec<(String, Tensor)>| {
        tensors
            .push(("model.language_model.layers.3.mlp.experts.0.up_proj.weight".into(), noise(6, &[8, 32])));
    };
    let only_layer = |tensors: &mut Vec<(String, Tensor)>| {
        without(tensors);
        with_layer(tensors);
    };
    // Layers of the target in the other form than its MTP layer.
    let with_stack = |tensors: &mut Vec<(String, Tensor)>| {
        tensors.push(("model.language_model.layers.3.mlp.experts.down_proj".into(), noise(7, &[2, 32, 8])));
    };
    let forms: [(Edit, Edit); 4] =
        [(&with_stack, &with_stack), (&stack, &stack), (&without, &stack), (&only_layer, &with_layer)];
    for (before, after) in forms {
        let ((root, dir), (_again, expected)) =
            (target(&config, &model, before), target(&config, &model, after));
        let source = open_checkpoint(&stored_drafter(root.path(), &model)).unwrap();
        let merged = root.path().join("merged");
        merge_mtp(&source, &Target::open(&dir, "target").unwrap()).unwrap().write(&merged, false).unwrap();
        let [found, expected] = [&merged, &expected].map(|dir| {
            let mut tensors = Tensor::read_safetensors(dir.join("model.safetensors")).unwrap();
            tensors.sort_by(|a, b| a.0.cmp(&b.0));
            tensors
        });
        let names = |of: &[(String, Tensor)]| of.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&found), names(&expected));
        assert!(found.iter().zip(&expected).all(|((_, found), (_, expected))| found.equal(expected)));
    }
    // A dense layer is none of this target.
    let (root, dir) = target(&config, &model, |_| ());
    let source = open_checkpoint(&stored_drafter(root.path(), &drafter(&hybrid()))).unwrap();
    let told = merge_mtp(&source, &Target::open(&dir, "target").unwrap()).err().unwrap().to_string();
    assert!(told.contains("layers of Qwen3.5 is") && told.contains("Qwen3_5MoeMTPModel"), "{told}");
    // Nor is one whose rows have fewer experts.
    let mut other = mixture();
    other["text_config"]["num_experts_per_tok"] = json!(1);
    let (root, dir) = target(&config, &model, |_| ());
    let source = open_checkpoint(&stored_drafter(root.path(), &drafter(&other))).unwrap();
    let told = merge_mtp(&source, &Target::open(&dir, "target").unwrap()).err().unwrap().to_string();
    assert!(told.contains("experts 1 of 4 of width 8") && told.contains("2 of 4 of width 8"), "{told}");
}

#[test]
fn experts_that_do_not_fit_are_refused_by_name() {
    let config = mixture();
    let model = drafter(&config);
    let refused = |edit: Edit, words: &[&str]| {
        let (_root, dir) = target(&config, &model, edit);
        let problem = extracted(&dir).unwrap_err();
        assert!(words.iter().all(|word| problem.contains(word)), "{words:?} not in: {problem}");
    };
    let fewer = |tensors: &mut Vec<(String, Tensor)>| {
        stack(tensors);
        let (_, all) = tensors.iter_mut().find(|(name, _)| name.ends_with(STACKED[1])).unwrap();
        *all = all.narrow(0, 0, EXPERTS - 1).contiguous();
    };
    refused(&fewer, &["experts.down_proj", "[3, 32, 8]", "[4, 32, 8]"]);
    let both = |tensors: &mut Vec<(String, Tensor)>| {
        let each: Vec<(String, Tensor)> =
            tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect();
        stack(tensors);
        tensors.extend(each.into_iter().filter(|(name, _)| name.contains(".experts.0.up_proj")));
    };
    refused(&both, &["mtp.layers.0.mlp.experts.down_proj", "no such tensor"]);
    let missing = "mtp.layers.0.mlp.experts.3.up_proj.weight";
    refused(&|tensors| tensors.retain(|(name, _)| name != missing), &[missing, "missing"]);
}

#[test]
fn targets_that_engines_would_misread_are_not_merged_into() {
    let config = hybrid();
    let model = drafter(&config);
    let (root, dir) = target(&config, &model, |_| ());
    let source = open_checkpoint(&stored_drafter(root.path(), &model)).unwrap();
    let refused = |change: &dyn Fn(&mut Value), word: &str| {
        let mut changed = config.clone();
        change(&mut changed);
        fs::write(dir.join("config.json"), changed.to_string()).unwrap();
        let target = Target::open(&dir, "target").unwrap();
        let problem = merge_mtp(&source, &target).err().unwrap().to_string();
        assert!(problem.contains(word), "{problem}");
    };
    refused(&|config| config["text_config"]["mtp_num_hidden_layers"] = json!(0), "mtp_num_hidden_layers");
    let fp8 = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
    refused(&|config| config["quantization_config"] = fp8.clone(), "quantised");
}

/// A drafter for a quantised target is not quantised itself.
#[test]
fn a_drafter_does_not_inherit_the_targets_quantisation() {
    let mut config = hybrid();
    config["text_config"]["quantization_config"] =
        json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
    let json = drafter(&config).config().to_json();
    assert!(json.contains_key("hidden_size") && !json.contains_key("quantization_config"));
}
