//! Keys of recipes and checkpoints of DSpark of DeepSeek-V4.

use deepspec_checkpoint::{CheckpointError, Fields};
use deepspec_core::SlotTarget;
use deepspec_core::recipe::require_at_least_one;
use deepspec_models::ModelConfig;
use deepspec_ops::distill_loss::LossRecipe;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::ConfigIssue;
use crate::block_common::{BlockSpec, MAX_RANK};
use crate::draft_model::{DraftConfig, DrafterSettings, WarmStartCheck};

/// Config key of the stages' sizes.
pub const STAGE_CONFIG: &str = "stage_config";
/// Config key of the Markov head's rank.
pub const MARKOV_RANK: &str = "markov_rank";
/// Upper limit of `hc_mult`. A larger value is a mistake that would exhaust memory.
const MAX_STREAMS: i64 = 64;
/// Upper limit of `hc_sinkhorn_iters`. A larger value is a mistake that would take forever.
const MAX_ITERATIONS: usize = 1000;

/// DSpark of DeepSeek-V4: stages of latent attention and a mixture of experts, joined by hyper-connections.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DSparkV4Recipe {
    /// Number of token positions in a block, B (`dspark_block_size` of DeepSeek-V4). Every position drafts.
    #[serde(default = "default_block_size")]
    pub block_size: usize,
    /// Stages, the layers of the drafter; DeepSeek-V4 has three.
    #[serde(default = "default_stages")]
    pub num_nextn_predict_layers: usize,
    /// A token that never occurs in text; stands for what is to be predicted (`dspark_noise_token_id` of DeepSeek-V4).
    /// `deepspec-data inspect --model M --input F` lists candidates.
    pub mask_token_id: i64,
    /// Blocks per training sequence.
    #[serde(default = "crate::block_common::default_num_anchors")]
    pub num_anchors: usize,
    /// Rank of the Markov head (`dspark_markov_rank` of DeepSeek-V4).
    #[serde(default = "default_rank")]
    pub markov_rank: i64,
    /// Weight of the confidence head's loss.
    #[serde(default = "default_alpha")]
    pub confidence_alpha: f64,
    /// Sizes of the stages; absent means those of DeepSeek-V4-Flash.
    #[serde(default)]
    pub stage_config: StageSettings,
    /// Weights of the losses; absent means DSpark's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<LossRecipe>,
}

fn default_block_size() -> usize {
    5
}

fn default_stages() -> usize {
    3
}

fn default_rank() -> i64 {
    256
}

fn default_alpha() -> f64 {
    1.0
}

/// Sizes of the stages, by DeepSeek-V4's config keys. Keys that are absent have the values of DeepSeek-V4-Flash.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StageSettings {
    /// H, query heads.
    pub num_attention_heads: i64,
    /// D, width of a head and of a latent.
    pub head_dim: i64,
    /// Last dims of a head that are rotated.
    pub qk_rope_head_dim: i64,
    /// Rank of the queries.
    pub q_lora_rank: i64,
    /// Rank of a group of the output.
    pub o_lora_rank: i64,
    /// G, groups of the output.
    pub o_groups: i64,
    /// W, positions of the context that a block sees.
    pub sliding_window: i64,
    /// Base of the rotary embedding.
    pub rope_theta: f64,
    /// ε of all norms.
    pub rms_norm_eps: f64,
    /// E, routed experts.
    pub n_routed_experts: i64,
    /// Routed experts of a token.
    pub num_experts_per_tok: i64,
    /// Width inside an expert.
    pub moe_intermediate_size: i64,
    /// Factor on the sum of the routed experts.
    pub routed_scaling_factor: f64,
    /// Limit of gates and up projections in the experts; 0 for none.
    pub swiglu_limit: f64,
    /// m, residual streams.
    pub hc_mult: i64,
    /// Sinkhorn iterations of the mixing matrix.
    pub hc_sinkhorn_iters: usize,
    /// ε of the hyper-connections' weights and of the Sinkhorn iterations.
    pub hc_eps: f64,
}

