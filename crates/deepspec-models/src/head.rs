//! The final norm and LM head of a target whose layers run elsewhere.

use std::path::Path;

use deepspec_checkpoint::Fields;
use deepspec_core::cli::UsageError;
use deepspec_ops::HOST;
use tch::{Device, Kind, Tensor};

use crate::config::read_json;
use crate::families::{TensorNames, is_gemma, text_model_type, text_part};
use crate::{ModelConfig, ModelError, Weights};

/// Rows of the LM head that are converted to float32 at a time.
const HEAD_ROWS: i64 = 16_384;
/// Names of the final norm's module, after the prefix of the body.
const NORM_NAMES: [&str; 4] = ["norm", "final_layernorm", "norm_f", "ln_f"];
/// Architectures besides Gemma's whose RMS norms multiply by 1 + w.
const ONE_PLUS_W: [&str; 2] = ["qwen3_next", "qwen3_5"];
/// Architectures with a LayerNorm of weights 1 + w.
const ONE_PLUS_W_LAYER: [&str; 1] = ["nemotron"];
/// Architectures with a LayerNorm that has no bias.
const LAYER_WITHOUT_BIAS: [&str; 1] = ["cohere"];
/// Gemma architectures whose RMS norms multiply by w.
const PLAIN_GEMMA: [&str; 2] = ["gemma3n", "gemma4"];

/// Final norm and LM head of a target. They turn the output of its last layer into the states that
/// drafters train on, and into logits.
///
/// Shapes: K rows, d hidden size, V vocabulary.
pub struct TargetHead {
    weight: Tensor,
    bias: Option<Tensor>,
    kind: FinalNorm,
    eps: f64,
    lm_head: Tensor,
    softcap: Option<f64>,
    /// Factor on the logits, which the normed states carry.
    scale: f64,
}

/// How the final norm computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FinalNorm {
    /// `x / sqrt(mean(x²) + ε) · w`.
    Rms,
    /// `x / sqrt(mean(x²) + ε) · (1 + w)`.
    RmsOnePlus,
    /// LayerNorm.
    Layer,
    /// LayerNorm with weights 1 + w.
    LayerOnePlus,
}

impl TargetHead {
    /// Reads both tensors from the folder of a target with this config, in the checkpoint's dtype.
    ///
    /// # Errors
    /// If the folder lacks one of them, or they are quantised in a way that is not read.
    pub fn load(dir: &Path, config: &ModelConfig, device: Device) -> Result<Self, ModelError> {
        let (path, raw) = read_json(dir)?;
        let outer = Fields::new(&path, &raw);
        let text = text_part(&outer)?;
        let fields = text.as_ref().unwrap_or(&outer);
        let weights = Weights::open_outer_tensors(dir, config.family.class(), device)?;
        let names = TensorNames::detect(&weights);
        let module = NORM_NAMES.map(|name| format!("{}{name}", names.body));
        let module = module.iter().find(|name| weights.contains(&format!("{name}.weight")));
        let module = module.cloned().unwrap_or_else(|| format!("{}norm", names.body));
        let width = [config.hidden_size];
        let weight = weights.get(&format!("{module}.weight"), &width)?.to_kind(Kind::Float);
        let bias = format!("{module}.bias");
        let bias = weights.contains(&bias).then(|| weights.get(&bias, &width)).transpose()?;
        let (_, lm_head) = super::target::read_embed_and_head(&weights, names, config)?;
        Ok(Self {
            kind: final_norm(&text_model_type(&path, &raw)?, bias.is_some()),
            weight,
            bias: bias.map(|bias| bias.to_kind(Kind::Float)),
            eps: config.rms_norm_eps,
            // On a CPU the head is converted once.
            lm_head: if device == HOST { lm_head.to_kind(Kind::Float) } else { lm_head },
            softcap: config.logit_softcap,
            scale: logit_scale(fields)?,
        })
    }

    /// Normed states `[K, d]`, in float32, of the last layer's outputs `[K, d]` in any dtype. They include the factor
    /// on the logits, as those of [`crate::TargetModel`] do.
    pub fn normalize(&self, hidden: &Tensor) -> Tensor {
        let normed = self.norm(hidden);
        if self.scale == 1.0 { normed } else { normed * self.scale }
    }

