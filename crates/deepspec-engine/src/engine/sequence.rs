//! A sequence in its slot.

use deepspec_core::rng::Stream;

use super::uniforms::Uniforms;
use crate::{Completion, Cycle, Finish, Request, RequestId};

/// A request that is being answered.
pub struct Sequence {
    pub ticket: RequestId,
    pub request: Request,
    /// Where its draws come from.
    pub stream: Stream,
    /// Tokens in the target's history.
    pub held: usize,
    /// Tokens that the drafter has taken in.
    pub seen: usize,
    /// Bytes that its histories may come to take.
    pub bytes: u64,
    /// Last committed token; None until the prompt has been run.
    pub anchor: Option<i64>,
    /// Draws of steps to come that are on the device already.
    pub draws: Option<Uniforms>,
    generated: Vec<i64>,
    cycles: Vec<Cycle>,
}

impl Sequence {
    /// A sequence of which nothing has been run.
    pub fn new(ticket: RequestId, request: Request, bytes: u64) -> Self {
        let stream = Stream::new(request.sampling.seed, &request.id);
        Self {
            ticket,
            request,
            stream,
            held: 0,
            seen: 0,
            bytes,
            anchor: None,
            draws: None,
            generated: vec![],
            cycles: vec![],
        }
    }

    /// Counts forwards of this sequence, the key of its draws.
    pub fn step(&self) -> u64 {
        if self.anchor.is_some() { 1 + self.cycles.len() as u64 } else { 0 }
    }

    /// Keeps what became of a drafted block.
    pub fn record(&mut self, cycle: Cycle) {
        self.cycles.push(cycle);
    }

    /// Commits tokens, at least one; those that its answer has room for.
    pub fn commit(&mut self, tokens: &[i64]) -> Vec<i64> {
        let room = self.request.max_new_tokens.saturating_sub(self.generated.len());
        self.generated.extend(tokens);
        self.anchor = tokens.last().copied();
        tokens.iter().copied().take(room).collect()
    }

    /// Why it ends with these `tokens`, if it does. Where `overrun` counts, an answer that is just full has another cycle.
    pub fn finish(&self, tokens: &[i64], overrun: bool) -> Option<Finish> {
        let (generated, limit) = (self.generated.len() + tokens.len(), self.request.max_new_tokens);
        let ended = tokens.last().is_some_and(|anchor| self.request.stop_ids.contains(anchor));
        let full = if overrun { generated > limit } else { generated >= limit };
        match ended && generated <= limit {
            true => Some(Finish::Stop),
            false => (ended || full).then_some(Finish::Length),
        }
    }

    /// Tokens of prompt and answer so far.
    pub fn len(&self) -> usize {
        self.request.prompt.len() + self.generated.len()
    }

    /// The answer.
    pub fn into_completion(mut self, finish: Finish) -> Completion {
        self.generated.truncate(self.request.max_new_tokens);
        Completion { id: self.request.id, tokens: self.generated, finish, cycles: self.cycles }
    }
}
