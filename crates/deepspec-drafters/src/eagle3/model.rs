//! Eagle3: keys of recipes and checkpoints, layers, and drafting.
//!
//! The decoder layers read the state before a token and the token's embedding, and draft one token after the other. In training,
//! the drafter's states replace the target's after the first step (training-time test).
//!
//! Shapes: n token positions of a step, N token positions of step 0, H heads, G key/value heads, D head dim.

use deepspec_checkpoint::{CheckpointError, Fields};
use deepspec_core::Tap;
use deepspec_core::recipe::{LossNormalization, require_at_least_one};
use deepspec_engine::{DraftRequest, DraftSampling, Proposal, Proposer};
use deepspec_models::nn::{AttentionSpec, Builder, DecoderLayer, Heads, LayerInput, Qkv, RmsNorm};
use deepspec_models::{ModelConfig, ModelError};
use deepspec_ops::kv_attention::{Chunk, KvCache, MaskKind};
use deepspec_ops::{DeviceArange, cat_row_runs, range};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};

use super::batch::{Eagle3Batch, TttCall, TttStep};
use crate::draft_model::{DraftConfig, DraftModel, DrafterSettings};
use crate::drafter::draft_autoregressively;
use crate::{ConfigIssue, Drafter, DrafterProbe};

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
}

impl Default for Eagle3Recipe {
    fn default() -> Self {
        Self { num_draft_layers: 1, ttt_length: 7, step_loss_decay: 0.8, supervise: Supervise::Shifted }
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
}

impl Default for Eagle3Settings {
    fn default() -> Self {
        let Eagle3Recipe { ttt_length, step_loss_decay, .. } = Eagle3Recipe::default();
        Self { ttt_length, step_loss_decay }
    }
}

/// An Eagle3 drafter's architecture.
pub type Eagle3Config = DraftConfig<Eagle3Settings>;

impl DrafterSettings for Eagle3Settings {
    const CLASS: &'static str = "Eagle3Model";

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
        })
    }

    fn write(&self, map: &mut Map<String, Value>) {
        map.insert("ttt_length".into(), json!(self.ttt_length));
        map.insert("step_loss_decay".into(), json!(self.step_loss_decay));
        if let Some(layers) = map.get("num_hidden_layers").cloned() {
            map.insert("draft_num_hidden_layers".into(), layers);
        }
    }

    fn check(&self, model: &ModelConfig) -> Result<(), ConfigIssue> {
        if model.layers.iter().any(|layer| layer.attention.window.is_some()) {
            return Err(("layer_types", "Eagle3 layers with a sliding window are not supported".into()));
        }
        if !(1..=MAX_TTT_LENGTH).contains(&self.ttt_length) {
            return Err(("ttt_length", format!("{} is not between 1 and {MAX_TTT_LENGTH}", self.ttt_length)));
        }
        Ok(())
    }

    fn draft_len(&self) -> usize {
        self.ttt_length
    }
}

/// An Eagle3 drafter.
pub type Eagle3 = DraftModel<Eagle3Modules>;

/// Modules of Eagle3: draft layers and the norm before the head.
pub struct Eagle3Modules {
    /// Layers whose attention reads `[embedding; state]`.
    pub(super) layers: Vec<DecoderLayer>,
    norm: RmsNorm,
}

impl Eagle3Modules {
    /// Requests the parameters from the builder, in the order in which they are trained.
    pub(super) fn build(b: &Builder, config: &Eagle3Config) -> Self {
        let c = &config.decoder.model;
        let layers = c.layers.iter().enumerate();
        Self {
            layers: layers
                .map(|(i, spec)| DecoderLayer::with_embeddings(b, &format!("layers.{i}"), spec))
                .collect(),
            norm: RmsNorm::new(b, "norm", c.hidden_size, c.rms_norm_eps),
        }
    }
}

/// Keys and values of one layer, `[n, G, D]` per step. Step 0 keeps all positions; later steps are cut to the current step's positions.
type StepKeyValues = Vec<(Tensor, Tensor)>;

impl Eagle3 {
    /// Float32 logits `[.., V]` of states `[.., d]`.
    pub fn draft_logits(&self, states: &Tensor) -> Tensor {
        self.head_logits(&self.final_norm(states))
    }

