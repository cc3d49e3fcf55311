//! Quantised weights of targets: the scheme that config.json states, and the values in float32.
//!
//! A quantised module `X` has small numbers and their scales in place of `X.weight`. [`QuantisedWeights`] is read once per
//! folder. [`Tensors::open_target`] shows each quantised weight as a float32 tensor `X.weight`, so that readers see the
//! tensors of the plain model.
//!
//! The lists of modules that stay plain (`ignore`, `modules_to_not_convert`) need no reading: the tensors of such modules are
//! plain ones. Schemes of activations change no weight, and are not simulated.

mod compressed_tensors;
mod deepseek_v4;
mod float8;
mod fp8;
mod gptq;
mod matrix;
mod module;
mod mxfp4;
mod nvfp4;
mod quantise;
mod tensor;

use std::path::Path;

use serde_json::{Map, Value};

use crate::fields::read_object;
use crate::{CheckpointError, Fields, Tensors};
use compressed_tensors::CompressedTensors;
pub(crate) use deepseek_v4::DeepseekV4;
use fp8::Fp8;
use gptq::Gptq;
use mxfp4::Mxfp4;
pub use mxfp4::mxfp4_to_float32;
pub(crate) use quantise::BlockFormat;
pub(crate) use tensor::QuantisedTensor;

/// Keys of a config that hold the scheme of quantised weights.
pub const QUANTISATION_KEYS: [&str; 2] = ["quantization_config", "compression_config"];
/// Files beside config.json in which AutoGPTQ, AutoAWQ and ModelOpt state a scheme.
const OTHER_FILES: [&str; 3] = ["quantize_config.json", "quant_config.json", "hf_quant_config.json"];
/// Remedies for a target that is not read.
const TARGET_REMEDY: &str = "use the same model in bfloat16, or let a server compute its hidden states and answers: \
     `data.states: {server: URL}` and `deepspec-data regenerate --server URL`";

/// The tensors of a target that are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// All tensors, to run the target.
    Whole,
    /// Tensors outside the layers: embedding, final norm and LM head.
    Outer,
}

/// How the quantised modules of a target store their weights.
#[derive(Debug)]
pub(crate) enum QuantisedWeights {
    /// `quant_method: fp8`.
    Fp8(Fp8),
    /// `quant_method: compressed-tensors`.
    CompressedTensors(CompressedTensors),
    /// `quant_method: gptq` or `awq`.
    Gptq(Gptq),
    /// `quant_method: mxfp4`.
    Mxfp4(Mxfp4),
    /// The drafter within a DeepSeek-V4.
    DeepseekV4(DeepseekV4),
}

impl QuantisedWeights {
    /// Reads the scheme of the target in `dir`. None for plain weights.
    ///
    /// # Errors
    /// If the scheme is not supported, with method, key and remedy.
    pub fn read(dir: &Path, scope: Scope) -> Result<Option<Self>, CheckpointError> {
        let path = dir.join("config.json");
        let map = if path.is_file() { read_object(&path)? } else { Map::new() };
        let outer = Fields::new(&path, &map);
        let text = outer.object("text_config")?;
        for fields in [Some(&outer), text.as_ref()].into_iter().flatten() {
            for key in QUANTISATION_KEYS {
                if let Some(scheme) = fields.object(key)? {
                    return Self::parse(&scheme, None, scope).map(Some);
                }
            }
        }
        let [of_gptq, of_awq, of_modelopt] = OTHER_FILES.map(|name| dir.join(name));
        for (path, usual) in [(&of_awq, "awq"), (&of_gptq, "gptq")] {
            if path.is_file() {
                let map = read_object(path)?;
                // AutoGPTQ names no method, and has other keys than AutoAWQ.
                let usual = if map.contains_key("w_bit") { "awq" } else { usual };
                return Self::parse(&Fields::new(path, &map), Some(usual), scope).map(Some);
            }
        }
        if of_modelopt.is_file() {
            let problem = format!("weights of ModelOpt are not read; {TARGET_REMEDY}");
            return Err(CheckpointError::NotADrafter { path: of_modelopt, problem });
        }
        Ok(None)
    }

