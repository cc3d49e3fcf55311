//! Requests to a vLLM server, or to an agent beside it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use deepspec_core::env;
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};

use super::files::take_states;
use super::{Failure, ServedLimits, TOKEN_VARIABLE};

/// Oldest supported version of vLLM.
pub const MIN_VLLM_VERSION: (u64, u64) = (0, 25);
/// Why older versions are refused.
const WHY_NEWER: &str =
    "0.22 and 0.23 mix up tokens with prefix caching, and 0.24 returns zeros for hybrid models";
/// Newest version that the tests ran.
const TESTED_VERSION: &str = "0.32.0";
/// Version of the agent's protocol; its `/version` names it as `deepspec_agent`.
pub const AGENT_PROTOCOL: u64 = 1;
/// Timeout of probes.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest text of a server that is repeated in an error.
const MAX_QUOTED_CHARS: usize = 300;
/// Headers of an agent's answer.
const CHECKSUM_HEADER: &str = "x-deepspec-crc32";
const TOKEN_HEADER: &str = "x-deepspec-sampled-token";
const LOG_PROB_HEADER: &str = "x-deepspec-log-prob";

/// The HTTP client for all servers.
///
/// # Errors
/// If TLS cannot be set up.
pub fn http_client(limits: &ServedLimits) -> Result<Client, String> {
    deepspec_hub::prepare_tls();
    Client::builder()
        .http1_only()
        .connect_timeout(PROBE_TIMEOUT)
        .timeout(limits.request)
        .tcp_nodelay(true)
        .no_proxy()
        .build()
        .map_err(|error| format!("setting up the HTTP client: {error}"))
}

/// Name, version and limits of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerInfo {
    /// vLLM's version.
    pub version: String,
    /// Name of the model in requests.
    pub model: String,
    /// `max_model_len`, where the server reports it.
    pub max_model_len: Option<u64>,
    /// Whether an agent answers for the server.
    pub is_agent: bool,
}

/// A server's answer to one prompt.
#[derive(Debug)]
pub struct Served {
    /// The safetensors file with the states.
    pub file: Vec<u8>,
    /// The token that the server sampled at temperature 0.
    pub sampled: i64,
    /// Its log-probability, by the server.
    pub log_prob: f64,
}

/// A vLLM server with the hidden-states connector, or the agent beside one.
pub struct VllmServer {
    http: Client,
    url: String,
    folder: PathBuf,
    limits: ServedLimits,
    token: Option<String>,
}

impl VllmServer {
    /// The server at `url`, whose files appear in `folder`.
    pub fn new(http: &Client, url: &str, folder: &Path, limits: ServedLimits) -> Self {
        let (http, url, folder) = (http.clone(), url.to_string(), folder.to_path_buf());
        let token = env::read_secret(TOKEN_VARIABLE);
        if token.is_some() {
            env::warn_unencrypted_key(TOKEN_VARIABLE, &url);
        }
        Self { http, url, folder, limits, token }
    }

    /// Its base URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Asks the server for its version and model. `longest` is the number of tokens of the longest
    /// prompt.
    ///
    /// # Errors
    /// [`Failure::Unreachable`] if it does not answer. [`Failure::Final`] if it is no vLLM server,
    /// too old, or takes shorter prompts only.
    pub async fn probe(&self, longest: usize) -> Result<ServerInfo, Failure> {
        let version = self.get("/version").await?;
        let is_agent = match version["deepspec_agent"].as_u64() {
            None => false,
            Some(AGENT_PROTOCOL) => true,
            Some(other) => {
                return Err(
                    self.fail(format!("the agent speaks protocol {other}, expected {AGENT_PROTOCOL}"))
                );
            }
        };
        let Some(version) = version["version"].as_str().map(String::from) else {
            return Err(self.fail(format!("/version answers {version}, expected that of a vLLM server")));
        };
        check_version(&self.url, &version).map_err(Failure::Final)?;
        let models = self.get("/v1/models").await?;
        let model = &models["data"][0];
        let Some(name) = model["id"].as_str() else {
            return Err(self.fail(format!("/v1/models answers {models}, expected a model")));
        };
        let max_model_len = model["max_model_len"].as_u64();
        if let Some(room) = max_model_len.filter(|room| *room <= longest as u64) {
            return Err(self.fail(format!(
                "max_model_len {room} is too small; the longest sample has {longest} tokens, and vLLM samples one more"
            )));
        }
        Ok(ServerInfo { version, model: name.into(), max_model_len, is_agent })
    }

    /// Requests the states of a prompt.
    ///
    /// # Errors
    /// A [`Failure`], with the server and the problem. No file is left behind.
    pub async fn request(self: &Arc<Self>, info: &ServerInfo, ids: &[i32]) -> Result<Served, Failure> {
        if info.is_agent {
            return self.request_from_agent(ids).await;
        }
        let body = json!({
            "model": info.model, "prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 1,
            "return_token_ids": true, "stream": false,
        });
        let answer = self.post("/v1/completions", &body).await?;
        let answer: Value = answer.json().await.map_err(|error| self.unreachable(&error))?;
        let Some(path) = answer["kv_transfer_params"]["hidden_states_path"].as_str() else {
            return Err(self.fail(
                "the answer names no file of states; start vLLM with the hidden-states connector".into(),
            ));
        };
        // Waits for the file even if the answer is wrong, so that it is deleted and not left behind.
        let file = take_states(&self.folder, path, self.limits.file).await?;
        let choice = &answer["choices"][0];
        let echoed = choice["prompt_token_ids"].as_array().map(Vec::as_slice).unwrap_or_default();
        let sampled = choice["token_ids"][0].as_i64();
        let log_prob = choice["logprobs"]["token_logprobs"][0].as_f64();
        if !echoed.iter().map(Value::as_i64).eq(ids.iter().map(|&id| Some(i64::from(id)))) {
            return Err(Failure::Request(format!(
                "{}: the answer echoes other prompt tokens than were sent",
                self.url
            )));
        }
        match sampled.zip(log_prob) {
            Some((sampled, log_prob)) => Ok(Served { file, sampled, log_prob }),
            None => Err(self.fail("the answer has no token_ids and token_logprobs; expected vLLM's `return_token_ids` and `logprobs`".into())),
        }
    }

