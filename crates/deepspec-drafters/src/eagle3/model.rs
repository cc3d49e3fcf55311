//! Eagle3: keys of recipes and checkpoints, layers, and drafting.
//!
//! The decoder layers read the state before a token and the token's embedding, and draft one token after the other. In training,
//! the drafter's states replace the target's after the first step (training-time test).
//!
//! Shapes: n token positions of a step, N token positions of step 0, H heads, G key/value heads, D head dim.

use std::path::PathBuf;

use deepspec_checkpoint::{CheckpointError, Fields, read_draft_vocab_size};
use deepspec_core::recipe::{LossNormalization, require_at_least_one};
use deepspec_engine::Context;
use deepspec_models::ModelConfig;
use deepspec_models::nn::{AttentionSpec, Builder, DecoderLayer, LayerInput, Qkv, RmsNorm};
use deepspec_ops::kv_attention::{AttentionPlan, KvCache};
use deepspec_ops::range;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};

use super::batch::{Eagle3Batch, TttCall, TttStep};
use crate::ConfigIssue;
use crate::draft_model::{DraftConfig, DraftModel, DrafterSettings, WarmStartCheck};
use crate::token_common::{
    Eagle3Norms, FusionNorms, TokenDrafter, TokenProposer, additive_mask, masked_attention,
    write_vocab_and_norms,
};

/// Recipe section of Eagle3.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Eagle3Recipe {
    /// Decoder layers of the drafter.
    pub num_draft_layers: usize,
    /// Steps of the training-time test, and drafted tokens per block.
    pub ttt_length: usize,
    /// Weight of step s in the loss is `step_loss_decay`^s.
    pub step_loss_decay: f64,
    /// Predictions that are trained.
    pub supervise: Supervise,
    /// File with the tokens that the drafter can draft, which `deepspec-data draft-vocab` writes. If absent, it can draft all of
    /// the target's tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft_vocab: Option<PathBuf>,
    /// Norms beyond those of the original Eagle3.
    #[serde(skip_serializing_if = "Eagle3Norms::is_original")]
    pub norms: Eagle3Norms,
}

impl Default for Eagle3Recipe {
    fn default() -> Self {
        Self {
            num_draft_layers: 1,
            ttt_length: 7,
            step_loss_decay: 0.8,
            supervise: Supervise::Shifted,
            draft_vocab: None,
            norms: Eagle3Norms::default(),
        }
    }
}

/// Which predictions of Eagle3 are trained. In step s, position i predicts token i + 2 + s. `shifted` masks by token i + s, as in the
/// reference, and `labels` by the predicted token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Supervise {
    /// Predictions two places after a supervised token, as in the reference. The first two tokens of an answer are not
    /// trained, and the two after its end are.
    Shifted,
    /// Predictions of supervised tokens.
    Labels,
}

/// The objective of an Eagle3 drafter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Eagle3Objective {
    /// Predictions that are trained.
    pub supervise: Supervise,
    /// Weight of step s in the loss is `step_loss_decay`^s.
    pub step_loss_decay: f64,
    /// Divides a sequence's loss by its own length (`Global`), or by the longest sequence's length (`MicroBatch`, as in the reference).
    pub normalization: LossNormalization,
}

impl Eagle3Recipe {
    /// Checks values against their ranges.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        require_at_least_one(&[
            ("num_draft_layers", self.num_draft_layers),
            ("ttt_length", self.ttt_length),
        ])?;
        if self.step_loss_decay.is_nan() || self.step_loss_decay <= 0.0 || self.step_loss_decay > 1.0 {
            let problem = format!("{} is not in (0, 1]", self.step_loss_decay);
            return Err(("step_loss_decay", problem));
        }
        Ok(())
    }
}

/// Upper limit of `ttt_length`. A larger value is a mistake that would exhaust memory.
const MAX_TTT_LENGTH: usize = 1024;

/// Settings of an Eagle3 drafter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Eagle3Settings {
    /// Steps of the training-time test, and drafted tokens per block.
    pub ttt_length: usize,
    /// Weight of step s in the loss is `step_loss_decay`^s. Inference does not read it.
    pub step_loss_decay: f64,
    /// Number of tokens that the drafter can draft, Vd; None for all of the target's.
    pub draft_vocab_size: Option<i64>,
    /// Norms beyond those of the original Eagle3.
    pub norms: Eagle3Norms,
}

impl Default for Eagle3Settings {
    fn default() -> Self {
        let Eagle3Recipe { ttt_length, step_loss_decay, .. } = Eagle3Recipe::default();
        Self { ttt_length, step_loss_decay, draft_vocab_size: None, norms: Eagle3Norms::default() }
    }
}

/// An Eagle3 drafter's architecture.
pub type Eagle3Config = DraftConfig<Eagle3Settings>;

impl DrafterSettings for Eagle3Settings {
    const CLASS: &'static str = "Eagle3Model";
    const RECIPE_KEYS: &'static [(&'static str, &'static str)] = &[("fc_norm", "norms.fc")];

