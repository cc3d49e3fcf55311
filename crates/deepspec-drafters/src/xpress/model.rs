//! xPress: keys of recipes and checkpoints, the model, and drafting.
//!
//! The first slot of a block holds the anchor, and each other slot drafts the token at its own position, as in DFlash. A refiner then adds
//! a bias to the logits of all slots at once, given the tokens before them. These are the likeliest tokens of the pass before. The layers are
//! those of DFlash, or those of DFlash 2 with their convolutions.

use deepspec_checkpoint::{CheckpointError, Fields};
use deepspec_core::SlotTarget;
use deepspec_core::recipe::require_at_least_one;
use deepspec_models::ModelConfig;
use deepspec_models::nn::{Builder, LayerHook};
use deepspec_ops::argmax;
use deepspec_ops::distill_loss::LossRecipe;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tch::Tensor;

use super::refiner::RefinerHead;
use crate::ConfigIssue;
use crate::block_common::{
    Backbone, BackboneDrafter, BlockDrafter, BlockSpec, BlockStates, CONVOLUTION_RECIPE_KEYS, Convolution,
    DraftLayers, IS_CAUSAL, LayerConvolutions, LayerType, MAX_RANK,
};
use crate::draft_model::{DraftConfig, DraftModel, DrafterSettings, WarmStartCheck};

/// Upper limit of `num_passes` and `mlp_ratio`. A larger value is a mistake that would exhaust time or memory.
const MAX_FACTOR: i64 = 64;

/// An xPress drafter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct XPressRecipe {
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
    /// The layers under the refiner; absent means those of DFlash.
    #[serde(default, skip_serializing_if = "XPressBackbone::is_dflash")]
    pub backbone: XPressBackbone,
    /// The convolutions of the backbone `dflash2`; absent means their defaults there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub convolution: Option<Convolution>,
    /// The refiner.
    #[serde(default)]
    pub refiner: RefinerRecipe,
    /// Training on the refiner's own tokens.
    #[serde(default)]
    pub consistency: Consistency,
    /// Weight of the losses of the LM head's own logits, from which the refiner starts.
    #[serde(default = "default_base_alpha")]
    pub base_alpha: f64,
    /// Weights of the distillation losses. Absent means the authors' weights: 0.1 for the cross entropy, here with the label, and 0.45 for
    /// ‖p^d − p^t‖₁. Half of that norm is the total variation, which they weigh with 0.9.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<LossRecipe>,
}

/// The layers under the refiner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum XPressBackbone {
    /// The layers of DFlash.
    #[default]
    DFlash,
    /// The layers of DFlash 2 with their convolutions, and no selector.
    DFlash2,
}

impl XPressBackbone {
    fn is_dflash(&self) -> bool {
        *self == Self::DFlash
    }

    /// Its name in recipes and in config.json.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::DFlash => "dflash",
            Self::DFlash2 => "dflash2",
        }
    }
}

/// The refiner, which corrects all slots of a block at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RefinerRecipe {
    /// r, its width and the rank of its bias on the logits.
    pub rank: i64,
    /// Inner width of its MLP, as a multiple of the rank.
    pub mlp_ratio: i64,
    /// K, its passes over a drafted block.
    pub num_passes: i64,
}

impl Default for RefinerRecipe {
    fn default() -> Self {
        Self { rank: 256, mlp_ratio: 2, num_passes: 6 }
    }
}

/// Training on the refiner's own tokens: each round reads the likeliest tokens of the round before, as drafting does.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Consistency {
    /// Weight of the mean loss of the rounds.
    pub alpha: f64,
    /// J, number of rounds; 0 leaves them out.
    pub passes: usize,
}

impl Default for Consistency {
    fn default() -> Self {
        Self { alpha: 0.3, passes: 3 }
    }
}

fn default_base_alpha() -> f64 {
    0.6
}

