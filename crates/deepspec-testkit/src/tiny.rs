//! Small random targets, written as real model folders.

use std::fs;
use std::path::Path;

use deepspec_core::rng::{Purpose, Stream};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use crate::{folder, golden};

const HIDDEN_SIZE: usize = 32;
const INTERMEDIATE_SIZE: usize = 64;
/// More tokens than the golden tokenizer has.
const VOCAB_SIZE: usize = 640;
/// Width inside an expert.
const EXPERT_SIZE: usize = 16;
/// Head size of the sliding layers and of the full ones.
const HEAD_DIM: usize = 32;
const GLOBAL_HEAD_DIM: usize = 64;

/// Sliding window of [`gemma4`].
const GEMMA4_WINDOW: usize = 300;

/// Sizes of a [`gemma4`] or of its assistant.
#[derive(Clone, Copy)]
struct Gemma4Sizes {
    vocab: usize,
    hidden: usize,
    intermediate: usize,
    /// Query heads of a full or sliding layer.
    heads: usize,
}

impl Gemma4Sizes {
    /// Sizes of a target.
    const fn target(vocab: usize, heads: usize) -> Self {
        Self { vocab, hidden: HIDDEN_SIZE, intermediate: INTERMEDIATE_SIZE, heads }
    }

    /// Sizes of the assistant of a target with these: half as wide.
    const fn of_assistant(self) -> Self {
        Self { hidden: self.hidden / 2, intermediate: self.intermediate / 2, ..self }
    }
}

const GEMMA4: Gemma4Sizes = Gemma4Sizes::target(VOCAB_SIZE, 16);

/// Writes a random Gemma 4 to `dir`, with the golden tokenizer and template and a context of
/// `longest` tokens. It has four layers (sliding, full, sliding, full; windows of 300 tokens). It
/// is stored like a multimodal checkpoint, with a tensor of the vision part.
pub fn gemma4(dir: &Path, longest: usize) {
    write_gemma4(dir, GEMMA4, longest);
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        let from = golden::dir("templates_gemma4").join(file);
        fs::copy(&from, dir.join(file)).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    }
}

/// Writes a random assistant of [`gemma4`] to `dir`: three layers (sliding, sliding, full), half as wide as the target. Its names are
/// those of transformers.
pub fn gemma4_assistant(dir: &Path, longest: usize) {
    write_gemma4_assistant(dir, GEMMA4, longest);
}

/// Writes a random Gemma 4 to `target` and its random assistant to `assistant`, without a tokenizer. The vocabulary of `tokens` is
/// small enough to compute exact distributions of outputs.
pub fn gemma4_with_assistant(target: &Path, assistant: &Path, tokens: usize) {
    let sizes = Gemma4Sizes::target(tokens, 4);
    write_gemma4(target, sizes, 256);
    write_gemma4_assistant(assistant, sizes, 256);
}

fn write_gemma4(dir: &Path, sizes: Gemma4Sizes, longest: usize) {
    let kinds = ["sliding_attention", "full_attention"].repeat(2);
    let mut tensors = vec![
        ("model.language_model.embed_tokens.weight".to_string(), vec![sizes.vocab, sizes.hidden]),
        ("model.language_model.norm.weight".into(), vec![sizes.hidden]),
        ("model.vision_embedder.patch_dense.weight".into(), vec![3, 5]),
    ];
    for (layer, kind) in kinds.iter().enumerate() {
        let own = gemma4_layer(kind, sizes, true);
        tensors.extend(
            own.into_iter()
                .map(|(name, shape)| (format!("model.language_model.layers.{layer}.{name}"), shape)),
        );
    }
    let config = json!({
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "model_type": "gemma4_unified",
        "tie_word_embeddings": true,
        "vision_config": {"model_type": "gemma4_unified_vision"},
        "text_config": gemma4_text_config(&kinds, sizes, longest),
    });
    write_model(dir, &config, &tensors);
}

/// Writes an assistant of a target of these sizes.
fn write_gemma4_assistant(dir: &Path, target: Gemma4Sizes, longest: usize) {
    let kinds = ["sliding_attention", "sliding_attention", "full_attention"];
    let sizes = target.of_assistant();
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_string(), vec![sizes.vocab, sizes.hidden]),
        ("model.norm.weight".into(), vec![sizes.hidden]),
        ("pre_projection.weight".into(), vec![sizes.hidden, 2 * target.hidden]),
        ("post_projection.weight".into(), vec![target.hidden, sizes.hidden]),
    ];
    for (layer, kind) in kinds.iter().enumerate() {
        let own = gemma4_layer(kind, sizes, false);
        tensors.extend(own.into_iter().map(|(name, shape)| (format!("model.layers.{layer}.{name}"), shape)));
    }
    let mut text = gemma4_text_config(&kinds, sizes, longest);
    text["num_kv_shared_layers"] = json!(kinds.len());
    text["final_logit_softcapping"] = Value::Null;
    let config = json!({
        "architectures": ["Gemma4UnifiedAssistantForCausalLM"],
        "model_type": "gemma4_unified_assistant",
        "tie_word_embeddings": true,
        "backbone_hidden_size": target.hidden,
        "use_ordered_embeddings": false,
        "text_config": text,
    });
    write_model(dir, &config, &tensors);
}

