//! An answer of an evaluation.

use deepspec_engine::{Completion, Cycle, Finish};
use serde::{Deserialize, Serialize};

use crate::results::Timing;

/// Whether an answer was drafted or decoded plainly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DecodeMode {
    /// With the drafter of the run, or without one if it has none.
    Main,
    /// With the drafter of the run, whose tokens are chosen by the rule that is not the run's.
    Other,
    /// Plain decoding beside a drafter.
    Baseline,
}

/// Which answer.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Key {
    /// How it was decoded.
    pub arm: DecodeMode,
    /// The suite's name.
    pub suite: String,
    /// The sample's id.
    pub sample: String,
    /// Seed of its draws.
    pub seed: u64,
    /// Turn of the conversation, from 0.
    pub turn: usize,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Which one.
    pub key: Key,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Its tokens.
    pub tokens: Vec<i64>,
    /// Why it ended.
    pub finish: Finish,
    /// Its verifications.
    pub cycles: Vec<Cycle>,
    /// What went by since the answer before it.
    pub timing: Timing,
}

impl Entry {
    /// The answer as the engine reported it.
    pub fn completion(self, id: String) -> Completion {
        Completion { id, tokens: self.tokens, finish: self.finish, cycles: self.cycles }
    }
}