impl XPressRecipe {
    /// Settings of the draft layers.
    pub fn layers(&self) -> DraftLayers<'_> {
        let Self { num_draft_layers: count, sliding_window, layer_types: types, .. } = self;
        DraftLayers { count: *count, sliding_window: *sliding_window, types }
    }

    /// Shape of the convolutions; None for the backbone of DFlash.
    pub fn convolution(&self) -> Option<Convolution> {
        match self.backbone {
            XPressBackbone::DFlash => None,
            XPressBackbone::DFlash2 => Some(self.convolution.unwrap_or_default()),
        }
    }

    /// Weights of the distillation losses.
    ///
    /// The authors weigh cross entropy with 0.1 and total variation with 0.9. Total variation is ½‖p^d − p^t‖₁.
    pub fn loss(&self) -> LossRecipe {
        self.loss.unwrap_or(LossRecipe { ce_alpha: 0.1, l1_alpha: 0.45, ..LossRecipe::NONE })
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
        if self.backbone.is_dflash() && self.convolution.is_some() {
            return Err(("convolution", "only the backbone dflash2 has convolutions".into()));
        }
        for (key, alpha) in [("consistency.alpha", self.consistency.alpha), ("base_alpha", self.base_alpha)] {
            if !alpha.is_finite() || alpha < 0.0 {
                return Err((key, format!("{alpha} is no number from 0")));
            }
        }
        if self.consistency.passes > MAX_FACTOR as usize {
            let found = self.consistency.passes;
            return Err(("consistency.passes", format!("{found} is not between 0 and {MAX_FACTOR}")));
        }
        Ok(())
    }
}

/// Checkpoint settings of xPress.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct XPressSettings {
    /// Shape of the blocks; the slots fill in.
    pub blocks: BlockSpec,
    /// Rank of the refiner, r.
    pub rank: i64,
    /// Inner width of the refiner's MLP, as a multiple of the rank.
    pub mlp_ratio: i64,
    /// Passes of the refiner over a drafted block, K.
    pub num_passes: i64,
    /// Shape of the convolutions of DFlash 2's backbone; None for the backbone of DFlash.
    pub convolution: Option<Convolution>,
}

/// Architecture of an xPress drafter.
pub type XPressConfig = DraftConfig<XPressSettings>;

/// Config key of the number of candidates per slot to which the authors' refiner may be restricted; 0 means the whole vocabulary.
pub(super) const CANDIDATES: &str = "xpress_candidate_topc";

/// Config key of the backbone; absent means that of DFlash.
pub(super) const BACKBONE: &str = "xpress_backbone";
/// Config key of a selector whose path the passes start from.
pub(super) const SELECTOR: &str = "xpress_selector";

/// Reads the convolutions with `read` if the backbone is DFlash 2's. The sizes of DFlash's mean nothing.
pub(super) fn read_backbone(
    fields: &Fields,
    read: fn(&Fields) -> Result<Convolution, CheckpointError>,
) -> Result<Option<Convolution>, CheckpointError> {
    if fields.map.get(SELECTOR).is_some_and(|value| !value.is_null() && *value != json!(false)) {
        let problem = "a selector is not supported: the passes start from the likeliest token of each slot";
        return Err(fields.error(SELECTOR, problem));
    }
    let [dflash, dflash2] = [XPressBackbone::DFlash, XPressBackbone::DFlash2].map(XPressBackbone::name);
    match fields.text(BACKBONE)? {
        None => Ok(None),
        Some(found) if found == dflash => Ok(None),
        Some(found) if found == dflash2 => read(fields).map(Some),
        Some(found) => {
            let problem = format!("\"{found}\" is not supported; expected {dflash} or {dflash2}");
            Err(fields.error(BACKBONE, problem))
        }
    }
}

