//! DSpark and DFlash: keys of recipes and checkpoints, heads, and drafting.
//!
//! A block `[anchor, mask, …]` runs through the backbone at once, and every slot drafts a token. DSpark's Markov head adds a bias to a
//! slot's logits, given the token before it. Its confidence head predicts whether the target accepts the token. DFlash has neither head.
//!
//! Types of DSpark and of DFlash, which is DSpark without heads: [`DSparkRecipe`] is the recipe section. [`DSparkSettings`] holds the
//! keys of config.json, and [`DSparkConfig`] adds the decoder. `DSparkModules` holds backbone and heads, and [`DSpark`] is the whole
//! model. `DSparkPlan` is config and objective without weights.

use deepspec_checkpoint::{CheckpointError, Fields};
use deepspec_core::SlotTarget;
use deepspec_core::recipe::require_at_least_one;
use deepspec_engine::DraftSampling;
use deepspec_models::ModelConfig;
use deepspec_models::nn::{Builder, Init, Linear, Weight};
use deepspec_ops::distill_loss::LossRecipe;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};

use crate::ConfigIssue;
use crate::block_common::{
    Backbone, BackboneDrafter, BlockDrafter, BlockSpec, DraftLayers, LayerType, MAX_RANK, PrefixState,
    SlotInputs, add_bias,
};
use crate::draft_model::{DraftConfig, DraftModel, DrafterSettings, WarmStartCheck};

/// Recipe section of DSpark and DFlash.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DSparkRecipe {
    /// Number of token positions in a block, B. With `slots: fill_in` the first position holds the anchor and drafts nothing; otherwise
    /// every position drafts.
    pub block_size: usize,
    /// Tokens that the slots predict.
    #[serde(default)]
    pub slots: SlotTarget,
    /// Decoder layers of the drafter.
    pub num_draft_layers: usize,
    /// Tokens that a draft layer with a window sees, itself included. The layers without one see everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
    /// Attention kind of each draft layer. If absent, every layer uses `sliding_window` when it is set, and full attention otherwise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layer_types: Vec<LayerType>,
    /// A token that never occurs in text; stands for what is to be predicted. `deepspec-data inspect --model M --input F` lists
    /// candidates: special tokens that no row has, and ids behind the tokenizer's last one.
    pub mask_token_id: i64,
    /// Whether a slot sees only itself and the slots before it, as in JetSpec. By default the slots of a block see each other.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub causal: bool,
    /// Whether each query head of the draft layers has an attention sink: a learned score that takes a share of the attention.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub attention_sinks: bool,
    /// Blocks per training sequence.
    #[serde(default = "crate::block_common::default_num_anchors")]
    pub num_anchors: usize,
    /// The Markov head; absent means none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub markov: Option<MarkovSettings>,
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
    /// `W2 tanh(o)`. A linear layer computes `o` from recurrent state, `e` and hidden state, before the state is updated.
    Rnn,
}

impl MarkovKind {
    /// Parses the name of a kind in config files.
    pub(super) fn parse(name: &str) -> Result<Self, String> {
        let found = [Self::Vanilla, Self::Gated, Self::Rnn].into_iter().find(|kind| kind.name() == name);
        found.ok_or_else(|| format!("\"{name}\" is unknown; expected vanilla, gated or rnn"))
    }

    /// Name of the kind in config files.
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
pub struct MarkovSettings {
    /// Its form.
    #[serde(rename = "type")]
    pub kind: MarkovKind,
    /// r, its rank.
    pub rank: i64,
}

/// Recipe keys of the confidence head.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ConfidenceRecipe {
    /// Whether it also reads the previous token's Markov embedding.
    pub with_markov: bool,
    /// Weight of its loss.
    #[serde(default = "default_alpha")]
    pub alpha: f64,
}

fn default_alpha() -> f64 {
    1.0
}

