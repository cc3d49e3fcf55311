//! The command line that starts a vLLM server for hidden states.

use std::fmt;
use std::path::Path;

use deepspec_core::env;
use deepspec_core::recipe::{DEFAULT_STATES_FOLDER, StateServers, TargetRecipe};
use deepspec_hub::Repo;
use deepspec_models::config::read_json;
use deepspec_models::{ModelError, text_model_type};
use serde_json::json;

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

/// A `vllm serve` command for the states of a recipe. It prints on one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServeCommand {
    /// The target, as the recipe names it.
    pub model: String,
    /// Revision of the hub.
    pub revision: Option<String>,
    /// Its `model_type`.
    pub model_type: String,
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
        Ok(Self {
            model,
            revision,
            model_type: text_model_type(&path, &raw)?,
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
        arguments.extend(["--speculative-config".into(), speculative.to_string()]);
        arguments.extend(["--kv-transfer-config".into(), transfer.to_string()]);
        if WITHOUT_INTERFACE.contains(&self.model_type.as_str()) {
            let class = json!({"architectures": ["TransformersForCausalLM"]});
            arguments.extend(["--hf-overrides".into(), class.to_string()]);
        }
        arguments
    }
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
    fn the_command_is_one_line_for_a_shell() {
        let command = ServeCommand {
            model: "Qwen/Qwen3-30B-A3B".into(),
            revision: Some("main".into()),
            model_type: "qwen3_moe".into(),
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
        let other = ServeCommand { model_type: "gemma3_text".into(), tensor_parallel: 1, ..command };
        assert!(
            other.to_string().ends_with(r#"--hf-overrides '{"architectures":["TransformersForCausalLM"]}'"#)
        );
    }
}
