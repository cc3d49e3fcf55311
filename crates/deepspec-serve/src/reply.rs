//! An answer in the making: tokens become text, text is cut at stop strings and parted from thoughts.

use std::sync::Arc;

use deepspec_engine::Finish;
use deepspec_text::{FinishReason, TokenStream};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::engine::Update;
use crate::error::ChatError;
use crate::stop::{Scan, StopFinder};
use crate::thinking::{Delta, ThoughtSplitter};

/// Token counts of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the rendered conversation.
    pub prompt: usize,
    /// Tokens generated, an end-of-turn token included.
    pub completion: usize,
}

/// An answer in the making.
pub struct Reply {
    news: UnboundedReceiver<Update>,
    /// None once it is flushed.
    tokens: Option<TokenStream>,
    stops: StopFinder,
    thoughts: ThoughtSplitter,
    stop_ids: Arc<[i64]>,
    prompt: Vec<i64>,
    generated: Vec<i64>,
    finish: Option<FinishReason>,
    /// The stop string that ended it.
    stop: Option<String>,
}

impl Reply {
    pub(super) fn new(
        news: UnboundedReceiver<Update>,
        tokens: TokenStream,
        text: &str,
        prompt: Vec<i64>,
        stop_ids: Arc<[i64]>,
        stops: &[String],
    ) -> Self {
        Self {
            news,
            tokens: Some(tokens),
            stops: StopFinder::new(stops),
            thoughts: ThoughtSplitter::after(text),
            stop_ids,
            prompt,
            generated: vec![],
            finish: None,
            stop: None,
        }
    }

    /// The next piece of text, None behind the last one.
    ///
    /// # Errors
    /// If the engine refuses the request or the tokens cannot be decoded.
    pub async fn next(&mut self) -> Result<Option<Delta>, ChatError> {
        while self.finish.is_none() {
            let delta = match self.news.recv().await {
                Some(Update::Tokens(tokens)) => self.take(&tokens)?,
                Some(Update::Done(finish)) => self.end(finish)?,
                Some(Update::Refused(error)) => return Err(error.into()),
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
    /// As [`Reply::next`].
    pub async fn collect(&mut self) -> Result<Delta, ChatError> {
        let mut whole = Delta::default();
        while let Some(delta) = self.next().await? {
            whole.extend(&delta);
        }
        Ok(whole)
    }

    /// Why it ended, once it has.
    pub fn finish(&self) -> Option<FinishReason> {
        self.finish
    }

    /// The stop string that ended it, if one did.
    pub fn stop(&self) -> Option<&str> {
        self.stop.as_deref()
    }

    /// Tokens so far.
    pub fn usage(&self) -> Usage {
        Usage { prompt: self.prompt.len(), completion: self.generated.len() }
    }

    /// The tokens of the rendered conversation.
    pub fn prompt_token_ids(&self) -> &[i64] {
        &self.prompt
    }

    /// The tokens generated so far, an end-of-turn token included.
    pub fn token_ids(&self) -> &[i64] {
        &self.generated
    }

    /// Takes tokens one by one, so that the result does not depend on how many came at once.
    fn take(&mut self, tokens: &[i64]) -> Result<Delta, ChatError> {
        let mut delta = Delta::default();
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
            self.read(&piece, &mut delta);
            if self.finish.is_some() {
                break;
            }
        }
        Ok(delta)
    }

    /// Passes text on up to a stop string, which ends the answer and the engine's work on it.
    fn read(&mut self, piece: &str, delta: &mut Delta) {
        match self.stops.push(piece) {
            Scan::Text(text) => delta.extend(&self.thoughts.push(&text)),
            Scan::Stopped(text, stop) => {
                delta.extend(&self.thoughts.push(&text));
                delta.extend(&self.thoughts.finish());
                (self.finish, self.stop) = (Some(FinishReason::StopSequence), Some(stop));
                self.news.close();
            }
        }
    }

    /// Lets out what was held back.
    fn end(&mut self, finish: Finish) -> Result<Delta, ChatError> {
        let mut delta = Delta::default();
        if let Some(stream) = self.tokens.take() {
            let piece = stream.finish().map_err(|error| ChatError::Internal(error.to_string()))?;
            self.read(&piece, &mut delta);
        }
        if self.finish.is_none() {
            delta.extend(&self.thoughts.push(&self.stops.finish()));
            delta.extend(&self.thoughts.finish());
            self.finish = Some(match finish {
                Finish::Stop => FinishReason::Stop,
                Finish::Length => FinishReason::Length,
            });
        }
        Ok(delta)
    }
}
