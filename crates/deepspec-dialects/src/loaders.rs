//! Which engines load a checkpoint as it is, as far as their sources told (vLLM after PR 46995, SGLang as read in August 2026).

use deepspec_core::Slots;
use serde::Serialize;

use crate::drafter::{Algorithm, Drafter, MarkovKind};
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
    let engines = [vllm(checkpoint), sglang(checkpoint)];
    let engines = engines.map(|loader| blocked(loader, drafter, checkpoint.dialect()));
    engines.into_iter().chain([own]).collect()
}

/// Gemma 4 drafters are loaded by nobody yet; the reference's layout with Llama layers, or with slots that fill in, is not known to
/// others.
fn blocked(loader: Loader, drafter: &Drafter, dialect: Dialect) -> Loader {
    let fills_in = drafter.block().is_some_and(|block| block.slots == Slots::FillIn);
    let stops = |note| Loader { loads: false, note, ..loader };
    match dialect {
        _ if drafter.family == &GEMMA4 => stops("no engine's drafter has Gemma 4 layers"),
        Dialect::Reference if drafter.family == &LLAMA => {
            stops("no engine knows this class with Llama layers")
        }
        Dialect::Reference if fills_in && drafter.algorithm() == Algorithm::Dspark => stops(
            "released versions take every slot to draft, and no other layout has heads beside such slots",
        ),
        Dialect::Reference if fills_in => {
            stops("released versions take every slot to draft; convert to z-lab")
        }
        _ => loader,
    }
}

fn vllm(checkpoint: &Checkpoint) -> Loader {
    let drafter = checkpoint.drafter();
    let kind = drafter.block().and_then(|block| block.markov).map(|markov| markov.kind);
    let (loads, note) = match (checkpoint.dialect(), drafter.algorithm()) {
        (_, Algorithm::Dspark) if !matches!(kind, None | Some(MarkovKind::Vanilla)) => {
            (false, "its DSpark is documented for the vanilla Markov head only")
        }
        (Dialect::Reference, Algorithm::Dspark) => (true, "method dspark (its native layout)"),
        (Dialect::Reference, Algorithm::Dflash) => {
            (false, "method dflash crashes on it; PR 49646 routes it to method dspark")
        }
        (Dialect::Reference, Algorithm::Eagle3) => {
            (false, "the class is not registered; convert to speculators")
        }
        (Dialect::Speculators, _) => (true, "from the config's own method"),
        (Dialect::Specforge, Algorithm::Dspark) => {
            (false, "before PR 52197 DSparkDraftModel means DeepSeek-V4 there; convert to reference")
        }
        (Dialect::Zlab, _) => (true, "method dflash"),
        (Dialect::Modelopt, _) => {
            (false, "it knows the heads by the reference's names; convert to reference")
        }
        (Dialect::Specforge, _) => (true, "method eagle3"),
    };
    Loader { engine: "vLLM", loads, note }
}

fn sglang(checkpoint: &Checkpoint) -> Loader {
    let drafter = checkpoint.drafter();
    let has_markov = drafter.block().is_some_and(|block| block.markov.is_some());
    let (loads, note) = match (checkpoint.dialect(), drafter.algorithm()) {
        (Dialect::Speculators, _) => {
            (false, "speculators_model_type was refused when read (issues 30982, 34734)")
        }
        (Dialect::Reference, Algorithm::Eagle3) => (false, "its Eagle3 has no norms on queries and keys"),
        (Dialect::Modelopt, _) => {
            (false, "it knows the heads by the reference's names; convert to reference")
        }
        (Dialect::Zlab, _) => (true, "--speculative-algorithm DFLASH"),
        (_, Algorithm::Eagle3) => (true, "--speculative-algorithm EAGLE3"),
        _ if has_markov => (true, "--speculative-algorithm DSPARK"),
        _ => (false, "DSPARK needs markov_rank > 0"),
    };
    Loader { engine: "SGLang", loads, note }
}
