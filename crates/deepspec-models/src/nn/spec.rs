//! Settings of a decoder layer, without the names of families.

use std::fmt;

use deepspec_ops::{Activation, AttentionSpec, GatedDeltaSpec, RopeSpec, RouterScores, SavedTensorSizes};

/// How a layer computes its attention values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueSource {
    /// The values are the output of `v_proj`.
    Projected,
    /// The values are the output of `v_proj`, RMS-normed per head without weights (Gemma 4).
    Normed,
    /// The values are the output of `k_proj`, before the key's norm and RoPE. Each head is RMS-normed
    /// without weights (Gemma 4).
    SharesKey,
}

/// Where a layer has its norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormPlacement {
    /// Before attention and before the MLP.
    Pre,
    /// Before and after attention, and before and after the MLP.
    Sandwich,
}

/// How an RMS norm uses its weight w.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormWeight {
    /// The norm multiplies by w.
    Plain,
    /// The norm multiplies by 1 + w, in float32 (Gemma 3).
    OnePlus,
}

/// How a checkpoint stores experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertTensors {
    /// The router is `gate.weight`. An expert has three tensors (`experts.3.gate_proj.weight`), or two tensors hold all
    /// experts: `experts.gate_up_proj [E, 2·I, d]` and `experts.down_proj [E, d, I]`.
    EachOrStacked,
    /// The router is `router`, with a bias. Tensors hold all experts, transposed, with biases: `experts.gate_up_proj
    /// [E, d, 2·I]`, whose even columns are gates and whose odd ones are up projections, and `experts.down_proj [E, I, d]`.
    Interleaved,
}

/// Experts of a layer, each of them a gated MLP, and their router.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertsSpec {
    /// E, number of experts.
    pub count: i64,
    /// k, experts of a row.
    pub active: i64,
    /// I, width inside an expert.
    pub width: i64,
    /// Width inside the expert that all rows have beside the chosen ones (`shared_expert`), if there is one. The sigmoid of
    /// `shared_expert_gate` weighs it.
    pub shared_width: Option<i64>,
    /// How the router weighs the experts of a row.
    pub scores: RouterScores,
    /// How the checkpoint stores them.
    pub tensors: ExpertTensors,
}

impl fmt::Display for ExpertsSpec {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self { count, active, width, .. } = self;
        write!(f, "{active} of {count} of width {width}")?;
        self.shared_width.map_or(Ok(()), |width| write!(f, " and a shared one of width {width}"))
    }
}

/// One decoder layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// d, width of the residual stream.
    pub hidden_size: i64,
    /// Width inside the MLP. In a layer with experts, the width inside the MLP of a dense layer for the same model.
    pub intermediate_size: i64,
    /// Experts in place of the MLP; None in a dense layer.
    pub experts: Option<ExpertsSpec>,
    /// Gated DeltaNet in place of attention; None in a layer with attention. The settings of attention are then those of
    /// the model's layers that have it.
    pub gated_delta: Option<GatedDeltaSpec>,
    /// Heads, scale and window.
    pub attention: AttentionSpec,
    /// Whether `q_proj` also gives a gate per head, whose sigmoid multiplies the head's output.
    pub output_gate: bool,
    /// Rotary embedding of queries and keys.
    pub rope: RopeSpec,
    /// How the values are computed.
    pub value: ValueSource,
    /// Where the norms are.
    pub norms: NormPlacement,
    /// Whether queries and keys are RMS-normed per head.
    pub qk_norm: bool,
    /// Whether the projections of queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the projection of attention's output has a bias.
    pub output_bias: bool,
    /// Name of the layer's attention sinks `[H]` below `self_attn`, if it has them.
    pub sinks_name: &'static str,
    /// How the norms use their weights.
    pub norm_weight: NormWeight,
    /// Factor on the outputs of attention and MLP before they are added to the residual stream.
    pub residual_scale: f64,
    /// ε of all norms.
    pub eps: f64,
    /// Activation function of the MLP's gate.
    pub activation: Activation,
    /// Whether the layer's output is multiplied by `layer_scalar` of the checkpoint.
    pub scaled: bool,
}

