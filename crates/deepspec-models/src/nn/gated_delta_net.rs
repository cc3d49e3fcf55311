//! A decoder layer with Gated DeltaNet, a linear attention, in place of attention (Qwen3.5).

use deepspec_ops::kv_attention::Chunk;
use deepspec_ops::{GatedDeltaCache, GatedDeltaInputs, GatedDeltaSpec, GatedDeltaWeights};
use tch::{Kind, Tensor};

use super::layer::add_residual;
use super::mlp::Mlp;
use super::spec::LayerSpec;
use super::{Builder, Init, Linear, RmsNorm};

/// Gated DeltaNet and MLP, each with a norm before it and a residual connection.
pub struct LinearAttentionLayer {
    input_norm: RmsNorm,
    mixer: GatedDeltaNet,
    mlp_norm: RmsNorm,
    mlp: Mlp,
}

/// Projections around the states, convolution and gates.
struct GatedDeltaNet {
    qkv_proj: Linear,
    z_proj: Linear,
    a_proj: Linear,
    b_proj: Linear,
    weights: GatedDeltaWeights,
    /// Norm of each head's output.
    norm: RmsNorm,
    out_proj: Linear,
    spec: GatedDeltaSpec,
}

impl LinearAttentionLayer {
    /// The layer `name` (`model.layers.3`).
    pub fn new(b: &Builder, name: &str, spec: &LayerSpec, mixer: GatedDeltaSpec) -> Self {
        let norm = |part: &str| {
            RmsNorm::with_weight(b, &format!("{name}.{part}"), spec.hidden_size, spec.eps, spec.norm_weight)
        };
        Self {
            input_norm: norm("input_layernorm"),
            mixer: GatedDeltaNet::new(b, &format!("{name}.linear_attn"), spec, mixer),
            mlp_norm: norm("post_attention_layernorm"),
            mlp: Mlp::new(b, &format!("{name}.mlp"), spec),
        }
    }

    /// `x [N, d]` to `[N, d]`. `layer` is the layer's index in `cache`, to which the rows of `chunks` are appended.
    pub fn forward(&self, x: &Tensor, cache: &mut GatedDeltaCache, layer: usize, chunks: &[Chunk]) -> Tensor {
        let y = self.mixer.forward(&self.input_norm.forward(x), cache, layer, chunks);
        let x = add_residual(x, y);
        let y = self.mlp.forward(&self.mlp_norm.forward(&x));
        add_residual(&x, y)
    }
}

impl GatedDeltaNet {
    fn new(b: &Builder, name: &str, layer: &LayerSpec, spec: GatedDeltaSpec) -> Self {
        let (d, heads) = (layer.hidden_size, spec.value_heads);
        let linear = |part: &str, output| Linear::new(b, &format!("{name}.{part}"), d, output);
        let float = |part: &str, shape: &[i64], init| {
            b.get(&format!("{name}.{part}"), shape, init).to_kind(Kind::Float)
        };
        let conv = float("conv1d.weight", &[spec.channels(), 1, spec.kernel], Init::Normal);
        Self {
            qkv_proj: linear("in_proj_qkv", spec.channels()),
            z_proj: linear("in_proj_z", spec.value_width()),
            a_proj: linear("in_proj_a", heads),
            b_proj: linear("in_proj_b", heads),
            weights: GatedDeltaWeights {
                // After an error of the checkpoint, tensors are empty.
                conv: if conv.numel() > 0 { conv.squeeze_dim(1) } else { conv },
                // Published checkpoints store this tensor in float32 beside bfloat16, and vLLM and SGLang
                // keep it so.
                decay_rate: b.get_float32(&format!("{name}.A_log"), &[heads], Init::Zeros).exp(),
                dt_bias: float("dt_bias", &[heads], Init::Ones),
            },
            norm: RmsNorm::new(b, &format!("{name}.norm"), spec.value_dim, layer.eps),
            out_proj: Linear::new(b, &format!("{name}.out_proj"), spec.value_width(), d),
            spec,
        }
    }

    fn forward(&self, x: &Tensor, cache: &mut GatedDeltaCache, layer: usize, chunks: &[Chunk]) -> Tensor {
        let inputs = GatedDeltaInputs {
            qkv: self.qkv_proj.forward(x),
            a: self.a_proj.forward(x),
            b: self.b_proj.forward(x),
        };
        let y = cache.forward(layer, chunks, &inputs, &self.weights); // [N, Hv, Dv]
        drop(inputs);
        let gate = self.z_proj.forward(x).to_kind(Kind::Float).silu();
        let y = self.norm.forward(&y).to_kind(Kind::Float).view([-1, self.spec.value_width()]) * gate;
        self.out_proj.forward(&y.to_kind(x.kind()))
    }
}

#[cfg(test)]
mod tests {
    use deepspec_testkit::tiny;
    use tch::Device;

    use super::*;
    use crate::{ModelConfig, Weights};

    #[test]
    fn decays_are_not_rounded_to_the_dtype_of_the_model() {
        let dir = tempfile::tempdir().unwrap();
        tiny::target(dir.path(), "qwen3_5");
        let open = |kind| Weights::open_target(dir.path(), "a test", Device::Cpu, kind).unwrap();
        let stored = |kind, part: &str| {
            open(kind).get(&format!("model.language_model.layers.2.linear_attn.{part}"), &[4]).unwrap()
        };
        let config = ModelConfig::load(dir.path()).unwrap();
        let spec = &config.layers[2];
        let name = "model.language_model.layers.2";
        let found = |b: &Builder| {
            let layer = LinearAttentionLayer::new(b, name, spec, spec.gated_delta.unwrap());
            (layer.mixer.weights.decay_rate, layer.mixer.weights.dt_bias)
        };
        let weights = open(Kind::BFloat16);
        let b = Builder::from_checkpoint(&weights);
        let (decay_rate, dt_bias) = found(&b);
        b.check().unwrap();
        let exact = stored(Kind::Float, "A_log").exp();
        let rounded = stored(Kind::BFloat16, "A_log").to_kind(Kind::Float).exp();
        assert!(decay_rate.equal(&exact) && !decay_rate.equal(&rounded), "{decay_rate:?}");
        // Published checkpoints store the other one in bfloat16.
        assert!(dt_bias.equal(&stored(Kind::BFloat16, "dt_bias").to_kind(Kind::Float)));
        // A model that shares the weights has equal ones.
        let named = b.take_state_dict();
        assert!(found(&Builder::from_state_dict(&named)).0.equal(&exact));
    }
}
