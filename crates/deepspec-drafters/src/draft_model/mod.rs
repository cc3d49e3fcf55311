//! Code that all drafters trained on hidden states share: embedding, LM head, rotary embeddings and the input projection `fc`.

mod checkpoint;
mod config;
mod cost;
mod kind;
mod lora;
mod trained;
mod transfer;
mod warm_start;

use std::path::Path;

use deepspec_checkpoint::DraftVocab;
use deepspec_models::ModelError;
use deepspec_models::nn::{
    AttentionSpec, Builder, EmbedHead, Linear, RotaryEmbeddings, Rotations, StateDict, Weight,
};
use deepspec_ops::HOST;
use deepspec_ops::kv_attention::AttentionPlan;
use tch::{Device, Kind, Tensor};

use checkpoint::CheckpointSource;
pub use checkpoint::{Ends, is_embed_or_head};
pub use config::{DraftConfig, DraftDecoder, DrafterSettings};
pub use cost::{PassRows, SampleSize};
pub use kind::{DrafterKind, Plan, checkpoint_kind};
pub use lora::LoraAdapters;
pub(crate) use lora::MERGE_BYTES;
pub use trained::TrainedParts;
pub use warm_start::WarmStartCheck;

/// A drafter that is trained on a target's hidden states. `modules` holds the layers and heads of its kind, such as DSpark's.
pub struct DraftModel<K: DrafterKind> {
    config: DraftConfig<K::Settings>,
    vocabulary: EmbedHead, // frozen; the LM head is [Vd, d] with a reduced vocabulary
    /// The target's id of each draft id, `[Vd]` int64; None if the drafter can draft all of the target's tokens.
    draft_tokens: Option<Tensor>,
    fc: Linear,
    pub(crate) modules: K,
    ropes: RotaryEmbeddings,
    /// All tensors of a checkpoint, which share storage with the model.
    tensors: StateDict,
    kind: Kind,
    device: Device,
    /// Whether layers are recomputed in the backward pass (activation checkpointing).
    recomputes: bool,
}

impl<K: DrafterKind> DraftModel<K> {
    /// A drafter with random weights. Embedding and LM head, `[V, d]` each, are the target's, shared and frozen.
    pub fn fresh(
        config: DraftConfig<K::Settings>,
        embed_tokens: &Tensor,
        lm_head: &Tensor,
        seed: u64,
        kind: Kind,
    ) -> Self {
        Self::fresh_with_draft_vocab(config, (embed_tokens, lm_head), None, seed, kind)
    }

    /// [`Self::fresh`] with a reduced vocabulary, whose rows of the target's LM head are the drafter's LM head.
    pub fn fresh_with_draft_vocab(
        config: DraftConfig<K::Settings>,
        (embed_tokens, lm_head): (&Tensor, &Tensor),
        draft_vocab: Option<&DraftVocab>,
        seed: u64,
        kind: Kind,
    ) -> Self {
        let b = Builder::random_init(seed, config.model().initializer_range, embed_tokens.device(), kind);
        let tokens =
            draft_vocab.map(|vocab| Tensor::from_slice(vocab.tokens()).to_device(embed_tokens.device()));
        let head =
            tokens.as_ref().map_or_else(|| lm_head.shallow_clone(), |tokens| lm_head.index_select(0, tokens));
        let ends = Ends {
            embed_tokens: embed_tokens.shallow_clone(),
            lm_head: Weight::Stored(head),
            draft_tokens: tokens,
        };
        Self::build(config, &b, ends, kind)
    }

    /// Loads the checkpoint in `dir`.
    ///
    /// # Errors
    /// If config.json or a tensor is missing or does not fit.
    pub fn load(dir: &Path, device: Device, kind: Kind) -> Result<Self, ModelError> {
        Self::read(dir, device, kind, false)
    }

    /// Loads the checkpoint in `dir` for inference, with packed weights.
    ///
    /// # Errors
    /// As [`DraftModel::load`].
    pub fn load_packed(dir: &Path, device: Device, kind: Kind) -> Result<Self, ModelError> {
        Self::read(dir, device, kind, true)
    }

    fn read(dir: &Path, device: Device, kind: Kind, packs: bool) -> Result<Self, ModelError> {
        let config = DraftConfig::<K::Settings>::load(dir)?;
        let draft_vocab_size = config.settings.draft_vocab_size();
        let (architecture, model) = (config.architecture(), config.model().clone());
        let source = CheckpointSource { dir, architecture, device, kind, packs };
        checkpoint::load_tensors(&source, &model, draft_vocab_size, |b, ends| {
            Self::build(config, b, ends, kind)
        })
    }

    fn build(
        config: DraftConfig<K::Settings>,
        b: &Builder,
        Ends { embed_tokens, lm_head, draft_tokens }: Ends,
        kind: Kind,
    ) -> Self {
        let (model, device) = (config.model(), embed_tokens.device());
        let vocabulary = EmbedHead::new(embed_tokens, lm_head, model.embed_scale, model.logit_softcap);
        let width = K::Settings::fc_inputs(config.decoder.taps.len()) as i64 * model.hidden_size;
        Self {
            fc: Linear::new(b, "fc", width, model.hidden_size),
            modules: K::new(b, &config),
            ropes: RotaryEmbeddings::new(&model.layers, device),
            tensors: checkpoint::with_embed_and_head(b.take_state_dict(), &vocabulary, draft_tokens.as_ref()),
            vocabulary,
            draft_tokens,
            config,
            kind,
            device,
            recomputes: false,
        }
    }

