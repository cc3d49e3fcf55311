//! What a drafter is, whichever dialect says it.

use std::fmt;

use deepspec_core::{Slots, Tap};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::Dialect;
use crate::families::{Family, QWEN3};

/// Kinds of drafters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Algorithm {
    /// A block drafter with a Markov or a confidence head.
    Dspark,
    /// A block drafter without heads.
    Dflash,
    /// Eagle3.
    Eagle3,
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Dspark => "DSpark",
            Self::Dflash => "DFlash",
            Self::Eagle3 => "Eagle3",
        })
    }
}

/// Forms of the Markov head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MarkovKind {
    /// The previous token's embedding as it is.
    Vanilla,
    /// The same, gated by the hidden state.
    Gated,
    /// With a recurrent state.
    Rnn,
}

impl MarkovKind {
    /// The kind of this name in config files.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Vanilla, Self::Gated, Self::Rnn].into_iter().find(|kind| kind.name() == name)
    }

    /// Its name in config files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vanilla => "vanilla",
            Self::Gated => "gated",
            Self::Rnn => "rnn",
        }
    }
}

/// The Markov head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Markov {
    /// Its form.
    pub kind: MarkovKind,
    /// r, width of its embeddings.
    pub rank: u64,
}

/// A block drafter's own settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Block {
    /// B, slots of a block.
    pub block_size: u64,
    /// Stands for the tokens to be predicted.
    pub mask_token_id: u64,
    /// What its slots predict.
    pub slots: Slots,
    /// Markov head, if any.
    pub markov: Option<Markov>,
    /// Whether the confidence head reads the Markov embedding; None without that head.
    pub confidence_with_markov: Option<bool>,
}

/// What tells one algorithm from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Design {
    /// DSpark or DFlash.
    Block(Block),
    /// Eagle3 with so many drafted tokens per block.
    Eagle3 {
        /// Drafted tokens.
        steps: u64,
    },
}

/// Something that only this checkpoint's own dialect can say.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Obstacle {
    /// The key, or the tensor, that says it.
    pub key: String,
    /// Why it stops a conversion.
    pub reason: String,
}

/// A drafter as its checkpoint describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct Drafter {
    /// The class that the config names.
    pub architecture: String,
    /// Its layers' family.
    pub family: Family,
    /// The decoder's own config keys, `num_hidden_layers` being the draft layers.
    pub decoder: Map<String, Value>,
    /// d.
    pub hidden_size: u64,
    /// V, tokens of the target.
    pub vocab_size: u64,
    /// Tokens that it can draft, fewer than V where the vocabulary is pruned.
    pub draft_vocab_size: u64,
    /// Draft layers.
    pub layers: u64,
    /// Where it taps the target.
    pub taps: Vec<Tap>,
    /// Layers of the target, where the config tells.
    pub num_target_layers: Option<u64>,
    /// The algorithm.
    pub design: Design,
    /// Keys that only inform, such as `num_anchors`.
    pub notes: Map<String, Value>,
    /// What stops a conversion to any other dialect.
    pub obstacles: Vec<Obstacle>,
}

/// Keys that inform about training and change nothing else.
pub const NOTES: [&str; 2] = ["num_anchors", "step_loss_decay"];

impl Drafter {
    /// Its kind.
    pub fn algorithm(&self) -> Algorithm {
        match self.design {
            Design::Eagle3 { .. } => Algorithm::Eagle3,
            Design::Block(Block { markov: None, confidence_with_markov: None, .. }) => Algorithm::Dflash,
            Design::Block(_) => Algorithm::Dspark,
        }
    }

    /// The block drafter's settings, if it is one.
    pub fn block(&self) -> Option<Block> {
        match self.design {
            Design::Block(block) => Some(block),
            Design::Eagle3 { .. } => None,
        }
    }

    /// Drafted tokens per cycle.
    pub fn drafted(&self) -> u64 {
        match self.design {
            Design::Eagle3 { steps } => steps,
            Design::Block(block) => block.block_size.saturating_sub(block.slots.first() as u64),
        }
    }

    /// The layer ids as speculators and vLLM count them: the embedding's output is 0.
    pub fn aux_layer_ids(&self) -> Vec<i64> {
        self.taps.iter().map(|tap| tap.layer_id() + 1).collect()
    }

    /// Why this drafter cannot be said in `to`; `own` is its dialect. None if it can.
    pub fn refusal(&self, own: Dialect, to: Dialect) -> Option<String> {
        if own == to {
            return Some(format!("it is a checkpoint of {own} already"));
        }
        if let Some(Obstacle { key, reason }) = self.obstacles.first() {
            return Some(format!("`{key}`: {reason}"));
        }
        if self.family != &QWEN3 {
            let family = self.family;
            return Some(format!(
                "its layers are {family}'s; only Qwen3 draft layers mean the same in all dialects"
            ));
        }
        if let (Some(layers), Some(tap)) =
            (self.num_target_layers, self.taps.iter().find(|&&tap| self.is_edge(tap)))
        {
            let last = layers.saturating_sub(2);
            return Some(format!(
                "layer id {} is outside of 0 to {last}: tools differ in what they hand out for the embedding and the \
                 last of {layers} layers (before or after the final norm)",
                tap.layer_id()
            ));
        }
        match self.design {
            Design::Eagle3 { .. } => self.eagle3_refusal(to),
            Design::Block(block) => block_refusal(&block, self.algorithm(), to),
        }
    }

    /// Whether this layer's state is not the same for all tools.
    fn is_edge(&self, tap: Tap) -> bool {
        tap == Tap::Embedding
            || self.num_target_layers.is_some_and(|layers| tap.layer_id() + 1 >= layers as i64)
    }

    fn eagle3_refusal(&self, to: Dialect) -> Option<String> {
        if self.layers > 1 {
            let layers = self.layers;
            return Some(format!(
                "it has {layers} layers; ours all read [embedding; state], those of other tools only the first"
            ));
        }
        match to {
            Dialect::Reference | Dialect::Speculators => None,
            Dialect::Specforge => Some(
                "LlamaForCausalLMEagle3 has no norms on queries and keys, and its loader would skip these weights silently"
                    .into(),
            ),
            Dialect::Zlab | Dialect::Modelopt => Some("this dialect has no Eagle3 with Qwen3 layers".into()),
        }
    }
}

fn block_refusal(block: &Block, algorithm: Algorithm, to: Dialect) -> Option<String> {
    let needs = match to {
        // Each of the two model types of speculators has its own convention.
        Dialect::Reference | Dialect::Speculators => block.slots,
        Dialect::Zlab => Slots::FillIn,
        Dialect::Specforge | Dialect::Modelopt => Slots::AnchorPredicts,
    };
    if block.slots != needs {
        return Some(format!(
            "the weights are not interchangeable, only the container is: in this checkpoint {}, in {to} {needs}; it has to be \
             trained anew",
            block.slots
        ));
    }
    match to {
        Dialect::Zlab if algorithm == Algorithm::Dspark => Some("z-lab's DFlash has no heads".into()),
        Dialect::Speculators if block.slots == Slots::FillIn && algorithm == Algorithm::Dspark => {
            Some("heads beside z-lab's slots: no tool serves this".into())
        }
        Dialect::Modelopt if block.markov.is_none() => {
            Some("ModelOpt's DSpark needs a Markov head, and its plain DFlash has z-lab's slots".into())
        }
        Dialect::Modelopt if block.confidence_with_markov == Some(false) => {
            Some("ModelOpt's confidence head always reads the Markov embedding, this one does not".into())
        }
        _ => None,
    }
}
