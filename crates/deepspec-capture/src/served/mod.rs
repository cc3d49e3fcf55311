//! Hidden states of a target that vLLM serves.
//!
//! vLLM's `extract_hidden_states` writes the states of each request to a file and returns its path.
//! [`ServedTarget`] sends prompts, reads and checks the files, deletes them, and applies the
//! target's final norm. Any architecture, quantisation and parallelism that vLLM runs will do.
//!
//! Layer ids of vLLM count from the embedding: id L is the input of decoder layer L, and id N (the
//! number of layers) is the last layer's output before the final norm.

mod answers;
mod check;
mod command;
mod files;
mod pool;
mod reader;
mod stream;
mod vllm;

pub use answers::{AnswerStates, AnswerStatesReader, ServedAnswer};
pub use command::ServeCommand;
pub use files::{sweep_leftovers, sweep_regularly, take_states};
pub use stream::ServedTarget;
pub use vllm::{
    AGENT_PROTOCOL, MIN_VLLM_VERSION, Served, ServerInfo, VllmServer, check_version, http_client,
};

use std::time::Duration;

use deepspec_core::Tap;

/// Environment variable with the token that agents require.
pub const TOKEN_VARIABLE: &str = "DEEPSPEC_STATES_TOKEN";

/// Timeouts and limits of requests for states.
#[derive(Debug, Clone, Copy)]
pub struct ServedLimits {
    /// Maximum duration of a request.
    pub request: Duration,
    /// Maximum wait for a file after the server's answer. A loaded server writes it one engine step
    /// later.
    pub file: Duration,
    /// Maximum time during which no server answers.
    pub outage: Duration,
    /// Number of requests for one sample that may fail before the run does.
    pub attempts: usize,
    /// Tokens in flight per server: about two engine steps, because files lag by one step.
    pub tokens_per_server: usize,
    /// Leftover files of this age are deleted.
    pub leftover_age: Duration,
}

impl Default for ServedLimits {
    fn default() -> Self {
        Self {
            request: Duration::from_secs(600),
            file: Duration::from_secs(120),
            outage: Duration::from_secs(1800),
            attempts: 3,
            tokens_per_server: 16_384,
            leftover_age: Duration::from_secs(900),
        }
    }
}

/// The layer ids to request, ascending and unique, with the last layer's at the end.
pub fn layer_ids(taps: &[Tap], layers: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = taps.iter().map(|tap| (tap.layer_id() + 1) as u32).collect();
    ids.push(layers as u32);
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Why a request returned no states.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The server cannot be reached or is starting; another may answer.
    Unreachable(String),
    /// This request failed; a new one may succeed.
    Request(String),
    /// No request of this kind can succeed.
    Final(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_ascend_and_end_with_the_last_layer() {
        let taps = [Tap::Embedding, Tap::Layer(1), Tap::Layer(5)];
        assert_eq!(layer_ids(&taps, 6), [0, 2, 6]);
        assert_eq!(layer_ids(&taps[1..2], 6), [2, 6]);
    }
}
