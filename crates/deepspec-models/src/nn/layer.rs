//! One decoder layer: grouped-query attention and a gated MLP, or experts. A [`LayerSpec`] holds the settings in which families
//! differ.

use std::cell::OnceCell;

use deepspec_ops::{Activation, Attend, LayerWeights, RepeatedRows, decoder_layer};
use tch::Tensor;

use super::attention::{Attention, apply_optional_norm};
use super::mlp::Mlp;
use super::spec::{LayerSpec, NormPlacement};
use super::{Builder, Init, Linear, RmsNorm, Rotation};

/// Inputs of a decoder layer.
#[derive(Clone, Copy)]
pub struct LayerInput<'a> {
    /// The residual stream, `[N, d]`.
    pub x: &'a Tensor,
    /// Distinct rows of `x`, if its rows repeat. Each distinct row is projected once.
    pub repeated: Option<RepeatedRows<'a>>,
    /// Token embeddings `[N, d]`, for an Eagle3 layer, whose attention reads them in addition to `x`.
    pub embeddings: Option<&'a Tensor>,
}

impl<'a> From<&'a Tensor> for LayerInput<'a> {
    fn from(x: &'a Tensor) -> Self {
        Self { x, repeated: None, embeddings: None }
    }
}

/// Hook that wraps the attention and the MLP of a layer. It sees rows after the input norm, and its result goes
/// to the output norm or the residual.
pub trait LayerHook {
    /// Called in place of `attention(normed)`, which is `[N, d]` to `[N, d]`.
    fn around_attention(&self, normed: &Tensor, attention: &mut dyn FnMut(&Tensor) -> Tensor) -> Tensor;

    /// Called in place of `mlp(normed)`, which is `[N, d]` to `[N, d]`.
    fn around_mlp(&self, normed: &Tensor, mlp: &mut dyn FnMut(&Tensor) -> Tensor) -> Tensor;
}

/// Attention and MLP, each with its norms and a residual connection.
pub struct DecoderLayer {
    /// The attention projections.
    pub attention: Attention,
    mlp: Mlp,
    input_norm: RmsNorm,
    /// Norm of the residual stream, if attention also reads token embeddings (Eagle3). `input_norm` then norms
    /// the embeddings.
    hidden_norm: Option<RmsNorm>,
    /// Whether the residual of attention is `hidden_norm(x)` instead of `x`.
    norm_before_residual: bool,
    /// Norm after attention; only with [`NormPlacement::Sandwich`].
    attention_out_norm: Option<RmsNorm>,
    mlp_norm: RmsNorm,
    /// Norm after the MLP; only with [`NormPlacement::Sandwich`].
    mlp_out_norm: Option<RmsNorm>,
    /// Factor on the layer's output, `[1]`.
    layer_scalar: Option<Tensor>,
    /// Factor on the outputs of attention and MLP.
    residual_scale: f64,
    /// Whether the weights fit the kernels of a fused layer.
    fits: OnceCell<bool>,
}

impl DecoderLayer {
    /// The layer `name` (`model.layers.3`, `layers.0`).
    pub fn new(b: &Builder, name: &str, spec: &LayerSpec) -> Self {
        Self::with_input_width(b, name, spec, spec.hidden_size)
    }

    /// The layer `name` of Eagle3: attention reads `[input_layernorm(embeddings) ; hidden_norm(x)]`, 2d wide. Its output
    /// is added to `x`, or to `hidden_norm(x)` with `norm_before_residual`.
    pub fn with_embeddings(b: &Builder, name: &str, spec: &LayerSpec, norm_before_residual: bool) -> Self {
        let layer = Self::with_input_width(b, name, spec, 2 * spec.hidden_size);
        let hidden_norm = RmsNorm::new(b, &format!("{name}.hidden_norm"), spec.hidden_size, spec.eps);
        Self { hidden_norm: Some(hidden_norm), norm_before_residual, ..layer }
    }

    fn with_input_width(b: &Builder, name: &str, spec: &LayerSpec, input: i64) -> Self {
        let attention = Attention::new(b, &format!("{name}.self_attn"), spec, input);
        Self::around(b, name, spec, attention)
    }

    /// The layer `name` whose attention has no keys and values of its own. The caller's [`Attend`] brings another model's.
    pub fn with_queries_only(b: &Builder, name: &str, spec: &LayerSpec) -> Self {
        Self::around(b, name, spec, Attention::queries_only(b, &format!("{name}.self_attn"), spec))
    }

    /// The layer around this attention.
    fn around(b: &Builder, name: &str, spec: &LayerSpec, attention: Attention) -> Self {
        let (size, eps, form) = (spec.hidden_size, spec.eps, spec.norm_weight);
        let norm = |part: &str| RmsNorm::with_weight(b, &format!("{name}.{part}"), size, eps, form);
        let mlp = Mlp::new(b, &format!("{name}.mlp"), spec);
        let input_norm = norm("input_layernorm");
        // `post_attention_layernorm` is the norm before the MLP in Llama, and the norm after attention in Gemma.
        let post_attention = norm("post_attention_layernorm");
        let (attention_out_norm, mlp_norm, mlp_out_norm) = match spec.norms {
            NormPlacement::Pre => (None, post_attention, None),
            NormPlacement::Sandwich => (
                Some(post_attention),
                norm("pre_feedforward_layernorm"),
                Some(norm("post_feedforward_layernorm")),
            ),
        };
        let scalar = || b.buffer(&format!("{name}.layer_scalar"), &[1], Init::Ones);
        let layer_scalar = spec.scaled.then(scalar);
        Self {
            attention,
            mlp,
            input_norm,
            hidden_norm: None,
            norm_before_residual: false,
            attention_out_norm,
            mlp_norm,
            mlp_out_norm,
            layer_scalar,
            residual_scale: spec.residual_scale,
            fits: OnceCell::new(),
        }
    }

