//! Gemma 4 (dense text part). Most layers have a sliding window. The remaining layers have full attention and wider
//! heads.

use deepspec_checkpoint::{ATTENTION_SINK_BIAS, DecoderFamily, Fields};
use deepspec_text::ChatFormat;
use serde_json::{Map, Value as Json, json};

use super::{draft, rope};
use crate::ModelError;
use crate::config::{DraftLayers, ModelConfig, TargetFamily, checked_heads, layer_count, sliding_layers};
use crate::nn::{Activation, AttentionSpec, Heads, LayerSpec, NormPlacement, NormWeight, ValueSource};

/// Without `layer_types`, every sixth layer has full attention.
const FULL_LAYER_INTERVAL: usize = 6;

/// The text part of Gemma 4, dense.
pub(super) const FAMILY: TargetFamily = TargetFamily {
    decoder: &DECODER,
    classes: &[
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
    ],
    read,
    fused: None,
    drafts: DraftLayers::Own {
        config: draft_config,
        refuse_windows: |windows| {
            let last = windows.last().is_some_and(Option::is_some);
            last.then_some(
                "layer_types: the last layer of a Gemma 4 model has no window; make the last one full_attention",
            )
        },
        blocks: None,
    },
    chat: Some(ChatFormat {
        name: "gemma4",
        assistant_header: "<|turn>model\n",
        end_of_turn: "<turn|>\n",
        default_system: None,
        assistant_prefix: Some("<|channel>thought\n<channel|>"),
        channels: None,
    }),
    shapes: &[("google/gemma-4-12B-it", include_str!("../../../../configs/shapes/gemma4_12b.json"))],
};

static DECODER: DecoderFamily = DecoderFamily {
    name: "Gemma 4",
    prefix: "Gemma4",
    model_types: &["gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"],
    pre_norm: false,
    qk_norm: true,
    // No other tool has drafters with such layers.
    defaults: Vec::new,
};

/// Reads the config of a Gemma 4 model: of the multimodal model, which has a `text_config`, or of the text part alone.
///
/// # Errors
/// As [`ModelConfig::load`].
fn read(outer: &Fields) -> Result<ModelConfig, ModelError> {
    let text = outer.object("text_config")?;
    let fields = text.as_ref().unwrap_or(outer);
    let unified = fields
        .text("model_type")?
        .or(outer.text("model_type")?)
        .is_some_and(|model_type| model_type.starts_with("gemma4_unified"));
    refuse_unsupported(fields, unified)?;
    let size = |key: &str| fields.size(key).and_then(|value| fields.required(key, value));
    let (hidden_size, query) = (size("hidden_size")?, size("num_attention_heads")?);
    let local = Heads {
        query,
        key_value: size("num_key_value_heads")?,
        dim: fields.size("head_dim")?.unwrap_or(256),
    };
    let local = checked_heads(fields, "num_key_value_heads", "head_dim", local)?;
    let shares_key = fields.flag("attention_k_eq_v")?.unwrap_or(false);
    let global_kv = fields.size("num_global_key_value_heads")?.filter(|_| shares_key);
    let global = Heads {
        query,
        key_value: global_kv.unwrap_or(local.key_value),
        dim: fields.size("global_head_dim")?.unwrap_or(512),
    };
    let window = fields.size::<i64>("sliding_window")?.unwrap_or(if unified { 1024 } else { 512 }) as usize;
    let trained_for = fields.size::<i64>("max_position_embeddings")?.unwrap_or(131_072) as usize;
    let eps = fields.number("rms_norm_eps")?.unwrap_or(1e-6);

    let ropes = rope::RopeByLayerType::new(fields, trained_for)?;
    let overrides = fields.object("per_layer_config")?;
    let intermediate_size = size("intermediate_size")?;
    let layer = |(index, full): (usize, bool)| {
        let heads = match &overrides {
            Some(overrides) => heads_of_layer(overrides, index, local)?,
            None if full => checked_heads(fields, "num_global_key_value_heads", "global_head_dim", global)?,
            None => local,
        };
        let (window, value, rope) = match (full, shares_key) {
            (true, true) => (None, ValueSource::SharesKey, ropes.full(heads.dim)?),
            (true, false) => (None, ValueSource::Normed, ropes.full(heads.dim)?),
            (false, _) => (Some(window), ValueSource::Normed, ropes.sliding(heads.dim)?),
        };
        Ok(LayerSpec {
            hidden_size,
            intermediate_size,
            experts: None,
            gated_delta: None,
            output_gate: false,
            attention: AttentionSpec { heads, scale: 1.0, window, sinks: false },
            rope,
            value,
            norms: NormPlacement::Sandwich,
            qk_norm: true,
            qkv_bias: false,
            output_bias: false,
            sinks_name: ATTENTION_SINK_BIAS,
            norm_weight: NormWeight::Plain,
            residual_scale: 1.0,
            eps,
            activation: Activation::GeluTanh,
            scaled: true,
        })
    };
    let full = full_attention_layers(fields, layer_count(fields)?)?;
    let tied = match outer.flag("tie_word_embeddings")? {
        Some(tied) => tied,
        None => fields.flag("tie_word_embeddings")?.unwrap_or(true),
    };
    let softcap = fields.number("final_logit_softcapping")?;
    if let Some(cap) = softcap.filter(|cap| *cap <= 0.0) {
        return Err(fields.error("final_logit_softcapping", format!("{cap} is not positive")).into());
    }
    Ok(ModelConfig {
        family: &FAMILY,
        hidden_size,
        vocab_size: size("vocab_size")?,
        rms_norm_eps: eps,
        max_position_embeddings: trained_for,
        tie_word_embeddings: tied,
        initializer_range: fields.number("initializer_range")?.unwrap_or(0.02),
        norm_weight: NormWeight::Plain,
        embed_scale: (hidden_size as f64).sqrt(),
        logit_scale: 1.0,
        logit_softcap: softcap,
        has_forward: true,
        layers: full.into_iter().enumerate().map(layer).collect::<Result<_, ModelError>>()?,
        raw: Map::new(),
    })
}

