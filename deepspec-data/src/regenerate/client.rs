//! Asks OpenAI-compatible servers in turn, and again where that may help.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use deepspec_core::{env, usage};
use reqwest::{RequestBuilder, StatusCode, Url};
use serde_json::Value;

use super::asker::{Answer, AskError};

/// Attempts per request.
const ATTEMPTS: u32 = 5;
/// Pause before the second attempt; it doubles from one to the next.
const BACK_OFF: Duration = Duration::from_millis(250);
/// How long a server may take to accept a connection or to say that it is there.
const CONNECT: Duration = Duration::from_secs(10);
/// Longest part of a server's message that is kept.
const MESSAGE_CHARS: usize = 300;

/// Servers that answer, one after the other.
pub struct Client {
    http: reqwest::Client,
    servers: Vec<String>,
    next: AtomicUsize,
    api_key: Option<String>,
}

/// What an attempt without an answer means.
enum Failure {
    /// The server was not reached.
    Unreachable(String),
    /// Another attempt may succeed.
    Passing(String),
    /// This request is refused.
    Refused(String),
    /// Every request would be refused.
    Fatal(String),
}

/// Checks server URLs before anything is asked.
///
/// # Errors
/// A usage error naming the URL.
pub fn check_urls(servers: &[String]) -> anyhow::Result<()> {
    for server in servers {
        match Url::parse(server) {
            Ok(url) if matches!(url.scheme(), "http" | "https") => {}
            Ok(url) => usage!("--server {server}: expected http:// or https://, found {}:", url.scheme()),
            Err(error) => usage!("--server {server}: {error}; expected a URL such as http://127.0.0.1:30000"),
        }
    }
    Ok(())
}

impl Client {
    /// A client of servers given by base URL, with or without `/v1`.
    ///
    /// # Errors
    /// If TLS cannot be set up.
    pub fn new(servers: &[String], timeout: Duration, concurrency: usize) -> anyhow::Result<Self> {
        let mut http = reqwest::Client::builder()
            .connect_timeout(CONNECT)
            .timeout(timeout)
            .pool_max_idle_per_host(concurrency)
            .tcp_nodelay(true);
        if servers.iter().all(|server| is_local(server)) {
            http = http.no_proxy();
        }
        let base = |server: &String| server.trim_end_matches('/').trim_end_matches("/v1").to_string();
        Ok(Self {
            http: http.build().context("setting up the HTTP client")?,
            servers: servers.iter().map(base).collect(),
            next: AtomicUsize::new(0),
            api_key: env::api_key(),
        })
    }

    /// Checks that at least one server is there; warns of those that are not.
    ///
    /// # Errors
    /// If none is.
    pub async fn check(&self) -> anyhow::Result<()> {
        let found = futures::future::join_all(self.servers.iter().map(|server| self.probe(server))).await;
        let down: Vec<String> = found.into_iter().filter_map(Result::err).collect();
        if down.len() == self.servers.len() {
            bail!("server down: {}", down.join("; "));
        }
        down.iter().for_each(|problem| tracing::warn!("server down: {problem}"));
        Ok(())
    }

    /// Any HTTP answer will do: what a server can do is seen when it is asked.
    async fn probe(&self, server: &str) -> Result<(), String> {
        let url = format!("{server}/v1/models");
        let sent = self.authorised(self.http.get(&url)).timeout(CONNECT).send().await;
        sent.map(drop).map_err(|error| format!("{url}: {}", chain(&error)))
    }

    /// Asks one server after the other until one answers.
    ///
    /// # Errors
    /// See [`AskError`].
    pub async fn ask(&self, body: &Value) -> Result<Answer, AskError> {
        let (mut attempt, mut pause) = (1, BACK_OFF);
        loop {
            let turn = self.next.fetch_add(1, Ordering::Relaxed);
            let server = &self.servers[turn % self.servers.len()];
            let (unreachable, problem) = match self.attempt(server, body).await {
                Ok(answer) => return Ok(answer),
                Err(Failure::Refused(problem)) => return Err(AskError::Row(format!("{server}: {problem}"))),
                Err(Failure::Fatal(problem)) => return Err(AskError::Run(anyhow!("{server}: {problem}"))),
                Err(Failure::Passing(problem)) => (false, format!("{server}: {problem}")),
                Err(Failure::Unreachable(problem)) => (true, format!("{server}: {problem}")),
            };
            tracing::debug!("attempt {attempt} of {ATTEMPTS}: {problem}");
            if attempt == ATTEMPTS {
                if unreachable {
                    self.check().await.map_err(AskError::Run)?;
                }
                return Err(AskError::Row(problem));
            }
            tokio::time::sleep(pause).await;
            (attempt, pause) = (attempt + 1, 2 * pause);
        }
    }

