//! Reads a model's config.json as the layers of a roofline.

use deepspec_cost::economics::{Attention, FeedForward, Layer, Precision, Target};
use deepspec_models::config::MAX_LAYERS;
use serde_json::Value;

use super::hybrid::{self, Mixer};

/// Entries of `layer_types` for layers with a KV cache. Others, such as `mamba` and `conv`, have none.
const ATTENTION_TYPES: [&str; 4] = ["attention", "chunked_attention", "full_attention", "sliding_attention"];

/// Keys of layer types that this program does not read.
pub fn unread_keys(json: &Value) -> Vec<&'static str> {
    let json = &text_config(json);
    let is_said = |key: &&str| json.get(*key).is_some_and(|value| !value.is_null());
    let mut unread: Vec<_> = ["compress_ratios", "hc_mult", "layers_block_type", "linear_attn_config"]
        .into_iter()
        .filter(is_said)
        .collect();
    // Other models have other linear attention under equal keys.
    if !hybrid::is_qwen_hybrid(json) {
        unread.extend(Some("linear_num_value_heads").filter(is_said));
        let kinds = json.get("layer_types").and_then(Value::as_array);
        let is_known = |kind: &Value| kind.as_str().is_some_and(|kind| ATTENTION_TYPES.contains(&kind));
        if kinds.is_some_and(|kinds| !kinds.iter().all(is_known)) {
            unread.push("layer_types");
        }
    }
    // In Llama 4, only some layers have experts.
    let step = "interleave_moe_layer_step";
    if json.get(step).is_some_and(|value| !value.is_null() && value.as_f64() != Some(1.0)) {
        unread.push(step);
    }
    // Sliding windows of some layers, without a `layer_types` list that names them.
    let windows =
        json.get("sliding_window").is_some_and(Value::is_number) && json.get("layer_types").is_none();
    let alternate =
        json.get("model_type").and_then(Value::as_str).is_some_and(|kind| kind.starts_with("gemma"));
    if windows && (alternate || is_said(&"sliding_window_pattern")) {
        unread.push(if alternate { "sliding_window" } else { "sliding_window_pattern" });
    }
    unread
}

/// Whether the model is a drafter that runs whole blocks through its layers at once. P-EAGLE has depths.
pub fn drafts_blocks(json: &Value) -> bool {
    json.get("num_depths").is_some()
        || [json, &json["dflash_config"]].into_iter().any(|keys| keys.get("block_size").is_some())
}

/// The text model's config, which multimodal models nest in `text_config`. A Gemma 3 gets the keys that published
/// configs leave to transformers' defaults.
fn text_config(json: &Value) -> Value {
    let mut text = json.get("text_config").filter(|inner| inner.is_object()).unwrap_or(json).clone();
    let Some(keys) = text.as_object_mut() else { return text };
    if let Some(kind) = json.get("model_type") {
        keys.entry("model_type").or_insert_with(|| kind.clone());
    }
    if !matches!(keys.get("model_type").and_then(Value::as_str), Some("gemma3" | "gemma3_text")) {
        return text;
    }
    for (key, value) in GEMMA3_DEFAULTS {
        keys.entry(key).or_insert_with(|| value.into());
    }
    let number = |key: &str| keys.get(key).and_then(Value::as_u64);
    let (layers, interval) = (number("num_hidden_layers"), number("sliding_window_pattern").unwrap_or(6));
    if let Some(layers) = layers.filter(|layers| *layers <= MAX_LAYERS as u64 && interval > 0) {
        let kind = |number: u64| {
            if number.is_multiple_of(interval) { "full_attention" } else { "sliding_attention" }
        };
        keys.entry("layer_types").or_insert_with(|| (1..=layers).map(kind).collect());
    }
    text
}

/// Defaults of transformers for missing keys of a Gemma 3's text part.
const GEMMA3_DEFAULTS: [(&str, u64); 8] = [
    ("hidden_size", 2304),
    ("intermediate_size", 9216),
    ("num_hidden_layers", 26),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
    ("head_dim", 256),
    ("vocab_size", 262_208),
    ("sliding_window", 4096),
];

