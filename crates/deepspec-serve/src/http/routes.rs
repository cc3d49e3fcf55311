//! The routes of the server and their handlers.

use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::{BodyDataStream, HttpBody};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures::StreamExt;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use super::auth::{AccessPolicy, check_content_type};
use super::respond::{self, ResponseHeader};
use crate::{ChatError, ChatModel, ChatRequest, ResponseStream, parse_chat_request, random_u64};

/// Bodies up to this many bytes are read before a rejection. A client that is cut off while sending
/// may miss the response.
const DRAIN_BODY_BYTES: u64 = 1 << 16;

/// The rest of a body that is too large is dropped up to this multiple of the limit, for that reason.
const DRAIN_LIMIT_FACTOR: usize = 4;

/// Limits of clients.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Requests that may wait for a slot.
    pub queue: usize,
    /// Bytes of a request's body.
    pub body: usize,
    /// Timeout for the head of a request, and again for its body.
    pub client_timeout: Duration,
    /// Most open connections.
    pub connections: usize,
}

/// State shared by the handlers.
pub struct App {
    model: ChatModel,
    name: String,
    slots: usize,
    started: u64,
    limits: Limits,
    access: AccessPolicy,
    /// Limits requests, from before the body is read to the end of the answer. This bounds the
    /// memory of bodies and answers.
    request_permits: Arc<Semaphore>,
    /// Limits requests that are parsed, rendered and tokenised at once; each uses one core.
    tokenize_permits: Arc<Semaphore>,
}

impl App {
    /// Creates the state. `name` is the model's name in requests, and `slots` the number of
    /// concurrent answers.
    pub fn new(model: ChatModel, name: String, slots: usize, limits: Limits, access: AccessPolicy) -> Self {
        let request_permits = slots.saturating_add(limits.queue).min(Semaphore::MAX_PERMITS);
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        Self {
            model,
            name,
            slots,
            started: unix_seconds(),
            limits,
            access,
            request_permits: Arc::new(Semaphore::new(request_permits)),
            tokenize_permits: Arc::new(Semaphore::new(cores)),
        }
    }

    /// Takes a permit for a request.
    fn acquire_permit(&self) -> Result<OwnedSemaphorePermit, ChatError> {
        let permit = Arc::clone(&self.request_permits).try_acquire_owned();
        permit.map_err(|_| ChatError::Busy { slots: self.slots, queue: self.limits.queue })
    }

    /// Reads the body of a request, or returns the error response.
    async fn read_body(&self, request: Request) -> Result<Vec<u8>, Response> {
        let Limits { body: limit, client_timeout, .. } = self.limits;
        let mut chunks = request.into_body().into_data_stream();
        let deadline = Instant::now() + client_timeout;
        match timeout_at(deadline, read_at_most(&mut chunks, limit)).await {
            Ok(Ok(Some(body))) => Ok(body),
            Ok(Ok(None)) => {
                // A client that sends no more, or too slowly, gets the same answer.
                let rest = drain(&mut chunks, limit.saturating_mul(DRAIN_LIMIT_FACTOR));
                let _ = timeout_at(deadline, rest).await;
                let most = limit >> 20;
                let large =
                    format!("the body is larger than {most} MB, which --max-body of this server allows");
                Err(respond::bad_request_response(StatusCode::PAYLOAD_TOO_LARGE, &large))
            }
            Ok(Err(error)) => {
                let broken = format!("the body could not be read: {error}");
                Err(respond::bad_request_response(StatusCode::BAD_REQUEST, &broken))
            }
            Err(_) => {
                let late = format!("the body did not come within {} seconds", client_timeout.as_secs());
                Err(respond::bad_request_response(StatusCode::REQUEST_TIMEOUT, &late))
            }
        }
    }

    /// Starts an answer. Rendering and tokenising long conversations takes time, so this runs
    /// outside the connection threads, for at most one request per core.
    async fn start(self: &Arc<Self>, body: Vec<u8>) -> Result<(ChatRequest, ResponseStream), ChatError> {
        let gone = |error: &dyn std::error::Error| ChatError::Internal(error.to_string());
        let permit =
            Arc::clone(&self.tokenize_permits).acquire_owned().await.map_err(|error| gone(&error))?;
        let app = Arc::clone(self);
        let start = move || {
            let _permit = permit;
            let request = parse_chat_request(&body, &app.name, app.model.defaults(), random_u64())?;
            let reply = app.model.start(&request)?;
            Ok((request, reply))
        };
        tokio::task::spawn_blocking(start).await.map_err(|error| gone(&error))?
    }
}

