//! DFlash 2: keys of recipes and checkpoints, convolutions, the selector, and drafting.
//!
//! The first slot of a block holds the anchor, and each other slot drafts the token at its own position. Short convolutions along the slots
//! wrap attention and MLP. The selector scores each slot's top-k tokens given the token before, starting from the anchor.

use deepspec_checkpoint::{CheckpointError, Fields};
use deepspec_core::SlotTarget;
use deepspec_core::recipe::require_at_least_one;
use deepspec_models::ModelConfig;
use deepspec_models::nn::{Builder, Init, LayerHook, Linear};
use deepspec_ops::distill_loss::LossRecipe;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};

use crate::ConfigIssue;
use crate::block_common::{
    Backbone, BackboneDrafter, BlockDrafter, BlockSpec, CONVOLUTION_RECIPE_KEYS, Convolution, DraftLayers,
    IS_CAUSAL, LayerConvolutions, LayerType, MAX_RANK, PrefixState, SlotInputs,
};
use crate::draft_model::{DraftConfig, DraftModel, DrafterSettings, WarmStartCheck};

/// A DFlash 2 drafter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DFlash2Recipe {
    /// B, slots of a block; all but the first draft.
    pub block_size: usize,
    /// Decoder layers of the drafter.
    pub num_draft_layers: usize,
    /// Tokens that a draft layer with a window sees, itself included. The layers without one see everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
    /// The kind of each draft layer; absent means a window in all of them where there is one, and in none elsewhere.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layer_types: Vec<LayerType>,
    /// A token that never occurs in text; stands for what is to be predicted. `deepspec-data inspect --model M --input F` lists
    /// candidates: special tokens that no row has, and ids behind the tokenizer's last one.
    pub mask_token_id: i64,
    /// Blocks per training sequence.
    #[serde(default = "crate::block_common::default_num_anchors")]
    pub num_anchors: usize,
    /// The convolutions.
    #[serde(default)]
    pub convolution: Convolution,
    /// The selector.
    #[serde(default)]
    pub selector: Selector,
    /// Weights of the distillation losses on the LM head's logits; absent means cross entropy with the label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<LossRecipe>,
}

/// The selector of a path over candidates.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Selector {
    /// r, rank of the pair scores; width of the predecessor and the successor codebook.
    pub rank: i64,
    /// k, candidates of each slot.
    pub top_k: i64,
    /// Weight of its loss.
    pub alpha: f64,
}

impl Default for Selector {
    fn default() -> Self {
        Self { rank: 256, top_k: 16, alpha: 1.0 }
    }
}

impl DFlash2Recipe {
    /// Settings of the draft layers.
    pub fn layers(&self) -> DraftLayers<'_> {
        let Self { num_draft_layers: count, sliding_window, layer_types: types, .. } = self;
        DraftLayers { count: *count, sliding_window: *sliding_window, types }
    }

    /// Weights of the distillation losses on the LM head's logits; by default cross entropy with the label.
    pub fn loss(&self) -> LossRecipe {
        self.loss.unwrap_or(LossRecipe { ce_alpha: 1.0, ..LossRecipe::NONE })
    }

    /// Checks ranges and combinations of the values.
    pub fn check(&self) -> Result<(), ConfigIssue> {
        require_at_least_one(&[
            ("num_draft_layers", self.num_draft_layers),
            ("num_anchors", self.num_anchors),
            ("sliding_window", self.sliding_window.unwrap_or(1)),
        ])?;
        self.layers().check()?;
        if SlotTarget::FillIn.draft_len(self.block_size) == 0 {
            return Err(("block_size", "must be at least 2: the first slot drafts nothing".into()));
        }
        if !self.selector.alpha.is_finite() || self.selector.alpha < 0.0 {
            return Err(("selector.alpha", "must be a number from 0".into()));
        }
        Ok(())
    }
}

/// Checkpoint settings of DFlash 2.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DFlash2Settings {
    /// Shape of the blocks; the slots fill in.
    pub blocks: BlockSpec,
    /// Shape of the convolutions.
    pub convolution: Convolution,
    /// Rank of the selector, r.
    pub selector_rank: i64,
    /// Candidates per slot, k.
    pub selector_top_k: i64,
}

/// Architecture of a DFlash 2 drafter.
pub type DFlash2Config = DraftConfig<DFlash2Settings>;