    fn read(fields: &Fields) -> Result<Self, CheckpointError> {
        let (own, shared) = ("draft_num_hidden_layers", "num_hidden_layers");
        let layers = fields.size::<u64>(shared)?;
        if let Some(found) =
            fields.size::<u64>(own)?.filter(|found| layers.is_some_and(|layers| layers != *found))
        {
            let problem = format!("{found}, but {shared} is {}", layers.unwrap_or(0));
            return Err(fields.error(own, problem));
        }
        Ok(Self {
            ttt_length: fields.required_size::<u64>("ttt_length")? as usize,
            step_loss_decay: fields.number("step_loss_decay")?.unwrap_or(Self::default().step_loss_decay),
            draft_vocab_size: read_draft_vocab_size(fields, fields.required_size("vocab_size")?)?
                .map(|size| size as i64),
            norms: Eagle3Norms::read(fields)?,
        })
    }

    fn write(&self, map: &mut Map<String, Value>) {
        map.insert("ttt_length".into(), json!(self.ttt_length));
        map.insert("step_loss_decay".into(), json!(self.step_loss_decay));
        if let Some(layers) = map.get("num_hidden_layers").cloned() {
            map.insert("draft_num_hidden_layers".into(), layers);
        }
        write_vocab_and_norms(map, self.draft_vocab_size, self.norms);
    }

    fn check(&self, model: &ModelConfig) -> Result<(), ConfigIssue> {
        if model.layers.iter().any(|layer| layer.attention.window.is_some()) {
            return Err(("layer_types", "Eagle3 layers with a sliding window are not supported".into()));
        }
        self.norms.check()?;
        if !(1..=MAX_TTT_LENGTH).contains(&self.ttt_length) {
            return Err(("ttt_length", format!("{} is not between 1 and {MAX_TTT_LENGTH}", self.ttt_length)));
        }
        Ok(())
    }

    fn draft_len(&self) -> usize {
        self.ttt_length
    }

    fn draft_vocab_size(&self) -> Option<i64> {
        self.draft_vocab_size
    }

    fn shrink(&mut self) {
        self.draft_vocab_size = self.draft_vocab_size.map(|_| 32);
    }

    fn compare_for_warm_start(&self, from: &Self, transfer: &mut WarmStartCheck) {
        let size = |own: &Self| own.draft_vocab_size.map_or("the target's".into(), |size| size.to_string());
        transfer.compare("draft_vocab", size(from), size(self));
        for ((key, there), (_, here)) in from.norms.flags().into_iter().zip(self.norms.flags()) {
            transfer.compare(key, there, here);
        }
    }
}

/// An Eagle3 drafter.
pub type Eagle3 = DraftModel<Eagle3Modules>;

/// Modules of Eagle3: draft layers and the norm before the head.
pub struct Eagle3Modules {
    /// Layers whose attention reads `[embedding; state]`.
    pub(super) layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    fusion_norms: FusionNorms,
    /// Whether states are normed where they are made, and not before the LM head.
    norms_output: bool,
}

impl Eagle3Modules {
    /// Requests the parameters from the builder, in the order in which they are trained.
    pub(super) fn build(b: &Builder, config: &Eagle3Config) -> Self {
        let c = &config.decoder.model;
        let layers = c.layers.iter().enumerate();
        let (norms, taps) = (config.settings.norms, config.decoder.taps.len());
        let layer =
            |(i, spec)| DecoderLayer::with_embeddings(b, &format!("layers.{i}"), spec, norms.before_residual);
        Self {
            layers: layers.map(layer).collect(),
            norm: RmsNorm::new(b, "norm", c.hidden_size, c.rms_norm_eps),
            fusion_norms: FusionNorms::new(b, norms, taps, c),
            norms_output: norms.output,
        }
    }
}

/// Keys and values of one layer, `[n, G, D]` per step. Step 0 keeps all positions; later steps are cut to the current step's positions.
type StepKeyValues = Vec<(Tensor, Tensor)>;

impl Eagle3 {
    /// Float32 logits `[.., V]` of states `[.., d]`, −∞ at tokens that the drafter cannot draft.
    pub fn draft_logits(&self, states: &Tensor) -> Tensor {
        self.expand_logits(self.head_logits(&self.final_norm(states)))
    }

    /// Applies the norm before the LM head to states `[.., d]`, which may have been normed where they were made.
    pub(super) fn final_norm(&self, states: &Tensor) -> Tensor {
        if self.modules.norms_output { states.shallow_clone() } else { self.modules.norm.forward(states) }
    }

    /// Projects captured hidden states `[N, m·d]` to the states before the first layer, `[N, d]`.
    fn fuse_captured(&self, captured: &Tensor) -> Tensor {
        self.fuse(&self.modules.fusion_norms.forward(captured))
    }

    /// The layers' output `[N, d]` as the next step and the LM head read it.
    fn output_states(&self, states: Tensor) -> Tensor {
        if self.modules.norms_output { self.modules.norm.forward(&states) } else { states }
    }

