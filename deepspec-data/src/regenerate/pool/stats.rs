//! Request statistics by server.

use serde_json::{Map, Value, json};

use super::super::answer::TokenCounts;
use super::failure::FailureClass;

/// Statistics of one server.
#[derive(Debug, Clone, Default)]
pub struct ServerStats {
    /// Requests answered.
    pub answered: u64,
    /// Tokens of these requests.
    pub tokens: TokenCounts,
    failures: [u64; FailureClass::ALL.len()],
    /// How often the circuit opened.
    pub given_up: u64,
}

impl ServerStats {
    /// Counts a failure.
    pub fn fail(&mut self, class: FailureClass) {
        self.failures[class as usize] += 1;
    }

    /// Failures of a class.
    pub fn count(&self, class: FailureClass) -> u64 {
        self.failures[class as usize]
    }

    /// Number of failed requests.
    pub fn failures(&self) -> u64 {
        self.failures.iter().sum()
    }

    /// Number of failures by class, as text.
    pub fn classes(&self) -> String {
        let counted = FailureClass::ALL.iter().zip(self.failures).filter(|(_, count)| *count > 0);
        counted.map(|(class, count)| format!("{} {count}", class.name())).collect::<Vec<_>>().join(", ")
    }

    /// The statistics as JSON.
    pub fn to_json(&self, url: &str, dropped: &[&str]) -> Value {
        let counted = FailureClass::ALL.iter().zip(self.failures).filter(|(_, count)| *count > 0);
        let failures: Map<String, Value> =
            counted.map(|(class, count)| (class.name().to_string(), json!(count))).collect();
        json!({
            "url": url,
            "answered": self.answered,
            "prompt_tokens": self.tokens.prompt,
            "completion_tokens": self.tokens.completion,
            "failures": failures,
            "given_up": self.given_up,
            "dropped_fields": dropped,
        })
    }
}
