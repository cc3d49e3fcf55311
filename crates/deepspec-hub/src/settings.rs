//! Options of the hub: address, token, cache and retries.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use deepspec_core::cli::Verbosity;
use deepspec_core::env;

use crate::HubError;

/// Options of a [`Hub`](crate::Hub).
#[derive(Debug, Clone)]
pub struct HubOptions {
    /// Address of the hub, without a final slash.
    pub endpoint: String,
    /// The access token, sent as a bearer token.
    pub token: Option<String>,
    /// The cache folder, with one subfolder per repository.
    pub cache: PathBuf,
    /// Folder for files that the Python tools do not know, such as parts of shards. None stores no
    /// such files.
    pub own_cache: Option<PathBuf>,
    /// Name of the environment variable that forbids requests, for messages. None if requests are
    /// allowed.
    pub offline: Option<&'static str>,
    /// Whether progress is shown.
    pub verbosity: Verbosity,
    /// How temporary failures are retried.
    pub retry: RetryPolicy,
}

/// How temporary failures are retried.
#[derive(Debug, Clone, Copy)]
pub struct RetryPolicy {
    /// Maximum number of requests in a row without progress.
    pub attempts: u32,
    /// Pause before the second request; it doubles with each later one.
    pub pause: Duration,
    /// Maximum pause between requests. Retries end if the server asks for a longer pause.
    pub max_pause: Duration,
    /// Timeout for connecting.
    pub connect: Duration,
    /// Timeout without a received byte.
    pub read_timeout: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            attempts: 5,
            pause: Duration::from_secs(1),
            max_pause: Duration::from_secs(300),
            connect: Duration::from_secs(10),
            read_timeout: Duration::from_secs(30),
        }
    }
}

impl HubOptions {
    /// Options from the environment variables; see [`env::hub_env`].
    ///
    /// # Errors
    /// If no folder for the cache is known.
    pub fn from_env(verbosity: Verbosity) -> Result<Self, HubError> {
        let variables = env::hub_env();
        let cache = variables.cache.ok_or(HubError::NoCacheFolder)?;
        let stored = || fs::read_to_string(variables.token_path.as_ref()?).ok();
        let token = if variables.anonymous { None } else { variables.token.or_else(stored) };
        Ok(Self {
            endpoint: variables.endpoint,
            token: token.map(|token| token.trim().to_string()).filter(|token| !token.is_empty()),
            cache,
            own_cache: env::cache_dir(),
            offline: variables.offline,
            verbosity,
            retry: RetryPolicy::default(),
        })
    }
}