/// Reads the keys that transformers' model families share: Llama, Qwen, Gemma, Mixtral, Qwen-MoE,
/// DeepSeek and similar ones. Keys listed by [`unread_keys`] are ignored or read in part.
///
/// # Errors
/// Names the key that is missing, not a number, or below 1; also more active experts than experts.
pub fn read_target(json: &Value, weights: Precision, expert_parallel: f64) -> Result<Target, String> {
    let json = &text_config(json);
    let find = |keys: &[&str]| keys.iter().find_map(|key| json.get(*key).and_then(Value::as_f64));
    let need = |keys: &[&str]| match find(keys) {
        Some(value) if value.is_finite() && value >= 1.0 => Ok(value),
        Some(value) => Err(format!("`{}` is {value}; expected at least 1", keys[0])),
        None => Err(format!("has no number `{}`; describe the layers in a .yaml instead", keys[0])),
    };
    let (hidden, count) = (need(&["hidden_size"])?, need(&["num_hidden_layers"])?);
    let heads = need(&["num_attention_heads"])?;
    let (attention, projections) = match find(&["kv_lora_rank"]) {
        Some(latent) => {
            let [rope, nope, value] =
                [need(&["qk_rope_head_dim"])?, need(&["qk_nope_head_dim"])?, need(&["v_head_dim"])?];
            let queries = match find(&["q_lora_rank"]) {
                Some(rank) => hidden * rank + rank * heads * (nope + rope),
                None => hidden * heads * (nope + rope),
            };
            let keys = hidden * (latent + rope) + latent * heads * (nope + value);
            let attention = Attention::Latent {
                heads,
                latent,
                rope,
                kv_bytes: 2.0,
                query_bytes: 2.0,
                compression: 1.0,
                top: find(&["index_topk"]).unwrap_or(f64::INFINITY),
                index: find(&["index_head_dim"]).unwrap_or(0.0),
                index_heads: find(&["index_n_heads"]).unwrap_or(0.0),
            };
            (attention, queries + keys + heads * value * hidden)
        }
        None => {
            let kv_heads = find(&["num_key_value_heads"]).unwrap_or(heads);
            let head_dim = find(&["head_dim"]).unwrap_or(hidden / heads);
            let attention =
                Attention::Grouped { heads, kv_heads, head_dim, kv_bytes: 2.0, window: f64::INFINITY };
            (attention, 2.0 * hidden * head_dim * (heads + kv_heads))
        }
    };
    let dense = |width: f64| FeedForward::Dense { weights: 3.0 * hidden * width };
    let linear = hybrid::linear_attention(json, hidden)?;
    // Attention beside linear layers has a gate as wide as the queries.
    let projections = match (&linear, attention) {
        (Some(_), Attention::Grouped { heads, head_dim, .. }) => projections + hidden * heads * head_dim,
        _ => projections,
    };
    let layer_with = |count: f64, attention: Attention, projections: f64, feed_forward: FeedForward| Layer {
        count,
        projections,
        projection_precision: weights,
        attention,
        feed_forward,
        feed_forward_precision: weights,
    };
    let experts =
        find(&["num_experts", "n_routed_experts", "num_local_experts"]).filter(|&experts| experts > 1.0);
    let feed_forward = match experts {
        Some(experts) => FeedForward::Experts {
            weights: 3.0 * hidden * need(&["moe_intermediate_size", "intermediate_size"])?,
            experts,
            active: need(&["num_experts_per_tok", "moe_topk"])?,
            shared: match find(&["shared_expert_intermediate_size"]) {
                Some(width) => width / need(&["moe_intermediate_size"])?,
                None => find(&["n_shared_experts"]).unwrap_or(0.0),
            },
        },
        None => dense(need(&["intermediate_size"])?),
    };
    if let FeedForward::Experts { experts, active, .. } = feed_forward
        && active > experts
    {
        return Err(format!("`num_experts_per_tok` is {active} of {experts} experts"));
    }
    let layer = |count: f64, attention: Attention, feed_forward: FeedForward| {
        layer_with(count, attention, projections, feed_forward)
    };
    let windowed = sliding_window_layers(json, attention);
    let is_dense = if experts.is_some() { dense_layers(json, count)? } else { vec![] };
    let dense_count = is_dense.iter().filter(|is_dense| **is_dense).count() as f64;
    let head = need(&["vocab_size"])? * hidden;
    let target = |layers: Vec<Layer>| Target {
        layers,
        head,
        head_precision: Precision::Bf16,
        hidden,
        expert_parallel,
    };
    if let Some((state, state_projections)) = linear {
        let mixers = hybrid::mixers(json, count)?;
        let local = windowed.map_or(attention, |(_, windowed)| windowed);
        let mut layers = vec![];
        for (mixer, attention, projections) in [
            (Mixer::Full, attention, projections),
            (Mixer::Sliding, local, projections),
            (Mixer::Linear, state, state_projections),
        ] {
            for dense_mlp in [true, false] {
                let kind = |layer: &usize| {
                    mixers[*layer] == mixer && is_dense.get(*layer).is_some_and(|&dense| dense) == dense_mlp
                };
                let of_kind = (0..mixers.len()).filter(kind).count() as f64;
                if of_kind > 0.0 {
                    let mlp = if dense_mlp { dense(need(&["intermediate_size"])?) } else { feed_forward };
                    layers.push(layer_with(of_kind, attention, projections, mlp));
                }
            }
        }
        return Ok(target(layers));
    }
    let mut layers = vec![];
    if dense_count > 0.0 {
        // Where all layers have a window, these have it, too.
        let own = windowed.filter(|&(local, _)| local >= count).map_or(attention, |(_, windowed)| windowed);
        layers.push(layer(dense_count, own, dense(need(&["intermediate_size"])?)));
    }
    let local = windowed.map_or(0.0, |(local, _)| local).min(count - dense_count);
    if count - dense_count - local > 0.0 {
        layers.push(layer(count - dense_count - local, attention, feed_forward));
    }
    if let Some((_, attention)) = windowed.filter(|_| local > 0.0) {
        layers.push(layer(local, attention, feed_forward));
    }
    Ok(target(layers))
}