impl DrafterSettings for DFlash2Settings {
    const CLASS: &'static str = "DFlash2Model";
    const CHOOSES_SLOTS: bool = false;
    const RECIPE_KEYS: &'static [(&'static str, &'static str)] = &[
        CONVOLUTION_RECIPE_KEYS[0],
        CONVOLUTION_RECIPE_KEYS[1],
        ("selector_rank", "selector.rank"),
        ("selector_top_k", "selector.top_k"),
    ];

    fn read(fields: &Fields) -> Result<Self, CheckpointError> {
        Ok(Self {
            blocks: BlockSpec::read(fields, SlotTarget::FillIn)?,
            convolution: Convolution::read(fields)?,
            selector_rank: fields.required_size("selector_rank")?,
            selector_top_k: fields.required_size("selector_top_k")?,
        })
    }

    fn write(&self, map: &mut Map<String, Value>) {
        self.blocks.write(map);
        map.insert("num_anchors".into(), json!(self.blocks.num_anchors));
        map.extend(self.named_sizes().map(|(key, size)| (key.into(), size.into())));
    }

    fn check(&self, model: &ModelConfig) -> Result<(), ConfigIssue> {
        self.check_sizes(model.vocab_size, model.hidden_size)
    }

    fn block_spec(&self) -> Option<&BlockSpec> {
        Some(&self.blocks)
    }

    fn block_spec_mut(&mut self) -> Option<&mut BlockSpec> {
        Some(&mut self.blocks)
    }

    fn shrink(&mut self) {
        self.blocks.shrink();
        (self.selector_rank, self.selector_top_k) = (8, self.selector_top_k.min(8));
        self.convolution.shrink();
    }

    fn compare_for_warm_start(&self, from: &Self, transfer: &mut WarmStartCheck) {
        self.blocks.compare_for_warm_start(&from.blocks, transfer);
        self.convolution.compare_for_warm_start(&from.convolution, transfer);
        transfer.compare("selector.rank", from.selector_rank, self.selector_rank);
        transfer.compare("selector.top_k", from.selector_top_k, self.selector_top_k);
    }
}

impl DFlash2Settings {
    /// Keys of config.json with the sizes of convolutions and selector.
    pub(super) fn named_sizes(&self) -> [(&'static str, i64); 4] {
        let [kernel_size, group_size] = self.convolution.named_sizes();
        let selector = [("selector_rank", self.selector_rank), ("selector_top_k", self.selector_top_k)];
        [kernel_size, group_size, selector[0], selector[1]]
    }

    /// Checks the settings against each other, against the vocabulary and against the hidden size `width`.
    pub(super) fn check_sizes(&self, vocab_size: i64, width: i64) -> Result<(), ConfigIssue> {
        self.blocks.check(vocab_size)?;
        if self.blocks.slots != SlotTarget::FillIn {
            return Err(("sample_from_anchor", "true; the slots of DFlash 2 fill in".into()));
        }
        if self.blocks.causal {
            return Err((
                IS_CAUSAL,
                "causal blocks of DFlash 2 are not supported (is_causal, causal or causal_head)".into(),
            ));
        }
        let within = |key, found, most: i64| match found {
            found if (1..=most).contains(&found) => Ok(()),
            found => Err((key, format!("{found} is not between 1 and {most}"))),
        };
        within("selector_rank", self.selector_rank, MAX_RANK)?;
        within("selector_top_k", self.selector_top_k, vocab_size)?;
        self.convolution.check(&self.blocks, width)
    }
}

/// Rescores the top-k tokens of a slot: `S(a, b) = U(b) + ⟨predecessors[a] ⊙ P h, successors[b]⟩` for token b after token a, with logits U
/// and hidden state h. The successor codebook is initialised to zero, so that S = U.
pub struct CandidateSelector {
    predecessors: Tensor, // predecessor codebook, [V, r]
    successors: Tensor,   // successor codebook, [V, r]
    projection: Linear,   // P, d -> r
    top_k: i64,
}

/// Top-k candidates of n slots.
pub struct Candidates {
    /// Token ids, `[n, k]`.
    pub tokens: Tensor,
    /// Rows of the successor codebook, `[n, k, r]` float32.
    pub successors: Tensor,
    /// Scores S, `[n, k]` float32.
    pub scores: Tensor,
}

impl CandidateSelector {
    /// Requests the selector's parameters from the builder.
    pub fn new(b: &Builder, config: &DFlash2Config) -> Self {
        let (model, rank) = (&config.decoder.model, config.settings.selector_rank);
        let codebook =
            |name: &str, init| b.get(&format!("candidate_selector.{name}"), &[model.vocab_size, rank], init);
        Self {
            predecessors: codebook("predecessor_codebook", Init::Normal),
            successors: codebook("successor_codebook", Init::Zeros),
            projection: Linear::new(b, "candidate_selector.hidden_projection", model.hidden_size, rank),
            top_k: config.settings.selector_top_k,
        }
    }

