//! The engine behind a server: which one it is, and its settings.

use anyhow::bail;
use deepspec_checkpoint::Engine;
use deepspec_engine::Request;
use serde_json::Value;

use super::answer::{CheckedAnswer, RawAnswer};
use super::client::Client;
use super::{llama_cpp, sglang, vllm};

/// The rule of verification of a server that does not report it.
pub const AS_CONFIGURED: &str = "as the engine is configured";

/// Start of a server with a drafter whose answers have figures.
pub fn start_command(engine: Engine) -> &'static str {
    match engine {
        Engine::Vllm => vllm::START,
        Engine::Sglang => sglang::START,
        Engine::LlamaCpp => llama_cpp::START,
    }
}

fn parse_answer(engine: Engine, text: &str) -> Result<RawAnswer, String> {
    match engine {
        Engine::Vllm => vllm::parse(text),
        Engine::Sglang => sglang::parse(text),
        Engine::LlamaCpp => llama_cpp::parse(text),
    }
}

/// Settings of a server, as far as it reports them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerInfo {
    /// The engine's version.
    pub version: Option<String>,
    /// The target's name there.
    pub model: Option<String>,
    /// Maximum number of tokens of a conversation.
    pub context: Option<usize>,
    /// The rule of verification.
    pub verification: String,
    /// The drafter's name there.
    pub drafter: Option<String>,
    /// Number of drafted tokens per block.
    pub block_size: Option<usize>,
    /// Whether it speculates; None if it does not say.
    pub speculates: Option<bool>,
}

/// A server whose engine is known.
#[derive(Clone)]
pub struct Server {
    /// HTTP client of the server.
    pub client: Client,
    /// Its engine.
    pub engine: Engine,
    /// Its settings.
    pub info: ServerInfo,
}

impl Server {
    /// Asks the server which engine it is, and for its settings.
    ///
    /// # Errors
    /// Fails if the server cannot be reached, runs another engine, or simulates acceptance (vLLM:
    /// `rejection_sample_method=synthetic`).
    pub async fn connect(flag: &'static str, url: &str) -> anyhow::Result<Self> {
        let client = Client::new(flag, url)?;
        let (engine, info, settings) = identify(&client).await?;
        if let Some(setting) = settings.as_ref().and_then(pinned_acceptance) {
            bail!(
                "{}: {} pins acceptance by {setting}, so that it measures no drafter; start it without this setting",
                client.name(),
                engine.title()
            );
        }
        Ok(Self { client, engine, info })
    }

    /// Engine and version.
    pub fn name(&self) -> String {
        match &self.info.version {
            Some(version) => format!("{} {version}", self.engine.title()),
            None => self.engine.title().into(),
        }
    }

    /// The answer to a request.
    ///
    /// # Errors
    /// Fails if the server does not answer, or if its answer does not fit the request.
    pub async fn ask(&self, request: &Request) -> anyhow::Result<CheckedAnswer> {
        let seed = request_seed(request);
        let (path, body) = match self.engine {
            Engine::Vllm => (vllm::PATH, vllm::body(request, self.info.model.as_deref(), seed)),
            Engine::Sglang => (sglang::PATH, sglang::body(request, seed)),
            Engine::LlamaCpp => (llama_cpp::PATH, llama_cpp::body(request, seed)),
        };
        let text = self.client.post(path, &body, &request.id).await?;
        match parse_answer(self.engine, &text).and_then(|raw| raw.check(request)) {
            Ok(answer) => Ok(answer),
            Err(problem) => bail!("{}: the answer to {}: {problem}", self.client.name(), request.id),
        }
    }
}

/// A seed of 31 bits, which all engines take. It differs between requests, so that their draws are
/// independent.
fn request_seed(request: &Request) -> u32 {
    let text = format!("{}\n{}", request.sampling.seed, request.id);
    (deepspec_core::digest::fingerprint(text.as_bytes()) & 0x7fff_ffff) as u32
}

