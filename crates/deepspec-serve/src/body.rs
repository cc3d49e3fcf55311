//! The body of a chat completion request: the supported part of the OpenAI API, checked on arrival.

use deepspec_core::config::describe_serde_error;
use deepspec_core::jsonl::json_type_name;
use deepspec_engine::Sampling;
use deepspec_text::Message;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::defaults::Defaults;
use crate::error::ChatError;
use crate::fields::{SUPPORTED_FIELDS, reject_unsupported_fields};
use crate::ranges::{PENALTIES, check_range, check_top_p};

/// Maximum number of stop strings, and maximum bytes of each. The text of every token is searched
/// for them.
const MAX_STOP_STRINGS: usize = 16;
const MAX_STOP_BYTES: usize = 1 << 10;

/// A checked request.
#[derive(Debug, Clone)]
pub struct ChatRequest {
    /// The conversation to answer.
    pub messages: Vec<Message>,
    /// Tools for the chat template.
    pub tools: Vec<Value>,
    /// Variables for the chat template.
    pub template_kwargs: Map<String, Value>,
    /// Sampling settings.
    pub sampling: Sampling,
    /// Maximum tokens of the answer. None allows all tokens that fit into the context.
    pub max_tokens: Option<usize>,
    /// Strings that end the answer.
    pub stop: Vec<String>,
    /// Token ids that end the answer, in addition to the model's end-of-sequence tokens.
    pub stop_token_ids: Vec<i64>,
    /// Whether to ignore the model's end-of-turn tokens.
    pub ignore_eos: bool,
    /// Whether to stream the answer.
    pub stream: bool,
    /// Whether to send token counts after the last streamed chunk.
    pub include_usage: bool,
    /// Whether an unstreamed answer has the token ids of prompt and answer.
    pub return_token_ids: bool,
}

