//! P-EAGLE in speculators' layout, which vLLM loads, and refusals of other layouts and engines.

use deepspec_checkpoint::{
    Checkpoint, CheckpointError, CheckpointFormat, Engine, GgufExport, Target, convert, convert_for_engine,
    engine_compatibility, risks,
};
use deepspec_drafters::{check_layout, open_checkpoint};
use serde_json::json;

use crate::common::{Bytes, Folder, bytes, changed, edited, golden, target, write};

fn converted(from: &Folder, to: CheckpointFormat) -> Result<Folder, CheckpointError> {
    let (source, target) = (open_checkpoint(from.path())?, target(&golden("peagle")));
    let (target, folder) = (Target::open(target.path(), "owner/target")?, Folder::new());
    convert(&source, to, Some(&target))?.write(&folder.path().join("out"), false)?;
    Ok(folder.within("out"))
}

#[test]
fn speculators_names_and_config_are_its_own() {
    let there = converted(&golden("peagle"), CheckpointFormat::Speculators).unwrap();
    let config = there.config();
    assert_eq!(
        (&config["speculators_model_type"], &config["architectures"], &config["mask_token_id"]),
        (&json!("peagle"), &json!(["PEagleSpeculator"]), &json!(7))
    );
    assert_eq!(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"], 5);
    assert_eq!(config["transformer_layer_config"]["num_hidden_layers"], 2);
    // Their ids count the embedding.
    let ids = golden("peagle").config()["target_layer_ids"].clone();
    let counted: Vec<i64> = ids.as_array().unwrap().iter().map(|id| id.as_i64().unwrap() + 1).collect();
    assert_eq!(config["eagle_aux_hidden_state_layer_ids"], json!(counted));
    assert_eq!(config["draft_vocab_size"], golden("peagle").config()["vocab_size"]);
    for flag in ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"] {
        assert_eq!(config[flag], false, "{flag}");
    }
    // Names are the same in both layouts.
    let names = |folder: &Folder| bytes(folder).into_keys().collect::<Vec<_>>();
    assert_eq!(names(&there), names(&golden("peagle")));
    let layers = names(&there).iter().filter(|name| name.contains("hidden_norm")).count();
    assert_eq!((layers, names(&there).contains(&"mask_hidden".to_string())), (1, true));
}

/// speculators writes no key of ours, and a flag that changes nothing in a single pass.
#[test]
fn a_checkpoint_that_speculators_wrote_is_read() {
    let there = converted(&golden("peagle"), CheckpointFormat::Speculators).unwrap();
    let written = edited(&there, |config| {
        config.as_object_mut().unwrap().remove("num_target_layers");
        (config["norm_output"], config["embed_requires_grad"]) = (json!(true), json!(true));
    });
    let back = converted(&written, CheckpointFormat::Reference).unwrap();
    assert_eq!(bytes(&back), bytes(&golden("peagle")));
    let config = back.config();
    assert_eq!(config["architectures"], json!(["Qwen3PEagleModel"]));
    assert_eq!((&config["num_depths"], &config["mask_token_id"]), (&json!(5), &json!(7)));
    let without = edited(&written, |config| drop(config.as_object_mut().unwrap().remove("mask_token_id")));
    let told = open_checkpoint(without.path()).err().unwrap().to_string();
    assert!(told.contains("`mask_token_id`"), "{told}");
}

/// speculators trains the drafter's embedding, and loaders read it from the file.
#[test]
fn an_embedding_of_its_own_is_kept() {
    for name in ["embed_tokens.weight", "lm_head.weight"] {
        let own = changed(&golden("peagle"), name, 3);
        let there = converted(&own, CheckpointFormat::Speculators).unwrap();
        assert!(
            bytes(&there)[name] == bytes(&own)[name] && bytes(&own)[name] != bytes(&golden("peagle"))[name]
        );
        assert_eq!(bytes(&converted(&there, CheckpointFormat::Reference).unwrap()), bytes(&own));
    }
}

/// Shapes of the first layer, of the others and of the learnt state are checked.
#[test]
fn tensors_of_other_shapes_are_named() {
    let broken = |name: &str, edit: &dyn Fn(&mut Bytes)| {
        let folder = edited(&golden("peagle"), |_| ());
        let mut tensors = bytes(&folder);
        edit(&mut tensors);
        write(&folder.path().join("model.safetensors"), &tensors);
        let told = open_checkpoint(folder.path()).unwrap().check().err().unwrap().to_string();
        assert!(told.contains(name), "{name}: {told}");
    };
    broken("mask_hidden", &|tensors| drop(tensors.remove("mask_hidden")));
    for name in ["layers.0.self_attn.q_proj.weight", "layers.1.self_attn.q_proj.weight"] {
        broken(name, &|tensors| {
            let other = name.replace(['0', '1'], if name.contains('0') { "1" } else { "0" });
            let wrong = tensors[&other].clone();
            tensors.insert(name.into(), wrong);
        });
    }
}

