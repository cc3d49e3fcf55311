//! Attention of a stage: every position has one latent, which is key and value of all heads.
//!
//! A block sees the last W latents of the context and its own. The last dims of a latent are rotated, and those of the output are
//! rotated back. Every head has a sink in the denominator of its softmax.

use deepspec_models::nn::{Builder, Init, Linear, RmsNorm, Weight};
use deepspec_ops::linear;
use tch::{Kind, Tensor};

use super::settings::StageSettings;

/// Cosines and sines of positions `[N]`: `[N, 1, r / 2]` float32 each, for rotary embeddings of neighbouring dims.
pub struct PairRotation {
    cos: Tensor,
    sin: Tensor,
}

impl PairRotation {
    /// The rotation at `positions [N]`, int64.
    pub fn new(positions: &Tensor, settings: &StageSettings) -> Self {
        let dim = settings.qk_rope_head_dim;
        let exponents = Tensor::arange_start_step(0, dim, 2, (Kind::Double, positions.device())) / dim as f64;
        let frequencies = (exponents * -settings.rope_theta.ln()).exp();
        let angles = (positions.to_kind(Kind::Double).unsqueeze(1) * frequencies).unsqueeze(1);
        Self { cos: angles.cos().to_kind(Kind::Float), sin: angles.sin().to_kind(Kind::Float) }
    }

    /// The rotation by the opposite angles.
    fn inverse(&self) -> Self {
        Self { cos: self.cos.shallow_clone(), sin: -&self.sin }
    }

    /// Rotates the last dims of `x [N, heads, D]`. The pairs are dims 2i and 2i + 1 of these.
    fn apply(&self, x: &Tensor) -> Tensor {
        let (width, dim) = (x.size()[2], 2 * self.cos.size()[2]);
        let pairs = x.narrow(2, width - dim, dim).to_kind(Kind::Float).unflatten(2, [dim / 2, 2]);
        let (even, odd) = (pairs.select(3, 0), pairs.select(3, 1));
        let rotated = [&even * &self.cos - &odd * &self.sin, &even * &self.sin + &odd * &self.cos];
        let rotated = Tensor::stack(&rotated, 3).flatten(2, 3).to_kind(x.kind());
        Tensor::cat(&[x.narrow(2, 0, width - dim), rotated], 2)
    }
}

/// Weights of a stage's attention.
pub struct LatentAttention {
    wq_a: Linear, // d -> R
    q_norm: RmsNorm,
    wq_b: Linear, // R -> H·D
    wkv: Linear,  // d -> D
    kv_norm: RmsNorm,
    wo_a: Tensor,      // [G·R, H·D / G]: R rows for each group of heads
    wo_b: Linear,      // G·R -> d
    attn_sink: Tensor, // [H]
    settings: StageSettings,
}

impl LatentAttention {
    /// The tensors below `name`.
    pub fn new(b: &Builder, name: &str, hidden: i64, settings: &StageSettings) -> Self {
        let &StageSettings { num_attention_heads, head_dim, q_lora_rank, o_lora_rank, o_groups, .. } =
            settings;
        let queries = num_attention_heads * head_dim;
        let projection =
            |part: &str, input: i64, output: i64| Linear::new(b, &format!("{name}.{part}"), input, output);
        let norm =
            |part: &str, size: i64| RmsNorm::new(b, &format!("{name}.{part}"), size, settings.rms_norm_eps);
        let output = [o_groups * o_lora_rank, queries / o_groups];
        Self {
            wq_a: projection("wq_a", hidden, q_lora_rank),
            q_norm: norm("q_norm", q_lora_rank),
            wq_b: projection("wq_b", q_lora_rank, queries),
            wkv: projection("wkv", hidden, head_dim),
            kv_norm: norm("kv_norm", head_dim),
            wo_a: b.get(&format!("{name}.wo_a.weight"), &output, Init::Normal),
            wo_b: projection("wo_b", o_groups * o_lora_rank, hidden),
            attn_sink: b.get(&format!("{name}.attn_sink"), &[num_attention_heads], Init::Zeros),
            settings: *settings,
        }
    }

    /// Latents `[N, D]` of states `[N, d]`.
    pub fn latents(&self, x: &Tensor, rotation: &PairRotation) -> Tensor {
        rotation.apply(&self.kv_norm.forward(&self.wkv.forward(x)).unsqueeze(1)).squeeze_dim(1)
    }

    /// Queries `[N, H, D]` of states `[N, d]`, RMS-normed per head without weights.
    fn queries(&self, x: &Tensor, rotation: &PairRotation) -> Tensor {
        let q = self.wq_b.forward(&self.q_norm.forward(&self.wq_a.forward(x)));
        let q = q.view([-1, self.settings.num_attention_heads, self.settings.head_dim]);
        let wide = q.to_kind(Kind::Float);
        let mean = wide.square().mean_dim(-1, true, Kind::Float);
        rotation.apply(&(wide * (mean + self.settings.rms_norm_eps).rsqrt()).to_kind(q.kind()))
    }

    /// Attention of states `[N, d]` of whole blocks: `[N, d]`. `attend(queries, latents)` computes the heads' outputs `[N, H, D]`
    /// from queries `[N, H, D]` and latents `[N, D]` of the blocks.
    pub fn forward(
        &self,
        x: &Tensor,
        rotation: &PairRotation,
        attend: impl FnOnce(&Tensor, &Tensor) -> Tensor,
    ) -> Tensor {
        let attended = attend(&self.queries(x, rotation), &self.latents(x, rotation));
        let heads = rotation.inverse().apply(&attended);
        let groups = self.settings.o_groups;
        let grouped = heads.reshape([heads.size()[0], groups, -1]);
        let parts = self.wo_a.chunk(groups, 0).into_iter().enumerate().map(|(group, weight)| {
            linear(&grouped.select(1, group as i64).contiguous(), &Weight::Stored(weight), None)
        });
        self.wo_b.forward(&Tensor::cat(&parts.collect::<Vec<_>>(), -1))
    }

    /// Outputs `[A, B, H, D]` of queries `[A, B, H, D]` that see all latents `[A, K, D]` of their block but those that `hidden`
    /// (bool `[A, K]`) hides. The softmax is in float32.
    pub fn attend(&self, queries: &Tensor, latents: &Tensor, hidden: Option<&Tensor>) -> Tensor {
        let size = queries.size();
        let rows = queries.flatten(1, 2); // [A, B·H, D]
        let mut scores = rows.bmm(&latents.transpose(1, 2)).to_kind(Kind::Float)
            * (self.settings.head_dim as f64).powf(-0.5);
        if let Some(hidden) = hidden {
            scores = scores.masked_fill(&hidden.unsqueeze(1), f64::NEG_INFINITY);
        }
        let sinks = self.attn_sink.to_kind(Kind::Float).view([1, 1, -1, 1]);
        let sinks = sinks.expand([size[0], size[1], size[2], 1], false).flatten(1, 2);
        let weights = Tensor::cat(&[scores, sinks], -1).softmax(-1, Kind::Float);
        let weights = weights.narrow(-1, 0, latents.size()[1]).to_kind(queries.kind());
        weights.bmm(latents).view_as(queries)
    }
}
