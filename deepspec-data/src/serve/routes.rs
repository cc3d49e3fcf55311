//! What the server answers to which request.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::json;

use super::respond::{self, Heading};
use crate::chat::{self, ChatError, ChatModel};

/// Largest request body in bytes.
const BODY_LIMIT: usize = 64 << 20;

/// What the handlers share.
pub struct App {
    model: ChatModel,
    name: String,
    slots: usize,
    started: u64,
}

impl App {
    /// A model, the name that requests use for it, and how many of them it answers at once.
    pub fn new(model: ChatModel, name: String, slots: usize) -> Self {
        Self { model, name, slots, started: now() }
    }
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// All routes.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/v1/models", get(models))
        .route("/v1/chat/completions", post(chat_completions))
        .fallback(async || {
            respond::failure(
                StatusCode::NOT_FOUND,
                "no such path; this server has /v1/chat/completions, /v1/models and /health",
            )
        })
        .method_not_allowed_fallback(async || {
            respond::failure(StatusCode::METHOD_NOT_ALLOWED, "this path takes another method")
        })
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .with_state(app)
}

async fn health(State(app): State<Arc<App>>) -> Response {
    let load = app.model.load_now();
    let body = json!({
        "status": "ok",
        "slots": app.slots,
        "running": load.running.load(Ordering::Relaxed),
        "queued": load.queued.load(Ordering::Relaxed),
        "generated_tokens": load.generated.load(Ordering::Relaxed),
    });
    Json(body).into_response()
}

async fn models(State(app): State<Arc<App>>) -> Response {
    let context = app.model.context();
    let model = json!({"id": app.name, "object": "model", "created": app.started, "owned_by": "deepspec", "max_model_len": context});
    Json(json!({"object": "list", "data": [model]})).into_response()
}

async fn chat_completions(State(app): State<Arc<App>>, body: Result<Bytes, BytesRejection>) -> Response {
    let body = match body {
        Ok(body) => body,
        Err(rejection) => return respond::failure(rejection.status(), &rejection.body_text()),
    };
    match answer(&app, &body).await {
        Ok(response) => response,
        Err(error) => {
            tracing::debug!("refused: {error}");
            respond::refusal(&error)
        }
    }
}

async fn answer(app: &App, body: &[u8]) -> Result<Response, ChatError> {
    let request = chat::parse(body, &app.name, chat::fresh_number())?;
    let mut reply = app.model.start(&request)?;
    let heading = Heading {
        id: format!("chatcmpl-{:016x}", chat::fresh_number()),
        created: now(),
        model: app.name.clone(),
    };
    if request.stream {
        return Ok(respond::stream(heading, reply, request.include_usage));
    }
    let whole = reply.collect().await?;
    Ok(Json(respond::completion(&heading, &whole, &reply)).into_response())
}
