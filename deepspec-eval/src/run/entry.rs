//! One answer of an evaluation, as the journal has it.

use deepspec_engine::{Completion, Cycle, Finish};
use serde::{Deserialize, Serialize};

use super::server::ServedFigures;
use crate::results::Timing;

/// Drafter and rule of draft sampling that an answer was decoded with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DecodeMode {
    /// The run's drafter and rule; plain decoding if the run has no drafter.
    Main,
    /// The run's drafter with the other rule of draft sampling.
    Other,
    /// Plain decoding in a run with a drafter.
    Baseline,
}

/// Key of an answer.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AnswerKey {
    /// Mode of decoding.
    #[serde(rename = "arm")]
    pub mode: DecodeMode,
    /// Name of the suite.
    pub suite: String,
    /// Id of the sample.
    pub sample: String,
    /// Sampling seed.
    pub seed: u64,
    /// Turn of the conversation, from 0.
    pub turn: usize,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JournalEntry {
    /// Key of the answer.
    pub key: AnswerKey,
    /// Number of prompt tokens.
    pub prompt_tokens: usize,
    /// Token ids of the answer.
    pub tokens: Vec<i64>,
    /// Reason for its end.
    pub finish: Finish,
    /// Verification cycles.
    pub cycles: Vec<Cycle>,
    /// Time since the answer before it.
    pub timing: Timing,
    /// Counts that a server reported; None for an answer of this program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served: Option<ServedFigures>,
}

impl JournalEntry {
    /// The answer as the engine's completion.
    pub fn into_completion(self, id: String) -> Completion {
        Completion { id, tokens: self.tokens, finish: self.finish, cycles: self.cycles }
    }
}
