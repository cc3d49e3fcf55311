//! Where the hub is, who asks, and how long to wait.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use deepspec_core::cli::Verbosity;
use deepspec_core::env;

use crate::HubError;

/// All that a [`Hub`](crate::Hub) is told.
#[derive(Debug, Clone)]
pub struct HubOptions {
    /// Address of the hub, without a final slash.
    pub endpoint: String,
    /// Sent as a bearer token.
    pub token: Option<String>,
    /// The folder with one subfolder per repository.
    pub cache: PathBuf,
    /// What forbids requests, for messages; nothing when they are allowed.
    pub offline: Option<&'static str>,
    /// Whether progress is shown.
    pub verbosity: Verbosity,
    /// How failures that may pass are met.
    pub patience: RetryPolicy,
}

/// How failures that may pass are met.
#[derive(Debug, Clone, Copy)]
pub struct RetryPolicy {
    /// Requests in a row without any progress, after which it is given up.
    pub attempts: u32,
    /// Pause before the second request; each later one is twice as long.
    pub pause: Duration,
    /// Longest pause that a server may ask for.
    pub longest: Duration,
    /// Time to connect.
    pub connect: Duration,
    /// Time without a byte.
    pub silence: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            attempts: 5,
            pause: Duration::from_secs(1),
            longest: Duration::from_secs(300),
            connect: Duration::from_secs(10),
            silence: Duration::from_secs(30),
        }
    }
}

impl HubOptions {
    /// What the environment says; see [`env::hub`].
    ///
    /// # Errors
    /// If no folder for the cache can be named.
    pub fn from_env(verbosity: Verbosity) -> Result<Self, HubError> {
        let said = env::hub();
        let cache = said.cache.ok_or(HubError::NoCacheFolder)?;
        let stored = || fs::read_to_string(said.token_path.as_ref()?).ok();
        let token = if said.anonymous { None } else { said.token.or_else(stored) };
        Ok(Self {
            endpoint: said.endpoint,
            token: token.map(|token| token.trim().to_string()).filter(|token| !token.is_empty()),
            cache,
            offline: said.offline,
            verbosity,
            patience: RetryPolicy::default(),
        })
    }
}