impl LayerSpec {
    /// Bytes that autograd saves per row of a layer: norms, queries, keys and values, the output of attention, and the MLP or the
    /// row's experts. A value has `value` bytes.
    pub fn saved_bytes(&self, saved: SavedTensorSizes, value: usize) -> usize {
        let (d, heads) = (self.hidden_size as usize, self.attention.heads);
        let queries = (heads.query * heads.dim) as usize;
        // No matmul follows these norms, so none saves their output.
        let after = if self.norms == NormPlacement::Sandwich { 2 * saved.norm_bytes_per_value } else { 0 };
        let head_norm = if self.qk_norm { saved.norm_bytes_per_value } else { 0 };
        d * (2 * (saved.norm_bytes_per_value + value) + after)
            + queries * (head_norm + 3 * value)
            + self.saved_key_value_bytes(saved, value)
            + self.saved_mlp_bytes(saved, value)
    }

    /// Bytes that autograd saves for a row's MLP, or for its router and experts, without its input.
    fn saved_mlp_bytes(&self, saved: SavedTensorSizes, value: usize) -> usize {
        let inside = |width: i64| saved.mlp_tensors * width as usize * value;
        let Some(ExpertsSpec { count, active, width, shared_width, .. }) = self.experts else {
            return inside(self.intermediate_size);
        };
        let (d, float) = (self.hidden_size as usize, size_of::<f32>());
        // Each expert has a copy of its rows. Its output is in float32, where it is weighted.
        let expert = inside(width) + d * (value + float);
        let shared = shared_width.map_or(0, |width| inside(width) + d * value);
        count as usize * float + active as usize * expert + shared
    }

    /// Number of weights of the projections of attention, or of Gated DeltaNet.
    pub fn mixer_weights(&self) -> i64 {
        if let Some(spec) = self.gated_delta {
            let outputs = spec.channels() + 2 * spec.value_width() + 2 * spec.value_heads;
            return self.hidden_size * outputs + spec.channels() * spec.kernel;
        }
        let heads = self.attention.heads;
        let values = if self.value == ValueSource::SharesKey { 0 } else { heads.key_value };
        let gates = if self.output_gate { heads.query } else { 0 };
        self.hidden_size * heads.dim * (2 * heads.query + gates + heads.key_value + values)
    }

    /// Number of weights of the MLP, or of the router and all experts, the shared one included.
    pub fn mlp_weights(&self) -> i64 {
        self.mlp_weights_with(|experts| experts.count)
    }

    /// Number of weights that a row runs through in the MLP, or in the router and its experts.
    pub fn active_mlp_weights(&self) -> i64 {
        self.mlp_weights_with(|experts| experts.active)
    }

    /// [`Self::mlp_weights`] of so many experts.
    fn mlp_weights_with(&self, number: fn(&ExpertsSpec) -> i64) -> i64 {
        let Some(experts) = &self.experts else { return 3 * self.hidden_size * self.intermediate_size };
        let shared = experts.shared_width.map_or(0, |width| 1 + 3 * width);
        self.hidden_size * (experts.count + 3 * experts.width * number(experts) + shared)
    }

    /// Bytes that autograd saves for a row's keys and values. A value has `value` bytes.
    pub fn saved_key_value_bytes(&self, saved: SavedTensorSizes, value: usize) -> usize {
        let heads = self.attention.heads;
        let head_norm = if self.qk_norm { saved.norm_bytes_per_value } else { 0 };
        let value_norm = if self.value == ValueSource::Projected { 0 } else { saved.norm_bytes_per_value };
        (heads.key_value * heads.dim) as usize * (head_norm + value_norm + 3 * value)
    }
}