    fn norm(&self, hidden: &Tensor) -> Tensor {
        let x = hidden.to_kind(Kind::Float);
        match self.kind {
            FinalNorm::Layer | FinalNorm::LayerOnePlus => {
                let shift = f64::from(self.kind == FinalNorm::LayerOnePlus);
                let weight = &self.weight + shift;
                x.layer_norm([x.size()[1]], Some(&weight), self.bias.as_ref(), self.eps, false)
            }
            kind => {
                let scaled = &x * (x.square().mean_dim(-1, true, Kind::Float) + self.eps).rsqrt();
                match kind {
                    FinalNorm::RmsOnePlus => scaled * (&self.weight + 1.0),
                    _ => scaled * &self.weight,
                }
            }
        }
    }

    /// Natural logarithm of the probability of `token` after the normed state `[d]`, computed in
    /// float32 from `normed` rounded to `dtype`, as an engine computes it.
    ///
    /// # Errors
    /// If the token is outside the vocabulary.
    pub fn log_prob(&self, normed: &Tensor, token: i64, dtype: Kind) -> Result<f64, ModelError> {
        let vocab = self.lm_head.size()[0];
        if !(0..vocab).contains(&token) {
            let problem = format!("token {token} is outside the vocabulary of {vocab}");
            return Err(ModelError::Mismatch(UsageError(problem)));
        }
        let state = normed.to_kind(dtype).to_kind(Kind::Float);
        let parts: Vec<Tensor> = (0..vocab)
            .step_by(HEAD_ROWS as usize)
            .map(|first| {
                let rows = self.lm_head.narrow(0, first, HEAD_ROWS.min(vocab - first));
                rows.to_kind(Kind::Float).mv(&state)
            })
            .collect();
        let mut logits = Tensor::cat(&parts, 0);
        if let Some(cap) = self.softcap {
            logits = (logits / cap).tanh() * cap;
        }
        Ok(logits.log_softmax(0, Kind::Float).to_device(HOST).double_value(&[token]))
    }
}

/// The kind of the final norm, by the architecture and the tensors.
fn final_norm(model_type: &str, has_bias: bool) -> FinalNorm {
    let starts = |prefixes: &[&str]| prefixes.iter().any(|prefix| model_type.starts_with(prefix));
    match () {
        () if ONE_PLUS_W_LAYER.contains(&model_type) => FinalNorm::LayerOnePlus,
        () if has_bias || starts(&LAYER_WITHOUT_BIAS) => FinalNorm::Layer,
        () if starts(&ONE_PLUS_W) || (is_gemma(model_type) && !starts(&PLAIN_GEMMA)) => FinalNorm::RmsOnePlus,
        () => FinalNorm::Rms,
    }
}

/// Factor on the logits of the target in `dir`, which its final states include here.
///
/// # Errors
/// If config.json cannot be read, or the key has no number.
pub fn final_state_factor(dir: &Path) -> Result<f64, ModelError> {
    let (path, raw) = read_json(dir)?;
    let outer = Fields::new(&path, &raw);
    let text = text_part(&outer)?;
    logit_scale(text.as_ref().unwrap_or(&outer))
}

/// Factor on the logits: Granite divides by `logits_scaling`, Cohere multiplies by `logit_scale`, and
/// MiniCPM divides by `hidden_size / dim_model_base`.
fn logit_scale(fields: &Fields) -> Result<f64, ModelError> {
    let divisor = fields.number("logits_scaling")?.filter(|divisor| *divisor > 0.0);
    Ok(match divisor {
        Some(divisor) => 1.0 / divisor,
        None => match (fields.number("dim_model_base")?, fields.number("hidden_size")?) {
            (Some(base), Some(hidden)) => base / hidden,
            _ => fields.number("logit_scale")?.unwrap_or(1.0),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_norm_follows_the_architecture() {
        let kind = |model_type: &str| final_norm(model_type, false);
        assert_eq!(kind("gpt_oss"), FinalNorm::Rms);
        assert_eq!(kind("gemma3_text"), FinalNorm::RmsOnePlus);
        assert_eq!(kind("gemma4"), FinalNorm::Rms);
        assert_eq!(kind("qwen3_5_text"), FinalNorm::RmsOnePlus);
        assert_eq!(final_norm("", true), FinalNorm::Layer);
        assert_eq!(kind("cohere2"), FinalNorm::Layer);
        assert_eq!(kind("nemotron"), FinalNorm::LayerOnePlus);
        assert_eq!(kind("nemotron_h"), FinalNorm::Rms);
    }
}
