//! P-EAGLE: keys of recipes and checkpoints, and the network.
//!
//! The network is Eagle3's, with ordinary layers behind the first. A masked row has the mask token's embedding and, in place of the
//! target's hidden states, the learnt `mask_hidden`. Shapes: N positions, C masked rows, d hidden size, m captured layers, V vocabulary.

use std::path::PathBuf;

use deepspec_checkpoint::{CheckpointError, Fields, read_draft_vocab_size};
use deepspec_core::recipe::require_at_least_one;
use deepspec_models::ModelConfig;
use deepspec_models::nn::{Builder, DecoderLayer, Init, LayerInput, Qkv, RmsNorm, Rotation};
use deepspec_ops::{Attend, range};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tch::Tensor;

use super::batch::{ChainCall, PEagleBatch};
use super::depths::DownSampling;
use crate::ConfigIssue;
use crate::draft_model::{DraftConfig, DraftModel, DrafterSettings, WarmStartCheck};
use crate::token_common::{
    Eagle3Norms, FusionNorms, causal_attention, masked_attention, write_vocab_and_norms,
};

/// Recipe section of P-EAGLE.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PEagleRecipe {
    /// Decoder layers of the drafter.
    #[serde(default = "default_num_draft_layers")]
    pub num_draft_layers: usize,
    /// Depths of training, K, and drafted tokens per block.
    #[serde(default = "default_num_depths")]
    pub num_depths: usize,
    /// A token that never occurs in text; stands for what is to be predicted. `deepspec-data inspect --model M --input F` lists
    /// candidates: special tokens that no row has, and ids behind the tokenizer's last one.
    pub mask_token_id: i64,
    /// Share r of the supervised positions that are trained at depth d: r^d.
    #[serde(default = "default_down_sample_ratio")]
    pub down_sample_ratio: f64,
    /// Least share of the supervised positions that are trained at a depth.
    #[serde(default = "default_down_sample_ratio_min")]
    pub down_sample_ratio_min: f64,
    /// Passes that compute the loss of a micro-batch one after the other, each for a part of the masked positions. More passes take less
    /// memory and more time; the gradients stay the same up to rounding.
    #[serde(default = "default_segments")]
    pub segments: usize,
    /// File with the tokens that the drafter can draft, which `deepspec-data draft-vocab` writes. If absent, it can draft all of
    /// the target's tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_vocab: Option<PathBuf>,
    /// Norms beyond those of the original Eagle3. `output` has no effect in a single pass and must be false.
    #[serde(default, skip_serializing_if = "Eagle3Norms::is_original")]
    pub norms: Eagle3Norms,
}

fn default_num_draft_layers() -> usize {
    4
}

fn default_num_depths() -> usize {
    8
}

fn default_down_sample_ratio() -> f64 {
    0.7
}

fn default_down_sample_ratio_min() -> f64 {
    0.2
}

fn default_segments() -> usize {
    1
}

impl PEagleRecipe {
    /// Checks values against their ranges.
    ///
    /// # Errors
    /// A key of the recipe, and the problem with its value.
    pub fn check(&self) -> Result<(), ConfigIssue> {
        require_at_least_one(&[("num_draft_layers", self.num_draft_layers), ("segments", self.segments)])?;
        if self.segments > MAX_SEGMENTS {
            return Err(("segments", format!("{} is above {MAX_SEGMENTS}", self.segments)));
        }
        if self.num_depths < 2 {
            return Err(("num_depths", "must be at least 2: depth 0 has no masked position".into()));
        }
        let shares = [
            ("down_sample_ratio", self.down_sample_ratio),
            ("down_sample_ratio_min", self.down_sample_ratio_min),
        ];
        match shares.into_iter().find(|&(_, share)| !(share > 0.0 && share <= 1.0)) {
            Some((key, found)) => Err((key, format!("{found} is not in (0, 1]"))),
            None => Ok(()),
        }
    }
}

/// How a P-EAGLE drafter is trained.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PEagleObjective {
    /// How many rows of each depth are sampled.
    pub sampling: DownSampling,
    /// Passes per micro-batch.
    pub segments: usize,
}

/// Upper limit of `segments`. A larger value is a mistake that would take forever.
const MAX_SEGMENTS: usize = 1024;

