//! Settings that determine the answers. They are recorded beside the output, so that a run resumes
//! only with equal settings.

use std::path::PathBuf;

use deepspec_capture::cache::Worker;
use deepspec_capture::served::AnswerStates;
use deepspec_core::rng::{Purpose, Stream};
use deepspec_core::usage;
use deepspec_text::{Message, Role, WEIGHT};
use serde_json::{Map, Value, json};

use super::openai_messages;
use super::overrides::{Overrides, TEMPLATE_KWARGS};

/// Sampling as given; what is not given is not sent, so that the server's defaults hold.
#[derive(clap::Args)]
pub struct Sampling {
    /// Sampling temperature, 0 for the most likely token; by default the server's, or with --local-model that of generation_config.json
    #[arg(long)]
    temperature: Option<f64>,
    /// Sample from the smallest set of tokens with this probability mass
    #[arg(long)]
    top_p: Option<f64>,
    /// Sample from this many most likely tokens (a server that does not know this field answers without it)
    #[arg(long)]
    top_k: Option<i64>,
    /// Drop tokens less likely than this fraction of the most likely one (as with --top-k)
    #[arg(long)]
    min_p: Option<f64>,
    /// Limit of tokens per answer; answers that reach it have the finish_reason "length"
    #[arg(long, default_value_t = 4096)]
    max_tokens: u64,
    /// Make answers repeatable: each gets a seed made from this one, the row's id and the turn
    #[arg(long)]
    seed: Option<u64>,
    /// Answers per prompt; with more than one, the k-th answer to row ID becomes the row ID#k
    #[arg(long, default_value_t = 1, value_name = "N")]
    samples: usize,
    /// Turn thinking off for a reasoning model (`enable_thinking: false` of the chat template, as in Qwen3). This is the default,
    /// as in `deepspec-eval run` and `load`. With the flag, a server that refuses `enable_thinking` is an error; without it, such a
    /// server is asked without the field
    #[arg(long, conflicts_with = "enable_thinking")]
    disable_thinking: bool,
    /// Turn thinking on for a reasoning model (`enable_thinking: true` of the chat template). Evaluate the drafter with
    /// `deepspec-eval run --thinking on`, and give room for the thoughts with --max-tokens
    #[arg(long)]
    enable_thinking: bool,
    /// Whether rows keep the model's reasoning before the answer
    #[arg(long, value_enum, default_value_t = Reasoning::Keep)]
    reasoning: Reasoning,
    /// Whether the loss counts recorded tool calls, which have recorded results and were not written by the target
    #[arg(long, value_enum, default_value_t = RecordedCalls::Train)]
    recorded_calls: RecordedCalls,
}

impl Sampling {
    /// Whether the user set the thinking switch.
    pub fn sets_thinking(&self) -> bool {
        self.enable_thinking || self.disable_thinking
    }
}

/// Treatment of the model's reasoning in the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Reasoning {
    /// The reasoning stands in the message's `reasoning_content`, or in its text where the server leaves it there.
    Keep,
    /// The reasoning is left out of the rows.
    Drop,
}

/// How recorded tool calls are written into the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum RecordedCalls {
    /// As they are: the loss counts their tokens, as the reference's does.
    Train,
    /// With `"weight": 0`, which keeps their tokens out of the loss.
    Mask,
}

/// Everything that determines an answer, except the row.
pub struct RequestSettings {
    record: Map<String, Value>,
    /// Fields of all requests.
    shared: Map<String, Value>,
    seed: Option<u64>,
    /// Answers per prompt.
    pub samples: usize,
    /// Whether rows keep the reasoning.
    pub reasoning: Reasoning,
    /// Whether recorded tool calls are trained on.
    pub recorded_calls: RecordedCalls,
    /// The worker, which answers its share of the rows.
    pub worker: Worker,
    /// Where hidden states are stored, if they are requested.
    pub states: Option<AnswerStates>,
}

