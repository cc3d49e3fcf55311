//! What decides the answers: recorded beside the output, so that a run is never continued with other settings.

use std::path::PathBuf;

use deepspec_core::rng::{Purpose, Stream};
use deepspec_core::usage;
use deepspec_text::Message;
use serde_json::{Map, Value, json};

use crate::chat;

/// Sampling as given; what is not given is not sent, so that the server's defaults hold.
#[derive(clap::Args)]
pub struct Sampling {
    /// Sampling temperature, 0 for the most likely token
    #[arg(long)]
    temperature: Option<f64>,
    /// Sample from the smallest set of tokens with this mass
    #[arg(long)]
    top_p: Option<f64>,
    /// Sample from this many most likely tokens (not every server knows this field)
    #[arg(long)]
    top_k: Option<i64>,
    /// Drop tokens less likely than this fraction of the most likely one (not every server knows this field)
    #[arg(long)]
    min_p: Option<f64>,
    /// Limit of tokens per answer
    #[arg(long, default_value_t = 4096)]
    max_tokens: u64,
    /// Make answers repeatable: each gets a seed made from this one, the row's id and the turn
    #[arg(long)]
    seed: Option<u64>,
    /// Ask the chat template for answers without thinking
    #[arg(long, conflicts_with = "enable_thinking")]
    disable_thinking: bool,
    /// Ask the chat template for thinking
    #[arg(long)]
    enable_thinking: bool,
}

/// Everything that decides an answer but the row itself.
pub struct Settings {
    record: Map<String, Value>,
    /// Fields that all requests share.
    shared: Map<String, Value>,
    seed: Option<u64>,
}

impl Settings {
    /// Joins the settings of a run.
    ///
    /// # Errors
    /// A usage error if a sampling value is out of range.
    pub fn new(inputs: &[PathBuf], model: &str, sampling: &Sampling) -> anyhow::Result<Self> {
        let thinking = match (sampling.enable_thinking, sampling.disable_thinking) {
            (true, _) => Some(true),
            (_, true) => Some(false),
            _ => None,
        };
        let fields = [
            ("temperature", json!(sampling.temperature)),
            ("top_p", json!(sampling.top_p)),
            ("top_k", json!(sampling.top_k)),
            ("min_p", json!(sampling.min_p)),
            ("max_tokens", json!(sampling.max_tokens)),
            ("chat_template_kwargs", json!(thinking.map(|thinking| json!({"enable_thinking": thinking})))),
        ];
        let mut shared = Map::new();
        shared.insert("model".into(), json!(model));
        shared.extend(
            fields.into_iter().filter(|(_, value)| !value.is_null()).map(|(key, value)| (key.into(), value)),
        );
        let mut record = shared.clone();
        record.insert("inputs".into(), json!(inputs));
        record.insert("seed".into(), json!(sampling.seed));
        let settings = Self { record, shared, seed: sampling.seed };
        let trial = settings.body(&[Message::new(deepspec_text::Role::User, "?")], "", 0);
        if let Err(error) = chat::parse(trial.to_string().as_bytes(), model, 0) {
            usage!("{error}");
        }
        Ok(settings)
    }

    /// The body of a request for the answer to `messages`, the `turn`-th answer of row `id`.
    pub fn body(&self, messages: &[Message], id: &str, turn: usize) -> Value {
        // Only role and text: strict servers refuse messages with fields they do not know.
        let messages: Vec<Value> = messages
            .iter()
            .map(|message| json!({"role": message.role, "content": message.content}))
            .collect();
        let mut body = self.shared.clone();
        body.insert("messages".into(), Value::Array(messages));
        if let Some(seed) = self.seed {
            // 31 bits, for servers that keep seeds in a C int.
            let bits = Stream::new(seed, id).bits(turn as u64, Purpose::Target, 0) >> 33;
            body.insert("seed".into(), json!(bits));
        }
        Value::Object(body)
    }

    /// The settings as they are recorded beside the output.
    pub fn record(&self) -> Value {
        json!({"format": 1, "version": env!("CARGO_PKG_VERSION"), "settings": self.record})
    }

    /// Names of the settings in which an earlier record differs from these.
    pub fn differences(&self, earlier: &Value) -> Vec<String> {
        let empty = Map::new();
        let earlier = earlier["settings"].as_object().unwrap_or(&empty);
        let mut keys: Vec<&String> = self.record.keys().chain(earlier.keys()).collect();
        keys.sort();
        keys.dedup();
        keys.into_iter().filter(|&key| self.record.get(key) != earlier.get(key)).cloned().collect()
    }
}
