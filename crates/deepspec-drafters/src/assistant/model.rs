//! The network of an assistant: config, weights, and one step of drafting.
//!
//! `pre_projection` maps `[target's embedding of the token ; state]` to the assistant's width. After the layers and the norm,
//! a head of the assistant's own predicts the next token, and `post_projection` makes the next state.

use std::path::Path;

use deepspec_checkpoint::Fields;
use deepspec_core::Tap;
use deepspec_core::cli::UsageError;
use deepspec_models::config::read_json;
use deepspec_models::nn::{
    AttentionSpec, Builder, DecoderLayer, EmbedHead, Heads, LayerSpec, Linear, Qkv, RmsNorm,
    RotaryEmbeddings, Rotations, StateDict, Weight,
};
use deepspec_models::{KeyValueLayer, ModelConfig, ModelError, Weights, load_embed_and_head};
use deepspec_ops::linear;
use serde_json::json;
use tch::{Device, Kind, Tensor};

/// Name of the embedding, which is the head too if they are tied.
const EMBED_KEY: &str = "model.embed_tokens.weight";
/// Name of the head.
const HEAD_KEY: &str = "lm_head.weight";

/// Sizes and layers of an assistant.
#[derive(Clone)]
struct AssistantConfig {
    /// The assistant's layers, with the head counts of the target's keys and values.
    model: ModelConfig,
    /// d, hidden size of the target.
    backbone_hidden_size: i64,
    /// Whether the embedding is the head.
    is_tied: bool,
}

/// A layer of the target whose keys and values the assistant reads.
#[derive(Clone)]
struct KeySource {
    /// Index of the target's layer.
    layer: usize,
    /// The target's layer.
    spec: LayerSpec,
    /// Attention of the assistant's queries to its keys.
    attention: AttentionSpec,
}

impl AssistantConfig {
    /// Reads config.json in `dir`.
    ///
    /// # Errors
    /// If a key is missing, has a wrong type, or names a feature that is not supported.
    fn load(dir: &Path) -> Result<Self, ModelError> {
        let (path, raw) = read_json(dir)?;
        let fields = Fields::new(&path, &raw);
        let problem = "heads of centroids, which assistants of E2B and E4B have, are not supported";
        fields.refuse_if_on("use_ordered_embeddings", problem)?;
        let text = fields.required_object("text_config")?;
        let (layers, shared) =
            (text.required_size("num_hidden_layers")?, text.count("num_kv_shared_layers")?);
        if let Some(shared) = shared.filter(|shared| ![0, layers].contains(shared)) {
            let problem = format!("{shared}; expected all {layers} layers of an assistant");
            return Err(text.error("num_kv_shared_layers", problem).into());
        }
        // A layer of a target has keys of its own.
        let mut own = text.map.clone();
        own.insert("num_kv_shared_layers".into(), json!(0));
        let backbone_hidden_size = fields.required_size("backbone_hidden_size")?;
        let is_tied = fields.flag("tie_word_embeddings")?.unwrap_or(true);
        Ok(Self { model: ModelConfig::parse(&path, own)?, backbone_hidden_size, is_tied })
    }

    /// The target's layers whose keys and values the assistant reads: the last one of each attention type. Layers ascend.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] with all that differs.
    fn key_sources(&self, target: &ModelConfig) -> Result<Vec<KeySource>, ModelError> {
        let Self { model, backbone_hidden_size, .. } = self;
        if target.family.decoder.name != model.family.decoder.name {
            let (own, theirs) = (model.family, target.family);
            let problem = format!(
                "the assistant does not belong to this target: it is one of {own}, the target is {theirs}"
            );
            return Err(ModelError::Mismatch(UsageError(problem)));
        }
        let mut differences = vec![];
        let mut compare = |what: &str, own: i64, theirs: i64| {
            let differs = || format!("{what} {theirs}, the assistant was trained for {own}");
            differences.extend((own != theirs).then(differs));
        };
        compare("hidden_size", *backbone_hidden_size, target.hidden_size);
        compare("vocab_size", model.vocab_size, target.vocab_size);
        let is_sliding = |layer: &LayerSpec| layer.attention.window.is_some();
        let (mut sources, mut missing) = (vec![], vec![]);
        for (sliding, name) in [(true, "sliding_attention"), (false, "full_attention")] {
            let mut layers = model.layers.iter().filter(|layer| is_sliding(layer) == sliding);
            let Some(own) = layers.next() else { continue };
            if layers.any(|other| other.attention != own.attention) {
                missing.push(format!("another number of heads in some layers of {name} of the assistant"));
            }
            let Some(layer) = target.layers.iter().rposition(|layer| is_sliding(layer) == sliding) else {
                missing.push(format!("no layer of {name}"));
                continue;
            };
            let (spec, attention) = (target.layers[layer].clone(), own.attention);
            let heads = |layer: &LayerSpec| layer.attention.heads;
            let (Heads { key_value, dim, .. }, theirs) = (attention.heads, heads(&spec));
            compare("num_key_value_heads", key_value, theirs.key_value);
            compare("head_dim", dim, theirs.dim);
            let window = |layer: &LayerSpec| layer.attention.window.unwrap_or(0) as i64;
            compare("sliding_window", window(own), window(&spec));
            // A query is one position behind the last key.
            let attention = AttentionSpec { window: attention.window.map(|window| window - 1), ..attention };
            sources.push(KeySource { layer, spec, attention });
        }
        differences.extend(missing);
        if !differences.is_empty() {
            let problem =
                format!("the assistant does not belong to this target: there is {}", differences.join("; "));
            return Err(ModelError::Mismatch(UsageError(problem)));
        }
        sources.sort_by_key(|source| source.layer);
        Ok(sources)
    }
}