    /// `x [N, d]` to `[N, d]`. `attend` turns queries, keys and values into `[N, H·D]`.
    pub fn forward(
        &self,
        input: LayerInput<'_>,
        rotation: &Rotation,
        attend: &mut dyn Attend,
        hook: Option<&dyn LayerHook>,
    ) -> Tensor {
        let LayerInput { x, repeated, embeddings } = input;
        if hook.is_none()
            && let Some(weights) = self.pre_norm_weights()
            && let Some(y) = decoder_layer(x, repeated, &weights, rotation.cos_sin(), attend)
        {
            return y;
        }
        // 1. Norm: [M, d], or [M, 2d] beside the embeddings; M is N unless rows repeat.
        let rows = repeated.map_or(x, |rows| rows.distinct);
        let mut residual = x.shallow_clone();
        let normed = match (&self.hidden_norm, embeddings) {
            (Some(norm), Some(embeddings)) => {
                let normed = norm.forward(rows);
                if self.norm_before_residual {
                    residual = normed.shallow_clone();
                }
                Tensor::cat(&[self.input_norm.forward(embeddings), normed], -1)
            }
            _ => self.input_norm.forward(rows),
        };
        // 2. Attention: [M, d] -> q [N, H, D], k and v [N, G, D] -> [N, H·D] -> [N, d].
        let mut attention = |normed: &Tensor| {
            let clone = |rows: &Tensor| rows.shallow_clone();
            let repeat = repeated.map_or(&clone as &dyn Fn(&Tensor) -> Tensor, |rows| rows.repeat);
            let (qkv, gate) = self.attention.project(normed, repeat, rotation);
            let y = attend.attend(&qkv);
            self.attention.o_proj.forward(&gate.map_or_else(|| y.shallow_clone(), |gate| &y * gate))
        };
        let y = match hook {
            Some(hook) => hook.around_attention(&normed, &mut attention),
            None => attention(&normed),
        };
        drop(normed);
        // 3. Norm of a sandwich, and residual: [N, d].
        let x = self.add_branch(&residual, apply_optional_norm(self.attention_out_norm.as_ref(), y));
        drop(residual);
        // 4. Norm and MLP: [N, d] -> [N, I] -> [N, d].
        let normed = self.mlp_norm.forward(&x);
        let y = match hook {
            Some(hook) => hook.around_mlp(&normed, &mut |normed| self.mlp.forward(normed)),
            None => self.mlp.forward(&normed),
        };
        // 5. Norm of a sandwich, residual, and scale: [N, d].
        let x = self.add_branch(&x, apply_optional_norm(self.mlp_out_norm.as_ref(), y));
        self.layer_scalar.as_ref().map_or_else(|| x.shallow_clone(), |scalar| &x * scalar)
    }

    /// `x + residual_scale · y`, where `y` is the output of attention or MLP.
    fn add_branch(&self, x: &Tensor, y: Tensor) -> Tensor {
        let y = if self.residual_scale == 1.0 { y } else { y * self.residual_scale };
        add_residual(x, y)
    }

    /// The weights of a pre-norm layer with a SiLU-gated MLP, without biases, attention sinks, an output gate, experts and a
    /// factor on its branches.
    /// None if the layer has another form, which the fused layer does not support.
    fn pre_norm_weights(&self) -> Option<LayerWeights<'_>> {
        let Self { attention, mlp: Mlp::Dense(mlp), .. } = self else { return None };
        let is_pre_norm = self.hidden_norm.is_none()
            && self.attention_out_norm.is_none()
            && self.mlp_out_norm.is_none()
            && self.layer_scalar.is_none()
            && self.residual_scale == 1.0
            && !attention.has_bias()
            && attention.sinks.is_none()
            && !attention.output_gate
            && mlp.activation == Activation::Silu;
        let keys_values = attention.keys_values.as_ref().filter(|_| is_pre_norm)?;
        let has_equal_norms = attention.q_norm.is_some() == keys_values.k_norm.is_some();
        (keys_values.v_norm.is_none() && has_equal_norms).then_some(())?;
        let qk_norms = match (&attention.q_norm, &keys_values.k_norm) {
            (Some(q), Some(k)) => Some([q.params()?, k.params()?]),
            _ => None,
        };
        Some(LayerWeights {
            input_norm: self.input_norm.params()?,
            qkv: [
                attention.q_proj.weight(),
                keys_values.k_proj.weight(),
                keys_values.v_proj.as_ref()?.weight(),
            ],
            qk_norms,
            output: attention.o_proj.weight(),
            mlp_norm: self.mlp_norm.params()?,
            mlp: [&mlp.gate_proj, &mlp.up_proj, &mlp.down_proj].map(Linear::weight),
            heads: attention.heads,
            fits: &self.fits,
        })
    }
}

/// `x + y`, in place of `y` where no graph needs it.
pub(super) fn add_residual(x: &Tensor, mut y: Tensor) -> Tensor {
    if x.requires_grad() || y.requires_grad() || x.kind() != y.kind() {
        return x + y;
    }
    y += x;
    y
}
