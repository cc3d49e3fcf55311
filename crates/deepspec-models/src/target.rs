//! The target: a causal language model with key/value slots and taps into its layers.

use std::cell::OnceCell;
use std::path::Path;

use deepspec_core::Tap;
use deepspec_core::cli::UsageError;
use deepspec_decode::{Feed, Forwarded, Part, Target, Upload, Uploaded};
use tch::{Device, Kind, Tensor};

use crate::families::Names;
use crate::kv::{Chunk, KvCache, MaskKind, PendingPlan};
use crate::nn::{
    AttentionSpec, Builder, DecoderLayer, RmsNorm, Ropes, Vocabulary, laid_out_for_few_rows,
    second_layout_bytes,
};
use crate::{ModelConfig, ModelError, Weights};

/// Tokens that a slot takes in within one pass. What a pass holds for a token (the MLP's insides above all) is far more than
/// what stays of it.
const PASS_TOKENS: usize = 4096;

/// Bytes per logit of what verification makes of it: float32 logits and distributions of target and drafter, float64 sums of
/// them, and the sorted copies of the filters.
const JUDGED_BYTES: u64 = 48;

/// How a target is loaded.
#[derive(Debug, Clone)]
pub struct TargetOptions {
    /// Where it runs.
    pub device: Device,
    /// Kind of weights and activations.
    pub kind: Kind,
    /// Sequences it holds at once.
    pub slots: usize,
    /// Layers whose raw output is captured, strictly increasing.
    pub taps: Vec<Tap>,
}

/// A causal language model of any family.
pub struct TargetModel {
    config: ModelConfig,
    vocabulary: Vocabulary,
    /// The head once more, laid out for few rows: 8 rows of 1,024 and 151,936 tokens take half of the time so on the CPU. Made where logits are
    /// asked for; capturing does without.
    decoding_head: OnceCell<Tensor>,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    ropes: Ropes,
    cache: KvCache,
    taps: Vec<Tap>,
    kind: Kind,
    device: Device,
}

impl TargetModel {
    /// Loads the model in `dir` (config.json and safetensors, sharded or not, or an unpacked GGUF; head tied or not, alone or within a multimodal
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
        let (embed, head) = read_embed_and_head(&weights, names, &config)?;
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
            decoding_head: OnceCell::new(),
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

    /// Its embedding and head as [`load_embed_and_head`] gives them, sharing storage with the model.
    pub fn embed_and_head(&self) -> (Tensor, Tensor) {
        (self.vocabulary.embed_tokens().shallow_clone(), self.vocabulary.lm_head().shallow_clone())
    }
}

/// A forward whose numbers are on their way to the device.
pub struct Prepared {
    passes: Vec<PassSketch>,
    /// Brings the rows of all passes, one pass after the other, into the order of the feed.
    back: Option<Part>,
}

struct PassSketch {
    chunks: Vec<Chunk>,
    /// Its rows of the feed; None where it has all of them.
    rows: Option<Part>,
    plan: PendingPlan,
}

impl TargetModel {
    /// Chunks `(slot, tokens)` behind what their slots hold.
    pub fn behind(&self, chunks: &[(usize, usize)]) -> Vec<Chunk> {
        self.cache.behind(chunks)
    }

    /// Makes room for forwards that are to run one after the other, and gathers their numbers.
    ///
    /// Chunks of more than [`PASS_TOKENS`] run in several passes, so that the memory of a pass does not grow with their length.
    pub fn prepare(&mut self, feeds: &[Vec<Chunk>], upload: &mut Upload<i64>) -> Vec<Prepared> {
        self.cache.reserve(&feeds.concat());
        feeds.iter().map(|chunks| self.sketch(chunks, upload)).collect()
    }

    fn sketch(&self, chunks: &[Chunk], upload: &mut Upload<i64>) -> Prepared {
        let passes = passes(chunks);
        if passes.len() <= 1 {
            let plan = self.cache.plan(chunks, MaskKind::Causal, upload);
            let pass = PassSketch { chunks: chunks.to_vec(), rows: None, plan };
            return Prepared { passes: vec![pass], back: None };
        }
        let (mut sketches, mut order) = (vec![], vec![]);
        for pass in passes {
            let rows: Vec<i64> =
                pass.iter().flat_map(|part| part.first..part.first + part.chunk.len as i64).collect();
            let chunks: Vec<Chunk> = pass.into_iter().map(|part| part.chunk).collect();
            let plan = self.cache.plan(&chunks, MaskKind::Causal, upload);
            sketches.push(PassSketch { chunks, rows: Some(upload.push(rows.iter().copied())), plan });
            order.extend(rows);
        }
        let back = (!order.is_sorted()).then(|| {
            let mut back = vec![0; order.len()];
            for (place, &row) in order.iter().enumerate() {
                back[row as usize] = place as i64;
            }
            upload.push(back)
        });
        Prepared { passes: sketches, back }
    }

