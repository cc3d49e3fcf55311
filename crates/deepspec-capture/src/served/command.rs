//! The command line that starts a vLLM server for hidden states.

use std::fmt;
use std::path::Path;

use deepspec_core::env;
use deepspec_core::recipe::{DEFAULT_STATES_FOLDER, StateServers, TargetRecipe};
use deepspec_hub::Repo;
use deepspec_models::config::read_json;
use deepspec_models::{ModelError, text_model_type};
use serde_json::{Map, Value, json};

use super::layer_ids;

/// Port of the server, the default of vLLM.
const VLLM_PORT: u16 = 8000;

/// Architectures whose vLLM class lacks the interface for extracting states (vLLM 0.32). vLLM's
/// Transformers backend runs them instead.
const WITHOUT_INTERFACE: [&str; 21] = [
    "cohere",
    "deepseek_v32",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma3n_text",
    "glm4",
    "glm4_moe",
    "granitemoe",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "jamba",
    "mixtral",
    "nemotron",
    "olmo2",
    "olmo3",
    "olmoe",
    "qwen2_moe",
    "stablelm",
];

/// Beginnings of the config keys that describe recurrent layers: Mamba, Gated DeltaNet and other linear
/// attention, short convolutions.
const RECURRENT_KEYS: [&str; 5] = ["conv_", "hybrid_", "linear_", "mamba_", "ssm_"];

/// A `vllm serve` command for the states of a recipe. It prints on one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServeCommand {
    /// The target, as the recipe names it.
    pub model: String,
    /// Revision of the hub.
    pub revision: Option<String>,
    /// Its `model_type`.
    pub model_type: String,
    /// Whether it has recurrent layers. Behind a cached prefix, vLLM 0.32 returns wrong states of such
    /// targets.
    pub is_hybrid: bool,
    /// Layer ids, counted from the embedding.
    pub layer_ids: Vec<u32>,
    /// Folder of the servers' files.
    pub folder: String,
    /// Tokens of the longest sample.
    pub longest: usize,
    /// GPUs per server.
    pub tensor_parallel: usize,
    /// Port.
    pub port: u16,
}

impl ServeCommand {
    /// The command for the target in `dir`, which has `layers` layers. `servers` names the folder,
    /// and `longest` is the number of tokens of the longest sample.
    ///
    /// # Errors
    /// If config.json cannot be read.
    pub fn new(
        target: &TargetRecipe,
        dir: &Path,
        layers: usize,
        servers: Option<&StateServers>,
        longest: usize,
    ) -> Result<Self, ModelError> {
        let (path, raw) = read_json(dir)?;
        let folder = servers.map_or(DEFAULT_STATES_FOLDER, StateServers::folder);
        let (model, revision) = split_revision(&target.model, target.revision.as_deref());
        let model_type = text_model_type(&path, &raw)?;
        Ok(Self {
            is_hybrid: has_recurrent_layers(&model_type, &raw),
            model,
            revision,
            model_type,
            layer_ids: layer_ids(&target.layer_ids, layers),
            folder: env::expand_home(folder).display().to_string(),
            longest,
            tensor_parallel: 1,
            port: VLLM_PORT,
        })
    }

    /// Arguments after `vllm`.
    pub fn arguments(&self) -> Vec<String> {
        let speculative = json!({
            "method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": self.layer_ids}},
        });
        let transfer = json!({
            "kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": self.folder},
        });
        // A prompt needs room for the one token that vLLM samples after it.
        let (context, port) = ((self.longest + 1).to_string(), self.port.to_string());
        let mut arguments: Vec<String> =
            ["serve", &self.model, "--port", &port, "--max-model-len", &context].map(String::from).to_vec();
        if let Some(revision) = &self.revision {
            arguments.extend(["--revision".into(), revision.clone()]);
        }
        if self.tensor_parallel > 1 {
            arguments.extend(["--tensor-parallel-size".into(), self.tensor_parallel.to_string()]);
        }
        if self.is_hybrid {
            arguments.push("--no-enable-prefix-caching".into());
        }
        arguments.extend(["--speculative-config".into(), speculative.to_string()]);
        arguments.extend(["--kv-transfer-config".into(), transfer.to_string()]);
        if WITHOUT_INTERFACE.contains(&self.model_type.as_str()) {
            let class = json!({"architectures": ["TransformersForCausalLM"]});
            arguments.extend(["--hf-overrides".into(), class.to_string()]);
        }
        arguments
    }
}

