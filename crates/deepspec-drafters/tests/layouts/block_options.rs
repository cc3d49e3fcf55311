//! The keys by which tools mark causal blocks and attention sinks.

use deepspec_checkpoint::{
    ADD_SWA_ATTENTION_SINK_BIAS, ATTENTION_SINK_BIAS, CAUSAL_KEYS, CheckpointFormat, Engine, Target,
    convert_for_engine, engine_compatibility,
};
use deepspec_drafters::{DrafterOptions, load_drafter, open_checkpoint};
use safetensors::Dtype;
use serde_json::{Value, json};
use tch::{Device, Kind};

use crate::common::{Folder, bytes, edited, fixture, golden, target, write};
use crate::convert::{converted, refusal};

/// The config of `folder`, in the layout of z-lab, as it is written for the engine. None if the engine reads the folder as it is.
fn written_for(engine: Engine, folder: &Folder, target: &Folder) -> Option<Value> {
    let source = open_checkpoint(folder.path()).unwrap();
    let target = Target::open(target.path(), "owner/target").unwrap();
    let out = Folder::new();
    let written = convert_for_engine(&source, engine, &target)
        .and_then(|plan| plan.write(&out.path().join("out"), false));
    let found = engine_compatibility(&source).into_iter().find(|found| found.engine == engine.to_string());
    let found = found.unwrap();
    assert_eq!(found.loads, written.is_err(), "{}", found.note);
    match written {
        Ok(()) => {
            let remedy = format!("only; convert to {}", engine.export_name());
            assert!(found.note.ends_with(&remedy), "{}", found.note);
            Some(out.within("out").config())
        }
        Err(error) => {
            assert_eq!(found.tried.is_some(), engine == Engine::Vllm);
            assert!(error.to_string().contains("it loads the checkpoint as it is"), "{error}");
            None
        }
    }
}

#[test]
fn causal_blocks_are_read_in_every_spelling_and_written_for_engines() {
    let target = target(&golden("dspark_vanilla"));
    let with = |folder: &Folder, key: &str, causal: bool, inner: bool| {
        edited(folder, |config| {
            let place = if inner { &mut config["dflash_config"] } else { config };
            place[key] = json!(causal);
        })
    };
    for (key, inner) in CAUSAL_KEYS.into_iter().flat_map(|key| [(key, false), (key, true)]) {
        let zlab = with(&fixture::zlab(), key, true, inner);
        // Engines know one or two of the spellings, and would read the others as whole blocks.
        let knows_outer = key == "is_causal" && !inner;
        for (engine, knows) in
            [(Engine::Sglang, knows_outer), (Engine::Vllm, knows_outer || key == "causal" && inner)]
        {
            let written = written_for(engine, &zlab, &target);
            assert_eq!(written.is_none(), knows, "{engine}, {key}");
            if let Some(config) = written {
                assert!(config["is_causal"] == true && config["layer_types"].is_array(), "{config}");
            }
        }
        let reference = converted(&zlab, CheckpointFormat::Reference, Some(&target));
        assert_eq!(reference.config()["is_causal"], true, "{key}");
        let back = converted(&reference, CheckpointFormat::Zlab, Some(&target)).config();
        assert_eq!([&back["is_causal"], &back["dflash_config"]["causal_head"]], [true, true]);
        assert!(
            refusal(&zlab, CheckpointFormat::Speculators, Some(&target)).contains("no key for causal blocks")
        );
        let contradiction = open_checkpoint(with(&zlab, key, false, !inner).path()).map(|_| ());
        let told = contradiction.unwrap_err().to_string();
        assert!(told.contains(key) && told.contains(" is "), "{told}");
    }
    // Layers of Llama have no types unless the config says them.
    let untyped = with(
        &edited(&fixture::zlab(), |config| drop(config.as_object_mut().unwrap().remove("layer_types"))),
        "is_causal",
        true,
        false,
    );
    assert!(written_for(Engine::Sglang, &untyped, &target).unwrap()["layer_types"].is_array());
    for to in [CheckpointFormat::Specforge, CheckpointFormat::Modelopt] {
        let causal = with(&golden("dspark_vanilla"), "is_causal", true, false);
        for (folder, expected) in [(causal, true), (golden("dspark_vanilla"), false)] {
            let config = converted(&folder, to, Some(&target)).config();
            assert_eq!(config["is_causal"] == json!(true), expected, "{to}");
            assert_eq!(config["dflash_config"]["causal"] == json!(true), expected, "{to}");
        }
    }
    // Also z-lab's DFlash 2 does not lose the mark.
    let zlab = converted(
        &golden("dflash2"),
        CheckpointFormat::Zlab,
        Some(&crate::common::target(&golden("dflash2"))),
    );
    for inner in [false, true] {
        let zlab = with(&zlab, "is_causal", true, inner);
        let told = open_checkpoint(zlab.path()).map(|_| ()).unwrap_err().to_string();
        assert!(told.contains("is_causal") && told.contains("not supported"), "{told}");
    }
    // speculators has no key for causal blocks, so a file that has one is not converted.
    let foreign = converted(&golden("dspark_vanilla"), CheckpointFormat::Speculators, Some(&target));
    let nested = edited(&foreign, |config| config["transformer_layer_config"]["is_causal"] = json!(true));
    for foreign in [nested, with(&foreign, "is_causal", true, false)] {
        assert!(refusal(&foreign, CheckpointFormat::Reference, Some(&target)).contains("is_causal"));
    }
}

