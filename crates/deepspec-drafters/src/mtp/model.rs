//! MTP-1: keys of recipes and checkpoints, the layer, and drafting.
//!
//! `fc` projects `[pre_fc_norm_embedding(embedding) ; pre_fc_norm_hidden(state)]` to the input of one decoder layer. The layer's normed
//! output is the new state, from which the target's head predicts. Shapes: N rows, d hidden size, V vocabulary.

use deepspec_checkpoint::{CheckpointError, Fields};
use deepspec_engine::Context;
use deepspec_models::ModelConfig;
use deepspec_models::nn::{Builder, DecoderLayer, Qkv, RmsNorm, Rotation};
use deepspec_ops::kv_attention::{AttentionPlan, KvCache};
use deepspec_ops::{Attend, range};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tch::Tensor;

use crate::ConfigIssue;
use crate::draft_model::{DraftConfig, DraftModel, DrafterSettings};
use crate::token_common::{
    StepBatch, TokenDrafter, TokenProposer, causal_attention, check_max_steps, check_steps,
};

/// Recipe section of MTP-1.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MtpRecipe {
    /// Steps of training, K, and drafted tokens per block.
    pub num_speculative_steps: usize,
    /// Weight of step j in the loss is `step_weight_beta`^j over the sum of all steps' powers.
    pub step_weight_beta: f64,
}

impl Default for MtpRecipe {
    fn default() -> Self {
        Self { num_speculative_steps: 3, step_weight_beta: 0.6 }
    }
}

impl MtpRecipe {
    /// Checks values against their ranges.
    ///
    /// # Errors
    /// A key of the recipe, and the problem with its value.
    pub fn check(&self) -> Result<(), ConfigIssue> {
        check_steps(self.num_speculative_steps, self.step_weight_beta)
    }
}

/// Settings of an MTP-1 drafter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MtpSettings {
    /// Steps of training, K, and drafted tokens per block.
    pub num_speculative_steps: usize,
    /// Weight of step j in the loss is `step_weight_beta`^j over the sum of all steps' powers. Inference does not read it.
    pub step_weight_beta: f64,
}

impl Default for MtpSettings {
    fn default() -> Self {
        let MtpRecipe { num_speculative_steps, step_weight_beta } = MtpRecipe::default();
        Self { num_speculative_steps, step_weight_beta }
    }
}

/// An MTP-1 drafter's architecture.
pub type MtpConfig = DraftConfig<MtpSettings>;

impl DrafterSettings for MtpSettings {
    const CLASS: &'static str = "MTPModel";
    const READS_LAYERS: bool = false;
    const MAY_HAVE_OUTPUT_GATE: bool = true;

    fn read(fields: &Fields) -> Result<Self, CheckpointError> {
        let beta = fields.number("step_weight_beta")?.unwrap_or(Self::default().step_weight_beta);
        Ok(Self {
            num_speculative_steps: fields.required_size::<u64>("num_speculative_steps")? as usize,
            step_weight_beta: beta,
        })
    }

    fn write(&self, map: &mut Map<String, Value>) {
        map.insert("num_speculative_steps".into(), json!(self.num_speculative_steps));
        map.insert("step_weight_beta".into(), json!(self.step_weight_beta));
    }

    fn check(&self, model: &ModelConfig) -> Result<(), ConfigIssue> {
        if model.layers.len() != 1 {
            return Err(("num_hidden_layers", format!("MTP-1 has 1 layer, and not {}", model.layers.len())));
        }
        if model.layers[0].gated_delta.is_some() {
            return Err(("layer_types", "an MTP-1 layer with linear attention is not supported".into()));
        }
        if model.layers[0].attention.window.is_some() {
            return Err(("layer_types", "an MTP-1 layer with a sliding window is not supported".into()));
        }
        check_max_steps(self.num_speculative_steps)
    }

    fn draft_len(&self) -> usize {
        self.num_speculative_steps
    }

    /// The token's embedding and the state.
    fn fc_inputs(_taps: usize) -> usize {
        2
    }
}

/// An MTP-1 drafter.
pub type Mtp = DraftModel<MtpModules>;

/// Modules of MTP-1: the norms of its inputs, its layer, and the norm of the state.
pub struct MtpModules {
    pre_fc_norm_embedding: RmsNorm,
    pre_fc_norm_hidden: RmsNorm,
    layer: DecoderLayer,
    norm: RmsNorm,
}

impl MtpModules {
    /// Requests the parameters from the builder, in the order in which they are trained.
    pub(super) fn build(b: &Builder, config: &MtpConfig) -> Self {
        let c = config.model();
        let norm = |name: &str| RmsNorm::with_weight(b, name, c.hidden_size, c.rms_norm_eps, c.norm_weight);
        Self {
            pre_fc_norm_embedding: norm("pre_fc_norm_embedding"),
            pre_fc_norm_hidden: norm("pre_fc_norm_hidden"),
            layer: DecoderLayer::new(b, "layers.0", &c.layers[0]),
            norm: norm("norm"),
        }
    }
}

impl Mtp {
    /// Float32 logits `[.., V]` of states `[.., d]` of the drafter or of the target.
    pub fn draft_logits(&self, states: &Tensor) -> Tensor {
        self.vocabulary().logits(states)
    }

    /// States `[N, d]` after each of the K steps, normed.
    pub fn step_states(&self, batch: &StepBatch) -> Vec<Tensor> {
        let _range = range(c"forward");
        let rotations = self.rotations(&batch.row_positions());
        let spec = &self.config().model().layers[0].attention;
        let mut state = batch.states.shallow_clone();
        let mut steps = Vec::with_capacity(batch.steps());
        for step in 0..batch.steps() {
            // A step attends to its own keys alone.
            let mut attend = |qkv: &Qkv| causal_attention(spec, &batch.lengths, qkv);
            state = self.renew(&state, &batch.step_tokens(step), rotations.layer(0), &mut attend);
            steps.push(state.shallow_clone());
        }
        steps
    }

    /// States `[N, d]` after `tokens [N]`, given the states before them, `[N, d]`.
    fn renew(
        &self,
        states: &Tensor,
        tokens: &Tensor,
        rotation: &Rotation,
        attend: &mut dyn Attend,
    ) -> Tensor {
        let MtpModules { pre_fc_norm_embedding, pre_fc_norm_hidden, layer, norm } = &self.modules;
        let token = pre_fc_norm_embedding.forward(&self.embed(tokens));
        let x = self.fuse(&Tensor::cat(&[token, pre_fc_norm_hidden.forward(states)], -1));
        norm.forward(&layer.forward((&x).into(), rotation, attend, None))
    }
}

/// An MTP-1 drafter with a KV cache of committed tokens.
pub type MtpProposer = TokenProposer<MtpModules>;

impl TokenDrafter for MtpModules {
    const READS_HIDDEN: bool = true;

    fn context_states(_model: &Mtp, context: &Context) -> Tensor {
        let states =
            context.hidden.as_ref().expect("the engine keeps the states that `reads_hidden` asks for");
        states.shallow_clone()
    }

    fn next_states(
        model: &Mtp,
        states: &Tensor,
        tokens: &Tensor,
        plan: &AttentionPlan,
        cache: &mut KvCache,
    ) -> Tensor {
        let rotations = model.planned_rotations(plan);
        model.renew(states, tokens, rotations.layer(0), &mut cache.attention(0, plan))
    }

    fn state_logits(model: &Mtp, states: &Tensor) -> Tensor {
        model.draft_logits(states)
    }
}