/// How vLLM loads the drafter, and that it must be told to draft in one pass.
#[test]
fn vllm_is_told_to_draft_in_parallel() {
    let (peagle, target) = (golden("peagle"), target(&golden("peagle")));
    let target = Target::open(target.path(), "owner/target").unwrap();
    let folder = Folder::new();
    let source = open_checkpoint(peagle.path()).unwrap();
    convert_for_engine(&source, Engine::Vllm, &target)
        .unwrap()
        .write(&folder.path().join("out"), false)
        .unwrap();
    let checkpoint = open_checkpoint(folder.within("out").path()).unwrap();
    assert_eq!(checkpoint.format(), CheckpointFormat::Speculators);
    let vllm =
        |checkpoint: &Checkpoint| engine_compatibility(checkpoint).into_iter().find(|of| of.engine == "vLLM");
    let found = vllm(&checkpoint).unwrap();
    assert!(found.loads && found.note.contains("parallel_drafting"), "{found:?}");
    assert!(!vllm(&source).unwrap().loads);
    let line = Engine::Vllm.serve_command("owner/target", None, checkpoint.drafter(), "out");
    assert_eq!(
        line,
        "vllm serve owner/target --speculative-config '{\"method\": \"eagle3\", \"model\": \"out\", \
         \"num_speculative_tokens\": 5, \"parallel_drafting\": true}'"
    );
    let subjects: Vec<&str> =
        risks(&checkpoint, Engine::Vllm, &target).iter().map(|risk| risk.subject).collect();
    assert!(subjects.contains(&"parallel drafting") && !subjects.contains(&"slots"), "{subjects:?}");
    // The norms of single layers are lost there.
    let normed = edited(&peagle, |config| config["fc_norm"] = json!(true));
    let normed = open_checkpoint(normed.path()).unwrap();
    let told = convert_for_engine(&normed, Engine::Vllm, &target).err().unwrap().to_string();
    assert!(told.contains("vLLM does not load it: it drops fc_norm"), "{told}");
}

/// SpecForge keeps mask token and captured layers in its own settings.
#[test]
fn a_checkpoint_that_specforge_wrote_is_named() {
    let written = edited(&golden("peagle"), |config| {
        config["architectures"] = json!(["PEagleDraftModel"]);
        (config["model_type"], config["target_layer_ids"]) = (json!("llama"), json!(null));
    });
    let told = [
        open_checkpoint(written.path()).err().unwrap().to_string(),
        check_layout(written.path()).err().unwrap().to_string(),
    ];
    for told in told {
        assert!(
            told.contains("a P-EAGLE as SpecForge writes it") && told.contains("drafter: {peagle:"),
            "{told}"
        );
    }
}

#[test]
fn other_layouts_and_engines_are_refused() {
    let peagle = golden("peagle");
    for (to, words) in [
        (CheckpointFormat::Specforge, "need not say mask token and captured layers"),
        (CheckpointFormat::Zlab, "has no P-EAGLE"),
        (CheckpointFormat::Modelopt, "has no P-EAGLE"),
    ] {
        let told = converted(&peagle, to).err().unwrap().to_string();
        assert!(told.contains(words), "{told}");
    }
    let (source, target) = (open_checkpoint(peagle.path()).unwrap(), target(&peagle));
    let target = Target::open(target.path(), "owner/target").unwrap();
    let told = convert_for_engine(&source, Engine::Sglang, &target).err().unwrap().to_string();
    assert!(told.contains("SGLang does not load it: it has no P-EAGLE"), "{told}");
    let told = GgufExport::plan(&source, &target, None).err().unwrap().to_string();
    assert!(told.contains("llama.cpp has no P-EAGLE"), "{told}");
    // Llama's layers are written too.
    let llama = edited(&peagle, |config| {
        (config["architectures"], config["model_type"]) = (json!(["LlamaPEagleModel"]), json!("llama"));
    });
    let mut tensors = bytes(&llama);
    tensors.retain(|name, _| !name.contains("q_norm") && !name.contains("k_norm"));
    write(&llama.path().join("model.safetensors"), &tensors);
    let there = converted(&llama, CheckpointFormat::Speculators).unwrap();
    assert_eq!(there.config()["transformer_layer_config"]["model_type"], "llama");
}
