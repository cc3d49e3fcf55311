//! Failures of requests, classified by how to handle them.

use std::fmt;
use std::time::{Duration, SystemTime};

use deepspec_text::FinishReason;
use reqwest::StatusCode;
use reqwest::header::{HeaderMap, LOCATION, RETRY_AFTER};
use serde_json::Value;

/// Most characters of a server's message to keep.
const MESSAGE_CHARS: usize = 300;

/// Classes of failure. After the first seven, another attempt may succeed, perhaps at another
/// server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureClass {
    /// No connection: the server's fault, not the request's.
    Unreachable,
    /// 429, or 503 with `Retry-After`: the server asks for a pause.
    RateLimited,
    /// Any other 5xx, or 408.
    ServerError,
    /// The answer timed out.
    Timeout,
    /// The connection broke before the end of the answer, or the response was not HTTP.
    Broken,
    /// The response is not a chat completion.
    InvalidResponse,
    /// The server broke off the answer.
    BrokenOff,
    /// The server refuses this request, but may accept other requests.
    Refused,
    /// The server refuses every request: wrong address, key or model.
    Denied,
    /// Cancelled because the server's circuit opened; another server gets the request.
    Cancelled,
}

impl FailureClass {
    /// All classes.
    pub const ALL: [Self; 10] = [
        Self::Unreachable,
        Self::RateLimited,
        Self::ServerError,
        Self::Timeout,
        Self::Broken,
        Self::InvalidResponse,
        Self::BrokenOff,
        Self::Refused,
        Self::Denied,
        Self::Cancelled,
    ];

    /// Name of the class in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::RateLimited => "rate_limited",
            Self::ServerError => "server_error",
            Self::Timeout => "timeout",
            Self::Broken => "broken_connection",
            Self::InvalidResponse => "invalid_answer",
            Self::BrokenOff => "broken_off",
            Self::Refused => "refused",
            Self::Denied => "denied",
            Self::Cancelled => "recalled",
        }
    }
}

/// A request without an answer.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The class.
    pub class: FailureClass,
    /// A short description.
    pub problem: String,
    /// The pause that the server asks for.
    pub retry_after: Option<Duration>,
    /// The complete message of the server, which may name the rejected field.
    pub said: String,
    /// The finish reason of an answer that was broken off.
    pub finish: Option<FinishReason>,
    /// The file of hidden states of an unusable answer, which is to be deleted.
    pub states_path: Option<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problem)
    }
}

impl Failure {
    fn new(class: FailureClass, problem: String) -> Self {
        Self { class, problem, retry_after: None, said: String::new(), finish: None, states_path: None }
    }

    /// A request that was cancelled.
    pub fn cancelled() -> Self {
        Self::new(FailureClass::Cancelled, "the server was given up".into())
    }

    /// A response that is not a chat completion.
    pub fn invalid_response(problem: &str, text: &str) -> Self {
        Self::new(FailureClass::InvalidResponse, format!("{problem}: {}", shorten(text)))
    }

    /// An answer whose hidden states are missing or wrong.
    pub fn states(problem: String) -> Self {
        Self::new(FailureClass::InvalidResponse, problem)
    }

    /// An answer that the server ended before the model did.
    pub fn broken_off(reason: FinishReason) -> Self {
        let problem = format!("the answer was broken off (finish_reason {:?})", reason.name());
        Self { finish: Some(reason), ..Self::new(FailureClass::BrokenOff, problem) }
    }

    /// An answer without text; another attempt may have one.
    pub fn empty() -> Self {
        Self::new(FailureClass::BrokenOff, "the answer has no text".into())
    }

    /// A connection that failed or broke.
    pub fn transport(error: &reqwest::Error) -> Self {
        let class = match error {
            _ if error.is_connect() => FailureClass::Unreachable,
            _ if error.is_timeout() => FailureClass::Timeout,
            _ => FailureClass::Broken,
        };
        Self::new(class, root_cause(error))
    }

    /// A response with an error status.
    pub fn status(status: StatusCode, headers: &HeaderMap, text: String) -> Self {
        let retry_after = retry_after(headers, SystemTime::now());
        let class = match status {
            StatusCode::TOO_MANY_REQUESTS => FailureClass::RateLimited,
            StatusCode::SERVICE_UNAVAILABLE if retry_after.is_some() => FailureClass::RateLimited,
            StatusCode::REQUEST_TIMEOUT => FailureClass::ServerError,
            // 402 means that the account has no credit left, so every request would fail.
            StatusCode::UNAUTHORIZED
            | StatusCode::PAYMENT_REQUIRED
            | StatusCode::FORBIDDEN
            | StatusCode::NOT_FOUND
            | StatusCode::METHOD_NOT_ALLOWED => FailureClass::Denied,
            _ if status.is_redirection() => FailureClass::Denied,
            _ if status.is_client_error() => FailureClass::Refused,
            _ => FailureClass::ServerError,
        };
        let mut problem = format!("HTTP {}: {}", status.as_u16(), error_message(&text));
        if let Some(to) =
            headers.get(LOCATION).and_then(|to| to.to_str().ok()).filter(|_| status.is_redirection())
        {
            problem = format!("HTTP {}: it sends us on to {to}; give that address", status.as_u16());
        }
        Self { class, problem, retry_after, said: message_texts(text), finish: None, states_path: None }
    }

