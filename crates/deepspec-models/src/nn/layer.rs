//! One decoder layer: grouped-query attention and a gated MLP; the rest is in its [`LayerSpec`].

use deepspec_ops::{
    PackedWeight, ProjectedHeads, RmsNormParams, gated_product, has_few_rows, has_history_attention,
    packed_gated_product, rms_norm, silu_times,
};
use tch::{Kind, Tensor};

use super::linear::LinearKernel;
use super::spec::{Activation, Heads, LayerSpec, Norms, Value};
use super::{Builder, Init, Rotation, Weight};
use crate::ModelError;

/// `y = x Wᵀ (+ b)`.
pub struct Linear {
    weight: Weight,
    bias: Option<Tensor>,
}

impl Linear {
    /// `[.., input] -> [.., output]` without bias.
    pub fn new(b: &Builder, name: &str, input: i64, output: i64) -> Result<Self, ModelError> {
        Ok(Self { weight: b.product(&format!("{name}.weight"), &[output, input], Init::Normal)?, bias: None })
    }

    /// The same, giving zeros while it is fresh.
    pub fn starting_at_zero(b: &Builder, name: &str, input: i64, output: i64) -> Result<Self, ModelError> {
        Ok(Self { weight: b.product(&format!("{name}.weight"), &[output, input], Init::Zeros)?, bias: None })
    }

    /// `[.., input] -> [.., output]` with bias.
    pub fn with_bias(b: &Builder, name: &str, input: i64, output: i64) -> Result<Self, ModelError> {
        let bias = Some(b.get(&format!("{name}.bias"), &[output], Init::Zeros)?);
        Ok(Self { bias, ..Self::new(b, name, input, output)? })
    }

    /// Applies it to the last dimension.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        self.weight.product(x, self.bias.as_ref())
    }

    /// Its weight, where that is of this form and there is no bias.
    fn unbiased<W: LinearKernel>(&self) -> Option<&W> {
        if self.bias.is_none() { W::of(&self.weight) } else { None }
    }

    /// `silu(gate(x)) ⊙ self(x)` in one, where both are packed and without bias.
    fn gated_by(&self, gate: &Self, x: &Tensor) -> Option<Tensor> {
        let (Weight::Packed(up), Weight::Packed(packed)) = (&self.weight, &gate.weight) else { return None };
        (self.bias.is_none() && gate.bias.is_none()).then(|| packed_gated_product(x, None, packed, up))
    }

    /// Applies it to `silu(gate) ⊙ up`.
    fn forward_gated(&self, gate: &Tensor, up: &Tensor) -> Tensor {
        if let (Weight::Stored(weight), None) = (&self.weight, &self.bias)
            && let Some(learning) = gated_product(gate, up, weight)
        {
            return learning;
        }
        self.forward(&silu_times(gate, up).unwrap_or_else(|| gate.silu() * up))
    }
}

/// `x / rms(x) · w` over the last dimension, in float32 inside.
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    /// A norm over `size` channels.
    pub fn new(b: &Builder, name: &str, size: i64, eps: f64) -> Result<Self, ModelError> {
        Ok(Self { weight: b.get(&format!("{name}.weight"), &[size], Init::Ones)?, eps })
    }

    fn gain(&self) -> RmsNormParams<'_> {
        RmsNormParams { weights: &self.weight, eps: self.eps }
    }

    /// Norms the last dimension.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        rms_norm(x, &self.weight, self.eps)
            .unwrap_or_else(|| x.rms_norm(self.weight.size(), Some(&self.weight), self.eps))
    }
}

/// Projected, normed where the layer does that, and rotated: `q [N, H, D]`, `k [N, G, D]`, and `v [N, G, D]`.
pub struct Qkv {
    /// Queries.
    pub q: Tensor,
    /// Keys.
    pub k: Tensor,
    /// Values.
    pub v: Tensor,
}

