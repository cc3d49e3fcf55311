//! Projections of grouped-query attention.

use deepspec_ops::{AttentionSpec, Heads, Qkv};
use tch::Tensor;

use super::spec::{LayerSpec, ValueSource};
use super::{Builder, Init, Linear, RmsNorm, Rotation};

/// Projections of grouped-query attention, and the norms of its heads.
pub struct Attention {
    pub(super) q_proj: Linear,
    /// None if the keys and values are another model's.
    pub(super) keys_values: Option<KeyValueProjection>,
    pub(super) o_proj: Linear,
    pub(super) q_norm: Option<RmsNorm>,
    /// Attention sinks, `[H]`; None if there are none.
    pub(super) sinks: Option<Tensor>,
    pub(super) heads: Heads,
    /// Whether `q_proj` also gives a gate per head, behind its query. The output is multiplied by its sigmoid.
    pub(super) output_gate: bool,
}

/// Projections of keys and values, and their norms.
pub struct KeyValueProjection {
    pub(super) k_proj: Linear,
    pub(super) v_proj: Option<Linear>,
    pub(super) k_norm: Option<RmsNorm>,
    /// ε of the values' norm; None if values are not normed.
    pub(super) v_norm: Option<f64>,
    heads: Heads,
}

impl Attention {
    /// `input` is the width of the rows that attention reads. Its output has the width of the residual stream.
    pub(super) fn new(b: &Builder, name: &str, spec: &LayerSpec, input: i64) -> Self {
        let (d, heads) = (spec.hidden_size, spec.attention.heads);
        let (wide, narrow) = (heads.query * heads.dim, heads.key_value * heads.dim);
        let linear = |part: &str, has_bias, input, output| {
            linear_with(b, &format!("{name}.{part}"), has_bias, input, output)
        };
        let projection = |part: &str, output| linear(part, spec.qkv_bias, input, output);
        let v_proj = (spec.value != ValueSource::SharesKey).then(|| projection("v_proj", narrow));
        let q_proj = projection("q_proj", if spec.output_gate { 2 * wide } else { wide });
        let k_proj = projection("k_proj", narrow);
        let o_proj = linear("o_proj", spec.output_bias, wide, d);
        let q_norm = head_norm(b, name, "q_norm", spec);
        let k_norm = head_norm(b, name, "k_norm", spec);
        let v_norm = (spec.value != ValueSource::Projected).then_some(spec.eps);
        let keys_values = Some(KeyValueProjection { k_proj, v_proj, k_norm, v_norm, heads });
        let (sinks, output_gate) = (sinks(b, name, spec), spec.output_gate);
        Self { q_proj, keys_values, o_proj, q_norm, sinks, heads, output_gate }
    }

    /// Attention without keys and values of its own, as in layers that read another model's.
    pub(super) fn queries_only(b: &Builder, name: &str, spec: &LayerSpec) -> Self {
        let (d, heads) = (spec.hidden_size, spec.attention.heads);
        let wide = heads.query * heads.dim;
        Self {
            q_proj: linear_with(b, &format!("{name}.q_proj"), spec.qkv_bias, d, wide),
            keys_values: None,
            o_proj: linear_with(b, &format!("{name}.o_proj"), spec.output_bias, wide, d),
            q_norm: head_norm(b, name, "q_norm", spec),
            sinks: sinks(b, name, spec),
            heads,
            output_gate: false,
        }
    }

    /// Whether a projection has a bias.
    pub(super) fn has_bias(&self) -> bool {
        let of_keys = self.keys_values.iter().flat_map(|own| std::iter::once(&own.k_proj).chain(&own.v_proj));
        [&self.q_proj, &self.o_proj].into_iter().chain(of_keys).any(Linear::has_bias)
    }

