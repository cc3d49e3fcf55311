//! A pre-norm decoder layer in five calls, for inference.
//!
//! The fused layer computes what `DecoderLayer::forward` in `deepspec-models` computes operator by operator. On the CPU both
//! give equal bits.

use std::cell::OnceCell;

use tch::{Device, Kind, Tensor};

use crate::attention::{Heads, Qkv};
pub use crate::ffi::ProjectedHeads;
use crate::ffi::{self, PackedWeight, RmsNormParams};
use crate::linear::Weight;

/// Attention that a decoder layer calls with its queries, keys and values.
pub trait Attend {
    /// Attention of N rows: `[N, H·D]`.
    fn attend(&mut self, qkv: &Qkv) -> Tensor;

    /// The fused attention, which applies head norms and rotation itself. None if no kernel fuses these steps for these rows.
    fn as_attend_projected(&mut self) -> Option<&mut dyn AttendProjected> {
        None
    }
}

/// Attention that takes raw projections, and applies head norms and rotation itself.
pub trait AttendProjected {
    /// Queries, keys and values side by side, `[N, (H + 2G)·D]`, to `[N, H·D]`.
    fn attend_projected(&mut self, qkv: &Tensor, heads: ProjectedHeads<'_>) -> Tensor;
}

impl<F: FnMut(&Qkv) -> Tensor> Attend for F {
    fn attend(&mut self, qkv: &Qkv) -> Tensor {
        self(qkv)
    }
}

/// Rows `[N, ..]` that repeat M distinct rows. For example, all mask tokens of a batch have one embedding.
#[derive(Clone, Copy)]
pub struct RepeatedRows<'a> {
    /// The distinct rows, `[M, d]`.
    pub distinct: &'a Tensor,
    /// Repeats M rows to N rows.
    pub repeat: &'a dyn Fn(&Tensor) -> Tensor,
}

impl<'a> RepeatedRows<'a> {
    /// Rows of an inference step. None on a GPU, where the launches that repeat rows cost more than the rows save.
    pub fn for_inference(distinct: &'a Tensor, repeat: &'a dyn Fn(&Tensor) -> Tensor) -> Option<Self> {
        (distinct.device() == Device::Cpu).then_some(Self { distinct, repeat })
    }
}

