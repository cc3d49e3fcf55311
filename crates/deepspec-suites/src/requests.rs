//! From rows to requests.

use deepspec_core::usage;
use deepspec_decode::{Request, Sampling};
use deepspec_text::{ChatTokenizer, Message, Role, generation_prompt};

use crate::{Rows, Sample};

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
    /// One request per such row, named `suite/row`.
    pub requests: Vec<Request>,
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
        let (mut ids, mut requests, mut skipped, mut shortened) = (vec![], vec![], vec![], 0);
        let name = rows.suite.name.as_ref();
        for sample in &rows.samples {
            let prompt = self.prompt(sample)?;
            let room = self.context.saturating_sub(prompt.len());
            if room == 0 {
                let (id, length, context) = (&sample.id, prompt.len(), self.context);
                tracing::warn!(
                    "{name}/{id} is skipped: its prompt has {length} tokens, the target holds {context}"
                );
                skipped.push(sample.id.clone());
                continue;
            }
            shortened += usize::from(room < self.max_new_tokens);
            ids.push(sample.id.clone());
            requests.push(Request {
                id: format!("{name}/{}", sample.id),
                prompt,
                sampling: self.sampling,
                max_new_tokens: self.max_new_tokens.min(room),
                stop_ids: self.stop_ids.to_vec(),
            });
        }
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
        Ok(Prepared { rows, ids, requests, skipped, shortened })
    }

    fn prompt(&self, sample: &Sample) -> anyhow::Result<Vec<i64>> {
        let messages = [Message::new(Role::User, sample.prompt.as_str())];
        Ok(generation_prompt(self.tokenizer, &messages, self.system_prompt, Some(self.thinking))?)
    }
}