    /// Appends the prepared chunks' `tokens [N]` to their slots' histories.
    pub fn run(&mut self, prepared: &Prepared, sent: &Uploaded, tokens: &Tensor) -> Forwarded {
        if let [only] = prepared.passes.as_slice() {
            return self.pass(only, sent, tokens);
        }
        let (mut hidden, mut taps) = (vec![], vec![]);
        for pass in &prepared.passes {
            let own = pass
                .rows
                .map_or_else(|| tokens.shallow_clone(), |rows| tokens.index_select(0, &sent.of(rows)));
            let out = self.pass(pass, sent, &own);
            hidden.push(out.hidden);
            taps.push(out.taps);
        }
        let in_order = |parts: Vec<Tensor>| {
            let rows = Tensor::cat(&parts, 0);
            prepared.back.map_or_else(|| rows.shallow_clone(), |back| rows.index_select(0, &sent.of(back)))
        };
        Forwarded { hidden: in_order(hidden), taps: in_order(taps) }
    }

    /// One pass over all rows at once.
    fn pass(&mut self, sketch: &PassSketch, sent: &Uploaded, tokens: &Tensor) -> Forwarded {
        let plan = self.cache.ready(&sketch.plan, sent);
        let rotations = self.ropes.at(plan.positions(), self.kind);
        let mut x = self.vocabulary.embed(tokens); // [N, d]
        let mut captured = Vec::with_capacity(self.taps.len());
        if self.taps.first() == Some(&Tap::Embedding) {
            captured.push(x.shallow_clone());
        }
        for (i, layer) in self.layers.iter().enumerate() {
            x = layer.forward(&x, rotations.of(i), |qkv| self.cache.attend(i, &plan, qkv));
            if self.taps.contains(&Tap::Layer(i as u32)) {
                captured.push(x.shallow_clone());
            }
        }
        self.cache.advance(&sketch.chunks);
        let taps = if captured.is_empty() {
            Tensor::zeros([x.size()[0], 0], (self.kind, self.device))
        } else {
            Tensor::cat(&captured, 1)
        };
        Forwarded { hidden: self.norm.forward(&x), taps }
    }

    /// Bytes that a forward of `rows` tokens works with at most, the logits and distributions of `judged` of them, and the head in the layout
    /// of decoding.
    pub fn working_bytes(&self, rows: usize, judged: usize) -> u64 {
        let layer = |layer: &crate::nn::LayerSpec| {
            let heads = layer.attention.heads;
            3 * layer.intermediate_size + 4 * (heads.query + heads.key_value) * heads.dim
        };
        let widest = self.config.layers.iter().map(layer).max().unwrap_or(0);
        let row = widest + (6 + 2 * self.taps.len() as i64) * self.config.hidden_size;
        rows as u64 * row as u64 * self.kind.elt_size_in_bytes() as u64
            + judged as u64 * self.config.vocab_size as u64 * JUDGED_BYTES
            + second_layout_bytes(self.vocabulary.lm_head())
    }
}

impl Target for TargetModel {
    fn forward(&mut self, feed: &Feed) -> Forwarded {
        let mut upload = Upload::default();
        let prepared = self.prepare(&[self.behind(feed.chunks)], &mut upload);
        self.run(&prepared[0], &upload.send(self.device), &feed.tokens)
    }

    fn logits(&self, hidden: &Tensor) -> Tensor {
        let laid_out = || laid_out_for_few_rows(self.vocabulary.lm_head().shallow_clone());
        self.vocabulary.logits_by(self.decoding_head.get_or_init(laid_out), hidden)
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.cache.truncate(slot, len);
    }

    fn history_bytes(&self, tokens: usize) -> u64 {
        self.cache.history_bytes(tokens) as u64
    }

    fn release(&mut self) {
        self.cache.release();
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab_size as usize
    }

    fn device(&self) -> Device {
        self.device
    }
}

/// Rows of a feed that one slot takes in within one pass.
struct PassPart {
    chunk: Chunk,
    /// The first of them.
    first: i64,
}

/// Cuts every chunk at multiples of [`PASS_TOKENS`] from its own start, whatever it rides with: the n-th pieces of all chunks
/// run together.
fn passes(chunks: &[Chunk]) -> Vec<Vec<PassPart>> {
    let mut passes: Vec<Vec<PassPart>> = vec![];
    let mut first = 0;
    for &Chunk { slot, past_len, len } in chunks {
        for (pass, start) in (0..len).step_by(PASS_TOKENS).enumerate() {
            if pass == passes.len() {
                passes.push(vec![]);
            }
            let chunk = Chunk { slot, past_len: past_len + start, len: (len - start).min(PASS_TOKENS) };
            passes[pass].push(PassPart { chunk, first: (first + start) as i64 });
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
pub fn load_embed_and_head(
    dir: &Path,
    config: &ModelConfig,
    device: Device,
    kind: Kind,
) -> Result<(Tensor, Tensor), ModelError> {
    let weights = Weights::open(dir, config.family.class(), device, kind)?;
    read_embed_and_head(&weights, Names::of(&weights), config)
}

fn read_embed_and_head(
    weights: &Weights,
    names: Names,
    config: &ModelConfig,
) -> Result<(Tensor, Tensor), ModelError> {
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