/// Tensors of a layer of [`gemma4`] of this kind, by their names within the layer.
fn gemma4_layer(kind: &str, sizes: Gemma4Sizes, has_keys: bool) -> Vec<(String, Vec<usize>)> {
    let Gemma4Sizes { hidden: width, intermediate: inner, heads, .. } = sizes;
    // Full layers have wider heads and one key/value head, whose keys are also the values.
    let (dim, key_value, own_value) =
        if kind == "full_attention" { (GLOBAL_HEAD_DIM, 1, None) } else { (HEAD_DIM, 2, Some("v")) };
    let (queries, keys) = (heads * dim, key_value * dim);
    let own_keys = [("k", keys)].into_iter().chain(own_value.map(|v| (v, keys))).filter(|_| has_keys);
    let mut own: Vec<(String, Vec<usize>)> = [("q", queries)]
        .into_iter()
        .chain(own_keys)
        .map(|(part, rows)| (format!("self_attn.{part}_proj.weight"), vec![rows, width]))
        .collect();
    own.push(("self_attn.o_proj.weight".into(), vec![width, queries]));
    let head_norms = ["q", "k"].into_iter().filter(|part| has_keys || *part == "q");
    own.extend(head_norms.map(|part| (format!("self_attn.{part}_norm.weight"), vec![dim])));
    own.extend(["gate", "up"].map(|part| (format!("mlp.{part}_proj.weight"), vec![inner, width])));
    own.push(("mlp.down_proj.weight".into(), vec![width, inner]));
    let norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"];
    own.extend(norms.map(|norm| (format!("{norm}_layernorm.weight"), vec![width])));
    own.push(("layer_scalar".into(), vec![1]));
    own
}

/// Config of the text part of a [`gemma4`] with layers of these kinds.
fn gemma4_text_config(kinds: &[&str], sizes: Gemma4Sizes, longest: usize) -> Value {
    json!({
        "model_type": "gemma4_unified_text", "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate, "vocab_size": sizes.vocab,
        "num_hidden_layers": kinds.len(), "layer_types": kinds, "sliding_window": GEMMA4_WINDOW,
        "num_attention_heads": sizes.heads, "num_key_value_heads": 2, "head_dim": HEAD_DIM,
        "num_global_key_value_heads": 1, "global_head_dim": GLOBAL_HEAD_DIM, "attention_k_eq_v": true,
        "final_logit_softcapping": 30.0, "max_position_embeddings": longest, "eos_token_id": [1, 6],
    })
}

/// Writes a random Llama of four layers and a context of 2,048 tokens to `dir`. It has the rotary
/// settings of Llama 3, an untied head, and the embedded target's tokenizer and template.
pub fn llama(dir: &Path) {
    const TOKENS: usize = 1024;
    let config = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN_SIZE, "intermediate_size": INTERMEDIATE_SIZE, "vocab_size": TOKENS, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": false, "eos_token_id": [1, 6],
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256},
    });
    write_model(dir, &config, &pre_norm_tensors(4, TOKENS, false));
    copy_tiny_tokenizer(dir);
}

/// `model_type`s of [`target`].
pub const OTHER_FAMILIES: [&str; 9] =
    ["qwen2", "mistral", "granite", "gemma3_text", "phi3", "qwen3_moe", "gpt_oss", "qwen3_5", "qwen3_5_moe"];