impl DSparkRecipe {
    /// Settings of the draft layers.
    pub fn layers(&self) -> DraftLayers<'_> {
        let Self { num_draft_layers: count, sliding_window, layer_types: types, .. } = self;
        DraftLayers { count: *count, sliding_window: *sliding_window, types }
    }

    /// Checks ranges and combinations of the values.
    pub fn check(&self) -> Result<(), ConfigIssue> {
        require_at_least_one(&[
            ("block_size", self.block_size),
            ("num_draft_layers", self.num_draft_layers),
            ("num_anchors", self.num_anchors),
            ("sliding_window", self.sliding_window.unwrap_or(1)),
        ])?;
        self.layers().check()?;
        if self.slots.draft_len(self.block_size) == 0 {
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

/// Checkpoint settings of the confidence head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConfidenceSettings {
    /// Whether the head reads the previous token's Markov embedding in addition to the hidden state.
    pub with_markov: bool,
}

/// Checkpoint settings of DSpark and DFlash.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DSparkSettings {
    /// Shape of the blocks.
    pub blocks: BlockSpec,
    /// Markov head, if any.
    pub markov: Option<MarkovSettings>,
    /// Confidence head, if any.
    pub confidence: Option<ConfidenceSettings>,
}

/// Architecture of a DSpark or DFlash drafter.
pub type DSparkConfig = DraftConfig<DSparkSettings>;

impl DrafterSettings for DSparkSettings {
    const CLASS: &'static str = "DSparkModel";
    const MAY_BE_CAUSAL: bool = true;
    const RECIPE_KEYS: &'static [(&'static str, &'static str)] =
        &[("markov_rank", "markov.rank"), ("confidence_head_with_markov", "confidence.with_markov")];

    fn read(fields: &Fields) -> Result<Self, CheckpointError> {
        let (markov, confidence) = Self::read_heads(fields)?;
        Ok(Self { blocks: BlockSpec::read(fields, SlotTarget::AnchorPredicts)?, markov, confidence })
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
        self.markov = self.markov.map(|markov| MarkovSettings { rank: 8, ..markov });
    }

    /// Heads that the checkpoint lacks keep their random weights.
    fn compare_for_warm_start(&self, from: &Self, transfer: &mut WarmStartCheck) {
        self.blocks.compare_for_warm_start(&from.blocks, transfer);
        let markov = |head: Option<MarkovSettings>| {
            head.map_or("none".into(), |head| format!("{}, rank {}", head.kind.name(), head.rank))
        };
        match from.markov {
            Some(_) => transfer.compare("markov", markov(from.markov), markov(self.markov)),
            None => transfer.may_stay_random.push("markov_head."),
        }
        let confidence = |head: Option<ConfidenceSettings>| match head {
            None => "none",
            Some(ConfidenceSettings { with_markov: true }) => "with Markov embeddings",
            Some(ConfidenceSettings { with_markov: false }) => "without Markov embeddings",
        };
        match from.confidence {
            Some(_) => {
                transfer.compare("confidence", confidence(from.confidence), confidence(self.confidence))
            }
            None => transfer.may_stay_random.push("confidence_head."),
        }
    }
}

impl DSparkSettings {
    /// Reads the Markov head and the confidence head.
    pub(super) fn read_heads(
        fields: &Fields,
    ) -> Result<(Option<MarkovSettings>, Option<ConfidenceSettings>), CheckpointError> {
        let markov = match fields.count("markov_rank")?.unwrap_or(0) as i64 {
            0 => None,
            rank => {
                let kind = MarkovKind::parse(fields.text("markov_head_type")?.unwrap_or("vanilla"));
                let kind = kind.map_err(|problem| fields.error("markov_head_type", problem))?;
                Some(MarkovSettings { kind, rank })
            }
        };
        let with_markov = fields.flag("confidence_head_with_markov")?.unwrap_or(false);
        let confidence = fields.flag("enable_confidence_head")?.unwrap_or(false);
        Ok((markov, confidence.then_some(ConfidenceSettings { with_markov })))
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

    /// Checks the settings against each other and against the vocabulary.
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
    form: HeadForm,
    rank: i64,
}

/// Layers that compute the features from hidden state and embedding, by [`MarkovKind`].
enum HeadForm {
    Vanilla,
    Gated(Linear),
    /// `[gate, candidate, o] = joint_proj[s; e; h]`; `s' = σ(gate)⊙s + (1−σ(gate))⊙tanh(candidate)`; the features are `tanh(o)`.
    Rnn(Linear),
}

impl MarkovHead {
    pub fn new(b: &Builder, markov: MarkovSettings, vocab: i64, hidden: i64) -> Self {
        let rank = markov.rank;
        Self {
            w1: b.get("markov_head.markov_w1.weight", &[vocab, rank], Init::Normal),
            w2: b.linear_weight("markov_head.markov_w2.weight", &[vocab, rank], Init::Normal),
            form: match markov.kind {
                MarkovKind::Vanilla => HeadForm::Vanilla,
                MarkovKind::Gated => {
                    HeadForm::Gated(Linear::with_bias(b, "markov_head.gate_proj", hidden + rank, rank))
                }
                MarkovKind::Rnn => {
                    HeadForm::Rnn(Linear::with_bias(b, "markov_head.joint_proj", 2 * rank + hidden, 3 * rank))
                }
            },
            rank,
        }
    }

