//! The backbone: draft layers whose queries come from the block and whose keys come from the target's states and the block.

use std::path::Path;

use tch::{Device, Kind, Tensor};

use super::batch::{BlockBatch, SequenceSpan};
use super::config::BlockConfig;
use super::heads::{ConfidenceHead, MarkovHead};
use crate::ModelError;
use crate::drafters::checkpoint::{self, Tensors};
use crate::nn::{
    AttentionSpec, Builder, DecoderLayer, Heads, Linear, Qkv, RmsNorm, Ropes, Rotations, Vocabulary,
};

/// A DSpark or DFlash drafter.
pub struct Block {
    config: BlockConfig,
    vocabulary: Vocabulary, // frozen
    fc: Linear,
    hidden_norm: RmsNorm,
    pub(super) layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    pub(super) markov: Option<MarkovHead>,
    pub(super) confidence: Option<ConfidenceHead>,
    ropes: Ropes,
    kind: Kind,
    device: Device,
    tensors: Tensors,
}

impl Block {
    /// A fresh drafter with the target's embedding and head (both `[V, d]`, shared and frozen).
    ///
    /// # Errors
    /// None for fresh weights; the signature is shared with loading.
    pub fn fresh(
        config: BlockConfig,
        embed_tokens: &Tensor,
        lm_head: &Tensor,
        seed: u64,
        kind: Kind,
    ) -> Result<Self, ModelError> {
        let b = Builder::fresh(seed, config.model.initializer_range, embed_tokens.device(), kind);
        Self::build(config, b, embed_tokens.shallow_clone(), lm_head.shallow_clone(), kind)
    }

    /// Loads the checkpoint in `dir`.
    ///
    /// # Errors
    /// If config.json or a tensor is missing or does not fit.
    pub fn load(dir: &Path, device: Device, kind: Kind) -> Result<Self, ModelError> {
        let config = BlockConfig::load(dir)?;
        let (architecture, model) = (config.architecture(), config.model.clone());
        checkpoint::load(dir, architecture, &model, (kind, device), |b, embed, head| {
            Self::build(config, b, embed, head, kind)
        })
    }

    fn build(
        config: BlockConfig,
        b: Builder,
        embed_tokens: Tensor,
        lm_head: Tensor,
        kind: Kind,
    ) -> Result<Self, ModelError> {
        let c = &config.model;
        let (device, width) = (embed_tokens.device(), config.target_layer_ids.len() as i64 * c.hidden_size);
        let vocabulary = Vocabulary::new(embed_tokens, lm_head, c.embed_scale, c.logit_softcap);
        Ok(Self {
            fc: Linear::new(&b, "fc", width, c.hidden_size)?,
            hidden_norm: RmsNorm::new(&b, "hidden_norm", c.hidden_size, c.rms_norm_eps)?,
            layers: c
                .layers
                .iter()
                .enumerate()
                .map(|(i, spec)| DecoderLayer::new(&b, &format!("layers.{i}"), spec))
                .collect::<Result<_, _>>()?,
            norm: RmsNorm::new(&b, "norm", c.hidden_size, c.rms_norm_eps)?,
            markov: config
                .markov
                .map(|markov| MarkovHead::new(&b, markov, c.vocab_size, c.hidden_size))
                .transpose()?,
            confidence: ConfidenceHead::new(&b, &config)?,
            ropes: Ropes::new(&c.layers, device),
            tensors: Tensors::new(b.into_named(), &vocabulary),
            vocabulary,
            config,
            kind,
            device,
        })
    }

    /// The names and shapes of the parameters of a drafter like this, without their values.
    ///
    /// # Errors
    /// None; the signature is shared with loading.
    pub fn outline(config: BlockConfig) -> Result<Vec<(String, Tensor)>, ModelError> {
        let ends = Tensor::empty([0, config.model.hidden_size], (Kind::BFloat16, Device::Cpu));
        let outline = Self::build(config, Builder::outline(), ends.shallow_clone(), ends, Kind::BFloat16)?;
        Ok(outline.tensors.parameters)
    }

    /// The same drafter once more, sharing all weights with this one.
    ///
    /// # Errors
    /// None; the signature is shared with loading.
    pub fn share(&self) -> Result<Self, ModelError> {
        let (embed, head) = self.ends();
        self.share_as(self.config.clone(), embed, head)
    }

    /// The same weights as a drafter of another config, of the same shapes, reads them; with other ends (both `[V, d]`).
    ///
    /// # Errors
    /// None; the signature is shared with loading.
    pub fn share_as(
        &self,
        config: BlockConfig,
        embed_tokens: &Tensor,
        lm_head: &Tensor,
    ) -> Result<Self, ModelError> {
        let all = self.tensors.all();
        let b = Builder::sharing(&all);
        Self::build(config, b, embed_tokens.shallow_clone(), lm_head.shallow_clone(), self.kind)
    }

    /// Its embedding and head, both `[V, d]`.
    pub fn ends(&self) -> (&Tensor, &Tensor) {
        (self.vocabulary.embed_tokens(), self.vocabulary.lm_head())
    }

    /// Its architecture.
    pub fn config(&self) -> &BlockConfig {
        &self.config
    }

    /// Trainable parameters by checkpoint name, sharing storage with the model.
    pub fn parameters(&self) -> &[(String, Tensor)] {
        &self.tensors.parameters
    }

    /// Everything a checkpoint holds: the parameters and what is frozen.
    pub fn checkpoint(&self) -> Vec<(String, Tensor)> {
        self.tensors.all()
    }

    /// Embedding and head, shared with the target.
    pub(super) fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Kind of weights and activations.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Where it lives.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Who attends to whom, layer by layer.
    pub(super) fn attentions(&self) -> Vec<AttentionSpec> {
        self.config.model.layers.iter().map(|layer| layer.attention).collect()
    }

