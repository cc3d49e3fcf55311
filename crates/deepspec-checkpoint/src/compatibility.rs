//! Lists which engines load a checkpoint without conversion. The answers come from trials with the
//! versions below, or else from the engines' sources.

use serde::Serialize;

use crate::export::Engine;
use crate::rope::{engine_rope_parameters, llama_cpp_rope};
use crate::{Checkpoint, CheckpointFormat};

/// Versions of the engines that were tested.
const SPECULATORS_VERSION: &str = "0.9.0";
const VLLM_VERSION: &str = "0.32.0";
const LLAMA_CPP_VERSION: &str = "of llama-cpp-python 0.3.36";

/// Whether one engine loads a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EngineCompatibility {
    /// The engine.
    pub engine: &'static str,
    /// Version of the engine that was tested; None if the answer comes from its sources.
    pub tried: Option<&'static str>,
    /// Whether it loads the checkpoint without conversion.
    pub loads: bool,
    /// How it loads, or why not.
    pub note: String,
}

/// Whether vLLM, SGLang, llama.cpp and speculators load a checkpoint.
pub fn engine_compatibility(checkpoint: &Checkpoint) -> Vec<EngineCompatibility> {
    let (drafter, format) = (checkpoint.drafter(), checkpoint.format());
    // vLLM and speculators were not tried with layers without query and key norms, nor with windows as they are here. No engine was
    // tried with settings that only one format can express.
    let usual =
        drafter.family.qk_norm && drafter.reason_not_convertible().is_none() && !drafter.has_windows();
    let known = |name, version: Option<&'static str>, engine| {
        let status = drafter.kind.engine_support(engine, format);
        let unread = checkpoint.unread_by(engine).filter(|_| status.loads);
        let reason = unread.or((!status.loads).then_some(status.note));
        let refused = reason.map(|reason| format!("{reason}{}", remedy(checkpoint, engine)));
        let tried = version.filter(|_| status.tried && usual);
        match unsupported_layers(checkpoint, engine) {
            Some(note) => EngineCompatibility { engine: name, tried: None, loads: false, note },
            None => EngineCompatibility {
                engine: name,
                tried: tried.filter(|_| unread.is_none()),
                loads: refused.is_none(),
                note: refused.unwrap_or_else(|| status.note.into()),
            },
        }
    };
    let gguf =
        drafter.reason_not_convertible().map_or_else(|| drafter.kind.gguf_parts(drafter).map(|_| ()), Err);
    let note = gguf.as_ref().map_or_else(String::clone, |()| "it loads GGUF files; convert to gguf".into());
    let is_speculators = format == CheckpointFormat::Speculators;
    let converts = checkpoint.refusal(CheckpointFormat::Speculators).is_none();
    let own = match is_speculators {
        true => "SpeculatorModel.from_pretrained",
        false if converts => "convert to speculators",
        false => "its layout cannot say this drafter",
    };
    vec![
        known("vLLM", Some(VLLM_VERSION), Engine::Vllm),
        known("SGLang", None, Engine::Sglang),
        EngineCompatibility {
            engine: "llama.cpp",
            tried: gguf.is_ok().then_some(LLAMA_CPP_VERSION),
            loads: false,
            note,
        },
        EngineCompatibility {
            engine: "speculators",
            tried: (is_speculators && usual).then_some(SPECULATORS_VERSION),
            loads: is_speculators,
            note: own.into(),
        },
    ]
}

/// The engines that load the drafter: as it is, after a conversion, or within its target. The target's files, for which conversions may be
/// refused, are not considered.
pub fn loading_engines(checkpoint: &Checkpoint) -> Vec<Engine> {
    let (drafter, as_it_is) = (checkpoint.drafter(), engine_compatibility(checkpoint));
    let loads = |engine: &Engine| {
        is_written_for(checkpoint, *engine)
            || as_it_is.iter().any(|known| known.engine == engine.title() && known.loads)
            || drafter.kind.is_loaded_within_target(drafter.family)
    };
    Engine::ALL.into_iter().filter(loads).collect()
}

/// Whether the drafter and its rotary embeddings can be written in the layout of `engine`.
fn is_written_for(checkpoint: &Checkpoint, engine: Engine) -> bool {
    let drafter = checkpoint.drafter();
    let is_written = match engine {
        Engine::LlamaCpp => drafter.kind.gguf_parts(drafter).is_ok_and(|parts| {
            parts.has_own_rope() || llama_cpp_rope(checkpoint, engine.export_name()).is_ok()
        }),
        Engine::Vllm | Engine::Sglang => {
            drafter.kind.engine_format(engine, drafter).is_ok()
                && engine_rope_parameters(checkpoint, engine.export_name()).is_ok()
        }
    };
    is_written && drafter.reason_not_convertible().is_none()
}

/// The conversion that lets `engine` load a checkpoint that it does not load as it is. Empty if there is none.
fn remedy(checkpoint: &Checkpoint, engine: Engine) -> String {
    let drafter = checkpoint.drafter();
    // In the reference's format a conversion adds what the engine asks for.
    let changes = |format| {
        format == CheckpointFormat::Reference
            || format != checkpoint.format()
            || checkpoint.unread_by(engine).is_some()
    };
    let does_change = drafter.kind.engine_format(engine, drafter).is_ok_and(changes);
    match does_change && is_written_for(checkpoint, engine) {
        true => format!("; convert to {}", engine.export_name()),
        false => String::new(),
    }
}

/// Says why engines cannot load these layers, or why that is unknown. None if an engine may load
/// them. No engine supports drafters whose norms follow attention and MLP. Engines do not know the
/// reference's classes if the layers lack query and key norms.
fn unsupported_layers(checkpoint: &Checkpoint, engine: Engine) -> Option<String> {
    let family = checkpoint.drafter().family;
    if let Some((key, reason)) = checkpoint.unsupported() {
        return Some(format!("not known, for `{key}` is not run here: {reason}"));
    }
    match checkpoint.format() {
        _ if !family.pre_norm => Some(format!("no engine's drafter has {family} layers")),
        CheckpointFormat::Reference if !family.qk_norm => {
            Some(format!("no engine knows this class with {family} layers{}", remedy(checkpoint, engine)))
        }
        _ => None,
    }
}
