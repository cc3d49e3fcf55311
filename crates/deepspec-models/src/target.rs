//! The target: a causal language model with a KV cache that captures hidden states of its layers.

use std::cell::OnceCell;
use std::path::Path;

use deepspec_core::Tap;
use deepspec_core::cli::UsageError;
use deepspec_engine::{ModelInput, ModelOutput, Target, TreeTarget};
use deepspec_ops::kv_attention::{AttentionPlan, Chunk, KvCache, MaskKind};
use deepspec_ops::{DraftTree, GatedDeltaCache, MAX_ROLLBACK_TOKENS, PackedWeight, cat_row_runs};
use tch::{Device, Kind, Tensor};

use crate::families::TensorNames;
use crate::nn::{
    AttentionSpec, Builder, DecoderLayer, EmbedHead, LinearAttentionLayer, RmsNorm, RotaryEmbeddings,
    StateDict, Weight,
};
use crate::{ModelConfig, ModelError, Weights};

/// Maximum tokens of a sequence per pass. The activations of a token, above all in the MLP, are far larger than
/// its keys and values.
const MAX_PASS_TOKENS: usize = 4096;

/// Bytes per logit of verification: float32 logits and distributions of target and drafter, float64 sums, and sorted copies for top-k
/// and top-p.
pub const VERIFY_BYTES_PER_LOGIT: u64 = 48;

/// Options for loading a target.
#[derive(Debug, Clone)]
pub struct TargetOptions {
    /// Device of the weights.
    pub device: Device,
    /// Dtype of weights and activations.
    pub kind: Kind,
    /// Maximum number of sequences at a time.
    pub slots: usize,
    /// Layers whose outputs are captured, strictly increasing.
    pub taps: Vec<Tap>,
}

/// A layer, and its index among the layers of its kind, which share a cache.
enum TargetLayer {
    Attention(DecoderLayer, usize),
    LinearAttention(LinearAttentionLayer, usize),
}

/// A causal language model of any family.
pub struct TargetModel {
    config: ModelConfig,
    vocabulary: EmbedHead,
    /// The packed LM head, made when logits are first computed. Capturing hidden states does not need it.
    packed_head: OnceCell<Weight>,
    layers: Vec<TargetLayer>,
    norm: RmsNorm,
    ropes: RotaryEmbeddings,
    /// Keys and values of the layers with attention.
    cache: KvCache,
    /// States of the layers with linear attention.
    states: GatedDeltaCache,
    taps: Vec<Tap>,
    kind: Kind,
    device: Device,
    /// Names of its tensors in the checkpoint.
    names: TensorNames,
    /// Tensors of the layers and of the final norm. They share storage with the model.
    named: StateDict,
}

impl TargetModel {
    /// Loads the model in `dir` (config.json and safetensors, sharded or not, or an unpacked GGUF; head tied or not, alone or within a multimodal
    /// model).
    ///
    /// # Errors
    /// Fails if the folder is not a model of a known family, or if a captured layer does not exist. Fails too if tensors are
    /// missing or of another shape.
    pub fn load(dir: &Path, options: &TargetOptions) -> Result<Self, ModelError> {
        let config = ModelConfig::load(dir)?;
        check_taps(&options.taps, config.layers.len())?;
        let (kind, device) = (options.kind, options.device);
        let mut weights = Weights::open_target(dir, config.family.class(), device, kind)?;
        if let (Some(fused), Some(layer)) = (config.family.fused, config.layers.first()) {
            weights.split_fused(fused(layer));
        }
        let names = TensorNames::detect(&weights);
        let (embed, head) = read_embed_and_head(&weights, names, &config)?;
        let is_tied = config.tie_word_embeddings;
        let b = Builder::from_checkpoint(&weights).with_packing();
        let model = Self::build(config, (embed, head), (names, &b), options);
        b.check()?;
        let mut unread = vec![];
        for name in weights.unread_names() {
            if !names.may_stay_unread(&name, is_tied) && !weights.is_zero_bias(&name)? {
                unread.push(name);
            }
        }
        if unread.is_empty() {
            return Ok(model);
        }
        let (count, shown) = (unread.len(), unread.iter().take(5).cloned().collect::<Vec<_>>().join(", "));
        let family = model.config.family;
        Err(ModelError::NotAModel {
            path: dir.to_path_buf(),
            problem: format!(
                "{count} tensors have no place in a {family} model of this config: {shown}{}; config.json and weights do not belong \
                 together",
                if count > 5 { ", …" } else { "" }
            ),
        })
    }

