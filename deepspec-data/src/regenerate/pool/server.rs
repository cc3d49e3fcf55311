//! One OpenAI-compatible server over HTTP.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use deepspec_capture::served::check_version;
use deepspec_core::usage;
use reqwest::header::CONTENT_TYPE;
use reqwest::redirect::Policy;
use reqwest::{RequestBuilder, Response, Url};
use serde_json::{Map, Value};
use tokio::sync::Notify;

use super::super::answer::{Answer, AnswerError, states_path_of_unusable};
use super::extensions::{Extensions, FieldSet};
use super::failure::Failure;
use super::server_state::{CircuitState, ServerState};

/// Timeout for connections and for probes.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest body of an answer, in bytes.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// Longest body of an error response, in bytes.
const MAX_ERROR_BYTES: usize = 1 << 20;

/// A server with its state.
pub struct Server {
    http: reqwest::Client,
    base: String,
    api_key: Option<String>,
    /// Slots and circuit breaker of the server.
    pub state: Arc<ServerState>,
    /// Optional fields that it accepts or rejects.
    pub extensions: Extensions,
    /// Cancels all requests in progress when the circuit opens.
    pub cancelled: Notify,
    /// Whether it said that it is a vLLM server of a supported version.
    has_supported_version: AtomicBool,
}

/// Why hidden states cannot be requested from a server.
pub enum VersionProblem {
    /// It did not say its version.
    Unknown(String),
    /// It is no vLLM server, or too old.
    Unsupported(String),
}

/// Checks server URLs before any request.
pub fn check_urls(servers: &[String]) -> anyhow::Result<()> {
    for (index, server) in servers.iter().enumerate() {
        match Url::parse(server) {
            Ok(url) if matches!(url.scheme(), "http" | "https") => {}
            Ok(url) => usage!("--server {server}: expected http:// or https://, found {}:", url.scheme()),
            Err(error) => usage!("--server {server}: {error}; expected a URL such as http://127.0.0.1:30000"),
        }
        if servers[..index].iter().any(|earlier| base_url(earlier) == base_url(server)) {
            usage!("--server {server} is given twice");
        }
    }
    Ok(())
}

/// The HTTP client for all servers.
pub fn client(servers: &[String], timeout: Duration, connections: usize) -> anyhow::Result<reqwest::Client> {
    deepspec_hub::prepare_tls();
    let mut http = reqwest::Client::builder()
        .http1_only()
        .connect_timeout(CONNECT_TIMEOUT)
        .timeout(timeout)
        .pool_max_idle_per_host(connections)
        .tcp_nodelay(true)
        .tcp_keepalive(Duration::from_secs(30))
        // A redirected POST would become a GET.
        .redirect(Policy::none());
    if servers.iter().all(|server| is_local(server)) {
        http = http.no_proxy();
    }
    http.build().context("setting up the HTTP client")
}

impl Server {
    /// A server by its base URL, with or without `/v1`.
    pub fn new(http: &reqwest::Client, url: &str, api_key: Option<String>, slots: usize) -> Self {
        Self {
            http: http.clone(),
            base: base_url(url).to_string(),
            api_key,
            state: ServerState::new(slots),
            extensions: Extensions::default(),
            cancelled: Notify::new(),
            has_supported_version: AtomicBool::new(false),
        }
    }

    /// Base URL of the server.
    pub fn url(&self) -> &str {
        &self.base
    }

    /// Probes the server. Any HTTP response counts, because some servers cannot list models, except
    /// a proxy's 502 to 504.
    pub async fn probe(&self) -> Result<(), String> {
        let url = format!("{}/v1/models", self.base);
        match self.authorised(self.http.get(&url)).timeout(CONNECT_TIMEOUT).send().await {
            Ok(response) if matches!(response.status().as_u16(), 502..=504) => {
                Err(format!("{url}: HTTP {}", response.status().as_u16()))
            }
            Ok(_) => Ok(()),
            Err(error) => Err(format!("{url}: {}", Failure::transport(&error))),
        }
    }