    /// Embedding matrix of previous tokens, `[V, r]`.
    pub fn w1(&self) -> &Tensor {
        &self.w1
    }

    /// Projection of features to the logit bias, `[V, r]`.
    pub fn w2(&self) -> &Weight {
        &self.w2
    }

    /// Whether the features depend only on the previous token.
    pub fn reads_previous_alone(&self) -> bool {
        matches!(self.form, HeadForm::Vanilla)
    }

    /// `e = W1[token]`, `[.., r]`.
    pub fn embed(&self, tokens: &Tensor) -> Tensor {
        Tensor::embedding(&self.w1, tokens, -1, false, false)
    }

    /// Logits `[S, V]` and embeddings of the previous tokens `[S, r]` of one slot. The bias is left out without `adds_bias`.
    pub fn step(&self, slot: SlotInputs, state: &mut PrefixState, adds_bias: bool) -> (Tensor, Tensor) {
        let e = self.embed(slot.previous);
        if !adds_bias {
            return (slot.base, e);
        }
        let features = self.step_features(slot.hidden, &e, state);
        (add_bias(slot.base, &features, &self.w2), e)
    }

    /// Embeddings of the previous tokens `[A, γ]`, and features of whole blocks `hidden [A, γ, d]`, each `[A, γ, r]`.
    pub fn teacher_forced(&self, hidden: &Tensor, previous: &Tensor) -> (Tensor, Tensor) {
        let e = self.embed(previous);
        let features = self.teacher_forced_features(hidden, &e);
        (e, features)
    }

    /// Features `[S, r]` of one slot, from hidden states `[S, d]` and embeddings `e [S, r]`.
    pub fn step_features(&self, hidden: &Tensor, e: &Tensor, state: &mut PrefixState) -> Tensor {
        match &self.form {
            HeadForm::Vanilla => e.shallow_clone(),
            HeadForm::Gated(gate) => gate.forward(&Tensor::cat(&[hidden, e], -1)).sigmoid() * e,
            HeadForm::Rnn(joint) => {
                let s = state.take().unwrap_or_else(|| e.zeros_like());
                let parts = joint.forward(&Tensor::cat(&[&s, e, hidden], -1)).split(self.rank, -1);
                let [gate, candidate, output] = &parts[..] else { unreachable!("three of rank r") };
                let keep = gate.sigmoid();
                let s = &keep * s + (1.0 - &keep) * candidate.tanh();
                *state = Some(s);
                output.tanh()
            }
        }
    }

    /// Teacher-forced [`MarkovHead::step_features`] over whole blocks: `hidden [A, γ, d]`, `e [A, γ, r]` to `[A, γ, r]`.
    pub fn teacher_forced_features(&self, hidden: &Tensor, e: &Tensor) -> Tensor {
        match &self.form {
            HeadForm::Vanilla | HeadForm::Gated(_) => self.step_features(hidden, e, &mut None),
            HeadForm::Rnn(_) => {
                let mut state = None;
                let steps: Vec<Tensor> = (0..e.size()[1])
                    .map(|k| self.step_features(&hidden.select(1, k), &e.select(1, k), &mut state))
                    .collect();
                Tensor::stack(&steps, 1)
            }
        }
    }
}

/// Name of the confidence head's layer.
const CONFIDENCE_PROJ: &str = "confidence_head.proj";

/// Confidence head: logit of the probability that the target accepts a token, given that it accepted the tokens before.
pub struct ConfidenceHead {
    proj: Linear,
    with_markov: bool,
}

impl ConfidenceHead {
    fn new(b: &Builder, config: &DSparkConfig) -> Option<Self> {
        let DSparkSettings { markov, confidence, .. } = config.settings;
        let with_markov = confidence?.with_markov;
        let rank = if with_markov { markov.map_or(0, |markov| markov.rank) } else { 0 };
        let width = config.decoder.model.hidden_size + rank;
        Some(Self { proj: Linear::with_bias(b, CONFIDENCE_PROJ, width, 1), with_markov })
    }

