//! The kernels' interface without the `kernels` feature. No kernel supports its arguments, so every operator uses its
//! reference.

use std::convert::Infallible;

use tch::{Kind, Tensor};

use super::args::{
    AdamWSettings, AdamWTensors, BlockMasks, KeyValues, KvChunk, KvWindow, LogitRows, ProjectedHeads,
    QkvInput, RmsNormParams, RowDistances, SequenceBlocks, TargetProbs, TiledBlocks,
};

/// A packed weight, which this build never creates.
#[derive(Debug)]
pub struct PackedWeight(Infallible);

impl PackedWeight {
    /// None: weights are not packed.
    pub fn new(_weight: &Tensor) -> Option<Self> {
        None
    }

    /// Bytes of the packed copy, which does not exist.
    pub fn bytes(_weight: &Tensor) -> u64 {
        0
    }

    /// A second handle.
    pub fn share(&self) -> Self {
        match self.0 {}
    }

    /// The weight as a tensor.
    pub fn unpacked(&self) -> Tensor {
        match self.0 {}
    }

    /// `[output, input]`.
    pub fn size(&self) -> [i64; 2] {
        match self.0 {}
    }

    /// `x Wᵀ`.
    pub fn product(&self, _x: &Tensor) -> Tensor {
        match self.0 {}
    }
}

/// `norm(x) [W₁; W₂; …]ᵀ + residual`. `weights` is empty in this build.
pub fn packed_product(
    _x: &Tensor,
    _norm: Option<RmsNormParams<'_>>,
    weights: &[&PackedWeight],
    _residual: Option<&Tensor>,
) -> Tensor {
    match weights[0].0 {}
}

/// `silu(norm(x) Gᵀ) ⊙ (norm(x) Uᵀ)`.
pub fn packed_gated_product(
    _x: &Tensor,
    _norm: Option<RmsNormParams<'_>>,
    gate: &PackedWeight,
    _up: &PackedWeight,
) -> Tensor {
    match gate.0 {}
}

/// Tiled attention on a GPU, which this build never creates.
pub struct TiledAttention(Infallible);

impl TiledAttention {
    /// [`has_tiled_attention`] prevents this call.
    pub fn new(_indices: &Tensor, _blocks: &TiledBlocks) -> Self {
        unreachable!("attention in tiles needs the kernels feature")
    }

    /// The attention.
    pub fn attend(&self, _q: &Tensor, _context: &KeyValues<'_>, _own: &KeyValues<'_>) -> Tensor {
        match self.0 {}
    }
}

/// False: no kernel computes tiled attention.
pub fn has_tiled_attention(_like: &Tensor, _kind: Kind, _dim: i64) -> bool {
    false
}

/// False: no kernel computes attention block by block.
pub fn has_block_attention(_dim: i64) -> bool {
    false
}

/// None: no kernel computes attention block by block.
pub fn attend_by_block(
    _q: &Tensor,
    _context: &KeyValues<'_>,
    _own: &KeyValues<'_>,
    _sequences: &[SequenceBlocks],
    _window: Option<i64>,
    _scale: f64,
) -> Option<Tensor> {
    None
}

/// None: no kernel merges parts of an attention.
pub fn block_attention(
    _q: &Tensor,
    _context: &KeyValues<'_>,
    _own: &KeyValues<'_>,
    _masks: &BlockMasks<'_>,
    _sinks: Option<&Tensor>,
    _scale: f64,
) -> Option<Tensor> {
    None
}

/// False: no kernel supports a few rows.
pub fn has_decode_kernels(_like: &Tensor, _width: i64, _inner: i64, _dim: i64, _repeats: i64) -> bool {
    false
}

/// [`has_decode_kernels`] prevents this call.
pub fn decode_product(
    _x: &Tensor,
    _norm: Option<RmsNormParams<'_>>,
    _weights: &[&Tensor],
    _residual: Option<&Tensor>,
) -> Tensor {
    unreachable!("products of a few rows need the kernels feature")
}

/// [`has_decode_kernels`] prevents this call.
pub fn decode_gated_product(_x: &Tensor, _norm: RmsNormParams<'_>, _gate: &Tensor, _up: &Tensor) -> Tensor {
    unreachable!("products of a few rows need the kernels feature")
}

