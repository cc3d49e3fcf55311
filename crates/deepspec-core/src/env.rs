//! Every environment variable that the tools read, in one place.

use std::env::{var, var_os};
use std::path::PathBuf;

/// `RUST_LOG`: a log filter that overrides `--quiet` and `-v`.
pub fn rust_log() -> Option<String> {
    var("RUST_LOG").ok().filter(|text| !text.is_empty())
}

/// `HOME`, for paths that begin with `~`.
pub fn home() -> Option<PathBuf> {
    var_os("HOME").map(PathBuf::from)
}

/// `OPENAI_API_KEY`: sent as a bearer token to the servers that answer prompts.
pub fn api_key() -> Option<String> {
    var("OPENAI_API_KEY").ok().filter(|key| !key.is_empty())
}

/// Expands a leading `~` to the home folder.
pub fn expand_home(path: &str) -> PathBuf {
    match (path.strip_prefix("~/"), home()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => PathBuf::from(path),
    }
}