    /// Applies the norm before the LM head to states `[.., d]`.
    pub(super) fn final_norm(&self, states: &Tensor) -> Tensor {
        self.modules.norm.forward(states)
    }

    /// Float32 logits `[.., V]` of normed states of the drafter or of the target.
    pub(super) fn head_logits(&self, normed: &Tensor) -> Tensor {
        self.vocabulary().logits(normed)
    }

    /// States `[n, d]` after each step, before the final norm.
    pub fn step_states(&self, batch: &Eagle3Batch) -> Vec<Tensor> {
        let _range = range(c"forward");
        let mut histories: Vec<StepKeyValues> = self.modules.layers.iter().map(|_| vec![]).collect();
        let mut state = self.fuse(&batch.taps);
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
    let Heads { query, key_value, dim } = spec.heads;
    let repeats = query / key_value;
    let ((keys, values), later_steps) = (&history[0], &history[1..]);
    let run_call = |call: &TttCall| {
        let call_rows = |t: &Tensor| t.narrow(0, call.first, call.rows);
        // Keys or values: of step 0 up to the call's last position, then of the call's positions in each later step: [1, G, K, D].
        let call_keys = |first_step: &Tensor, later: &dyn Fn(&(Tensor, Tensor)) -> Tensor| {
            let mut steps = vec![first_step.narrow(0, call.first_key, call.keys)];
            steps.extend(later_steps.iter().map(|made| call_rows(&later(made))));
            Tensor::cat(&steps, 0).transpose(0, 1).unsqueeze(0)
        };
        let (k, v) = (
            call_keys(keys, &|made| made.0.shallow_clone()),
            call_keys(values, &|made| made.1.shallow_clone()),
        );
        // Query heads that share a key head become further query rows: [1, G, repeats·rows, D].
        let q = call_rows(q).view([call.rows, key_value, repeats, dim]).permute([1, 2, 0, 3]);
        let q = q.reshape([1, key_value, repeats * call.rows, dim]);
        let options = (Kind::Int64, q.device());
        let is_future =
            Tensor::arange(call.keys, options).gt_tensor(&batch.step_list(call.token_positions).unsqueeze(1)); // [rows, keys]
        let is_other_position = Tensor::eye(call.rows, options).eq(0).repeat([1, later_steps.len() as i64]);
        let blocked = Tensor::cat(&[is_future, is_other_position], 1); // [rows, K]
        let mask =
            Tensor::zeros(blocked.size(), (q.kind(), q.device())).masked_fill(&blocked, f64::NEG_INFINITY);
        let mask = mask.repeat([repeats, 1]);
        let y = Tensor::scaled_dot_product_attention(&q, &k, &v, Some(&mask), 0.0, false, spec.scale, false);
        y.view([key_value, repeats, call.rows, dim]).permute([2, 0, 1, 3]).reshape([call.rows, query * dim])
    };
    Tensor::cat(&step.calls.iter().map(run_call).collect::<Vec<_>>(), 0)
}

/// An Eagle3 drafter with a KV cache of committed tokens.
pub struct Eagle3Proposer {
    model: Eagle3,
    draft_len: usize,
    cache: KvCache,
    /// State after each slot's last committed token, `[slots, d]`.
    states: Tensor,
    /// Source of index tensors of slots.
    arange: DeviceArange,
}

impl Eagle3Proposer {
    /// A proposer with an empty KV cache for `slots` sequences.
    pub fn new(model: Eagle3, slots: usize) -> Self {
        let (kind, device) = (model.kind(), model.device());
        let cache = KvCache::new(&model.attention_specs(), slots, kind, device);
        let states = Tensor::zeros([slots as i64, model.config().decoder.model.hidden_size], (kind, device));
        Self {
            cache,
            states,
            arange: DeviceArange::new(device),
            draft_len: model.config().settings.ttt_length,
            model,
        }
    }

    /// The model.
    pub fn model(&self) -> &Eagle3 {
        &self.model
    }