    async fn attempt(&self, server: &str, body: &Value) -> Result<Answer, Failure> {
        let request = self.authorised(self.http.post(format!("{server}/v1/chat/completions"))).json(body);
        let response = request.send().await.map_err(|error| {
            if error.is_connect() {
                Failure::Unreachable(chain(&error))
            } else {
                Failure::Passing(chain(&error))
            }
        })?;
        let status = response.status();
        let text = response.text().await.map_err(|error| Failure::Passing(chain(&error)))?;
        if status.is_success() {
            return read(&text)
                .map_err(|problem| Failure::Passing(format!("{problem}: {}", shortened(&text))));
        }
        let problem = format!("HTTP {}: {}", status.as_u16(), complaint(&text));
        Err(match status {
            StatusCode::UNAUTHORIZED
            | StatusCode::FORBIDDEN
            | StatusCode::NOT_FOUND
            | StatusCode::METHOD_NOT_ALLOWED => Failure::Fatal(problem),
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => Failure::Passing(problem),
            _ if status.is_client_error() => Failure::Refused(problem),
            _ => Failure::Passing(problem),
        })
    }

    fn authorised(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }
}

fn is_local(server: &str) -> bool {
    let host = Url::parse(server).ok().and_then(|url| url.host_str().map(str::to_owned));
    host.is_some_and(|host| host == "localhost" || host == "[::1]" || host.starts_with("127."))
}

/// Reads a chat completion.
fn read(text: &str) -> Result<Answer, &'static str> {
    let completion: Value = serde_json::from_str(text).map_err(|_| "the answer is not JSON")?;
    let message = &completion["choices"][0]["message"];
    let reasoning = ["reasoning_content", "reasoning"].iter().find_map(|&field| message[field].as_str());
    let content = match &message["content"] {
        Value::String(content) => content.clone(),
        // All the tokens went into thoughts.
        Value::Null if reasoning.is_some() => String::new(),
        _ => return Err("the answer has no text"),
    };
    let tokens = completion["usage"]["completion_tokens"].as_u64().unwrap_or(0);
    Ok(Answer::new(content, reasoning.map(str::to_owned), tokens))
}

/// What a server says about a request that it refuses.
fn complaint(text: &str) -> String {
    let json: Value = serde_json::from_str(text).unwrap_or_default();
    let said = [&json["error"]["message"], &json["message"], &json["error"], &json["detail"]];
    match said.into_iter().find(|said| !said.is_null()) {
        Some(Value::String(said)) => shortened(said),
        Some(other) => shortened(&other.to_string()),
        None => shortened(text),
    }
}

fn shortened(text: &str) -> String {
    let text = text.trim();
    match text.char_indices().nth(MESSAGE_CHARS) {
        Some((end, _)) => format!("{} …", &text[..end]),
        None => text.to_string(),
    }
}

/// An error and its causes; reqwest's own message hides them, and the URL is named by the caller.
fn chain(error: &reqwest::Error) -> String {
    let mut causes = vec![];
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        causes.push(error.to_string());
        cause = error.source();
    }
    if error.is_timeout() {
        return "no answer in time".into();
    }
    causes.pop().unwrap_or_else(|| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn answers_are_read_with_their_thoughts() {
        let completion = |message: Value| {
            json!({"choices": [{"message": message}], "usage": {"completion_tokens": 3}}).to_string()
        };
        let answer = read(&completion(json!({"content": "a", "reasoning": "b"}))).unwrap();
        assert_eq!(
            (answer.message.content.as_str(), answer.message.reasoning_content.as_deref(), answer.tokens),
            ("a", Some("b"), 3)
        );
        let thoughts = read(&completion(json!({"content": null, "reasoning_content": "b"}))).unwrap();
        assert_eq!(thoughts.message.content, "");
        let plain = read(&completion(json!({"content": "a", "reasoning_content": null}))).unwrap();
        assert_eq!(plain.message.reasoning_content, None);
        for broken in ["", "[]", "{\"choices\":[]}", &completion(json!({"content": null}))] {
            assert!(read(broken).is_err(), "{broken}");
        }
    }

    #[test]
    fn complaints_are_found_in_all_common_shapes() {
        assert_eq!(complaint(r#"{"error": {"message": "too long"}}"#), "too long");
        assert_eq!(complaint(r#"{"detail": "Unprocessable"}"#), "Unprocessable");
        assert_eq!(complaint("<html>"), "<html>");
        assert!(complaint(&"x".repeat(1000)).chars().count() < 310);
    }
}
