//! From rows to requests.

use anyhow::Context;
use deepspec_core::usage;
use deepspec_decode::{Request, Sampling};
use deepspec_text::{ChatTokenizer, Message, Role, generation_prompt};

use crate::Rows;

/// How every prompt is asked.
pub struct Asking<'a> {
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
}

/// A suite ready to decode.
pub struct Prepared {
    /// Its rows.
    pub rows: Rows,
    /// Ids of the rows that are decoded, in the order of the requests.
    pub ids: Vec<String>,
    /// One request per such row, for its first turn, named `suite/row`.
    pub requests: Vec<Request>,
    /// What the user says in each such row, turn by turn.
    pub turns: Vec<Vec<String>>,
    /// Ids of the rows whose prompt leaves no room for an answer.
    pub skipped: Vec<String>,
    /// Requests with less room than asked for.
    pub shortened: usize,
}

impl Asking<'_> {
    /// Tokenises a suite's prompts and fits them into the context.
    ///
    /// # Errors
    /// If the template refuses a prompt, or no prompt fits.
    pub fn prepare(&self, rows: Rows) -> anyhow::Result<Prepared> {
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
                Err(length) => {
                    let (id, context) = (&sample.id, self.context);
                    tracing::warn!(
                        "{name}/{id} is skipped: its prompt has {length} tokens, the target holds {context}"
                    );
                    skipped.push(sample.id.clone());
                }
            }
        }
        let shortened =
            requests.iter().filter(|request| request.max_new_tokens < self.max_new_tokens).count();
        if requests.is_empty() {
            usage!("{name}: no prompt fits into the target's {} tokens", self.context);
        }
        if shortened > 0 {
            let (count, asked, context) = (requests.len(), self.max_new_tokens, self.context);
            tracing::info!(
                "{name}: {shortened} of {count} answers have less room than {asked} tokens, because the target holds \
                 {context} with the prompt"
            );
        }
        Ok(Prepared { rows, ids, requests, turns, skipped, shortened })
    }

    /// Asks for the next answer of a conversation; the prompt's length instead where it leaves no room for an answer.
    ///
    /// # Errors
    /// If the template refuses the conversation.
    pub fn request(&self, id: String, messages: &[Message]) -> anyhow::Result<Result<Request, usize>> {
        let prompt = generation_prompt(self.tokenizer, messages, self.system_prompt, Some(self.thinking))
            .with_context(|| format!("asking {id}"))?;
        let room = self.context.saturating_sub(prompt.len());
        if room == 0 {
            return Ok(Err(prompt.len()));
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
