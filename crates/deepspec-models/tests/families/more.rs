//! Families whose drafters have other layers than the target.

use std::path::Path;

use deepspec_models::ModelConfig;
use deepspec_models::nn::{
    ExpertTensors, ExpertsSpec, GatedDeltaSpec, Heads, LayerSpec, NormWeight, RouterScores, Scaling,
};
use serde_json::{Value, json};

use super::{architecture, parse};

/// Sizes that all families of this test share.
fn sized(model_type: &str, own: Value) -> Value {
    let mut raw = json!({"model_type": model_type, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96,
        "max_position_embeddings": 4096, "eos_token_id": 5});
    for (key, value) in own.as_object().into_iter().flatten() {
        raw[key] = value.clone();
    }
    raw
}

#[test]
fn keys_of_more_families_are_read() {
    let windows =
        |found: &ModelConfig| found.layers.iter().map(|layer| layer.attention.window).collect::<Vec<_>>();
    let qwen2 = parse(&sized("qwen2", json!({"sliding_window": 9, "max_window_layers": 4}))).unwrap();
    assert!(qwen2.layers[0].qkv_bias && !qwen2.layers[0].qk_norm);
    assert_eq!(windows(&qwen2), [None; 6]);
    let mistral = |own: Value| windows(&parse(&sized("mistral", own)).unwrap());
    assert_eq!(mistral(json!({})), [Some(4096); 6]);
    assert_eq!(mistral(json!({"sliding_window": null})), [None; 6]);
    assert_eq!(mistral(json!({"sliding_window": 9})), [Some(9); 6]);
    let multipliers = json!({"embedding_multiplier": 12, "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22, "logits_scaling": 8});
    let granite = parse(&sized("granite", multipliers)).unwrap();
    let layer = &granite.layers[0];
    assert_eq!((layer.attention.scale, layer.residual_scale), (0.015625, 0.22));
    assert_eq!((granite.embed_scale, granite.logit_scale), (12.0, 0.125));
    let phi3 = parse(&sized("phi3", json!({"partial_rotary_factor": 0.75, "rope_theta": 1e4}))).unwrap();
    let rope = phi3.layers[0].rope;
    assert_eq!(rope.scaling, Scaling::Proportional { planes: 12, factor: 1.0 });
    // The base of 24 of 32 channels.
    assert!((rope.theta.powf(-2.0 / 32.0) - 1e4f64.powf(-2.0 / 24.0)).abs() < 1e-12);
    assert_eq!(phi3.rms_norm_eps, 1e-5);
    let experts = |own: Value| {
        let mut raw = sized("qwen3_moe", own);
        (raw["moe_intermediate_size"], raw["num_experts_per_tok"]) = (json!(16), json!(2));
        parse(&raw).map(|found| found.layers.iter().map(|layer| layer.experts).collect::<Vec<_>>())
    };
    let scores = RouterScores::SoftmaxOverAll { renormalise: false };
    let tensors = ExpertTensors::EachOrStacked;
    let spec = ExpertsSpec { count: 8, active: 2, width: 16, shared_width: None, scores, tensors };
    let some = Some(spec);
    assert_eq!(experts(json!({"num_experts": 8})).unwrap(), [some; 6]);
    // As transformers 5.17 writes it, with dense layers.
    let newer = json!({"num_local_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]});
    assert_eq!(experts(newer).unwrap(), [None, some, None, None, None, some]);
    let scores = RouterScores::SoftmaxOverAll { renormalise: true };
    let renormalised = Some(ExpertsSpec { scores, ..spec });
    assert_eq!(experts(json!({"num_experts": 8, "norm_topk_prob": true})).unwrap(), [renormalised; 6]);
    for (key, value, hint) in [
        ("num_experts", json!(1), "2 of 1 experts"),
        ("num_experts", json!(1_000_000), "more than 4096"),
        ("num_experts", Value::Null, "missing"),
        ("mlp_only_layers", json!([6]), "6 is none of 6 layers"),
        ("decoder_sparse_step", json!(0), "from 1"),
        ("layer_types", json!(["sliding_attention"]), "one kind of attention"),
        ("attention_bias", json!(true), "biases in attention"),
    ] {
        let mut own = json!({"num_experts": 8});
        own[key] = value;
        let told = experts(own).unwrap_err();
        assert!(told.contains(if key.starts_with("num") { "num_experts" } else { key }), "{told}");
        assert!(told.contains(hint), "{told}");
    }
    let window = |own: Value| {
        let mut raw = sized(
            "qwen3_moe",
            json!({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        );
        raw.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        windows(&parse(&raw).unwrap())
    };
    assert_eq!(window(json!({"sliding_window": 9, "max_window_layers": 4})), [None; 6]);
    let on = json!({"use_sliding_window": true, "sliding_window": 9, "max_window_layers": 4});
    assert_eq!(window(on), [Some(9); 6]);
}

/// Own keys of a gpt-oss.
fn gpt_oss() -> Value {
    json!({"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 9, "rope_theta": 1.5e5,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 128}})
}

#[test]
fn gpt_oss_in_both_spellings() {
    let found = architecture(&sized("gpt_oss", gpt_oss()));
    let (local, full) = (&found.layers[0], &found.layers[1]);
    assert_eq!((local.attention.window, full.attention.window), (Some(9), None));
    assert!(found.layers.iter().all(|layer| layer.attention.sinks && layer.qkv_bias && layer.output_bias));
    assert_eq!(found.rms_norm_eps, 1e-5);
    let scores = RouterScores::SoftmaxOfChosen;
    let tensors = ExpertTensors::Interleaved;
    let spec = ExpertsSpec { count: 8, active: 2, width: 96, shared_width: None, scores, tensors };
    assert_eq!(local.experts, Some(spec));
    assert!(matches!(full.rope.scaling, Scaling::Yarn(yarn) if !yarn.truncate && yarn.factor == 32.0));
    let mut newer = sized("gpt_oss", gpt_oss());
    let keys = newer.as_object_mut().unwrap();
    let mut rope = keys.remove("rope_scaling").unwrap();
    rope["rope_theta"] = keys.remove("rope_theta").unwrap();
    keys.insert("rope_parameters".into(), rope);
    let types = ["sliding_attention", "full_attention"].repeat(3);
    keys.insert("layer_types".into(), json!(types));
    assert_eq!(architecture(&newer), found);
    for (key, value, hint) in [
        ("swiglu_limit", json!(5), "expected 7"),
        ("rope_scaling", Value::Null, "YaRN"),
        ("rope_theta", Value::Null, "missing"),
        ("head_dim", Value::Null, "missing"),
        ("sliding_window", Value::Null, "missing"),
        ("num_experts_per_tok", json!(9), "9 of 8 experts"),
    ] {
        let mut own = gpt_oss();
        own[key] = value;
        let told = parse(&sized("gpt_oss", own)).map(|_| ()).unwrap_err();
        assert!(told.contains(key) && told.contains(hint), "{told}");
    }
}

/// Own keys of a Qwen3.5.
fn qwen3_5() -> Value {
    json!({"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 8, "head_dim": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10], "mrope_interleaved": true}})
}

#[test]
fn qwen3_5_in_all_its_spellings() {
    let text = sized("qwen3_5_text", qwen3_5());
    let found = architecture(&text);
    let spec = GatedDeltaSpec { key_heads: 2, value_heads: 4, key_dim: 16, value_dim: 8, kernel: 4 };
    let mixers: Vec<_> = found.layers.iter().map(|layer| layer.gated_delta).collect();
    assert_eq!(mixers, [Some(spec), Some(spec), Some(spec), None, Some(spec), Some(spec)]);
    let layer = &found.layers[3];
    assert!(layer.output_gate && layer.qk_norm && !layer.qkv_bias);
    assert_eq!((layer.rope.theta, layer.rope.head_dim, layer.rope.scaling), (1e7, 64, Scaling::None));
    assert_eq!((layer.norm_weight, found.norm_weight), (NormWeight::OnePlus, NormWeight::OnePlus));
    // One layer of six has keys and values of two heads of 256.
    assert_eq!(found.kv_cache_numel(1, 256), 256 * 2 * 2 * 256);
    assert_eq!(found.model_size().layers.len(), 1);
    let states = 5 * (2 * 4 * 16 * 8 * 4 + 66 * 96 * 2 + 2 * 63 * 4 * 4);
    assert_eq!(found.linear_attention_bytes(3, tch::Kind::BFloat16), 3 * states);
    let mut inner = text.clone();
    let token = inner.as_object_mut().unwrap().remove("eos_token_id").unwrap();
    let outer = |tied: Value| {
        json!({"model_type": "qwen3_5", "text_config": inner, "vision_config": {"hidden_size": 7},
            "tie_word_embeddings": tied, "eos_token_id": token})
    };
    assert_eq!(architecture(&outer(json!(false))), found);
    assert!(architecture(&outer(json!(true))).tie_word_embeddings);
    let mut older = text.clone();
    older["rope_parameters"] = Value::Null;
    older["rope_theta"] = json!(1e7);
    older["full_attention_interval"] = json!(4);
    assert_eq!(architecture(&older), found);
    let mut spelled = text;
    let kind = |layer: usize| if layer == 3 { "full_attention" } else { "linear_attention" };
    spelled["layer_types"] = (0..6).map(kind).collect();
    assert_eq!(architecture(&spelled), found);
    for (key, value, hint) in [
        ("layer_types", json!(["linear_attention"]), "1 types for 6 layers"),
        ("layer_types", json!(vec!["sliding_attention"; 6]), "\"sliding_attention\" is unknown"),
        ("linear_num_value_heads", json!(3), "no multiple of the 2 key heads"),
        ("linear_key_head_dim", json!(1_000_000), "more than 4096"),
        ("linear_conv_kernel_dim", json!(0), "linear_conv_kernel_dim"),
        ("head_dim", Value::Null, "missing"),
        ("num_key_value_heads", Value::Null, "missing"),
        ("num_experts", json!(256), "`model_type` is \"qwen3_5_moe\""),
        ("output_gate_type", json!("sigmoid"), "expected \"silu\""),
        ("attn_output_gate", json!(false), "without an output gate"),
        ("attention_bias", json!(true), "biases in attention"),
        ("hidden_act", json!("gelu"), "expected \"silu\""),
    ] {
        let mut own = qwen3_5();
        own[key] = value;
        let told = parse(&sized("qwen3_5_text", own)).map(|_| ()).unwrap_err();
        assert!(told.contains(key) && told.contains(hint), "{told}");
    }
    let mut own = qwen3_5();
    own["rope_parameters"]["partial_rotary_factor"] = json!(2.0);
    let told = parse(&sized("qwen3_5_text", own)).map(|_| ()).unwrap_err();
    assert!(told.contains("`partial_rotary_factor`: 2 of 256 channels"), "{told}");
}

#[test]
fn qwen3_5_moe_has_a_shared_expert_in_all_layers() {
    let experts = json!({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24, "intermediate_size": null, "mlp_only_layers": []});
    let mut own = qwen3_5();
    own.as_object_mut().unwrap().extend(experts.as_object().unwrap().clone());
    let text = sized("qwen3_5_moe_text", own.clone());
    let found = architecture(&text);
    let dense = architecture(&sized("qwen3_5_text", qwen3_5()));
    let spec = ExpertsSpec {
        count: 8,
        active: 2,
        width: 16,
        shared_width: Some(24),
        scores: RouterScores::SoftmaxOverAll { renormalise: true },
        tensors: ExpertTensors::EachOrStacked,
    };
    for (layer, dense) in found.layers.iter().zip(&dense.layers) {
        assert_eq!((layer.experts, layer.intermediate_size), (Some(spec), 3 * layer.hidden_size));
        let intermediate_size = dense.intermediate_size;
        assert_eq!(LayerSpec { experts: None, intermediate_size, ..layer.clone() }, *dense);
    }
    let d = found.hidden_size;
    assert_eq!(found.layers[0].mlp_weights(), d * (8 * (1 + 3 * 16) + 1 + 3 * 24));
    assert_eq!(found.layers[0].active_mlp_weights(), d * (8 + 2 * 3 * 16 + 1 + 3 * 24));
    // The MTP layer is one of the target's.
    let mtp = parse(&text).unwrap().mtp_decoder().unwrap();
    assert_eq!(parse(&Value::Object(mtp.raw.clone())).unwrap(), mtp);
    assert_eq!(mtp.layers, [found.layers.iter().find(|layer| layer.gated_delta.is_none()).unwrap().clone()]);
    let mut outer = json!({"model_type": "qwen3_5_moe", "vision_config": {"hidden_size": 7}});
    let mut inner = text;
    outer["eos_token_id"] = inner.as_object_mut().unwrap().remove("eos_token_id").unwrap();
    outer["text_config"] = inner;
    assert_eq!(architecture(&outer), found);
    for (key, value, hint) in [
        ("num_experts", Value::Null, "missing"),
        ("num_experts_per_tok", json!(9), "9 of 8 experts"),
        ("shared_expert_intermediate_size", Value::Null, "missing"),
        ("norm_topk_prob", json!(false), "add up to 1"),
        ("mlp_only_layers", json!([0]), "all layers have experts"),
    ] {
        let mut changed = own.clone();
        changed[key] = value;
        let told = parse(&sized("qwen3_5_moe_text", changed)).map(|_| ()).unwrap_err();
        assert!(told.contains(key) && told.contains(hint), "{told}");
    }
}

/// Drafters have heads of 128, rotated whole, and none of the target's gates and linear attention.
#[test]
fn drafters_of_a_qwen3_5_have_plain_layers() {
    let target = parse(&sized("qwen3_5_text", qwen3_5())).unwrap();
    for (drafter, name) in [
        (target.anchored_decoder(&[None, Some(7)]).unwrap(), "Qwen3"),
        (target.draft_decoder(&[None]).unwrap(), "Llama"),
    ] {
        assert_eq!(parse(&Value::Object(drafter.raw.clone())).unwrap(), drafter);
        assert_eq!(drafter.family.decoder.name, name);
        let layer = &drafter.layers[0];
        let heads = target.layers[0].attention.heads;
        assert_eq!(
            layer.attention.heads,
            Heads { query: 2 * heads.query, key_value: 2 * heads.key_value, dim: 128 }
        );
        assert_eq!((layer.gated_delta, layer.output_gate), (None, false));
        assert_eq!((layer.rope.theta, layer.rope.head_dim), (1e7, 128));
        assert_eq!((layer.norm_weight, drafter.norm_weight), (NormWeight::Plain, NormWeight::Plain));
        assert_eq!(drafter.raw["eos_token_id"], 5);
        for key in drafter.raw.keys() {
            assert!(!key.starts_with("linear_") && key != "rope_parameters" && key != "text_config", "{key}");
        }
    }
}

/// The published configs leave out most keys of the text part.
#[test]
fn gemma3_in_all_its_spellings() {
    let text = json!({"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240,
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024});
    let nested = json!({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 7}});
    let found = architecture(&nested);
    assert_eq!(architecture(&text), found);
    assert_eq!((found.layers.len(), found.vocab_size, found.tie_word_embeddings), (34, 262_208, true));
    let (local, full) = (&found.layers[0], &found.layers[5]);
    let heads = local.attention.heads;
    assert_eq!((heads.query, heads.key_value, heads.dim), (8, 4, 256));
    assert_eq!((local.attention.window, full.attention.window), (Some(1024), None));
    assert_eq!((local.rope.theta, local.rope.scaling), (1e4, Scaling::None));
    assert_eq!((full.rope.theta, full.rope.scaling), (1e6, Scaling::Linear { factor: 8.0 }));
    assert_eq!(full.attention.scale, 256f64.powf(-0.5));
    assert_eq!(found.embed_scale, 2560f64.sqrt());
    let mut newer = text.clone();
    newer.as_object_mut().unwrap().remove("rope_scaling");
    newer["rope_parameters"] = json!({"full_attention": {"factor": 8.0, "rope_type": "linear"},
        "sliding_attention": {"rope_type": "default"}});
    newer["layer_types"] =
        (1..=34).map(|layer| if layer % 6 == 0 { "full_attention" } else { "sliding_attention" }).collect();
    assert_eq!(architecture(&newer), found);
    let mut older = text;
    (older["rope_theta"], older["rope_local_base_freq"]) = (json!(1e6), json!(1e4));
    older["sliding_window_pattern"] = json!(6);
    assert_eq!(architecture(&older), found);
}

#[test]
fn unsupported_keys_of_more_families_are_refused_by_name() {
    let longrope = json!({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]});
    let full = json!({"full_attention": {"rope_type": "default"}});
    for (model_type, key, value, hint) in [
        ("qwen2", "attention_bias", json!(true), "biases in attention"),
        ("qwen2", "num_key_value_heads", Value::Null, "missing"),
        ("qwen2", "hidden_act", json!("gelu"), "expected \"silu\""),
        ("mistral", "layer_types", json!(["full_attention"]), "one kind of layer"),
        ("mistral", "sliding_window", json!(0), "sliding_window"),
        ("mistral", "num_key_value_heads", Value::Null, "missing"),
        ("granite", "attention_bias", json!(true), "biases in attention"),
        ("granite", "mlp_bias", json!(true), "biases in the MLP"),
        ("granite", "layer_types", json!(["sliding_attention"]), "one kind of layer"),
        ("granite", "sliding_window", json!(64), "one kind of layer"),
        ("granite", "attention_sinks", json!(true), "one kind of layer"),
        ("phi3", "layer_types", json!(["sliding_attention"]), "one kind of layer"),
        ("qwen2", "dual_chunk_attention_config", json!({"chunk_size": 64}), "in two chunks"),
        ("granite", "logits_scaling", json!(0), "not a positive number"),
        ("granite", "residual_multiplier", json!("x"), "a number"),
        ("gemma3_text", "attention_bias", json!(true), "biases in attention"),
        ("gemma3_text", "final_logit_softcapping", json!(30), "soft-caps"),
        ("gemma3_text", "attn_logit_softcapping", json!(50), "soft-caps"),
        ("gemma3_text", "use_bidirectional_attention", json!(true), "later tokens"),
        ("gemma3_text", "query_pre_attn_scalar", json!(0), "not a positive number"),
        ("gemma3_text", "hidden_activation", json!("silu"), "gelu_pytorch_tanh"),
        ("gemma3_text", "rope_parameters", full, "sliding_attention"),
        ("phi3", "rope_scaling", longrope, "\"longrope\" (LongRoPE in this family) is not supported"),
        ("phi3", "rope_parameters", json!({"rope_type": "yarn"}), "\"yarn\" (LongRoPE"),
        ("phi3", "partial_rotary_factor", json!(1.5), "no even number"),
    ] {
        let told = parse(&sized(model_type, json!({ key: value }))).map(|_| ()).unwrap_err();
        assert!(told.contains(key) && told.contains(hint), "{model_type}: {told}");
    }
    // An engine computes the states of a model that is refused here, and its drafters have layers of Qwen3.
    let longrope = sized("phi3", json!({"rope_scaling": {"type": "longrope"}}));
    let raw = longrope.as_object().cloned().unwrap();
    assert!(!ModelConfig::parse_any(Path::new("config.json"), raw).unwrap().has_forward);
}

/// Drafters of these families have plain layers of other families, which their saved config describes completely.
#[test]
fn drafters_of_more_families_have_plain_layers() {
    let multipliers = json!({"embedding_multiplier": 12, "attention_multiplier": 0.1, "residual_multiplier": 0.2,
        "logits_scaling": 8});
    let llama3 = json!({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512});
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048});
    for (model_type, own) in [
        ("qwen2", json!({"rope_theta": 1e6, "rope_scaling": yarn})),
        ("mistral", json!({"sliding_window": 9, "rope_scaling": llama3})),
        ("granite", multipliers),
        ("gemma3_text", json!({"rope_scaling": {"rope_type": "linear", "factor": 8.0}})),
        ("phi3", json!({"partial_rotary_factor": 0.75})),
        ("qwen3_moe", json!({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16})),
        ("gpt_oss", gpt_oss()),
    ] {
        let target = parse(&sized(model_type, own)).unwrap();
        let drafters = [
            (target.anchored_decoder(&[None, Some(7)]).unwrap(), "Qwen3", true),
            (target.draft_decoder(&[None]).unwrap(), "Llama", false),
        ];
        for (drafter, name, qk_norm) in drafters {
            let again = parse(&Value::Object(drafter.raw.clone())).unwrap();
            assert_eq!(again, drafter, "{model_type}");
            // Engines read this key otherwise, and it is written only where it says something.
            assert!(
                drafter
                    .raw
                    .get("rope_scaling")
                    .is_none_or(|scaling| scaling.get("attention_factor").is_none())
            );
            assert_eq!(drafter.family.decoder.name, name);
            assert!(target.accepts_drafters_of(drafter.family) && !target.accepts_drafters_of(target.family));
            assert_eq!((drafter.embed_scale, drafter.logit_scale, drafter.logit_softcap), (1.0, 1.0, None));
            let full = target.layers.iter().find(|layer| layer.attention.window.is_none());
            let (layer, theirs) = (&drafter.layers[0], full.unwrap_or(&target.layers[0]));
            assert_eq!(layer.attention.heads, theirs.attention.heads);
            assert_eq!((layer.experts, layer.intermediate_size), (None, 96));
            assert_eq!(layer.attention.scale, 32f64.powf(-0.5));
            assert_eq!(layer.rope.theta, theirs.rope.theta);
            assert!(model_type == "phi3" || layer.rope == theirs.rope, "{model_type}");
            assert_eq!((layer.qk_norm, layer.qkv_bias, layer.residual_scale), (qk_norm, false, 1.0));
            assert_eq!(drafter.max_position_embeddings, target.max_position_embeddings);
            assert_eq!(drafter.raw["eos_token_id"], 5);
        }
        assert!(target.draft_decoder(&[Some(7)]).is_err(), "a Llama layer has no window");
    }
}
