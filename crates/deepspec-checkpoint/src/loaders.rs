//! Which engines load a checkpoint as it is: as far as it was tried with them, by their versions, and otherwise as their sources say.

use serde::Serialize;

use crate::kind::Verdict;
use crate::{Checkpoint, CheckpointFormat};

/// The versions that were tried.
const SPECULATORS: &str = "0.9.0";
const VLLM: &str = "0.32.0";
const LLAMA_CPP: &str = "of llama-cpp-python 0.3.36";

/// What one engine makes of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Loader {
    /// The engine.
    pub engine: &'static str,
    /// The version with which this was tried; None where it was read of the engine's sources.
    pub tried: Option<&'static str>,
    /// Whether it loads the checkpoint as it is.
    pub loads: bool,
    /// How, or why not.
    pub note: String,
}

/// What vLLM, SGLang, llama.cpp and speculators make of a checkpoint.
pub fn loaders(checkpoint: &Checkpoint) -> Vec<Loader> {
    let (drafter, dialect) = (checkpoint.drafter(), checkpoint.dialect());
    // Neither vLLM nor speculators was tried with layers without these norms, nor any engine with what no other tool's layout says.
    let usual = drafter.family.qk_norm && drafter.refusal_anywhere().is_none();
    let known = |engine, version: Option<&'static str>, verdict: Verdict| match of_layers(checkpoint) {
        Some(note) => Loader { engine, tried: None, loads: false, note },
        None => {
            let tried = version.filter(|_| verdict.tried && usual);
            Loader { engine, tried, loads: verdict.loads, note: verdict.note.into() }
        }
    };
    let gguf = drafter.refusal_anywhere().map_or_else(|| drafter.kind.gguf(drafter).map(|_| ()), Err);
    let note = gguf.as_ref().map_or_else(String::clone, |()| "it loads GGUF files; convert to gguf".into());
    let is_speculators = dialect == CheckpointFormat::Speculators;
    let converts = checkpoint.refusal(CheckpointFormat::Speculators).is_none();
    let own = match is_speculators {
        true => "SpeculatorModel.from_pretrained",
        false if converts => "convert to speculators",
        false => "its layout cannot say this drafter",
    };
    vec![
        known("vLLM", Some(VLLM), drafter.kind.vllm(dialect)),
        known("SGLang", None, drafter.kind.sglang(dialect)),
        Loader { engine: "llama.cpp", tried: gguf.is_ok().then_some(LLAMA_CPP), loads: false, note },
        Loader {
            engine: "speculators",
            tried: (is_speculators && usual).then_some(SPECULATORS),
            loads: is_speculators,
            note: own.into(),
        },
    ]
}

/// Why no engine loads a drafter with such layers, if so: those with norms behind attention and MLP are loaded by nobody yet, and the
/// reference's classes without norms on queries and keys are not known to others.
fn of_layers(checkpoint: &Checkpoint) -> Option<String> {
    let family = checkpoint.drafter().family;
    if let Some((key, reason)) = checkpoint.unsupported() {
        return Some(format!("not known, for `{key}` is not run here: {reason}"));
    }
    match checkpoint.dialect() {
        _ if !family.pre_norm => Some(format!("no engine's drafter has {family} layers")),
        CheckpointFormat::Reference if !family.qk_norm => {
            Some(format!("no engine knows this class with {family} layers"))
        }
        _ => None,
    }
}