    /// A head without a bias that reads states of width `hidden` and Markov embeddings of this rank (DeepSeek-V4).
    pub fn without_bias(b: &Builder, hidden: i64, rank: i64) -> Self {
        Self { proj: Linear::new(b, CONFIDENCE_PROJ, hidden + rank, 1), with_markov: true }
    }

    /// Confidence logits `[..]` from `hidden [.., d]` and, with `with_markov`, the previous tokens' Markov embeddings `e [.., r]`.
    pub fn forward(&self, hidden: &Tensor, e: Option<&Tensor>) -> Tensor {
        let logit = match e {
            Some(e) if self.with_markov => self.proj.forward(&Tensor::cat(&[hidden, e], -1)),
            _ => self.proj.forward(hidden),
        };
        logit.squeeze_dim(-1)
    }
}

/// A DSpark or DFlash drafter.
pub type DSpark = DraftModel<DSparkModules>;

/// Modules of DSpark and DFlash: backbone and heads.
pub struct DSparkModules {
    backbone: Backbone,
    pub(super) markov: Option<MarkovHead>,
    pub(super) confidence: Option<ConfidenceHead>,
    /// Whether the Markov bias is added to the logits. Drafting only; `predict` always adds the bias.
    use_markov_bias: bool,
}

impl DSparkModules {
    /// Requests the parameters from the builder, in the order in which they are trained.
    pub(super) fn build(b: &Builder, config: &DSparkConfig) -> Self {
        let model = &config.decoder.model;
        Self {
            backbone: Backbone::new(b, model),
            markov: config
                .settings
                .markov
                .map(|markov| MarkovHead::new(b, markov, model.vocab_size, model.hidden_size)),
            confidence: ConfidenceHead::new(b, config),
            use_markov_bias: true,
        }
    }
}

impl BackboneDrafter for DSparkModules {
    fn backbone(&self) -> &Backbone {
        &self.backbone
    }
}

impl BlockDrafter for DSparkModules {
    fn block_spec(config: &DSparkConfig) -> &BlockSpec {
        &config.settings.blocks
    }

    fn has_confidence_head(config: &DSparkConfig) -> bool {
        config.settings.confidence.is_some()
    }

    fn draft_sampling(&self) -> DraftSampling {
        // Without the bias the slots are independent, and greedy drafts were accepted more often (docs/measurements.md).
        match self.reads_prefix() {
            true => DraftSampling::Probabilistic,
            false => DraftSampling::Greedy,
        }
    }

    /// Stops adding the Markov bias to the logits. A confidence head with `with_markov` still reads the Markov embeddings.
    fn disable_markov_bias(&mut self) -> bool {
        self.use_markov_bias = false;
        self.markov.is_some()
    }

    fn reads_prefix(&self) -> bool {
        self.use_markov_bias && self.markov.is_some()
    }

    fn step(model: &DSpark, slot: SlotInputs, state: &mut PrefixState) -> (Tensor, Option<Tensor>) {
        let Some(markov) = &model.modules.markov else { return (slot.base, None) };
        let (logits, e) = markov.step(slot, state, model.modules.use_markov_bias);
        (logits, Some(e))
    }

    fn teacher_forced_features(
        model: &DSpark,
        hidden: &Tensor,
        previous: &Tensor,
    ) -> Option<(Tensor, Tensor)> {
        Some(model.modules.markov.as_ref()?.teacher_forced(hidden, previous))
    }

    fn teacher_forced_logits(model: &DSpark, hidden: &Tensor, features: Option<&Tensor>) -> Tensor {
        let base = model.base_logits(hidden);
        match (&model.modules.markov, features) {
            (Some(markov), Some(features)) => add_bias(base, features, markov.w2()),
            _ => base,
        }
    }

    fn confidence_logits(model: &DSpark, hidden: &Tensor, embeddings: Option<&Tensor>) -> Option<Tensor> {
        let head = model.modules.confidence.as_ref();
        head.map(|head| head.forward(hidden, embeddings).to_kind(Kind::Float))
    }
}
