//! The batched speculative decoding engine.
//!
//! A *slot* is a sequence with its key/value history. Each step the drafter proposes a block for every decoding slot, the
//! target scores all blocks (and the prompts of newly admitted sequences) in one forward, and [`deepspec_ops::verify`] commits
//! tokens so that the output is distributed exactly as the target's. Plain decoding is the same loop with empty blocks.
//!
//! Legend: S sequences in a step, Γ longest proposal, γ block size, V vocabulary, N fed tokens, d hidden size, m taps.

mod engine;
mod model;
mod outcome;
mod replicas;
mod request;
mod sampling;
mod tally;

pub use engine::Engine;
pub use model::{Context, DraftRequest, ModelInput, ModelOutput, Proposal, Proposer, Target};
pub use replicas::{EngineReplicas, Generator, shares};
pub use request::{
    Completion, Cycle, DraftSampling, EngineError, EngineOptions, Event, Finish, Request, RequestId,
    StepTimes,
};
pub use sampling::{Sampling, SamplingBatch};
pub use tally::Tally;