    /// Checks that this is a vLLM server whose hidden states are right. Asks until it has answered once.
    pub async fn check_vllm_version(&self) -> Result<(), VersionProblem> {
        if self.has_supported_version.load(Ordering::Relaxed) {
            return Ok(());
        }
        let url = format!("{}/version", self.base);
        let unknown = |problem: String| VersionProblem::Unknown(format!("{url}: {problem}"));
        let sent = self.authorised(self.http.get(&url)).timeout(CONNECT_TIMEOUT).send().await;
        let response = sent.map_err(|error| unknown(Failure::transport(&error).to_string()))?;
        if response.status().is_server_error() {
            return Err(unknown(format!("HTTP {}", response.status().as_u16())));
        }
        let answer = response.json::<Value>().await.unwrap_or_default();
        let Some(version) = answer["version"].as_str() else {
            let problem = format!("{url} is not that of a vLLM server; only vLLM returns hidden states");
            return Err(VersionProblem::Unsupported(problem));
        };
        check_version(&self.base, version).map_err(VersionProblem::Unsupported)?;
        self.has_supported_version.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Whether the circuit is open, so that a new request would be cancelled.
    pub fn is_circuit_open(&self) -> bool {
        self.state.circuit() == CircuitState::Open
    }

    /// Whether the server ever answered.
    pub fn has_answered(&self) -> bool {
        self.state.stats().answered > 0
    }

    /// Sends one request with the optional fields `sent`. Cancels it if the circuit opens.
    pub async fn ask_once(&self, body: &Map<String, Value>, sent: FieldSet) -> Result<Answer, Failure> {
        let cancelled = self.cancelled.notified();
        tokio::pin!(cancelled);
        // Subscribes before checking the circuit, so that no notification is missed.
        cancelled.as_mut().enable();
        if self.is_circuit_open() {
            return Err(Failure::cancelled());
        }
        let stops = match body.get("stop") {
            Some(Value::Array(stops)) => stops.iter().filter_map(Value::as_str).collect(),
            Some(Value::String(stop)) => vec![stop.as_str()],
            _ => vec![],
        };
        tokio::select! {
            answer = self.ask(Extensions::body_with_fields(body, sent), &stops) => answer,
            () = cancelled => Err(Failure::cancelled()),
        }
    }

    async fn ask(&self, body: Vec<u8>, stops: &[&str]) -> Result<Answer, Failure> {
        let request = self.http.post(format!("{}/v1/chat/completions", self.base));
        let request = self.authorised(request).header(CONTENT_TYPE, "application/json").body(body);
        let response = request.send().await.map_err(|error| Failure::transport(&error))?;
        let (status, headers) = (response.status(), response.headers().clone());
        let most = if status.is_success() { MAX_ANSWER_BYTES } else { MAX_ERROR_BYTES };
        let text = match read_text(response, most).await {
            Ok(text) => text,
            // An error status counts even if its body cannot be read.
            Err(_) if !status.is_success() => String::new(),
            Err(failure) => return Err(failure),
        };
        if status.is_success() {
            Answer::parse(&text, stops).map_err(|why| {
                let failure = match why {
                    AnswerError::Invalid(problem) => Failure::invalid_response(problem, &text),
                    AnswerError::Empty => Failure::empty(),
                    AnswerError::BrokenOff(reason) => Failure::broken_off(reason),
                };
                Failure { states_path: states_path_of_unusable(&text), ..failure }
            })
        } else {
            Err(Failure::status(status, &headers, text))
        }
    }

    fn authorised(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }
}

/// A body as text, if it has at most `most` bytes.
async fn read_text(mut response: Response, most: usize) -> Result<String, Failure> {
    let mut bytes = vec![];
    while let Some(chunk) = response.chunk().await.map_err(|error| Failure::transport(&error))? {
        if bytes.len() + chunk.len() > most {
            return Err(Failure::invalid_response(
                &format!("the answer is longer than {} MB", most >> 20),
                "",
            ));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn base_url(url: &str) -> &str {
    url.trim_end_matches('/').trim_end_matches("/v1").trim_end_matches('/')
}

fn is_local(server: &str) -> bool {
    let host = Url::parse(server).ok().and_then(|url| url.host_str().map(str::to_owned));
    host.is_some_and(|host| host == "localhost" || host == "[::1]" || host.starts_with("127."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_checked_and_cut_to_their_base() {
        assert_eq!(base_url("http://a:1/v1/"), "http://a:1");
        assert_eq!(base_url("http://a:1/x"), "http://a:1/x");
        let says = |servers: &[&str], words: &str| {
            let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
            let problem = check_urls(&servers).unwrap_err().to_string();
            assert!(problem.contains(words), "{problem}");
        };
        says(&["ftp://a"], "found ftp:");
        says(&["a:1"], "expected");
        says(&["http://a:1", "http://b", "http://a:1/v1/"], "given twice");
        assert!(is_local("http://127.0.0.1:3") && is_local("http://localhost") && !is_local("http://a"));
    }
}
