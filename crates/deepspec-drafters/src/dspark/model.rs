//! DSpark and DFlash: keys of recipes and checkpoints, heads, and drafting.
//!
//! A block of B tokens `[anchor, mask, …]` runs through the backbone at once, and every slot drafts a token. DSpark adds a
//! Markov head, which corrects a slot's logits by the token before it. Its confidence head predicts whether the target
//! accepts the token. DFlash has neither head.

use deepspec_checkpoint::{CheckpointError, Fields};
use deepspec_core::Slots;
use deepspec_core::recipe::at_least_one;
use deepspec_engine::DraftSampling;
use deepspec_models::ModelConfig;
use deepspec_models::nn::{Builder, Init, Linear, Weight};
use deepspec_ops::distill_loss::LossRecipe;
use deepspec_ops::linear;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};

use crate::ConfigIssue;
use crate::block_common::{Backbone, BlockDrafter, BlockSpec, DraftLayers, LayerType, MAX_RANK, num_anchors};
use crate::draft_model::{DraftConfig, DraftModel, DrafterSettings, WarmStart};

/// A block drafter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BlockRecipe {
    /// B, slots of a block. All of them draft, or with `slots: fill_in` all but the first.
    pub block_size: usize,
    /// Tokens that the slots predict.
    #[serde(default)]
    pub slots: Slots,
    /// Decoder layers of the drafter.
    pub num_draft_layers: usize,
    /// Tokens that a draft layer with a window sees, itself included. The layers without one see everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
    /// Attention kind of each draft layer. If absent, every layer uses `sliding_window` when it is set, and full attention otherwise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layer_types: Vec<LayerType>,
    /// A token that never occurs in text; stands for what is to be predicted.
    pub mask_token_id: i64,
    /// Blocks per training sequence.
    #[serde(default = "num_anchors")]
    pub num_anchors: usize,
    /// The Markov head; absent means none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub markov: Option<Markov>,
    /// The confidence head; absent means none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confidence: Option<ConfidenceRecipe>,
    /// Weights of the losses; absent means the algorithm's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<LossRecipe>,
}

/// How the bias on the logits depends on the previous token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum MarkovKind {
    /// `W2 e`.
    Vanilla,
    /// `W2 (σ(G[h; e] + b) ⊙ e)`.
    Gated,
    /// `W2 tanh(o)` of a gated recurrent state.
    Rnn,
}

impl MarkovKind {
    /// The kind of this name in config files.
    ///
    /// # Errors
    /// The problem with an unknown name.
    pub(super) fn parse(name: &str) -> Result<Self, String> {
        let found = [Self::Vanilla, Self::Gated, Self::Rnn].into_iter().find(|kind| kind.name() == name);
        found.ok_or_else(|| format!("\"{name}\" is unknown; expected vanilla, gated or rnn"))
    }

    /// Its name in config files.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Vanilla => "vanilla",
            Self::Gated => "gated",
            Self::Rnn => "rnn",
        }
    }
}

/// The Markov head: a low-rank correction of the logits by the previous token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Markov {
    /// Its form.
    #[serde(rename = "type")]
    pub kind: MarkovKind,
    /// r, its rank.
    pub rank: i64,
}

/// The confidence head.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ConfidenceRecipe {
    /// Whether it also reads the previous token's Markov embedding.
    pub with_markov: bool,
    /// Weight of its loss.
    #[serde(default = "one")]
    pub alpha: f64,
}

fn one() -> f64 {
    1.0
}

