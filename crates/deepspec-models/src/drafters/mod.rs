//! Drafters: one folder each, one variant each.

pub mod block;
pub mod causal;
mod checkpoint;
mod config;
pub mod cost;
pub mod eagle3;
pub mod learner;
mod trained;
mod upload;
mod warm_start;

use std::fmt;
use std::path::Path;

use deepspec_decode::{DraftRequest, Proposal, Proposer};
use tch::{Device, Kind, Tensor};

use crate::config::{Fields, read_json};
use crate::{Block, BlockProposer, CausalProposer, Eagle3, Eagle3Proposer, ModelError, TargetModel};

pub use trained::TrainedConfig;

/// How a drafter is loaded.
#[derive(Debug, Clone)]
pub struct DrafterOptions {
    /// Where it runs.
    pub device: Device,
    /// Kind of weights and activations.
    pub kind: Kind,
    /// Sequences it holds at once.
    pub slots: usize,
}

/// Any drafter that can propose.
pub enum Drafter {
    /// DSpark, or DFlash, which is DSpark without heads.
    Block(BlockProposer),
    /// Eagle3.
    Eagle3(Eagle3Proposer),
    /// A smaller causal language model of the same vocabulary.
    Causal(Box<CausalProposer>),
}

/// The kinds of drafters that checkpoints hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Algorithm {
    Block,
    Eagle3,
    Causal,
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Block => "a block drafter (DSpark, DFlash)",
            Self::Eagle3 => "Eagle3",
            Self::Causal => "a causal language model",
        })
    }
}

impl Algorithm {
    /// The kind of the checkpoint in `dir`, by the class that its config names.
    ///
    /// # Errors
    /// If the folder is no drafter checkpoint of a known kind.
    fn of(dir: &Path) -> Result<Self, ModelError> {
        const KNOWN: [(&str, Algorithm); 8] = [
            ("Qwen3DSparkModel", Algorithm::Block),
            ("Gemma4DSparkModel", Algorithm::Block),
            ("Qwen3Eagle3Model", Algorithm::Eagle3),
            ("Gemma4Eagle3Model", Algorithm::Eagle3),
            ("Qwen3ForCausalLM", Algorithm::Causal),
            ("Gemma4ForCausalLM", Algorithm::Causal),
            ("Gemma4ForConditionalGeneration", Algorithm::Causal),
            ("Gemma4UnifiedForConditionalGeneration", Algorithm::Causal),
        ];
        let (path, map) = read_json(dir)?;
        let fields = Fields::new(&path, &map);
        let found = map.get("architectures").and_then(|list| list.get(0)).and_then(|name| name.as_str());
        let known = KNOWN.iter().find(|(name, _)| Some(*name) == found);
        known.map(|(_, algorithm)| *algorithm).ok_or_else(|| {
            if let Some(advice) = deepspec_dialects::advice(dir) {
                let found = found.unwrap_or("no class");
                return fields.error("architectures", format!("{found} is not read: {advice}"));
            }
            let names = KNOWN.map(|(name, _)| name).join(", ");
            fields.error("architectures", format!("{found:?} is no known drafter; expected one of {names}"))
        })
    }
}

impl Drafter {
    /// Loads the drafter checkpoint in `dir`.
    ///
    /// # Errors
    /// If the folder is no drafter checkpoint of a known kind, or its tensors do not fit its config.
    pub fn load(dir: &Path, options: &DrafterOptions) -> Result<Self, ModelError> {
        let DrafterOptions { device, kind, slots } = *options;
        Ok(match Algorithm::of(dir)? {
            Algorithm::Block => Self::Block(BlockProposer::new(Block::load(dir, device, kind)?, slots)),
            Algorithm::Eagle3 => Self::Eagle3(Eagle3Proposer::new(Eagle3::load(dir, device, kind)?, slots)),
            Algorithm::Causal => Self::Causal(Box::new(CausalProposer::load(dir, options)?)),
        })
    }