/// The projections of grouped-query attention; who attends to whom is the caller's business.
pub struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Option<Linear>,
    o_proj: Linear,
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
    /// ε of the values' norm, where they are normed.
    v_norm: Option<f64>,
    heads: Heads,
}

impl Attention {
    /// `input` is the width of what it reads; what it gives is as wide as the residual stream.
    fn new(b: &Builder, name: &str, spec: &LayerSpec, input: i64) -> Result<Self, ModelError> {
        let (d, heads) = (spec.hidden_size, spec.attention.heads);
        let (wide, narrow) = (heads.query * heads.dim, heads.key_value * heads.dim);
        let v_proj = match spec.value {
            Value::Projected | Value::Normed => {
                Some(Linear::new(b, &format!("{name}.v_proj"), input, narrow)?)
            }
            Value::SharesKey => None,
        };
        let norm = |part: &str| RmsNorm::new(b, &format!("{name}.{part}"), heads.dim, spec.eps);
        let norm = |part| spec.qk_norm.then(|| norm(part)).transpose();
        Ok(Self {
            q_proj: Linear::new(b, &format!("{name}.q_proj"), input, wide)?,
            k_proj: Linear::new(b, &format!("{name}.k_proj"), input, narrow)?,
            v_proj,
            o_proj: Linear::new(b, &format!("{name}.o_proj"), wide, d)?,
            q_norm: norm("q_norm")?,
            k_norm: norm("k_norm")?,
            v_norm: (spec.value != Value::Projected).then_some(spec.eps),
            heads,
        })
    }

    /// Queries, keys and values of `x [N, input]`.
    pub fn project(&self, x: &Tensor, rotation: &Rotation) -> Qkv {
        self.project_spread(x, Tensor::shallow_clone, rotation)
    }

    /// The same of N rows that `spread` makes of those of `x`, by repeating some: before the rotation, which differs by row.
    fn project_spread(&self, x: &Tensor, spread: impl Fn(&Tensor) -> Tensor, rotation: &Rotation) -> Qkv {
        let heads = self.heads;
        let q = normed(self.q_norm.as_ref(), self.q_proj.forward(x).view([-1, heads.query, heads.dim]));
        let (k, v) = self.keys_and_values(x);
        Qkv { q: rotation.rotate(&spread(&q)), k: rotation.rotate(&spread(&k)), v: spread(&v) }
    }

    /// Keys and values alone.
    pub fn project_context(&self, x: &Tensor, rotation: &Rotation) -> (Tensor, Tensor) {
        let (k, v) = self.keys_and_values(x);
        (rotation.rotate(&k), v)
    }

    /// The same before the rotation.
    fn keys_and_values(&self, x: &Tensor) -> (Tensor, Tensor) {
        let shape = [-1, self.heads.key_value, self.heads.dim];
        let k = self.k_proj.forward(x).view(shape);
        let v =
            self.v_proj.as_ref().map_or_else(|| k.shallow_clone(), |v_proj| v_proj.forward(x).view(shape));
        let v = match self.v_norm {
            Some(eps) => v.rms_norm([self.heads.dim], None::<Tensor>, eps),
            None => v,
        };
        (normed(self.k_norm.as_ref(), k), v)
    }
}

/// `x`, or what the norm makes of it.
fn normed(norm: Option<&RmsNorm>, x: Tensor) -> Tensor {
    match norm {
        Some(norm) => norm.forward(&x),
        None => x,
    }
}

/// The gated MLP `down(act(gate(x)) ⊙ up(x))`.
pub struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    activation: Activation,
}

