//! Whether a training text continues the prompts that a server renders before each answer.

use crate::conversation::Conversation;
use crate::error::TextError;
use crate::mask::Supervised;
use crate::message::Role;
use crate::problem::{Checked, Problem};
use crate::prompt::prompt_text;
use crate::rules::ChatTemplate;
use crate::thoughts;
use crate::tokenizer::ChatTokenizer;

/// Tokens shown before a difference.
const TOKENS_BEFORE: usize = 3;

/// A conversation beside the prompts that lead to its answers.
pub struct Context<'a> {
    pub tokenizer: &'a ChatTokenizer,
    pub template: &'a ChatTemplate,
    pub conversation: &'a Conversation,
    pub supervised: &'a Supervised,
}

impl Context<'_> {
    /// Adds to `checked` each answer whose prompt is not how the training text begins.
    pub fn check_prompts(&self, checked: &mut Checked) -> Result<(), TextError> {
        self.answers().try_for_each(|index| self.check_prompt(index, checked))
    }

    /// The messages that answer a user or a tool.
    fn answers(&self) -> impl Iterator<Item = usize> {
        let messages = &self.conversation.messages;
        (1..messages.len()).filter(|&index| {
            messages[index].role == Role::Assistant
                && matches!(messages[index - 1].role, Role::User | Role::Tool)
        })
    }

    /// Checks that the training text begins with the prompt for an answer. Whether the answer was given with thinking is
    /// told by its thoughts. An answer before the last question may also stand behind another prompt, because templates
    /// take thoughts and their empty blocks out of what lies behind; that is counted.
    fn check_prompt(&self, index: usize, checked: &mut Checked) -> Result<(), TextError> {
        let messages = &self.conversation.messages;
        let message = &messages[index];
        let (inline, _) = thoughts::split(&message.content);
        let thinks = message.reasoning_content.as_deref().is_some_and(|thoughts| !thoughts.trim().is_empty())
            || !inline.is_empty();
        let earlier = messages[index..].iter().any(|message| message.role == Role::User);
        let modes: &[Option<bool>] = match (thinks, earlier) {
            (true, _) => &[Some(true), None],
            (false, true) => &[Some(false), None, Some(true)],
            (false, false) => &[Some(false)],
        };
        let before = self.template.complete(&messages[..index]);
        let mut tried: Vec<String> = Vec::new();
        let mut first = None;
        for &mode in modes {
            let prompt = match prompt_text(self.tokenizer, &before, self.conversation.tools.as_ref(), mode) {
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
            match self.difference(&prompt)? {
                None => {
                    checked.outside_their_prompt += usize::from(!tried.is_empty() && !thinks);
                    return Ok(());
                }
                Some(difference) => first.get_or_insert((mode, difference)),
            };
            tried.push(prompt);
        }
        let Some((mode, Difference { at, before, served, trained })) = first else { return Ok(()) };
        let thinking = match mode {
            Some(true) => " with thinking",
            Some(false) => " without thinking",
            None => "",
        };
        checked.problems.push(Problem::Served { index, at, before, thinking, served, trained });
        Ok(())
    }

    /// The first token, within the maximal length, in which the training text leaves the prompt.
    fn difference(&self, prompt: &str) -> Result<Option<Difference>, TextError> {
        let (ids, trained) = (self.tokenizer.encode(prompt)?, &self.supervised.input_ids);
        let differs = |&at: &usize| trained.get(at).map_or(self.is_whole(), |&id| id != ids[at]);
        let Some(at) = (0..ids.len()).find(differs) else { return Ok(None) };
        let shown = |ids: &[i64]| self.tokenizer.decode(ids, false);
        let token = |ids: &[i64]| match ids.get(at) {
            Some(&id) => shown(&[id]),
            None => Ok("the end".into()),
        };
        Ok(Some(Difference {
            at,
            before: shown(&ids[at.saturating_sub(TOKENS_BEFORE)..at])?,
            served: token(&ids)?,
            trained: token(trained)?,
        }))
    }

    /// Whether nothing was cut off the training text.
    fn is_whole(&self) -> bool {
        self.supervised.untruncated_len == self.supervised.input_ids.len()
    }
}

/// Where a prompt and a training text part.
struct Difference {
    at: usize,
    before: String,
    served: String,
    trained: String,
}