impl DrafterSettings for XPressSettings {
    const CLASS: &'static str = "XPressModel";
    const CHOOSES_SLOTS: bool = false;
    const READS_ANCHOR_SLOT: bool = true;
    const RECIPE_KEYS: &'static [(&'static str, &'static str)] = &[
        ("xpress_rank", "refiner.rank"),
        ("xpress_mlp_ratio", "refiner.mlp_ratio"),
        ("xpress_num_passes", "refiner.num_passes"),
        CONVOLUTION_RECIPE_KEYS[0],
        CONVOLUTION_RECIPE_KEYS[1],
    ];

    fn read(fields: &Fields) -> Result<Self, CheckpointError> {
        let convolution = read_backbone(fields, Convolution::read)?;
        if let Some(found) = fields.count(CANDIDATES)?.filter(|&found| found > 0) {
            let problem = format!("{found}, but only 0 is supported: the refiner reads the whole vocabulary");
            return Err(fields.error(CANDIDATES, problem));
        }
        Ok(Self {
            blocks: BlockSpec::read(fields, SlotTarget::FillIn)?,
            rank: fields.required_size("xpress_rank")?,
            mlp_ratio: fields.required_size("xpress_mlp_ratio")?,
            num_passes: fields.required_size("xpress_num_passes")?,
            convolution,
        })
    }

    fn write(&self, map: &mut Map<String, Value>) {
        self.blocks.write(map);
        map.insert("num_anchors".into(), json!(self.blocks.num_anchors));
        map.insert(CANDIDATES.into(), json!(0));
        map.extend(self.size_keys());
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

    /// Tokens of the free-running rounds are unknown before the forward pass.
    fn embeds_previous(&self) -> bool {
        false
    }

    fn shrink(&mut self) {
        self.blocks.shrink();
        self.rank = 8;
        self.convolution.iter_mut().for_each(Convolution::shrink);
    }

    /// The number of passes may differ: no weight depends on it.
    fn compare_for_warm_start(&self, from: &Self, transfer: &mut WarmStartCheck) {
        self.blocks.compare_for_warm_start(&from.blocks, transfer);
        transfer.compare("refiner.rank", from.rank, self.rank);
        transfer.compare("refiner.mlp_ratio", from.mlp_ratio, self.mlp_ratio);
        transfer.compare("backbone", from.backbone().name(), self.backbone().name());
        if let (Some(there), Some(here)) = (&from.convolution, &self.convolution) {
            here.compare_for_warm_start(there, transfer);
        }
    }
}

impl XPressSettings {
    /// The layers under the refiner.
    pub fn backbone(&self) -> XPressBackbone {
        match self.convolution {
            None => XPressBackbone::DFlash,
            Some(_) => XPressBackbone::DFlash2,
        }
    }

    /// Keys of config.json with the backbone of DFlash 2 and its sizes. A config without them has the backbone of DFlash.
    pub(super) fn backbone_keys(&self) -> Map<String, Value> {
        let Some(convolution) = self.convolution else { return Map::new() };
        let sizes = convolution.named_sizes().map(|(key, size)| (key.into(), size.into()));
        [(BACKBONE.into(), self.backbone().name().into())].into_iter().chain(sizes).collect()
    }

    /// Keys of config.json with all sizes of refiner and backbone.
    pub(super) fn size_keys(&self) -> Map<String, Value> {
        let refiner = self.named_sizes().map(|(key, size)| (key.into(), size.into()));
        refiner.into_iter().chain(self.backbone_keys()).collect()
    }