    /// Queries, keys and values of `x [M, input]`, normed and rotated. `repeat` expands M rows to N rows before
    /// the rotation. Without keys of its own, attention has no rows of keys and values. With an output gate, its
    /// factors on the output are returned, too: `[N, H·D]`.
    pub(super) fn project(
        &self,
        x: &Tensor,
        repeat: &dyn Fn(&Tensor) -> Tensor,
        rotation: &Rotation,
    ) -> (Qkv, Option<Tensor>) {
        let Heads { query, dim, .. } = self.heads;
        let (q, gate) = if self.output_gate {
            let both = self.q_proj.forward(x).view([-1, query, 2, dim]);
            let gate = both.select(2, 1).flatten(1, 2).sigmoid();
            (both.select(2, 0).contiguous(), Some(repeat(&gate)))
        } else {
            (self.q_proj.forward(x).view([-1, query, dim]), None)
        };
        let q = apply_optional_norm(self.q_norm.as_ref(), q);
        let (k, v) = match &self.keys_values {
            Some(own) => {
                let (k, v) = own.project_unrotated(x);
                (rotation.rotate(&repeat(&k)), repeat(&v))
            }
            None => {
                let none =
                    || Tensor::zeros([0, self.heads.key_value, self.heads.dim], (x.kind(), x.device()));
                (none(), none())
            }
        };
        let sinks = self.sinks.as_ref().map(Tensor::shallow_clone);
        (Qkv { q: rotation.rotate(&repeat(&q)), k, v, sinks }, gate)
    }

    /// Keys and values `[N, G, D]` of a context `x [N, input]`, normed and rotated.
    ///
    /// # Panics
    /// If the keys and values are another model's.
    pub fn project_context(&self, x: &Tensor, rotation: &Rotation) -> (Tensor, Tensor) {
        self.keys_values.as_ref().expect("drafters of contexts have keys of their own").project(x, rotation)
    }
}

impl KeyValueProjection {
    /// Requests the projections of the attention `name`, without its queries.
    pub fn new(b: &Builder, name: &str, spec: &LayerSpec) -> Self {
        let (d, heads) = (spec.hidden_size, spec.attention.heads);
        let narrow = heads.key_value * heads.dim;
        let projection = |part: &str| linear_with(b, &format!("{name}.{part}"), spec.qkv_bias, d, narrow);
        Self {
            k_proj: projection("k_proj"),
            v_proj: (spec.value != ValueSource::SharesKey).then(|| projection("v_proj")),
            k_norm: head_norm(b, name, "k_norm", spec),
            v_norm: (spec.value != ValueSource::Projected).then_some(spec.eps),
            heads,
        }
    }

    /// Keys and values `[N, G, D]` of `x [N, input]`, normed and rotated.
    pub fn project(&self, x: &Tensor, rotation: &Rotation) -> (Tensor, Tensor) {
        let (k, v) = self.project_unrotated(x);
        (rotation.rotate(&k), v)
    }

    fn project_unrotated(&self, x: &Tensor) -> (Tensor, Tensor) {
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

/// A linear layer with or without a bias.
fn linear_with(b: &Builder, name: &str, has_bias: bool, input: i64, output: i64) -> Linear {
    if has_bias { Linear::with_bias(b, name, input, output) } else { Linear::new(b, name, input, output) }
}

/// Attention sinks `[H]`; None if the layer has none.
fn sinks(b: &Builder, name: &str, spec: &LayerSpec) -> Option<Tensor> {
    let AttentionSpec { heads, sinks, .. } = spec.attention;
    sinks.then(|| b.get(&format!("{name}.{}", spec.sinks_name), &[heads.query], Init::Zeros))
}

/// The norm of the heads of queries or keys; None if the layer has none.
fn head_norm(b: &Builder, name: &str, part: &str, spec: &LayerSpec) -> Option<RmsNorm> {
    let norm = || {
        let dim = spec.attention.heads.dim;
        RmsNorm::with_weight(b, &format!("{name}.{part}"), dim, spec.eps, spec.norm_weight)
    };
    spec.qk_norm.then(norm)
}

/// Applies the norm to `x`. Returns `x` unchanged if there is none.
pub(super) fn apply_optional_norm(norm: Option<&RmsNorm>, x: Tensor) -> Tensor {
    match norm {
        Some(norm) => norm.forward(&x),
        None => x,
    }
}
