//! Responses and errors in the JSON of the OpenAI API, complete or as server-sent events.

use std::convert::Infallible;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream;
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;

use deepspec_text::FinishReason;

use crate::{AnswerDelta, ChatError, ResponseStream, Usage};

/// Seconds in the `Retry-After` header when the queue is full.
const RETRY_AFTER_SECONDS: u16 = 1;

/// Fields that all chunks of one answer share.
pub struct ResponseHeader {
    /// Id of the answer.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// Name of the model.
    pub model: String,
}

impl ResponseHeader {
    fn to_json(&self, kind: &str, choices: Value) -> Value {
        json!({"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices})
    }

    fn chunk(&self, delta: Value, ended: Option<&ResponseStream>) -> Value {
        let finish = ended.and_then(finish_reason);
        let mut choice = json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish});
        if let Some(reply) = ended {
            choice["stop_reason"] = json!(reply.stop_string());
        }
        self.to_json("chat.completion.chunk", json!([choice]))
    }
}

/// The finish reason of the OpenAI API, which uses `stop` for ends of turns and stop strings.
fn finish_reason(reply: &ResponseStream) -> Option<&'static str> {
    let word = |reason: FinishReason| match reason {
        FinishReason::StopSequence => FinishReason::Stop.name(),
        reason => reason.name(),
    };
    reply.finish_reason().map(word)
}

/// A complete answer. `with_ids` adds the token ids of prompt and answer under vLLM's names.
pub fn completion_to_json(
    header: &ResponseHeader,
    whole: &AnswerDelta,
    reply: &ResponseStream,
    with_ids: bool,
) -> Value {
    let mut message = json!({"role": "assistant", "content": whole.content});
    if !whole.reasoning.is_empty() {
        message["reasoning_content"] = json!(whole.reasoning);
    }
    // `stop_reason` as in vLLM: the stop string, or null.
    let choice = json!({
        "index": 0, "message": message, "logprobs": null, "finish_reason": finish_reason(reply), "stop_reason": reply.stop_string(),
    });
    let mut object = header.to_json("chat.completion", json!([choice]));
    object["usage"] = usage_to_json(reply.usage());
    if with_ids {
        object["prompt_token_ids"] = json!(reply.prompt_token_ids());
        object["choices"][0]["token_ids"] = json!(reply.token_ids());
    }
    object
}

fn usage_to_json(usage: Usage) -> Value {
    let (prompt, completion) = (usage.prompt, usage.completion);
    json!({"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion})
}

/// The next event of a stream.
enum NextEvent {
    Role,
    Text,
    Usage,
    Done,
    Nothing,
}

/// Streams an answer. If the client disconnects, the reply is dropped, which cancels the request
/// and returns its permit.
pub fn stream_response(
    header: ResponseHeader,
    reply: ResponseStream,
    permit: OwnedSemaphorePermit,
    include_usage: bool,
) -> Response {
    let state = (NextEvent::Role, header, reply, permit);
    let events = stream::unfold(state, move |(next, header, mut reply, permit)| async move {
        let (data, next) = match next {
            NextEvent::Role => {
                (header.chunk(json!({"role": "assistant", "content": ""}), None), NextEvent::Text)
            }
            NextEvent::Text => match reply.next().await {
                Ok(Some(delta)) => (header.chunk(delta_to_json(&delta), None), NextEvent::Text),
                Ok(None) => {
                    let next = if include_usage { NextEvent::Usage } else { NextEvent::Done };
                    (header.chunk(json!({}), Some(&reply)), next)
                }
                Err(error) => (error_to_json(&error), NextEvent::Done),
            },
            NextEvent::Usage => {
                let mut object = header.to_json("chat.completion.chunk", json!([]));
                object["usage"] = usage_to_json(reply.usage());
                (object, NextEvent::Done)
            }
            NextEvent::Done => (json!("[DONE]"), NextEvent::Nothing),
            NextEvent::Nothing => return None,
        };
        let text = data.as_str().map_or_else(|| data.to_string(), str::to_owned);
        Some((Ok::<_, Infallible>(Event::default().data(text)), (next, header, reply, permit)))
    });
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}

fn delta_to_json(delta: &AnswerDelta) -> Value {
    let mut piece = json!({});
    if !delta.reasoning.is_empty() {
        piece["reasoning_content"] = json!(delta.reasoning);
    }
    if !delta.content.is_empty() {
        piece["content"] = json!(delta.content);
    }
    piece
}

fn error_to_json(error: &ChatError) -> Value {
    let kind = if error.status() < 500 { "invalid_request_error" } else { "server_error" };
    json!({"error": {"message": error.to_string(), "type": kind, "param": error.param(), "code": error.code()}})
}

/// The response to a rejected request.
pub fn error_response(error: &ChatError) -> Response {
    let status = StatusCode::from_u16(error.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = (status, Json(error_to_json(error))).into_response();
    if status == StatusCode::SERVICE_UNAVAILABLE {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER_SECONDS));
    }
    response
}

/// The response to a request that does not reach the model.
pub fn bad_request_response(status: StatusCode, message: &str) -> Response {
    let error = json!({"message": message, "type": "invalid_request_error", "param": null, "code": null});
    (status, Json(json!({"error": error}))).into_response()
}