    /// Whether the server's message contains this field's name as a word.
    pub fn names_field(&self, field: &str) -> bool {
        let word = |c: char| c.is_alphanumeric() || c == '_';
        self.said.match_indices(field).any(|(at, _)| {
            !self.said[..at].ends_with(word) && !self.said[at + field.len()..].starts_with(word)
        })
    }
}

/// All texts of a server's message, except quotes of the request.
fn message_texts(text: String) -> String {
    fn collect(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::String(text) => found.push(text.clone()),
            Value::Array(items) => items.iter().for_each(|item| collect(item, found)),
            Value::Object(fields) => {
                let own =
                    fields.iter().filter(|(name, _)| !matches!(name.as_str(), "input" | "body" | "ctx"));
                own.for_each(|(_, value)| collect(value, found));
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
    let Ok(json) = serde_json::from_str::<Value>(&text) else { return text };
    let mut found = vec![];
    collect(&json, &mut found);
    found.join("\n")
}

/// `Retry-After`, in seconds or as a date.
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse::<f64>() {
        return Duration::try_from_secs_f64(seconds).ok();
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(now).unwrap_or_default())
}

/// The message in a server's error response.
fn error_message(text: &str) -> String {
    let json: Value = serde_json::from_str(text).unwrap_or_default();
    let said = [&json["error"]["message"], &json["message"], &json["error"], &json["detail"]];
    match said.into_iter().find(|said| !said.is_null()) {
        Some(Value::String(said)) => shorten(said),
        Some(other) => shorten(&other.to_string()),
        None => shorten(text),
    }
}

fn shorten(text: &str) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match text.char_indices().nth(MESSAGE_CHARS) {
        Some((end, _)) => format!("{} …", &text[..end]),
        None => text,
    }
}

/// The root cause of an error. The message of reqwest hides it, and the caller names the URL.
fn root_cause(error: &reqwest::Error) -> String {
    if error.is_timeout() && !error.is_connect() {
        return "no answer in time".into();
    }
    let mut last = None;
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        last = Some(error.to_string());
        cause = error.source();
    }
    last.unwrap_or_else(|| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_are_found_in_all_common_shapes() {
        assert_eq!(error_message(r#"{"error": {"message": "too long"}}"#), "too long");
        assert_eq!(error_message(r#"{"detail": "Unprocessable"}"#), "Unprocessable");
        assert_eq!(error_message("<html>\n<body>"), "<html> <body>");
        assert!(error_message(&"x".repeat(1000)).chars().count() < 310);
    }

    #[test]
    fn statuses_fall_into_classes() {
        let class = |status: u16, after: Option<&str>| {
            let mut headers = HeaderMap::new();
            if let Some(after) = after {
                headers.insert(RETRY_AFTER, after.parse().unwrap());
            }
            let failure = Failure::status(StatusCode::from_u16(status).unwrap(), &headers, "x".into());
            (failure.class, failure.retry_after)
        };
        assert_eq!(class(429, Some("2")), (FailureClass::RateLimited, Some(Duration::from_secs(2))));
        assert_eq!(class(429, Some("soon")), (FailureClass::RateLimited, None));
        assert_eq!(class(503, None).0, FailureClass::ServerError);
        assert_eq!(class(503, Some("1")).0, FailureClass::RateLimited);
        assert_eq!(class(500, None).0, FailureClass::ServerError);
        assert_eq!(class(402, None).0, FailureClass::Denied);
        assert_eq!(class(408, None).0, FailureClass::ServerError);
        assert_eq!(class(422, None).0, FailureClass::Refused);
        assert_eq!(
            (class(401, None).0, class(404, None).0, class(302, None).0),
            (FailureClass::Denied, FailureClass::Denied, FailureClass::Denied)
        );
        let date = "Sun, 06 Nov 1994 08:49:37 GMT";
        let past = httpdate::parse_http_date(date).unwrap();
        let headers = HeaderMap::from_iter([(RETRY_AFTER, date.parse().unwrap())]);
        assert_eq!(retry_after(&headers, past - Duration::from_secs(9)), Some(Duration::from_secs(9)));
        assert_eq!(retry_after(&headers, past + Duration::from_secs(9)), Some(Duration::ZERO));
    }

    #[test]
    fn fields_are_found_as_words() {
        let failure = |said: &str| Failure { said: said.into(), ..Failure::cancelled() };
        assert!(failure("Unexpected fields: {'top_k'}").names_field("top_k"));
        assert!(failure("top_k, min_p").names_field("min_p"));
        assert!(!failure("stop_k and top_kk").names_field("top_k"));
    }
}