/// Upper limit of `num_depths`. A larger value is a mistake that would exhaust memory.
const MAX_DEPTHS: usize = 64;

/// Settings of a P-EAGLE drafter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PEagleSettings {
    /// Depths of training, K, and drafted tokens per block.
    pub num_depths: usize,
    /// Token whose embedding masked rows have.
    pub mask_token_id: i64,
    /// Number of tokens that the drafter can draft, Vd; None for all of the target's.
    pub draft_vocab_size: Option<i64>,
    /// Norms beyond those of the original Eagle3.
    pub norms: Eagle3Norms,
}

/// A P-EAGLE drafter's architecture.
pub type PEagleConfig = DraftConfig<PEagleSettings>;

impl DrafterSettings for PEagleSettings {
    const CLASS: &'static str = "PEagleModel";
    const MAY_OWN_EMBED_AND_HEAD: bool = true;
    const RECIPE_KEYS: &'static [(&'static str, &'static str)] =
        &[("fc_norm", "norms.fc"), ("norm_output", "norms.output")];

    fn read(fields: &Fields) -> Result<Self, CheckpointError> {
        let mask = "mask_token_id";
        Ok(Self {
            num_depths: fields.required_size::<u64>("num_depths")? as usize,
            mask_token_id: fields.required(mask, fields.count(mask)?)? as i64,
            draft_vocab_size: read_draft_vocab_size(fields, fields.required_size("vocab_size")?)?
                .map(|size| size as i64),
            norms: Eagle3Norms::read(fields)?,
        })
    }

    fn write(&self, map: &mut Map<String, Value>) {
        map.insert("num_depths".into(), json!(self.num_depths));
        map.insert("mask_token_id".into(), json!(self.mask_token_id));
        write_vocab_and_norms(map, self.draft_vocab_size, self.norms);
    }

    fn check(&self, model: &ModelConfig) -> Result<(), ConfigIssue> {
        if model.layers.iter().any(|layer| layer.attention.window.is_some()) {
            return Err(("layer_types", "P-EAGLE layers with a sliding window are not supported".into()));
        }
        self.norms.check()?;
        if self.norms.output {
            return Err(("norm_output", "true, but a drafter of one pass never reads its own states".into()));
        }
        if !(2..=MAX_DEPTHS).contains(&self.num_depths) {
            return Err(("num_depths", format!("{} is not between 2 and {MAX_DEPTHS}", self.num_depths)));
        }
        if !(0..model.vocab_size).contains(&self.mask_token_id) {
            let (id, last) = (self.mask_token_id, model.vocab_size - 1);
            return Err(("mask_token_id", format!("{id} is no token of the target; expected 0 to {last}")));
        }
        Ok(())
    }

    fn draft_len(&self) -> usize {
        self.num_depths
    }

    fn mask_token_id_mut(&mut self) -> Option<&mut i64> {
        Some(&mut self.mask_token_id)
    }

    fn draft_vocab_size(&self) -> Option<i64> {
        self.draft_vocab_size
    }

    fn shrink(&mut self) {
        self.mask_token_id = 0;
        self.draft_vocab_size = self.draft_vocab_size.map(|_| 32);
    }

    fn compare_for_warm_start(&self, from: &Self, transfer: &mut WarmStartCheck) {
        let size = |own: &Self| own.draft_vocab_size.map_or("the target's".into(), |size| size.to_string());
        transfer.compare("draft_vocab", size(from), size(self));
        transfer.compare("mask_token_id", from.mask_token_id, self.mask_token_id);
        for ((key, there), (_, here)) in from.norms.flags().into_iter().zip(self.norms.flags()) {
            transfer.compare(key, there, here);
        }
    }
}

/// A P-EAGLE drafter.
pub type PEagle = DraftModel<PEagleModules>;

/// Modules of P-EAGLE: draft layers, norms, and the state of masked rows.
pub struct PEagleModules {
    /// The attention of the first layer reads `[embedding; state]`.
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    fusion_norms: FusionNorms,
    /// Stands for the captured hidden states of a masked row, `[1, 1, m·d]`.
    mask_hidden: Tensor,
}