    /// Predecessor codebook and successor codebook, `[V, r]` each.
    pub fn codebooks(&self) -> (&Tensor, &Tensor) {
        (&self.predecessors, &self.successors)
    }

    /// Rows of the predecessor codebook for tokens `previous`, `[.., r]`.
    pub fn embed(&self, previous: &Tensor) -> Tensor {
        Tensor::embedding(&self.predecessors, previous, -1, false, false)
    }

    /// `predecessors[a] ⊙ P h`: states `[.., d]` and embeddings `[.., r]` to `[.., r]`.
    pub fn features(&self, hidden: &Tensor, embeddings: &Tensor) -> Tensor {
        self.projection.forward(hidden) * embeddings
    }

    /// Top-k candidates of float32 logits `[n, V]`, scored with features `[n, r]`.
    pub fn score_candidates(&self, logits: &Tensor, features: &Tensor) -> Candidates {
        let (unary, tokens) = logits.topk(self.top_k, -1, true, true);
        let shape = [-1, self.top_k, features.size()[1]];
        let successors =
            self.successors.index_select(0, &tokens.flatten(0, 1)).view(shape).to_kind(Kind::Float);
        let pairs = successors.bmm(&features.to_kind(Kind::Float).unsqueeze(2)).squeeze_dim(2);
        Candidates { tokens, successors, scores: unary + pairs }
    }

    /// Returns logits `[n, V]` that are the selector's scores at the top-k candidates and −∞ at all other tokens.
    pub fn rescore_logits(&self, logits: &Tensor, features: &Tensor) -> Tensor {
        let Candidates { tokens, scores, .. } = self.score_candidates(logits, features);
        logits.full_like(f64::NEG_INFINITY).scatter(1, &tokens, &scores)
    }
}

/// A DFlash 2 drafter.
pub type DFlash2 = DraftModel<DFlash2Modules>;

/// Modules of DFlash 2: backbone, convolutions and selector.
pub struct DFlash2Modules {
    backbone: Backbone,
    /// Convolutions of each layer.
    convolutions: Vec<LayerConvolutions>,
    pub(super) selector: CandidateSelector,
}

impl DFlash2Modules {
    /// Requests the parameters from the builder, in the order in which they are trained.
    pub(super) fn build(b: &Builder, config: &DFlash2Config) -> Self {
        let (model, settings) = (&config.decoder.model, &config.settings);
        Self {
            backbone: Backbone::new(b, model),
            convolutions: LayerConvolutions::of_layers(b, model, settings.convolution, &settings.blocks),
            selector: CandidateSelector::new(b, config),
        }
    }
}

impl BackboneDrafter for DFlash2Modules {
    fn backbone(&self) -> &Backbone {
        &self.backbone
    }

    fn layer_hook(&self, layer: usize) -> Option<&dyn LayerHook> {
        Some(&self.convolutions[layer])
    }
}

impl BlockDrafter for DFlash2Modules {
    fn block_spec(config: &DFlash2Config) -> &BlockSpec {
        &config.settings.blocks
    }

    fn reads_prefix(&self) -> bool {
        true
    }

    fn step(model: &DFlash2, slot: SlotInputs, _state: &mut PrefixState) -> (Tensor, Option<Tensor>) {
        let selector = &model.modules.selector;
        let features = selector.features(slot.hidden, &selector.embed(slot.previous));
        (selector.rescore_logits(&slot.base, &features), None)
    }

    fn teacher_forced_features(
        model: &DFlash2,
        hidden: &Tensor,
        previous: &Tensor,
    ) -> Option<(Tensor, Tensor)> {
        let selector = &model.modules.selector;
        let embeddings = selector.embed(previous);
        let features = selector.features(hidden, &embeddings);
        Some((embeddings, features))
    }

    fn teacher_forced_logits(model: &DFlash2, hidden: &Tensor, features: Option<&Tensor>) -> Tensor {
        let lm_head_logits = model.base_logits(hidden);
        match features {
            Some(features) => model.modules.selector.rescore_logits(&lm_head_logits, features),
            None => lm_head_logits,
        }
    }
}