/// The JSON object of the request, without null fields.
#[derive(Deserialize)]
struct Body {
    model: Option<String>,
    messages: Vec<Value>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    min_p: Option<f64>,
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
    stop: Option<Value>,
    stop_token_ids: Option<Vec<i64>>,
    seed: Option<i64>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    chat_template_kwargs: Option<Map<String, Value>>,
    reasoning_effort: Option<Value>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    ignore_eos: Option<bool>,
    return_token_ids: Option<bool>,
    n: Option<u64>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    repetition_penalty: Option<f64>,
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// Parses a request to the model named `served`. `fresh_seed` is used if the request has no seed.
///
/// # Errors
/// See [`ChatError`].
pub fn parse_chat_request(
    bytes: &[u8],
    served: &str,
    defaults: &Defaults,
    fresh_seed: u64,
) -> Result<ChatRequest, ChatError> {
    let sent: Value = serde_json::from_slice(bytes)
        .map_err(|error| ChatError::Malformed(describe_serde_error(&error.to_string())))?;
    let Value::Object(mut sent) = sent else {
        return Err(ChatError::field("body", format!("expected an object, found {}", json_type_name(&sent))));
    };
    sent.retain(|_, value| !value.is_null());
    reject_unsupported_fields(&sent)?;
    sent.retain(|name, _| SUPPORTED_FIELDS.contains(&name.as_str()));
    let body: Body = serde_path_to_error::deserialize(Value::Object(sent)).map_err(|error| {
        let (path, inner) = (error.path().to_string(), error.inner().to_string());
        ChatError::field(if path == "." { "body".into() } else { path }, describe_serde_error(&inner))
    })?;
    if let Some(model) = body.model.as_ref().filter(|model| *model != served) {
        return Err(ChatError::UnknownModel { wanted: model.clone(), served: served.into() });
    }
    reject_unsupported_values(&body)?;
    let mut template_kwargs = body.chat_template_kwargs.unwrap_or_default();
    template_kwargs.retain(|_, value| !value.is_null());
    if let Some(effort) = body.reasoning_effort {
        template_kwargs.entry("reasoning_effort").or_insert(effort);
    }
    Ok(ChatRequest {
        messages: parse_messages(body.messages)?,
        sampling: Sampling {
            temperature: check_range(
                "temperature",
                body.temperature.unwrap_or(defaults.temperature),
                0.0,
                2.0,
            )?,
            top_p: check_top_p(body.top_p.unwrap_or(defaults.top_p))?,
            top_k: top_k(body.top_k.unwrap_or(defaults.top_k))?,
            min_p: check_range("min_p", body.min_p.unwrap_or(defaults.min_p), 0.0, 1.0)?,
            seed: body.seed.map_or(fresh_seed, i64::cast_unsigned),
        },
        max_tokens: {
            let asked = match (body.max_completion_tokens, body.max_tokens) {
                (None, limit) => max_tokens("max_tokens", limit)?,
                (limit, _) => max_tokens("max_completion_tokens", limit)?,
            };
            // The limit in the model's generation config also caps larger limits of requests, as in
            // vLLM.
            asked.into_iter().chain(defaults.max_tokens).min()
        },
        stop: parse_stop_strings(body.stop)?,
        stop_token_ids: body.stop_token_ids.unwrap_or_default(),
        tools: check_tools(body.tools.unwrap_or_default(), body.tool_choice)?,
        template_kwargs,
        ignore_eos: body.ignore_eos.unwrap_or(false),
        return_token_ids: body.return_token_ids.unwrap_or(false),
        stream: body.stream.unwrap_or(false),
        include_usage: body.stream_options.and_then(|options| options.include_usage).unwrap_or(false),
    })
}

fn reject_unsupported_values(body: &Body) -> Result<(), ChatError> {
    let values = [body.presence_penalty, body.frequency_penalty, body.repetition_penalty];
    let mut penalties = PENALTIES.into_iter().zip(values);
    if let Some(((name, neutral), Some(value))) =
        penalties.find(|((_, neutral), value)| value.is_some_and(|value| value != *neutral))
    {
        return Err(ChatError::field(name, format!("{value} is not supported, only {neutral}")));
    }
    match body.n.filter(|&n| n != 1) {
        Some(n) => Err(ChatError::field("n", format!("{n} is not supported, only 1"))),
        None => Ok(()),
    }
}

/// The tools for the chat template; none if the request forbids calls.
fn check_tools(tools: Vec<Value>, choice: Option<Value>) -> Result<Vec<Value>, ChatError> {
    match choice.as_ref().map(|choice| choice.as_str()) {
        None | Some(Some("auto")) if tools.iter().any(|tool| !tool.is_object()) => {
            Err(ChatError::field("tools", "expected a list of objects"))
        }
        None | Some(Some("auto")) => Ok(tools),
        Some(Some("none")) => Ok(vec![]),
        _ => {
            let choice = choice.unwrap_or_default();
            Err(ChatError::field(
                "tool_choice",
                format!("{choice} is not supported, only \"auto\" and \"none\""),
            ))
        }
    }
}

fn parse_messages(values: Vec<Value>) -> Result<Vec<Message>, ChatError> {
    if values.is_empty() {
        return Err(ChatError::field("messages", "there must be at least one message"));
    }
    let parse = |(index, value): (usize, Value)| {
        Message::try_from(value)
            .map_err(|problem| ChatError::field(format!("messages[{index}]"), problem.to_string()))
    };
    values.into_iter().enumerate().map(parse).collect()
}

/// Parses `top_k`. As in other servers, −1 also means all tokens.
fn top_k(value: i64) -> Result<usize, ChatError> {
    usize::try_from(value.max(0)).ok().filter(|_| value >= -1).ok_or_else(|| {
        ChatError::field("top_k", format!("{value} is neither a count nor -1 or 0 for all tokens"))
    })
}

fn max_tokens(field: &'static str, value: Option<u64>) -> Result<Option<usize>, ChatError> {
    match value {
        Some(0) => Err(ChatError::field(field, "0 leaves no room for an answer; ask for at least 1 token")),
        Some(limit) => Ok(Some(usize::try_from(limit).unwrap_or(usize::MAX))),
        None => Ok(None),
    }
}

fn parse_stop_strings(value: Option<Value>) -> Result<Vec<String>, ChatError> {
    let stops = match value {
        None | Some(Value::Null) => return Ok(vec![]),
        Some(Value::Array(stops)) => stops,
        Some(one) => vec![one],
    };
    if stops.len() > MAX_STOP_STRINGS {
        return Err(ChatError::field(
            "stop",
            format!("{} texts, but at most {MAX_STOP_STRINGS} may end an answer", stops.len()),
        ));
    }
    let text = |stop: Value| match stop {
        Value::String(text) if text.len() > MAX_STOP_BYTES => Err(ChatError::field(
            "stop",
            format!("a text of {} bytes, but at most {MAX_STOP_BYTES} are looked for", text.len()),
        )),
        Value::String(text) if !text.is_empty() => Ok(text),
        other => Err(ChatError::field(
            "stop",
            format!("expected a non-empty string or a list of them, found {other}"),
        )),
    };
    stops.into_iter().filter(|stop| !stop.is_null()).map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::{IGNORED_FIELDS, UNSUPPORTED_FIELDS, requests_default};
    use serde_json::json;

    fn request(changes: Value) -> Result<ChatRequest, ChatError> {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        let (Some(body), Value::Object(changes)) = (body.as_object_mut(), changes) else { unreachable!() };
        body.extend(changes);
        parse_chat_request(&serde_json::to_vec(body).unwrap(), "m", &Defaults::default(), 5)
    }

    #[test]
    fn defaults_and_values_are_taken() {
        let plain = request(json!({"temperature": null, "unknown": null})).unwrap();
        assert_eq!(plain.sampling, Sampling::new(1.0, 5));
        assert_eq!((plain.max_tokens, plain.stream), (None, false));
        let full = request(
            json!({"temperature": 0, "top_k": -1, "seed": -1, "stop": "x", "max_tokens": 9, "max_completion_tokens": 7}),
        );
        let full = full.unwrap();
        assert_eq!((full.sampling.top_k, full.sampling.seed), (0, u64::MAX));
        assert_eq!((full.stop, full.max_tokens), (vec!["x".to_string()], Some(7)));
        let most = request(json!({"stop": vec!["x".repeat(1024); 16]})).unwrap();
        assert_eq!(most.stop.len(), 16);
    }

    #[test]
    fn what_does_nothing_is_taken_and_defaults_are_the_models() {
        let idle = json!({
            "model": null, "response_format": {"type": "text"}, "logit_bias": {}, "tool_choice": "none", "tools": [{"type": "function"}],
            "top_logprobs": 0, "logprobs": false, "n": 1, "best_of": 1, "min_tokens": 0, "skip_special_tokens": true, "user": "me",
            "stop_token_ids": [7], "reasoning_effort": "low",
        });
        let request = request(idle).unwrap();
        assert!(request.tools.is_empty());
        assert_eq!(
            (request.stop_token_ids, &request.template_kwargs["reasoning_effort"]),
            (vec![7], &json!("low"))
        );
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Defaults::read(dir.path()), Defaults::default());
        let config = json!({"temperature": 0.6, "top_k": 20, "top_p": 7, "repetition_penalty": 1.05, "max_new_tokens": 9});
        std::fs::write(dir.path().join("generation_config.json"), config.to_string()).unwrap();
        let read = Defaults::read(dir.path());
        assert_eq!(
            read,
            Defaults { temperature: 0.6, top_k: 20, max_tokens: Some(9), ..Defaults::default() }
        );
        let body = br#"{"messages": [{"role": "user", "content": "hi"}], "top_k": 5}"#;
        let sampling = parse_chat_request(body, "m", &read, 5).unwrap().sampling;
        assert_eq!((sampling.temperature, sampling.top_k), (0.6, 5));
    }

