//! Faults that engines would misread, each made in an otherwise correct folder.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{Folder, edited, golden};
use deepspec_checkpoint::{CheckpointFormat, Engine, Target, convert, engine_compatibility, risks};
use deepspec_drafters::open_checkpoint;
use serde_json::json;

fn asset(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets").join(name)
}

fn dspark() -> Folder {
    let (folder, from) = (Folder::new(), asset("tiny-dspark"));
    for file in ["config.json", "model.safetensors"] {
        fs::copy(from.join(file), folder.path().join(file)).unwrap();
    }
    folder
}

/// The findings about a folder, with their subjects.
fn told(folder: &Path, server: Engine) -> Vec<(&'static str, String)> {
    let (checkpoint, target) =
        (open_checkpoint(folder).unwrap(), Target::open(&asset("tiny-target"), "owner/target").unwrap());
    let found = risks(&checkpoint, server, &target);
    found.into_iter().map(|risk| (risk.subject, format!("{} -> {}", risk.problem, risk.remedy))).collect()
}

fn about(folder: &Path, server: Engine) -> Vec<&'static str> {
    told(folder, server).into_iter().map(|(about, _)| about).collect()
}

fn says(folder: &Path, server: Engine, about: &str, words: &str) {
    let told = told(folder, server);
    let found = told.iter().any(|(of, text)| *of == about && text.contains(words));
    assert!(found, "{about}: {words:?} not in {told:?}");
}

#[test]
fn a_sound_drafter_has_to_be_served_by_the_right_flags() {
    let folder = dspark();
    assert_eq!(about(folder.path(), Engine::Vllm), ["slots", "layer ids", "drafted tokens"]);
    assert_eq!(about(folder.path(), Engine::Sglang), ["slots", "layer ids"]);
    says(folder.path(), Engine::Vllm, "layer ids", "layers 0, 2, 4 give");
    says(folder.path(), Engine::Vllm, "slots", "\"method\": \"dspark\"");
    says(folder.path(), Engine::Vllm, "drafted tokens", "\"num_speculative_tokens\": 7");
    says(folder.path(), Engine::Sglang, "slots", "--speculative-algorithm DSPARK");
    says(folder.path(), Engine::LlamaCpp, "slots", "--spec-type draft-dspark");
    says(folder.path(), Engine::LlamaCpp, "drafted tokens", "--spec-draft-n-max 7");
    says(folder.path(), Engine::LlamaCpp, "layout", "convert --to gguf");
    let filled = crate::common::fixture::zlab();
    says(filled.path(), Engine::Vllm, "slots", "\"method\": \"dflash\"");
    says(filled.path(), Engine::Sglang, "slots", "--speculative-algorithm DFLASH");
}

#[test]
fn what_no_other_layout_says_was_not_tried_and_is_examined_all_the_same() {
    let vllm = |folder: &Folder| {
        let checkpoint = open_checkpoint(folder.path()).unwrap();
        engine_compatibility(&checkpoint)
            .into_iter()
            .find(|compatibility| compatibility.engine == "vLLM")
            .unwrap()
    };
    let zlab = crate::common::fixture::zlab();
    assert!(vllm(&zlab).loads && vllm(&zlab).tried.is_some());
    // Windows: by its source code vLLM loads the folder, but this was never tried.
    let layers = zlab.config()["num_hidden_layers"].as_u64().unwrap() as usize;
    let windowed = edited(&zlab, |config| {
        config["layer_types"] = json!(vec!["sliding_attention"; layers]);
        config["sliding_window"] = json!(64);
        config["use_sliding_window"] = json!(true);
    });
    assert!(vllm(&windowed).loads && vllm(&windowed).tried.is_none());
    says(windowed.path(), Engine::Vllm, "drafter", "not tried");
    says(windowed.path(), Engine::Vllm, "slots", "\"method\": \"dflash\"");
    assert_eq!(about(windowed.path(), Engine::LlamaCpp), ["drafter"]);
    // All slots draft, by a key that vLLM does not read.
    let flagged = edited(&zlab, |config| config["dflash_config"]["sample_from_anchor"] = json!(true));
    assert!(!vllm(&flagged).loads);
    says(flagged.path(), Engine::Vllm, "layout", "where vLLM refuses it");
    says(flagged.path(), Engine::Sglang, "layout", "convert --to sglang");
}

#[test]
fn what_stands_beside_the_weights_is_named() {
    let folder = dspark();
    fs::write(folder.path().join("train_state.safetensors"), "").unwrap();
    says(folder.path(), Engine::Vllm, "files", "train_state.safetensors");
    assert_eq!(about(folder.path(), Engine::Sglang), ["slots", "layer ids"]);

    let (source, target) = (dspark(), Target::open(&asset("tiny-target"), "owner/target").unwrap());
    let checkpoint = open_checkpoint(source.path()).unwrap();
    let out = Folder::new().within("out");
    convert(&checkpoint, CheckpointFormat::Speculators, Some(&target))
        .unwrap()
        .write(out.path(), true)
        .unwrap();
    assert!(!about(out.path(), Engine::Vllm).contains(&"tensors"));
    let mut tensors = crate::common::bytes(&out);
    let norm = tensors["norm.weight"].clone();
    tensors.insert("verifier_norm.weight".into(), norm);
    crate::common::write(&out.path().join("model.safetensors"), &tensors);
    says(out.path(), Engine::Vllm, "tensors", "verifier_norm.weight");
}

#[test]
fn keys_that_are_read_otherwise_are_named() {
    let change = |edit: &dyn Fn(&mut serde_json::Value)| {
        let folder = dspark();
        let mut config = folder.config();
        edit(&mut config);
        folder.put(&config);
        folder
    };
    let scaled = change(&|config| config["rope_scaling"] = json!({"rope_type": "yarn", "factor": 2.0}));
    says(scaled.path(), Engine::Sglang, "RoPE", "yarn");
    let scaled = change(&|config| config["rope_scaling"] = json!({"rope_type": "linear", "factor": 2.0}));
    says(scaled.path(), Engine::Vllm, "RoPE", "linear");
    let worded = change(&|config| config["mask_token_id"] = json!(300));
    says(worded.path(), Engine::Sglang, "mask token", "mask_token_id is 300");
    let twice = change(&|config| {
        config["rope_theta"] = json!(1e4);
        config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 5e5});
    });
    says(twice.path(), Engine::Sglang, "RoPE", "500000");
    let other = change(&|config| config["num_target_layers"] = json!(9));
    says(other.path(), Engine::LlamaCpp, "vocabulary and sizes", "num_hidden_layers");
    let edge = change(&|config| config["target_layer_ids"] = json!([-1, 2, 4]));
    says(edge.path(), Engine::Vllm, "drafter", "layer id -1");
    let headless = change(&|config| {
        (config["markov_rank"], config["enable_confidence_head"]) = (json!(0), json!(false));
        config["confidence_head_with_markov"] = json!(false);
    });
    says(headless.path(), Engine::Vllm, "layout", "without a Markov head");
    says(golden("dspark_gated").path(), Engine::LlamaCpp, "layout", "gated");

    // A target with an untied head, and a drafter with copies of embedding and head.
    let drafter = golden("dspark_vanilla");
    let target = crate::common::target(&drafter);
    let (checkpoint, target) =
        (open_checkpoint(drafter.path()).unwrap(), Target::open(target.path(), "owner/target").unwrap());
    let found = risks(&checkpoint, Engine::LlamaCpp, &target);
    assert!(found.iter().any(|risk| risk.subject == "head"), "{found:?}");
}