    /// Runs the layers over tokens and the states before them, appends keys and values to the cache, and returns the new states.
    fn extend_cache(&mut self, chunks: &[Chunk], tokens: &Tensor, states: Tensor) -> Tensor {
        let plan = self.cache.plan(chunks, MaskKind::Causal);
        let (token, rotations) = (self.model.embed(tokens), self.model.planned_rotations(&plan));
        let layers = self.model.modules.layers.iter().enumerate();
        let states = layers.fold(states, |states, (i, layer)| {
            let input = LayerInput { x: &states, repeated: None, embeddings: Some(&token) };
            layer.forward(input, rotations.layer(i), &mut self.cache.attention(i, &plan), None)
        });
        self.cache.commit_chunks(chunks);
        states
    }

    /// Chunks of the newly committed tokens, and the chunks of each drafted token except the last, which no later draft reads.
    fn context_and_draft_chunks(&self, request: &DraftRequest) -> (Vec<Chunk>, Vec<Vec<Chunk>>) {
        let context_chunks = self.cache.chunks_to_append(&request.context.chunks);
        let chunks_of_draft = |k: usize| {
            let chunk = |&slot: &usize| {
                let rows =
                    context_chunks.iter().find(|chunk| chunk.slot == slot).map_or(0, |chunk| chunk.len);
                Chunk { slot, past_len: self.cache.len(slot) + rows + k, len: 1 }
            };
            request.slots.iter().map(chunk).collect()
        };
        let draft_chunks = (0..self.draft_len.saturating_sub(1)).map(chunks_of_draft).collect();
        (context_chunks, draft_chunks)
    }
}

impl Drafter for Eagle3Proposer {
    fn share(&self, slots: usize) -> Box<dyn Drafter> {
        Box::new(Self::new(self.model.share(), slots))
    }

    fn taps(&self) -> &[Tap] {
        &self.model.config().decoder.taps
    }

    fn draft_sampling(&self) -> DraftSampling {
        DraftSampling::Probabilistic
    }

    fn check_fits(&self, target: &ModelConfig) -> Result<(), ModelError> {
        self.model.config().decoder.check_fits(target)
    }

    fn set_draft_len(&mut self, tokens: usize) {
        self.draft_len = tokens.min(self.model.config().settings.ttt_length);
    }

    fn probe(&self) -> Option<Box<dyn DrafterProbe>> {
        Some(Box::new(self.model.share()))
    }
}

impl Proposer for Eagle3Proposer {
    fn draft_len(&self) -> usize {
        self.draft_len
    }

    fn ends_at_stop_tokens(&self) -> bool {
        true
    }

    fn reads_hidden(&self) -> bool {
        false
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        let (context_chunks, draft_chunks) = self.context_and_draft_chunks(request);
        self.cache.reserve(&[context_chunks.clone(), draft_chunks.concat()].concat());
        let (context, slots) = (request.context, request.slots);
        if !context_chunks.is_empty() {
            let states =
                self.extend_cache(&context_chunks, &context.next, self.model.fuse(&context.captured_states));
            // The last committed token of every slot.
            let ends = context.chunks.iter().scan(0, |end, &(_, rows)| {
                *end += rows as i64;
                Some((*end - 1, 1))
            });
            let new = self.arange.int_tensor(context.chunks.iter().map(|&(slot, _)| slot));
            let _ = self.states.index_copy_(0, &new, &cat_row_runs(&states, ends));
        }
        let past_len: Vec<usize> = slots.iter().map(|&slot| self.cache.len(slot)).collect();
        let mut states = self.states.index_select(0, &self.arange.int_tensor(slots.iter().copied())); // [S, d]
        let mut draft_chunks = draft_chunks.iter();
        let proposal = draft_autoregressively(request, self.draft_len, |last| {
            if let Some(token) = last
                && let Some(chunks) = draft_chunks.next()
            {
                states = self.extend_cache(chunks, token, states.shallow_clone());
            }
            self.model.draft_logits(&states)
        });
        // Drafted tokens leave the cache; accepted ones return with the target's hidden states.
        slots.iter().zip(past_len).for_each(|(&slot, past_len)| self.cache.truncate(slot, past_len));
        proposal
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.cache.truncate(slot, len);
    }

    fn kv_cache_bytes(&self, tokens: usize) -> u64 {
        self.cache.kv_cache_bytes(tokens) as u64
    }

    fn free_cached_memory(&mut self) {
        self.cache.free_cached_memory();
    }
}