/// Writes a random target of one of [`OTHER_FAMILIES`] to `dir`, with the sizes and the tokenizer of [`llama`].
///
/// # Panics
/// Panics if the family is another one.
pub fn target(dir: &Path, model_type: &str) {
    const TOKENS: usize = 1024;
    let (class, own) = match model_type {
        "qwen2" => ("Qwen2ForCausalLM", json!({"rope_theta": 1e6})),
        "mistral" => ("MistralForCausalLM", json!({"rope_theta": 1e6, "sliding_window": 24})),
        "granite" => (
            "GraniteForCausalLM",
            json!({"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.5,
                "logits_scaling": 4.0}),
        ),
        "gemma3_text" => (
            "Gemma3ForCausalLM",
            json!({"sliding_window": 24, "query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh",
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
                "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ),
        // The first layer is dense, the others have experts.
        "qwen3_moe" => (
            "Qwen3MoeForCausalLM",
            json!({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_SIZE, "norm_topk_prob": true,
                "mlp_only_layers": [0], "rope_theta": 1e6}),
        ),
        "gpt_oss" => (
            "GptOssForCausalLM",
            json!({"intermediate_size": EXPERT_SIZE, "num_local_experts": 8, "num_experts_per_tok": 2,
                "sliding_window": 24, "rope_theta": 1.5e5,
                "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
                    "original_max_position_embeddings": 256}}),
        ),
        // Two layers with linear attention around each one with attention.
        "qwen3_5" => (
            "Qwen3_5ForConditionalGeneration",
            json!({"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
                "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                "linear_value_head_dim": 32,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}}),
        ),
        // As the dense one, with experts in all layers.
        "qwen3_5_moe" => (
            "Qwen3_5MoeForConditionalGeneration",
            json!({"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
                "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                "linear_value_head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
                "moe_intermediate_size": EXPERT_SIZE, "shared_expert_intermediate_size": EXPERT_SIZE,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}}),
        ),
        "phi3" => ("Phi3ForCausalLM", json!({"rope_theta": 250_000.0, "partial_rotary_factor": 0.5})),
        other => panic!("{other} is none of {OTHER_FAMILIES:?}"),
    };
    let mut config = json!({
        "architectures": [class],
        "model_type": model_type,
        "hidden_size": HIDDEN_SIZE, "intermediate_size": INTERMEDIATE_SIZE, "vocab_size": TOKENS, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "eos_token_id": [1, 6],
    });
    for (key, value) in own.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    let mut tensors = pre_norm_tensors(
        4,
        TOKENS,
        matches!(model_type, "gemma3_text" | "qwen3_moe" | "qwen3_5" | "qwen3_5_moe"),
    );
    for layer in 0..4 {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        match model_type {
            "qwen2" => tensors.extend(
                [("q", 64), ("k", 32), ("v", 32)]
                    .map(|(part, rows)| (name(&format!("self_attn.{part}_proj.bias")), vec![rows])),
            ),
            "gemma3_text" => tensors.extend(
                ["pre", "post"]
                    .map(|part| (name(&format!("{part}_feedforward_layernorm.weight")), vec![HIDDEN_SIZE])),
            ),
            "qwen3_moe" if layer > 0 => {
                tensors.retain(|(tensor, _)| !tensor.starts_with(&name("mlp.")));
                tensors.push((name("mlp.gate.weight"), vec![8, HIDDEN_SIZE]));
                for expert in 0..8 {
                    tensors.extend(expert_mlp(&name(&format!("mlp.experts.{expert}"))));
                }
            }
            "gpt_oss" => {
                tensors.retain(|(tensor, _)| !tensor.starts_with(&name("mlp.")));
                let wide = 2 * EXPERT_SIZE;
                let own = [
                    ("self_attn.q_proj.bias", vec![64]),
                    ("self_attn.k_proj.bias", vec![32]),
                    ("self_attn.v_proj.bias", vec![32]),
                    ("self_attn.o_proj.bias", vec![HIDDEN_SIZE]),
                    ("self_attn.sinks", vec![4]),
                    ("mlp.router.weight", vec![8, HIDDEN_SIZE]),
                    ("mlp.router.bias", vec![8]),
                    ("mlp.experts.gate_up_proj", vec![8, HIDDEN_SIZE, wide]),
                    ("mlp.experts.gate_up_proj_bias", vec![8, wide]),
                    ("mlp.experts.down_proj", vec![8, EXPERT_SIZE, HIDDEN_SIZE]),
                    ("mlp.experts.down_proj_bias", vec![8, HIDDEN_SIZE]),
                ];
                tensors.extend(own.map(|(part, shape)| (name(part), shape)));
            }
            "qwen3_5" | "qwen3_5_moe" if layer == 1 => {
                tensors.retain(|(tensor, _)| *tensor != name("self_attn.q_proj.weight"));
                tensors.push((name("self_attn.q_proj.weight"), vec![2 * 64, HIDDEN_SIZE]));
            }
            "qwen3_5" | "qwen3_5_moe" => {
                tensors.retain(|(tensor, _)| !tensor.starts_with(&name("self_attn.")));
                let own = [
                    ("in_proj_qkv.weight", vec![2 * 32 + 128, HIDDEN_SIZE]),
                    ("in_proj_z.weight", vec![128, HIDDEN_SIZE]),
                    ("in_proj_a.weight", vec![4, HIDDEN_SIZE]),
                    ("in_proj_b.weight", vec![4, HIDDEN_SIZE]),
                    ("conv1d.weight", vec![2 * 32 + 128, 1, 4]),
                    ("A_log", vec![4]),
                    ("dt_bias", vec![4]),
                    ("norm.weight", vec![32]),
                    ("out_proj.weight", vec![HIDDEN_SIZE, 128]),
                ];
                tensors.extend(own.map(|(part, shape)| (name(&format!("linear_attn.{part}")), shape)));
            }
            "phi3" => {
                let parts = [".q_proj", ".k_proj", ".v_proj", ".gate_proj", ".up_proj"];
                tensors.retain(|(tensor, _)| !parts.iter().any(|part| tensor.contains(part)));
                tensors.push((name("self_attn.qkv_proj.weight"), vec![64 + 2 * 32, HIDDEN_SIZE]));
                tensors.push((name("mlp.gate_up_proj.weight"), vec![2 * INTERMEDIATE_SIZE, HIDDEN_SIZE]));
            }
            _ => {}
        }
    }
    if model_type == "qwen3_5_moe" {
        tensors.retain(|(tensor, _)| !tensor.contains(".mlp."));
        for layer in 0..4 {
            let name = |part: &str| format!("model.layers.{layer}.mlp.{part}");
            tensors.push((name("gate.weight"), vec![8, HIDDEN_SIZE]));
            tensors.push((name("experts.gate_up_proj"), vec![8, 2 * EXPERT_SIZE, HIDDEN_SIZE]));
            tensors.push((name("experts.down_proj"), vec![8, HIDDEN_SIZE, EXPERT_SIZE]));
            tensors.extend(expert_mlp(&name("shared_expert")));
            tensors.push((name("shared_expert_gate.weight"), vec![1, HIDDEN_SIZE]));
        }
    }
    if model_type.starts_with("qwen3_5") {
        (config, tensors) = within_multimodal_model(&config, tensors);
    }
    write_model(dir, &config, &tensors);
    copy_tiny_tokenizer(dir);
}

/// Tensors of the MLP `name` of an expert.
fn expert_mlp(name: &str) -> [(String, Vec<usize>); 3] {
    let [wide, narrow] = [vec![EXPERT_SIZE, HIDDEN_SIZE], vec![HIDDEN_SIZE, EXPERT_SIZE]];
    [("gate", wide.clone()), ("up", wide), ("down", narrow)]
        .map(|(part, shape)| (format!("{name}.{part}_proj.weight"), shape))
}

/// Config and tensors of a multimodal Qwen3.5 with this language model. The other parts are stubs.
fn within_multimodal_model(
    text: &Value,
    mut tensors: Vec<(String, Vec<usize>)>,
) -> (Value, Vec<(String, Vec<usize>)>) {
    for (name, _) in &mut tensors {
        if let Some(own) = name.strip_prefix("model.") {
            *name = format!("model.language_model.{own}");
        }
    }
    tensors.push(("model.visual.patch_embed.proj.weight".into(), vec![8, 8]));
    tensors.push(("mtp.fc.weight".into(), vec![HIDDEN_SIZE, 2 * HIDDEN_SIZE]));
    let mut inner = text.clone();
    inner["model_type"] = json!(format!("{}_text", text["model_type"].as_str().unwrap_or_default()));
    let config = json!({
        "architectures": text["architectures"], "model_type": text["model_type"], "tie_word_embeddings": false,
        "eos_token_id": text["eos_token_id"], "text_config": inner, "vision_config": {"hidden_size": 8},
    });
    (config, tensors)
}

/// Copies tokenizer and template of the embedded target.
fn copy_tiny_tokenizer(dir: &Path) {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-target");
    for (name, bytes) in folder::files(&target) {
        if name.starts_with("tokenizer") || name.contains("template") {
            fs::write(dir.join(&name), bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }
}

/// Writes a random Qwen3 of two layers to `dir`, without a tokenizer. Its vocabulary of `tokens` is
/// small enough to compute exact distributions of its outputs.
pub fn qwen3(dir: &Path, tokens: usize) {
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN_SIZE, "intermediate_size": INTERMEDIATE_SIZE, "vocab_size": tokens, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
        "tie_word_embeddings": false,
    });
    write_model(dir, &config, &pre_norm_tensors(2, tokens, true));
}

/// Tensors of layers with 4 query heads and 2 key/value heads of size 16, embedding and head.
fn pre_norm_tensors(layers: usize, tokens: usize, qk_norm: bool) -> Vec<(String, Vec<usize>)> {
    let (dim, queries, keys) = (16, 4 * 16, 2 * 16);
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_string(), vec![tokens, HIDDEN_SIZE]),
        ("model.norm.weight".into(), vec![HIDDEN_SIZE]),
        ("lm_head.weight".into(), vec![tokens, HIDDEN_SIZE]),
    ];
    for layer in 0..layers {
        let parts = [
            ("self_attn.q_proj", vec![queries, HIDDEN_SIZE]),
            ("self_attn.k_proj", vec![keys, HIDDEN_SIZE]),
            ("self_attn.v_proj", vec![keys, HIDDEN_SIZE]),
            ("self_attn.o_proj", vec![HIDDEN_SIZE, queries]),
            ("mlp.gate_proj", vec![INTERMEDIATE_SIZE, HIDDEN_SIZE]),
            ("mlp.up_proj", vec![INTERMEDIATE_SIZE, HIDDEN_SIZE]),
            ("mlp.down_proj", vec![HIDDEN_SIZE, INTERMEDIATE_SIZE]),
            ("input_layernorm", vec![HIDDEN_SIZE]),
            ("post_attention_layernorm", vec![HIDDEN_SIZE]),
        ];
        let norms = ["self_attn.q_norm", "self_attn.k_norm"].map(|name| (name, vec![dim]));
        let parts = parts.into_iter().chain(norms.into_iter().filter(|_| qk_norm));
        tensors.extend(parts.map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape)));
    }
    tensors
}