    #[test]
    fn bad_fields_are_named() {
        let bad = [
            (json!({"temperature": "hot"}), 400, "`temperature`: invalid type: string"),
            (json!({"temperature": 2.5}), 400, "`temperature`: 2.5 is not between 0 and 2"),
            (json!({"temperature": -0.1}), 400, "`temperature`"),
            (json!({"top_p": 0}), 400, "`top_p`"),
            (json!({"top_k": -2}), 400, "`top_k`"),
            (json!({"min_p": 1.5}), 400, "`min_p`"),
            (json!({"max_tokens": 0}), 400, "`max_tokens`"),
            (json!({"max_tokens": -1}), 400, "`max_tokens`"),
            (json!({"stop": [""]}), 400, "`stop`"),
            (json!({"stop": 1}), 400, "`stop`"),
            (json!({"stop": vec!["x"; 17]}), 400, "`stop`: 17 texts, but at most 16"),
            (json!({"stop": ["x", "x".repeat(1025)]}), 400, "`stop`: a text of 1025 bytes, but at most 1024"),
            (json!({"n": 2}), 400, "`n`"),
            (json!({"logprobs": true}), 400, "`logprobs`"),
            (json!({"response_format": {"type": "json_object"}}), 400, "`response_format`"),
            (json!({"tool_choice": "required"}), 400, "`tool_choice`"),
            (json!({"tool_choice": {"type": "function"}}), 400, "`tool_choice`"),
            (json!({"logit_bias": {"5": 1}}), 400, "`logit_bias`"),
            (json!({"min_tokens": 3}), 400, "`min_tokens`"),
            (json!({"guided_json": {"type": "object"}}), 400, "`guided_json`"),
            (json!({"top_logprobs": 2}), 400, "`top_logprobs`"),
            (json!({"repetition_penalty": 1.1}), 400, "`repetition_penalty`: 1.1"),
            (json!({"messages": []}), 400, "at least one message"),
            (json!({"messages": [{"role": "robot", "content": ""}]}), 400, "`messages[0]`: unknown role"),
            (json!({"messages": "hi"}), 400, "`messages`: invalid type"),
            (json!({"stream_options": {"include_usage": 1}}), 400, "`stream_options.include_usage`"),
            (json!({"model": "gpt-4"}), 404, "`gpt-4` does not exist"),
        ];
        for (changes, status, start) in bad {
            let error = request(changes.clone()).unwrap_err();
            assert_eq!(error.status(), status, "{changes}");
            assert!(error.to_string().contains(start), "{changes}: {error}");
        }
        for broken in [
            "",
            "{",
            "{\"model\": nan}",
            "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]} x",
        ] {
            assert!(
                matches!(
                    parse_chat_request(broken.as_bytes(), "m", &Defaults::default(), 0),
                    Err(ChatError::Malformed(_))
                ),
                "{broken}"
            );
        }
        assert!(
            parse_chat_request(b"[]", "m", &Defaults::default(), 0)
                .unwrap_err()
                .to_string()
                .starts_with("`body`")
        );
        let error = parse_chat_request(b"{}", "m", &Defaults::default(), 0).unwrap_err();
        assert!(error.to_string().contains("missing field `messages`"));
    }

