//! One model that answers conversations: chat template, engine, stop strings and thoughts. [`http`] puts the OpenAI API around
//! it; within a process [`ChatModel`] is asked directly.

mod body;
mod defaults;
mod engine;
mod error;
mod fields;
pub mod http;
mod metrics;
mod ranges;
mod reply;
mod schedule;
mod stop;
mod thinking;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::Path;
use std::sync::Arc;

use deepspec_core::usage;
use deepspec_engine::Request;
use deepspec_text::{ChatTokenizer, Message, RenderOptions, Role, TextError, generation_prompt};
use serde_json::Value;

pub use body::{ChatRequest, parse};
pub use defaults::Defaults;
pub use engine::{EngineArgs, Load};
pub use error::ChatError;
pub use reply::{Reply, Usage};
pub use thinking::Delta;

use engine::EngineThread;

/// Names the randomness of every answer, so that seed and prompt alone decide it.
const REQUEST_ID: &str = "chat";

/// Bytes of a text for each token of the context that are tokenised to see whether it fits. Languages take 1 to 6.
const BYTES_PER_TOKEN: usize = 8;

/// A loaded model with its tokenizer.
pub struct ChatModel {
    tokenizer: ChatTokenizer,
    stop_ids: Arc<[i64]>,
    defaults: Defaults,
    engine: EngineThread,
}

impl ChatModel {
    /// Loads the model in `dir` and starts its engine.
    ///
    /// # Errors
    /// If a file is missing or does not fit the others.
    pub fn load(dir: &Path, args: &EngineArgs) -> anyhow::Result<Self> {
        let tokenizer = ChatTokenizer::load(dir)?;
        if let Some(draft) = &args.draft
            && deepspec_drafters::is_language_model(draft)?
            && let Err(error) = tokenizer.check_drafter(draft)
        {
            usage!("--draft {error}");
        }
        let stop_ids: Arc<[i64]> = deepspec_models::stop_ids(dir, tokenizer.eos_token_id())?.into();
        tokenizer.report_ends(&stop_ids);
        let defaults = Defaults::read(dir);
        Ok(Self { tokenizer, stop_ids, defaults, engine: EngineThread::start(dir, args)? })
    }

    /// Says so where requests that leave thinking to the template are answered with it, for the other commands ask without.
    pub fn report_thinking(&self) {
        let question = [Message::new(Role::User, "Hi")];
        let prompt = |thinking| generation_prompt(&self.tokenizer, &question, None, thinking).ok();
        let unsaid = prompt(None);
        if unsaid.is_some() && unsaid == prompt(Some(true)) && unsaid != prompt(Some(false)) {
            tracing::info!(
                "requests without chat_template_kwargs.enable_thinking are answered with thinking on, the template's default; \
                 deepspec-eval run and load ask without thinking"
            );
        }
    }

    /// Whether the tokenizer has all of these ids.
    pub fn knows(&self, ids: &[i64]) -> bool {
        ids.iter().all(|&id| self.tokenizer.token(id).is_some())
    }

    /// What requests have that say nothing.
    pub fn defaults(&self) -> &Defaults {
        &self.defaults
    }

    /// Begins an answer. Dropping the reply cancels it.
    ///
    /// # Errors
    /// If the template refuses the messages or the prompt is too long.
    pub fn start(&self, request: &ChatRequest) -> Result<Reply, ChatError> {
        let tools = (!request.tools.is_empty()).then(|| Value::from(request.tools.clone()));
        let options =
            RenderOptions { add_generation_prompt: true, kwargs: request.template_kwargs.clone(), tools };
        let text = self.tokenizer.render(&request.messages, &options).map_err(text_error)?;
        let context = self.engine.context();
        self.check_length(&text, context)?;
        let prompt = self.tokenizer.encode(&text).map_err(text_error)?;
        let length = prompt.len();
        let room = context.saturating_sub(length);
        if room == 0 {
            return Err(ChatError::TooLong { prompt: length, context });
        }
        let own = if request.ignore_eos { &[][..] } else { &self.stop_ids };
        let stop_ids: Arc<[i64]> = own.iter().chain(&request.stop_token_ids).copied().collect();
        let news = self.engine.submit(Request {
            id: REQUEST_ID.into(),
            prompt: prompt.clone(),
            sampling: request.sampling,
            max_new_tokens: request.max_tokens.map_or(room, |limit| limit.min(room)),
            stop_ids: stop_ids.to_vec(),
        });
        Ok(Reply::new(news, self.tokenizer.stream(&text), &text, prompt, stop_ids, &request.stop))
    }

