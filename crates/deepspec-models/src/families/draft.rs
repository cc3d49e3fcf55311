//! Decoders of drafters, made for a target.

use std::path::Path;

use deepspec_checkpoint::{
    ADD_SWA_ATTENTION_SINK_BIAS, ATTENTION_SINK_BIAS, EXPERTS_KEY, Fields, OUTPUT_GATE_KEY,
};
use deepspec_core::cli::UsageError;
use serde_json::{Value, json};

use super::{llama, qwen3, rope};
use crate::config::{DraftLayers, FULL_LAYER_TYPE, Family, RawConfig, SLIDING_LAYER_TYPE};
use crate::nn::{AttentionSpec, Heads, LayerSpec, Scaling, Yarn};
use crate::{ModelConfig, ModelError};

/// Keys that the config of a drafter with another family's layers takes over from the target's.
const TOKEN_KEYS: [&str; 3] = ["bos_token_id", "eos_token_id", "pad_token_id"];

/// Width of a draft layer's heads for targets with gated heads of twice this width.
const GATED_DRAFT_HEAD_DIM: i64 = 128;

impl ModelConfig {
    /// Whether drafters for this target may have layers of `family`. Llama's and Qwen3's layers draft for each other's targets: most
    /// public Eagle3 drafters have Llama's.
    pub fn accepts_drafters_of(&self, family: Family) -> bool {
        let is_declared = match self.family.drafts {
            DraftLayers::Own { blocks, .. } => self.family == family || blocks == Some(family),
            DraftLayers::Other { blocks, tokens, own_mtp } => {
                blocks == family || tokens == family || own_mtp && self.family == family
            }
        };
        let is_usual = family == &qwen3::FAMILY || family == &llama::FAMILY;
        is_declared || self.family.decoder.pre_norm && is_usual
    }

    /// The decoder of a block drafter, like [`ModelConfig::draft_decoder`]. If no inference engine runs block
    /// drafters of this family, the layers are those of another family, with equal sizes and rotary settings.
    ///
    /// # Errors
    /// As [`ModelConfig::draft_decoder`].
    pub fn anchored_decoder(&self, windows: &[Option<usize>]) -> Result<Self, ModelError> {
        let family = match self.family.drafts {
            DraftLayers::Own { blocks: None, .. } => return self.draft_decoder(windows),
            DraftLayers::Own { blocks: Some(family), .. } => family,
            DraftLayers::Other { blocks, .. } => return self.with_layers_of(blocks)?.draft_decoder(windows),
        };
        let qk_norm = family.decoder.qk_norm;
        let layers = self.layers.iter().map(|own| LayerSpec { qk_norm, ..own.clone() }).collect();
        let mut decoder = Self { family, layers, ..self.clone() }.draft_decoder(windows)?;
        // Families have different defaults for missing keys, so the config of another family names them.
        if let Some(layer) = decoder.layers.first() {
            let heads = layer.attention.heads;
            decoder.raw.insert("head_dim".into(), json!(heads.dim));
            decoder.raw.insert("num_key_value_heads".into(), json!(heads.key_value));
        }
        Ok(decoder)
    }

    /// The decoder of a drafter for this target, one layer per entry of `windows`. Layers with a window are built like the target's
    /// sliding-window layers, and layers without one like its full-attention layers.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] for layers that the target's family cannot have.
    pub fn draft_decoder(&self, windows: &[Option<usize>]) -> Result<Self, ModelError> {
        let misfit = |problem: &str| ModelError::Mismatch(UsageError(problem.into()));
        let (config, refuse_windows) = match self.family.drafts {
            DraftLayers::Own { config, refuse_windows, .. } => (config, refuse_windows),
            DraftLayers::Other { tokens, .. } => return self.with_layers_of(tokens)?.draft_decoder(windows),
        };
        let mut sizes = windows.iter().flatten();
        if let Some(first) = sizes.next()
            && sizes.any(|window| window != first)
        {
            return Err(misfit("draft layers with windows must share one size"));
        }
        if let Some(problem) = refuse_windows(windows) {
            return Err(misfit(problem));
        }
        let layer = |&window: &Option<usize>| {
            let like = |own: &&LayerSpec| own.attention.window.is_some() == window.is_some();
            // A target may have layers of one kind only. They are then the same with and without a window.
            let own = self.layers.iter().find(like).or(self.layers.first());
            let own = own.ok_or_else(|| misfit("the target has no layers"))?;
            Ok(LayerSpec {
                attention: AttentionSpec { window, sinks: false, ..own.attention },
                ..own.clone()
            })
        };
        let layers = windows.iter().map(layer).collect::<Result<Vec<_>, ModelError>>()?;
        // The config of a target without a family here describes its drafters, which read embeddings as they are stored.
        let embed_scale = if self.has_forward { self.embed_scale } else { 1.0 };
        let mut raw = config(&self.raw, &layers);
        raw.retain(|key, _| ![ATTENTION_SINK_BIAS, ADD_SWA_ATTENTION_SINK_BIAS].contains(&key.as_str()));
        Ok(Self { raw, layers, embed_scale, ..self.clone() })
    }

    /// Whether checkpoints of the family store an MTP layer of the family's own layers.
    pub fn stores_mtp(&self) -> bool {
        matches!(self.family.drafts, DraftLayers::Other { own_mtp: true, .. })
    }