/// Whether a target has recurrent layers, by its config. Those of Qwen3.5 may leave all sizes to the defaults.
fn has_recurrent_layers(model_type: &str, config: &Map<String, Value>) -> bool {
    let text = config.get("text_config").and_then(Value::as_object).unwrap_or(config);
    let is_key = |key: &String| RECURRENT_KEYS.iter().any(|begin| key.starts_with(begin));
    let is_layer = |kind: &Value| kind.as_str().is_some_and(|kind| !kind.ends_with("attention"));
    let mut kinds = text.get("layer_types").and_then(Value::as_array).into_iter().flatten();
    text.keys().any(is_key)
        || kinds.any(|kind| is_layer(kind) || kind == "linear_attention")
        || model_type.starts_with("qwen3_5")
}

/// Splits `owner/name@revision`, which vLLM does not know. A path stays as it is.
fn split_revision(model: &str, revision: Option<&str>) -> (String, Option<String>) {
    match Repo::of_model_name(model, revision) {
        Some(repo) => (repo.id, repo.revision),
        None => (env::expand_home(model).display().to_string(), revision.map(Into::into)),
    }
}

impl fmt::Display for ServeCommand {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("vllm")?;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@=".contains(c);
        for argument in self.arguments() {
            match argument.chars().all(is_plain) {
                true => write!(f, " {argument}")?,
                false => write!(f, " '{}'", argument.replace('\'', r"'\''"))?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_revision_in_the_model_becomes_a_flag() {
        assert_eq!(split_revision("owner/name@v1", None), ("owner/name".into(), Some("v1".into())));
        assert_eq!(split_revision("owner/name", Some("v2")), ("owner/name".into(), Some("v2".into())));
        assert_eq!(split_revision("/models/a@b", None), ("/models/a@b".into(), None));
    }

    #[test]
    fn hybrids_are_known_by_their_config() {
        let is_hybrid =
            |model_type: &str, config: Value| has_recurrent_layers(model_type, config.as_object().unwrap());
        assert!(is_hybrid("qwen3_5_text", json!({"hidden_size": 64})));
        assert!(is_hybrid("qwen3_next", json!({"text_config": {"linear_num_value_heads": 2}})));
        assert!(is_hybrid("lfm2", json!({"layer_types": ["full_attention", "conv"]})));
        assert!(is_hybrid("other", json!({"layer_types": ["full_attention", "linear_attention"]})));
        assert!(!is_hybrid("gpt_oss", json!({"layer_types": ["full_attention", "sliding_attention"]})));
        assert!(!is_hybrid("qwen3", json!({"hidden_size": 64, "head_dim": 16})));
    }

    #[test]
    fn the_command_is_one_line_for_a_shell() {
        let command = ServeCommand {
            model: "Qwen/Qwen3-30B-A3B".into(),
            revision: Some("main".into()),
            model_type: "qwen3_moe".into(),
            is_hybrid: false,
            layer_ids: vec![2, 24, 48],
            folder: "/dev/shm/deepspec-states".into(),
            longest: 4096,
            tensor_parallel: 2,
            port: 8000,
        };
        // Keys of an object have no fixed order.
        let speculative = json!({
            "method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 24, 48]}},
        });
        let transfer = json!({
            "kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": "/dev/shm/deepspec-states"},
        });
        assert_eq!(
            command.to_string(),
            format!(
                "vllm serve Qwen/Qwen3-30B-A3B --port 8000 --max-model-len 4097 --revision main \
                 --tensor-parallel-size 2 --speculative-config '{speculative}' --kv-transfer-config '{transfer}'"
            )
        );
        let hybrid = ServeCommand { is_hybrid: true, ..command.clone() };
        assert!(hybrid.to_string().contains(" --no-enable-prefix-caching "));
        let other = ServeCommand { model_type: "gemma3_text".into(), tensor_parallel: 1, ..command };
        assert!(
            other.to_string().ends_with(r#"--hf-overrides '{"architectures":["TransformersForCausalLM"]}'"#)
        );
    }
}