impl Mlp {
    fn new(b: &Builder, name: &str, spec: &LayerSpec) -> Result<Self, ModelError> {
        let (d, inner) = (spec.hidden_size, spec.intermediate_size);
        Ok(Self {
            gate_proj: Linear::new(b, &format!("{name}.gate_proj"), d, inner)?,
            up_proj: Linear::new(b, &format!("{name}.up_proj"), d, inner)?,
            down_proj: Linear::new(b, &format!("{name}.down_proj"), inner, d)?,
            activation: spec.activation,
        })
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        if let (Activation::Silu, Some(inner)) = (self.activation, self.up_proj.gated_by(&self.gate_proj, x))
        {
            return self.down_proj.forward(&inner);
        }
        let (gate, up) = (self.gate_proj.forward(x), self.up_proj.forward(x));
        match self.activation {
            Activation::Silu => self.down_proj.forward_gated(&gate, &up),
            Activation::GeluTanh => self.down_proj.forward(&(gate.gelu("tanh") * up)),
        }
    }
}

/// The norms before and, in a sandwich, after one half of a layer.
struct Wrap {
    before: RmsNorm,
    after: Option<RmsNorm>,
}

/// One of the two halves of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// Attention.
    Attention,
    /// The MLP.
    Mlp,
}

/// Nothing around a half.
fn plainly(_: Half, normed: &Tensor, run: &mut dyn FnMut(&Tensor) -> Tensor) -> Tensor {
    run(normed)
}

/// Attention and MLP, each between its norms and beside a residual.
pub struct DecoderLayer {
    /// The attention projections.
    pub attention: Attention,
    mlp: Mlp,
    attention_norms: Wrap,
    mlp_norms: Wrap,
    /// `[1]`, on the layer's output.
    layer_scalar: Option<Tensor>,
}

/// The weights of a fused layer.
struct Fused<'a, W> {
    qkv: [&'a W; 3],
    output: &'a W,
    gate: &'a W,
    up: &'a W,
    down: &'a W,
}

/// Rows of which some are alike until they are turned.
pub struct BroadcastRows<'a> {
    /// The distinct ones, `[M, d]`.
    pub distinct: &'a Tensor,
    /// Makes all rows of what belongs to the distinct ones, by repeating some.
    pub repeat: &'a dyn Fn(&Tensor) -> Tensor,
}