/// The drafter with a sink of 0 for each query head, which its config does not say.
fn with_sinks(from: &Folder) -> Folder {
    let (folder, mut tensors) = (edited(from, |_| {}), bytes(from));
    let heads = from.config()["num_attention_heads"].as_u64().unwrap() as usize;
    for layer in 0..from.config()["num_hidden_layers"].as_u64().unwrap() {
        let name = format!("layers.{layer}.self_attn.{ATTENTION_SINK_BIAS}");
        tensors.insert(name, (Dtype::F32, vec![heads], vec![0; 4 * heads]));
    }
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

#[test]
fn attention_sinks_are_read_in_both_spellings_and_written_for_engines() {
    let target = target(&golden("dspark_vanilla"));
    let zlab = with_sinks(&fixture::zlab());
    for (key, inner) in [ATTENTION_SINK_BIAS, ADD_SWA_ATTENTION_SINK_BIAS]
        .into_iter()
        .flat_map(|key| [(key, false), (key, true)])
    {
        let zlab = edited(&zlab, |config| {
            let place = if inner { &mut config["dflash_config"] } else { config };
            place[key] = json!(true);
        });
        let knows_inner = key == ATTENTION_SINK_BIAS && inner;
        let knows_outer = key == ADD_SWA_ATTENTION_SINK_BIAS && !inner;
        for (engine, knows) in [(Engine::Sglang, knows_inner), (Engine::Vllm, knows_inner || knows_outer)] {
            let written = written_for(engine, &zlab, &target);
            assert_eq!(written.is_none(), knows, "{engine}, {key}");
            if let Some(config) = written {
                assert_eq!(config["dflash_config"][ATTENTION_SINK_BIAS], true);
            }
        }
        let reference = converted(&zlab, CheckpointFormat::Reference, Some(&target));
        for key in [ATTENTION_SINK_BIAS, ADD_SWA_ATTENTION_SINK_BIAS] {
            assert_eq!(reference.config()[key], true, "{key}");
        }
        let options = DrafterOptions { device: Device::Cpu, kind: Kind::Float, slots: 1, target: None };
        assert!(load_drafter(reference.path(), &options).is_ok());
        let back = converted(&reference, CheckpointFormat::Zlab, Some(&target));
        assert_eq!(back.config()["dflash_config"][ATTENTION_SINK_BIAS], true);
        assert_eq!(bytes(&back), bytes(&zlab));
        let told = refusal(&zlab, CheckpointFormat::Speculators, Some(&target));
        assert!(told.contains("speculators has no attention sinks"), "{told}");
    }
    // vLLM reads the outer key only without the inner one.
    let both = edited(&zlab, |config| {
        config["dflash_config"][ATTENTION_SINK_BIAS] = json!(true);
        config[ADD_SWA_ATTENTION_SINK_BIAS] = json!(false);
    });
    let opened = open_checkpoint(both.path()).unwrap();
    opened.check().unwrap();
    assert!(written_for(Engine::Sglang, &both, &target).is_none());
    let arguments = Engine::Sglang.serve_arguments(opened.drafter(), "DIR");
    assert!(arguments.ends_with("DIR --speculative-draft-attention-backend triton"), "{arguments}");
    // Tensors without the key, and the key without tensors.
    let keyed = edited(&fixture::zlab(), |config| config["dflash_config"][ATTENTION_SINK_BIAS] = json!(true));
    for folder in [zlab, keyed] {
        let told = open_checkpoint(folder.path()).and_then(|opened| opened.check()).unwrap_err().to_string();
        assert!(told.contains("layers.0.self_attn.attention_sink_bias"), "{told}");
    }
}
