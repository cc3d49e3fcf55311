//! How engines draft and verify with a drafter above temperature 0, from the sources of vLLM 0.32, SGLang 0.5.23 and llama.cpp.

use std::path::Path;

use deepspec_checkpoint::{Checkpoint, Drafter, Engine, loading_engines};
use deepspec_engine::DraftSampling::{self, Greedy, Probabilistic};
use deepspec_engine::VerifyRule::{self, Block, Token};
use serde::{Deserialize, Serialize};

use crate::registry::{find_complete_checkpoint_kind, open_checkpoint};

/// A way in which an engine drafts and verifies with a drafter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineRule {
    /// Name of the engine.
    pub engine: String,
    /// Choice of drafted tokens.
    pub draft_sampling: DraftSampling,
    /// Rule that accepts drafted tokens.
    pub verify: VerifyRule,
    /// Settings of the engine that ask for it. Empty for the engine's default.
    pub settings: Vec<String>,
}

/// Draft sampling, verification and settings.
type Rule = (DraftSampling, VerifyRule, &'static [&'static str]);

const VLLM_DRAWS: &str = "draft_sample_method: probabilistic";
const VLLM_BLOCK: &str = "rejection_sample_method: block";
/// The runner that drafts all tokens of P-EAGLE in one pass has the first two rules only.
static VLLM: [Rule; 4] = [
    (Greedy, Token, &[]),
    (Probabilistic, Token, &[VLLM_DRAWS]),
    (Greedy, Block, &[VLLM_BLOCK]),
    (Probabilistic, Block, &[VLLM_BLOCK, VLLM_DRAWS]),
];

const SGLANG_BLOCK: &str = "--speculative-use-block-verification";
const SGLANG_GREEDY: &str = "SGLANG_DSPARK_USE_GREEDY_DRAFT=1";
static SGLANG_DSPARK: [Rule; 4] = [
    (Probabilistic, Token, &[]),
    (Greedy, Token, &[SGLANG_GREEDY]),
    (Probabilistic, Block, &[SGLANG_BLOCK]),
    (Greedy, Block, &[SGLANG_BLOCK, SGLANG_GREEDY]),
];
static SGLANG_DFLASH2: [Rule; 2] = [(Probabilistic, Token, &[]), (Probabilistic, Block, &[SGLANG_BLOCK])];
/// Without it, SGLang grows trees for targets of Llama.
const SGLANG_CHAIN: &str = "--speculative-eagle-topk 1";
static SGLANG_EAGLE: [Rule; 3] = [
    (Greedy, Token, &[SGLANG_CHAIN]),
    (Probabilistic, Token, &[SGLANG_CHAIN, "--speculative-use-rejection-sampling"]),
    (Probabilistic, Block, &[SGLANG_CHAIN, SGLANG_BLOCK]),
];

/// The only rule of llama.cpp, and of SGLang with all other drafters.
static GREEDY_ONLY: [Rule; 1] = [(Greedy, Token, &[])];

/// How engines draft and verify with the drafter in `dir`. Empty if no engine loads it. None if the folder is no drafter that is read
/// here.
pub fn engine_rules(dir: &Path) -> Option<Vec<EngineRule>> {
    let kind = find_complete_checkpoint_kind(dir).ok()?;
    let checkpoint = match kind.layouts {
        Some(_) => Some(open_checkpoint(dir).ok()?),
        None => None,
    };
    let engines = checkpoint.as_ref().map_or_else(|| kind.engines.to_vec(), loading_engines);
    let drafter = checkpoint.as_ref().map(Checkpoint::drafter);
    let named = |engine: Engine| {
        rules(engine, drafter).iter().map(move |&(draft_sampling, verify, settings)| EngineRule {
            engine: engine.title().into(),
            draft_sampling,
            verify,
            settings: settings.iter().map(|&setting| setting.into()).collect(),
        })
    };
    Some(engines.into_iter().flat_map(named).collect())
}

/// The rules of an engine that loads the drafter. None is a drafter without [`deepspec_checkpoint::KindSettings`].
fn rules(engine: Engine, drafter: Option<&Drafter>) -> &'static [Rule] {
    let is = |name: &str| drafter.is_some_and(|drafter| drafter.kind.name() == name);
    match engine {
        Engine::LlamaCpp => &GREEDY_ONLY,
        Engine::Vllm if drafter.is_some_and(|drafter| drafter.kind.drafts_in_parallel()) => &VLLM[..2],
        Engine::Vllm => &VLLM,
        Engine::Sglang if drafter.is_some_and(|drafter| drafter.kind.method() == "dspark") => &SGLANG_DSPARK,
        Engine::Sglang if is("dflash2") => &SGLANG_DFLASH2,
        // Its rejection sampling refuses a reduced vocabulary.
        Engine::Sglang if is("eagle3") && drafter.is_some_and(Drafter::has_reduced_vocab) => {
            &SGLANG_EAGLE[..1]
        }
        Engine::Sglang if is("eagle3") || is("mtp") => &SGLANG_EAGLE,
        Engine::Sglang => &GREEDY_ONLY,
    }
}