    /// Names of the parameters, and meta tensors of their shapes.
    pub fn meta_parameters(config: DraftConfig<K::Settings>) -> StateDict {
        let none = Tensor::empty([0, config.model().hidden_size], (Kind::BFloat16, HOST));
        let lm_head = Weight::Stored(none.shallow_clone());
        let ends = Ends { embed_tokens: none, lm_head, draft_tokens: None };
        let meta = Self::build(config, &Builder::meta(), ends, Kind::BFloat16);
        meta.tensors
    }

    /// A second drafter that shares all weights with this one.
    pub fn share(&self) -> Self {
        self.share_with(self.config.clone(), None)
    }

    /// A copy of the drafter for inference, with packed weights.
    pub fn packed(&self) -> Self {
        let b = Builder::from_state_dict(&self.tensors).with_packing();
        let ends = self.ends();
        let ends = Ends { lm_head: ends.lm_head.pack(), ..ends };
        Self::build(self.config.clone(), &b, ends, self.kind)
    }

    /// Shares the weights with another config of equal shapes. `ends` replaces embedding and LM head, `[V, d]` each.
    pub fn share_with(&self, config: DraftConfig<K::Settings>, ends: Option<(&Tensor, &Tensor)>) -> Self {
        let own = self.ends();
        let ends = match ends {
            Some((embed, head)) => Ends {
                embed_tokens: embed.shallow_clone(),
                lm_head: Weight::Stored(self.draft_rows(head)),
                draft_tokens: own.draft_tokens,
            },
            None => own,
        };
        Self::build(config, &Builder::from_state_dict(&self.tensors), ends, self.kind)
    }

    fn ends(&self) -> Ends {
        Ends {
            embed_tokens: self.vocabulary.embed_tokens().shallow_clone(),
            lm_head: self.vocabulary.lm_head().share(),
            draft_tokens: self.draft_tokens.as_ref().map(Tensor::shallow_clone),
        }
    }

    /// Embedding `[V, d]` and LM head `[V, d]`, or `[Vd, d]` with a reduced vocabulary. The head is a copy if it is packed.
    pub fn embed_and_head(&self) -> (Tensor, Tensor) {
        (self.vocabulary.embed_tokens().shallow_clone(), self.vocabulary.lm_head().to_tensor())
    }

    /// The target's id of each draft id, `[Vd]` int64; None if the drafter can draft all of the target's tokens.
    pub fn draft_tokens(&self) -> Option<&Tensor> {
        self.draft_tokens.as_ref()
    }

    /// Rows of the target's LM head `[V, d]` for the tokens that the drafter can draft.
    fn draft_rows(&self, head: &Tensor) -> Tensor {
        match &self.draft_tokens {
            Some(tokens) => head.index_select(0, tokens),
            None => head.shallow_clone(),
        }
    }

    /// Expands logits of draft ids `[.., Vd]` to the target's vocabulary, `[.., V]`, with −∞ elsewhere.
    pub(crate) fn expand_logits(&self, logits: Tensor) -> Tensor {
        let Some(tokens) = &self.draft_tokens else { return logits };
        let mut shape = logits.size();
        if let Some(last) = shape.last_mut() {
            *last = self.config.model().vocab_size;
        }
        let expanded = Tensor::full(shape, f64::NEG_INFINITY, (logits.kind(), logits.device()));
        expanded.index_copy(-1, tokens, &logits)
    }

    /// Architecture of the drafter.
    pub fn config(&self) -> &DraftConfig<K::Settings> {
        &self.config
    }

    /// Trained parameters by checkpoint name. They share storage with the model. Packed weights are not included.
    pub fn parameters(&self) -> &[(String, Tensor)] {
        &self.tensors.parameters
    }

    /// All tensors of a checkpoint: parameters and frozen tensors.
    pub fn checkpoint(&self) -> Vec<(String, Tensor)> {
        self.tensors.all_tensors()
    }

    /// Dtype of weights and activations.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Device of the tensors.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Whether layers are recomputed in the backward pass (activation checkpointing).
    pub(crate) fn recomputes(&self) -> bool {
        self.recomputes
    }

    /// Embedding and LM head, shared with the target.
    pub(crate) fn vocabulary(&self) -> &EmbedHead {
        &self.vocabulary
    }

    /// Attention spec of each layer.
    pub(crate) fn attention_specs(&self) -> Vec<AttentionSpec> {
        self.config.model().layers.iter().map(|layer| layer.attention).collect()
    }

    /// Rotary tables for the rows of an attention plan.
    pub(crate) fn planned_rotations(&self, plan: &AttentionPlan) -> Rotations<'_> {
        self.ropes.for_plan(plan, self.kind)
    }

    pub(crate) fn rotations(&self, positions: &Tensor) -> Rotations<'_> {
        self.ropes.at(positions, self.kind)
    }

    /// Projects the inputs of `fc` to `[N, d]`: captured hidden states `[N, m·d]`, or what [`DrafterSettings::fc_inputs`] counts.
    pub(crate) fn fuse(&self, inputs: &Tensor) -> Tensor {
        self.fc.forward(inputs)
    }

    /// Token embeddings `[.., d]`.
    pub(crate) fn embed(&self, tokens: &Tensor) -> Tensor {
        self.vocabulary.embed(tokens)
    }
}