/// The engine, its settings as this program uses them, and all that it reports.
async fn identify(client: &Client) -> anyhow::Result<(Engine, ServerInfo, Option<Value>)> {
    for path in ["/server_info", "/get_server_info"] {
        if let Some(settings) = client.get_json(path).await?.filter(is_sglang) {
            return Ok((Engine::Sglang, sglang::info(&settings), Some(settings)));
        }
    }
    if let Some(props) =
        client.get_json("/props").await?.filter(|props| props["default_generation_settings"].is_object())
    {
        return Ok((Engine::LlamaCpp, llama_cpp::info(&props), Some(props)));
    }
    if let Some(version) = client.get_json("/version").await?.filter(|version| version["version"].is_string())
    {
        let models = client.get_json("/v1/models").await?.unwrap_or_default();
        // Only a server in development mode has this.
        let settings = client.get_json("/server_info?config_format=json").await?;
        return Ok((Engine::Vllm, vllm::info(&version, &models, settings.as_ref()), settings));
    }
    bail!(
        "{} is none of the engines that report acceptance: expected vLLM (/version), SGLang (/server_info) or \
         llama.cpp (/props); give the address of the engine itself",
        client.name()
    )
}

fn is_sglang(settings: &Value) -> bool {
    settings.get("speculative_algorithm").is_some() || settings.get("internal_states").is_some()
}

/// The setting by which an engine accepts drafted tokens without the target's word, as benchmarks
/// of speed do.
fn pinned_acceptance(settings: &Value) -> Option<String> {
    let is_set = |value: &Value| match value {
        Value::Null | Value::Bool(false) => false,
        Value::Number(number) => number.as_f64().is_some_and(|number| number > 0.0),
        Value::String(text) => text.parse::<f64>().map_or(!text.is_empty(), |number| number > 0.0),
        Value::Array(list) => !list.is_empty(),
        Value::Object(_) | Value::Bool(true) => true,
    };
    let pins = |key: &str, value: &Value| {
        let key = key.to_ascii_lowercase();
        let synthetic = key.starts_with("synthetic_acceptance")
            || key.contains("synth_len")
            || key.contains("synth_rates");
        match key.as_str() {
            "rejection_sample_method" => value == "synthetic",
            _ => (synthetic || key.contains("simulate_acc_len")) && is_set(value),
        }
    };
    match settings {
        Value::Object(map) => map.iter().find_map(|(key, value)| match pins(key, value) {
            true => Some(format!("{key} = {value}")),
            false => pinned_acceptance(value),
        }),
        Value::Array(list) => list.iter().find_map(pinned_acceptance),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use deepspec_engine::Sampling;
    use serde_json::json;

    use super::*;

    #[test]
    fn settings_that_pin_acceptance_are_found_wherever_they_are() {
        for (settings, named) in [
            (
                json!({"internal_states": [{"env": {"SGLANG_SIMULATE_ACC_LEN": "2.5"}}]}),
                "SGLANG_SIMULATE_ACC_LEN",
            ),
            (json!({"simulate_acc_len": 3.0}), "simulate_acc_len = 3.0"),
            (
                json!({"vllm_config": {"speculative_config": {"rejection_sample_method": "synthetic"}}}),
                "rejection_sample_method = \"synthetic\"",
            ),
            (json!({"synthetic_acceptance_rates": [0.9, 0.8]}), "synthetic_acceptance_rates"),
            (json!({"spec_synth_len": 4}), "spec_synth_len"),
        ] {
            let found = pinned_acceptance(&settings);
            assert!(found.as_ref().is_some_and(|found| found.contains(named)), "{found:?}, not {named}");
        }
        for honest in [
            json!({"env": {"SGLANG_SIMULATE_ACC_LEN": "-1"}, "simulate_acc_len": null}),
            json!({"rejection_sample_method": "standard", "synthetic_acceptance_rates": null}),
            json!({"rejection_sample_method": "block", "synthetic_acceptance_length": null, "synth_len": -1.0}),
        ] {
            assert_eq!(pinned_acceptance(&honest), None);
        }
    }

    #[test]
    fn every_request_has_its_own_seed() {
        let request = |id: &str, seed| Request {
            id: id.into(),
            prompt: vec![1],
            sampling: Sampling::new(1.0, seed),
            max_new_tokens: 1,
            stop_ids: vec![],
        };
        let seeds = [("a", 1), ("b", 1), ("a", 2)].map(|(id, seed)| request_seed(&request(id, seed)));
        assert!(seeds[0] != seeds[1] && seeds[0] != seeds[2] && seeds.iter().all(|seed| *seed < 1 << 31));
        assert_eq!(seeds[0], request_seed(&request("a", 1)));
    }
}
