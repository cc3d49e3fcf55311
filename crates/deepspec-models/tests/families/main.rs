//! Configs in all their spellings, refused settings, and the target's settings that a drafter
//! keeps.

mod more;

use std::path::Path;

use deepspec_models::{ModelConfig, stop_ids};
use deepspec_testkit::golden;
use serde_json::{Map, Value, json};

fn parse(raw: &Value) -> Result<ModelConfig, String> {
    let raw = raw.as_object().cloned().unwrap();
    ModelConfig::parse(Path::new("model/config.json"), raw).map_err(|error| error.to_string())
}

fn golden_config(case: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden::dir(case).join("config.json")).unwrap()).unwrap()
}

/// The parsed architecture without the raw config, for comparisons.
fn architecture(raw: &Value) -> ModelConfig {
    ModelConfig { raw: Map::new(), ..parse(raw).unwrap() }
}

/// The sizes of google/gemma-4-12B-it.
fn gemma_12b() -> Value {
    json!({
        "model_type": "gemma4_unified_text",
        "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_global_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
        "attention_k_eq_v": true, "sliding_window": 1024, "final_logit_softcapping": 30.0, "vocab_size": 262144,
        "max_position_embeddings": 262144,
    })
}

#[test]
fn gemma4_in_all_its_spellings() {
    let flat = gemma_12b();
    let expected = architecture(&flat);
    assert_eq!(expected.family.decoder.name, "Gemma 4");
    assert_eq!(
        (expected.layers.len(), expected.logit_softcap, expected.tie_word_embeddings),
        (48, Some(30.0), true)
    );

    let mut text = flat.clone();
    text.as_object_mut().unwrap().remove("model_type");
    let nested =
        json!({"model_type": "gemma4_unified", "text_config": text, "vision_config": {"hidden_size": 7}});
    assert_eq!(architecture(&nested), expected);

    let mut spelled = flat.clone();
    spelled["layer_types"] =
        (1..=48).map(|layer| if layer % 6 == 0 { "full_attention" } else { "sliding_attention" }).collect();
    spelled["rope_parameters"] = json!({
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "rope_theta": null, "rope_type": "default",
    });
    assert_eq!(architecture(&spelled), expected);

    let mut older = flat.clone();
    (older["rope_theta"], older["rope_local_base_freq"]) = (json!(1e6), json!(1e4));
    assert_eq!(architecture(&older), expected);

    // As transformers 5.17 writes it.
    let mut per_layer = flat.clone();
    for key in ["global_head_dim", "num_global_key_value_heads"] {
        per_layer.as_object_mut().unwrap().remove(key);
    }
    let own = (5..48)
        .step_by(6)
        .map(|layer: usize| (layer.to_string(), json!({"head_dim": 512, "num_key_value_heads": 1})));
    per_layer["per_layer_config"] = Value::Object(own.collect());
    assert_eq!(architecture(&per_layer), expected);

    // The plain family has per-layer embeddings and a window of 512 by default.
    let mut plain = flat;
    plain["model_type"] = json!("gemma4_text");
    assert!(parse(&plain).unwrap_err().contains("hidden_size_per_layer_input"));
    plain["hidden_size_per_layer_input"] = json!(0);
    assert_eq!(architecture(&plain), expected);
}

