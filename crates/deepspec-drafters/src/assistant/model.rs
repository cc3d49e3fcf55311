//! The network of an assistant: config, weights, and one step of drafting.
//!
//! `pre_projection` maps `[target's embedding of the token ; state]` to the assistant's width. After the layers and the norm,
//! a head of the assistant's own predicts the next token, and `post_projection` makes the next state.

use std::path::Path;

use deepspec_core::Tap;
use deepspec_core::cli::UsageError;
use deepspec_models::nn::{
    AttentionSpec, Builder, DecoderLayer, EmbedHead, Init, LayerSpec, Linear, Qkv, RmsNorm, RotaryEmbeddings,
    Rotations, StateDict, Weight,
};
use deepspec_models::{KeyValueLayer, ModelConfig, ModelError, Weights, load_embed_and_head};
use deepspec_ops::{HOST, linear};
use tch::{Device, Kind, Tensor};

use super::config::{AssistantConfig, KeySource, is_own_end};

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
    /// The target's embedding. Its head is used in training only.
    target_ends: EmbedHead,
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
        let layers: Vec<usize> = sources.iter().map(|source| source.layer).collect();
        let target_tensors = KeyValueLayer::load(target, &target_config, &layers, device, kind)?;
        let (embed, _) = load_embed_and_head(target, &target_config, device, kind)?;
        let unused_head = Weight::Stored(embed.shallow_clone());
        let embedding = EmbedHead::new(embed, unused_head, target_config.embed_scale, None);
        let b = Builder::from_checkpoint(&weights).with_packing();
        let assistant = Self::build(config, sources, &b, target_tensors, embedding, (kind, device));
        b.check()?;
        let mut unread = weights.unread_names();
        unread.retain(|name| !is_own_end(name));
        if unread.is_empty() {
            return Ok(assistant);
        }
        let problem = format!(
            "the config has no use for the tensors {}; config.json and weights do not belong together",
            unread.join(", ")
        );
        Err(ModelError::NotAModel { path: dir.to_path_buf(), problem })
    }

    /// An assistant with random weights, beside random layers of its target: [`Assistant::load_target`] loads these. The target's
    /// embedding and head are shared.
    pub(super) fn fresh(
        config: AssistantConfig,
        sources: Vec<KeySource>,
        target_ends: EmbedHead,
        seed: u64,
        kind: Kind,
    ) -> Self {
        let device = target_ends.embed_tokens().device();
        let builder = || Builder::random_init(seed, config.model.initializer_range, device, kind);
        let of_target = Self::request_target_tensors(&builder(), &sources);
        let b = builder();
        Self::build(config, sources, &b, of_target, target_ends, (kind, device))
    }

    /// Names of the parameters, and meta tensors of their shapes.
    pub(super) fn meta_parameters(config: AssistantConfig, sources: Vec<KeySource>) -> StateDict {
        let none = Tensor::empty([0, config.backbone_hidden_size], (Kind::BFloat16, HOST));
        let of_target = Self::request_target_tensors(&Builder::meta(), &sources);
        let ends = EmbedHead::new(none.shallow_clone(), Weight::Stored(none), 1.0, None);
        Self::build(config, sources, &Builder::meta(), of_target, ends, (Kind::BFloat16, HOST)).tensors
    }

    fn request_target_tensors(b: &Builder, sources: &[KeySource]) -> StateDict {
        for source in sources {
            let _ = KeyValueLayer::new(b, source.layer, &source.spec);
        }
        b.take_state_dict()
    }

    fn build(
        config: AssistantConfig,
        sources: Vec<KeySource>,
        b: &Builder,
        target_tensors: StateDict,
        target_ends: EmbedHead,
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
        let head = b.linear_weight(config.head_key(), &[model.vocab_size, narrow], Init::Normal);
        let pre_projection = Linear::new(b, "pre_projection", 2 * wide, narrow);
        let layers: Vec<DecoderLayer> = model.layers.iter().enumerate().map(layer).collect();
        let norm = RmsNorm::with_weight(b, "model.norm", narrow, model.rms_norm_eps, model.norm_weight);
        let post_projection = Linear::new(b, "post_projection", narrow, wide);
        let mut tensors = b.take_state_dict();
        // LoRA's default targets leave the head out, as in PEFT.
        tensors.linear.retain(|name| name != config.head_key());
        Self {
            // `key_sources` finds one for every attention type.
            source_of_layer: model.layers.iter().filter_map(source_of).collect(),
            keys_values: sources.iter().map(source).collect(),
            key_ropes: RotaryEmbeddings::new(&specs, device),
            taps: sources.iter().map(KeySource::tap).collect(),
            query_ropes: RotaryEmbeddings::new(&model.layers, device),
            pre_projection,
            layers,
            norm,
            post_projection,
            head,
            tensors,
            target_tensors,
            target_ends,
            sources,
            config,
            kind,
            device,
        }
    }

    /// A second assistant that shares all weights with this one.
    pub fn share(&self) -> Self {
        self.rebuilt(&Builder::from_state_dict(&self.tensors))
    }

    /// A copy of the assistant for inference, with packed weights.
    pub(super) fn packed(&self) -> Self {
        self.rebuilt(&Builder::from_state_dict(&self.tensors).with_packing())
    }

    /// Shares the weights with an assistant whose queries rotate as in the layers of `like`.
    pub(super) fn share_with_rope_of(&self, like: &ModelConfig) -> Self {
        let mut config = self.config.clone();
        let turn = |(own, like): (&mut LayerSpec, &LayerSpec)| own.rope = like.rope;
        config.model.layers.iter_mut().zip(&like.layers).for_each(turn);
        self.rebuilt_as(config, &Builder::from_state_dict(&self.tensors))
    }

    fn rebuilt(&self, b: &Builder) -> Self {
        self.rebuilt_as(self.config.clone(), b)
    }

    fn rebuilt_as(&self, config: AssistantConfig, b: &Builder) -> Self {
        Self::build(
            config,
            self.sources.clone(),
            b,
            self.target_tensors.share(),
            self.target_ends.share(),
            (self.kind, self.device),
        )
    }

    /// Loads the weights of the target's layers whose keys are read, from the folder of the target.
    ///
    /// # Errors
    /// If a tensor is missing or of another shape.
    pub(super) fn load_target(&self, dir: &Path) -> Result<(), ModelError> {
        let _guard = tch::no_grad_guard();
        let target = ModelConfig::load_any(dir)?;
        let layers: Vec<usize> = self.sources.iter().map(|source| source.layer).collect();
        let found = KeyValueLayer::load(dir, &target, &layers, self.device, self.kind)?;
        for (name, tensor) in found.all_tensors() {
            let Some((_, own)) = self.target_tensors.parameters.iter().find(|(own, _)| *own == name) else {
                let problem = format!("{}: the assistant reads no `{name}` of its target", dir.display());
                return Err(ModelError::Mismatch(UsageError(problem)));
            };
            own.shallow_clone().copy_(&tensor);
        }
        Ok(())
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
    pub(super) fn step(
        &self,
        tokens: &Tensor,
        states: &Tensor,
        rotations: &Rotations<'_>,
        attend: &mut dyn FnMut(usize, &Qkv) -> Tensor,
    ) -> (Tensor, Tensor) {
        let x = self.hidden(tokens, states, rotations, attend);
        (self.logits(&x), self.next_states(&x))
    }

    /// Normed outputs `[S, h]` of the layers, as [`Assistant::step`].
    pub(super) fn hidden(
        &self,
        tokens: &Tensor,
        states: &Tensor,
        rotations: &Rotations<'_>,
        attend: &mut dyn FnMut(usize, &Qkv) -> Tensor,
    ) -> Tensor {
        let embeddings = self.target_ends.embed(tokens);
        let mut x = self.pre_projection.forward(&Tensor::cat(&[&embeddings, states], -1)); // [S, h]
        for (i, layer) in self.layers.iter().enumerate() {
            let source = self.source_of_layer[i];
            x = layer.forward((&x).into(), rotations.layer(i), &mut |qkv: &Qkv| attend(source, qkv), None);
        }
        self.norm.forward(&x)
    }

    /// Float32 logits `[.., V]` of outputs `[.., h]`.
    ///
    /// They have no soft-cap, as in transformers.
    pub(super) fn logits(&self, x: &Tensor) -> Tensor {
        linear(x, &self.head, None).to_kind(Kind::Float)
    }

    /// States `[S, d]` that the next step reads, of outputs `[S, h]`.
    pub(super) fn next_states(&self, x: &Tensor) -> Tensor {
        self.post_projection.forward(x)
    }

    /// The head, `[V, h]`.
    pub(super) fn head(&self) -> &Weight {
        &self.head
    }

    /// Float32 logits `[.., V]` of the target's final states `[.., d]`.
    pub(super) fn target_logits(&self, states: &Tensor) -> Tensor {
        self.target_ends.logits(states)
    }

    /// Config of the assistant.
    pub(super) fn config(&self) -> &AssistantConfig {
        &self.config
    }

    /// Tensors of a checkpoint, which share storage with the model.
    pub(super) fn tensors(&self) -> &StateDict {
        &self.tensors
    }

    /// Mutable [`Assistant::tensors`], to freeze some.
    pub(super) fn tensors_mut(&mut self) -> &mut StateDict {
        &mut self.tensors
    }
}