    /// A model for `slots` other sequences that shares the weights.
    pub fn share(&self, slots: usize) -> Self {
        let options = TargetOptions { device: self.device, kind: self.kind, slots, taps: self.taps.clone() };
        let shared = Self::build(
            self.config.clone(),
            self.embed_and_head(),
            (self.names, &Builder::from_state_dict(&self.named)),
            &options,
        );
        Self { packed_head: OnceCell::from(self.packed_head().share()), ..shared }
    }

    fn build(
        config: ModelConfig,
        (embed, head): (Tensor, Tensor),
        (names, b): (TensorNames, &Builder),
        options: &TargetOptions,
    ) -> Self {
        let (kind, device) = (options.kind, options.device);
        let (mut layers, mut attentions, mut recurrent) = (vec![], Vec::<AttentionSpec>::new(), vec![]);
        for (i, spec) in config.layers.iter().enumerate() {
            let name = format!("{}layers.{i}", names.body);
            layers.push(match spec.gated_delta {
                Some(mixer) => {
                    recurrent.push(mixer);
                    let layer = LinearAttentionLayer::new(b, &name, spec, mixer);
                    TargetLayer::LinearAttention(layer, recurrent.len() - 1)
                }
                None => {
                    attentions.push(spec.attention);
                    TargetLayer::Attention(DecoderLayer::new(b, &name, spec), attentions.len() - 1)
                }
            });
        }
        let (size, eps, form) = (config.hidden_size, config.rms_norm_eps, config.norm_weight);
        let norm = RmsNorm::with_weight(b, &format!("{}norm", names.body), size, eps, form);
        let norm = norm.scaled(config.logit_scale);
        Self {
            vocabulary: EmbedHead::new(embed, Weight::Stored(head), config.embed_scale, config.logit_softcap),
            packed_head: OnceCell::new(),
            norm,
            ropes: RotaryEmbeddings::new(&config.layers, device),
            cache: KvCache::new(&attentions, options.slots, kind, device),
            states: GatedDeltaCache::new(recurrent, options.slots, kind, device),
            taps: options.taps.clone(),
            config,
            layers,
            kind,
            device,
            names,
            named: b.take_state_dict(),
        }
    }

    fn packed_head(&self) -> &Weight {
        self.packed_head.get_or_init(|| self.vocabulary.lm_head().share().pack())
    }

    /// Config of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Embedding and LM head, `[V, d]` each, one tensor if they are tied. They share storage with the model.
    pub fn embed_and_head(&self) -> (Tensor, Tensor) {
        (self.vocabulary.embed_tokens().shallow_clone(), self.vocabulary.lm_head().to_tensor())
    }
}

impl TargetModel {
    /// Chunks that append a number of tokens to the sequences of slots, given as `(slot, tokens)`.
    pub fn chunks_to_append(&self, chunks: &[(usize, usize)]) -> Vec<Chunk> {
        self.cache.chunks_to_append(chunks)
    }

    /// Allocates room for chunks.
    pub fn reserve(&mut self, chunks: &[Chunk]) {
        self.cache.reserve(chunks);
    }

    /// Runs the `tokens [N]` of chunks, and appends them to their sequences. Call [`TargetModel::reserve`]
    /// first.
    ///
    /// Chunks of more than [`MAX_PASS_TOKENS`] run in several passes, which bounds the memory of a pass.
    pub fn run(&mut self, chunks: &[Chunk], tokens: &Tensor) -> ModelOutput {
        let passes = split_into_passes(chunks);
        if passes.len() <= 1 {
            return self.run_pass(chunks, tokens);
        }
        let (mut hidden, mut taps, mut places, mut end) = (vec![], vec![], vec![], 0);
        for pass in passes {
            for part in &pass {
                let len = part.chunk.len as i64;
                places.push((part.first, (end, len)));
                end += len;
            }
            let own = cat_row_runs(tokens, pass.iter().map(|part| (part.first, part.chunk.len as i64)));
            let chunks: Vec<Chunk> = pass.into_iter().map(|part| part.chunk).collect();
            let out = self.run_pass(&chunks, &own);
            hidden.push(out.hidden);
            taps.push(out.captured_states);
        }
        // From the order of the passes to the order of the batch.
        places.sort_unstable();
        let in_order = |parts: Vec<Tensor>| {
            cat_row_runs(&Tensor::cat(&parts, 0), places.iter().map(|(_, place)| *place))
        };
        ModelOutput { hidden: in_order(hidden), captured_states: in_order(taps) }
    }

