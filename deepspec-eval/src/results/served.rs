//! The engine of a run that a server decoded.

use serde::{Deserialize, Serialize};

/// The engine of a run that a server decoded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Served {
    /// Name of the engine.
    pub engine: String,
    /// Its version, if it reports one.
    pub version: Option<String>,
    /// Address of the server.
    pub url: String,
    /// Name of the target there.
    pub model: Option<String>,
    /// Rule of verification, as far as the engine reports it.
    pub verification: String,
    /// Where acceptance figures come from.
    pub figures: FiguresSource,
    /// Engine, version and address of the server without a drafter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub baseline: Option<String>,
}

/// Where an engine's acceptance figures come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FiguresSource {
    /// The answers themselves.
    PerRequest,
    /// Differences of the counters of `/metrics`.
    Counters,
}

impl FiguresSource {
    /// The source as a phrase.
    pub fn phrase(self) -> &'static str {
        match self {
            Self::PerRequest => "per request",
            Self::Counters => "counters of /metrics",
        }
    }
}

impl Served {
    /// Engine and version.
    pub fn name(&self) -> String {
        match &self.version {
            Some(version) => format!("{} {version}", self.engine),
            None => self.engine.clone(),
        }
    }
}
