//! The target: a causal language model with key/value slots and taps into its layers.

use std::path::Path;

use deepspec_core::cli::UsageError;
use deepspec_decode::{Feed, Forwarded, Target};
use tch::{Device, Kind, Tensor};

use crate::kv::{KvCache, Visibility};
use crate::nn::{Builder, DecoderLayer, Init, RmsNorm, Rope, linear};
use crate::{ModelConfig, ModelError, Weights};

/// How a target is loaded.
#[derive(Debug, Clone)]
pub struct TargetOptions {
    /// Where it runs.
    pub device: Device,
    /// Kind of weights and activations.
    pub kind: Kind,
    /// Sequences it holds at once.
    pub slots: usize,
    /// Layers whose raw output is captured, strictly increasing; −1 is the embedding's output.
    pub taps: Vec<i64>,
}

/// A Qwen3 causal language model.
pub struct TargetModel {
    config: ModelConfig,
    embed_tokens: Tensor,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    lm_head: Tensor,
    rope: Rope,
    cache: KvCache,
    taps: Vec<i64>,
    kind: Kind,
    device: Device,
}

impl TargetModel {
    /// Loads the model in `dir` (config.json and safetensors, sharded or not, head tied or not).
    ///
    /// # Errors
    /// If the folder is no Qwen3 model, tensors are missing or misshapen, or a tap names no layer.
    pub fn load(dir: &Path, options: &TargetOptions) -> Result<Self, ModelError> {
        let config = ModelConfig::load(dir)?;
        check_taps(&options.taps, config.num_hidden_layers)?;
        let (kind, device) = (options.kind, options.device);
        let weights = Weights::open(dir, "Qwen3ForCausalLM", device, kind)?;
        let b = Builder::from_checkpoint(&weights);
        let shape = [config.vocab_size, config.hidden_size];
        let embed_tokens = b.get("model.embed_tokens.weight", &shape, Init::Normal)?;
        let lm_head = if config.tie_word_embeddings {
            embed_tokens.shallow_clone()
        } else {
            b.get("lm_head.weight", &shape, Init::Normal)?
        };
        let layers = (0..config.num_hidden_layers)
            .map(|i| DecoderLayer::new(&b, &format!("model.layers.{i}"), &config))
            .collect::<Result<Vec<_>, _>>()?;
        let heads = config.heads();
        Ok(Self {
            norm: RmsNorm::new(&b, "model.norm", config.hidden_size, config.rms_norm_eps)?,
            rope: Rope::new(config.rope_theta, config.head_dim, device),
            cache: KvCache::new(layers.len(), options.slots, heads, kind, device),
            taps: options.taps.clone(),
            config,
            embed_tokens,
            layers,
            lm_head,
            kind,
            device,
        })
    }

    /// Its architecture.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }
}

impl Target for TargetModel {
    fn forward(&mut self, feed: &Feed) -> Forwarded {
        let plan = self.cache.plan(feed.chunks, Visibility::Causal);
        let rotation = self.rope.at(plan.positions(), self.kind);
        let mut x = Tensor::embedding(&self.embed_tokens, &feed.tokens, -1, false, false); // [N, d]
        let mut captured = Vec::with_capacity(self.taps.len());
        if self.taps.first() == Some(&-1) {
            captured.push(x.shallow_clone());
        }
        for (i, layer) in self.layers.iter().enumerate() {
            x = layer.forward(&x, &rotation, |qkv| self.cache.attend(i, &plan, qkv));
            if self.taps.contains(&(i as i64)) {
                captured.push(x.shallow_clone());
            }
        }
        self.cache.advance(feed.chunks);
        let taps = if captured.is_empty() {
            Tensor::zeros([x.size()[0], 0], (self.kind, self.device))
        } else {
            Tensor::cat(&captured, 1)
        };
        Forwarded { hidden: self.norm.forward(&x), taps }
    }

    fn logits(&self, hidden: &Tensor) -> Tensor {
        linear(hidden, &self.lm_head, None).to_kind(Kind::Float)
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.cache.truncate(slot, len);
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab_size as usize
    }

    fn device(&self) -> Device {
        self.device
    }
}

/// The target's embedding and head, `[V, d]` each (one tensor where they are tied), without the layers between them.
///
/// # Errors
/// If the folder is no Qwen3 model or lacks these tensors.
pub fn load_ends(
    dir: &Path,
    config: &ModelConfig,
    device: Device,
    kind: Kind,
) -> Result<(Tensor, Tensor), ModelError> {
    let weights = Weights::open(dir, "Qwen3ForCausalLM", device, kind)?;
    let shape = [config.vocab_size, config.hidden_size];
    let embed = weights.get("model.embed_tokens.weight", &shape)?;
    let head = if config.tie_word_embeddings {
        embed.shallow_clone()
    } else {
        weights.get("lm_head.weight", &shape)?
    };
    Ok((embed, head))
}

/// Taps must name layers, each once, in order.
///
/// # Errors
/// [`ModelError::Mismatch`] with the ids found and those possible.
pub fn check_taps(taps: &[i64], layers: usize) -> Result<(), ModelError> {
    let increasing = taps.windows(2).all(|pair| pair[0] < pair[1]);
    if increasing && taps.iter().all(|&tap| (-1..layers as i64).contains(&tap)) {
        return Ok(());
    }
    Err(ModelError::Mismatch(UsageError(format!(
        "target layer ids {taps:?} do not fit a target of {layers} layers; expected strictly increasing ids from -1 (embedding) to {}",
        layers as i64 - 1
    ))))
}
