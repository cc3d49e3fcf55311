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

    /// Name of the engine in texts.
    pub fn title(self) -> &'static str {
        match self {
            Self::Vllm => "vLLM",
            Self::Sglang => "SGLang",
            Self::LlamaCpp => "llama.cpp",
        }
    }

    /// Name of the engine in the option `--to` of a conversion.
    pub fn export_name(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::LlamaCpp => "gguf",
        }
    }

    /// The command that serves `target`, at a `revision` of the hub, with `drafter`, converted to `path`. llama.cpp serves a GGUF
    /// file of the target.
    pub fn serve_command(
        self,
        target: &str,
        revision: Option<&str>,
        drafter: &Drafter,
        path: &str,
    ) -> String {
        let revision = revision.map_or(String::new(), |revision| format!(" --revision {revision}"));
        let program = match self {
            Self::Vllm => format!("vllm serve {target}{revision}"),
            Self::Sglang => format!("python3 -m sglang.launch_server --model-path {target}{revision}"),
            Self::LlamaCpp if target.to_lowercase().ends_with(".gguf") => {
                format!("llama-server --model {target}")
            }
            Self::LlamaCpp => "llama-server --model TARGET.gguf".into(),
        };
        format!("{program} {}", self.serve_arguments(drafter, path))
    }

    /// The engine's command-line arguments to serve `drafter`, which was converted to `path`.
    pub fn serve_arguments(self, drafter: &Drafter, path: &str) -> String {
        let (method, drafted) = (drafter.kind.method(), drafter.kind.draft_len());
        match self {
            Self::Vllm => {
                let parallel =
                    if drafter.kind.drafts_in_parallel() { ", \"parallel_drafting\": true" } else { "" };
                format!(
                    "--speculative-config '{{\"method\": \"{method}\", \"model\": \"{path}\", \"num_speculative_tokens\": {drafted}{parallel}}}'"
                )
            }
            Self::Sglang => {
                let own = drafter.kind.sglang_arguments();
                // FlashInfer, SGLang's attention backend on many GPUs, takes no sinks.
                let backend = match drafter.has_attention_sinks() {
                    true => " --speculative-draft-attention-backend triton",
                    false => "",
                };
                let algorithm = method.to_uppercase();
                format!(
                    "--speculative-algorithm {algorithm} --speculative-draft-model-path {path}{own}{backend}"
                )
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
    /// Whether the engine loads it.
    pub loads: bool,
    /// Arguments with which the engine loads it, or the reason why it does not.
    pub note: &'static str,
    /// Whether this was tried. Otherwise it follows from the engine's sources.
    pub tried: bool,
}

impl EngineSupport {
    /// The engine loaded the checkpoint when it was tried with the version in [`crate::engine_compatibility`].
    pub const fn loads_as_tested(note: &'static str) -> Self {
        Self { loads: true, note, tried: true }
    }

    /// By its sources, the engine loads the checkpoint. This was not tried.
    pub const fn loads_untested(note: &'static str) -> Self {
        Self { loads: true, note, tried: false }
    }

    /// The engine refused the checkpoint when it was tried with the version in [`crate::engine_compatibility`].
    pub const fn not_loaded_as_tested(note: &'static str) -> Self {
        Self { loads: false, note, tried: true }
    }

    /// By its sources, the engine does not load the checkpoint.
    pub const fn not_loaded(note: &'static str) -> Self {
        Self { loads: false, note, tried: false }
    }
}
