//! Export targets: checkpoint formats of other tools, and serving engines.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::{CheckpointFormat, Drafter};

/// A format or an engine that a drafter is exported to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportTarget {
    /// A checkpoint in another tool's format.
    Format(CheckpointFormat),
    /// The files that an engine loads.
    Engine(Engine),
}

impl FromStr for ExportTarget {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match Engine::ALL.into_iter().find(|engine| engine.export_name() == name) {
            Some(engine) => Ok(Self::Engine(engine)),
            None => name.parse().map(Self::Format).map_err(|error| {
                let engines = Engine::ALL.map(Engine::export_name);
                format!("{error}, {}, {} or {}", engines[0], engines[1], engines[2])
            }),
        }
    }
}

impl fmt::Display for ExportTarget {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Format(format) => format.fmt(f),
            Self::Engine(Engine::LlamaCpp) => f.write_str("gguf"),
            Self::Engine(engine) => write!(f, "the layout of {engine}"),
        }
    }
}

/// An engine that serves a target with a drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// vLLM, which loads checkpoint folders.
    Vllm,
    /// SGLang, which loads checkpoint folders.
    Sglang,
    /// llama.cpp, which loads GGUF files.
    LlamaCpp,
}

impl Engine {
    /// All engines.
    pub const ALL: [Self; 3] = [Self::Vllm, Self::Sglang, Self::LlamaCpp];

    /// Its name.
    pub fn title(self) -> &'static str {
        match self {
            Self::Vllm => "vLLM",
            Self::Sglang => "SGLang",
            Self::LlamaCpp => "llama.cpp",
        }
    }

    /// Its name as the target of a conversion on the command line.
    pub fn export_name(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::LlamaCpp => "gguf",
        }
    }

    /// Command-line arguments that serve `drafter`, converted to `path`.
    pub fn arguments(self, drafter: &Drafter, path: &str) -> String {
        let (method, drafted) = (drafter.kind.method(), drafter.kind.drafted());
        match self {
            Self::Vllm => format!(
                "--speculative-config '{{\"method\": \"{method}\", \"model\": \"{path}\", \"num_speculative_tokens\": {drafted}}}'"
            ),
            Self::Sglang => {
                let own = drafter.kind.sglang_arguments();
                let algorithm = method.to_uppercase();
                format!("--speculative-algorithm {algorithm} --speculative-draft-model-path {path}{own}")
            }
            Self::LlamaCpp => {
                format!("--model-draft {path} --spec-type draft-{method} --spec-draft-n-max {drafted}")
            }
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.title())
    }
}

impl Serialize for Engine {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for Engine {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|engine| engine.title().to_lowercase() == name);
        found.ok_or_else(|| format!("unknown engine `{name}`; known are vllm, sglang and llama.cpp"))
    }
}

/// Whether an engine loads a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineSupport {
    /// True if it loads.
    pub loads: bool,
    /// How it loads, or why not.
    pub note: &'static str,
    /// Whether this was tried; otherwise it is read from the engine's sources.
    pub tried: bool,
}

impl EngineSupport {
    /// It loads, in a trial with the version in [`crate::loaders`].
    pub const fn tried(note: &'static str) -> Self {
        Self { loads: true, note, tried: true }
    }

    /// It loads, by the engine's sources.
    pub const fn yes(note: &'static str) -> Self {
        Self { loads: true, note, tried: false }
    }

    /// It does not load, by the engine's sources.
    pub const fn no(note: &'static str) -> Self {
        Self { loads: false, note, tried: false }
    }
}
