//! The body of a chat completion request: what we accept of the OpenAI API, checked at the door.

use deepspec_decode::Sampling;
use deepspec_text::Message;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::error::ChatError;

/// Texts that may end an answer, and bytes of each: they are looked for at every token.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1 << 10;

/// A request that has been checked.
#[derive(Debug, Clone)]
pub struct ChatRequest {
    /// The conversation to answer.
    pub messages: Vec<Message>,
    /// Tools for the chat template.
    pub tools: Vec<Value>,
    /// Variables for the chat template.
    pub template_kwargs: Map<String, Value>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Limit of the answer; None is what the context leaves.
    pub max_tokens: Option<usize>,
    /// Texts that end the answer.
    pub stop: Vec<String>,
    /// Goes on behind the model's end-of-turn tokens.
    pub ignore_eos: bool,
    /// Answers piece by piece.
    pub stream: bool,
    /// Sends the token counts behind the last piece.
    pub include_usage: bool,
    /// Sends the ids of prompt and answer with a whole answer.
    pub return_token_ids: bool,
}

/// The JSON object as sent. Unknown fields are ignored.
#[derive(Deserialize)]
struct Body {
    model: String,
    messages: Vec<Value>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    min_p: Option<f64>,
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
    stop: Option<Value>,
    seed: Option<i64>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    chat_template_kwargs: Option<Map<String, Value>>,
    tools: Option<Vec<Value>>,
    ignore_eos: Option<bool>,
    return_token_ids: Option<bool>,
    n: Option<u64>,
    logprobs: Option<bool>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    repetition_penalty: Option<f64>,
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// Reads a request to the model called `served`. Without a seed, `fresh_seed` decides.
///
/// # Errors
/// See [`ChatError`].
pub fn parse(bytes: &[u8], served: &str, fresh_seed: u64) -> Result<ChatRequest, ChatError> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let body: Body = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let (path, inner) = (error.path().to_string(), error.inner());
        match inner.classify() {
            serde_json::error::Category::Data => {
                ChatError::field(if path == "." { "body".into() } else { path }, inner.to_string())
            }
            _ => ChatError::Malformed(inner.to_string()),
        }
    })?;
    json.end().map_err(|error| ChatError::Malformed(error.to_string()))?;
    if body.model != served {
        return Err(ChatError::UnknownModel { wanted: body.model, served: served.into() });
    }
    refuse_unsupported(&body)?;
    Ok(ChatRequest {
        messages: messages(body.messages)?,
        sampling: Sampling {
            temperature: within("temperature", body.temperature.unwrap_or(1.0), 0.0, 2.0)?,
            top_p: top_p(body.top_p.unwrap_or(1.0))?,
            top_k: top_k(body.top_k.unwrap_or(0))?,
            min_p: within("min_p", body.min_p.unwrap_or(0.0), 0.0, 1.0)?,
            seed: body.seed.map_or(fresh_seed, i64::cast_unsigned),
        },
        max_tokens: max_tokens(body.max_completion_tokens.or(body.max_tokens))?,
        stop: stop(body.stop)?,
        tools: body.tools.unwrap_or_default(),
        template_kwargs: body.chat_template_kwargs.unwrap_or_default(),
        ignore_eos: body.ignore_eos.unwrap_or(false),
        return_token_ids: body.return_token_ids.unwrap_or(false),
        stream: body.stream.unwrap_or(false),
        include_usage: body.stream_options.and_then(|options| options.include_usage).unwrap_or(false),
    })
}

/// Refuses what would change the answer if it were ignored.
fn refuse_unsupported(body: &Body) -> Result<(), ChatError> {
    let penalties = [
        ("presence_penalty", body.presence_penalty.unwrap_or(0.0), 0.0),
        ("frequency_penalty", body.frequency_penalty.unwrap_or(0.0), 0.0),
        ("repetition_penalty", body.repetition_penalty.unwrap_or(1.0), 1.0),
    ];
    if let Some((name, value, neutral)) = penalties.into_iter().find(|(_, value, neutral)| value != neutral) {
        return Err(ChatError::field(name, format!("{value} is not supported, only {neutral}")));
    }
    if let Some(n) = body.n.filter(|&n| n != 1) {
        return Err(ChatError::field("n", format!("{n} is not supported, only 1")));
    }
    if body.logprobs == Some(true) {
        return Err(ChatError::field("logprobs", "not supported"));
    }
    Ok(())
}

fn messages(values: Vec<Value>) -> Result<Vec<Message>, ChatError> {
    if values.is_empty() {
        return Err(ChatError::field("messages", "there must be at least one message"));
    }
    let parse = |(index, value): (usize, Value)| {
        Message::try_from(value)
            .map_err(|problem| ChatError::field(format!("messages[{index}]"), problem.to_string()))
    };
    values.into_iter().enumerate().map(parse).collect()
}

fn within(name: &str, value: f64, least: f64, most: f64) -> Result<f64, ChatError> {
    let inside = (least..=most).contains(&value);
    inside
        .then_some(value)
        .ok_or_else(|| ChatError::field(name, format!("{value} is not between {least} and {most}")))
}

fn top_p(value: f64) -> Result<f64, ChatError> {
    let inside = value > 0.0 && value <= 1.0;
    inside
        .then_some(value)
        .ok_or_else(|| ChatError::field("top_p", format!("{value} is not above 0 and at most 1")))
}

/// −1 is how other servers write "all".
fn top_k(value: i64) -> Result<usize, ChatError> {
    usize::try_from(value.max(0)).ok().filter(|_| value >= -1).ok_or_else(|| {
        ChatError::field("top_k", format!("{value} is neither a count nor -1 or 0 for all tokens"))
    })
}

fn max_tokens(value: Option<u64>) -> Result<Option<usize>, ChatError> {
    match value {
        Some(0) => {
            Err(ChatError::field("max_tokens", "0 leaves no room for an answer; ask for at least 1 token"))
        }
        Some(limit) => Ok(Some(usize::try_from(limit).unwrap_or(usize::MAX))),
        None => Ok(None),
    }
}

fn stop(value: Option<Value>) -> Result<Vec<String>, ChatError> {
    let stops = match value {
        None | Some(Value::Null) => return Ok(vec![]),
        Some(Value::Array(stops)) => stops,
        Some(one) => vec![one],
    };
    if stops.len() > MAX_STOPS {
        return Err(ChatError::field(
            "stop",
            format!("{} texts, but at most {MAX_STOPS} may end an answer", stops.len()),
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
    stops.into_iter().map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn request(changes: Value) -> Result<ChatRequest, ChatError> {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        let (Some(body), Value::Object(changes)) = (body.as_object_mut(), changes) else { unreachable!() };
        body.extend(changes);
        parse(&serde_json::to_vec(body).unwrap(), "m", 5)
    }

    #[test]
    fn defaults_and_values_are_taken() {
        let plain = request(json!({"temperature": null, "unknown": 1})).unwrap();
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
            assert!(matches!(parse(broken.as_bytes(), "m", 0), Err(ChatError::Malformed(_))), "{broken}");
        }
        assert!(parse(b"[]", "m", 0).unwrap_err().to_string().starts_with("`body`"));
        assert!(parse(b"{}", "m", 0).unwrap_err().to_string().contains("missing field `model`"));
    }
}