    /// Float32 logits of normed states of the drafter or of the target: `[.., Vd]`, or `[.., V]` without a reduced vocabulary.
    pub(super) fn head_logits(&self, normed: &Tensor) -> Tensor {
        self.vocabulary().logits(normed)
    }

    /// States `[n, d]` after each step, before the final norm, or after it with [`Eagle3Norms::output`].
    pub fn step_states(&self, batch: &Eagle3Batch) -> Vec<Tensor> {
        let _range = range(c"forward");
        let mut histories: Vec<StepKeyValues> = self.modules.layers.iter().map(|_| vec![]).collect();
        let mut state = self.fuse_captured(&batch.taps);
        let step = |step: &TttStep| {
            if let Some(kept) = step.kept {
                let kept = batch.step_list(kept);
                state = state.index_select(0, &kept);
                // Attention reads all positions of step 0.
                let later_steps = histories.iter_mut().flat_map(|history| history.iter_mut().skip(1));
                later_steps
                    .for_each(|(k, v)| (*k, *v) = (k.index_select(0, &kept), v.index_select(0, &kept)));
            }
            let token = self.embed(&batch.step_list(step.tokens));
            let rotations = self.rotations(&batch.step_list(step.positions));
            for (i, (layer, history)) in self.modules.layers.iter().zip(&mut histories).enumerate() {
                let spec = &self.config().decoder.model.layers[i].attention;
                let input = LayerInput { x: &state, repeated: None, embeddings: Some(&token) };
                let mut attend = |qkv: &Qkv| {
                    history.push((qkv.k.shallow_clone(), qkv.v.shallow_clone()));
                    ttt_attention(spec, batch, step, history, &qkv.q)
                };
                state = layer.forward(input, rotations.layer(i), &mut attend, None);
            }
            state = self.output_states(state.shallow_clone());
            state.shallow_clone()
        };
        batch.steps.iter().map(step).collect()
    }
}

/// Attention of the training-time test, `q [n, H, D]` to `[n, H·D]`. Position i sees positions 0..=i of step 0, and itself at later steps.
fn ttt_attention(
    spec: &AttentionSpec,
    batch: &Eagle3Batch,
    step: &TttStep,
    history: &StepKeyValues,
    q: &Tensor,
) -> Tensor {
    let ((keys, values), later_steps) = (&history[0], &history[1..]);
    let run_call = |call: &TttCall| {
        let call_rows = |t: &Tensor| t.narrow(0, call.first, call.rows);
        // Keys or values: of step 0 up to the call's last position, then of the call's positions in each later step: [K, G, D].
        let call_keys = |first_step: &Tensor, later: &dyn Fn(&(Tensor, Tensor)) -> Tensor| {
            let mut steps = vec![first_step.narrow(0, call.first_key, call.keys)];
            steps.extend(later_steps.iter().map(|made| call_rows(&later(made))));
            Tensor::cat(&steps, 0)
        };
        let (k, v) = (
            call_keys(keys, &|made| made.0.shallow_clone()),
            call_keys(values, &|made| made.1.shallow_clone()),
        );
        let options = (Kind::Int64, q.device());
        let is_future =
            Tensor::arange(call.keys, options).gt_tensor(&batch.step_list(call.token_positions).unsqueeze(1)); // [rows, keys]
        let is_other_position = Tensor::eye(call.rows, options).eq(0).repeat([1, later_steps.len() as i64]);
        let blocked = Tensor::cat(&[is_future, is_other_position], 1); // [rows, K]
        masked_attention(spec, &call_rows(q), [&k, &v], &additive_mask(spec, &blocked, q.kind()))
    };
    Tensor::cat(&step.calls.iter().map(run_call).collect::<Vec<_>>(), 0)
}

/// An Eagle3 drafter with a KV cache of committed tokens.
pub type Eagle3Proposer = TokenProposer<Eagle3Modules>;

impl TokenDrafter for Eagle3Modules {
    const READS_HIDDEN: bool = false;

    fn context_states(model: &Eagle3, context: &Context) -> Tensor {
        model.fuse_captured(&context.captured_states)
    }

    fn next_states(
        model: &Eagle3,
        states: &Tensor,
        tokens: &Tensor,
        plan: &AttentionPlan,
        cache: &mut KvCache,
    ) -> Tensor {
        let (token, rotations) = (model.embed(tokens), model.planned_rotations(plan));
        let layers = model.modules.layers.iter().enumerate();
        let states = layers.fold(states.shallow_clone(), |states, (i, layer)| {
            let input = LayerInput { x: &states, repeated: None, embeddings: Some(&token) };
            layer.forward(input, rotations.layer(i), &mut cache.attention(i, plan), None)
        });
        model.output_states(states)
    }

    fn state_logits(model: &Eagle3, states: &Tensor) -> Tensor {
        model.draft_logits(states)
    }
}
