//! HTTP client of one engine, which tries again where that may help.

use std::error::Error;
use std::time::Duration;

use anyhow::{Context, bail};
use deepspec_core::{env, usage};
use reqwest::redirect::Policy;
use reqwest::{RequestBuilder, StatusCode, Url};
use serde_json::Value;
use tokio::time::sleep;

/// Timeout for connections.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for an answer, which comes whole at its end.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3600);
/// Pauses before further attempts.
const RETRY_PAUSES: [Duration; 5] = [
    Duration::from_millis(250),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(4),
];
/// Most characters of a server's message to keep.
const MESSAGE_CHARS: usize = 200;

/// Client of one engine.
#[derive(Clone)]
pub struct Client {
    http: reqwest::Client,
    flag: &'static str,
    base: String,
    api_key: Option<String>,
}

/// A request without an answer.
struct Failure {
    problem: String,
    /// Whether another attempt may succeed.
    passes: bool,
}

impl Client {
    /// A client of the server at `url`, which `flag` names.
    ///
    /// # Errors
    /// A usage error if the URL is none.
    pub fn new(flag: &'static str, url: &str) -> anyhow::Result<Self> {
        let parsed = Url::parse(url).ok().filter(|parsed| matches!(parsed.scheme(), "http" | "https"));
        let Some(parsed) = parsed else {
            usage!("{flag} {url}: expected the address of an engine, such as http://127.0.0.1:8000")
        };
        deepspec_hub::prepare_tls();
        // One connection per request: servers close idle connections, and a request on a closed one
        // is lost.
        let mut http = reqwest::Client::builder()
            .http1_only()
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(ANSWER_TIMEOUT)
            .pool_max_idle_per_host(0)
            .tcp_nodelay(true)
            .tcp_keepalive(Duration::from_secs(30))
            // A redirected POST would become a GET.
            .redirect(Policy::none());
        let host = parsed.host_str().unwrap_or_default();
        if host == "localhost" || host == "[::1]" || host.starts_with("127.") {
            http = http.no_proxy();
        }
        env::warn_unencrypted_key("OPENAI_API_KEY", url);
        Ok(Self {
            http: http.build().context("setting up the HTTP client")?,
            flag,
            base: base_url(url).to_string(),
            api_key: env::read_secret("OPENAI_API_KEY"),
        })
    }

    /// The server's base URL.
    pub fn url(&self) -> &str {
        &self.base
    }

    /// The flag and the server's base URL, at the start of an error.
    pub fn name(&self) -> String {
        format!("{} {}", self.flag, self.base)
    }

    /// Text at `path`; None if the server has nothing there.
    ///
    /// # Errors
    /// Fails if the server cannot be reached.
    pub async fn get(&self, path: &str) -> anyhow::Result<Option<String>> {
        let mut pauses = RETRY_PAUSES.iter();
        loop {
            match self.send(self.http.get(format!("{}{path}", self.base))).await {
                Ok(text) => return Ok(Some(text)),
                Err((Some(status), failure)) if status.is_server_error() => match pauses.next() {
                    Some(pause) => sleep(*pause).await,
                    None => bail!("{}: {path}: {}", self.name(), failure.problem),
                },
                Err((Some(StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN), failure)) => {
                    bail!("{}: {path}: {}; give its key in OPENAI_API_KEY", self.name(), failure.problem)
                }
                Err((Some(_), _)) => return Ok(None),
                Err((None, failure)) => bail!(
                    "{} cannot be reached: {}; start the engine there, or correct the address",
                    self.name(),
                    failure.problem
                ),
            }
        }
    }

    /// JSON at `path`; None if the server has none there.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn get_json(&self, path: &str) -> anyhow::Result<Option<Value>> {
        Ok(self.get(path).await?.and_then(|text| serde_json::from_str(&text).ok()))
    }

    /// The answer to `body`, the request for `sample`.
    ///
    /// # Errors
    /// Fails if the server refuses the request, or does not answer several attempts.
    pub async fn post(&self, path: &str, body: &Value, sample: &str) -> anyhow::Result<String> {
        let mut pauses = RETRY_PAUSES.iter();
        loop {
            let request = self.http.post(format!("{}{path}", self.base)).json(body);
            let failure = match self.send(request).await {
                Ok(text) => return Ok(text),
                Err((_, failure)) => failure,
            };
            let problem = failure.problem;
            match pauses.next() {
                _ if !failure.passes => bail!("{} refuses {sample}: {problem}", self.name()),
                Some(pause) => {
                    tracing::debug!("{sample}: {problem}; asking again");
                    sleep(*pause).await;
                }
                None => bail!(
                    "{} does not answer {sample} in {} attempts: {problem}; start the engine again, and the same \
                     command goes on from the answers that are there",
                    self.name(),
                    RETRY_PAUSES.len() + 1
                ),
            }
        }
    }

    async fn send(&self, request: RequestBuilder) -> Result<String, (Option<StatusCode>, Failure)> {
        let request = match &self.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        };
        let broken = |error: reqwest::Error| (None, Failure { problem: root_cause(&error), passes: true });
        let response = request.send().await.map_err(broken)?;
        let status = response.status();
        let text = match response.text().await {
            Ok(text) => text,
            // An error status counts even if its body cannot be read.
            Err(_) if !status.is_success() => String::new(),
            Err(error) => return Err(broken(error)),
        };
        if status.is_success() {
            return Ok(text);
        }
        let busy = [StatusCode::TOO_MANY_REQUESTS, StatusCode::REQUEST_TIMEOUT];
        let problem = format!("HTTP {}: {}", status.as_u16(), message(&text));
        Err((Some(status), Failure { problem, passes: status.is_server_error() || busy.contains(&status) }))
    }
}

fn base_url(url: &str) -> &str {
    url.trim_end_matches('/').trim_end_matches("/v1").trim_end_matches('/')
}

/// The message in an error's body, in one short line.
fn message(text: &str) -> String {
    let json: Value = serde_json::from_str(text).unwrap_or_default();
    let named = [&json["error"]["message"], &json["message"], &json["detail"], &json["error"]];
    let words = named.into_iter().find_map(Value::as_str).unwrap_or(text);
    let line = words.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.is_empty() { "no message".into() } else { line.chars().take(MESSAGE_CHARS).collect() }
}

fn root_cause(error: &reqwest::Error) -> String {
    let mut cause: &dyn Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked_and_cut_to_their_base() {
        assert_eq!(Client::new("--server", "http://a:1/v1/").unwrap().name(), "--server http://a:1");
        let refused = Client::new("--server", "localhost:8000").err().unwrap().to_string();
        assert!(refused.contains("--server localhost:8000: expected the address"), "{refused}");
    }

    #[test]
    fn messages_are_found_in_every_form() {
        assert_eq!(message(r#"{"error": {"message": "too\nlong"}}"#), "too long");
        assert_eq!(message(r#"{"detail": "Not Found"}"#), "Not Found");
        assert_eq!(message("  "), "no message");
        assert_eq!(message(&"x".repeat(900)).len(), MESSAGE_CHARS);
    }
}
