//! A running answer: decodes tokens to text, cuts it at stop strings and separates the reasoning.

use std::sync::Arc;

use deepspec_engine::Finish;
use deepspec_text::{FinishReason, IncrementalDetokenizer};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::engine::RequestUpdate;
use crate::error::ChatError;
use crate::reasoning::{AnswerDelta, ReasoningParser};
use crate::stop::{StopFinder, StopScan};

/// Token counts of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Tokens in the rendered conversation.
    pub prompt: usize,
    /// Generated tokens, including an end-of-turn token.
    pub completion: usize,
}

/// A running answer.
pub struct ResponseStream {
    updates: UnboundedReceiver<RequestUpdate>,
    /// Decoder of the remaining text. None after the stream was flushed.
    tokens: Option<IncrementalDetokenizer>,
    stops: StopFinder,
    reasoning: ReasoningParser,
    stop_ids: Arc<[i64]>,
    prompt: Vec<i64>,
    generated: Vec<i64>,
    finish: Option<FinishReason>,
    /// The stop string that ended the answer.
    stop: Option<String>,
}

impl ResponseStream {
    pub(super) fn new(
        updates: UnboundedReceiver<RequestUpdate>,
        tokens: IncrementalDetokenizer,
        text: &str,
        prompt: Vec<i64>,
        stop_ids: Arc<[i64]>,
        stops: &[String],
    ) -> Self {
        Self {
            updates,
            tokens: Some(tokens),
            stops: StopFinder::new(stops),
            reasoning: ReasoningParser::for_prompt(text),
            stop_ids,
            prompt,
            generated: vec![],
            finish: None,
            stop: None,
        }
    }

    /// Returns the next piece of text; None after the last one.
    ///
    /// # Errors
    /// Fails if the engine rejects the request, or if tokens cannot be decoded.
    pub async fn next(&mut self) -> Result<Option<AnswerDelta>, ChatError> {
        while self.finish.is_none() {
            let delta = match self.updates.recv().await {
                Some(RequestUpdate::Tokens(tokens)) => self.push_tokens(&tokens)?,
                Some(RequestUpdate::Done(finish)) => self.finish_answer(finish)?,
                Some(RequestUpdate::Refused(error)) => return Err(error.into()),
                None => return Err(ChatError::Internal("the engine has ended".into())),
            };
            if !delta.is_empty() {
                return Ok(Some(delta));
            }
        }
        Ok(None)
    }

    /// The whole answer.
    ///
    /// # Errors
    /// As [`ResponseStream::next`].
    pub async fn collect(&mut self) -> Result<AnswerDelta, ChatError> {
        let mut whole = AnswerDelta::default();
        while let Some(delta) = self.next().await? {
            whole.extend(&delta);
        }
        Ok(whole)
    }

    /// Reason why the answer ended; None while it is being generated.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finish
    }

    /// The stop string that ended the answer; None if no stop string ended it.
    pub fn stop_string(&self) -> Option<&str> {
        self.stop.as_deref()
    }

    /// Token counts so far.
    pub fn usage(&self) -> Usage {
        Usage { prompt: self.prompt.len(), completion: self.generated.len() }
    }

    /// Token ids of the rendered conversation.
    pub fn prompt_token_ids(&self) -> &[i64] {
        &self.prompt
    }

    /// Generated token ids so far, including an end-of-turn token.
    pub fn token_ids(&self) -> &[i64] {
        &self.generated
    }

    /// Processes tokens one by one, so that the result does not depend on how many arrive together.
    fn push_tokens(&mut self, tokens: &[i64]) -> Result<AnswerDelta, ChatError> {
        let mut delta = AnswerDelta::default();
        for token in tokens {
            self.generated.push(*token);
            if self.stop_ids.contains(token) {
                continue;
            }
            let Some(stream) = &mut self.tokens else { continue };
            let Some(piece) = stream.push(*token).map_err(|error| ChatError::Internal(error.to_string()))?
            else {
                continue;
            };
            self.push_text(&piece, &mut delta);
            if self.finish.is_some() {
                break;
            }
        }
        Ok(delta)
    }

    /// Passes text on until a stop string, which ends the answer and cancels the request.
    fn push_text(&mut self, piece: &str, delta: &mut AnswerDelta) {
        match self.stops.push(piece) {
            StopScan::Text(text) => delta.extend(&self.reasoning.push(&text)),
            StopScan::Stopped(text, stop) => {
                delta.extend(&self.reasoning.push(&text));
                delta.extend(&self.reasoning.finish());
                (self.finish, self.stop) = (Some(FinishReason::StopSequence), Some(stop));
                self.updates.close();
            }
        }
    }

    /// Flushes the held-back text.
    fn finish_answer(&mut self, finish: Finish) -> Result<AnswerDelta, ChatError> {
        let mut delta = AnswerDelta::default();
        if let Some(stream) = self.tokens.take() {
            let piece = stream.finish().map_err(|error| ChatError::Internal(error.to_string()))?;
            self.push_text(&piece, &mut delta);
        }
        if self.finish.is_none() {
            delta.extend(&self.reasoning.push(&self.stops.finish()));
            delta.extend(&self.reasoning.finish());
            self.finish = Some(match finish {
                Finish::Stop => FinishReason::Stop,
                Finish::Length => FinishReason::Length,
            });
        }
        Ok(delta)
    }
}