/// Weights of a pre-norm layer with a SiLU-gated MLP and without biases, such as a layer of Llama or Qwen3.
#[derive(Clone, Copy)]
pub struct LayerWeights<'a> {
    /// The norm before attention.
    pub input_norm: RmsNormParams<'a>,
    /// Projections of queries, keys and values.
    pub qkv: [&'a Weight; 3],
    /// Norms of each query head and each key head.
    pub qk_norms: Option<[RmsNormParams<'a>; 2]>,
    /// The projection of attention's output.
    pub output: &'a Weight,
    /// The norm before the MLP.
    pub mlp_norm: RmsNormParams<'a>,
    /// The MLP's gate, up and down projections.
    pub mlp: [&'a Weight; 3],
    /// Heads of the attention.
    pub heads: Heads,
    /// Whether the weights fit the kernels; computed once.
    pub fits: &'a OnceCell<bool>,
}

/// Runs a decoder layer on `x [N, d]` and returns `[N, d]`. If `repeated` is given, the layer computes equal rows only once.
/// `angles` are the cosines and sines of the rows' positions, `[N, 1, D/2]` each.
///
/// Returns None if no kernel fits. The kernels need packed weights on the CPU, or a few bfloat16 rows on a GPU.
/// The attention must support [`Attend::as_attend_projected`].
pub fn decoder_layer(
    x: &Tensor,
    repeated: Option<RepeatedRows<'_>>,
    weights: &LayerWeights<'_>,
    angles: [&Tensor; 2],
    attend: &mut dyn Attend,
) -> Option<Tensor> {
    let attend = attend.as_attend_projected()?;
    if let Some(packed) = LayerWeightRefs::from_layer(weights, as_packed) {
        let fits = *weights.fits.get_or_init(|| packed.fits_kernels(weights));
        return fits.then(|| packed.run(x, repeated, weights, angles, attend));
    }
    let stored = LayerWeightRefs::from_layer(weights, as_stored)?;
    let fits = *weights.fits.get_or_init(|| stored.fits_kernels(weights));
    fits.then(|| stored.run(x, repeated, weights, angles, attend))
}

/// References to a layer's weights, all in one storage form `W`.
struct LayerWeightRefs<'a, W> {
    qkv: [&'a W; 3],
    output: &'a W,
    gate: &'a W,
    up: &'a W,
    down: &'a W,
}

fn as_packed(weight: &Weight) -> Option<&PackedWeight> {
    if let Weight::Packed(packed) = weight { Some(packed) } else { None }
}

fn as_stored(weight: &Weight) -> Option<&Tensor> {
    if let Weight::Stored(stored) = weight { Some(stored) } else { None }
}

/// Matmuls with weights of one storage form: packed, or plain tensors.
trait WeightProducts {
    /// `norm(x) [W₁; W₂; …]ᵀ + residual`: the outputs of all weights side by side.
    fn products(
        weights: &[&Self],
        x: &Tensor,
        norm: Option<RmsNormParams<'_>>,
        residual: Option<&Tensor>,
    ) -> Tensor;

    /// `silu(norm(x) Gᵀ) ⊙ (norm(x) Uᵀ)`.
    fn gated_product(gate: &Self, up: &Self, x: &Tensor, norm: RmsNormParams<'_>) -> Tensor;
}

impl WeightProducts for PackedWeight {
    fn products(
        weights: &[&Self],
        x: &Tensor,
        norm: Option<RmsNormParams<'_>>,
        residual: Option<&Tensor>,
    ) -> Tensor {
        ffi::packed_product(x, norm, weights, residual)
    }

    fn gated_product(gate: &Self, up: &Self, x: &Tensor, norm: RmsNormParams<'_>) -> Tensor {
        ffi::packed_gated_product(x, Some(norm), gate, up)
    }
}

impl WeightProducts for Tensor {
    fn products(
        weights: &[&Self],
        x: &Tensor,
        norm: Option<RmsNormParams<'_>>,
        residual: Option<&Tensor>,
    ) -> Tensor {
        ffi::decode_product(x, norm, weights, residual)
    }

    fn gated_product(gate: &Self, up: &Self, x: &Tensor, norm: RmsNormParams<'_>) -> Tensor {
        ffi::decode_gated_product(x, norm, gate, up)
    }
}

impl<'a, W> LayerWeightRefs<'a, W> {
    fn from_layer(weights: &LayerWeights<'a>, form: impl Fn(&'a Weight) -> Option<&'a W>) -> Option<Self> {
        let ([query, key, value], [gate, up, down]) = (weights.qkv, weights.mlp);
        Some(Self {
            qkv: [form(query)?, form(key)?, form(value)?],
            output: form(weights.output)?,
            gate: form(gate)?,
            up: form(up)?,
            down: form(down)?,
        })
    }
}

impl<W: WeightProducts> LayerWeightRefs<'_, W> {
    fn run(
        &self,
        x: &Tensor,
        repeated: Option<RepeatedRows<'_>>,
        weights: &LayerWeights<'_>,
        angles: [&Tensor; 2],
        attend: &mut dyn AttendProjected,
    ) -> Tensor {
        let LayerWeights { input_norm, qk_norms, mlp_norm, heads, .. } = *weights;
        let Heads { query, key_value, dim } = heads;
        // 1. Norm and projections: [N, (H + 2G)·D].
        let project = |x: &Tensor| W::products(&self.qkv, x, Some(input_norm), None);
        let qkv = match repeated {
            Some(RepeatedRows { distinct, repeat }) => repeat(&project(distinct)),
            None => project(x),
        };
        // 2. Head norms, rotation and attention: [N, H·D].
        let heads = ProjectedHeads { query, key_value, dim, gains: qk_norms, angles };
        let attended = attend.attend_projected(&qkv, heads);
        drop(qkv);
        // 3. Output projection and residual: [N, d].
        let x = W::products(&[self.output], &attended, None, Some(x));
        drop(attended);
        // 4. Norm, gate and up projections: [N, I].
        let inner = W::gated_product(self.gate, self.up, &x, mlp_norm);
        // 5. Down projection and residual: [N, d].
        W::products(&[self.down], &inner, None, Some(&x))
    }
}

/// Weights of all norms of the layer.
fn norm_weights<'a>(weights: &LayerWeights<'a>) -> impl Iterator<Item = &'a Tensor> {
    let of_heads = weights.qk_norms.into_iter().flatten();
    [weights.input_norm, weights.mlp_norm].into_iter().chain(of_heads).map(|norm| norm.weights)
}