    /// Keys of config.json with the sizes of the refiner.
    fn named_sizes(&self) -> [(&'static str, i64); 3] {
        [
            ("xpress_rank", self.rank),
            ("xpress_mlp_ratio", self.mlp_ratio),
            ("xpress_num_passes", self.num_passes),
        ]
    }

    /// Checks the settings against each other, against the vocabulary and against the hidden size `width`.
    pub(super) fn check_sizes(&self, vocab_size: i64, width: i64) -> Result<(), ConfigIssue> {
        self.blocks.check(vocab_size)?;
        if self.blocks.slots != SlotTarget::FillIn {
            return Err(("sample_from_anchor", "true; the slots of xPress fill in".into()));
        }
        if self.blocks.causal {
            let problem = "causal blocks of xPress are not supported (is_causal, causal or causal_head)";
            return Err((IS_CAUSAL, problem.into()));
        }
        for ((key, found), most) in self.named_sizes().into_iter().zip([MAX_RANK, MAX_FACTOR, MAX_FACTOR]) {
            if !(1..=most).contains(&found) {
                return Err((key, format!("{found} is not between 1 and {most}")));
            }
        }
        self.convolution.map_or(Ok(()), |convolution| convolution.check(&self.blocks, width))
    }
}

/// An xPress drafter.
pub type XPress = DraftModel<XPressModules>;

/// Modules of xPress: backbone, convolutions and refiner.
pub struct XPressModules {
    backbone: Backbone,
    /// Convolutions of each layer; none with the backbone of DFlash.
    convolutions: Vec<LayerConvolutions>,
    pub(super) refiner: RefinerHead,
}

impl XPressModules {
    /// Requests the parameters from the builder, in the order in which they are trained.
    pub(super) fn build(b: &Builder, config: &XPressConfig) -> Self {
        let (model, settings) = (config.model(), &config.settings);
        let backbone = Backbone::new(b, model);
        let of_layers = |shape| LayerConvolutions::of_layers(b, model, shape, &settings.blocks);
        let convolutions = settings.convolution.map_or_else(Vec::new, of_layers);
        Self { backbone, convolutions, refiner: RefinerHead::new(b, config) }
    }
}

impl XPress {
    /// The rows of the drafting slots: `[N, B, ..]` to `[N, γ, ..]`.
    pub(super) fn drafting_slots(&self, rows: &Tensor) -> Tensor {
        let gamma = self.config().settings.draft_len() as i64;
        rows.narrow(1, rows.size()[1] - gamma, gamma)
    }
}

/// The tokens before all slots `[N, B]`, from those before the first two `[N, 2]` and the drafted tokens `[N, γ]`.
pub(super) fn previous_tokens(known: &Tensor, drafted: &Tensor) -> Tensor {
    Tensor::cat(&[known, &drafted.narrow(1, 0, drafted.size()[1] - 1)], 1)
}

impl BackboneDrafter for XPressModules {
    fn backbone(&self) -> &Backbone {
        &self.backbone
    }

    fn layer_hook(&self, layer: usize) -> Option<&dyn LayerHook> {
        self.convolutions.get(layer).map(|convolutions| convolutions as _)
    }
}

impl BlockDrafter for XPressModules {
    fn block_spec(config: &XPressConfig) -> &BlockSpec {
        &config.settings.blocks
    }

    /// K Jacobi passes: each reads the likeliest tokens of the pass before. The logits of the last pass are fixed before any token is
    /// chosen, so tokens that are drawn from them have exactly these distributions.
    fn slot_logits(model: &XPress, blocks: &BlockStates) -> Tensor {
        let refiner = &model.modules.refiner;
        let before = blocks.before_anchors.unwrap_or(blocks.anchors);
        let known = Tensor::stack(&[before, blocks.anchors], 1); // [S, 2]
        let base = model.base_logits(&model.drafting_slots(blocks.hidden).contiguous()); // [S, γ, V]
        let inputs = refiner.state_inputs(blocks.hidden);
        let mut logits = base.shallow_clone();
        for _ in 0..model.config().settings.num_passes {
            let previous = previous_tokens(&known, &argmax(&logits)); // [S, B]
            let features = refiner.features(&inputs, &refiner.embed(&previous));
            logits = refiner.logit_bias(&model.drafting_slots(&features).contiguous()) + &base;
        }
        logits
    }

    fn reads_prefix(&self) -> bool {
        false
    }

    fn teacher_forced_features(
        model: &XPress,
        hidden: &Tensor,
        previous: &Tensor,
    ) -> Option<(Tensor, Tensor)> {
        let refiner = &model.modules.refiner;
        let embeddings = refiner.embed(previous);
        let features = refiner.features(&refiner.state_inputs(hidden), &embeddings);
        Some((model.drafting_slots(&embeddings), model.drafting_slots(&features)))
    }

    fn teacher_forced_logits(model: &XPress, hidden: &Tensor, features: Option<&Tensor>) -> Tensor {
        let base = model.base_logits(hidden);
        match features {
            Some(features) => base + model.modules.refiner.logit_bias(features),
            None => base,
        }
    }
}