    /// Unusual values.
    fn odd() -> Vec<Value> {
        let numbers = [json!(-7), json!(0), json!(0.5), json!(1e300), json!(u64::MAX)];
        let others = [
            json!(null),
            json!(true),
            json!(false),
            json!(""),
            json!("x"),
            json!([]),
            json!({}),
            json!([null]),
            json!({"type": "x"}),
        ];
        numbers.into_iter().chain(others).collect()
    }

    /// Tests every field with every kind of value. A value must be used, refused by the field's
    /// name, or known to have no effect.
    #[test]
    fn whatever_a_field_holds_is_obeyed_or_refused_by_its_name() {
        for name in SUPPORTED_FIELDS
            .iter()
            .chain(&UNSUPPORTED_FIELDS)
            .chain(&IGNORED_FIELDS)
            .chain(&["a_field_of_tomorrow"])
        {
            for value in odd() {
                let refused = request(json!({*name: value})).err();
                if let Some(error) = &refused {
                    let told = error.to_string();
                    assert!([400, 404].contains(&error.status()), "{name} {value}: {told}");
                    // The newer name of the limit is reported by its older one.
                    let field = name.trim_start_matches("max_completion_").trim_start_matches("max_");
                    let is_named = [format!("`{name}"), format!("`max_{field}")]
                        .iter()
                        .any(|field| told.contains(field))
                        || (*name == "model" && told.contains("does not exist"));
                    assert!(is_named && !told.contains("Some("), "{name} {value}: {told}");
                }
                if *name == "a_field_of_tomorrow" {
                    assert_eq!(refused.is_some(), !value.is_null(), "{name} {value}");
                }
                if IGNORED_FIELDS.contains(name) || (value.is_null() && *name != "messages") {
                    assert!(refused.is_none(), "{name} {value}: {refused:?}");
                }
                if UNSUPPORTED_FIELDS.contains(name) {
                    assert_eq!(
                        refused.is_none(),
                        value.is_null() || requests_default(name, &value),
                        "{name} {value}"
                    );
                }
            }
        }
    }