impl PEagleModules {
    /// Requests the parameters from the builder, in the order in which they are trained.
    pub(super) fn build(b: &Builder, config: &PEagleConfig) -> Self {
        let (c, taps, norms) = (config.model(), config.decoder.taps.len(), config.settings.norms);
        let layer = |(i, spec)| match i {
            0 => DecoderLayer::with_embeddings(b, "layers.0", spec, norms.before_residual),
            i => DecoderLayer::new(b, &format!("layers.{i}"), spec),
        };
        Self {
            layers: c.layers.iter().enumerate().map(layer).collect(),
            norm: RmsNorm::new(b, "norm", c.hidden_size, c.rms_norm_eps),
            fusion_norms: FusionNorms::new(b, norms, taps, c),
            mask_hidden: b.get("mask_hidden", &[1, 1, taps as i64 * c.hidden_size], Init::StandardNormal),
        }
    }
}

impl PEagle {
    /// Float32 logits `[.., V]` of states `[.., d]`, −∞ at tokens that the drafter cannot draft.
    pub fn draft_logits(&self, states: &Tensor) -> Tensor {
        self.expand_logits(self.vocabulary().logits(&self.final_norm(states)))
    }

    /// Applies the norm before the LM head to states `[.., d]`.
    pub(super) fn final_norm(&self, states: &Tensor) -> Tensor {
        self.modules.norm.forward(states)
    }

    /// Projects captured hidden states `[N, m·d]` to the states before the first layer, `[N, d]`.
    pub(super) fn fuse_captured(&self, captured: &Tensor) -> Tensor {
        self.fuse(&self.modules.fusion_norms.forward(captured))
    }

    /// State of masked rows before the first layer, `[1, d]`.
    pub(super) fn masked_state(&self) -> Tensor {
        self.fuse_captured(&self.modules.mask_hidden.flatten(0, 1))
    }

    /// Output of layer `i` of rows with these states and embeddings, `[N, d]` each. Only the first layer reads embeddings.
    pub(super) fn forward_layer(
        &self,
        i: usize,
        states: &Tensor,
        embeddings: &Tensor,
        rotation: &Rotation,
        attend: &mut dyn Attend,
    ) -> Tensor {
        let input = LayerInput { x: states, repeated: None, embeddings: (i == 0).then_some(embeddings) };
        self.modules.layers[i].forward(input, rotation, attend, None)
    }

    /// States `[N + C, d]` of the batch's rows, before the final norm.
    pub fn row_states(&self, batch: &PEagleBatch) -> Tensor {
        let _range = range(c"forward");
        let spec = &self.config().model().layers[0].attention;
        let masks = batch.call_masks(spec, self.kind());
        let masked = self.masked_state();
        let width = masked.size()[1];
        // Without masked rows, the gradient of `mask_hidden` is zero.
        let masked = masked.expand([batch.chain_rows, width], false);
        let states = Tensor::cat(&[self.fuse_captured(&batch.taps), masked], 0);
        let (embeddings, rotations) = (self.embed(&batch.tokens()), self.rotations(&batch.row_positions()));
        let sizes = [batch.positions(), batch.chain_rows];
        let call_sizes: Vec<i64> = batch.calls.iter().map(|call| call.rows).collect();
        let mut attention = |qkv: &Qkv| {
            let [q, k, v] = [&qkv.q, &qkv.k, &qkv.v].map(|rows| rows.split_with_sizes(sizes, 0));
            let by_call = [&q, &k, &v].map(|rows| rows[1].split_with_sizes(&call_sizes, 0));
            let attend_call = |(i, call): (usize, &ChainCall)| {
                let keys = |positions: &Tensor, own: &Tensor| {
                    Tensor::cat(&[&positions.narrow(0, call.first_key, call.keys), own], 0)
                };
                let (k, v) = (keys(&k[0], &by_call[1][i]), keys(&v[0], &by_call[2][i]));
                masked_attention(spec, &by_call[0][i], [&k, &v], &masks[i])
            };
            let first = Qkv {
                q: q[0].shallow_clone(),
                k: k[0].shallow_clone(),
                v: v[0].shallow_clone(),
                sinks: None,
            };
            let mut outputs = vec![causal_attention(spec, &batch.lengths, &first)];
            outputs.extend(batch.calls.iter().enumerate().map(attend_call));
            Tensor::cat(&outputs, 0)
        };
        (0..self.modules.layers.len()).fold(states, |states, i| {
            self.forward_layer(i, &states, &embeddings, rotations.layer(i), &mut attention)
        })
    }
}
