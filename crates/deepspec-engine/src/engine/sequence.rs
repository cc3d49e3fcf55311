//! A running sequence.

use deepspec_core::rng::Stream;

use super::uniforms::UniformTable;
use crate::{Completion, Cycle, Finish, Request, RequestId};

/// A request that is being generated.
pub struct Sequence {
    pub request_id: RequestId,
    pub request: Request,
    /// Source of its random numbers.
    pub stream: Stream,
    /// Tokens in the target's KV cache.
    pub target_len: usize,
    /// Tokens in the drafter's context.
    pub drafter_len: usize,
    /// Maximum bytes of its KV caches.
    pub bytes: u64,
    /// Last committed token. None before the prompt's forward pass.
    pub anchor: Option<i64>,
    /// Random numbers of later steps that are on the device already.
    pub uniforms: Option<UniformTable>,
    generated: Vec<i64>,
    cycles: Vec<Cycle>,
}

impl Sequence {
    /// A sequence whose prompt has not been run.
    pub fn new(request_id: RequestId, request: Request, bytes: u64) -> Self {
        let stream = Stream::new(request.sampling.seed, &request.id);
        Self {
            request_id,
            request,
            stream,
            target_len: 0,
            drafter_len: 0,
            bytes,
            anchor: None,
            uniforms: None,
            generated: vec![],
            cycles: vec![],
        }
    }

    /// Index of the sequence's next step, which keys its random numbers.
    pub fn step_index(&self) -> u64 {
        if self.anchor.is_some() { 1 + self.cycles.len() as u64 } else { 0 }
    }

    /// Records the verification of a drafted block.
    pub fn record_cycle(&mut self, cycle: Cycle) {
        self.cycles.push(cycle);
    }

    /// Commits at least one token, and returns the tokens within the limit of new tokens.
    pub fn commit(&mut self, tokens: &[i64]) -> Vec<i64> {
        let room = self.request.max_new_tokens.saturating_sub(self.generated.len());
        self.generated.extend(tokens);
        self.anchor = tokens.last().copied();
        tokens.iter().copied().take(room).collect()
    }

    /// Reason why the sequence ends after `tokens`; None if it continues. With `overrun`, an answer
    /// of exactly `max_new_tokens` gets another cycle.
    pub fn finish_reason(&self, tokens: &[i64], overrun: bool) -> Option<Finish> {
        let (generated, limit) = (self.generated.len() + tokens.len(), self.request.max_new_tokens);
        let ended = tokens.last().is_some_and(|anchor| self.request.stop_ids.contains(anchor));
        let full = if overrun { generated > limit } else { generated >= limit };
        match ended && generated <= limit {
            true => Some(Finish::Stop),
            false => (ended || full).then_some(Finish::Length),
        }
    }

    /// Tokens of the prompt and of the answer so far.
    pub fn len(&self) -> usize {
        self.request.prompt.len() + self.generated.len()
    }

    /// The finished answer, cut to the limit of new tokens.
    pub fn into_completion(mut self, finish: Finish) -> Completion {
        self.generated.truncate(self.request.max_new_tokens);
        Completion { id: self.request.id, tokens: self.generated, finish, cycles: self.cycles }
    }
}
