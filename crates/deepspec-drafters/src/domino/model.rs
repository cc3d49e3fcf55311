//! Domino: keys of recipes and checkpoints, the correction head, and drafting.
//!
//! A block `[anchor, mask, …]` runs through DFlash's backbone at once. A GRU then reads the anchor and the drafted tokens one by one. From
//! its state and the slot's hidden state, a low-rank layer corrects the logits of every drafting slot but the first.

use deepspec_checkpoint::{CheckpointError, Fields};
use deepspec_core::SlotTarget;
use deepspec_core::recipe::require_at_least_one;
use deepspec_engine::DraftSampling;
use deepspec_models::ModelConfig;
use deepspec_models::nn::{Builder, Gru, Init, Linear, Weight};
use deepspec_ops::distill_loss::LossRecipe;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tch::Tensor;

use crate::ConfigIssue;
use crate::block_common::{
    Backbone, BackboneDrafter, BlockDrafter, BlockSpec, DraftLayers, IS_CAUSAL, LayerType, MAX_RANK,
    PrefixState, SlotInputs, add_bias,
};
use crate::draft_model::{DraftConfig, DraftModel, DrafterSettings, WarmStartCheck};

/// Number of drafts at the start of a block that are not corrected. Every published Domino has this number.
const PURE_DRAFTS: usize = 1;
/// Config key of [`PURE_DRAFTS`].
pub(super) const PURE_DRAFTS_KEY: &str = "pure_draft_prefix_len";

/// A Domino drafter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DominoRecipe {
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
    /// Blocks per training sequence.
    #[serde(default = "crate::block_common::default_num_anchors")]
    pub num_anchors: usize,
    /// Sizes of the correction head.
    #[serde(default)]
    pub gru: GruSettings,
    /// Weight λ of the loss of the uncorrected logits. The loss of the corrected logits has the weight 1 − λ.
    #[serde(default)]
    pub lambda_base: LambdaBase,
    /// Weights of the losses, which are the same for both logits; absent means cross entropy with the label, and a `decay_gamma` of 7.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<LossRecipe>,
}

/// Sizes of the correction head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GruSettings {
    /// H, size of the GRU's state (`gru_hidden_dim` of SpecForge).
    pub hidden_size: i64,
    /// E, rank of the correction (`emb_dim` of SpecForge).
    pub rank: i64,
}

impl Default for GruSettings {
    fn default() -> Self {
        Self { hidden_size: 1024, rank: 256 }
    }
}

/// Schedule of λ: linear from `start` to 0.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LambdaBase {
    /// λ at the first step.
    pub start: f64,
    /// Share of the steps after which λ is 0.
    pub decay_ratio: f64,
}

impl Default for LambdaBase {
    fn default() -> Self {
        Self { start: 1.0, decay_ratio: 1.0 }
    }
}

impl LambdaBase {
    /// λ after this share of the training steps.
    pub fn at(self, progress: f64) -> f64 {
        self.start * (1.0 - (progress / self.decay_ratio).min(1.0))
    }

    fn check(self) -> Result<(), ConfigIssue> {
        if !(0.0..=1.0).contains(&self.start) {
            return Err(("lambda_base.start", format!("{} is not in [0, 1]", self.start)));
        }
        if !(self.decay_ratio > 0.0 && self.decay_ratio <= 1.0) {
            return Err(("lambda_base.decay_ratio", format!("{} is not in (0, 1]", self.decay_ratio)));
        }
        Ok(())
    }
}

impl DominoRecipe {
    /// Settings of the draft layers.
    pub fn layers(&self) -> DraftLayers<'_> {
        let Self { num_draft_layers: count, sliding_window, layer_types: types, .. } = self;
        DraftLayers { count: *count, sliding_window: *sliding_window, types }
    }

    /// Weights of the losses; by default cross entropy with the label.
    pub fn loss(&self) -> LossRecipe {
        self.loss.unwrap_or(LossRecipe { ce_alpha: 1.0, decay_gamma: 7.0, ..LossRecipe::NONE })
    }

    /// Checks ranges and combinations of the values.
    pub fn check(&self) -> Result<(), ConfigIssue> {
        require_at_least_one(&[
            ("num_draft_layers", self.num_draft_layers),
            ("num_anchors", self.num_anchors),
            ("sliding_window", self.sliding_window.unwrap_or(1)),
        ])?;
        self.layers().check()?;
        self.lambda_base.check()?;
        self.loss().check()
    }
}