impl Default for StageSettings {
    fn default() -> Self {
        Self {
            num_attention_heads: 64,
            head_dim: 512,
            qk_rope_head_dim: 64,
            q_lora_rank: 1024,
            o_lora_rank: 1024,
            o_groups: 8,
            sliding_window: 128,
            rope_theta: 1e4,
            rms_norm_eps: 1e-6,
            n_routed_experts: 256,
            num_experts_per_tok: 6,
            moe_intermediate_size: 2048,
            routed_scaling_factor: 1.5,
            swiglu_limit: 10.0,
            hc_mult: 4,
            hc_sinkhorn_iters: 20,
            hc_eps: 1e-6,
        }
    }
}

impl StageSettings {
    /// Sizes by config key.
    fn sizes(&self) -> [(&'static str, i64); 10] {
        [
            ("num_attention_heads", self.num_attention_heads),
            ("head_dim", self.head_dim),
            ("qk_rope_head_dim", self.qk_rope_head_dim),
            ("q_lora_rank", self.q_lora_rank),
            ("o_lora_rank", self.o_lora_rank),
            ("o_groups", self.o_groups),
            ("sliding_window", self.sliding_window),
            ("n_routed_experts", self.n_routed_experts),
            ("num_experts_per_tok", self.num_experts_per_tok),
            ("moe_intermediate_size", self.moe_intermediate_size),
        ]
    }

    /// Checks ranges and combinations of the values. An error names a key of the section.
    pub fn check(&self) -> Result<(), ConfigIssue> {
        if let Some((key, size)) = self.sizes().into_iter().find(|(_, size)| !(1..=MAX_RANK).contains(size)) {
            return Err((STAGE_CONFIG, format!("`{key}`: {size} is not between 1 and {MAX_RANK}")));
        }
        let issue = |key: &str, problem: String| Err((STAGE_CONFIG, format!("`{key}`: {problem}")));
        let Self { num_attention_heads: heads, head_dim, qk_rope_head_dim: rope, o_groups: groups, .. } =
            *self;
        if rope % 2 != 0 || rope > head_dim {
            return issue(
                "qk_rope_head_dim",
                format!("{rope} is no even number up to the head_dim of {head_dim}"),
            );
        }
        if heads % groups != 0 {
            return issue("o_groups", format!("{groups} does not divide the {heads} attention heads"));
        }
        if self.num_experts_per_tok > self.n_routed_experts {
            let problem = format!("{} of {} experts", self.num_experts_per_tok, self.n_routed_experts);
            return issue("num_experts_per_tok", problem);
        }
        if !(1..=MAX_STREAMS).contains(&self.hc_mult) {
            return issue("hc_mult", format!("{} is not between 1 and {MAX_STREAMS}", self.hc_mult));
        }
        if !(1..=MAX_ITERATIONS).contains(&self.hc_sinkhorn_iters) {
            let problem = format!("{} is not between 1 and {MAX_ITERATIONS}", self.hc_sinkhorn_iters);
            return issue("hc_sinkhorn_iters", problem);
        }
        let positive = [
            ("rope_theta", self.rope_theta),
            ("rms_norm_eps", self.rms_norm_eps),
            ("routed_scaling_factor", self.routed_scaling_factor),
            ("hc_eps", self.hc_eps),
        ];
        if let Some((key, value)) =
            positive.into_iter().find(|(_, value)| !(value.is_finite() && *value > 0.0))
        {
            return issue(key, format!("{value} is no number above 0"));
        }
        if !(self.swiglu_limit.is_finite() && self.swiglu_limit >= 0.0) {
            return issue("swiglu_limit", format!("{} is no number from 0", self.swiglu_limit));
        }
        Ok(())
    }
}

impl DSparkV4Recipe {
    /// Checks ranges and combinations of the values.
    pub fn check(&self) -> Result<(), ConfigIssue> {
        require_at_least_one(&[
            ("block_size", self.block_size),
            ("num_nextn_predict_layers", self.num_nextn_predict_layers),
            ("num_anchors", self.num_anchors),
        ])?;
        if !(self.confidence_alpha.is_finite() && self.confidence_alpha >= 0.0) {
            return Err(("confidence_alpha", "must be a number from 0".into()));
        }
        self.stage_config.check()
    }

