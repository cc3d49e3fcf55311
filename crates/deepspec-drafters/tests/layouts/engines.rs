//! The layouts that inference engines load.

use std::fs;
use std::path::Path;

use deepspec_checkpoint::{
    CheckpointError, CheckpointFormat, Engine, Target, convert_for_engine, engine_compatibility,
};
use deepspec_drafters::{engine_rules, open_checkpoint};
use deepspec_engine::{DraftSampling, VerifyRule};
use deepspec_testkit::tiny;
use serde_json::{Value, json};

use crate::common::{Folder, bytes, edited, fixture, golden, target};
use crate::convert::converted;
use crate::gguf::asset;

#[test]
fn each_engine_gets_the_layout_that_it_loads() {
    let written = |case: &str, engine: Engine| {
        let reference = golden(case);
        let target = target(&reference);
        let (source, target) = (
            open_checkpoint(reference.path()).unwrap(),
            Target::open(target.path(), "owner/target").unwrap(),
        );
        let folder = Folder::new();
        convert_for_engine(&source, engine, &target)?.write(&folder.path().join("out"), false)?;
        Ok::<_, CheckpointError>((reference, folder.within("out")))
    };
    for engine in [Engine::Vllm, Engine::Sglang] {
        for (case, rank) in [("dspark_vanilla", None), ("dflash", Some(16))] {
            let (reference, folder) = written(case, engine).unwrap();
            let (config, mut tensors, original) = (folder.config(), bytes(&folder), bytes(&reference));
            assert_eq!(config["architectures"], json!(["Qwen3DSparkModel"]));
            for key in ["block_size", "mask_token_id", "target_layer_ids"] {
                assert_eq!(
                    (&config[key], &config["dflash_config"][key]),
                    (&reference.config()[key], &reference.config()[key])
                );
            }
            assert_eq!(
                (&config["sample_from_anchor"], &config["has_embed_tokens"]),
                (&true.into(), &false.into())
            );
            assert_eq!(config["rope_theta"], config["rope_parameters"]["rope_theta"]);
            if let Some(rank) = rank {
                assert_eq!(
                    (&config["markov_rank"], &config["markov_head_type"]),
                    (&json!(rank), &json!("vanilla"))
                );
                for name in ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"] {
                    let (_, shape, data) = tensors.remove(name).unwrap();
                    assert_eq!(shape, [config["vocab_size"].as_u64().unwrap() as usize, rank]);
                    assert!(data.iter().all(|&byte| byte == 0));
                }
            }
            let is_own = |name: &str| !name.starts_with("embed_tokens") && !name.starts_with("lm_head");
            let own = original.into_iter().filter(|(name, _)| is_own(name)).collect();
            assert_eq!(tensors, own, "{case}");
        }
        let (_, zlab) = written("dflash2", engine).unwrap();
        assert_eq!(open_checkpoint(zlab.path()).unwrap().format(), CheckpointFormat::Zlab);
        let told = written("dspark_gated", engine).err().unwrap().to_string();
        assert!(told.contains("not for one that is gated"), "{told}");
    }
    let (_, eagle3) = written("eagle3_qwen3", Engine::Vllm).unwrap();
    assert_eq!(open_checkpoint(eagle3.path()).unwrap().format(), CheckpointFormat::Speculators);
    let told = written("eagle3_qwen3", Engine::Sglang).err().unwrap().to_string();
    assert!(told.contains("has no norms on queries and keys"), "{told}");
}