/// Checks config.json in `dir` as [`Assistant::load`] does.
///
/// # Errors
/// As [`Assistant::load`].
pub(super) fn check_config(dir: &Path) -> Result<(), ModelError> {
    AssistantConfig::load(dir).map(drop)
}

/// An assistant with the parts of its target that it reads.
pub struct Assistant {
    config: AssistantConfig,
    sources: Vec<KeySource>,
    /// Index of the source whose keys each layer reads.
    source_of_layer: Vec<usize>,
    taps: Vec<Tap>,
    /// Keys and values of each source.
    keys_values: Vec<KeyValueLayer>,
    key_ropes: RotaryEmbeddings,
    target_embedding: EmbedHead,
    pre_projection: Linear,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    post_projection: Linear,
    head: Weight,
    query_ropes: RotaryEmbeddings,
    tensors: StateDict,
    target_tensors: StateDict,
    kind: Kind,
    device: Device,
}

impl Assistant {
    /// Loads the assistant in `dir`, and from the folder `target` the embedding and the layers whose keys it reads.
    ///
    /// # Errors
    /// If a config or a tensor is missing or does not fit, or if the assistant belongs to another target.
    pub fn load(dir: &Path, target: &Path, device: Device, kind: Kind) -> Result<Self, ModelError> {
        let (config, target_config) = (AssistantConfig::load(dir)?, ModelConfig::load(target)?);
        let sources = config.key_sources(&target_config)?;
        let weights = Weights::open(dir, "Gemma4Assistant", device, kind)?;
        weights.check_finite()?;
        let shape = [config.model.vocab_size, config.model.hidden_size];
        let head = Weight::Stored(weights.get(if config.is_tied { EMBED_KEY } else { HEAD_KEY }, &shape)?);
        let layers: Vec<usize> = sources.iter().map(|source| source.layer).collect();
        let target_tensors = KeyValueLayer::load(target, &target_config, &layers, device, kind)?;
        let (embed, _) = load_embed_and_head(target, &target_config, device, kind)?;
        let unused_head = Weight::Stored(embed.shallow_clone());
        let embedding = EmbedHead::new(embed, unused_head, target_config.embed_scale, None);
        let b = Builder::from_checkpoint(&weights).with_packing();
        let assistant =
            Self::build(config, sources, &b, head.pack(), target_tensors, embedding, (kind, device));
        b.check()?;
        let mut unread = weights.unread_names();
        // Some tools store a tied head under both names. An embedding has no other use.
        unread.retain(|name| ![EMBED_KEY, HEAD_KEY].contains(&name.as_str()));
        if unread.is_empty() {
            return Ok(assistant);
        }
        let problem = format!(
            "the config has no use for the tensors {}; config.json and weights do not belong together",
            unread.join(", ")
        );
        Err(ModelError::NotAModel { path: dir.to_path_buf(), problem })
    }

