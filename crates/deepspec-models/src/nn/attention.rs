//! Projections of grouped-query attention.

use deepspec_checkpoint::ATTENTION_SINK_BIAS;
use deepspec_ops::{Heads, Qkv};
use tch::Tensor;

use super::spec::{LayerSpec, ValueSource};
use super::{Builder, Init, Linear, RmsNorm, Rotation};

/// Projections of grouped-query attention, and the norms of its heads.
pub struct Attention {
    pub(super) q_proj: Linear,
    pub(super) k_proj: Linear,
    pub(super) v_proj: Option<Linear>,
    pub(super) o_proj: Linear,
    pub(super) q_norm: Option<RmsNorm>,
    pub(super) k_norm: Option<RmsNorm>,
    /// ε of the values' norm; None if values are not normed.
    pub(super) v_norm: Option<f64>,
    /// Attention sinks, `[H]`; None if there are none.
    pub(super) sinks: Option<Tensor>,
    pub(super) heads: Heads,
}

impl Attention {
    /// `input` is the width of the rows that attention reads. Its output has the width of the residual stream.
    pub(super) fn new(b: &Builder, name: &str, spec: &LayerSpec, input: i64) -> Self {
        let (d, heads) = (spec.hidden_size, spec.attention.heads);
        let (wide, narrow) = (heads.query * heads.dim, heads.key_value * heads.dim);
        let projection = |part: &str, output| {
            let name = format!("{name}.{part}");
            if spec.qkv_bias {
                Linear::with_bias(b, &name, input, output)
            } else {
                Linear::new(b, &name, input, output)
            }
        };
        let v_proj = (spec.value != ValueSource::SharesKey).then(|| projection("v_proj", narrow));
        let norm = |part: &str| {
            RmsNorm::with_weight(b, &format!("{name}.{part}"), heads.dim, spec.eps, spec.norm_weight)
        };
        let norm = |part| spec.qk_norm.then(|| norm(part));
        Self {
            q_proj: projection("q_proj", wide),
            k_proj: projection("k_proj", narrow),
            v_proj,
            o_proj: Linear::new(b, &format!("{name}.o_proj"), wide, d),
            q_norm: norm("q_norm"),
            k_norm: norm("k_norm"),
            v_norm: (spec.value != ValueSource::Projected).then_some(spec.eps),
            sinks: spec
                .attention
                .sinks
                .then(|| b.get(&format!("{name}.{ATTENTION_SINK_BIAS}"), &[heads.query], Init::Zeros)),
            heads,
        }
    }

    /// Whether a projection has a bias.
    pub(super) fn has_bias(&self) -> bool {
        let projections = [&self.q_proj, &self.k_proj, &self.o_proj];
        projections.into_iter().chain(&self.v_proj).any(Linear::has_bias)
    }

    /// Queries, keys and values of `x [M, input]`, normed and rotated. `repeat` expands M rows to N rows before
    /// the rotation.
    pub(super) fn project(&self, x: &Tensor, repeat: &dyn Fn(&Tensor) -> Tensor, rotation: &Rotation) -> Qkv {
        let q = self.q_proj.forward(x).view([-1, self.heads.query, self.heads.dim]);
        let q = apply_optional_norm(self.q_norm.as_ref(), q);
        let (k, v) = self.project_keys_values(x);
        let sinks = self.sinks.as_ref().map(Tensor::shallow_clone);
        Qkv { q: rotation.rotate(&repeat(&q)), k: rotation.rotate(&repeat(&k)), v: repeat(&v), sinks }
    }

    /// Keys and values `[N, G, D]` of a context `x [N, input]`, normed and rotated.
    pub fn project_context(&self, x: &Tensor, rotation: &Rotation) -> (Tensor, Tensor) {
        let (k, v) = self.project_keys_values(x);
        (rotation.rotate(&k), v)
    }

    fn project_keys_values(&self, x: &Tensor) -> (Tensor, Tensor) {
        let shape = [-1, self.heads.key_value, self.heads.dim];
        let k = self.k_proj.forward(x).view(shape);
        let v = self.v_proj.as_ref().map_or_else(|| k.shallow_clone(), |v| v.forward(x).view(shape));
        let v = match self.v_norm {
            Some(eps) => v.rms_norm([self.heads.dim], None::<Tensor>, eps),
            None => v,
        };
        (apply_optional_norm(self.k_norm.as_ref(), k), v)
    }
}

/// Applies the norm to `x`. Returns `x` unchanged if there is none.
pub(super) fn apply_optional_norm(norm: Option<&RmsNorm>, x: Tensor) -> Tensor {
    match norm {
        Some(norm) => norm.forward(&x),
        None => x,
    }
}