    /// Reads a scheme; `usual` is the method of a file that names none.
    fn parse(fields: &Fields, usual: Option<&str>, scope: Scope) -> Result<Self, CheckpointError> {
        let has_cache_scheme = fields.map.get("kv_cache_scheme").is_some_and(|scheme| !scheme.is_null());
        // Embedding and LM head are the same with every cache.
        if has_cache_scheme && scope == Scope::Whole {
            let problem = format!("keys and values of quantised caches are not computed; {TARGET_REMEDY}");
            return Err(fields.error("kv_cache_scheme", problem));
        }
        let found = match usual {
            Some(usual) => Some(("quant_method", fields.text("quant_method")?.unwrap_or(usual))),
            None => method(fields.map),
        };
        match found {
            Some((_, "fp8")) => Fp8::read(fields).map(Self::Fp8),
            Some((_, "compressed-tensors")) => {
                CompressedTensors::read(fields, scope).map(Self::CompressedTensors)
            }
            Some((_, "gptq")) => Gptq::read_gptq(fields).map(Self::Gptq),
            Some((_, "awq")) => Gptq::read_awq(fields).map(Self::Gptq),
            Some((_, "mxfp4")) => Ok(Self::Mxfp4(Mxfp4)),
            Some((key, other)) => {
                Err(fields.error(key, format!("\"{other}\" is not read; {READ_METHODS}; {TARGET_REMEDY}")))
            }
            None => Err(fields.error("quant_method", format!("missing; {READ_METHODS}; {TARGET_REMEDY}"))),
        }
    }

    /// The quantised weight of which the tensor `name` has the numbers, and the plain weight's name. None if the tensor is
    /// something else.
    ///
    /// # Errors
    /// If other tensors of the module are missing or do not fit.
    pub fn find(
        &self,
        tensors: &Tensors,
        name: &str,
    ) -> Result<Option<(String, QuantisedTensor)>, CheckpointError> {
        match self {
            Self::Fp8(scheme) => scheme.find(tensors, name),
            Self::CompressedTensors(scheme) => scheme.find(tensors, name),
            Self::Gptq(scheme) => scheme.find(tensors, name),
            Self::Mxfp4(scheme) => scheme.find(tensors, name),
            Self::DeepseekV4(scheme) => scheme.find(tensors, name),
        }
    }
}

/// The methods that are read, for messages.
const READ_METHODS: &str = "fp8, compressed-tensors, gptq, awq and mxfp4 are";

/// The key that names the method of a scheme, and the method.
fn method(scheme: &Map<String, Value>) -> Option<(&'static str, &str)> {
    ["quant_method", "quant_algo", "format"]
        .into_iter()
        .find_map(|key| Some((key, scheme.get(key)?.as_str()?)))
}

/// Error message with the remedy for a drafter of quantised weights; None for plain weights.
pub fn quantised_folder_message(dir: &Path, config: &Map<String, Value>) -> Option<String> {
    const REMEDY: &str =
        "the weights are quantised, and drafters are not read so; use the drafter in bfloat16";
    let text = config.get("text_config").and_then(Value::as_object);
    let said = [Some(config), text].into_iter().flatten().find_map(|map| {
        QUANTISATION_KEYS.iter().find_map(|key| map.get(*key).filter(|value| !value.is_null()))
    });
    if let Some(said) = said {
        let names = said.as_object().and_then(|scheme| {
            let (key, name) = method(scheme)?;
            let algorithm = scheme.get("quant_algo").and_then(Value::as_str).filter(|_| key != "quant_algo");
            Some(algorithm.map_or_else(|| name.to_string(), |algorithm| format!("{name}, {algorithm}")))
        });
        let found = names.unwrap_or_else(|| "of an unnamed method".into());
        return Some(format!("`quantization_config` ({found}): {REMEDY}"));
    }
    let beside = OTHER_FILES.into_iter().find(|name| dir.join(name).is_file());
    beside.map(|name| format!("{name}: {REMEDY}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_method_of_a_drafter_is_named() {
        let read = |value: Value| quantised_folder_message(Path::new("nowhere"), value.as_object().unwrap());
        assert!(read(json!({"quantization_config": {"quant_method": "awq"}})).unwrap().contains("(awq)"));
        assert!(
            read(json!({"text_config": {"quantization_config": {"quant_method": "fp8"}}}))
                .unwrap()
                .contains("(fp8)")
        );
        let nemotron =
            read(json!({"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}}));
        assert!(nemotron.unwrap().contains("(modelopt, W4A16_NVFP4)"));
        assert_eq!(read(json!({"quantization_config": null})), None);
        assert_eq!(read(json!({})), None);
    }
}
