//! One decoder layer of the Qwen3 kind: grouped-query attention with normed queries and keys, gated MLP, pre-norms.

use tch::{Device, Tensor};

use super::{Builder, Init, Rotation};
use crate::{ModelConfig, ModelError};

/// `y = x Wᵀ (+ b)`.
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// `[.., input] -> [.., output]` without bias.
    pub fn new(b: &Builder, name: &str, input: i64, output: i64) -> Result<Self, ModelError> {
        Ok(Self { weight: b.get(&format!("{name}.weight"), &[output, input], Init::Normal)?, bias: None })
    }

    /// `[.., input] -> [.., output]` with bias.
    pub fn with_bias(b: &Builder, name: &str, input: i64, output: i64) -> Result<Self, ModelError> {
        let bias = Some(b.get(&format!("{name}.bias"), &[output], Init::Zeros)?);
        Ok(Self { bias, ..Self::new(b, name, input, output)? })
    }

    /// Applies it to the last dimension.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        linear(x, &self.weight, self.bias.as_ref())
    }
}

/// Products of fewer rows take another path through the CPU's matrix routines and differ in the last bits.
const FEWEST_ROWS: i64 = 4;

/// `x Wᵀ (+ b)` over the last dimension. On the CPU a row's result does not depend on how many rows it comes with: products of
/// at least four rows agree bit by bit, and smaller ones are padded to that.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
    let (mut size, width) = (x.size(), weight.size()[1]);
    let rows = x.numel() as i64 / width;
    if x.device() != Device::Cpu || rows >= FEWEST_ROWS || rows == 0 {
        return x.linear(weight, bias);
    }
    let x = x.reshape([rows, width]);
    let padded = Tensor::cat(&[&x, &x.narrow(0, 0, 1).expand([FEWEST_ROWS - rows, width], false)], 0);
    if let Some(last) = size.last_mut() {
        *last = weight.size()[0];
    }
    padded.linear(weight, bias).narrow(0, 0, rows).reshape(size)
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

    /// Norms the last dimension.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let size = self.weight.size();
        x.rms_norm(&size, Some(&self.weight), self.eps)
    }
}

/// Numbers of heads and their width.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// H, query heads.
    pub query: i64,
    /// G, key/value heads.
    pub key_value: i64,
    /// D.
    pub dim: i64,
}

impl Heads {
    /// Query heads per key/value head.
    pub fn repeats(&self) -> i64 {
        self.query / self.key_value
    }

    /// Factor on the attention scores.
    pub fn scale(&self) -> f64 {
        (self.dim as f64).powf(-0.5)
    }
}

/// Projected, normed and rotated: `q [N, H, D]`, `k [N, G, D]`, and `v [N, G, D]`.
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
    v_proj: Linear,
    o_proj: Linear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    heads: Heads,
}

impl Attention {
    fn new(b: &Builder, name: &str, c: &ModelConfig) -> Result<Self, ModelError> {
        let heads = c.heads();
        let (d, wide, narrow) = (c.hidden_size, heads.query * heads.dim, heads.key_value * heads.dim);
        Ok(Self {
            q_proj: Linear::new(b, &format!("{name}.q_proj"), d, wide)?,
            k_proj: Linear::new(b, &format!("{name}.k_proj"), d, narrow)?,
            v_proj: Linear::new(b, &format!("{name}.v_proj"), d, narrow)?,
            o_proj: Linear::new(b, &format!("{name}.o_proj"), wide, d)?,
            q_norm: RmsNorm::new(b, &format!("{name}.q_norm"), heads.dim, c.rms_norm_eps)?,
            k_norm: RmsNorm::new(b, &format!("{name}.k_norm"), heads.dim, c.rms_norm_eps)?,
            heads,
        })
    }

    /// Queries, keys and values of `x [N, d]`.
    pub fn project(&self, x: &Tensor, rotation: &Rotation) -> Qkv {
        let heads = self.heads;
        let q = self.q_norm.forward(&self.q_proj.forward(x).view([-1, heads.query, heads.dim]));
        let (k, v) = self.project_context(x, rotation);
        Qkv { q: rotation.rotate(&q), k, v }
    }

    /// Keys and values alone.
    pub fn project_context(&self, x: &Tensor, rotation: &Rotation) -> (Tensor, Tensor) {
        let heads = self.heads;
        let k = self.k_norm.forward(&self.k_proj.forward(x).view([-1, heads.key_value, heads.dim]));
        (rotation.rotate(&k), self.v_proj.forward(x).view([-1, heads.key_value, heads.dim]))
    }
}

/// The gated MLP `down(silu(gate(x)) ⊙ up(x))`.
pub struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl Mlp {
    fn new(b: &Builder, name: &str, c: &ModelConfig) -> Result<Self, ModelError> {
        Ok(Self {
            gate_proj: Linear::new(b, &format!("{name}.gate_proj"), c.hidden_size, c.intermediate_size)?,
            up_proj: Linear::new(b, &format!("{name}.up_proj"), c.hidden_size, c.intermediate_size)?,
            down_proj: Linear::new(b, &format!("{name}.down_proj"), c.intermediate_size, c.hidden_size)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        self.down_proj.forward(&(self.gate_proj.forward(x).silu() * self.up_proj.forward(x)))
    }
}

/// Attention and MLP, each behind a norm and beside a residual.
pub struct DecoderLayer {
    /// The attention projections.
    pub attention: Attention,
    mlp: Mlp,
    input_layernorm: RmsNorm,
    post_attention_layernorm: RmsNorm,
}

impl DecoderLayer {
    /// The layer `name` (`model.layers.3`, `layers.0`).
    pub fn new(b: &Builder, name: &str, c: &ModelConfig) -> Result<Self, ModelError> {
        Ok(Self {
            attention: Attention::new(b, &format!("{name}.self_attn"), c)?,
            mlp: Mlp::new(b, &format!("{name}.mlp"), c)?,
            input_layernorm: RmsNorm::new(
                b,
                &format!("{name}.input_layernorm"),
                c.hidden_size,
                c.rms_norm_eps,
            )?,
            post_attention_layernorm: RmsNorm::new(
                b,
                &format!("{name}.post_attention_layernorm"),
                c.hidden_size,
                c.rms_norm_eps,
            )?,
        })
    }

    /// `x [N, d] -> [N, d]`; `attend` turns queries, keys and values into `[N, H·D]`.
    pub fn forward(&self, x: &Tensor, rotation: &Rotation, attend: impl FnOnce(&Qkv) -> Tensor) -> Tensor {
        let qkv = self.attention.project(&self.input_layernorm.forward(x), rotation);
        let x = x + self.attention.o_proj.forward(&attend(&qkv));
        &x + self.mlp.forward(&self.post_attention_layernorm.forward(&x))
    }
}