/// Refuses features of other Gemma 4 models that are not supported.
fn refuse_unsupported(fields: &Fields, unified: bool) -> Result<(), ModelError> {
    fields.require_text_if_present("hidden_activation", "gelu_pytorch_tanh")?;
    fields.refuse_if_on("attention_bias", "biases in attention are not supported")?;
    fields.refuse_if_on("enable_moe_block", "mixtures of experts are not supported")?;
    // Only the plain family has per-layer embeddings, and there they are the default.
    let per_layer = fields.count("hidden_size_per_layer_input")?.unwrap_or(if unified { 0 } else { 256 });
    if per_layer > 0 {
        let problem = format!("{per_layer}: embeddings per layer are not supported; expected 0");
        return Err(fields.error("hidden_size_per_layer_input", problem).into());
    }
    if let Some(shared) = fields.count("num_kv_shared_layers")?.filter(|&shared| shared > 0) {
        let problem =
            format!("{shared}: layers that share keys and values with others are not supported; expected 0");
        return Err(fields.error("num_kv_shared_layers", problem).into());
    }
    // "vision" changes the attention of image tokens only, and a text has none.
    match fields.text("use_bidirectional_attention")? {
        None | Some("vision") => Ok(()),
        Some(other) => {
            let problem = format!("\"{other}\" is not supported; expected \"vision\" or null");
            Err(fields.error("use_bidirectional_attention", problem).into())
        }
    }
}

/// Whether each layer has full attention; the last layer always has it.
fn full_attention_layers(fields: &Fields, layers: usize) -> Result<Vec<bool>, ModelError> {
    let mut full: Vec<bool> = match sliding_layers(fields, layers)? {
        None => (1..=layers).map(|number| number % FULL_LAYER_INTERVAL == 0).collect(),
        Some(sliding) => sliding.into_iter().map(|sliding| !sliding).collect(),
    };
    if let Some(last) = full.last_mut() {
        *last = true;
    }
    Ok(full)
}

/// The heads of layer `index`: `common`, unless `overrides` (`per_layer_config`) changes them.
fn heads_of_layer(overrides: &Fields, index: usize, common: Heads) -> Result<Heads, ModelError> {
    let Some(own) = overrides.object(&index.to_string())? else { return Ok(common) };
    if let Some(key) = own.map.keys().find(|key| !["head_dim", "num_key_value_heads"].contains(&key.as_str()))
    {
        return Err(own
            .error(key, "a layer's own value is supported for head_dim and num_key_value_heads only")
            .into());
    }
    let heads = Heads {
        query: common.query,
        key_value: own.size("num_key_value_heads")?.unwrap_or(common.key_value),
        dim: own.size("head_dim")?.unwrap_or(common.dim),
    };
    checked_heads(&own, "num_key_value_heads", "head_dim", heads)
}

/// Settings of the text part. Defaults that depend on the kind of the Gemma 4 model are written out.
fn draft_config(target: &Map<String, Json>, layers: &[LayerSpec]) -> Map<String, Json> {
    let text = target.get("text_config").and_then(Json::as_object).unwrap_or(target);
    let mut map = text.clone();
    let types = [("target_model_type", target), ("target_text_model_type", text)];
    for (key, from) in types {
        if let Some(model_type) = from.get("model_type") {
            map.insert(key.into(), model_type.clone());
        }
    }
    map.remove("per_layer_config");
    map.insert("model_type".into(), json!("gemma4_text"));
    map.insert("enable_moe_block".into(), json!(false));
    map.insert("hidden_size_per_layer_input".into(), json!(0));
    map.insert("num_kv_shared_layers".into(), json!(0));
    for LayerSpec { attention, value, .. } in layers {
        let heads = attention.heads;
        let (dim, key_value) = match (attention.window, value) {
            (None, ValueSource::SharesKey) => ("global_head_dim", "num_global_key_value_heads"),
            (None, _) => ("global_head_dim", "num_key_value_heads"),
            (Some(_), _) => ("head_dim", "num_key_value_heads"),
        };
        map.insert(dim.into(), json!(heads.dim));
        map.insert(key_value.into(), json!(heads.key_value));
    }
    draft::set_layer_keys(&mut map, layers);
    map
}