    fn build(
        config: AssistantConfig,
        sources: Vec<KeySource>,
        b: &Builder,
        head: Weight,
        target_tensors: StateDict,
        target_embedding: EmbedHead,
        (kind, device): (Kind, Device),
    ) -> Self {
        let AssistantConfig { model, backbone_hidden_size, .. } = &config;
        let (narrow, wide) = (model.hidden_size, *backbone_hidden_size);
        let of_target = Builder::from_state_dict(&target_tensors);
        let source = |source: &KeySource| KeyValueLayer::new(&of_target, source.layer, &source.spec);
        let specs: Vec<LayerSpec> = sources.iter().map(|source| source.spec.clone()).collect();
        let layer = |(i, spec): (usize, &LayerSpec)| {
            DecoderLayer::with_queries_only(b, &format!("model.layers.{i}"), spec)
        };
        let is_sliding = |attention: &AttentionSpec| attention.window.is_some();
        let source_of = |layer: &LayerSpec| {
            let sliding = is_sliding(&layer.attention);
            sources.iter().position(|source| is_sliding(&source.attention) == sliding)
        };
        Self {
            // `key_sources` finds one for every attention type.
            source_of_layer: model.layers.iter().filter_map(source_of).collect(),
            keys_values: sources.iter().map(source).collect(),
            key_ropes: RotaryEmbeddings::new(&specs, device),
            taps: sources.iter().map(|source| tap_before(source.layer)).collect(),
            pre_projection: Linear::new(b, "pre_projection", 2 * wide, narrow),
            layers: model.layers.iter().enumerate().map(layer).collect(),
            norm: RmsNorm::with_weight(b, "model.norm", narrow, model.rms_norm_eps, model.norm_weight),
            post_projection: Linear::new(b, "post_projection", narrow, wide),
            query_ropes: RotaryEmbeddings::new(&model.layers, device),
            tensors: b.take_state_dict(),
            head,
            target_tensors,
            target_embedding,
            sources,
            config,
            kind,
            device,
        }
    }

    /// A second assistant that shares all weights with this one.
    pub fn share(&self) -> Self {
        Self::build(
            self.config.clone(),
            self.sources.clone(),
            &Builder::from_state_dict(&self.tensors),
            self.head.share(),
            self.target_tensors.share(),
            self.target_embedding.share(),
            (self.kind, self.device),
        )
    }

    /// Checks that the assistant belongs to this target.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] with all that differs.
    pub fn check_fits(&self, target: &ModelConfig) -> Result<(), ModelError> {
        self.config.key_sources(target).map(drop)
    }

    /// Target layers whose outputs are the inputs of the layers whose keys are read.
    pub fn taps(&self) -> &[Tap] {
        &self.taps
    }

    /// d, hidden size of the target.
    pub fn backbone_hidden_size(&self) -> i64 {
        self.config.backbone_hidden_size
    }

    /// Attention of the queries to the keys of each source.
    pub(super) fn attention_specs(&self) -> Vec<AttentionSpec> {
        self.sources.iter().map(|source| source.attention).collect()
    }

    /// Dtype and device of the weights.
    pub(super) fn options(&self) -> (Kind, Device) {
        (self.kind, self.device)
    }

    /// Keys and values `[N, G, D]` of every source, from captured states `[N, m·d]` at `positions [N]`.
    pub(super) fn keys_values(&self, captured: &Tensor, positions: &Tensor) -> Vec<(Tensor, Tensor)> {
        let rotations = self.key_ropes.at(positions, self.kind);
        let inputs = captured.split(self.config.backbone_hidden_size, -1);
        let layers = self.keys_values.iter().zip(&inputs).enumerate();
        layers.map(|(i, (layer, input))| layer.project(input, rotations.layer(i))).collect()
    }

    /// Rotations of queries at `positions [S]`.
    pub(super) fn query_rotations(&self, positions: &Tensor) -> Rotations<'_> {
        self.query_ropes.at(positions, self.kind)
    }

    /// Drafts behind `tokens [S]` from the states `[S, d]` before them: float32 logits `[S, V]`, and the next states `[S, d]`. `attend`
    /// attends to the keys of a source, numbered as [`Assistant::taps`].
    ///
    /// Logits have no soft-cap, as in transformers. vLLM caps them, which does not change their order.
    pub(super) fn step(
        &self,
        tokens: &Tensor,
        states: &Tensor,
        rotations: &Rotations<'_>,
        attend: &mut dyn FnMut(usize, &Qkv) -> Tensor,
    ) -> (Tensor, Tensor) {
        let embeddings = self.target_embedding.embed(tokens);
        let mut x = self.pre_projection.forward(&Tensor::cat(&[&embeddings, states], -1)); // [S, h]
        for (i, layer) in self.layers.iter().enumerate() {
            let source = self.source_of_layer[i];
            x = layer.forward((&x).into(), rotations.layer(i), &mut |qkv: &Qkv| attend(source, qkv), None);
        }
        let x = self.norm.forward(&x);
        (linear(&x, &self.head, None).to_kind(Kind::Float), self.post_projection.forward(&x))
    }
}

/// The tap at the input of this layer.
fn tap_before(layer: usize) -> Tap {
    layer.checked_sub(1).map_or(Tap::Embedding, |before| Tap::Layer(before as u32))
}