    #[test]
    fn whatever_a_message_holds_is_used_or_refused_by_its_place() {
        for name in [
            "role",
            "content",
            "name",
            "tool_calls",
            "reasoning_content",
            "reasoning",
            "refusal",
            "a_field_of_tomorrow",
        ] {
            for value in odd() {
                let mut message = json!({"role": "assistant", "content": "a"});
                message[name] = value.clone();
                let sent = json!({"messages": [{"role": "user", "content": "hi"}, message]});
                match request(sent) {
                    Ok(read) => assert_eq!(read.messages.len(), 2, "{name} {value}"),
                    Err(error) => {
                        let told = error.to_string();
                        assert!(
                            told.contains("`messages[1]`") && error.status() == 400,
                            "{name} {value}: {told}"
                        );
                    }
                }
            }
        }
        let nulls =
            json!({"role": "user", "content": "hi", "name": null, "tool_calls": null, "refusal": null});
        let read = request(json!({"messages": [nulls]})).unwrap().messages;
        assert_eq!(read, [Message::new(deepspec_text::Role::User, "hi")]);
    }

    /// Any generation_config.json gives defaults that a request may have.
    #[test]
    fn defaults_of_any_file_are_within_the_limits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("generation_config.json");
        let body = br#"{"messages": [{"role": "user", "content": "hi"}]}"#;
        for name in [
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "max_new_tokens",
            "repetition_penalty",
            "do_sample",
            "eos_token_id",
        ] {
            for value in odd() {
                std::fs::write(&path, json!({name: value}).to_string()).unwrap();
                let defaults = Defaults::read(dir.path());
                let read = parse_chat_request(body, "m", &defaults, 5);
                assert!(read.is_ok(), "{name} {value}: {:?}", read.err());
            }
        }
        for broken in ["", "[", "[]", "null", "{\"temperature\": NaN}"] {
            std::fs::write(&path, broken).unwrap();
            assert_eq!(Defaults::read(dir.path()), Defaults::default(), "{broken}");
        }
        // The model's limit is used if the request has none. Values of the request take precedence.
        std::fs::write(&path, r#"{"temperature": 0.6, "top_p": 0.95, "min_p": 0.1, "max_new_tokens": 9}"#)
            .unwrap();
        let defaults = Defaults::read(dir.path());
        let silent = parse_chat_request(body, "m", &defaults, 5).unwrap();
        assert_eq!((silent.max_tokens, silent.sampling.top_p, silent.sampling.min_p), (Some(9), 0.95, 0.1));
        let own = br#"{"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 3}"#;
        let own = parse_chat_request(own, "m", &defaults, 5).unwrap();
        assert_eq!((own.max_tokens, own.sampling.temperature, own.sampling.top_p), (Some(3), 0.0, 0.95));
    }

    #[test]
    fn the_fields_of_a_body_are_those_that_are_listed() {
        let everything: Map<String, Value> =
            SUPPORTED_FIELDS.iter().map(|name| (name.to_string(), Value::Null)).collect();
        let mut names = SUPPORTED_FIELDS.to_vec();
        names.extend(UNSUPPORTED_FIELDS);
        names.extend(IGNORED_FIELDS);
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count, "a name stands in two lists");
        assert!(request(Value::Object(everything)).unwrap_err().to_string().contains("messages"));
    }
}