impl BlockRecipe {
    /// Its draft layers.
    pub fn layers(&self) -> DraftLayers<'_> {
        let Self { num_draft_layers: count, sliding_window, layer_types: types, .. } = self;
        DraftLayers { count: *count, sliding_window: *sliding_window, types }
    }

    /// Checks values against their ranges and each other.
    pub fn check(&self) -> Result<(), ConfigIssue> {
        at_least_one(&[
            ("block_size", self.block_size),
            ("num_draft_layers", self.num_draft_layers),
            ("num_anchors", self.num_anchors),
            ("sliding_window", self.sliding_window.unwrap_or(1)),
        ])?;
        self.layers().check()?;
        if self.slots.drafted(self.block_size) == 0 {
            return Err((
                "block_size",
                "must be at least 2: the first slot of fill_in drafts nothing".into(),
            ));
        }
        if self.confidence.is_some_and(|confidence| confidence.with_markov) && self.markov.is_none() {
            return Err(("confidence.with_markov", "there is no Markov head to read from".into()));
        }
        if self.confidence.is_some_and(|confidence| !confidence.alpha.is_finite() || confidence.alpha < 0.0) {
            return Err(("confidence.alpha", "must be a number from 0".into()));
        }
        if self.markov.is_some_and(|markov| markov.rank < 1) {
            return Err(("markov.rank", "must be at least 1; leave `markov` out for no head".into()));
        }
        Ok(())
    }
}

/// The confidence head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Confidence {
    /// Whether it reads the previous token's Markov embedding beside the hidden state.
    pub with_markov: bool,
}

/// Settings of a block drafter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockSettings {
    /// Its blocks.
    pub blocks: BlockSpec,
    /// Markov head, if any.
    pub markov: Option<Markov>,
    /// Confidence head, if any.
    pub confidence: Option<Confidence>,
}

/// A block drafter's architecture.
pub type BlockConfig = DraftConfig<BlockSettings>;

impl DrafterSettings for BlockSettings {
    const CLASS: &'static str = "DSparkModel";
    const RECIPE_KEYS: &'static [(&'static str, &'static str)] =
        &[("markov_rank", "markov.rank"), ("confidence_head_with_markov", "confidence.with_markov")];

    fn read(fields: &Fields) -> Result<Self, CheckpointError> {
        let (markov, confidence) = Self::read_heads(fields)?;
        Ok(Self { blocks: BlockSpec::read(fields, Slots::AnchorPredicts)?, markov, confidence })
    }

    fn write(&self, map: &mut Map<String, Value>) {
        self.blocks.write(map);
        map.insert("num_anchors".into(), json!(self.blocks.num_anchors));
        self.write_heads(map);
    }

    fn check(&self, model: &ModelConfig) -> Result<(), ConfigIssue> {
        self.check_sizes(model.vocab_size)
    }

    fn block_spec(&self) -> Option<&BlockSpec> {
        Some(&self.blocks)
    }

    fn block_spec_mut(&mut self) -> Option<&mut BlockSpec> {
        Some(&mut self.blocks)
    }

    fn embeds_previous(&self) -> bool {
        self.markov.is_some()
    }

    fn shrink(&mut self) {
        self.blocks.shrink();
        self.markov = self.markov.map(|markov| Markov { rank: 8, ..markov });
    }

    /// Heads that the other drafter lacks keep their random weights.
    fn compare_for_warm_start(&self, from: &Self, transfer: &mut WarmStart) {
        self.blocks.compare_for_warm_start(&from.blocks, transfer);
        let markov = |head: Option<Markov>| {
            head.map_or("none".into(), |head| format!("{}, rank {}", head.kind.name(), head.rank))
        };
        match from.markov {
            Some(_) => transfer.compare("markov", markov(from.markov), markov(self.markov)),
            None => transfer.may_be_fresh.push("markov_head."),
        }
        let confidence = |head: Option<Confidence>| match head {
            None => "none",
            Some(Confidence { with_markov: true }) => "with Markov embeddings",
            Some(Confidence { with_markov: false }) => "without Markov embeddings",
        };
        match from.confidence {
            Some(_) => {
                transfer.compare("confidence", confidence(from.confidence), confidence(self.confidence))
            }
            None => transfer.may_be_fresh.push("confidence_head."),
        }
    }
}