impl DecoderLayer {
    /// Its weights in a form, where it is a layer as Qwen3's and Llama's.
    fn fused<W: LinearKernel>(&self) -> Option<Fused<'_, W>> {
        let Self { attention, mlp, attention_norms, mlp_norms, layer_scalar } = self;
        let is_plain = attention_norms.after.is_none() && mlp_norms.after.is_none() && layer_scalar.is_none();
        let fits = is_plain
            && attention.v_norm.is_none()
            && attention.q_norm.is_some() == attention.k_norm.is_some()
            && mlp.activation == Activation::Silu;
        fits.then_some(())?;
        let [query, key, value] = [&attention.q_proj, &attention.k_proj, attention.v_proj.as_ref()?];
        Some(Fused {
            qkv: [query.unbiased()?, key.unbiased()?, value.unbiased()?],
            output: attention.o_proj.unbiased()?,
            gate: mlp.gate_proj.unbiased()?,
            up: mlp.up_proj.unbiased()?,
            down: mlp.down_proj.unbiased()?,
        })
    }

    /// Whether the layer can run in five calls: of layers as Qwen3's and Llama's those with packed weights and heads of a multiple of 8, and those in
    /// bfloat16 on a GPU that there are kernels for.
    pub fn is_fused(&self) -> bool {
        let heads = self.attention.heads;
        let norms = [Some(&self.attention_norms.before), Some(&self.mlp_norms.before)];
        let of_heads = [self.attention.q_norm.as_ref(), self.attention.k_norm.as_ref()];
        let mut gains = norms.into_iter().chain(of_heads).flatten().map(|norm| &norm.weight);
        if let Some(Fused { qkv, output, .. }) = self.fused::<PackedWeight>() {
            let lies = |of: &Tensor| of.kind() == Kind::Float && of.is_contiguous();
            return output.size()[0] == qkv[0].size()[1]
                && gains.all(lies)
                && has_history_attention(heads.dim);
        }
        let Some(Fused { qkv, output, gate, up, down }) = self.fused::<Tensor>() else { return false };
        let (width, inner) = (qkv[0].size()[1], gate.size()[0]);
        let lies = |of: &Tensor| {
            of.kind() == Kind::BFloat16 && of.is_contiguous() && (of.data_ptr() as usize).is_multiple_of(16)
        };
        output.size()[0] == width
            && qkv.into_iter().chain([output, gate, up, down]).chain(gains).all(lies)
            && has_few_rows(gate, width, inner, heads.dim, heads.repeats())
    }

    /// [`DecoderLayer::forward`] in five calls, where [`DecoderLayer::is_fused`]: on a GPU for up to [`deepspec_ops::FEW_ROWS`] rows, and with no
    /// difference to the last bit where weights are packed. `attend` takes queries, keys and values side by side, `[N, (H + 2G)·D]`, and norms and rotates
    /// them by itself. What of `spread` rows is alike is projected once.
    ///
    /// None where the layer is of another form.
    pub(crate) fn forward_fused(
        &self,
        x: &Tensor,
        spread: Option<BroadcastRows<'_>>,
        rotation: &Rotation,
        attend: impl FnOnce(&Tensor, ProjectedHeads<'_>) -> Tensor,
    ) -> Option<Tensor> {
        if let Some(packed) = self.fused::<PackedWeight>() {
            return Some(self.run_fused(&packed, x, spread, rotation, attend));
        }
        self.fused::<Tensor>().map(|stored| self.run_fused(&stored, x, spread, rotation, attend))
    }

    /// The same with its weights.
    fn run_fused<W: LinearKernel>(
        &self,
        Fused { qkv, output, gate, up, down }: &Fused<'_, W>,
        x: &Tensor,
        spread: Option<BroadcastRows<'_>>,
        rotation: &Rotation,
        attend: impl FnOnce(&Tensor, ProjectedHeads<'_>) -> Tensor,
    ) -> Tensor {
        let Attention { q_norm, k_norm, heads, .. } = &self.attention;
        let gains = q_norm.as_ref().zip(k_norm.as_ref()).map(|(q, k)| [q.gain(), k.gain()]);
        let Heads { query, key_value, dim } = *heads;
        let heads = ProjectedHeads { query, key_value, dim, gains, angles: rotation.angles() };
        let project = |x: &Tensor| W::products(qkv, x, Some(self.attention_norms.before.gain()), None);
        let qkv = match spread {
            Some(BroadcastRows { distinct, repeat }) => repeat(&project(distinct)),
            None => project(x),
        };
        let seen = attend(&qkv, heads);
        drop(qkv);
        let x = W::products(&[*output], &seen, None, Some(x));
        drop(seen);
        let inner = W::gated_product(gate, up, &x, self.mlp_norms.before.gain());
        W::products(&[*down], &inner, None, Some(&x))
    }

    /// The layer `name` (`model.layers.3`, `layers.0`).
    pub fn new(b: &Builder, name: &str, spec: &LayerSpec) -> Result<Self, ModelError> {
        Self::reading(b, name, spec, spec.hidden_size)
    }

    /// The same with an attention that reads something of another width; see [`DecoderLayer::forward_reading`].
    pub fn reading(b: &Builder, name: &str, spec: &LayerSpec, input: i64) -> Result<Self, ModelError> {
        let norm = |part: &str| RmsNorm::new(b, &format!("{name}.{part}"), spec.hidden_size, spec.eps);
        let attention = Attention::new(b, &format!("{name}.self_attn"), spec, input)?;
        let mlp = Mlp::new(b, &format!("{name}.mlp"), spec)?;
        let before = norm("input_layernorm")?;
        // What stands before the MLP in one layout stands after the attention in the other, under the same name.
        let post_attention = norm("post_attention_layernorm")?;
        let (attention_norms, mlp_norms) = match spec.norms {
            Norms::Pre => (Wrap { before, after: None }, Wrap { before: post_attention, after: None }),
            Norms::Sandwich => (
                Wrap { before, after: Some(post_attention) },
                Wrap {
                    before: norm("pre_feedforward_layernorm")?,
                    after: Some(norm("post_feedforward_layernorm")?),
                },
            ),
        };
        let scalar = || b.buffer(&format!("{name}.layer_scalar"), &[1], Init::Ones);
        let layer_scalar = spec.scaled.then(scalar).transpose()?;
        Ok(Self { attention, mlp, attention_norms, mlp_norms, layer_scalar })
    }

    /// `x [N, d] -> [N, d]`; `attend` turns queries, keys and values into `[N, H·D]`.
    pub fn forward(&self, x: &Tensor, rotation: &Rotation, attend: impl FnMut(&Qkv) -> Tensor) -> Tensor {
        self.forward_around(x, rotation, attend, plainly)
    }

    /// The same with something around attention and MLP, between them and their norms or the residual: `around(half, normed, run)` is
    /// called in place of `run(normed)`, all `[N, d]`.
    pub fn forward_around(
        &self,
        x: &Tensor,
        rotation: &Rotation,
        mut attend: impl FnMut(&Qkv) -> Tensor,
        around: impl Fn(Half, &Tensor, &mut dyn FnMut(&Tensor) -> Tensor) -> Tensor,
    ) -> Tensor {
        let y = around(Half::Attention, &self.input_norm(x), &mut |read| {
            self.attention.o_proj.forward(&attend(&self.attention.project(read, rotation)))
        });
        self.close(x, y, around)
    }

    /// `input_layernorm`, over `[N, d]`.
    pub fn input_norm(&self, x: &Tensor) -> Tensor {
        self.attention_norms.before.forward(x)
    }

    /// The layer whose attention reads `read [N, input]`, already normed, instead of the residual stream `x [N, d]`.
    pub fn forward_reading(
        &self,
        read: &Tensor,
        x: &Tensor,
        rotation: &Rotation,
        attend: impl FnOnce(&Qkv) -> Tensor,
    ) -> Tensor {
        let y = self.attention.o_proj.forward(&attend(&self.attention.project(read, rotation)));
        self.close(x, y, plainly)
    }

    /// The layer whose rows `x [N, d]` `spread` makes of fewer ones: what does not depend on their positions is computed once.
    pub fn forward_spread(
        &self,
        x: &Tensor,
        BroadcastRows { distinct, repeat }: BroadcastRows<'_>,
        rotation: &Rotation,
        attend: impl FnOnce(&Qkv) -> Tensor,
    ) -> Tensor {
        let projected = self.attention.project_spread(&self.input_norm(distinct), repeat, rotation);
        self.close(x, self.attention.o_proj.forward(&attend(&projected)), plainly)
    }

    /// What follows the attention, which gave `y`.
    fn close(
        &self,
        x: &Tensor,
        y: Tensor,
        around: impl Fn(Half, &Tensor, &mut dyn FnMut(&Tensor) -> Tensor) -> Tensor,
    ) -> Tensor {
        let x = self.attention_norms.close(x, y);
        let y = around(Half::Mlp, &self.mlp_norms.before.forward(&x), &mut |read| self.mlp.forward(read));
        let x = self.mlp_norms.close(&x, y);
        self.layer_scalar.as_ref().map_or_else(|| x.shallow_clone(), |scalar| &x * scalar)
    }
}

impl Wrap {
    /// `x + after(y)`.
    fn close(&self, x: &Tensor, y: Tensor) -> Tensor {
        let mut y = match &self.after {
            Some(norm) => norm.forward(&y),
            None => y,
        };
        if x.requires_grad() || y.requires_grad() || x.kind() != y.kind() {
            return x + y;
        }
        // A product, a norm or what stands around them made it just now: nobody else holds it.
        y += x;
        y
    }
}
