//! A small HTTP client for tests, and a fake server with prepared answers.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::process::DEADLINE;

/// A client with its threads.
pub struct Http {
    pub runtime: Runtime,
    pub client: reqwest::Client,
}

impl Http {
    pub fn new() -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder().no_proxy().timeout(DEADLINE).build().unwrap();
        Self { runtime: Runtime::new().unwrap(), client }
    }

    pub fn get(&self, url: &str) -> Value {
        self.runtime.block_on(async { self.client.get(url).send().await.unwrap().json().await.unwrap() })
    }

    /// Posts any text to the chat completions endpoint.
    pub fn post_text(&self, server: &str, body: String) -> (u16, String) {
        self.runtime.block_on(post_text(&self.client, server, body))
    }

    /// Posts a request without streaming, which must succeed.
    #[track_caller]
    pub fn complete(&self, server: &str, body: &Value) -> Value {
        let (status, text) = self.post_text(server, body.to_string());
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).unwrap()
    }

    /// Posts many requests concurrently.
    pub fn complete_together(&self, server: &str, bodies: &[Value]) -> Vec<Value> {
        let sent = bodies.iter().map(|body| post_text(&self.client, server, body.to_string()));
        let answers = self.runtime.block_on(futures::future::join_all(sent));
        answers.into_iter().map(|(_, text)| serde_json::from_str(&text).unwrap()).collect()
    }

    /// Posts a request for a streamed answer and returns the data of its events.
    pub fn stream(&self, server: &str, mut body: Value) -> Vec<String> {
        body["stream"] = json!(true);
        let (status, text) = self.post_text(server, body.to_string());
        assert_eq!(status, 200, "{text}");
        text.lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned).collect()
    }
}

async fn post_text(client: &reqwest::Client, server: &str, body: String) -> (u16, String) {
    let request =
        client.post(format!("{server}/v1/chat/completions")).header("content-type", "application/json");
    let response = request.body(body).send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

/// A greedy request to the tiny target with one user message, without thinking.
pub fn ask(text: &str, max_tokens: usize) -> Value {
    json!({
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "chat_template_kwargs": {"enable_thinking": false},
    })
}

/// The text of a completion.
pub fn content(completion: &Value) -> &str {
    completion["choices"][0]["message"]["content"].as_str().unwrap()
}

/// A completion as a server would send it.
pub fn completion(message: Value) -> Response {
    Json(json!({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": {"completion_tokens": 3}})).into_response()
}

/// An error as a server would send it.
pub fn error(status: u16, message: &str) -> Response {
    (StatusCode::from_u16(status).unwrap(), Json(json!({"error": {"message": message}}))).into_response()
}

/// A server that answers the n-th chat completion request with `answer(n, body)` and records the
/// bodies.
pub struct Fake {
    pub url: String,
    pub bodies: Arc<Mutex<Vec<Value>>>,
    _runtime: Runtime,
}

impl Fake {
    pub fn start<F, A>(answer: F) -> Self
    where
        F: Fn(usize, Value) -> A + Clone + Send + Sync + 'static,
        A: Future<Output = Response> + Send,
    {
        let runtime = Runtime::new().unwrap();
        let bodies = Arc::new(Mutex::new(vec![]));
        let seen = Arc::clone(&bodies);
        let chat = async move |body: Bytes| {
            let body: Value = serde_json::from_slice(&body).unwrap();
            let number = {
                let mut seen = seen.lock().unwrap();
                seen.push(body.clone());
                seen.len() - 1
            };
            answer(number, body).await
        };
        let models = async || Json(json!({"object": "list", "data": []}));
        let app = Router::new().route("/v1/models", get(models)).route("/v1/chat/completions", post(chat));
        let listener =
            runtime.block_on(tokio::net::TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0)))).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        runtime.spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { url, bodies, _runtime: runtime }
    }
}