impl BlockSettings {
    /// Reads the Markov head and the confidence head.
    ///
    /// # Errors
    /// If a key has a wrong value.
    pub(super) fn read_heads(
        fields: &Fields,
    ) -> Result<(Option<Markov>, Option<Confidence>), CheckpointError> {
        let markov = match fields.count("markov_rank")?.unwrap_or(0) as i64 {
            0 => None,
            rank => {
                let kind = MarkovKind::parse(fields.text("markov_head_type")?.unwrap_or("vanilla"));
                let kind = kind.map_err(|problem| fields.error("markov_head_type", problem))?;
                Some(Markov { kind, rank })
            }
        };
        let with_markov = fields.flag("confidence_head_with_markov")?.unwrap_or(false);
        let confidence = fields.flag("enable_confidence_head")?.unwrap_or(false);
        Ok((markov, confidence.then_some(Confidence { with_markov })))
    }

    /// Writes the Markov head and the confidence head.
    pub(super) fn write_heads(&self, map: &mut Map<String, Value>) {
        map.insert("markov_rank".into(), json!(self.markov.map_or(0, |markov| markov.rank)));
        match self.markov {
            Some(markov) => map.insert("markov_head_type".into(), json!(markov.kind)),
            None => map.remove("markov_head_type"),
        };
        map.insert("enable_confidence_head".into(), json!(self.confidence.is_some()));
        match self.confidence {
            Some(head) => map.insert("confidence_head_with_markov".into(), json!(head.with_markov)),
            None => map.remove("confidence_head_with_markov"),
        };
    }

    /// Checks the settings against each other and against a vocabulary of so many tokens.
    ///
    /// # Errors
    /// A key, and the problem with its value.
    pub(super) fn check_sizes(&self, vocab_size: i64) -> Result<(), ConfigIssue> {
        self.blocks.check(vocab_size)?;
        if let Some(markov) = self.markov.filter(|markov| !(1..=MAX_RANK).contains(&markov.rank)) {
            return Err(("markov_rank", format!("{} is not between 1 and {MAX_RANK}", markov.rank)));
        }
        if self.confidence.is_some_and(|confidence| confidence.with_markov) && self.markov.is_none() {
            return Err((
                "confidence_head_with_markov",
                "the confidence head wants the Markov embedding, but there is no Markov head".into(),
            ));
        }
        Ok(())
    }
}

/// Low-rank bias on the logits, given the previous token.
pub struct MarkovHead {
    w1: Tensor, // [V, r]
    w2: Weight, // [V, r]
    form: Form,
    rank: i64,
}

enum Form {
    Vanilla,
    Gated(Linear),
    Rnn(Linear),
}

/// The recurrent state `[S, r]`; empty for heads without one.
#[derive(Default)]
pub struct MarkovState(Option<Tensor>);

impl MarkovHead {
    pub fn new(b: &Builder, markov: Markov, vocab: i64, hidden: i64) -> Self {
        let rank = markov.rank;
        Self {
            w1: b.get("markov_head.markov_w1.weight", &[vocab, rank], Init::Normal),
            w2: b.product("markov_head.markov_w2.weight", &[vocab, rank], Init::Normal),
            form: match markov.kind {
                MarkovKind::Vanilla => Form::Vanilla,
                MarkovKind::Gated => {
                    Form::Gated(Linear::with_bias(b, "markov_head.gate_proj", hidden + rank, rank))
                }
                MarkovKind::Rnn => {
                    Form::Rnn(Linear::with_bias(b, "markov_head.joint_proj", 2 * rank + hidden, 3 * rank))
                }
            },
            rank,
        }
    }

    /// The embedding of previous tokens, `[V, r]`.
    pub fn w1(&self) -> &Tensor {
        &self.w1
    }

    /// The projection from features to the bias, `[V, r]`.
    pub fn w2(&self) -> &Weight {
        &self.w2
    }

    /// Whether its features depend on the previous token alone.
    pub fn reads_previous_alone(&self) -> bool {
        matches!(self.form, Form::Vanilla)
    }

    /// `e = W1[token]`, `[.., r]`.
    pub fn embed(&self, tokens: &Tensor) -> Tensor {
        Tensor::embedding(&self.w1, tokens, -1, false, false)
    }