    /// The decoder of an MTP drafter, which has one layer with full attention. It is the target's own layer where the family's
    /// checkpoints store MTP layers (Qwen3.5, and Qwen3.5-MoE with its experts), and else that of [`ModelConfig::draft_decoder`].
    ///
    /// # Errors
    /// As [`ModelConfig::draft_decoder`].
    pub fn mtp_decoder(&self) -> Result<Self, ModelError> {
        if !self.stores_mtp() {
            return self.draft_decoder(&[None]);
        }
        let mut full = self.layers.iter().filter(|layer| layer.gated_delta.is_none());
        let Some(layer) = full.next() else {
            return Err(ModelError::Mismatch(UsageError(
                "the target has no layer with full attention".into(),
            )));
        };
        let text = self.raw.get("text_config").and_then(Value::as_object).unwrap_or(&self.raw);
        let mut raw = text.clone();
        raw.insert("model_type".into(), json!(self.family.decoder.model_types[1]));
        // Defaults of the family, and a key with two names, which readers of other tensors than the layer's need to know.
        raw.insert(OUTPUT_GATE_KEY.into(), json!(layer.output_gate));
        if let Some(experts) = layer.experts {
            raw.insert(EXPERTS_KEY.into(), json!(experts.count));
        }
        set_layer_keys(&mut raw, std::slice::from_ref(layer));
        Ok(Self { raw, layers: vec![layer.clone()], ..self.clone() })
    }

    /// The decoder with attention sinks in all layers; None if layers of this family have none.
    pub fn with_attention_sinks(mut self) -> Option<Self> {
        self.family.decoder.pre_norm.then_some(())?;
        self.layers.iter_mut().for_each(|layer| layer.attention.sinks = true);
        for key in [ATTENTION_SINK_BIAS, ADD_SWA_ATTENTION_SINK_BIAS] {
            self.raw.insert(key.into(), true.into());
        }
        Some(self)
    }

    /// A model of this target's sizes and rotary settings with layers of `family`. It has no biases, windows and
    /// multipliers. Drafters read embeddings as they are stored, because engines give them no factor.
    fn with_layers_of(&self, family: Family) -> Result<Self, ModelError> {
        let full = self.layers.iter().find(|layer| layer.attention.window.is_none());
        let Some(layer) = full.or(self.layers.first()) else {
            return Err(ModelError::Mismatch(UsageError("the target has no layers".into())));
        };
        let heads = plain_heads(layer);
        let keys = json!({
            "model_type": family.decoder.model_types[0],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": layer.intermediate_size,
            "num_hidden_layers": self.layers.len(),
            "num_attention_heads": heads.query,
            "num_key_value_heads": heads.key_value,
            "head_dim": heads.dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "initializer_range": self.initializer_range,
            "tie_word_embeddings": self.tie_word_embeddings,
            "hidden_act": "silu",
            "attention_bias": false,
            "rope_theta": layer.rope.theta,
        });
        let Value::Object(mut raw) = keys else { unreachable!("an object") };
        if let Some(scaling) = scaling_json(layer.rope.scaling) {
            raw.insert("rope_scaling".into(), scaling);
        }
        let text = self.raw.get("text_config").and_then(Value::as_object);
        for key in TOKEN_KEYS {
            let found = text.and_then(|text| text.get(key)).or(self.raw.get(key));
            if let Some(value) = found.filter(|value| !value.is_null()) {
                raw.insert(key.into(), value.clone());
            }
        }
        let config = (family.read)(&Fields::new(Path::new("config.json"), &raw))?;
        Ok(Self { raw, ..config })
    }
}

/// Heads of a plain draft layer. The wide heads of Qwen3.5, of which a part rotates, become twice as many of half the
/// width: published drafters for it have heads of 128, as engines run them fastest.
fn plain_heads(layer: &LayerSpec) -> Heads {
    let Heads { query, key_value, dim } = layer.attention.heads;
    let parts = if layer.output_gate && dim == 2 * GATED_DRAFT_HEAD_DIM { 2 } else { 1 };
    Heads { query: parts * query, key_value: parts * key_value, dim: dim / parts }
}

/// `rope_scaling` of a config.json; None without scaling. Settings that rotate a part of each head have no key in
/// other families, and are left out.
fn scaling_json(scaling: Scaling) -> Option<Value> {
    match scaling {
        Scaling::None | Scaling::Proportional { .. } => None,
        Scaling::Linear { factor } => Some(json!({"rope_type": "linear", "factor": factor})),
        Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => Some(json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor, "original_max_position_embeddings": original,
        })),
        Scaling::Yarn(Yarn { factor, attention_factor, beta_fast, beta_slow, original, truncate }) => {
            let mut settings = json!({
                "rope_type": "yarn", "factor": factor, "beta_fast": beta_fast, "beta_slow": beta_slow,
                "original_max_position_embeddings": original, "truncate": truncate,
            });
            // Engines read this key otherwise than transformers, but have the same default.
            if attention_factor != rope::default_attention_factor(factor) {
                settings["attention_factor"] = json!(attention_factor);
            }
            Some(settings)
        }
    }
}

/// Sets `layer_types`, `num_hidden_layers` and `sliding_window`.
pub(super) fn set_layer_keys(map: &mut RawConfig, layers: &[LayerSpec]) {
    let types = layers
        .iter()
        .map(|layer| if layer.attention.window.is_some() { SLIDING_LAYER_TYPE } else { FULL_LAYER_TYPE });
    map.insert("layer_types".into(), types.collect());
    map.insert("num_hidden_layers".into(), json!(layers.len()));
    if let Some(window) = layers.iter().find_map(|layer| layer.attention.window) {
        map.insert("sliding_window".into(), json!(window));
    }
}
