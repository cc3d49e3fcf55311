//! Detects quantised weights from config files.

use std::path::Path;

use serde_json::{Map, Value};

/// Returns an error message with the remedy if `quantization_config` of a config is set; None for
/// plain weights.
pub fn quantised_config_message(config: &Map<String, Value>) -> Option<String> {
    let text = config.get("text_config").and_then(Value::as_object);
    let said = |map: &Map<String, Value>| {
        ["quantization_config", "compression_config"]
            .iter()
            .find_map(|key| map.get(*key).filter(|value| !value.is_null()).cloned())
    };
    let said = said(config).or_else(|| text.and_then(said))?;
    let method = ["quant_method", "quant_algo", "format"]
        .iter()
        .find_map(|key| said.get(*key)?.as_str())
        .unwrap_or("of an unnamed method");
    Some(format!(
        "`quantization_config`: the weights are quantised ({method}), which is not read; use the same model in bfloat16. \
         A server can answer with the quantised one: `deepspec-data regenerate --server URL`"
    ))
}

/// Like [`quantised_config_message`], but also checks the separate config files of AutoGPTQ and ModelOpt in the
/// folder.
pub fn quantised_folder_message(dir: &Path, config: &Map<String, Value>) -> Option<String> {
    let beside =
        ["quantize_config.json", "hf_quant_config.json"].into_iter().find(|name| dir.join(name).is_file());
    quantised_config_message(config).or_else(|| {
        beside.map(|name| {
            format!("{name}: the weights are quantised, which is not read; use the same model in bfloat16")
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_method_is_named() {
        let read = |value: Value| quantised_config_message(value.as_object().unwrap());
        assert!(read(json!({"quantization_config": {"quant_method": "awq"}})).unwrap().contains("(awq)"));
        assert!(
            read(json!({"text_config": {"quantization_config": {"quant_method": "fp8"}}}))
                .unwrap()
                .contains("(fp8)")
        );
        assert_eq!(read(json!({"quantization_config": null})), None);
        assert_eq!(read(json!({})), None);
    }
}