    /// Runs one pass over all rows.
    fn run_pass(&mut self, chunks: &[Chunk], tokens: &Tensor) -> ModelOutput {
        let plan = self.cache.plan(chunks, MaskKind::Causal);
        self.run_plan(&plan, chunks, tokens)
    }

    /// Runs one pass over the rows of a plan, and appends the chunks to their sequences.
    fn run_plan(&mut self, plan: &AttentionPlan, chunks: &[Chunk], tokens: &Tensor) -> ModelOutput {
        let rotations = self.ropes.for_plan(plan, self.kind);
        let mut x = self.vocabulary.embed(tokens); // [N, d]
        let mut captured = Vec::with_capacity(self.taps.len());
        if self.taps.first() == Some(&Tap::Embedding) {
            captured.push(x.shallow_clone());
        }
        for (i, layer) in self.layers.iter().enumerate() {
            x = match layer {
                TargetLayer::Attention(layer, own) => {
                    let attention = &mut self.cache.attention(*own, plan);
                    layer.forward((&x).into(), rotations.layer(i), attention, None)
                }
                TargetLayer::LinearAttention(layer, own) => layer.forward(&x, &mut self.states, *own, chunks),
            };
            if self.taps.contains(&Tap::Layer(i as u32)) {
                captured.push(x.shallow_clone());
            }
        }
        self.cache.commit_chunks(chunks);
        self.states.commit_chunks(chunks);
        let taps = if captured.is_empty() {
            Tensor::zeros([x.size()[0], 0], (self.kind, self.device))
        } else {
            Tensor::cat(&captured, 1)
        };
        ModelOutput { hidden: self.norm.forward(&x), captured_states: taps }
    }

    /// Estimated peak bytes of a forward pass over `rows` tokens, of which `judged` go through the LM head. The packed copy of the head
    /// counts too.
    pub fn peak_forward_bytes(&self, rows: usize, judged: usize) -> u64 {
        let layer = |layer: &crate::nn::LayerSpec| {
            let heads = layer.attention.heads;
            // One expert may have all rows. It reads and writes copies of them.
            let mlp = layer.experts.map_or(3 * layer.intermediate_size, |experts| {
                let shared = experts.shared_width.unwrap_or(0);
                3 * (experts.width + shared) + 4 * layer.hidden_size + 2 * experts.count
            });
            // Inputs and outputs of Gated DeltaNet are in float32, beside those of the dtype.
            let linear = layer.gated_delta.map_or(0, |spec| 4 * (spec.channels() + spec.value_width()));
            mlp + (4 * (heads.query + heads.key_value) * heads.dim).max(linear)
        };
        let widest = self.config.layers.iter().map(layer).max().unwrap_or(0);
        let row = widest + (6 + 2 * self.taps.len() as i64) * self.config.hidden_size;
        rows as u64 * row as u64 * self.kind.elt_size_in_bytes() as u64
            + judged as u64 * self.config.vocab_size as u64 * VERIFY_BYTES_PER_LOGIT
            + PackedWeight::bytes(&self.vocabulary.lm_head().to_tensor())
    }
}

impl Target for TargetModel {
    fn forward(&mut self, feed: &ModelInput) -> ModelOutput {
        let chunks = self.chunks_to_append(feed.chunks);
        self.reserve(&chunks);
        self.run(&chunks, &feed.tokens)
    }

    fn logits(&self, hidden: &Tensor) -> Tensor {
        self.vocabulary.logits_with_head(self.packed_head(), hidden)
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.cache.truncate(slot, len);
        self.states.truncate(slot, len);
    }

    fn max_rollback(&self) -> Option<usize> {
        (!self.states.is_empty()).then_some(MAX_ROLLBACK_TOKENS)
    }