/// Checkpoint settings of Domino.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DominoSettings {
    /// Shape of the blocks.
    pub blocks: BlockSpec,
    /// Sizes of the correction head.
    pub gru: GruSettings,
}

/// Architecture of a Domino drafter.
pub type DominoConfig = DraftConfig<DominoSettings>;

impl DrafterSettings for DominoSettings {
    const CLASS: &'static str = "DominoModel";
    const RECIPE_KEYS: &'static [(&'static str, &'static str)] =
        &[("gru_hidden_dim", "gru.hidden_size"), ("emb_dim", "gru.rank")];

    fn read(fields: &Fields) -> Result<Self, CheckpointError> {
        Self::read_with_slots(fields, SlotTarget::AnchorPredicts)
    }

    fn write(&self, map: &mut Map<String, Value>) {
        self.blocks.write(map);
        map.insert("num_anchors".into(), json!(self.blocks.num_anchors));
        map.extend(self.head_keys());
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

    /// The GRU reads the target's embeddings, which are frozen.
    fn embeds_previous(&self) -> bool {
        false
    }

    fn shrink(&mut self) {
        self.blocks.shrink();
        self.gru = GruSettings { hidden_size: 8, rank: 8 };
    }

    fn compare_for_warm_start(&self, from: &Self, transfer: &mut WarmStartCheck) {
        self.blocks.compare_for_warm_start(&from.blocks, transfer);
        transfer.compare("gru.hidden_size", from.gru.hidden_size, self.gru.hidden_size);
        transfer.compare("gru.rank", from.gru.rank, self.gru.rank);
    }
}

impl DominoSettings {
    /// Reads the settings. A config that does not name the slots has the `default` ones.
    pub(super) fn read_with_slots(fields: &Fields, default: SlotTarget) -> Result<Self, CheckpointError> {
        match fields.count(PURE_DRAFTS_KEY)?.unwrap_or(0) as usize {
            PURE_DRAFTS => {}
            other => {
                let problem = format!(
                    "{other} drafts of a block are not corrected, which is not supported; expected {PURE_DRAFTS}"
                );
                return Err(fields.error(PURE_DRAFTS_KEY, problem));
            }
        }
        let gru = GruSettings {
            hidden_size: fields.required_size("gru_hidden_dim")?,
            rank: fields.required_size("emb_dim")?,
        };
        Ok(Self { blocks: BlockSpec::read(fields, default)?, gru })
    }

    /// Keys of the correction head in config.json.
    pub(super) fn head_keys(&self) -> [(String, Value); 3] {
        let GruSettings { hidden_size, rank } = self.gru;
        [
            ("gru_hidden_dim", json!(hidden_size)),
            ("emb_dim", json!(rank)),
            (PURE_DRAFTS_KEY, json!(PURE_DRAFTS)),
        ]
        .map(|(key, value)| (key.to_string(), value))
    }

    /// Checks the settings against each other and against the vocabulary.
    pub(super) fn check_sizes(&self, vocab_size: i64) -> Result<(), ConfigIssue> {
        self.blocks.check(vocab_size)?;
        let drafts = self.blocks.draft_len();
        if drafts <= PURE_DRAFTS {
            let problem = format!(
                "a block drafts {drafts} token, and the first one is not corrected; take larger blocks"
            );
            return Err(("block_size", problem));
        }
        if self.blocks.causal {
            let problem = "causal blocks of Domino are not supported (is_causal, causal or causal_head)";
            return Err((IS_CAUSAL, problem.into()));
        }
        let sizes = [("gru_hidden_dim", self.gru.hidden_size), ("emb_dim", self.gru.rank)];
        match sizes.into_iter().find(|(_, size)| !(1..=MAX_RANK).contains(size)) {
            Some((key, size)) => Err((key, format!("{size} is not between 1 and {MAX_RANK}"))),
            None => Ok(()),
        }
    }
}

/// Correction head: `W2 · SiLU(W1 · [h; g])` with hidden state h and GRU state g, of rank E.
pub struct CorrectionHead {
    gru: Gru,
    w1: Linear, // d + H -> E
    w2: Weight, // [V, E]
}

impl CorrectionHead {
    fn new(b: &Builder, sizes: GruSettings, vocab: i64, width: i64) -> Self {
        let GruSettings { hidden_size, rank } = sizes;
        Self {
            gru: Gru::new(b, "prefix_gru", width, hidden_size),
            w1: Linear::new(b, "embed_proj.0", width + hidden_size, rank),
            w2: b.linear_weight("embed_proj.2.weight", &[vocab, rank], Init::Normal),
        }
    }

