//! The batched speculative decoding engine.
//!
//! A *slot* is one sequence with its KV cache. In each step the drafter proposes a block of tokens
//! for every decoding slot. The target scores all blocks, and the prompts of newly admitted
//! sequences, in one forward. [`deepspec_ops::verify`] then commits tokens whose distribution is exactly the
//! target's. Plain decoding is the same loop with empty blocks. With [`VerifyRule::Tree`] the drafter grows a
//! tree for every slot in place of a block.
//!
//! Legend: S sequences in a step, Γ longest proposal, γ block size, V vocabulary, N fed tokens, d
//! hidden size, m captured layers.

mod acceptance_stats;
mod engine;
mod model;
mod outcome;
mod replicas;
mod request;
mod sampling;
mod tree;

pub use acceptance_stats::AcceptanceStats;
pub use engine::{Engine, catch_out_of_memory, sequence_bytes};
pub use model::{Context, DraftRequest, ModelInput, ModelOutput, Proposal, Proposer, Target, TreeTarget};
pub use replicas::{EngineReplicas, Generator, split_evenly};
pub use request::{
    Completion, Cycle, DraftSampling, EngineError, EngineOptions, Event, Finish, Request, RequestId,
    StepTimes, VerifyRule,
};
pub use sampling::{Sampling, SamplingBatch};
pub use tree::{GrownRow, MAX_TREE_NODES, TreeBudget, grow_tree, likeliest_tokens};

/// Whether a count is 0 and need not be serialised.
fn is_zero<T: Default + PartialEq>(count: &T) -> bool {
    *count == T::default()
}