    /// Whether the checkpoint in `dir` is a language model in its own right, whose ids mean what its own tokenizer says.
    ///
    /// # Errors
    /// If the folder is no drafter checkpoint of a known kind.
    pub fn is_language_model(dir: &Path) -> Result<bool, ModelError> {
        Ok(Algorithm::of(dir)? == Algorithm::Causal)
    }

    /// Target layers whose states it reads.
    pub fn taps(&self) -> &[i64] {
        match self {
            Self::Block(proposer) => &proposer.block().config().target_layer_ids,
            Self::Eagle3(proposer) => &proposer.model().config().target_layer_ids,
            Self::Causal(_) => &[],
        }
    }

    /// Whether its proposals come with confidences.
    pub fn has_confidence(&self) -> bool {
        match self {
            Self::Block(proposer) => proposer.block().config().confidence.is_some(),
            Self::Eagle3(_) | Self::Causal(_) => false,
        }
    }

    /// Drafts without the Markov head from now on; whether there is one.
    pub fn ignore_markov(&mut self) -> bool {
        match self {
            Self::Block(proposer) if proposer.block().config().markov.is_some() => {
                proposer.ignore_markov();
                true
            }
            Self::Block(_) | Self::Eagle3(_) | Self::Causal(_) => false,
        }
    }

    /// Whether this drafter belongs to this target, judged by their configs.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] naming what differs.
    pub fn check_fits(&self, target: &TargetModel) -> Result<(), ModelError> {
        match self {
            Self::Block(proposer) => proposer.block().config().check_fits(target.config()),
            Self::Eagle3(proposer) => proposer.model().config().check_fits(target.config()),
            Self::Causal(proposer) => proposer.check_fits(target.config()),
        }
    }

    /// Drafts `tokens` per block from now on where drafting goes token by token, a trained drafter no more than it was trained for. Block
    /// drafters compute their blocks whole.
    pub fn draft(&mut self, tokens: usize) {
        match self {
            Self::Block(_) => {}
            Self::Eagle3(proposer) => proposer.draft(tokens),
            Self::Causal(proposer) => proposer.draft(tokens),
        }
    }

    fn as_proposer(&self) -> &dyn Proposer {
        match self {
            Self::Block(proposer) => proposer,
            Self::Eagle3(proposer) => proposer,
            Self::Causal(proposer) => proposer.as_ref(),
        }
    }

    fn as_proposer_mut(&mut self) -> &mut dyn Proposer {
        match self {
            Self::Block(proposer) => proposer,
            Self::Eagle3(proposer) => proposer,
            Self::Causal(proposer) => proposer.as_mut(),
        }
    }
}

impl Proposer for Drafter {
    fn block_size(&self) -> usize {
        self.as_proposer().block_size()
    }

    fn ends_at_stop_tokens(&self) -> bool {
        self.as_proposer().ends_at_stop_tokens()
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        self.as_proposer_mut().propose(request)
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.as_proposer_mut().truncate(slot, len);
    }

    fn history_bytes(&self, tokens: usize) -> u64 {
        self.as_proposer().history_bytes(tokens)
    }

    fn release(&mut self) {
        self.as_proposer_mut().release();
    }
}

/// Draws γ tokens one after the other. `logits` gives those behind the last one that was drawn, and at first behind the
/// anchors: `[S, V]`.
fn token_by_token(
    request: &DraftRequest,
    gamma: usize,
    mut logits: impl FnMut(Option<&Tensor>) -> Tensor,
) -> Proposal {
    let (mut tokens, mut probs): (Vec<Tensor>, Vec<Tensor>) = (vec![], vec![]);
    for k in 0..gamma {
        let distribution = request.sampling.distributions(&logits(tokens.last()));
        tokens.push(request.sampling.draw(&distribution, &request.uniforms.select(1, k as i64)));
        probs.push(distribution);
    }
    Proposal { tokens: Tensor::stack(&tokens, 1), probs: Tensor::stack(&probs, 1), confidence: None }
}