    /// Features of one slot: hidden states `[S, d]` and embeddings `e [S, r]` to `[S, r]`.
    pub fn step(&self, hidden: &Tensor, e: &Tensor, state: &mut MarkovState) -> Tensor {
        match &self.form {
            Form::Vanilla => e.shallow_clone(),
            Form::Gated(gate) => gate.forward(&Tensor::cat(&[hidden, e], -1)).sigmoid() * e,
            Form::Rnn(joint) => {
                let s = state.0.take().unwrap_or_else(|| e.zeros_like());
                let parts = joint.forward(&Tensor::cat(&[&s, e, hidden], -1)).split(self.rank, -1);
                let keep = parts[0].sigmoid();
                let s = &keep * s + (1.0 - &keep) * parts[1].tanh();
                state.0 = Some(s);
                parts[2].tanh()
            }
        }
    }

    /// Teacher-forced [`MarkovHead::step`]s over whole blocks: `hidden [A, γ, d]`, `e [A, γ, r]` to `[A, γ, r]`.
    pub fn logit_features(&self, hidden: &Tensor, e: &Tensor) -> Tensor {
        match &self.form {
            Form::Vanilla | Form::Gated(_) => self.step(hidden, e, &mut MarkovState::default()),
            Form::Rnn(_) => {
                let mut state = MarkovState::default();
                let steps: Vec<Tensor> = (0..e.size()[1])
                    .map(|k| self.step(&hidden.select(1, k), &e.select(1, k), &mut state))
                    .collect();
                Tensor::stack(&steps, 1)
            }
        }
    }

    /// `W2 · features`, `[.., r]` to `[.., V]`.
    pub fn bias(&self, features: &Tensor) -> Tensor {
        linear(features, &self.w2, None)
    }
}

/// The confidence head: the logit of the probability that the target accepts a token after it accepted the earlier ones.
pub struct ConfidenceHead {
    proj: Linear,
    with_markov: bool,
}

impl ConfidenceHead {
    pub fn new(b: &Builder, config: &BlockConfig) -> Option<Self> {
        let BlockSettings { markov, confidence, .. } = config.settings;
        let confidence = confidence?;
        let rank = if confidence.with_markov { markov.map_or(0, |markov| markov.rank) } else { 0 };
        let proj = Linear::with_bias(b, "confidence_head.proj", config.decoder.model.hidden_size + rank, 1);
        Some(Self { proj, with_markov: confidence.with_markov })
    }

    /// Confidence logits `[..]` from `hidden [.., d]`. With `with_markov` the Markov embedding `e [.., r]` of the previous token is an
    /// input too.
    pub fn forward(&self, hidden: &Tensor, e: Option<&Tensor>) -> Tensor {
        let logit = match e {
            Some(e) if self.with_markov => self.proj.forward(&Tensor::cat(&[hidden, e], -1)),
            _ => self.proj.forward(hidden),
        };
        logit.squeeze_dim(-1)
    }
}

/// A DSpark or DFlash drafter.
pub type Block = DraftModel<BlockParts>;

/// Backbone and heads.
pub struct BlockParts {
    backbone: Backbone,
    pub(super) markov: Option<MarkovHead>,
    pub(super) confidence: Option<ConfidenceHead>,
    /// Whether the Markov head corrects logits.
    biased: bool,
}

impl BlockParts {
    /// Asks the builder for its tensors, in the order in which they are trained.
    pub(super) fn build(b: &Builder, config: &BlockConfig) -> Self {
        let model = &config.decoder.model;
        Self {
            backbone: Backbone::new(b, model),
            markov: config
                .settings
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
        &config.settings.blocks
    }

    fn has_confidence(config: &BlockConfig) -> bool {
        config.settings.confidence.is_some()
    }

    fn draft_sampling(&self) -> DraftSampling {
        match self.biased && self.markov.is_some() {
            true => DraftSampling::Probabilistic,
            false => DraftSampling::Greedy,
        }
    }

    /// The confidence head still reads its embeddings, if it was trained so.
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

    fn logit_features(model: &Block, hidden: &Tensor, previous: &Tensor) -> Option<(Tensor, Tensor)> {
        model.parts.markov.as_ref().map(|markov| {
            let e = markov.embed(previous);
            let features = markov.logit_features(hidden, &e);
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