/// Whether each layer of a model with experts is dense. DeepSeek names how many dense ones come first, Qwen-MoE how often
/// experts come (`decoder_sparse_step`), and the layers without them (`mlp_only_layers`).
fn dense_layers(json: &Value, count: f64) -> Result<Vec<bool>, String> {
    let first = json.get("first_k_dense_replace").and_then(Value::as_f64).unwrap_or(0.0).min(count);
    let layers = count.min(MAX_LAYERS as f64) as u64;
    let wrong =
        |key: &str, found: &Value, expected: String| format!("`{key}` is {found}; expected {expected}");
    let step = match json.get("decoder_sparse_step").filter(|step| !step.is_null()) {
        Some(step) => {
            let whole = || wrong("decoder_sparse_step", step, "a whole number from 1".into());
            step.as_u64().filter(|step| *step > 0).ok_or_else(whole)?
        }
        None => 1,
    };
    let named: Vec<u64> = match json.get("mlp_only_layers").filter(|layers| !layers.is_null()) {
        Some(found) => {
            let named = serde_json::from_value::<Vec<u64>>(found.clone()).ok();
            let named = named.filter(|named| named.iter().all(|layer| *layer < layers));
            named
                .ok_or_else(|| wrong("mlp_only_layers", found, format!("layers from 0 to {}", layers - 1)))?
        }
        None => vec![],
    };
    let is_dense =
        |layer: &u64| (*layer as f64) < first || !(layer + 1).is_multiple_of(step) || named.contains(layer);
    Ok((0..layers).map(|layer| is_dense(&layer)).collect())
}

