//! Checks that a training text continues the prompt that a server renders before each answer.

use crate::conversation::Conversation;
use crate::error::TextError;
use crate::mask::{Served, Supervised};
use crate::message::Role;
use crate::prefixes::PrefixTokenCounts;
use crate::problem::{Problem, RowFindings};
use crate::prompt::render_prompt;
use crate::reasoning;
use crate::rules::ChatTemplate;
use crate::tokenizer::ChatTokenizer;

/// Tokens shown before a difference.
const TOKENS_BEFORE: usize = 3;
/// Maximum number of answers per conversation whose prompts are checked: the first, the last and
/// some between. Each check renders all earlier messages, so checking all answers would take
/// quadratic time.
const MAX_CHECKED_ANSWERS: usize = 24;

/// A conversation and its training text.
pub struct PromptCheck<'a> {
    pub tokenizer: &'a ChatTokenizer,
    pub template: &'a ChatTemplate,
    pub conversation: &'a Conversation,
    pub supervised: &'a Supervised,
}

impl PromptCheck<'_> {
    /// Adds a problem to `checked` for each answer whose prompt does not begin the training text.
    pub fn check_prompts(&self, checked: &mut RowFindings) -> Result<(), TextError> {
        let answers: Vec<usize> = self.answer_indices().collect();
        let prefixes = PrefixTokenCounts::new(self.tokenizer, &self.supervised.text)?;
        let chosen = answers.len().min(MAX_CHECKED_ANSWERS);
        for place in 0..chosen {
            let index = answers[place * (answers.len() - 1) / (chosen - 1).max(1)];
            self.check_prompt(index, &prefixes, checked)?;
        }
        Ok(())
    }

    /// Indices of assistant messages that follow a user or a tool.
    fn answer_indices(&self) -> impl Iterator<Item = usize> {
        let messages = &self.conversation.messages;
        (1..messages.len()).filter(|&index| {
            messages[index].role == Role::Assistant
                && matches!(messages[index - 1].role, Role::User | Role::Tool)
        })
    }

    /// Checks that the training text begins with the prompt of an answer. The answer's reasoning
    /// tells whether thinking was on. An answer before the last user message may match another
    /// prompt, because templates drop earlier reasoning and empty think blocks; such matches are
    /// counted.
    fn check_prompt(
        &self,
        index: usize,
        prefixes: &PrefixTokenCounts<'_>,
        checked: &mut RowFindings,
    ) -> Result<(), TextError> {
        let messages = &self.conversation.messages;
        let message = &messages[index];
        let (inline, _) = reasoning::split_reasoning(&message.content);
        let thinks =
            message.reasoning_content.as_deref().is_some_and(|reasoning| !reasoning.trim().is_empty())
                || !inline.is_empty();
        let earlier = messages[index..].iter().any(|message| message.role == Role::User);
        let modes: &[Option<bool>] = match (thinks, earlier) {
            (true, _) => &[Some(true), None],
            (false, true) => &[Some(false), None, Some(true)],
            (false, false) => &[Some(false)],
        };
        let before = self.template.with_system_and_prefix(&messages[..index]);
        let mut tried: Vec<String> = Vec::new();
        let mut first = None;
        for &mode in modes {
            let prompt = match render_prompt(self.tokenizer, &before, self.conversation.tools.as_ref(), mode)
            {
                Ok(prompt) => prompt,
                Err(error) => {
                    let why = error.to_string().replace('\n', " ");
                    checked.problems.push(Problem::Unservable { index, why });
                    return Ok(());
                }
            };
            if tried.contains(&prompt) {
                continue;
            }
            match self.first_difference(&prompt, prefixes)? {
                None => {
                    checked.prompt_mismatch_earlier += usize::from(!tried.is_empty() && !thinks);
                    return Ok(());
                }
                Some(difference) => first.get_or_insert((mode, difference)),
            };
            tried.push(prompt);
        }
        let Some((mode, PromptDifference { at, before, served, trained })) = first else { return Ok(()) };
        let thinking = match mode {
            Some(true) => " with thinking",
            Some(false) => " without thinking",
            None => "",
        };
        checked.problems.push(Problem::Served { index, at, before, thinking, served, trained });
        Ok(())
    }

    /// The first token, within the maximal length, at which the training text differs from the
    /// prompt.
    fn first_difference(
        &self,
        prompt: &str,
        prefixes: &PrefixTokenCounts<'_>,
    ) -> Result<Option<PromptDifference>, TextError> {
        let trained = &self.supervised.input_ids;
        let (shared, ids) = match self.supervised.served {
            // The served ids differ from the text's ids.
            Served::DiffersFromText => (0, self.tokenizer.encode(prompt)?),
            Served::Unknown | Served::SameAsText => prefixes.ids_after_shared(prompt)?,
        };
        let differs = |&at: &usize| trained.get(shared + at).map_or(self.is_whole(), |&id| id != ids[at]);
        let Some(at) = (0..ids.len()).find(differs) else { return Ok(None) };
        let shown = |ids: &[i64]| self.tokenizer.decode(ids, false);
        let token = |id: Option<&i64>| id.map_or_else(|| Ok("the end".into()), |&id| shown(&[id]));
        Ok(Some(PromptDifference {
            at: shared + at,
            before: shown(
                &trained[(shared + at).saturating_sub(TOKENS_BEFORE).min(trained.len())
                    ..(shared + at).min(trained.len())],
            )?,
            served: token(ids.get(at))?,
            trained: token(trained.get(shared + at))?,
        }))
    }

    /// Whether the training text was not truncated.
    fn is_whole(&self) -> bool {
        self.supervised.untruncated_len == self.supervised.input_ids.len()
    }
}

/// The first difference between a prompt and a training text.
struct PromptDifference {
    at: usize,
    before: String,
    served: String,
    trained: String,
}