/// [`has_decode_kernels`] prevents this call.
pub fn decode_attention(
    _qkv: &Tensor,
    _heads: &ProjectedHeads<'_>,
    _chunks: &[KvChunk<'_>],
    _window: KvWindow,
) -> Tensor {
    unreachable!("attention of a few rows needs the kernels feature")
}

/// False: no kernel reads the KV cache in place.
pub fn has_in_place_attention(_dim: i64) -> bool {
    false
}

/// [`has_in_place_attention`] prevents this call.
pub fn in_place_attention(_rows: QkvInput<'_>, _chunks: &[KvChunk<'_>], _window: KvWindow) -> Tensor {
    unreachable!("attention in place needs the kernels feature")
}

/// Measurements of a GPU kernel, which this build never computes.
pub struct MeasuredLogits(Infallible);

impl MeasuredLogits {
    /// Distances of the rows.
    pub fn distances(&self) -> RowDistances {
        match self.0 {}
    }

    /// 1 if drafter and target have the same argmax.
    pub fn agreement(&self) -> Tensor {
        match self.0 {}
    }
}

impl LogitRows<'_> {
    /// None: no kernel measures rows.
    pub fn measure(&self) -> Option<MeasuredLogits> {
        None
    }

    /// Gradients of measured rows.
    pub fn backward(self, measured: &MeasuredLogits, _factors: &Tensor) {
        match measured.0 {}
    }
}

/// None: the reference computes the softmax.
pub fn softmax_targets(_logits: &mut Tensor, _entropies: bool) -> Option<Tensor> {
    None
}

/// None: the reference measures rows.
pub fn measure_rows(
    _draft: &mut Tensor,
    _target: &TargetProbs,
    _labels: &Tensor,
    _soft: bool,
) -> Option<RowDistances> {
    None
}

/// False: the reference computes gradients.
pub fn logits_grad(_draft: &mut Tensor, _target: &TargetProbs, _labels: &Tensor, _factors: &Tensor) -> bool {
    false
}

/// False: the caller adds the rows.
pub fn sum_rows(_rows: &Tensor, _source_of_row: &Tensor, _sums: &mut Tensor) -> bool {
    false
}

/// False: the caller adds the values.
pub fn add_to_rows(_rows: &mut Tensor, _source_of_row: &Tensor, _values: &Tensor) -> bool {
    false
}

/// False: the caller multiplies.
pub fn matmul_into(_a: &Tensor, _b: &Tensor, _out: &mut Tensor, _add: bool) -> bool {
    false
}

/// None: the reference multiplies.
pub fn projection(_x: &Tensor, _weight: &Tensor) -> Option<Tensor> {
    None
}

/// None: the reference computes the RMS norm.
pub fn rms_norm(_x: &Tensor, _weight: &Tensor, _eps: f64) -> Option<Tensor> {
    None
}

/// None: the reference computes the argmax.
pub fn argmax(_x: &Tensor) -> Option<Tensor> {
    None
}

/// None: the reference computes the softmax.
pub fn temperature_softmax(_logits: &Tensor, _temperatures: &Tensor) -> Option<Tensor> {
    None
}

/// None: the reference samples.
pub fn draw(_weights: &Tensor, _uniforms: &Tensor) -> Option<Tensor> {
    None
}

/// None: the reference rotates.
pub fn rotate(_x: &Tensor, _cosines: &Tensor, _sines: &Tensor) -> Option<Tensor> {
    None
}

/// None: the reference computes the gate.
pub fn silu_times(_gate: &Tensor, _up: &Tensor) -> Option<Tensor> {
    None
}

/// None: the reference computes the gated product.
pub fn gated_product(_gate: &Tensor, _up: &Tensor, _weight: &Tensor) -> Option<Tensor> {
    None
}

/// False: the reference takes the step.
pub fn adamw(_tensors: &mut [AdamWTensors<'_>], _divisor: &Tensor, _settings: AdamWSettings) -> bool {
    false
}

/// None: the reference sums the squares.
pub fn square_sum(_values: &Tensor) -> Option<Tensor> {
    None
}
