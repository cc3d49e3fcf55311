//! Access checks: the API key, and protection against requests from web pages.

use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, ORIGIN};
use axum::http::{HeaderMap, HeaderName, StatusCode};

use super::respond;
use crate::ChatError;
use axum::response::Response;

/// Access rules of the server.
#[derive(Debug, Clone)]
pub struct AccessPolicy {
    /// The API key, if one is required.
    pub key: Option<String>,
    /// Whether the server listens on a loopback address only.
    pub is_local: bool,
}

impl AccessPolicy {
    /// Accepts a request or returns the refusal.
    ///
    /// A web page may send requests to local ports. Browsers always send its `Origin` with a POST.
    /// With DNS rebinding, the foreign host name shows in `Host`.
    pub fn check(&self, headers: &HeaderMap) -> Result<(), Box<Response>> {
        let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("unreadable"));
        let host = text(HOST).unwrap_or_default();
        if self.is_local && !host.is_empty() && !is_loopback(without_port(host)) {
            let problem = format!("this server listens on loopback only, and `Host` is {host}");
            return Err(respond::bad_request_response(StatusCode::FORBIDDEN, &problem).into());
        }
        if let Some(origin) = text(ORIGIN) {
            let from = origin.split_once("://").map_or("", |(_, host)| host);
            if !(from.eq_ignore_ascii_case(host) || is_loopback(without_port(from))) {
                let problem = format!("pages of {origin} are not answered");
                return Err(respond::bad_request_response(StatusCode::FORBIDDEN, &problem).into());
            }
        }
        match &self.key {
            Some(key) if !text(AUTHORIZATION).is_some_and(|sent| is_authorized(sent, key)) => {
                Err(respond::error_response(&ChatError::Unauthorised).into())
            }
            _ => Ok(()),
        }
    }
}

/// Rejects bodies whose content type is not JSON. The default type of `curl -d` is accepted; an
/// HTML form also has it, but with an `Origin` header.
pub fn check_content_type(headers: &HeaderMap) -> Result<(), Box<Response>> {
    let Some(sent) = headers.get(CONTENT_TYPE) else { return Ok(()) };
    let sent = sent.to_str().unwrap_or("unreadable");
    let kind = sent.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let is_json = kind == "application/json" || kind.ends_with("+json");
    if is_json || (kind == "application/x-www-form-urlencoded" && !headers.contains_key(ORIGIN)) {
        return Ok(());
    }
    let problem = format!("`Content-Type` is {sent}; expected application/json");
    Err(respond::bad_request_response(StatusCode::UNSUPPORTED_MEDIA_TYPE, &problem).into())
}

/// Whether a host name or address is loopback.
pub fn is_loopback(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port))
            if port.bytes().all(|byte| byte.is_ascii_digit())
                && (!name.contains(':') || name.ends_with(']')) =>
        {
            name
        }
        _ => host,
    }
}

/// Whether a header has the API key. The comparison takes equal time for all keys of the right
/// length.
fn is_authorized(sent: &str, key: &str) -> bool {
    let Some((scheme, sent)) = sent.split_once(' ') else { return false };
    let differing = sent.bytes().zip(key.bytes()).fold(0, |all, (a, b)| all | (a ^ b));
    scheme.eq_ignore_ascii_case("bearer") && sent.len() == key.len() && differing == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    fn status(access: &AccessPolicy, headers: &[(HeaderName, &'static str)]) -> u16 {
        let headers =
            headers.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect();
        let checked = access.check(&headers).and_then(|()| check_content_type(&headers));
        checked.err().map_or(200, |response| response.status().as_u16())
    }

    #[test]
    fn pages_of_others_and_wrong_keys_stay_outside() {
        let open = AccessPolicy { key: None, is_local: true };
        for host in ["127.0.0.1:30000", "localhost", "[::1]:30000"] {
            assert_eq!(status(&open, &[(HOST, host)]), 200, "{host}");
        }
        assert_eq!(status(&open, &[(HOST, "evil.example:30000")]), 403);
        assert_eq!(status(&open, &[(HOST, "localhost:1"), (ORIGIN, "http://evil.example")]), 403);
        assert_eq!(status(&open, &[(HOST, "localhost:1"), (ORIGIN, "null")]), 403);
        assert_eq!(status(&open, &[(HOST, "localhost:1"), (ORIGIN, "http://localhost:8080")]), 200);
        assert_eq!(status(&open, &[(CONTENT_TYPE, "text/plain")]), 415);
        assert_eq!(status(&open, &[(CONTENT_TYPE, "application/json; charset=utf-8")]), 200);
        assert_eq!(status(&open, &[(CONTENT_TYPE, "application/x-www-form-urlencoded")]), 200);
        let far = AccessPolicy { key: Some("secret".into()), is_local: false };
        assert_eq!(status(&far, &[(HOST, "gpu1:30000")]), 401);
        assert_eq!(status(&far, &[(HOST, "gpu1:30000"), (AUTHORIZATION, "Bearer secret")]), 200);
        assert_eq!(status(&far, &[(AUTHORIZATION, "Bearer secrex")]), 401);
        assert_eq!(status(&far, &[(AUTHORIZATION, "Bearer secret2")]), 401);
        assert_eq!(
            status(&far, &[(HOST, "gpu1:1"), (ORIGIN, "http://gpu1:1"), (AUTHORIZATION, "Bearer secret")]),
            200
        );
    }
}