    async fn request_from_agent(&self, ids: &[i32]) -> Result<Served, Failure> {
        let answer = self.post("/states", &json!({ "ids": ids })).await?;
        let header = |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok());
        let checksum = header(CHECKSUM_HEADER).and_then(|text| u32::from_str_radix(text, 16).ok());
        let sampled = header(TOKEN_HEADER).and_then(|text| text.parse().ok());
        let log_prob = header(LOG_PROB_HEADER).and_then(|text| text.parse().ok());
        let Some(((checksum, sampled), log_prob)) = checksum.zip(sampled).zip(log_prob) else {
            return Err(self.fail("the agent's answer lacks its headers".into()));
        };
        let file = answer.bytes().await.map_err(|error| self.unreachable(&error))?.to_vec();
        if crc32(&file) != checksum {
            return Err(Failure::Request(format!("{}: the states were damaged on their way", self.url)));
        }
        Ok(Served { file, sampled, log_prob })
    }

    async fn get(&self, path: &str) -> Result<Value, Failure> {
        let request = self.http.get(format!("{}{path}", self.url)).timeout(PROBE_TIMEOUT);
        let response = self.send(request).await?;
        response
            .json()
            .await
            .map_err(|error| self.fail(format!("{path}: {error}; expected JSON of a vLLM server")))
    }

    async fn post(&self, path: &str, body: &Value) -> Result<Response, Failure> {
        self.send(self.http.post(format!("{}{path}", self.url)).json(body)).await
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response, Failure> {
        let request = match &self.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        };
        let response = request.send().await.map_err(|error| self.unreachable(&error))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let text = response.text().await.unwrap_or_default();
        let text: String =
            text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(MAX_QUOTED_CHARS).collect();
        let problem = format!("{}: HTTP {}: {text}", self.url, status.as_u16());
        Err(match status {
            StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => {
                Failure::Unreachable(problem)
            }
            StatusCode::UNAUTHORIZED => Failure::Final(format!(
                "{problem}; {TOKEN_VARIABLE} holds the token of the agent, or the API key of vLLM"
            )),
            // The engine has died; the process may be restarted.
            _ if status.is_server_error() && text.contains("EngineCore encountered") => {
                Failure::Unreachable(problem)
            }
            _ if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
                Failure::Request(problem)
            }
            _ => Failure::Final(problem),
        })
    }

    fn unreachable(&self, error: &reqwest::Error) -> Failure {
        let mut cause: &dyn std::error::Error = error;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        Failure::Unreachable(format!("{}: {cause}", self.url))
    }

    fn fail(&self, problem: String) -> Failure {
        Failure::Final(format!("{}: {problem}", self.url))
    }
}

impl Served {
    /// Status, headers and body of an agent's answer.
    pub fn into_agent_response(self) -> ([(&'static str, String); 3], Vec<u8>) {
        let headers = [
            (CHECKSUM_HEADER, format!("{:08x}", crc32(&self.file))),
            (TOKEN_HEADER, self.sampled.to_string()),
            (LOG_PROB_HEADER, self.log_prob.to_string()),
        ];
        (headers, self.file)
    }
}

fn crc32(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32IsoHdlc, bytes) as u32
}

/// Checks that the server at `url` runs a supported version of vLLM.
///
/// # Errors
/// If it is too old, with the reason.
pub fn check_version(url: &str, version: &str) -> Result<(), String> {
    match parse_version(version) {
        Some(found) if found < MIN_VLLM_VERSION => {
            let (major, minor) = MIN_VLLM_VERSION;
            return Err(format!("{url}: vLLM {version}; expected {major}.{minor} or newer: {WHY_NEWER}"));
        }
        Some(_) => {}
        None => tracing::warn!("{url}: vLLM {version} is a build of its own; {TESTED_VERSION} was tested"),
    }
    Ok(())
}

/// Major and minor version; `None` for a development build.
fn parse_version(version: &str) -> Option<(u64, u64)> {
    let mut parts = version.split('.');
    let (major, minor) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let is_dev = (major, minor) == (0, 1) && version.contains("dev");
    (!is_dev).then_some((major, minor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_number() {
        assert_eq!(parse_version("0.32.0"), Some((0, 32)));
        assert!(parse_version("0.9.2").unwrap() < MIN_VLLM_VERSION);
        assert!(parse_version("0.25.0rc1+cu129").unwrap() >= MIN_VLLM_VERSION);
        assert_eq!(parse_version("0.1.dev123+g0abc"), None);
        assert_eq!(parse_version("dev"), None);
    }
}