    /// Checkpoint settings of the recipe.
    pub fn settings(&self) -> DSparkV4Settings {
        DSparkV4Settings {
            blocks: BlockSpec {
                block_size: self.block_size,
                slots: SlotTarget::AnchorPredicts,
                mask_token_id: self.mask_token_id,
                causal: false,
                num_anchors: self.num_anchors,
            },
            markov_rank: self.markov_rank,
            stages: self.stage_config,
        }
    }
}

/// Checkpoint settings of DSpark of DeepSeek-V4.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DSparkV4Settings {
    /// Shape of the blocks; every slot drafts, and no block is causal.
    pub blocks: BlockSpec,
    /// r, rank of the Markov head.
    pub markov_rank: i64,
    /// Sizes of the stages.
    pub stages: StageSettings,
}

/// Architecture of a DSpark drafter of DeepSeek-V4. Of its decoder it has the widths, the vocabulary and the number of layers.
pub type DSparkV4Config = DraftConfig<DSparkV4Settings>;

impl DrafterSettings for DSparkV4Settings {
    const CLASS: &'static str = "DSparkV4Model";
    const CHOOSES_SLOTS: bool = false;
    const RECIPE_KEYS: &'static [(&'static str, &'static str)] =
        &[("num_hidden_layers", "num_nextn_predict_layers")];

    fn read(fields: &Fields) -> Result<Self, CheckpointError> {
        let blocks = BlockSpec::read(fields, SlotTarget::AnchorPredicts)?;
        let stages = Value::Object(fields.required_object(STAGE_CONFIG)?.map.clone());
        let stages =
            serde_json::from_value(stages).map_err(|error| fields.error(STAGE_CONFIG, error.to_string()))?;
        Ok(Self { blocks, markov_rank: fields.required_size(MARKOV_RANK)?, stages })
    }

    fn write(&self, map: &mut Map<String, Value>) {
        self.blocks.write(map);
        map.insert("num_anchors".into(), json!(self.blocks.num_anchors));
        map.insert(MARKOV_RANK.into(), json!(self.markov_rank));
        map.insert(STAGE_CONFIG.into(), json!(self.stages));
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

    fn shrink(&mut self) {
        self.blocks.shrink();
        self.markov_rank = 8;
        self.stages = StageSettings {
            num_attention_heads: 2,
            head_dim: 16,
            qk_rope_head_dim: 8,
            q_lora_rank: 8,
            o_lora_rank: 8,
            o_groups: 2,
            n_routed_experts: 4,
            num_experts_per_tok: 2,
            moe_intermediate_size: 16,
            hc_mult: 2,
            ..self.stages
        };
    }

    fn compare_for_warm_start(&self, from: &Self, transfer: &mut WarmStartCheck) {
        self.blocks.compare_for_warm_start(&from.blocks, transfer);
        transfer.compare(MARKOV_RANK, from.markov_rank, self.markov_rank);
        transfer.compare(STAGE_CONFIG, json!(from.stages), json!(self.stages));
    }
}

impl DSparkV4Settings {
    /// Checks the settings against each other and against the vocabulary.
    pub(super) fn check_sizes(&self, vocab_size: i64) -> Result<(), ConfigIssue> {
        self.blocks.check(vocab_size)?;
        if self.blocks.slots != SlotTarget::AnchorPredicts {
            return Err((
                "sample_from_anchor",
                "every slot of DSpark of DeepSeek-V4 drafts; leave it out".into(),
            ));
        }
        if self.blocks.causal {
            return Err(("is_causal", "DSpark of DeepSeek-V4 has no causal blocks".into()));
        }
        if !(1..=MAX_RANK).contains(&self.markov_rank) {
            return Err((MARKOV_RANK, format!("{} is not between 1 and {MAX_RANK}", self.markov_rank)));
        }
        self.stages.check()
    }
}
