//! Turns of conversations: their requests, and the turns that follow an answer.

use deepspec_datasets::suites::TokenizedSuite;
use deepspec_engine::{Finish, Request, Sampling};
use deepspec_text::{Message, Role, without_reasoning};

use super::decode::DecodePlan;
use super::entry::{AnswerKey, DecodeMode};
use crate::results::Turns;

/// A turn that waits for its answer.
pub struct PendingTurn {
    /// Index of the suite's request.
    pub sample: usize,
    /// Sampling seed.
    pub seed: u64,
    /// Turn of the conversation, from 0.
    pub turn: usize,
    /// Messages up to and including the turn.
    messages: Vec<Message>,
}

/// Turns after an answer.
pub enum Following {
    /// The next turn.
    Turn(PendingTurn),
    /// No turn; this many are left unasked.
    Nothing { unasked: usize },
}

impl PendingTurn {
    /// The first turn of a sample.
    pub fn first(suite: &TokenizedSuite, sample: usize, seed: u64) -> Self {
        let message = Message::new(Role::User, suite.turns[sample][0].as_str());
        Self { sample, seed, turn: 0, messages: vec![message] }
    }

    /// The request of the turn. `Err` has the number of turns that are left unasked, if the
    /// conversation has filled the context.
    ///
    /// # Errors
    /// Fails if the chat template refuses the conversation.
    pub fn request(
        &self,
        plan: &DecodePlan,
        suite: &TokenizedSuite,
    ) -> anyhow::Result<Result<Request, usize>> {
        let first = &suite.requests[self.sample];
        let request = match self.turn {
            0 => first.clone(),
            _ => match plan.asking.request(format!("{}#{}", first.id, self.turn + 1), &self.messages)? {
                Ok(request) => request,
                Err(_) => return Ok(Err(suite.turns[self.sample].len() - self.turn)),
            },
        };
        Ok(Ok(Request { sampling: Sampling { seed: self.seed, ..request.sampling }, ..request }))
    }

    /// The turn after an answer of the text that `answer` gives.
    ///
    /// # Errors
    /// Fails if `answer` does.
    pub fn following(
        self,
        plan: &DecodePlan,
        suite: &TokenizedSuite,
        finish: Finish,
        answer: impl FnOnce() -> anyhow::Result<String>,
    ) -> anyhow::Result<Following> {
        let Self { sample, seed, turn, mut messages } = self;
        let turns = &suite.turns[sample];
        let rest = if plan.turns == Turns::All { &turns[turn + 1..] } else { &[] };
        let Some(said) = rest.first() else { return Ok(Following::Nothing { unasked: 0 }) };
        if finish == Finish::Length {
            return Ok(Following::Nothing { unasked: rest.len() });
        }
        // As clients of a server do: the answer without its thinking text.
        messages.push(Message::new(Role::Assistant, without_reasoning(&answer()?)));
        messages.push(Message::new(Role::User, said.as_str()));
        Ok(Following::Turn(Self { sample, seed, turn: turn + 1, messages }))
    }

    /// Key of the turn's answer.
    pub fn key(&self, suite: &TokenizedSuite, mode: DecodeMode) -> AnswerKey {
        AnswerKey {
            mode,
            suite: suite.rows.suite.name.to_string(),
            sample: suite.ids[self.sample].clone(),
            seed: self.seed,
            turn: self.turn,
        }
    }
}