/// Scaled rotary embeddings are written under both keys; a type that no engine here reads is
/// refused.
#[test]
fn scaled_rotary_embeddings_are_written_for_engines() {
    let llama3 = json!({
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    });
    let yarn = json!({"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 512});
    for (engine, stretched) in
        [Engine::Vllm, Engine::Sglang].into_iter().flat_map(|engine| [(engine, &llama3), (engine, &yarn)])
    {
        let reference = golden("dspark_vanilla");
        let mut config = reference.config();
        config.as_object_mut().unwrap().remove("rope_scaling");
        config["rope_parameters"] = stretched.clone();
        reference.put(&config);
        let (source, target) = (open_checkpoint(reference.path()).unwrap(), target(&reference));
        let target = Target::open(target.path(), "owner/target").unwrap();
        let folder = Folder::new();
        convert_for_engine(&source, engine, &target)
            .unwrap()
            .write(&folder.path().join("out"), false)
            .unwrap();
        let config = folder.within("out").config();
        assert_eq!((&config["rope_parameters"], &config["rope_scaling"]), (stretched, stretched));
        assert_eq!(config["rope_theta"], 5e5);
    }
    // YaRN without an original length gets the trained length written out, which is what
    // transformers assumes.
    let scaled = |scaling: serde_json::Value| {
        let reference = golden("dspark_vanilla");
        let mut config = reference.config();
        config["rope_scaling"] = scaling;
        reference.put(&config);
        let (source, target) = (open_checkpoint(reference.path()).unwrap(), target(&reference));
        let target = Target::open(target.path(), "owner/target").unwrap();
        let folder = Folder::new();
        let written = convert_for_engine(&source, Engine::Vllm, &target)
            .and_then(|plan| plan.write(&folder.path().join("out"), false))
            .map_err(|error| error.to_string());
        written.map(|_| (folder.within("out").config(), config["max_position_embeddings"].clone()))
    };
    let (written, trained) = scaled(json!({"rope_type": "yarn", "factor": 2.0})).unwrap();
    assert_eq!(written["rope_parameters"]["original_max_position_embeddings"], trained);
    // A null in place of the factor stands for the ratio of the lengths.
    let derived = json!({"rope_type": "yarn", "factor": null, "original_max_position_embeddings": 16});
    let (written, trained) = scaled(derived).unwrap();
    assert_eq!(written["rope_parameters"]["factor"], trained.as_f64().unwrap() / 16.0);
    assert_eq!(written["rope_scaling"], written["rope_parameters"]);
    // A null or 0 stands for the default, with which vLLM would compute.
    let unset =
        json!({"rope_type": "yarn", "factor": 2.0, "beta_fast": 0, "beta_slow": null, "truncate": null});
    let (written, _) = scaled(unset).unwrap();
    let settings = written["rope_parameters"].as_object().unwrap();
    assert!(
        ["beta_fast", "beta_slow", "truncate"].iter().all(|key| !settings.contains_key(*key)),
        "{written}"
    );
    for (scaling, words) in [
        (json!({"rope_type": "dynamic", "factor": 2.0}), "\"dynamic\" is not supported"),
        (
            json!({"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}),
            "`attention_factor`, which engines read otherwise",
        ),
        (
            json!({"rope_type": "yarn", "factor": 2.0, "mscale": 0.7, "mscale_all_dim": 0.7}),
            "`mscale`, which engines read",
        ),
        (json!({"rope_type": "yarn"}), "`rope_scaling.factor`: it is not run here: missing"),
    ] {
        let told = scaled(scaling).unwrap_err();
        assert!(told.contains(words), "{told}");
    }
}

/// Engines by rule, probabilistic and greedy token by token, then both as a block. `set` is behind an engine that needs settings for it.
fn engines_by_rule(dir: &Path) -> [String; 4] {
    use DraftSampling::{Greedy, Probabilistic};
    let rules = engine_rules(dir).unwrap();
    [VerifyRule::Token, VerifyRule::Block]
        .map(|verify| [(Probabilistic, verify), (Greedy, verify)])
        .as_flattened()
        .iter()
        .map(|&wanted| {
            let fitting = rules.iter().filter(|rule| (rule.draft_sampling, rule.verify) == wanted);
            let named = fitting.map(|rule| match rule.settings.is_empty() {
                true => rule.engine.clone(),
                false => format!("{} set", rule.engine),
            });
            named.collect::<Vec<_>>().join(", ")
        })
        .collect::<Vec<_>>()
        .try_into()
        .unwrap()
}

#[test]
fn each_kind_has_the_rules_of_the_engines_that_load_it() {
    let fills_in = edited(&golden("dflash"), |config| config["sample_from_anchor"] = json!(false));
    let three_taps = |config: &mut Value| config["target_layer_ids"] = json!([0, 2, 4]);
    let llama = edited(&fixture::llama_eagle3(), three_taps);
    let eagle3_target = target(&golden("eagle3_qwen3"));
    let reduced = converted(&fixture::specforge_eagle3(), CheckpointFormat::Reference, Some(&eagle3_target));
    let with_fc_norm = edited(&golden("peagle"), |config| config["fc_norm"] = json!(true));
    let every =
        ["vLLM set, SGLang", "vLLM, SGLang set, llama.cpp", "vLLM set, SGLang set", "vLLM set, SGLang set"];
    let vllm_only = ["vLLM set", "vLLM", "vLLM set", "vLLM set"];
    let eagle = ["vLLM set, SGLang set", "vLLM, SGLang set, llama.cpp", "vLLM set, SGLang set", "vLLM set"];
    let greedy_beside_vllm = ["vLLM set", "vLLM, SGLang, llama.cpp", "vLLM set", "vLLM set"];
    for (kind, folder, expected) in [
        ("DSpark", golden("dspark_vanilla"), every),
        ("DSpark, gated", golden("dspark_gated"), ["SGLang", "SGLang set", "SGLang set", "SGLang set"]),
        ("DFlash", golden("dflash"), every),
        ("DFlash, fill-in", fills_in, greedy_beside_vllm),
        (
            "DFlash 2",
            golden("dflash2"),
            ["vLLM set, SGLang", "vLLM, llama.cpp", "vLLM set, SGLang set", "vLLM set"],
        ),
        ("Domino", golden("domino"), ["", "SGLang", "", ""]),
        ("xPress", golden("xpress"), [""; 4]),
        ("xPress on DFlash 2", golden("xpress_dflash2"), [""; 4]),
        ("DSpark of DeepSeek-V4", crate::dspark_v4::drafter(), ["", "llama.cpp", "", ""]),
        ("Eagle3, Qwen3", golden("eagle3_qwen3"), vllm_only),
        ("Eagle3, Llama", llama, eagle),
        ("Eagle3, reduced vocabulary", reduced, ["vLLM set", eagle[1], "vLLM set", "vLLM set"]),
        ("P-EAGLE", golden("peagle"), ["vLLM set", "vLLM", "", ""]),
        ("P-EAGLE with fc_norm", with_fc_norm, [""; 4]),
        ("MTP-1, Qwen3", golden("mtp"), [""; 4]),
        ("MTP-1, Qwen3.5-MoE", golden("mtp_moe"), eagle),
    ] {
        assert_eq!(engines_by_rule(folder.path()), expected, "{kind}");
    }
    let assistant = Folder::new().within("assistant");
    fs::create_dir(assistant.path()).unwrap();
    tiny::gemma4_assistant(assistant.path(), 64);
    assert_eq!(engines_by_rule(assistant.path()), greedy_beside_vllm, "an assistant of Gemma 4");
    assert_eq!(engines_by_rule(&asset("tiny-target")), greedy_beside_vllm, "a language model");
    assert_eq!(engine_rules(fixture::zlab().path()), None, "a layout that is not run");
}

#[test]
fn a_conversion_is_offered_where_there_is_one() {
    let told = |engine: Engine, folder: &Folder| {
        let engines = engine_compatibility(&open_checkpoint(folder.path()).unwrap());
        engines.into_iter().find(|found| found.engine == engine.to_string()).unwrap().note
    };
    let eagle3 = edited(&fixture::llama_eagle3(), |config| config["target_layer_ids"] = json!([0, 2, 4]));
    let scaled =
        |scaling: Value| edited(&golden("dflash2"), |config| config["rope_scaling"] = scaling.clone());
    let read_otherwise =
        scaled(json!({"rope_type": "yarn", "factor": 2.0, "mscale": 0.7, "mscale_all_dim": 0.7}));
    for engine in [Engine::Vllm, Engine::Sglang] {
        let remedy = format!("; convert to {}", engine.export_name());
        assert!(told(engine, &eagle3).ends_with(&remedy), "{}", told(engine, &eagle3));
        assert!(told(engine, &scaled(json!({"rope_type": "yarn", "factor": 2.0}))).ends_with(&remedy));
        assert_eq!(told(engine, &read_otherwise), "the class is not registered");
    }
}