impl LayerWeightRefs<'_, PackedWeight> {
    fn fits_kernels(&self, weights: &LayerWeights<'_>) -> bool {
        let fits = |of: &Tensor| of.kind() == Kind::Float && of.is_contiguous();
        self.output.size()[0] == self.qkv[0].size()[1]
            && norm_weights(weights).all(fits)
            && ffi::has_in_place_attention(weights.heads.dim)
    }
}

impl LayerWeightRefs<'_, Tensor> {
    fn fits_kernels(&self, weights: &LayerWeights<'_>) -> bool {
        let Self { qkv, output, gate, up, down } = *self;
        let (width, inner) = (qkv[0].size()[1], gate.size()[0]);
        let fits = |of: &Tensor| {
            of.kind() == Kind::BFloat16 && of.is_contiguous() && (of.data_ptr() as usize).is_multiple_of(16)
        };
        output.size()[0] == width
            && qkv.into_iter().chain([output, gate, up, down]).chain(norm_weights(weights)).all(fits)
            && ffi::has_decode_kernels(gate, width, inner, weights.heads.dim, weights.heads.num_kv_groups())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stands in for attention: returns the queries.
    struct Queries {
        heads: Heads,
        projects: bool,
    }

    impl Attend for Queries {
        fn attend(&mut self, qkv: &Qkv) -> Tensor {
            qkv.q.flatten(1, 2)
        }

        fn as_attend_projected(&mut self) -> Option<&mut dyn AttendProjected> {
            if self.projects { Some(self) } else { None }
        }
    }

    impl AttendProjected for Queries {
        fn attend_projected(&mut self, qkv: &Tensor, _: ProjectedHeads<'_>) -> Tensor {
            qkv.narrow(1, 0, self.heads.query * self.heads.dim).contiguous()
        }
    }

    #[test]
    fn packed_layers_are_fused_and_others_are_not() {
        let heads = Heads { query: 2, key_value: 1, dim: 32 };
        let values = |shape: [i64; 2], seed: u64| {
            Tensor::from_slice(&deepspec_testkit::noise(seed, (shape[0] * shape[1]) as usize)).view(shape)
        };
        let shapes = [[64, 64], [32, 64], [32, 64], [64, 64], [96, 64], [96, 64], [64, 96]];
        let stored = shapes.map(|shape| Weight::Stored(values(shape, 7)));
        let packed = shapes.map(|shape| Weight::Stored(values(shape, 7)).pack());
        let (norm, x) = (values([1, 64], 1).view([64]), values([3, 64], 2));
        let angles = [values([3, 16], 3).unsqueeze(1), values([3, 16], 4).unsqueeze(1)];
        let run = |weights: &[Weight; 7], projects: bool| {
            let [query, key, value, output, gate, up, down] = weights;
            let norm = RmsNormParams { weights: &norm, eps: 1e-6 };
            let weights = LayerWeights {
                input_norm: norm,
                qkv: [query, key, value],
                qk_norms: None,
                output,
                mlp_norm: norm,
                mlp: [gate, up, down],
                heads,
                fits: &OnceCell::new(),
            };
            decoder_layer(&x, None, &weights, angles.each_ref(), &mut Queries { heads, projects })
        };
        let has_kernels = packed.iter().all(|weight| matches!(weight, Weight::Packed(_)));
        assert_eq!(run(&packed, true).is_some(), has_kernels && ffi::has_in_place_attention(heads.dim));
        assert!(run(&packed, false).is_none(), "the attention takes no projections");
        assert!(run(&stored, true).is_none(), "these are no weights for kernels");
    }
}