    /// Refuses a text that cannot fit, without tokenising all of it: a beginning alone has more tokens than the context.
    fn check_length(&self, text: &str, context: usize) -> Result<(), ChatError> {
        let mut least = context.saturating_mul(BYTES_PER_TOKEN);
        while text.len() > least {
            let end = (least..=text.len()).find(|&at| text.is_char_boundary(at)).unwrap_or(text.len());
            let begun = self.tokenizer.encode(&text[..end]).map_err(text_error)?.len();
            // What follows may merge with the last token of the beginning.
            if begun > context + 1 {
                return Err(ChatError::TooLong { prompt: begun, context });
            }
            least = least.saturating_mul(2);
        }
        Ok(())
    }

    /// What the engine is doing.
    pub fn load_now(&self) -> &Load {
        self.engine.load()
    }

    /// Tokens that one conversation may hold.
    pub fn context(&self) -> usize {
        self.engine.context()
    }
}

fn text_error(error: TextError) -> ChatError {
    match error {
        TextError::Refused { .. } | TextError::Render { .. } | TextError::Endless { .. } => {
            ChatError::Template(error.to_string())
        }
        other => ChatError::Internal(other.to_string()),
    }
}

/// A number that nobody could foresee, for requests without a seed and for names.
pub fn fresh_number() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use serde_json::json;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        engine: EngineArgs,
    }

    fn tiny(context: &str) -> ChatModel {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-target");
        let line = ["x", "--device", "cpu", "--slots", "1", "--max-context", context];
        ChatModel::load(&dir, &Line::parse_from(line).engine).unwrap()
    }

    fn asked(model: &ChatModel, text: &str) -> Result<Reply, ChatError> {
        let body = json!({"messages": [{"role": "user", "content": text}], "max_tokens": 1});
        model.start(&parse(body.to_string().as_bytes(), "m", model.defaults(), 5).unwrap())
    }

    #[test]
    fn prompts_that_cannot_fit_are_refused_by_their_beginning() {
        let model = tiny("64");
        let long = "word ".repeat(1_400_000);
        match asked(&model, &long).map(|_| ()).unwrap_err() {
            // Of more than a million tokens.
            ChatError::TooLong { prompt, context } => {
                assert!(context == 64 && prompt > 64 && prompt <= 64 * BYTES_PER_TOKEN, "{prompt}");
            }
            other => panic!("{other}"),
        }
        let marks = "<|endoftext|>".repeat(100_000);
        match asked(&model, &marks).map(|_| ()).unwrap_err() {
            ChatError::TooLong { prompt, .. } => assert!(prompt < 64 * BYTES_PER_TOKEN, "{prompt}"),
            other => panic!("{other}"),
        }
        // A text of few tokens and many bytes is not refused by its bytes.
        let marks = "<|endoftext|>".repeat(50);
        assert!(marks.len() > 64 * BYTES_PER_TOKEN);
        assert!(asked(&model, &marks).is_ok());
        // Whatever the length, what fits is answered and what does not is refused.
        for words in 0..160 {
            let text = "word ".repeat(words);
            let request = [Message::new(Role::User, text.as_str())];
            let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
            let rendered = model.tokenizer.render(&request, &options).unwrap();
            let fits = model.tokenizer.encode(&rendered).unwrap().len() < 64;
            assert_eq!(asked(&model, &text).is_ok(), fits, "{words} words");
        }
    }
}