/// Request fields that ask for token ids: the first field for vLLM and deepspec-serve, and the second and third for llama.cpp.
pub const TOKEN_ID_FIELDS: [&str; 3] = ["return_token_ids", "return_tokens", "verbose"];

/// The record's key for the digest of a local model's weights. Records on disk have it, so it keeps
/// the earlier name of the flag.
const WEIGHTS: &str = "weights of --embedded";
/// Name of [`WEIGHTS`] in messages.
const WEIGHTS_SHOWN: &str = "weights of --local-model";

/// Request fields that ask vLLM for hidden states of prompt and answer, and for what checks them.
const STATES_FIELDS: [&str; 2] = ["kv_transfer_params", "logprobs"];

/// The record's key for the worker.
pub const WORKER: &str = "worker";

/// Identifies the row and the turn of a request.
pub struct RequestKey<'a> {
    /// The output row's id.
    pub id: &'a str,
    /// Index of the answer in the row, from 0.
    pub turn: usize,
    /// Sampling settings of the row, which override the settings of the run.
    pub overrides: &'a Overrides,
    /// The tools of the row.
    pub tools: Option<&'a Value>,
}

impl RequestSettings {
    /// The settings of a run. `weights` is the digest of an embedded model's weights.
    ///
    /// # Errors
    /// With a usage error if a sampling value is out of range.
    pub fn new(
        inputs: &[PathBuf],
        model: &str,
        weights: Option<String>,
        sampling: &Sampling,
        worker: Worker,
    ) -> anyhow::Result<Self> {
        let numbers = [
            ("--temperature", sampling.temperature),
            ("--top-p", sampling.top_p),
            ("--min-p", sampling.min_p),
        ];
        if let Some((flag, _)) =
            numbers.iter().find(|(_, value)| value.is_some_and(|value| !value.is_finite()))
        {
            usage!("{flag}: expected a finite number");
        }
        let fields = [
            ("temperature", json!(sampling.temperature)),
            ("top_p", json!(sampling.top_p)),
            ("top_k", json!(sampling.top_k)),
            ("min_p", json!(sampling.min_p)),
            ("max_tokens", json!(sampling.max_tokens)),
            (TEMPLATE_KWARGS, json!({"enable_thinking": sampling.enable_thinking})),
        ];
        let mut shared = Map::new();
        shared.insert("model".into(), json!(model));
        shared.extend(
            fields.into_iter().filter(|(_, value)| !value.is_null()).map(|(key, value)| (key.into(), value)),
        );
        let mut record = shared.clone();
        record.insert("inputs".into(), json!(inputs));
        record.insert("seed".into(), json!(sampling.seed));
        if let Some(weights) = weights {
            record.insert(WEIGHTS.into(), json!(weights));
        }
        // Defaults are not recorded, so that older records stay valid.
        if sampling.samples != 1 {
            record.insert("samples".into(), json!(sampling.samples));
        }
        if sampling.reasoning == Reasoning::Drop {
            record.insert("reasoning".into(), json!("drop"));
        }
        if sampling.recorded_calls == RecordedCalls::Mask {
            record.insert("recorded_calls".into(), json!("mask"));
        }
        if !worker.is_alone() {
            record.insert(WORKER.into(), json!(worker.to_string()));
        }
        if sampling.samples == 0 {
            usage!("--samples must be at least 1");
        }
        if sampling.samples > 1 && sampling.temperature == Some(0.0) {
            usage!("--samples {} with --temperature 0 would ask for the same answer again", sampling.samples);
        }
        let &Sampling { seed, samples, reasoning, recorded_calls, .. } = sampling;
        let settings =
            Self { record, shared, seed, samples, reasoning, recorded_calls, worker, states: None };
        let none = Overrides::default();
        if let Err(problem) = settings.check_values(&none) {
            usage!("{problem}");
        }
        Ok(settings)
    }

