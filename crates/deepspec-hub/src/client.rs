//! HTTP requests to the hub: authentication, retries, and errors by status code.

use std::ops::Range;
use std::thread;
use std::time::Duration;

use ureq::config::RedirectAuthHeaders;
use ureq::http::{HeaderMap, Response, StatusCode, Uri, header};
use ureq::{Agent, Body};

use crate::settings::RetryPolicy;
use crate::tls::tls_config;
use crate::{HubError, HubOptions, Repo};

/// Maximum number of redirects followed for one request.
const MAX_REDIRECTS: usize = 5;

/// Maximum number of attempts while the server has never answered.
const MAX_CONNECT_ATTEMPTS: u32 = 2;

/// The file or repository that a request asks for, which error messages name.
pub struct RequestTarget<'a> {
    /// The repository.
    pub repo: &'a Repo,
    /// A file of the repository; None for the repository's description.
    pub file: Option<&'a str>,
    /// Known files of the repository, for error messages.
    pub known: &'a [String],
}

impl RequestTarget<'_> {
    /// Name of the file or repository in messages.
    pub fn name(&self) -> String {
        self.file.map_or_else(|| self.repo.to_string(), |file| format!("{} of {}", file, self.repo))
    }
}

/// Why a request failed.
pub enum RequestError {
    /// A retry would not help.
    Final(HubError),
    /// A retry may help.
    Transient(TransientError),
}

/// A failure that a retry may fix.
pub enum TransientError {
    /// The server did not answer.
    Unreachable(String),
    /// The response ended early, or was not the requested content.
    Broken(String),
    /// A status of a temporary failure: 408 or 5xx.
    Server(StatusCode),
    /// HTTP 429, with the pause from `Retry-After`.
    RateLimited(Option<Duration>),
}

/// The HTTP client of the hub.
pub struct Client {
    agent: Agent,
    token: Option<String>,
    endpoint: String,
    pub retry: RetryPolicy,
}

impl Client {
    pub fn new(settings: &HubOptions) -> Self {
        let retry = settings.retry;
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_connect(Some(retry.connect))
            .timeout_recv_response(Some(retry.read_timeout))
            .timeout_per_read(Some(retry.read_timeout))
            .tls_config(tls_config())
            .user_agent(concat!("deepspec/", env!("CARGO_PKG_VERSION")))
            // Without compression, sizes and ranges count the bytes of the file itself.
            .accept_encoding("identity")
            .build();
        let (token, endpoint) = (settings.token.clone(), settings.endpoint.clone());
        Self { agent: config.into(), token, endpoint, retry }
    }

    /// The hub's URL of a path.
    pub fn url(&self, path: &str) -> String {
        format!("{}/{}", self.endpoint, percent_encode(path))
    }

    /// Sends one GET for the bytes from `start` on, and follows redirects.
    pub fn get(&self, target: &RequestTarget, url: &str, start: u64) -> Result<Response<Body>, RequestError> {
        let mut request = self.agent.get(url);
        if start > 0 {
            request = request.header(header::RANGE, format!("bytes={start}-"));
        }
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        self.check_response(target, url, request.call())
    }

    /// Sends one GET for a range of bytes, and follows redirects.
    pub fn get_range(
        &self,
        target: &RequestTarget,
        url: &str,
        range: &Range<u64>,
    ) -> Result<Response<Body>, RequestError> {
        let bytes = format!("bytes={}-{}", range.start, range.end.saturating_sub(1));
        let mut request = self.agent.get(url).header(header::RANGE, bytes);
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        self.check_response(target, url, request.call())
    }

