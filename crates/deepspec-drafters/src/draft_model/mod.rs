//! What all drafters share that are trained on a target's states: its embedding and head, the fusion of its captured
//! states, positions, and how their tensors are made, read and shared.

mod checkpoint;
mod config;
mod cost;
mod gradients;
mod kind;
mod transfer;
mod upload;

use std::path::Path;

use deepspec_models::ModelError;
use deepspec_models::nn::{
    AttentionSpec, Builder, EmbedHead, Linear, RotaryEmbeddings, Rotations, StateDict, Weight,
};
use deepspec_ops::HOST;
use deepspec_ops::kv_attention::AttentionPlan;
use tch::{Device, Kind, Tensor};

pub use checkpoint::is_embed_or_head;
pub use config::DraftDecoder;
pub use cost::{PassBytes, SampleSize};
pub use kind::{DrafterConfig, DrafterKind, Plan, check, load};
pub use transfer::WarmStart;

pub(crate) use cost::{DIRECTIONS, PROJECTIONS, family_norms, layer_shapes};
pub(crate) use gradients::{backward, gradient};
pub(crate) use upload::joined;

/// A drafter that is trained on a target's states.
pub struct DraftModel<K: DrafterKind> {
    config: K::Config,
    vocabulary: EmbedHead, // frozen
    fc: Linear,
    pub(crate) parts: K,
    ropes: RotaryEmbeddings,
    /// Everything that a checkpoint holds, sharing storage with the model.
    tensors: StateDict,
    kind: Kind,
    device: Device,
    /// Whether a training pass keeps of its layers their inputs only.
    recomputes: bool,
}

impl<K: DrafterKind> DraftModel<K> {
    /// A fresh drafter with the target's embedding and head (both `[V, d]`, shared and frozen).
    pub fn fresh(config: K::Config, embed_tokens: &Tensor, lm_head: &Tensor, seed: u64, kind: Kind) -> Self {
        let b = Builder::fresh(seed, config.model().initializer_range, embed_tokens.device(), kind);
        Self::build(config, &b, embed_tokens.shallow_clone(), Weight::Stored(lm_head.shallow_clone()), kind)
    }

    /// Loads the checkpoint in `dir`.
    ///
    /// # Errors
    /// If config.json or a tensor is missing or does not fit.
    pub fn load(dir: &Path, device: Device, kind: Kind) -> Result<Self, ModelError> {
        Self::read(dir, device, kind, false)
    }

    /// The same, packed to decode with: it does not learn.
    ///
    /// # Errors
    /// As [`DraftModel::load`].
    pub fn load_packed(dir: &Path, device: Device, kind: Kind) -> Result<Self, ModelError> {
        Self::read(dir, device, kind, true)
    }

    fn read(dir: &Path, device: Device, kind: Kind, packs: bool) -> Result<Self, ModelError> {
        let config = K::Config::load(dir)?;
        let (architecture, model) = (config.architecture(), config.model().clone());
        checkpoint::load(dir, architecture, &model, (kind, device), packs, |b, embed, head| {
            Self::build(config, b, embed, head, kind)
        })
    }

    fn build(config: K::Config, b: &Builder, embed_tokens: Tensor, lm_head: Weight, kind: Kind) -> Self {
        let (model, device) = (config.model(), embed_tokens.device());
        let vocabulary = EmbedHead::new(embed_tokens, lm_head, model.embed_scale, model.logit_softcap);
        let width = config.decoder().taps.len() as i64 * model.hidden_size;
        Self {
            fc: Linear::new(b, "fc", width, model.hidden_size),
            parts: K::new(b, &config),
            ropes: RotaryEmbeddings::new(&model.layers, device),
            tensors: checkpoint::with_ends(b.take_named(), &vocabulary),
            vocabulary,
            config,
            kind,
            device,
            recomputes: false,
        }
    }

    /// The names and shapes of the parameters of a drafter like this, without their values.
    pub fn outline(config: K::Config) -> Vec<(String, Tensor)> {
        let ends = Tensor::empty([0, config.model().hidden_size], (Kind::BFloat16, HOST));
        let head = Weight::Stored(ends.shallow_clone());
        let outline = Self::build(config, &Builder::outline(), ends, head, Kind::BFloat16);
        outline.tensors.parameters
    }

    /// The same drafter once more, sharing all weights with this one.
    pub fn share(&self) -> Self {
        self.share_as(self.config.clone(), None)
    }

    /// The same drafter as it is now, packed to decode with.
    pub fn packed(&self) -> Self {
        let (embed, head) = (self.vocabulary.embed_tokens(), self.vocabulary.lm_head().share().packed());
        let b = Builder::sharing(&self.tensors).packing();
        Self::build(self.config.clone(), &b, embed.shallow_clone(), head, self.kind)
    }

    /// The same weights as a drafter of another config, of the same shapes, reads them; with other ends (both `[V, d]`) where there are some.
    pub fn share_as(&self, config: K::Config, ends: Option<(&Tensor, &Tensor)>) -> Self {
        let (embed, head) = match ends {
            Some((embed, head)) => (embed, Weight::Stored(head.shallow_clone())),
            None => (self.vocabulary.embed_tokens(), self.vocabulary.lm_head().share()),
        };
        Self::build(config, &Builder::sharing(&self.tensors), embed.shallow_clone(), head, self.kind)
    }

    /// Its embedding and head, both `[V, d]`; a copy of the head where that is packed.
    pub fn embed_and_head(&self) -> (Tensor, Tensor) {
        (self.vocabulary.embed_tokens().shallow_clone(), self.vocabulary.lm_head().stored())
    }

    /// Its architecture.
    pub fn config(&self) -> &K::Config {
        &self.config
    }

    /// Keeps parameters as they are whose names begin like this.
    fn freeze(&mut self, prefixes: &[&str]) {
        checkpoint::freeze(&mut self.tensors, prefixes);
    }

    /// Parameters that can learn, by checkpoint name, sharing storage with the model; those that are packed cannot.
    pub fn parameters(&self) -> &[(String, Tensor)] {
        &self.tensors.parameters
    }

    /// Everything a checkpoint holds: the parameters and what is frozen.
    pub fn checkpoint(&self) -> Vec<(String, Tensor)> {
        self.tensors.all()
    }

    /// Kind of weights and activations.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Where it lives.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Whether a training pass keeps of its layers their inputs only.
    pub(crate) fn recomputes(&self) -> bool {
        self.recomputes
    }

    /// Embedding and head, shared with the target.
    pub(crate) fn vocabulary(&self) -> &EmbedHead {
        &self.vocabulary
    }

    /// Who attends to whom, layer by layer.
    pub(crate) fn attentions(&self) -> Vec<AttentionSpec> {
        self.config.model().layers.iter().map(|layer| layer.attention).collect()
    }

    /// Rotations of the rows of a batch of chunks.
    pub(crate) fn planned_rotations(&self, plan: &AttentionPlan) -> Rotations<'_> {
        self.ropes.planned(plan, self.kind)
    }

    pub(crate) fn rotations(&self, positions: &Tensor) -> Rotations<'_> {
        self.ropes.at(positions, self.kind)
    }

    /// Captured states `[T, m·d]` to `[T, d]`.
    pub(crate) fn fuse(&self, taps: &Tensor) -> Tensor {
        self.fc.forward(taps)
    }

    /// Token embeddings `[.., d]`.
    pub(crate) fn embed(&self, tokens: &Tensor) -> Tensor {
        self.vocabulary.embed(tokens)
    }
}