/// Copies the model in `from` to the folder `dir` and marks its tokens `<think>` and `</think>` as
/// special, as in other families. Its outputs do not change.
///
/// # Panics
/// Panics if copying fails, or if there are no such tokens.
pub fn with_special_think_tags(from: &Path, dir: &Path) {
    for (name, bytes) in folder::files(from) {
        let bytes = if name == "tokenizer.json" { mark_think_tags_special(&bytes) } else { bytes };
        fs::write(dir.join(&name), bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

fn mark_think_tags_special(tokenizer: &[u8]) -> Vec<u8> {
    let mut tokenizer: Value = serde_json::from_slice(tokenizer).expect("a tokenizer");
    let tokens = tokenizer["added_tokens"].as_array_mut().expect("a list of tokens");
    let fences: Vec<&mut Value> = tokens
        .iter_mut()
        .filter(|token| token["content"] == "<think>" || token["content"] == "</think>")
        .collect();
    assert_eq!(fences.len(), 2);
    fences.into_iter().for_each(|token| token["special"] = json!(true));
    tokenizer.to_string().into_bytes()
}

/// Writes the config and random weights that preserve the scale of activations. Each tensor is
/// determined by its name.
fn write_model(dir: &Path, config: &Value, tensors: &[(String, Vec<usize>)]) {
    let data: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(name, shape)| {
            let stream = Stream::new(11, name);
            // Uniform numbers: unit variance per output for matrices, around 1 for norms and
            // scalars.
            let (middle, reach) = match shape.as_slice() {
                [_, 1, taps] => (0.0, (3.0 / *taps as f64).sqrt()),
                // States of linear attention forget within some tokens, so that greedy answers can be learned.
                [_] if name.ends_with("A_log") => (0.0, 0.8),
                // Biases are around 0.
                _ if name.ends_with("bias") && !name.contains("self_attn") => (0.0, 0.5),
                [_, inputs, _] => (0.0, (3.0 / *inputs as f64).sqrt()),
                // The norms of queries and keys are smaller, because attention scores are not
                // scaled otherwise.
                [_] if name.contains("self_attn") => (0.4, 0.1),
                [_] => (1.0, 0.4),
                _ if name.contains("embed") => (0.0, 0.5),
                [_, inputs] => (0.0, (3.0 / *inputs as f64).sqrt()),
                other => panic!("{name}: no rule for {other:?}"),
            };
            let value = |lane| middle + reach * (2.0 * stream.uniform(0, Purpose::Init, lane) - 1.0);
            (0..shape.iter().product::<usize>())
                .flat_map(|i| (value(i as u64) as f32).to_le_bytes())
                .collect()
        })
        .collect();
    let views = tensors.iter().zip(&data).map(|((name, shape), data)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), data);
        (name.as_str(), view.unwrap_or_else(|error| panic!("{name}: {error}")))
    });
    let bytes = safetensors::serialize(views, None).unwrap_or_else(|error| panic!("{error}"));
    for (file, content) in [("config.json", config.to_string().into_bytes()), ("model.safetensors", bytes)] {
        fs::write(dir.join(file), content).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    }
}