    /// Sends one HEAD and follows redirects within the hub only. A response from another server
    /// would lack the headers that the hub sends.
    pub fn head(&self, target: &RequestTarget, url: &str) -> Result<Response<Body>, RequestError> {
        let mut at = url.to_string();
        for _ in 0..MAX_REDIRECTS {
            let mut request =
                self.agent.head(&at).config().max_redirects(0).max_redirects_will_error(false).build();
            if let Some(token) = &self.token {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            let response = self.check_response(target, &at, request.call())?;
            match same_server_redirect(&at, response.status(), response.headers()) {
                Some(next) => at = next,
                None => return Ok(response),
            }
        }
        Err(RequestError::Final(unexpected_response(target, url, "one redirect after another", "a file")))
    }

    fn check_response(
        &self,
        target: &RequestTarget,
        url: &str,
        answer: Result<Response<Body>, ureq::Error>,
    ) -> Result<Response<Body>, RequestError> {
        let response = answer.map_err(|error| match error {
            ureq::Error::BadUri(_) | ureq::Error::Http(_) | ureq::Error::InvalidProxyUrl => {
                let name = target.name();
                let problem = format!("{error}: is HF_ENDPOINT an address?");
                RequestError::Final(HubError::Unreachable {
                    what: name,
                    url: url.into(),
                    problem,
                    attempts: 1,
                })
            }
            other => RequestError::Transient(TransientError::Unreachable(other.to_string())),
        })?;
        let status = response.status();
        if status.is_success() || status.is_redirection() || status == StatusCode::RANGE_NOT_SATISFIABLE {
            return Ok(response);
        }
        Err(match status {
            StatusCode::TOO_MANY_REQUESTS => {
                RequestError::Transient(TransientError::RateLimited(parse_retry_after(response.headers())))
            }
            StatusCode::REQUEST_TIMEOUT => RequestError::Transient(TransientError::Server(status)),
            status if status.is_server_error() => RequestError::Transient(TransientError::Server(status)),
            status => RequestError::Final(self.error_of_status(target, url, status, response.headers())),
        })
    }

    /// The error for a status from 400 to 499; the hub's headers give details.
    fn error_of_status(
        &self,
        target: &RequestTarget,
        url: &str,
        status: StatusCode,
        headers: &HeaderMap,
    ) -> HubError {
        let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let (code, message) = (header("x-error-code"), header("x-error-message"));
        let server_message =
            if message.is_empty() { String::new() } else { format!(": {}", message.trim_end_matches('.')) };
        let (what, url, token) = (target.name(), url.to_string(), self.token.is_some());
        let (repo, status_code) = (target.repo.clone(), status.as_u16());
        let page = self.url(&repo.to_hf_repo(repo.revision()).url());
        match (code, status_code) {
            ("GatedRepo", status) => HubError::Gated { what, url, status, page, token },
            ("RevisionNotFound", _) => HubError::NoRevision { repo },
            ("RepoNotFound", status) => HubError::NoRepository { repo, url, status, token },
            // Without a token, the hub answers 401 for missing repositories too, so as not to
            // reveal private ones.
            (_, 401) if !token => HubError::NoRepository { repo, url, status: 401, token },
            (_, 401) => HubError::Unauthorized { what, url, server_message, token },
            (_, 403) => HubError::Forbidden { what, url, server_message, page, token },
            (_, 404) => match target.file {
                Some(file) => HubError::NoFile {
                    repo: Box::new(repo),
                    file: file.into(),
                    url,
                    files: target.known.to_vec(),
                },
                None => HubError::NoRepository { repo, url, status: 404, token },
            },
            _ => {
                unexpected_response(target, &url, &format!("HTTP {status}{server_message}"), "a hub's answer")
            }
        }
    }

    /// Repeats `attempt` with pauses until it succeeds or fails for good.
    pub fn with_retries<T>(
        &self,
        target: &RequestTarget,
        url: &str,
        mut attempt: impl FnMut() -> Result<T, RequestError>,
    ) -> Result<T, HubError> {
        let mut tried = 0;
        loop {
            match attempt() {
                Ok(value) => return Ok(value),
                Err(RequestError::Final(error)) => return Err(error),
                Err(RequestError::Transient(error)) => {
                    tried += 1;
                    self.wait_before_retry(target, url, error, tried, false)?;
                }
            }
        }
    }

    /// Sleeps before the next request, after `tried` failures in a row. A server that has answered
    /// before (`reached`) gets more attempts than one that never answered.
    ///
    /// # Errors
    /// If no attempts are left, or the server asks for a pause longer than the policy allows.
    pub fn wait_before_retry(
        &self,
        target: &RequestTarget,
        url: &str,
        error: TransientError,
        tried: u32,
        reached: bool,
    ) -> Result<(), HubError> {
        let retry = &self.retry;
        let backoff = retry.pause.saturating_mul(1 << (tried - 1).min(16)).min(retry.max_pause);
        let (limit, pause, problem) = match &error {
            TransientError::Unreachable(problem) => {
                let most = if reached { u32::MAX } else { MAX_CONNECT_ATTEMPTS };
                (retry.attempts.min(most), backoff, problem.clone())
            }
            TransientError::Broken(problem) => (retry.attempts, backoff, problem.clone()),
            TransientError::Server(status) => (retry.attempts, backoff, format!("HTTP {status}")),
            TransientError::RateLimited(asked) => {
                (retry.attempts, asked.unwrap_or(backoff), "HTTP 429".into())
            }
        };
        if tried >= limit || pause > retry.max_pause {
            return Err(self.final_error(target, url, error, tried));
        }
        tracing::debug!("{}: {problem}; asking again in {:.1} s", target.name(), pause.as_secs_f64());
        thread::sleep(pause);
        Ok(())
    }

    fn final_error(
        &self,
        target: &RequestTarget,
        url: &str,
        error: TransientError,
        attempts: u32,
    ) -> HubError {
        let (what, url, token) = (target.name(), url.to_string(), self.token.is_some());
        match error {
            TransientError::Unreachable(problem) | TransientError::Broken(problem) => {
                HubError::Unreachable { what, url, problem, attempts }
            }
            TransientError::Server(status) => {
                HubError::Server { what, url, status: status.as_u16(), attempts }
            }
            TransientError::RateLimited(wait) => HubError::RateLimited { what, url, wait, attempts, token },
        }
    }
}

/// An error for a response that no hub would give.
pub fn unexpected_response(
    target: &RequestTarget,
    url: &str,
    found: &str,
    expected: &'static str,
) -> HubError {
    HubError::Unexpected { what: target.name(), url: url.into(), found: found.into(), expected }
}

/// The URL of a redirect within the same server, unless it goes from HTTPS to HTTP. None for a
/// redirect to another server, because the client sends its token with each request.
fn same_server_redirect(from: &str, status: StatusCode, headers: &HeaderMap) -> Option<String> {
    if !status.is_redirection() {
        return None;
    }
    let location = headers.get(header::LOCATION)?.to_str().ok()?;
    let (from, to): (Uri, Uri) = (from.parse().ok()?, location.parse().ok()?);
    let has_metadata = headers.contains_key("x-linked-etag");
    let protected = to.scheme() == from.scheme() || to.scheme_str() == Some("https");
    let same_server = to.authority() == from.authority() && protected;
    match to.authority() {
        None => Some(format!("{}://{}{to}", from.scheme_str()?, from.authority()?)),
        Some(_) if same_server && !has_metadata => Some(location.to_string()),
        Some(_) => None,
    }
}

/// `Retry-After` in seconds. A date, which is rare, falls back to the usual backoff.
fn parse_retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?;
    text.trim().parse().ok().map(Duration::from_secs)
}

/// Percent-encodes a path, except for unreserved characters, slashes and existing percent signs.
fn percent_encode(path: &str) -> String {
    let mut text = String::with_capacity(path.len());
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/%".contains(&byte) {
            text.push(char::from(byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_follows_redirects_of_the_same_server_alone() {
        let leads = |location: &str| {
            let headers = HeaderMap::from_iter([(header::LOCATION, location.parse().unwrap())]);
            same_server_redirect("https://hub.example/a/b", StatusCode::TEMPORARY_REDIRECT, &headers)
        };
        assert_eq!(leads("/c").as_deref(), Some("https://hub.example/c"));
        assert_eq!(leads("https://hub.example/c").as_deref(), Some("https://hub.example/c"));
        for elsewhere in ["http://hub.example/c", "https://cdn.example/c", "https://hub.example:8443/c"] {
            assert_eq!(leads(elsewhere), None, "{elsewhere}");
        }
    }
}
