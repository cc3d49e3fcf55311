//! Proposing: the context's keys and values are projected once per verified token and cached per slot.

use deepspec_decode::{Context, DraftRequest, Proposal, Proposer, Upload};
use deepspec_models::kv::{Chunk, KvCache, Ragged, Rows, Visibility};
use deepspec_models::{ModelConfig, ModelError};
use tch::{Kind, Tensor};

use super::heads::MarkovState;
use super::model::Block;
use crate::trained::DrafterConfig;
use crate::{Drafter, ExaminedDrafter};

/// A block drafter with context histories.
pub struct BlockProposer {
    block: Block,
    cache: KvCache,
    /// Whether the Markov head has a say in the tokens.
    biased: bool,
}

/// What a drafted block leaves behind for the confidence head.
pub struct Drafting {
    /// States `[S, γ, d]`, after the final norm.
    pub hidden: Tensor,
    /// Markov embeddings of the tokens before each slot, `[S, γ, r]`.
    pub embeddings: Option<Tensor>,
}

impl BlockProposer {
    /// A proposer with empty histories for `slots` sequences.
    pub fn new(block: Block, slots: usize) -> Self {
        let cache = KvCache::new(&block.attentions(), slots, block.kind(), block.device());
        Self { block, cache, biased: true }
    }

    /// The model.
    pub fn block(&self) -> &Block {
        &self.block
    }

    /// The model's part of a proposal: takes in the context, runs blocks behind the `anchors [S]`, and hands the float32 logits `[S, V]`
    /// of slot after slot to `choose(k, logits)`, whose tokens `[S]` the Markov head goes on from.
    pub fn forward(
        &mut self,
        context: &Context,
        slots: &[usize],
        anchors: &Tensor,
        mut choose: impl FnMut(i64, &Tensor) -> Tensor,
    ) -> Drafting {
        let taken = self.cache.behind(&context.chunks);
        let blocks = self.blocks(&taken, slots);
        self.cache.reserve(&[taken.as_slice(), &blocks].concat());
        let mut upload = Upload::default();
        let rows = (!taken.is_empty()).then(|| self.cache.place(&taken, &mut upload));
        let plan = self.cache.plan(&blocks, Visibility::Block, &mut upload);
        let sent = upload.send(self.block.device());
        if let Some(rows) = rows {
            self.take_in(context, &taken, &rows.on(&sent));
        }
        let hidden = self.hidden(&self.cache.ready(&plan, &sent), anchors); // [S, γ, d]
        let base = self.block.base_logits(&hidden); // [S, γ, V]
        let (mut previous, mut state) = (anchors.shallow_clone(), MarkovState::default());
        let mut embeddings = vec![];
        for k in 0..self.block_size() as i64 {
            let mut logits = base.select(1, k);
            if let Some(markov) = &self.block.parts.markov {
                let e = markov.embed(&previous);
                if self.biased {
                    let features = markov.step(&hidden.select(1, k), &e, &mut state);
                    logits += markov.bias(&features).to_kind(Kind::Float);
                }
                embeddings.push(e);
            }
            previous = choose(k, &logits);
        }
        let embeddings = (!embeddings.is_empty()).then(|| Tensor::stack(&embeddings, 1)); // [S, γ, r]
        Drafting { hidden, embeddings }
    }

    /// The slots' blocks, behind the context that is being `taken` in.
    fn blocks(&self, taken: &[Chunk], slots: &[usize]) -> Vec<Chunk> {
        let len = self.block_size();
        let block = |&slot: &usize| {
            let taken = taken.iter().find(|chunk| chunk.slot == slot);
            Chunk {
                slot,
                held: taken.map_or_else(|| self.cache.held(slot), |chunk| chunk.held + chunk.len),
                len,
            }
        };
        slots.iter().map(block).collect()
    }

    /// Appends newly verified states to the histories.
    fn take_in(&mut self, context: &Context, chunks: &[Chunk], rows: &Rows) {
        let rotations = self.block.rotations(rows.positions());
        let hidden = self.block.context(&context.taps);
        for (i, layer) in self.block.parts.layers.iter().enumerate() {
            let (k, v) = layer.attention.project_context(&hidden, rotations.of(i));
            self.cache.write(i, rows, &k, &v);
        }
        self.cache.advance(chunks);
    }

    /// Backbone states `[S, γ, d]` of blocks `[anchor, mask, …]`, after the final norm. The blocks' own keys stand behind the context
    /// for this pass only: the history does not advance over them.
    fn hidden(&mut self, plan: &Ragged, anchors: &Tensor) -> Tensor {
        let config = self.block.config();
        let (gamma, width) = (config.block_size, config.model.hidden_size);
        let rotations = self.block.rotations(plan.positions());
        let masks = anchors.unsqueeze(1).full_like(config.mask_token_id).repeat([1, gamma as i64 - 1]);
        let tokens = Tensor::cat(&[anchors.unsqueeze(1), masks], 1).reshape([-1]);
        let mut x = self.block.embed(&tokens); // [S·γ, d]
        for (i, layer) in self.block.parts.layers.iter().enumerate() {
            x = layer.forward(&x, rotations.of(i), |qkv| self.cache.attend(i, plan, qkv));
        }
        self.block.final_norm(&x).view([-1, gamma as i64, width])
    }
}

impl Drafter for BlockProposer {
    fn taps(&self) -> &[i64] {
        self.block.config().taps()
    }

    fn has_confidence(&self) -> bool {
        self.block.config().confidence.is_some()
    }

    /// Confidences still read the head's embeddings, where they were trained to.
    fn ignore_markov(&mut self) -> bool {
        self.biased = false;
        self.block.config().markov.is_some()
    }

    fn check_fits(&self, target: &ModelConfig) -> Result<(), ModelError> {
        self.block.config().check_fits(target)
    }

    fn examined(&self) -> Result<Option<Box<dyn ExaminedDrafter>>, ModelError> {
        Ok(Some(Box::new(self.block.share()?)))
    }
}

impl Proposer for BlockProposer {
    fn block_size(&self) -> usize {
        self.block.config().block_size
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        let DraftRequest { context, slots, anchors, uniforms, sampling } = *request;
        let (mut tokens, mut probs) = (vec![], vec![]);
        let Drafting { hidden, embeddings } = self.forward(context, slots, anchors, |k, logits| {
            let distribution = sampling.distributions(logits);
            let drawn = sampling.draw(&distribution, &uniforms.select(1, k));
            tokens.push(drawn.shallow_clone());
            probs.push(distribution);
            drawn
        });
        let confidence = self.block.confidence_logits(&hidden, embeddings.as_ref());
        Proposal { tokens: Tensor::stack(&tokens, 1), probs: Tensor::stack(&probs, 1), confidence }
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
}