    /// Projection of features to the correction of the logits, `[V, E]`.
    pub fn w2(&self) -> &Weight {
        &self.w2
    }

    /// Features `[.., E]` from hidden states `[.., d]` and GRU states `[.., H]`.
    fn features(&self, hidden: &Tensor, state: &Tensor) -> Tensor {
        self.w1.forward(&Tensor::cat(&[hidden, state], -1)).silu()
    }

    /// Features `[A, γ, E]` of whole blocks, from hidden states `[A, γ, d]` and the embeddings of the true previous tokens `[A, γ, d]`.
    /// Drafts that are not corrected have zeros.
    pub fn teacher_forced_features(&self, hidden: &Tensor, embeddings: &Tensor) -> Tensor {
        let (pure, drafts) = (PURE_DRAFTS as i64, hidden.size()[1]);
        let corrected = |all: &Tensor| all.narrow(1, pure, drafts - pure);
        let features = self.features(&corrected(hidden), &corrected(&self.gru.forward(embeddings)));
        features.constant_pad_nd([0, 0, pure, 0])
    }
}

/// A Domino drafter.
pub type Domino = DraftModel<DominoModules>;

/// Modules of Domino: backbone and correction head.
pub struct DominoModules {
    backbone: Backbone,
    pub(super) head: CorrectionHead,
}

impl DominoModules {
    /// Requests the parameters from the builder, in the order in which they are trained.
    pub(super) fn build(b: &Builder, config: &DominoConfig) -> Self {
        let model = config.model();
        Self {
            backbone: Backbone::new(b, model),
            head: CorrectionHead::new(b, config.settings.gru, model.vocab_size, model.hidden_size),
        }
    }
}

impl BackboneDrafter for DominoModules {
    fn backbone(&self) -> &Backbone {
        &self.backbone
    }
}

impl BlockDrafter for DominoModules {
    fn block_spec(config: &DominoConfig) -> &BlockSpec {
        &config.settings.blocks
    }

    fn draft_sampling(&self) -> DraftSampling {
        DraftSampling::Probabilistic
    }

    fn reads_prefix(&self) -> bool {
        true
    }

    /// `state` is that of the GRU, `[S, H]`.
    fn step(model: &Domino, slot: SlotInputs, state: &mut PrefixState) -> (Tensor, Option<Tensor>) {
        let head = &model.modules.head;
        let next = head.gru.step(&model.embed(slot.previous), state.as_ref());
        let logits = match slot.slot < PURE_DRAFTS as i64 {
            true => slot.base,
            false => add_bias(slot.base, &head.features(slot.hidden, &next), &head.w2),
        };
        *state = Some(next);
        (logits, None)
    }

    fn teacher_forced_features(
        model: &Domino,
        hidden: &Tensor,
        previous: &Tensor,
    ) -> Option<(Tensor, Tensor)> {
        let embeddings = model.embed(previous);
        let features = model.modules.head.teacher_forced_features(hidden, &embeddings);
        Some((embeddings, features))
    }

    fn teacher_forced_logits(model: &Domino, hidden: &Tensor, features: Option<&Tensor>) -> Tensor {
        let base = model.base_logits(hidden);
        match features {
            Some(features) => add_bias(base, features, &model.modules.head.w2),
            None => base,
        }
    }
}