    /// The settings of a run that stores hidden states with the answers.
    ///
    /// # Errors
    /// With a usage error if rows drop the reasoning, because the states include it.
    pub fn with_states(mut self, states: AnswerStates) -> anyhow::Result<Self> {
        if self.reasoning == Reasoning::Drop {
            usage!(
                "--with-states with --reasoning drop: the states are those of the whole answer; keep the reasoning"
            );
        }
        self.record.insert("with_states".into(), json!(true));
        let values = [json!({"include_output_tokens": true}), json!(true)];
        self.shared.extend(STATES_FIELDS.map(String::from).into_iter().zip(values));
        self.states = Some(states);
        Ok(self)
    }

    /// A message of the row as it is written to the output.
    pub fn output_message(&self, message: &Message) -> Message {
        let mut written = message.clone();
        if self.recorded_calls == RecordedCalls::Mask && message.role == Role::Assistant {
            written.extra.insert(WEIGHT.into(), json!(0));
        }
        written
    }

    /// Checks the values of a request with these overrides.
    ///
    /// # Errors
    /// If a field is out of range; the error names the field and its range.
    pub fn check_values(&self, overrides: &Overrides) -> Result<(), String> {
        let asked = RequestKey { id: "", turn: 0, overrides, tools: None };
        let mut body = self.body(&[Message::new(Role::User, "?")], &asked);
        if self.states.is_some() && body.contains_key("stop") {
            return Err(
                "stop strings may end an answer within a token; leave them out with --with-states".into()
            );
        }
        // Other servers accept penalties and requests for states, which deepspec-serve refuses.
        body.retain(|name, _| !name.ends_with("_penalty") && !STATES_FIELDS.contains(&name.as_str()));
        let model = body["model"].as_str().unwrap_or_default().to_string();
        let bytes = Value::Object(body).to_string();
        let defaults = deepspec_serve::Defaults::default();
        deepspec_serve::parse_chat_request(bytes.as_bytes(), &model, &defaults, 0)
            .map(drop)
            .map_err(|error| error.to_string())
    }

    /// The body of a request for the answer to `messages`.
    pub fn body(&self, messages: &[Message], asked: &RequestKey<'_>) -> Map<String, Value> {
        let mut body = self.shared.clone();
        asked.overrides.apply(&mut body);
        if let Some(tools) = asked.tools {
            body.insert("tools".into(), tools.clone());
        }
        if let Some(seed) = asked.overrides.seed.or(self.seed) {
            // Uses 31 bits, for servers that store seeds in a C int.
            let bits = Stream::new(seed, asked.id).bits(asked.turn as u64, Purpose::Target, 0) >> 33;
            body.insert("seed".into(), json!(bits));
        }
        body.insert("messages".into(), openai_messages::messages(messages));
        // With stop strings, the token ids may include text beyond the answer.
        if !body.contains_key("stop") {
            body.extend(TOKEN_ID_FIELDS.map(|name| (name.to_string(), json!(true))));
        }
        body
    }

    /// The settings as JSON for the record beside the output.
    pub fn record(&self) -> Value {
        json!({"format": 1, "version": env!("CARGO_PKG_VERSION"), "settings": self.record})
    }

    /// Names of settings that differ from an earlier record.
    pub fn differing_settings(&self, earlier: &Value) -> Vec<String> {
        let empty = Map::new();
        let earlier = earlier["settings"].as_object().unwrap_or(&empty);
        let mut keys: Vec<&String> = self.record.keys().chain(earlier.keys()).collect();
        keys.sort();
        keys.dedup();
        // Runs with servers and dry runs do not know the weights.
        let unknown =
            |key: &String| key == WEIGHTS && self.record.contains_key(key) != earlier.contains_key(key);
        let differs = |key: &&String| self.record.get(*key) != earlier.get(*key) && !unknown(key);
        let shown = |key: &String| if key == WEIGHTS { WEIGHTS_SHOWN.into() } else { key.clone() };
        keys.into_iter().filter(differs).map(shown).collect()
    }
}
