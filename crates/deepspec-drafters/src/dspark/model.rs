//! DSpark and DFlash: a backbone and, behind it, the heads that there are.

use deepspec_engine::DraftSampling;
use deepspec_models::nn::Builder;
use tch::{Kind, Tensor};

use super::config::BlockConfig;
use super::heads::{ConfidenceHead, MarkovHead, MarkovState};
use crate::block_common::{Backbone, BlockDrafter, BlockSpec};
use crate::draft_model::DraftModel;

/// A DSpark or DFlash drafter.
pub type Block = DraftModel<BlockParts>;

/// Backbone and heads.
pub struct BlockParts {
    backbone: Backbone,
    pub(super) markov: Option<MarkovHead>,
    pub(super) confidence: Option<ConfidenceHead>,
    /// Whether the Markov head has a say in the tokens.
    biased: bool,
}

impl BlockParts {
    /// Asks for the tensors in the order in which they are trained.
    pub(super) fn build(b: &Builder, config: &BlockConfig) -> Self {
        let model = &config.decoder.model;
        Self {
            backbone: Backbone::new(b, model),
            markov: config
                .markov
                .map(|markov| MarkovHead::new(b, markov, model.vocab_size, model.hidden_size)),
            confidence: ConfidenceHead::new(b, config),
            biased: true,
        }
    }
}

impl BlockDrafter for BlockParts {
    type State = MarkovState;

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }

    fn blocks(config: &BlockConfig) -> &BlockSpec {
        &config.blocks
    }

    fn has_confidence(config: &BlockConfig) -> bool {
        config.confidence.is_some()
    }

    fn draft_sampling(&self) -> DraftSampling {
        match self.biased && self.markov.is_some() {
            true => DraftSampling::Probabilistic,
            false => DraftSampling::Greedy,
        }
    }

    /// Confidences still read the head's embeddings, where they were trained to.
    fn ignore_markov(&mut self) -> bool {
        self.biased = false;
        self.markov.is_some()
    }

    fn step(
        model: &Block,
        base: Tensor,
        hidden: &Tensor,
        previous: &Tensor,
        state: &mut MarkovState,
    ) -> (Tensor, Option<Tensor>) {
        let Some(markov) = &model.parts.markov else { return (base, None) };
        let e = markov.embed(previous);
        if !model.parts.biased {
            return (base, Some(e));
        }
        let features = markov.step(hidden, &e, state);
        (base + markov.bias(&features).to_kind(Kind::Float), Some(e))
    }

    fn features(model: &Block, hidden: &Tensor, previous: &Tensor) -> Option<(Tensor, Tensor)> {
        model.parts.markov.as_ref().map(|markov| {
            let e = markov.embed(previous);
            let features = markov.features(hidden, &e);
            (e, features)
        })
    }

    fn slot_logits(model: &Block, hidden: &Tensor, features: Option<&Tensor>) -> Tensor {
        let base = model.base_logits(hidden);
        match (&model.parts.markov, features) {
            (Some(markov), Some(features)) => base + markov.bias(features).to_kind(Kind::Float),
            _ => base,
        }
    }

    fn confidence(model: &Block, hidden: &Tensor, embeddings: Option<&Tensor>) -> Option<Tensor> {
        let head = model.parts.confidence.as_ref();
        head.map(|head| head.forward(hidden, embeddings).to_kind(Kind::Float))
    }
}