/// Number of layers with a sliding window, and their attention.
fn sliding_window_layers(json: &Value, attention: Attention) -> Option<(f64, Attention)> {
    let window = json.get("sliding_window").and_then(Value::as_f64)?;
    let count = match json.get("layer_types").and_then(Value::as_array) {
        Some(kinds) => kinds.iter().filter(|kind| kind.as_str() == Some("sliding_attention")).count(),
        // All layers have the window, as in Mistral, unless `use_sliding_window` is false, as in
        // Qwen2.
        None if json.get("use_sliding_window").and_then(Value::as_bool) == Some(false) => 0,
        None => usize::MAX,
    };
    match attention {
        Attention::Grouped { heads, kv_heads, head_dim, kv_bytes, .. } => {
            Some((count as f64, Attention::Grouped { heads, kv_heads, head_dim, kv_bytes, window }))
        }
        Attention::Latent { .. } | Attention::Linear { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn weights_are_counted_as_the_models_have_them() {
        let weights = |target: &Target| -> f64 {
            let of = |layer: &Layer| {
                let fed = match layer.feed_forward {
                    FeedForward::Dense { weights } => weights,
                    FeedForward::Experts { weights, experts, shared, .. } => weights * (experts + shared),
                };
                layer.count * (layer.projections + fed)
            };
            target.layers.iter().map(of).sum::<f64>() + target.head
        };
        let of = |json| read_target(&json, Precision::Bf16, 1.0).unwrap();
        // Qwen3-4B has 4.02 billion weights; an LM head that is tied to the embedding is counted
        // once.
        let qwen = json!({"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936});
        assert!((weights(&of(qwen)) / 4.02e9 - 1.0).abs() < 0.01);
        // DeepSeek-V3 has 671 billion weights, with an embedding of 0.93 billion that no step reads
        // whole.
        let deepseek = json!({"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512,
            "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
            "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
            "n_shared_experts": 1, "first_k_dense_replace": 3, "vocab_size": 129280});
        let found = weights(&of(deepseek));
        assert!((found / 670.1e9 - 1.0).abs() < 0.005, "{found:e}");
    }

    #[test]
    fn windows_have_their_own_layers_and_gaps_are_named() {
        let mut json = json!({"text_config": {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
            "intermediate_size": 128, "vocab_size": 100, "sliding_window": 512,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention",
                "sliding_attention"]}});
        let found = read_target(&json, Precision::Fp8, 1.0).unwrap();
        assert_eq!(found.layers.iter().map(|layer| layer.count).collect::<Vec<_>>(), [2.0, 4.0]);
        assert!(matches!(found.layers[1].attention, Attention::Grouped { window: 512.0, .. }));
        assert!(unread_keys(&json).is_empty());
        json["text_config"].as_object_mut().unwrap().remove("layer_types");
        json["text_config"]["model_type"] = json!("gemma2_text");
        json["text_config"]["interleave_moe_layer_step"] = json!(2);
        json["text_config"]["compress_ratios"] = json!([128]);
        assert_eq!(unread_keys(&json), ["compress_ratios", "interleave_moe_layer_step", "sliding_window"]);
        json["text_config"]["intermediate_size"] = json!(null);
        assert!(read_target(&json, Precision::Fp8, 1.0).unwrap_err().contains("`intermediate_size`"));
        json["text_config"]["hidden_size"] = json!(0);
        assert!(read_target(&json, Precision::Fp8, 1.0).unwrap_err().contains("`hidden_size` is 0"));
    }

    #[test]
    fn some_layers_of_a_mixture_are_dense() {
        let config = |own: serde_json::Value| {
            let mut json = json!({"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 6,
                "num_attention_heads": 4, "intermediate_size": 128, "moe_intermediate_size": 16, "num_experts": 8,
                "num_experts_per_tok": 2, "vocab_size": 100});
            json.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
            assert!(unread_keys(&json).is_empty());
            read_target(&json, Precision::Bf16, 1.0)
        };
        let counts = |own| config(own).unwrap().layers.iter().map(|layer| layer.count).collect::<Vec<_>>();
        assert_eq!(counts(json!({"mlp_only_layers": [], "decoder_sparse_step": 1})), [6.0]);
        assert_eq!(counts(json!({"mlp_only_layers": [0, 4]})), [2.0, 4.0]);
        // Layers 1, 3 and 5 have experts by the step, and 3 is named.
        assert_eq!(counts(json!({"mlp_only_layers": [0, 3], "decoder_sparse_step": 2})), [4.0, 2.0]);
        let found = config(json!({"mlp_only_layers": [0]})).unwrap();
        assert!(
            matches!(found.layers[0].feed_forward, FeedForward::Dense { weights } if weights == 3.0 * 64.0 * 128.0)
        );
        assert!(matches!(
            found.layers[1].feed_forward,
            FeedForward::Experts { experts: 8.0, active: 2.0, .. }
        ));
        assert!(config(json!({"mlp_only_layers": "x"})).unwrap_err().contains("`mlp_only_layers` is \"x\""));
        assert!(
            config(json!({"decoder_sparse_step": 0})).unwrap_err().contains("`decoder_sparse_step` is 0")
        );
    }

    /// The published shapes of Qwen3.5-4B, dense, and of Qwen3.5-35B-A3B, whose names tell their weights.
    #[test]
    fn hybrids_have_layers_with_a_state() {
        let shape = |name: &str| -> serde_json::Value {
            let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/shapes").join(name);
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
        };
        for (name, layers, shapes, billions) in [
            ("qwen3_5_4b.json", [8.0, 24.0], (2560.0, 16.0, 4.0), 4.2),
            ("qwen3_5_35b_a3b.json", [10.0, 30.0], (2048.0, 16.0, 2.0), 34.5),
        ] {
            let json = shape(name);
            assert!(unread_keys(&json).is_empty());
            let found = read_target(&json, Precision::Bf16, 1.0).unwrap();
            assert_eq!(found.layers.iter().map(|layer| layer.count).collect::<Vec<_>>(), layers, "{name}");
            assert!(matches!(found.layers[0].attention, Attention::Grouped { .. }));
            let state = found.layers[1].attention;
            let expected =
                Attention::Linear { heads: 32.0, key_dim: 128.0, value_dim: 128.0, state_bytes: 4.0 };
            assert_eq!(state, expected, "{name}");
            let (hidden, queries, keys) = shapes;
            // Queries with a gate beside them, keys, values and output; then those of linear attention.
            assert_eq!(found.layers[0].projections, hidden * 256.0 * (3.0 * queries + 2.0 * keys), "{name}");
            assert_eq!(found.layers[1].projections, hidden * (4096.0 + 3.0 * 4096.0 + 64.0), "{name}");
            let of = |layer: &Layer| {
                let fed = match layer.feed_forward {
                    FeedForward::Dense { weights } => weights,
                    FeedForward::Experts { weights, experts, shared, .. } => weights * (experts + shared),
                };
                layer.count * (layer.projections + fed)
            };
            let weights = found.layers.iter().map(of).sum::<f64>() + found.head;
            assert!((weights / billions / 1e9 - 1.0).abs() < 0.03, "{name}: {weights:e}");
        }
        // The outer `model_type` counts where the text part has none.
        let mut outer = shape("qwen3_5_4b.json");
        outer["text_config"].as_object_mut().unwrap().retain(|key, _| {
            !key.starts_with("linear_") && !["model_type", "full_attention_interval"].contains(&key.as_str())
        });
        assert_eq!(
            read_target(&outer, Precision::Bf16, 1.0),
            read_target(&shape("qwen3_5_4b.json"), Precision::Bf16, 1.0)
        );
        // Other models with such keys are not known.
        let other = json!({"model_type": "olmo_hybrid", "linear_num_value_heads": 30});
        assert_eq!(unread_keys(&other), ["linear_num_value_heads"]);
        let other = json!({"model_type": "minimax", "layer_types": ["linear_attention"], "linear_num_value_heads": null});
        assert_eq!(unread_keys(&other), ["layer_types"]);
        let other = json!({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]});
        assert_eq!(unread_keys(&other), ["layer_types"]);
        assert_eq!(unread_keys(&json!({"linear_attn_config": {}})), ["linear_attn_config"]);
        let mut wrong = shape("qwen3_5_4b.json");
        wrong["text_config"]["layer_types"] = json!(["linear_attention"]);
        assert!(read_target(&wrong, Precision::Bf16, 1.0).unwrap_err().contains("1 entries for 32 layers"));
        wrong["text_config"]["layer_types"] = vec!["mamba"; 32].into();
        assert!(
            read_target(&wrong, Precision::Bf16, 1.0).unwrap_err().contains("`layer_types` has \"mamba\"")
        );
        for (key, value, words) in [
            ("layer_types", json!("full"), "`layer_types` is \"full\"; expected a list"),
            ("num_hidden_layers", json!(5000), "`num_hidden_layers` is 5000"),
            ("attn_output_gate", json!(false), "`attn_output_gate` is false"),
            ("head_dim", json!(null), "no number `head_dim`"),
        ] {
            let mut wrong = shape("qwen3_5_4b.json");
            wrong["text_config"][key] = value;
            let told = read_target(&wrong, Precision::Bf16, 1.0).unwrap_err();
            assert!(told.contains(words), "{told}");
        }
        wrong["text_config"]["linear_key_head_dim"] = json!(0);
        assert!(
            read_target(&wrong, Precision::Bf16, 1.0).unwrap_err().contains("`linear_key_head_dim` is 0")
        );
    }

    /// `layer_types` names the layers with a window. Without them, a window is of no layer, as in transformers.
    #[test]
    fn hybrids_have_layers_with_windows() {
        let config = |own: serde_json::Value| {
            let mut json = json!({"model_type": "qwen3_5_text", "hidden_size": 64, "num_hidden_layers": 4,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
                "vocab_size": 100});
            json.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
            assert!(unread_keys(&json).is_empty());
            read_target(&json, Precision::Bf16, 1.0)
        };
        let kinds = ["linear_attention", "sliding_attention", "full_attention", "sliding_attention"];
        let layers = config(json!({"layer_types": kinds, "sliding_window": 512})).unwrap().layers;
        let window = |layer: &Layer| match layer.attention {
            Attention::Grouped { window, .. } => Some(window),
            _ => None,
        };
        assert_eq!(layers.iter().map(|layer| layer.count).collect::<Vec<_>>(), [1.0, 2.0, 1.0]);
        assert_eq!(layers.iter().map(window).collect::<Vec<_>>(), [Some(f64::INFINITY), Some(512.0), None]);
        assert_eq!(layers[0].projections, layers[1].projections);
        let layers = config(json!({"sliding_window": 512})).unwrap().layers;
        assert_eq!(layers.iter().map(window).collect::<Vec<_>>(), [Some(f64::INFINITY), None]);
        let told = config(json!({"layer_types": kinds, "sliding_window": null})).unwrap_err();
        assert!(told.contains("no number `sliding_window`"), "{told}");
    }

    /// A published config of Gemma 3 names neither heads nor vocabulary nor layer types.
    #[test]
    fn gemma3_has_the_defaults_of_transformers() {
        let json = json!({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560,
            "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}});
        assert!(unread_keys(&json).is_empty());
        let found = read_target(&json, Precision::Bf16, 1.0).unwrap();
        assert_eq!(found.layers.iter().map(|layer| layer.count).collect::<Vec<_>>(), [5.0, 29.0]);
        let heads = |layer: &Layer| match layer.attention {
            Attention::Grouped { heads, kv_heads, head_dim, window, .. } => {
                (heads, kv_heads, head_dim, window)
            }
            other => panic!("Gemma 3 has plain heads, not {other:?}"),
        };
        assert_eq!(heads(&found.layers[0]), (8.0, 4.0, 256.0, f64::INFINITY));
        assert_eq!(heads(&found.layers[1]), (8.0, 4.0, 256.0, 1024.0));
        assert_eq!(found.head, 262_208.0 * 2560.0);
    }
}
