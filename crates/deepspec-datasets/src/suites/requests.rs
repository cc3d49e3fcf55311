//! Makes engine requests from rows.

use anyhow::Context;
use deepspec_core::usage;
use deepspec_engine::{Request, Sampling};
use deepspec_text::{ChatTokenizer, Message, Role, generation_prompt};

use crate::suites::SuiteRows;

/// Settings that all requests share.
pub struct RequestTemplate<'a> {
    /// The target's tokenizer.
    pub tokenizer: &'a ChatTokenizer,
    /// Sampling settings.
    pub sampling: Sampling,
    /// Maximum number of generated tokens per prompt.
    pub max_new_tokens: usize,
    /// The chat template's `enable_thinking`.
    pub thinking: bool,
    /// System message of every prompt; None for prompts without one.
    pub system_prompt: Option<&'a str>,
    /// Tokens that end an answer.
    pub stop_ids: &'a [i64],
    /// The target's context length, in tokens of prompt and answer.
    pub context: usize,
    /// The target's vocabulary size; prompt ids are below it.
    pub vocab_size: usize,
}

/// Why the target cannot run a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptError {
    /// The prompt has this many tokens, which leaves no room for an answer.
    TooLong(usize),
    /// The prompt has this token, which is outside the target's vocabulary.
    UnknownToken(i64),
}

/// A suite ready for generation.
pub struct TokenizedSuite {
    /// Rows of the suite.
    pub rows: SuiteRows,
    /// Ids of the rows to generate, in the order of the requests.
    pub ids: Vec<String>,
    /// One request per row for its first turn, named `suite/row`.
    pub requests: Vec<Request>,
    /// User messages of each row, turn by turn.
    pub turns: Vec<Vec<String>>,
    /// Ids of skipped rows, whose prompts leave no room for an answer or have tokens outside the
    /// vocabulary.
    pub skipped: Vec<String>,
    /// Number of requests with a lower token limit than asked for.
    pub shortened: usize,
}

impl RequestTemplate<'_> {
    /// Tokenises the prompts of a suite and fits them into the context length.
    ///
    /// # Errors
    /// Fails if the chat template refuses a prompt, or if no prompt fits.
    pub fn prepare(&self, rows: SuiteRows) -> anyhow::Result<TokenizedSuite> {
        let (mut ids, mut requests, mut turns, mut skipped) = (vec![], vec![], vec![], vec![]);
        let name = rows.suite.name.as_str();
        for sample in &rows.samples {
            let id = format!("{name}/{}", sample.id);
            match self.request(id, &[Message::new(Role::User, sample.turns[0].as_str())])? {
                Ok(request) => {
                    ids.push(sample.id.clone());
                    requests.push(request);
                    turns.push(sample.turns.clone());
                }
                Err(problem) => {
                    let (id, context, vocab) = (&sample.id, self.context, self.vocab_size);
                    let problem = match problem {
                        PromptError::TooLong(length) => {
                            format!("its prompt has {length} tokens, the target holds {context}")
                        }
                        PromptError::UnknownToken(token) => {
                            format!("its prompt has token {token}, the target's vocabulary has {vocab}")
                        }
                    };
                    tracing::warn!("{name}/{id} is skipped: {problem}");
                    skipped.push(sample.id.clone());
                }
            }
        }
        let shortened =
            requests.iter().filter(|request| request.max_new_tokens < self.max_new_tokens).count();
        if requests.is_empty() {
            let (context, vocab) = (self.context, self.vocab_size);
            usage!("{name}: no prompt fits into the target's {context} tokens and its vocabulary of {vocab}");
        }
        if shortened > 0 {
            let (count, asked, context) = (requests.len(), self.max_new_tokens, self.context);
            tracing::info!(
                "{name}: {shortened} of {count} answers have less room than {asked} tokens, because the target holds \
                 {context} with the prompt"
            );
        }
        Ok(TokenizedSuite { rows, ids, requests, turns, skipped, shortened })
    }

    /// Makes the request for the next answer of a conversation, or returns why the target cannot
    /// run it.
    ///
    /// # Errors
    /// Fails if the chat template refuses the conversation.
    pub fn request(&self, id: String, messages: &[Message]) -> anyhow::Result<Result<Request, PromptError>> {
        let prompt = generation_prompt(self.tokenizer, messages, self.system_prompt, Some(self.thinking))
            .with_context(|| format!("asking {id}"))?;
        let room = self.context.saturating_sub(prompt.len());
        if room == 0 {
            return Ok(Err(PromptError::TooLong(prompt.len())));
        }
        if let Some(&token) = prompt.iter().find(|&&token| token >= self.vocab_size as i64) {
            return Ok(Err(PromptError::UnknownToken(token)));
        }
        Ok(Ok(Request {
            id,
            prompt,
            sampling: self.sampling,
            max_new_tokens: self.max_new_tokens.min(room),
            stop_ids: self.stop_ids.to_vec(),
        }))
    }
}
