//! From rows to requests.

use anyhow::Context;
use deepspec_core::usage;
use deepspec_engine::{Request, Sampling};
use deepspec_text::{ChatTokenizer, Message, Role, generation_prompt};

use crate::suites::SuiteRows;

/// How every prompt is asked.
pub struct RequestTemplate<'a> {
    /// The target's tokenizer.
    pub tokenizer: &'a ChatTokenizer,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Limit of generated tokens per prompt.
    pub max_new_tokens: usize,
    /// The chat template's `enable_thinking`.
    pub thinking: bool,
    /// System message before every prompt.
    pub system_prompt: Option<&'a str>,
    /// Tokens that end an answer.
    pub stop_ids: &'a [i64],
    /// Tokens of prompt and answer that the target can hold.
    pub context: usize,
    /// Rows of the target's embedding: ids of prompts are below.
    pub vocab_size: usize,
}

/// Why the target cannot be asked a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unaskable {
    /// It has so many tokens, and the context no room for an answer.
    TooLong(usize),
    /// It has this token, for which the target has no embedding.
    UnknownToken(i64),
}

/// A suite ready to decode.
pub struct TokenizedSuite {
    /// Its rows.
    pub rows: SuiteRows,
    /// Ids of the rows that are decoded, in the order of the requests.
    pub ids: Vec<String>,
    /// One request per such row, for its first turn, named `suite/row`.
    pub requests: Vec<Request>,
    /// What the user says in each such row, turn by turn.
    pub turns: Vec<Vec<String>>,
    /// Ids of the rows whose prompt leaves no room for an answer, or has tokens that the target does not know.
    pub skipped: Vec<String>,
    /// Requests with less room than asked for.
    pub shortened: usize,
}

impl RequestTemplate<'_> {
    /// Tokenises a suite's prompts and fits them into the context.
    ///
    /// # Errors
    /// If the template refuses a prompt, or no prompt fits.
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
                        Unaskable::TooLong(length) => {
                            format!("its prompt has {length} tokens, the target holds {context}")
                        }
                        Unaskable::UnknownToken(token) => {
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

    /// Asks for the next answer of a conversation, or says why that cannot be.
    ///
    /// # Errors
    /// If the template refuses the conversation.
    pub fn request(&self, id: String, messages: &[Message]) -> anyhow::Result<Result<Request, Unaskable>> {
        let prompt = generation_prompt(self.tokenizer, messages, self.system_prompt, Some(self.thinking))
            .with_context(|| format!("asking {id}"))?;
        let room = self.context.saturating_sub(prompt.len());
        if room == 0 {
            return Ok(Err(Unaskable::TooLong(prompt.len())));
        }
        if let Some(&token) = prompt.iter().find(|&&token| token >= self.vocab_size as i64) {
            return Ok(Err(Unaskable::UnknownToken(token)));
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