    fn kv_cache_bytes(&self, tokens: usize) -> u64 {
        (self.cache.kv_cache_bytes(tokens) + self.states.sequence_bytes()) as u64
    }

    fn tree_mask_bytes(&self, rows: usize, tokens: usize) -> u64 {
        self.cache.tree_mask_bytes(rows, tokens) as u64
    }

    fn free_cached_memory(&mut self) {
        self.cache.free_cached_memory();
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab_size as usize
    }

    fn device(&self) -> Device {
        self.device
    }

    fn as_tree_target(&mut self) -> Option<&mut dyn TreeTarget> {
        // The state of linear attention holds one path.
        if self.states.is_empty() { Some(self) } else { None }
    }
}

impl TreeTarget for TargetModel {
    /// Attention runs by libtorch's operators with an explicit mask.
    fn forward_trees(&mut self, input: &ModelInput, trees: &[DraftTree]) -> ModelOutput {
        let chunks = self.chunks_to_append(input.chunks);
        self.reserve(&chunks);
        let plan = self.cache.plan_trees(&chunks, trees);
        self.run_plan(&plan, &chunks, &input.tokens)
    }

    fn keep_rows(&mut self, slot: usize, past_len: usize, runs: &[(i64, i64)]) {
        self.cache.keep_rows(slot, past_len, runs);
    }
}

/// A part of a chunk that runs in one pass.
struct PassPart {
    chunk: Chunk,
    /// Index of the first row in the batch.
    first: i64,
}

/// Splits every chunk at multiples of [`MAX_PASS_TOKENS`] from the chunk's start. The n-th pieces of all chunks share a pass. A chunk's
/// pieces therefore do not depend on its batch.
fn split_into_passes(chunks: &[Chunk]) -> Vec<Vec<PassPart>> {
    let mut passes: Vec<Vec<PassPart>> = vec![];
    let mut first = 0;
    for &Chunk { slot, past_len, len } in chunks {
        for (pass, start) in (0..len).step_by(MAX_PASS_TOKENS).enumerate() {
            if pass == passes.len() {
                passes.push(vec![]);
            }
            let chunk = Chunk { slot, past_len: past_len + start, len: (len - start).min(MAX_PASS_TOKENS) };
            passes[pass].push(PassPart { chunk, first: (first + start) as i64 });
        }
        first += len;
    }
    passes
}

/// Loads only the target's embedding and LM head, `[V, d]` each, or one tensor if they are tied.
///
/// # Errors
/// If the folder lacks these tensors.
pub fn load_embed_and_head(
    dir: &Path,
    config: &ModelConfig,
    device: Device,
    kind: Kind,
) -> Result<(Tensor, Tensor), ModelError> {
    let weights = Weights::open_outer_tensors(dir, config.family.class(), device)?;
    let (embed, head) = read_embed_and_head(&weights, TensorNames::detect(&weights), config)?;
    Ok((embed.to_kind(kind), head.to_kind(kind)))
}

/// Embedding and head. A target without a family here also counts as tied if it has no head.
///
/// # Errors
/// If a tensor is missing or of another shape.
pub(crate) fn read_embed_and_head(
    weights: &Weights,
    names: TensorNames,
    config: &ModelConfig,
) -> Result<(Tensor, Tensor), ModelError> {
    let shape = [config.vocab_size, config.hidden_size];
    let embed = weights.get(&format!("{}embed_tokens.weight", names.body), &shape)?;
    let is_tied = config.tie_word_embeddings || (!config.has_forward && !weights.contains(names.head));
    let head = if is_tied { embed.shallow_clone() } else { weights.get(names.head, &shape)? };
    Ok((embed, head))
}

/// Checks that captured layers exist and increase.
///
/// # Errors
/// [`ModelError::Mismatch`] with the ids found and the possible ids.
pub fn check_taps(taps: &[Tap], layers: usize) -> Result<(), ModelError> {
    let increasing = taps.windows(2).all(|pair| pair[0] < pair[1]);
    if increasing && taps.iter().all(|tap| tap.is_within(layers)) {
        return Ok(());
    }
    Err(ModelError::Mismatch(UsageError(format!(
        "target layer ids {:?} do not fit a target of {layers} layers; expected strictly increasing ids from -1 (embedding) to {}",
        Tap::layer_ids(taps),
        layers as i64 - 1
    ))))
}
