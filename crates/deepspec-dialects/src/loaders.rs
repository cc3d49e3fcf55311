//! Which engines load a checkpoint as it is, as far as their sources told (vLLM after PR 46995, SGLang as read in August 2026).

use serde::Serialize;

use crate::families::{GEMMA4, LLAMA};
use crate::{Checkpoint, Dialect};

/// What one engine makes of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Loader {
    /// The engine.
    pub engine: &'static str,
    /// Whether it loads the checkpoint as it is.
    pub loads: bool,
    /// How, or why not.
    pub note: &'static str,
}

/// What vLLM, SGLang and speculators make of a checkpoint.
pub fn loaders(checkpoint: &Checkpoint) -> Vec<Loader> {
    let drafter = checkpoint.drafter();
    let speculators = checkpoint.dialect() == Dialect::Speculators;
    let converts = drafter.refusal(checkpoint.dialect(), Dialect::Speculators).is_none();
    let own = Loader {
        engine: "speculators",
        loads: speculators,
        note: match speculators {
            true => "SpeculatorModel.from_pretrained",
            false if converts => "convert to speculators",
            false => "its layout cannot say this drafter",
        },
    };
    let [vllm, sglang] = [drafter.kind.vllm(checkpoint.dialect()), drafter.kind.sglang(checkpoint.dialect())];
    [("vLLM", vllm), ("SGLang", sglang)]
        .map(|(engine, (loads, note))| match of_layers(checkpoint) {
            Some(note) => Loader { engine, loads: false, note },
            None => Loader { engine, loads, note },
        })
        .into_iter()
        .chain([own])
        .collect()
}

/// Why no engine loads a drafter with such layers, if so: Gemma 4 drafters are loaded by nobody yet, and the reference's classes with
/// Llama layers are not known to others.
fn of_layers(checkpoint: &Checkpoint) -> Option<&'static str> {
    let family = checkpoint.drafter().family;
    match checkpoint.dialect() {
        _ if family == &GEMMA4 => Some("no engine's drafter has Gemma 4 layers"),
        Dialect::Reference if family == &LLAMA => Some("no engine knows this class with Llama layers"),
        _ => None,
    }
}