    pub(super) fn rotations(&self, positions: &Tensor) -> Rotations<'_> {
        self.ropes.at(positions, self.kind)
    }

    /// Captured states `[T, m·d]` to the context `H [T, d]` that all layers share.
    pub fn context(&self, taps: &Tensor) -> Tensor {
        self.hidden_norm.forward(&self.fc.forward(taps))
    }

    /// Token embeddings `[.., d]`.
    pub(super) fn embed(&self, tokens: &Tensor) -> Tensor {
        self.vocabulary.embed(tokens)
    }

    /// The state every head reads.
    pub(super) fn final_norm(&self, x: &Tensor) -> Tensor {
        self.norm.forward(x)
    }

    /// Head without any bias, float32: `[.., d]` to `[.., V]`. Also gives the target's logits from its last hidden states.
    pub fn base_logits(&self, hidden: &Tensor) -> Tensor {
        self.vocabulary.logits(hidden)
    }

    /// All blocks of a batch in one pass: `h [A, γ, d]` after the final norm.
    pub fn hidden(&self, batch: &BlockBatch) -> Tensor {
        let context = self.context(&batch.taps); // [T, d]
        let context_rotations = self.rotations(&batch.context_positions);
        let block_rotations = self.rotations(&batch.block_positions);
        let mut x = self.embed(&batch.block_tokens.reshape([-1])); // [A·γ, d]
        for (i, (layer, spec)) in self.layers.iter().zip(&self.config.model.layers).enumerate() {
            let (k, v) = layer.attention.project_context(&context, context_rotations.of(i));
            x = layer.forward(&x, block_rotations.of(i), |block| {
                let attend = |span| self.attend(&spec.attention, span, block, &k, &v);
                let outputs: Vec<Tensor> = batch.spans.iter().map(attend).collect();
                Tensor::cat(&outputs, 0)
            });
        }
        let gamma = self.config.block_size as i64;
        self.final_norm(&x).view([-1, gamma, self.config.model.hidden_size])
    }

    /// Attention of one sequence's blocks: each sees the context strictly before its anchor, and itself; no block sees another.
    ///
    /// Scores against context and block are computed apart and share one softmax, so that the A·γ × A·γ part never exists.
    fn attend(
        &self,
        spec: &AttentionSpec,
        span: &SequenceSpan,
        block: &Qkv,
        k: &Tensor,
        v: &Tensor,
    ) -> Tensor {
        let AttentionSpec { heads: Heads { query, key_value, dim }, scale, window } = *spec;
        let (gamma, repeats) = (self.config.block_size as i64, query / key_value);
        let (blocks, tokens) = (span.block_count, span.token_count);
        let rows = |t: &Tensor| t.narrow(0, span.first_block * gamma, blocks * gamma);
        // [A·γ, H, D] -> [G, A, repeats·γ, D]: heads that share keys become further queries.
        let q = rows(&block.q).view([blocks, gamma, key_value, repeats, dim]).permute([2, 0, 3, 1, 4]);
        let q = q.reshape([key_value, blocks, repeats * gamma, dim]) * scale;
        let own = |t: &Tensor| rows(t).view([blocks, gamma, key_value, dim]).permute([2, 0, 1, 3]); // [G, A, γ, D]
        let context = |t: &Tensor| t.narrow(0, span.first_token, tokens).transpose(0, 1); // [G, T, D]

        let flat = [key_value, blocks * repeats * gamma, dim];
        let mut to_context =
            q.view(flat).bmm(&context(k).transpose(1, 2)).view([key_value, blocks, repeats * gamma, tokens])
                + &span.mask;
        let mut to_block = q.matmul(&own(&block.k).transpose(2, 3)); // [G, A, repeats·γ, γ]
        if let Some(window) = window {
            let (context, block) = span.outside(gamma, window as i64);
            to_context += context.repeat([1, repeats, 1]);
            to_block += block.repeat([repeats, 1]);
        }
        let weights = Tensor::cat(&[to_context, to_block], 3).softmax(-1, self.kind);
        let on_context = weights.narrow(3, 0, tokens).reshape([key_value, -1, tokens]).bmm(&context(v));
        let on_block = weights.narrow(3, tokens, gamma).matmul(&own(&block.v));
        let y = on_context.view_as(&on_block) + on_block;
        y.view([key_value, blocks, repeats, gamma, dim])
            .permute([1, 3, 0, 2, 4])
            .reshape([blocks * gamma, query * dim])
    }

    /// Logits of slots with teacher-forced previous tokens, float32 `[R, V]`: `hidden [R, d]` and Markov features `[R, r]`.
    pub fn corrected_logits(&self, hidden: &Tensor, features: Option<&Tensor>) -> Tensor {
        let base = self.base_logits(hidden);
        match (&self.markov, features) {
            (Some(markov), Some(features)) => base + markov.bias(features).to_kind(Kind::Float),
            _ => base,
        }
    }

    /// Embeddings of the previous tokens and Markov features of whole blocks, both `[A, γ, r]`; None without a Markov head.
    pub fn markov_features(&self, hidden: &Tensor, previous: &Tensor) -> Option<(Tensor, Tensor)> {
        self.markov.as_ref().map(|markov| {
            let e = markov.embed(previous);
            let features = markov.features(hidden, &e);
            (e, features)
        })
    }

    /// Confidence logits `[..]`; None without a confidence head.
    pub fn confidence_logits(&self, hidden: &Tensor, e: Option<&Tensor>) -> Option<Tensor> {
        self.confidence.as_ref().map(|head| head.forward(hidden, e).to_kind(Kind::Float))
    }
}
