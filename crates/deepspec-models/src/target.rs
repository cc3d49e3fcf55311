//! The target: a causal language model with key/value slots and taps into its layers.

use std::ops::Range;
use std::path::Path;

use deepspec_core::cli::UsageError;
use deepspec_decode::{Feed, Forwarded, Target};
use tch::{Device, Kind, Tensor};

use crate::families::Names;
use crate::kv::{KvCache, Visibility};
use crate::nn::{AttentionSpec, Builder, DecoderLayer, RmsNorm, Ropes, Vocabulary};
use crate::{ModelConfig, ModelError, Weights};

/// Tokens that a slot takes in within one pass. What a pass holds for a token (the MLP's insides above all) is far more than
/// what stays of it.
const PASS_TOKENS: usize = 4096;

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

/// A causal language model of any family.
pub struct TargetModel {
    config: ModelConfig,
    vocabulary: Vocabulary,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    ropes: Ropes,
    cache: KvCache,
    taps: Vec<i64>,
    kind: Kind,
    device: Device,
}

impl TargetModel {
    /// Loads the model in `dir` (config.json and safetensors, sharded or not, head tied or not, alone or within a multimodal
    /// model).
    ///
    /// # Errors
    /// If the folder is no model of a known family, tensors are missing or misshapen, or a tap names no layer.
    pub fn load(dir: &Path, options: &TargetOptions) -> Result<Self, ModelError> {
        let config = ModelConfig::load(dir)?;
        check_taps(&options.taps, config.layers.len())?;
        let (kind, device) = (options.kind, options.device);
        let weights = Weights::open(dir, config.family.class(), device, kind)?;
        let names = Names::of(&weights);
        let (embed, head) = read_ends(&weights, names, &config)?;
        let b = Builder::from_checkpoint(&weights);
        let layers = config
            .layers
            .iter()
            .enumerate()
            .map(|(i, spec)| DecoderLayer::new(&b, &format!("{}layers.{i}", names.body), spec))
            .collect::<Result<Vec<_>, _>>()?;
        let attentions: Vec<AttentionSpec> = config.layers.iter().map(|layer| layer.attention).collect();
        Ok(Self {
            vocabulary: Vocabulary::new(embed, head, config.embed_scale, config.logit_softcap),
            norm: RmsNorm::new(&b, &format!("{}norm", names.body), config.hidden_size, config.rms_norm_eps)?,
            ropes: Ropes::new(&config.layers, device),
            cache: KvCache::new(&attentions, options.slots, kind, device),
            taps: options.taps.clone(),
            config,
            layers,
            kind,
            device,
        })
    }

    /// Its architecture.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Its embedding and head as [`load_ends`] gives them, sharing storage with the model.
    pub fn ends(&self) -> (Tensor, Tensor) {
        (self.vocabulary.embed_tokens().shallow_clone(), self.vocabulary.lm_head().shallow_clone())
    }
}

impl TargetModel {
    /// One pass over all rows at once.
    fn pass(&mut self, chunks: &[(usize, usize)], tokens: &Tensor) -> Forwarded {
        let plan = self.cache.plan(chunks, Visibility::Causal);
        let rotations = self.ropes.at(plan.positions(), self.kind);
        let mut x = self.vocabulary.embed(tokens); // [N, d]
        let mut captured = Vec::with_capacity(self.taps.len());
        if self.taps.first() == Some(&-1) {
            captured.push(x.shallow_clone());
        }
        for (i, layer) in self.layers.iter().enumerate() {
            x = layer.forward(&x, rotations.of(i), |qkv| self.cache.attend(i, &plan, qkv));
            if self.taps.contains(&(i as i64)) {
                captured.push(x.shallow_clone());
            }
        }
        self.cache.advance(chunks);
        let taps = if captured.is_empty() {
            Tensor::zeros([x.size()[0], 0], (self.kind, self.device))
        } else {
            Tensor::cat(&captured, 1)
        };
        Forwarded { hidden: self.norm.forward(&x), taps }
    }
}

impl Target for TargetModel {
    /// Chunks of more than [`PASS_TOKENS`] run in several passes, so that the memory of a pass does not grow with their length.
    fn forward(&mut self, feed: &Feed) -> Forwarded {
        let passes = passes(feed.chunks);
        if passes.len() <= 1 {
            return self.pass(feed.chunks, &feed.tokens);
        }
        let (mut hidden, mut taps, mut order) = (vec![], vec![], vec![]);
        for pass in &passes {
            let rows: Vec<i64> =
                pass.iter().flat_map(|part| part.rows.clone()).map(|row| row as i64).collect();
            let chunks: Vec<(usize, usize)> = pass.iter().map(|part| (part.slot, part.rows.len())).collect();
            let tokens = feed.tokens.index_select(0, &Tensor::from_slice(&rows).to_device(self.device));
            let out = self.pass(&chunks, &tokens);
            hidden.push(out.hidden);
            taps.push(out.taps);
            order.extend(rows);
        }
        let in_order = |parts: Vec<Tensor>| {
            let rows = Tensor::cat(&parts, 0);
            if order.is_sorted() {
                return rows;
            }
            let mut back = vec![0; order.len()];
            for (place, &row) in order.iter().enumerate() {
                back[row as usize] = place as i64;
            }
            rows.index_select(0, &Tensor::from_slice(&back).to_device(self.device))
        };
        Forwarded { hidden: in_order(hidden), taps: in_order(taps) }
    }

    fn logits(&self, hidden: &Tensor) -> Tensor {
        self.vocabulary.logits(hidden)
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

/// Rows of a feed that one slot takes in within one pass.
struct Part {
    slot: usize,
    rows: Range<usize>,
}

/// Cuts every chunk at multiples of [`PASS_TOKENS`] from its own start, whatever it rides with: the n-th pieces of all chunks
/// run together.
fn passes(chunks: &[(usize, usize)]) -> Vec<Vec<Part>> {
    let mut passes: Vec<Vec<Part>> = vec![];
    let mut first = 0;
    for &(slot, len) in chunks {
        for (pass, start) in (0..len).step_by(PASS_TOKENS).enumerate() {
            let rows = first + start..first + len.min(start + PASS_TOKENS);
            if pass == passes.len() {
                passes.push(vec![]);
            }
            passes[pass].push(Part { slot, rows });
        }
        first += len;
    }
    passes
}

/// The target's embedding and head as they are stored, `[V, d]` each (one tensor where they are tied), without the layers
/// between them. The config says what is done to embeddings and logits.
///
/// # Errors
/// If the folder lacks these tensors.
pub fn load_ends(
    dir: &Path,
    config: &ModelConfig,
    device: Device,
    kind: Kind,
) -> Result<(Tensor, Tensor), ModelError> {
    let weights = Weights::open(dir, config.family.class(), device, kind)?;
    read_ends(&weights, Names::of(&weights), config)
}

fn read_ends(weights: &Weights, names: Names, config: &ModelConfig) -> Result<(Tensor, Tensor), ModelError> {
    let shape = [config.vocab_size, config.hidden_size];
    let embed = weights.get(&format!("{}embed_tokens.weight", names.body), &shape)?;
    let head =
        if config.tie_word_embeddings { embed.shallow_clone() } else { weights.get(names.head, &shape)? };
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