#[test]
fn qwen3_in_both_spellings_with_scaling() {
    let qwen3 = golden_config("target_qwen3");
    let base = architecture(&qwen3);
    let scaling = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000});
    let mut older = qwen3.clone();
    older.as_object_mut().unwrap().remove("rope_parameters");
    (older["rope_theta"], older["rope_scaling"]) = (json!(5e5), scaling.clone());
    let mut newer = qwen3;
    newer.as_object_mut().unwrap().remove("rope_theta");
    newer["rope_parameters"] = scaling;
    newer["rope_parameters"]["rope_theta"] = json!(5e5);
    let scaled = architecture(&newer);
    assert_eq!(architecture(&older), scaled);
    assert_ne!(scaled.layers, base.layers);
    // Longer than the config's own limit.
    assert_eq!(scaled.max_position_embeddings, 4000);
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    let with = |base: &Value, key: &str, value: Value| {
        let mut config = base.clone();
        config[key] = value;
        config
    };
    let (gemma, qwen3) = (gemma_12b(), golden_config("target_qwen3"));
    let full =
        |settings: Value| json!({"full_attention": settings, "sliding_attention": {"rope_type": "default"}});
    let cases = [
        (with(&gemma, "hidden_size_per_layer_input", json!(256)), "per layer"),
        (with(&gemma, "enable_moe_block", json!(true)), "mixtures of experts"),
        (with(&gemma, "num_kv_shared_layers", json!(4)), "num_kv_shared_layers"),
        (with(&gemma, "use_bidirectional_attention", json!("all")), "\"all\" is not supported"),
        (with(&gemma, "hidden_activation", json!("silu")), "gelu_pytorch_tanh"),
        (with(&gemma, "attention_bias", json!(true)), "attention_bias"),
        (with(&gemma, "layer_types", json!(["full_attention"])), "1 types for 48 layers"),
        (with(&gemma, "layer_types", json!(vec!["chunked_attention"; 48])), "chunked_attention"),
        (with(&gemma, "num_global_key_value_heads", json!(3)), "num_global_key_value_heads"),
        (with(&gemma, "global_head_dim", json!(31)), "global_head_dim"),
        (with(&gemma, "sliding_window", json!(0)), "sliding_window"),
        (with(&gemma, "final_logit_softcapping", json!(-1)), "final_logit_softcapping"),
        (with(&gemma, "num_hidden_layers", json!(2_000_000_000)), "num_hidden_layers"),
        (
            with(&gemma, "rope_parameters", json!({"rope_type": "default"})),
            "rope_parameters.sliding_attention",
        ),
        (
            with(&gemma, "rope_parameters", full(json!({"rope_type": "dynamic", "factor": 2.0}))),
            "\"dynamic\"",
        ),
        (
            with(&gemma, "per_layer_config", json!({"5": {"sliding_window": 9}})),
            "per_layer_config.5.sliding_window",
        ),
        (
            with(&gemma, "per_layer_config", json!({"5": {"num_key_value_heads": 5}})),
            "per_layer_config.5.num_key_value_heads",
        ),
        (
            json!({"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}}),
            "text_config.hidden_size_per_layer_input",
        ),
        (
            json!({"model_type": "gemma4_unified", "text_config": {"hidden_size": "x"}}),
            "text_config.hidden_size",
        ),
        (json!({"model_type": "gemma4_unified", "text_config": 3}), "text_config"),
        (with(&qwen3, "model_type", json!("cohere2")), "\"cohere2\" is not supported"),
        (with(&qwen3, "model_type", Value::Null), "missing"),
        (with(&qwen3, "use_sliding_window", json!(true)), "sliding"),
        (with(&qwen3, "rope_parameters", json!({"rope_type": "longrope"})), "\"longrope\" is not supported"),
        (with(&qwen3, "rope_parameters", json!({"rope_type": "linear"})), "rope_parameters.factor"),
        (
            with(&qwen3, "rope_parameters", json!({"rope_type": "yarn", "factor": -1.0})),
            "not a positive number",
        ),
        (
            with(
                &qwen3,
                "rope_parameters",
                json!({"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5}),
            ),
            "partial_rotary_factor",
        ),
        (with(&qwen3, "rope_scaling", json!({"type": "su"})), "\"su\""),
    ];
    for (config, hint) in cases {
        let error = parse(&config).map(|_| ()).unwrap_err();
        assert!(
            error.contains(hint) && error.starts_with("model/config.json") && !error.contains('\n'),
            "{hint}: {error}"
        );
    }
}

#[test]
fn qwen3_windows_in_both_spellings() {
    let mut raw = golden_config("target_qwen3");
    let layers = raw["num_hidden_layers"].as_u64().unwrap() as usize;
    let windows = |raw: &Value| {
        parse(raw).unwrap().layers.iter().map(|layer| layer.attention.window).collect::<Vec<_>>()
    };
    (raw["sliding_window"], raw["max_window_layers"]) = (json!(9), json!(layers - 1));
    raw.as_object_mut().unwrap().remove("layer_types");
    assert_eq!(windows(&raw), vec![None; layers]);
    raw["use_sliding_window"] = json!(true);
    let mut expected = vec![None; layers];
    expected[layers - 1] = Some(9);
    assert_eq!(windows(&raw), expected);
    raw["layer_types"] = json!(vec!["sliding_attention"; layers]);
    assert_eq!(windows(&raw), vec![Some(9); layers]);
    raw["sliding_window"] = Value::Null;
    assert!(parse(&raw).unwrap_err().contains("sliding_window"));
}

#[test]
fn stop_tokens_of_all_places_are_taken_together() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, value: Value| std::fs::write(dir.path().join(name), value.to_string()).unwrap();
    write("config.json", json!({"text_config": {"eos_token_id": [1, 106]}}));
    assert_eq!(stop_ids(dir.path(), Some(9)).unwrap(), [1, 9, 106]);
    assert_eq!(stop_ids(dir.path(), None).unwrap(), [1, 106]);
    write("generation_config.json", json!({"eos_token_id": [1, 50, 106]}));
    assert_eq!(stop_ids(dir.path(), Some(9)).unwrap(), [1, 9, 50, 106]);
}

/// Both spellings of the rotary settings, defaults of missing keys, and refused settings.
#[test]
fn llama_configs_are_read_as_transformers_reads_them() {
    let scaling = json!({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    let raw = json!({"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "head_dim": null, "vocab_size": 96, "max_position_embeddings": 131_072,
        "rope_theta": 5e5, "rope_scaling": scaling});
    let found = parse(&raw).unwrap();
    let heads = found.layers[0].attention.heads;
    assert_eq!((found.family.decoder.name, heads.key_value, heads.dim), ("Llama", 4, 16));
    // The config's own length is used: 8,192 · 32 exceeds the length that the model was made for.
    assert_eq!((found.max_position_embeddings, found.tie_word_embeddings), (131_072, false));
    assert!(!found.layers[0].qk_norm);
    let mut newer = raw.clone();
    let settings = newer.as_object_mut().unwrap();
    let mut parameters = settings.remove("rope_scaling").unwrap();
    parameters["rope_theta"] = settings.remove("rope_theta").unwrap();
    settings.insert("rope_parameters".into(), parameters);
    assert_eq!(architecture(&newer), architecture(&raw));
    for (key, value, hint) in [
        ("mlp_bias", json!(true), "biases in the MLP"),
        ("attention_bias", json!(true), "biases in attention"),
        ("hidden_act", json!("gelu"), "expected \"silu\""),
        ("num_attention_heads", json!(5), "5 does not divide the hidden size 64"),
        ("model_type", json!("olmo2"), "\"olmo2\" is not supported; expected \"qwen3\", "),
    ] {
        let mut wrong = raw.clone();
        wrong[key] = value;
        let told = parse(&wrong).unwrap_err();
        assert!(told.contains(key) && told.contains(hint), "{told}");
    }
}