/// Reads a body of at most `limit` bytes. Returns `None` as soon as it is larger.
async fn read_at_most(chunks: &mut BodyDataStream, limit: usize) -> Result<Option<Vec<u8>>, axum::Error> {
    let mut body = vec![];
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        if body.len() + chunk.len() > limit {
            return Ok(None);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(Some(body))
}

/// Reads and drops the rest of a body, up to about `limit` bytes.
async fn drain(chunks: &mut BodyDataStream, limit: usize) {
    let mut dropped = 0;
    while dropped <= limit
        && let Some(Ok(chunk)) = chunks.next().await
    {
        dropped += chunk.len();
    }
}

/// Seconds since 1970.
fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Builds the router with all routes.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/v1/chat/completions", post(chat_completions))
        .fallback(async || {
            respond::bad_request_response(
                StatusCode::NOT_FOUND,
                "no such path; this server has /v1/chat/completions, /v1/models, /health and /metrics",
            )
        })
        .method_not_allowed_fallback(async || {
            respond::bad_request_response(StatusCode::METHOD_NOT_ALLOWED, "this path takes another method")
        })
        .layer(from_fn_with_state(Arc::clone(&app), check_access))
        .with_state(app)
}

/// Checks access; health and metrics need no API key.
async fn check_access(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let is_open = matches!(request.uri().path(), "/health" | "/metrics");
    let access = if is_open { AccessPolicy { key: None, ..app.access.clone() } } else { app.access.clone() };
    match access.check(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(refusal) => *refusal,
    }
}

async fn health(State(app): State<Arc<App>>) -> Response {
    let stats = app.model.engine_stats();
    let waited = |quantile| stats.wait_quantile(quantile).map(|wait| wait.as_secs_f64());
    let body = json!({
        "status": "ok",
        "slots": app.slots,
        "running": stats.running.load(Ordering::Relaxed),
        "queued": stats.queued.load(Ordering::Relaxed),
        "generated_tokens": stats.generated.load(Ordering::Relaxed),
        "queue_seconds": {"p50": waited(0.5), "p99": waited(0.99)},
    });
    Json(body).into_response()
}

/// The Prometheus metrics page.
async fn metrics(State(app): State<Arc<App>>) -> Response {
    match app.model.engine_stats().metrics.render_page() {
        Ok(page) => ([(CONTENT_TYPE, "text/plain; version=0.0.4")], page).into_response(),
        Err(error) => respond::bad_request_response(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

async fn models(State(app): State<Arc<App>>) -> Response {
    let context = app.model.context();
    let model = json!({"id": app.name, "object": "model", "created": app.started, "owned_by": "deepspec", "max_model_len": context});
    Json(json!({"object": "list", "data": [model]})).into_response()
}

async fn chat_completions(State(app): State<Arc<App>>, request: Request) -> Response {
    if let Err(refusal) = check_content_type(request.headers()) {
        return *refusal;
    }
    answer(&app, request).await.unwrap_or_else(|refused| refused)
}

async fn answer(app: &Arc<App>, request: Request) -> Result<Response, Response> {
    let refused = |error: ChatError| {
        tracing::debug!("refused: {error}");
        respond::error_response(&error)
    };
    let permit = match app.acquire_permit() {
        Ok(permit) => permit,
        Err(error) => {
            if request.body().size_hint().upper().is_some_and(|bytes| bytes <= DRAIN_BODY_BYTES) {
                app.read_body(request).await?;
            }
            return Err(refused(error));
        }
    };
    let body = app.read_body(request).await?;
    let (request, mut reply) = app.start(body).await.map_err(refused)?;
    let header = ResponseHeader {
        id: format!("chatcmpl-{:016x}", random_u64()),
        created: unix_seconds(),
        model: app.name.clone(),
    };
    if request.stream {
        return Ok(respond::stream_response(header, reply, permit, request.include_usage));
    }
    let whole = reply.collect().await.map_err(refused)?;
    Ok(Json(respond::completion_to_json(&header, &whole, &reply, request.return_token_ids)).into_response())
}
